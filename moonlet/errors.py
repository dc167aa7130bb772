"""Every error that Moonlet raises on purpose.

    MoonletError
    ├── ConfigError            a key is unknown, missing or has a wrong value
    ├── DataError              a corpus is empty, unreadable or not what it says
    ├── CheckpointError        a checkpoint is cut short, of another shape or of another tokenizer
    │   └── NoCheckpointError  there is no complete checkpoint to resume from
    ├── NonFiniteError         a loss or a gradient is NaN or infinite
    ├── StorageError           the disk is full or a file cannot be written
    ├── KernelError            the kernels asked for cannot run here
    ├── MissingDependencyError an optional package is not installed
    ├── RequestError           a request to the engine asks for something that cannot be
    ├── EngineBusyError        the engine has as many requests as it takes; `retry_after_s` says when to try again
    ├── StateRecordError       a saved piece of model state is damaged, incomplete or of another model
    └── SandboxError           a sandbox cannot do what was asked
        ├── SandboxNotFoundError     there is none of this name (any more)
        ├── SandboxStateError        it is in a state in which this makes no sense
        ├── SandboxDiedError         its machine is gone; `reason` says how
        ├── SandboxTimeoutError      it did not answer in time
        ├── SandboxLimitError        too many at once; `retry_after_s` says when to try again
        ├── BackendUnavailableError  this machine cannot run that kind of sandbox
        ├── TemplateError            a template is unknown, broken or cannot be built
        ├── SnapshotError            a stored snapshot is damaged, or a folder cannot be kept as one
        └── GuestFileError           a file operation failed in the guest; `code` is the errno's name

Each message says what happened, where, and what to do about it; the command line prints it without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any


class MoonletError(Exception):
    """Base of all errors that a user can cause or repair. They travel between processes with all that they know."""

    def __reduce__(self) -> tuple[Callable[..., MoonletError], tuple[Any, ...]]:
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[MoonletError], args: tuple[Any, ...], known: dict[str, Any]) -> MoonletError:
    """An unpickled error: by its arguments as exceptions keep them, which are not those of its constructor."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(known)
    return error


class ConfigError(MoonletError):
    """A configuration key is unknown, missing or has a wrong value."""


class DataError(MoonletError):
    """A corpus is empty, unreadable or not what it says."""


class CheckpointError(MoonletError):
    """A checkpoint is incomplete, of another shape, or belongs to another tokenizer."""


class NoCheckpointError(CheckpointError):
    """A run directory holds no complete checkpoint."""


class NonFiniteError(MoonletError):
    """A loss or gradient is NaN or infinite; nothing was updated."""


class StorageError(MoonletError):
    """A file cannot be written (full disk, permissions); what was saved before is intact."""


class KernelError(MoonletError):
    """The kernels asked for cannot run on this machine."""


class MissingDependencyError(MoonletError):
    """An optional package is needed and absent."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}': pip install 'moonlet[{extra}]'")


class RequestError(MoonletError):
    """A request asks for something that cannot be: too long a prompt, a parameter out of range."""


class EngineBusyError(MoonletError):
    """The engine has as many requests as it takes."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StateRecordError(MoonletError):
    """A saved piece of model state is damaged or incomplete, or another model or other weights made it."""


class SandboxError(MoonletError):
    """A sandbox cannot do what was asked."""


class SandboxNotFoundError(SandboxError):
    """There is no sandbox, snapshot or command of this name."""


class SandboxStateError(SandboxError):
    """The sandbox is in a state in which this makes no sense."""


class SandboxDiedError(SandboxError):
    """The machine of the sandbox is gone."""

    def __init__(self, message: str, reason: str = "crash") -> None:
        super().__init__(message)
        self.reason = reason


class SandboxTimeoutError(SandboxError):
    """The machine or its agent did not answer in time."""


class SandboxLimitError(SandboxError):
    """Too many sandboxes at once."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BackendUnavailableError(SandboxError):
    """This machine cannot run that kind of sandbox."""


class TemplateError(SandboxError):
    """A template is unknown, broken or cannot be built."""


class SnapshotError(SandboxError):
    """A stored snapshot is damaged, or a folder holds what a snapshot cannot keep."""


class GuestFileError(SandboxError):
    """A file operation failed in the guest."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def nearest_name(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""
