"""Orthogonalisation for Muon: the polar factor of a matrix, exactly (SVD) and by Newton-Schulz iteration.

With M = U S V^T the polar factor is U V^T. The quintic iteration X <- a X + b (X X^T) X + c (X X^T)^2 X, started from
M / |M|, drives every singular value into about [0.68, 1.14] in five steps; Muon does not need them closer to 1.

B matrices in a batch, R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonlet.ops.precision import matmul_dtype

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
GRAM_ASPECT = 4  # from this ratio of the sides on, iterating on the Gram matrix is cheaper


def polar(matrix_BRC: Tensor) -> Tensor:
    """The definition: U V^T of the singular value decomposition, without directions of singular value zero."""
    u, s, vt = torch.linalg.svd(matrix_BRC, full_matrices=False)
    tolerance = s[..., :1] * max(matrix_BRC.shape[-2:]) * torch.finfo(s.dtype).eps
    return (u * (s > tolerance).unsqueeze(-2).to(u.dtype)) @ vt


def newton_schulz(matrix_BRC: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Approximate polar factors of a batch of equal-shaped matrices. -> same shape, in `dtype`.

    A zero matrix stays zero (an idle expert is not moved).

    Args:
        steps: iterations; five reach the band above for condition numbers up to about 1e3.
        dtype: of the products; default bfloat16 where the hardware multiplies it, else float32; float64 stays float64.
    """
    if dtype is None:
        dtype = torch.float64 if matrix_BRC.dtype == torch.float64 else matmul_dtype(matrix_BRC.device)
    is_tall = matrix_BRC.shape[-2] > matrix_BRC.shape[-1]
    wide = matrix_BRC.mT if is_tall else matrix_BRC
    norm = torch.linalg.matrix_norm(wide.float() if wide.dtype == torch.bfloat16 else wide, keepdim=True)
    x = (wide / norm.clamp_min(torch.finfo(norm.dtype).tiny)).to(dtype).contiguous()
    # In bfloat16 the squared condition number of the Gram form costs too many digits.
    use_gram = x.shape[-1] >= GRAM_ASPECT * x.shape[-2] and dtype != torch.bfloat16
    x = (_iterate_gram if use_gram else _iterate)(x.flatten(0, -3) if x.ndim > 3 else x.view(-1, *x.shape[-2:]), steps)
    x = x.view(wide.shape)
    return x.mT if is_tall else x


def _iterate(x_BRC: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = torch.bmm(x_BRC, x_BRC.mT)
        x_BRC = torch.baddbmm(x_BRC, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x_BRC, beta=a)
    return x_BRC


def _iterate_gram(x_BRC: Tensor, steps: int) -> Tensor:
    """The same polynomial on the short side only: X_n = Q_n X_0 with Q and the Gram matrix both R x R."""
    a, b, c = COEFFICIENTS
    gram, product = torch.bmm(x_BRC, x_BRC.mT), None
    for step in range(steps):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else torch.bmm(factor, product)
        if step + 1 < steps:
            gram = torch.bmm(torch.bmm(factor, gram), factor)
    return x_BRC if product is None else torch.bmm(product, x_BRC)
