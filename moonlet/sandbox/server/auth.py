"""Who may do what: one API key for the control API, one token per sandbox for its files and processes.

The key and the seed of the tokens are made once and kept in the state directory, readable by the owner only. A token is an
HMAC of the sandbox's id, so nothing need be stored per sandbox and a fork, having its own id, has its own token.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from moonlet.errors import ConfigError
from moonlet.sandbox.server.config import ENVD_PORT

KEY_FILE = "api_key"
SEED_FILE = "token_seed"
_SANDBOX_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HOST = re.compile(r"(\d{1,5})-([A-Za-z0-9][A-Za-z0-9_-]{0,62})\.(.+)")

log = logging.getLogger(__name__)


def is_sandbox_id(text: str) -> bool:
    """Whether `text` can be a sandbox's id; what cannot never reaches the manager or a path."""
    return _SANDBOX_ID.fullmatch(text) is not None


def load_api_key(state_dir: Path) -> str:
    """The key of the service that keeps its state in `state_dir`, made at the first call."""
    return load_secret(state_dir / KEY_FILE, lambda: "e2b_" + secrets.token_hex(20))


def load_secret(path: Path, make) -> str:
    """What the file `path` holds, or `make()` written there (0600) if there is no such file; safe if two do it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(make() + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike rename it fails if another process was first
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    if path.stat().st_mode & 0o077:
        log.warning("%s could be read by others; its mode is now 0600", path)
        path.chmod(0o600)
    secret = path.read_text().strip()
    if len(secret) < 16:
        raise ConfigError(f"{path} does not hold a key of at least 16 characters: delete it to have a new one made")
    return secret


def _is_same(given: str | None, expected: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


class Keys:
    """The secrets of one service and every check against them, in constant time."""

    def __init__(self, state_dir: Path) -> None:
        self.api_key = load_api_key(state_dir)
        self._seed = load_secret(state_dir / SEED_FILE, lambda: secrets.token_hex(32)).encode()

    def accepts(self, headers: Mapping[str, str]) -> bool:
        """Whether these headers carry the API key, as `X-API-Key` or as a bearer token."""
        given = headers.get("x-api-key")
        if given is None:
            scheme, _, rest = headers.get("authorization", "").partition(" ")
            given = rest.strip() if scheme.lower() == "bearer" else None
        return _is_same(given, self.api_key)

    def token(self, sandbox_id: str) -> str:
        """The access token of a sandbox."""
        return hmac.new(self._seed, b"sandbox:" + sandbox_id.encode(), hashlib.sha256).hexdigest()

    def accepts_token(self, sandbox_id: str, headers: Mapping[str, str]) -> bool:
        return _is_same(headers.get("x-access-token"), self.token(sandbox_id))

    def accepts_signature(self, sandbox_id: str, operation: str, query: Mapping[str, str]) -> bool:
        """Whether the query of a file URL is signed for `operation` ("read" or "write") and has not expired.

        The signature is E2B's version 1: SHA-256 over path, operation, user, token and expiry, which only a holder of the
        token can compute.
        """
        parts = [query.get("path", ""), operation, query.get("username", ""), self.token(sandbox_id)]
        expires = query.get("signature_expiration")
        if expires is not None:
            if not expires.isdecimal() or len(expires) > 12 or int(expires) < time.time():
                return False
            parts.append(expires)
        digest = hashlib.sha256(":".join(parts).encode("utf-8", "surrogateescape")).digest()
        return _is_same(query.get("signature"), "v1_" + base64.b64encode(digest).decode().rstrip("="))


def find_target(headers: Mapping[str, str], domain: str | None = None) -> tuple[str, int] | None:
    """The sandbox and port that a request is for: by its headers, else by its host `<port>-<id>.<domain>`, else None.

    Without a `domain` any will do. What is no sandbox id or no port comes back as ("", 0): it is meant for a sandbox, and
    for none that exists.
    """
    sandbox_id = headers.get("e2b-sandbox-id")
    if sandbox_id is not None:
        port = headers.get("e2b-sandbox-port", str(ENVD_PORT))
        is_valid = is_sandbox_id(sandbox_id) and port.isdecimal() and port.isascii() and len(port) <= 5
        return (sandbox_id, int(port)) if is_valid else ("", 0)
    match = _HOST.fullmatch(headers.get("host", "").partition(":")[0])
    if match is None or domain not in (None, match[3]):
        return None
    return match[2], int(match[1])
