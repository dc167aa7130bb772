"""Errors travel between processes with all that they know."""

from __future__ import annotations

import copy
import pickle

import pytest

from moonlet import errors

ERRORS = [
    errors.ConfigError("plain"),
    errors.MissingDependencyError("ray", "ray", "a pool"),
    errors.SandboxDiedError("gone", "oom"),
    errors.SandboxLimitError("full", 2.5),
    errors.GuestFileError("no such file", "ENOENT"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_come_back_as_they_were(error: errors.MoonletError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
