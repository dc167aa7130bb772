"""How an error becomes an answer of the control API, and how a client of ours gets the error back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from moonlet.errors import (
    BackendUnavailableError,
    ConfigError,
    MissingDependencyError,
    MoonletError,
    SandboxDiedError,
    SandboxLimitError,
    SandboxNotFoundError,
    SandboxStateError,
    SandboxTimeoutError,
    StorageError,
    TemplateError,
)

log = logging.getLogger(__name__)

# The status and the word under which clients of ours find the error's class again.
_ANSWERS: tuple[tuple[type[Exception], int, str], ...] = (
    (SandboxNotFoundError, 404, "not_found"),
    (SandboxDiedError, 410, "died"),
    (SandboxStateError, 409, "state"),
    (SandboxTimeoutError, 504, "timeout"),
    (SandboxLimitError, 429, "limit"),
    (BackendUnavailableError, 400, "backend_unavailable"),
    (TemplateError, 400, "template"),
    (ConfigError, 400, "config"),
    (StorageError, 507, "storage"),
    (MissingDependencyError, 501, "missing_dependency"),
    (MoonletError, 500, "sandbox"),
)
ERROR_CLASSES = {word: kind for kind, _, word in _ANSWERS}


class ApiError(Exception):
    """An answer that is an error of the caller's own making."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_body(status: int, message: str, word: str = "") -> dict[str, Any]:
    return {"code": status, "message": message} | ({"error_code": word} if word else {})


def describe_error(error: Exception) -> tuple[dict[str, Any], dict[str, str]]:
    """Body and headers for an error; what we did not expect is logged and told without details."""
    if isinstance(error, ApiError):
        return error_body(error.status, str(error)), {}
    for kind, status, word in _ANSWERS:
        if isinstance(error, kind):
            body = error_body(status, str(error), word)
            if isinstance(error, SandboxDiedError):
                body["reason"] = str(error.reason)
            is_limit = isinstance(error, SandboxLimitError)
            return body, {"Retry-After": str(max(1, round(error.retry_after_s)))} if is_limit else {}
    log.error("A request failed", exc_info=error)
    return error_body(500, "the service failed; its log says how"), {}


def error_from(body: Mapping[str, Any], headers: Mapping[str, str]) -> Exception | None:
    """The error that `describe_error` described, None for a body of another service."""
    kind = ERROR_CLASSES.get(body.get("error_code", ""))
    message = str(body.get("message", ""))
    if kind is SandboxDiedError:
        return SandboxDiedError(message, str(body.get("reason", "crash")))
    if kind is SandboxLimitError:
        return SandboxLimitError(message, float(headers.get("retry-after", "1")))
    if kind is MissingDependencyError:
        return MoonletError(message)
    return kind(message) if kind else None  # type: ignore[call-arg]
