"""The HTTP side of `RemoteSandbox`: one service, its paths, its errors, and when a request may be sent again."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from moonlet.errors import (
    BackendUnavailableError,
    GuestFileError,
    SandboxDiedError,
    SandboxError,
    SandboxLimitError,
    SandboxNotFoundError,
    SandboxStateError,
    SandboxTimeoutError,
    StorageError,
)
from moonlet.sandbox.envelope import END, EnvelopeError, EnvelopeReader, envelope
from moonlet.sandbox.server.answers import error_from
from moonlet.sandbox.server.config import ENVD_PORT

if TYPE_CHECKING:
    import httpx

CONTROL_TIMEOUT_S = 300.0  # a create may have to boot a machine, a pause to write its memory
CALL_TIMEOUT_S = 60.0
KEEPALIVE_S = 20  # how often we ask a stream to say that it lives
DEAD_S = 90.0  # a stream that says nothing for so long is dead
MAX_MESSAGE_BYTES = 16 << 20
NUM_TRIES = 5
MAX_WAIT_S = 30.0  # a service that asks for more is not waited for

_JSON = {"Content-Type": "application/json"}
_RETRIED = {429, 502, 503}
_NO_ROUTE = {404, 405}
_FILE_ERRNOS = {
    "not_found": "ENOENT",
    "already_exists": "EEXIST",
    "permission_denied": "EACCES",
    "invalid_argument": "EINVAL",
    "resource_exhausted": "ENOSPC",
    "failed_precondition": "ENOTEMPTY",
}


class CallError(Exception):
    """A call to a sandbox failed; `code` is Connect's, `errno` that of the guest if the service told it."""

    def __init__(self, code: str, message: str, errno: str = "") -> None:
        super().__init__(message)
        self.code, self.errno = code, errno

    def as_file_error(self) -> Exception:
        errno = self.errno or _FILE_ERRNOS.get(self.code)
        return GuestFileError(str(self), errno) if errno else self.as_error()

    def as_error(self) -> Exception:
        match self.code:
            case "not_found":
                return SandboxNotFoundError(str(self))
            case "deadline_exceeded" | "canceled":
                return SandboxTimeoutError(str(self))
            case "unavailable":
                return SandboxStateError(str(self))
            case "resource_exhausted":
                return SandboxLimitError(str(self), 1.0)
        return SandboxError(f"{self.code}: {self}")


@dataclass(frozen=True)
class Access:
    """What a request to one sandbox needs."""

    sandbox_id: str
    url: str
    token: str

    @property
    def headers(self) -> dict[str, str]:
        headers = {"E2b-Sandbox-Id": self.sandbox_id, "E2b-Sandbox-Port": str(ENVD_PORT)}
        return headers | ({"X-Access-Token": self.token} if self.token else {})


class RemoteService:
    """A client of one service. `url` is that of its control API; close it with `aclose` when done."""

    def __init__(self, url: str, api_key: str, *, traffic_url: str | None = None) -> None:
        import httpx

        self.url = url.rstrip("/")
        self._traffic_url = traffic_url
        self._headers = {"X-API-Key": api_key}
        self._num_owners = 1
        self._has_v2: dict[str, bool] = {}  # by method and kind of path, once known
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        is_plain = self.url.startswith("http://") and not (traffic_url or "").startswith("https")
        self._client = httpx.AsyncClient(
            limits=limits,
            timeout=httpx.Timeout(CALL_TIMEOUT_S, connect=10.0),
            verify=not is_plain,  # certificates that nobody shows need not be loaded, which takes longer than a create
        )

    @property
    def _http(self) -> httpx.AsyncClient:
        if self._client.is_closed:
            raise SandboxNotFoundError("this sandbox was destroyed, or let go with `aclose`")
        return self._client

    def share(self) -> RemoteService:
        """This service for one more owner; the connections close when the last one does."""
        self._num_owners += 1
        return self

    async def aclose(self) -> None:
        self._num_owners -= 1
        if self._num_owners == 0:
            await self._client.aclose()

    def access(self, body: Mapping[str, Any]) -> Access:
        """How to reach a sandbox, from what create or connect answered.

        A service at `api.<domain>` has a name per sandbox, `<port>-<id>.<domain>`; any other routes by the headers.
        """
        sandbox_id, parts = str(body["sandboxID"]), urlsplit(self.url)
        host = parts.hostname or ""
        url = self.url
        if self._traffic_url is not None:
            url = self._traffic_url.rstrip("/")
        elif host.startswith("api."):
            url = f"{parts.scheme}://{ENVD_PORT}-{sandbox_id}.{body.get('domain') or host.removeprefix('api.')}"
        return Access(sandbox_id, url, str(body.get("envdAccessToken") or ""))

    # -- the control API ----------------------------------------------------------------------------------------------
    async def sandboxes(self, method: str, path: str = "", body: Any = None, *, is_safe: bool = True) -> Any:
        """A request below `/v2/sandboxes`, or below `/sandboxes` where the service has no such path."""
        kind = f"{method} {'/'.join(part if index % 2 else '' for index, part in enumerate(path.split('/')[1:]))}"
        if self._has_v2.get(kind, True):
            status, answer = await self._control(method, f"/v2/sandboxes{path}", body, is_safe)
            if status < 400:
                self._has_v2[kind] = True
            if status not in _NO_ROUTE or "error_code" in answer:
                return self._checked(status, answer)
        status, answer = await self._control(method, f"/sandboxes{path}", body, is_safe)
        if status < 400:
            self._has_v2.setdefault(kind, False)
        return self._checked(status, answer)

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        return self._checked(*await self._control(method, path, body, True))

    async def pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Any]:
        """The entries of a list that comes in pages."""
        token = ""
        while True:
            parameters = urlencode({**query, "nextToken": token} if token else query)
            response = await self._send("GET", f"{self.url}{path}?{parameters}", self._headers, None, _RETRIED)
            answer = _parsed(response.content)
            if response.status_code >= 400:
                raise _error_of(response.status_code, answer if isinstance(answer, dict) else {})
            for entry in answer or []:
                yield entry
            token = response.headers.get("x-next-token", "")
            if not token:
                return

    def _checked(self, status: int, answer: dict[str, Any]) -> Any:
        if status == 410 and "moonlet" in answer:
            return answer  # all that is known of a sandbox whose machine died
        if status >= 400:
            raise _error_of(status, answer)
        return answer.get("body")

    async def _control(self, method: str, path: str, body: Any, is_safe: bool) -> tuple[int, dict[str, Any]]:
        headers = dict(self._headers)
        if not is_safe:
            headers["Idempotency-Key"] = str(uuid.uuid4())  # the same for every try of this request
        response = await self._send(
            method, self.url + path, headers, body, retried={502, 503} if not is_safe else _RETRIED
        )
        answer = _parsed(response.content)
        if response.status_code >= 400:
            error = answer if isinstance(answer, dict) else {}
            return response.status_code, {**error, "retry-after": response.headers.get("retry-after", "")}
        return response.status_code, {"body": answer}

    async def _send(self, method: str, url: str, headers: dict[str, str], body: Any, retried: set[int]) -> Any:
        import httpx

        for attempt in range(NUM_TRIES):
            is_last = attempt == NUM_TRIES - 1
            try:
                response = await self._http.request(
                    method,
                    url,
                    headers=headers | _JSON,
                    content=None if body is None else json.dumps(body),
                    timeout=httpx.Timeout(CONTROL_TIMEOUT_S, connect=10.0),
                )
            except httpx.TransportError as error:
                if is_last:
                    raise BackendUnavailableError(
                        f"cannot reach {self.url}: {error or type(error).__name__}"
                    ) from error
                wait_s = _backoff_s(attempt)
            else:
                wait_s = _retry_after_s(response.headers) or _backoff_s(attempt)
                if response.status_code not in retried or is_last or wait_s > MAX_WAIT_S:
                    return response
            await asyncio.sleep(wait_s)
        raise AssertionError("the last try answers or raises")

    # -- calls to a sandbox -------------------------------------------------------------------------------------------
    async def call(self, access: Access, name: str, message: dict[str, Any]) -> dict[str, Any]:
        """A single call, like `filesystem.Filesystem/Stat`. Raises CallError, or what `explain` says of a 502."""
        import httpx

        try:
            response = await self._http.post(
                f"{access.url}/{name}",
                headers={**access.headers, **_JSON, "Connect-Protocol-Version": "1"},
                content=json.dumps(message),  # names that are not UTF-8 as escapes
            )
        except httpx.TransportError as error:
            raise SandboxTimeoutError(
                f"sandbox {access.sandbox_id} did not answer: {error or type(error).__name__}"
            ) from error
        if response.status_code >= 400:
            raise await self._call_error(access, response.status_code, response.content)
        answer = _parsed(response.content)
        return answer if isinstance(answer, dict) else {}

    @asynccontextmanager
    async def stream(
        self, access: Access, name: str, message: dict[str, Any], timeout_s: float | None = None
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """A call whose answer is a stream of messages; they raise CallError, and SandboxTimeoutError if the line breaks."""
        import httpx

        headers = {
            **access.headers,
            "Connect-Protocol-Version": "1",
            "Content-Type": "application/connect+json",
            "Keepalive-Ping-Interval": str(KEEPALIVE_S),
        }
        if timeout_s is not None:
            headers["Connect-Timeout-Ms"] = str(max(1, round(timeout_s * 1000)))
        timeout = httpx.Timeout(CALL_TIMEOUT_S, read=DEAD_S, connect=10.0)
        try:
            async with self._http.stream(
                "POST", f"{access.url}/{name}", headers=headers, content=envelope(message), timeout=timeout
            ) as response:
                if response.status_code >= 400:
                    raise await self._call_error(access, response.status_code, await response.aread())
                yield _messages(response.aiter_raw())
        except httpx.TransportError as error:
            raise SandboxTimeoutError(f"the stream of sandbox {access.sandbox_id} broke off: {error}") from error

    @asynccontextmanager
    async def file(self, access: Access, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The content of a file in pieces. Raises GuestFileError."""
        import httpx

        try:
            async with self._http.stream(
                "GET", f"{access.url}/files?path={_quoted(path)}", headers=access.headers
            ) as response:
                if response.status_code >= 400:
                    raise await self._file_error(access, response.status_code, await response.aread())
                yield response.aiter_bytes(256 << 10)
        except httpx.TransportError as error:
            raise SandboxTimeoutError(f"reading {path} from sandbox {access.sandbox_id} broke off: {error}") from error

    async def upload(self, access: Access, path: str, options: Mapping[str, Any], query: str = "") -> None:
        """Write a file; `options` are httpx's `content` or `files`. Raises GuestFileError, StorageError."""
        import httpx

        headers = dict(access.headers)
        if "content" in options:
            headers["Content-Type"] = "application/octet-stream"
        try:
            response = await self._http.post(
                f"{access.url}/files?path={_quoted(path)}{query}", headers=headers, **options
            )
        except httpx.TransportError as error:
            raise SandboxTimeoutError(f"writing {path} to sandbox {access.sandbox_id} broke off: {error}") from error
        if response.status_code >= 400:
            raise await self._file_error(access, response.status_code, response.content)

    async def _call_error(self, access: Access, status: int, content: bytes) -> Exception:
        body = _parsed(content)
        body = body if isinstance(body, dict) else {}
        code = body.get("code")
        if isinstance(code, str):
            return CallError(code, str(body.get("message", "")), str(body.get("errno", "")))
        return await self._explain(access, status, body)

    async def _file_error(self, access: Access, status: int, content: bytes) -> Exception:
        body = _parsed(content)
        body = body if isinstance(body, dict) else {}
        message = str(body.get("message") or content[:200].decode(errors="replace"))
        if status == 502:
            return await self._explain(access, status, body)
        errnos = {400: "EINVAL", 403: "EACCES", 404: "ENOENT", 409: "EEXIST", 507: "ENOSPC"}
        errno = str(body.get("error_code") or errnos.get(status, ""))
        return GuestFileError(message, errno) if errno else _error_of(status, body)

    async def _explain(self, access: Access, status: int, body: dict[str, Any]) -> Exception:
        """A 502 of a service that does not say why: it is paused, gone, or only cannot be reached just now."""
        if status != 502 or error_from(body, {}) is not None:
            return _error_of(status, body)
        try:
            info = await self.sandboxes("GET", f"/{access.sandbox_id}")
        except SandboxError as error:
            return error
        if info.get("state") != "running":
            return SandboxStateError(f"sandbox {access.sandbox_id} is {info.get('state')}: resume it first")
        return SandboxTimeoutError(
            f"sandbox {access.sandbox_id} cannot be reached: {body.get('message', 'status 502')}"
        )


async def _messages(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    reader = EnvelopeReader(MAX_MESSAGE_BYTES)
    try:
        async for chunk in chunks:
            for flags, message in reader.feed(chunk):
                if flags & END:
                    if error := message.get("error"):
                        raise CallError(
                            str(error.get("code", "unknown")), str(error.get("message", "")), error.get("errno", "")
                        )
                    return
                yield message
    except EnvelopeError as error:
        raise SandboxError(f"the service sent what is no Connect stream: {error}") from None
    raise SandboxTimeoutError("the service ended a stream in its middle")


def _quoted(path: str) -> str:
    return quote(path.encode("utf-8", "surrogateescape"), safe="/")


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content) if content else None
    except ValueError:
        return None


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 9 else None


def _backoff_s(attempt: int) -> float:
    return 0.1 * 2**attempt * (0.5 + random.random() / 2)


def _error_of(status: int, body: Mapping[str, Any]) -> Exception:
    """The error of our tree for an answer of the control API."""
    known = error_from(body, {"retry-after": str(body.get("retry-after") or "1")})
    if known is not None:
        return known
    message = str(body.get("message") or f"the service answered with status {status}")
    match status:
        case 404:
            return SandboxNotFoundError(message)
        case 409:
            return SandboxStateError(message)
        case 410:
            return SandboxDiedError(message)
        case 401 | 403:
            return SandboxError(f"the service refuses the API key: {message}")
        case 429:
            return SandboxLimitError(message, _retry_after_s(body) or 1.0)
        case 502 | 503 | 504:
            return SandboxTimeoutError(message)
        case 507:
            return StorageError(message)
    return SandboxError(f"{message} (status {status})")
