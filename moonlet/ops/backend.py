"""Which kernels run: chosen once in a process, logged once with the reason, and forceable.

- `native`: C++ built by the system's compiler at first use (`ops/native/`); what it does not cover goes to torch;
- `torch`: chunked and fused forms written with torch operations;
- `naive`: the plain definitions of KDA, its inputs and SiTU, for comparison; the rest as in `torch`.

The environment variable MOONLET_KERNELS forces one. Without it: native where a compiler is found and its kernels
load, torch elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from moonlet.errors import KernelError, nearest_name

Kernels = Literal["native", "torch", "naive"]
VARIABLE = "MOONLET_KERNELS"


@dataclass(frozen=True)
class _Choice:
    which: Kernels
    why: str


_choice: _Choice | None = None


def kernels() -> Kernels:
    """The kernels of this process. Raises KernelError where the forced ones are unknown or cannot run here."""
    global _choice
    if _choice is None:
        _choice = _choose(os.environ.get(VARIABLE))
        logging.getLogger("moonlet").info("KDA and its neighbours use %s kernels: %s", _choice.which, _choice.why)
    return _choice.which


@contextmanager
def use_kernels(name: str) -> Iterator[Kernels]:
    """Other kernels inside a `with` block, for tests and comparisons. Raises KernelError as `kernels` does."""
    global _choice
    before, _choice = _choice, _choose(name)
    try:
        yield _choice.which
    finally:
        _choice = before


def kernel_report() -> dict[str, Any]:
    """What `moonlet doctor` prints: which kernels, why, and how the native ones were built (or why they were not)."""
    from moonlet.ops.native import library

    which = kernels()
    assert _choice is not None
    return {"kernels": which, "why": _choice.why, **library.build_report()}


def _choose(forced: str | None) -> _Choice:
    if forced and forced not in get_args(Kernels):
        hint = nearest_name(forced, get_args(Kernels))
        raise KernelError(f"{VARIABLE}={forced} is not known{hint}: use {', '.join(get_args(Kernels))}, or unset it")
    if forced in ("torch", "naive"):
        return _Choice(forced, "forced")
    return _choose_native(is_forced=forced == "native")


def _choose_native(is_forced: bool) -> _Choice:
    from moonlet.ops.native import library

    try:
        how = library.load().how
    except KernelError as error:
        if is_forced:
            raise
        return _Choice("torch", f"native ones cannot run here ({error})")
    return _Choice("native", f"{'forced' if is_forced else 'chosen automatically'}, {how}")
