"""Fixtures of the op tests: every kernel setting that runs here, and comparison by ratio."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonlet.errors import KernelError
from moonlet.ops.backend import use_kernels


@pytest.fixture(params=["native", "torch", "naive"])
def which_kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs under each kernel setting; native is skipped, with the reason, where there is no compiler."""
    try:
        setting = use_kernels(request.param)
        name = setting.__enter__()
    except KernelError as error:
        pytest.skip(str(error))
    yield name
    setting.__exit__(None, None, None)
