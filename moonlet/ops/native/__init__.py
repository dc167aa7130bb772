"""C++ kernels beside the torch forms of `ops/`: built at first use, loaded with ctypes, tested against definitions.

Callers ask `usable(width, tensors...)` first: whether native kernels were chosen and take these tensors.
"""

from __future__ import annotations

from torch import Tensor


def usable(*tensors: Tensor | None, width: int) -> bool:
    """Whether native kernels run in this process and take these tensors, `width` numbers to a row."""
    from moonlet.ops.backend import kernels
    from moonlet.ops.native.library import fits

    return kernels() == "native" and fits(*tensors, width=width)
