"""The loaded C++ kernels: one library, opened once, its functions called through ctypes.

The functions release Python's lock, allocate only scratch of their own, and give the same bits for any thread count.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moonlet.errors import KernelError
from moonlet.ops.native.build import Build, build


@dataclass(frozen=True)
class Library:
    handle: ctypes.CDLL
    origin: Build
    lanes: int  # float32 numbers in a vector register

    @property
    def how(self) -> str:
        return f"built by {self.origin.compiler} for {self.lanes} lanes"


@lru_cache(maxsize=1)
def load() -> Library:
    """Build (or find) and open the kernels. Raises KernelError with the reason where that fails."""
    origin = build()
    try:
        handle = ctypes.CDLL(str(origin.path))
    except OSError as error:
        raise KernelError(f"the built kernels do not load: {error}; delete {origin.path} and try again") from error
    return Library(handle, origin, int(handle.moonlet_lanes()))


def build_report() -> dict[str, Any]:
    """Compiler, flags, path and vector width, or the reason why there is none."""
    try:
        library = load()
    except KernelError as error:
        return {"native": False, "reason": str(error)}
    origin = library.origin
    return {
        "native": True,
        "compiler": origin.compiler,
        "flags": " ".join(origin.flags),
        "path": str(origin.path),
        "lanes": library.lanes,
    }


def run(name: str, *arguments: Tensor | int | float | None) -> None:
    """Call kernel `name`. Tensors are contiguous (or come with their strides) and stay alive through the call."""
    getattr(load().handle, f"moonlet_{name}")(*(_for_c(argument) for argument in arguments))


def _for_c(argument: Tensor | int | float | None) -> Any:
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    return ctypes.c_void_p(None if argument is None else argument.data_ptr())


def fits(*tensors: Tensor | None, width: int) -> bool:
    """Whether the kernels take these tensors: on the CPU, float32, `width` numbers to a row in whole registers."""
    present = (x for x in tensors if x is not None)
    return width % load().lanes == 0 and all(x.device.type == "cpu" and x.dtype == torch.float32 for x in present)
