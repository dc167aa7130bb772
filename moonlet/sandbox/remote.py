"""`RemoteSandbox`: a sandbox of any service that speaks the API of E2B: ours, AgentENV or E2B's cloud."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moonlet.errors import GuestFileError, SandboxError, SandboxNotFoundError, SandboxStateError, StorageError
from moonlet.sandbox.api import (
    ExecResult,
    FileEvent,
    FileInfo,
    Process,
    ProcessInfo,
    Sandbox,
    SandboxInfo,
    SandboxSpec,
    State,
)
from moonlet.sandbox.remote_bodies import (
    connect_body,
    create_body,
    file_info,
    info_from_detail,
    lifetime_s,
    process_info,
    version_of,
    whole_seconds,
)
from moonlet.sandbox.remote_process import RemoteProcess
from moonlet.sandbox.remote_service import CallError, RemoteService
from moonlet.sandbox.server.answers import error_from
from moonlet.sandbox.server.auth import is_sandbox_id

_OCTET_STREAM_SINCE = (0, 5, 7)
_EVENT_KINDS = ("create", "write", "remove", "rename", "chmod")


class RemoteSandbox(Sandbox):
    """Made by `create` or `attach`. Without a running event loop use `SyncSandbox`."""

    def __init__(self, service: RemoteService, body: Mapping[str, Any], ttl_s: float | None) -> None:
        self.id = str(body["sandboxID"])
        self._service, self._ttl_s = service, ttl_s
        self._is_ours = isinstance(body.get("moonlet"), Mapping)
        self._access = service.access(body)
        self._envd = version_of(str(body.get("envdVersion", "")))
        self._processes: list[RemoteProcess] = []
        self._is_let_go = False

    @classmethod
    async def create(  # type: ignore[override]
        cls, spec: SandboxSpec | None = None, *, url: str, api_key: str, traffic_url: str | None = None
    ) -> RemoteSandbox:
        """A new sandbox of the service at `url`. `traffic_url`: where its files and commands are, if it is elsewhere.

        Raises BackendUnavailableError if the service cannot be reached, SandboxLimitError, TemplateError.
        """
        spec, service = spec or SandboxSpec(), RemoteService(url, api_key, traffic_url=traffic_url)
        try:
            body = await service.sandboxes("POST", "", create_body(spec), is_safe=False)
        except BaseException:
            await service.aclose()
            raise
        return cls(service, body, spec.ttl_s)

    @classmethod
    async def attach(  # type: ignore[override]
        cls, sandbox_id: str, *, url: str, api_key: str, traffic_url: str | None = None
    ) -> RemoteSandbox:
        """An existing sandbox, resumed if it is paused."""
        if not is_sandbox_id(sandbox_id):
            raise SandboxNotFoundError(f"{sandbox_id!r} is no id of a sandbox")
        service = RemoteService(url, api_key, traffic_url=traffic_url)
        try:
            found = await service.sandboxes("GET", f"/{sandbox_id}")
            ttl_s = lifetime_s(found)
            is_ours = isinstance(found.get("moonlet"), Mapping)
            body = await service.sandboxes(
                "POST", f"/{sandbox_id}/connect", connect_body(is_ours, None if is_ours else ttl_s)
            )
        except BaseException:
            await service.aclose()
            raise
        return cls(service, body, ttl_s)

    async def aclose(self) -> None:
        """Let go of the connections; the sandbox lives on."""
        if self._is_let_go:
            return
        self._is_let_go = True
        for process in self._processes:
            process.abandon()
        await self._service.aclose()

    # -- commands -----------------------------------------------------------------------------------------------------
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        process = await self._launch(command, timeout_s, env, cwd, stdin=stdin is not None)
        feeder = asyncio.ensure_future(_feed(process, stdin)) if stdin is not None else None
        try:
            return await process.wait()
        except BaseException:
            await asyncio.shield(_kill_quietly(process))  # as on the spot: who gives up waiting leaves nothing running
            raise
        finally:
            if feeder is not None:
                feeder.cancel()
            process.abandon()

    async def start(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bool = False,
        tag: str = "",
        pty: tuple[int, int] | None = None,
    ) -> Process:
        process = await self._launch(command, timeout_s, env, cwd, stdin=stdin, tag=tag, pty=pty)
        self._processes.append(process)
        return process

    async def _launch(
        self,
        command: str | Sequence[str],
        timeout_s: float | None,
        env: Mapping[str, str] | None,
        cwd: str | None,
        **options: Any,
    ) -> RemoteProcess:
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        config: dict[str, Any] = {"cmd": argv[0], "args": argv[1:], "envs": dict(env or {})}
        message: dict[str, Any] = {"process": config, "stdin": options["stdin"]}
        if cwd is not None:
            config["cwd"] = cwd
        if options.get("tag"):
            message["tag"] = options["tag"]
        if pty := options.get("pty"):
            message["pty"] = {"size": {"rows": pty[0], "cols": pty[1]}}
        return await RemoteProcess(self._service, self._access, self._is_ours).open("Start", message, timeout_s)

    async def processes(self) -> list[ProcessInfo]:
        answer = await self._call("process.Process/List", {})
        return [process_info(each) for each in answer.get("processes") or []]

    async def process(self, name: str | int) -> Process:
        for info in reversed(await self.processes()):
            if name in (info.pid, info.command_id) or (info.tag and name == info.tag):
                process = RemoteProcess(self._service, self._access, self._is_ours)
                selector = {"pid": info.pid} | ({"moonlet": info.command_id} if self._is_ours else {})
                await process.open("Connect", {"process": selector}, None)
                self._processes.append(process)
                return process
        raise SandboxNotFoundError(f"no running command of sandbox {self.id} has the id, pid or tag {name!r}")

    # -- files --------------------------------------------------------------------------------------------------------
    async def read_file(self, path: str) -> bytes:
        async with self._service.file(self._access, path) as pieces:
            return b"".join([piece async for piece in pieces])

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield data

        await self._upload(path, pieces() if len(data) > 1 << 20 else data, mode)

    async def upload(self, source: Path, path: str) -> None:
        if not await asyncio.to_thread(source.is_file):
            raise GuestFileError(f"{source} is not a file that can be uploaded", "EINVAL")
        mode = (await asyncio.to_thread(source.stat)).st_mode & 0o777
        if self._envd < _OCTET_STREAM_SINCE:
            with await asyncio.to_thread(open, source, "rb") as file:
                await self._upload(path, file, mode)
        else:
            await self._upload(path, read_pieces(source), mode)

    async def _upload(self, path: str, data: Any, mode: int | None) -> None:
        """As an octet stream, or as a form where the service is too old for it."""
        query = f"&mode={mode & 0o7777:o}" if mode is not None and self._is_ours else ""
        if self._envd >= _OCTET_STREAM_SINCE:
            options: dict[str, Any] = {"content": data}
        else:
            content = (
                data if isinstance(data, bytes) or hasattr(data, "read") else b"".join([each async for each in data])
            )
            options = {"files": {"file": (path.rsplit("/", 1)[-1], content)}}
        await self._service.upload(self._access, path, options, query)
        if mode is not None and not self._is_ours:
            result = await self.exec(["chmod", f"{mode & 0o7777:o}", path])
            if result.exit_code:
                raise GuestFileError(f"cannot set the mode of {path}: {result.error_text.strip()}", "EPERM")

    async def download(self, path: str, target: Path) -> None:
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with await asyncio.to_thread(open, unfinished, "xb") as file:
                async with self._service.file(self._access, path) as pieces:
                    async for piece in pieces:
                        await asyncio.to_thread(file.write, piece)
            await asyncio.to_thread(os.replace, unfinished, target)
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error}; free some space or choose another place") from error
        finally:
            unfinished.unlink(missing_ok=True)

    async def list_files(self, path: str = ".", *, depth: int = 1) -> list[FileInfo]:
        answer = await self._file_call("ListDir", {"path": path, "depth": depth})
        return [file_info(entry) for entry in answer.get("entries") or []]

    async def stat(self, path: str) -> FileInfo:
        return file_info((await self._file_call("Stat", {"path": path})).get("entry") or {})

    async def make_dir(self, path: str) -> None:
        try:
            await self._file_call("MakeDir", {"path": path})
        except GuestFileError as error:
            if error.code != "EEXIST" or (await self.stat(path)).kind == "file":
                raise

    async def remove(self, path: str) -> None:
        await self.stat(path)  # services answer that removing what is not there went well
        await self._file_call("Remove", {"path": path})

    async def rename(self, path: str, to: str) -> None:
        await self._file_call("Move", {"source": path, "destination": to})

    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileEvent]:
        message = {"path": path, "recursive": recursive}
        try:
            async with self._service.stream(self._access, "filesystem.Filesystem/WatchDir", message) as messages:
                async for each in messages:
                    event = each.get("filesystem") or {}
                    kind = str(event.get("type", "")).removeprefix("EVENT_TYPE_").lower()
                    if kind in _EVENT_KINDS:
                        yield FileEvent(str(event.get("name", "")), kind)  # type: ignore[arg-type]
        except CallError as error:
            raise error.as_file_error() from error

    async def _file_call(self, name: str, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._service.call(self._access, f"filesystem.Filesystem/{name}", message)
        except CallError as error:
            raise error.as_file_error() from error

    async def _call(self, name: str, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._service.call(self._access, name, message)
        except CallError as error:
            raise error.as_error() from error

    # -- the machine --------------------------------------------------------------------------------------------------
    async def info(self) -> SandboxInfo:
        return info_from_detail(await self._service.sandboxes("GET", f"/{self.id}"))

    async def set_timeout(self, ttl_s: float | None) -> None:
        body = {"timeout": ttl_s if self._is_ours else whole_seconds(ttl_s)}
        await self._service.sandboxes("POST", f"/{self.id}/timeout", body)
        self._ttl_s = ttl_s

    async def pause(self) -> None:
        try:
            await self._service.sandboxes("POST", f"/{self.id}/pause", {})
        except SandboxStateError:
            if (await self.info()).state not in (State.PAUSED, State.PAUSING):
                raise

    async def resume(self) -> None:
        ttl_s = None if self._is_ours else self._ttl_s
        body = await self._service.sandboxes("POST", f"/{self.id}/connect", connect_body(self._is_ours, ttl_s))
        self._access = self._service.access(body)

    async def snapshot(self, name: str | None = None) -> str:
        body = {"name": name} if name else {}
        return str((await self._service.sandboxes("POST", f"/{self.id}/snapshots", body, is_safe=False))["snapshotID"])

    async def fork(self, count: int = 1) -> list[Sandbox | Exception]:
        body: dict[str, Any] = {"count": count}
        if not self._is_ours:
            body["timeout"] = whole_seconds(self._ttl_s)
        answers = await self._service.sandboxes("POST", f"/{self.id}/fork", body, is_safe=False)
        return [self._child(answer) for answer in answers or []]

    def _child(self, answer: Mapping[str, Any]) -> Sandbox | Exception:
        if body := answer.get("sandbox"):
            return RemoteSandbox(self._service.share(), body, self._ttl_s)
        error = answer.get("error") or {}
        return error_from(error, {}) or SandboxError(f"the fork failed: {error.get('message', 'no reason was given')}")

    async def destroy(self) -> None:
        try:
            await self._service.sandboxes("DELETE", f"/{self.id}")
        except SandboxNotFoundError:
            pass
        finally:
            await self.aclose()


async def read_pieces(source: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(open, source, "rb") as file:
        while piece := await asyncio.to_thread(file.read, 1 << 20):
            yield piece


async def _feed(process: RemoteProcess, data: bytes) -> None:
    try:
        await process.write_stdin(data, close=True)
    except SandboxError:
        return  # it ended or closed its input before it had read all: as in a pipeline


async def _kill_quietly(process: RemoteProcess) -> None:
    with contextlib.suppress(SandboxError, CallError):
        await process.kill()
