"""The one contract for document boundaries: `seq_lens`, the lengths of the documents packed into a row."""

from __future__ import annotations

from collections.abc import Sequence


def document_lengths(batch: int, tokens: int, seq_lens: Sequence[int] | None) -> tuple[int, ...]:
    """Lengths of the documents of a [B, T, ...] tensor: B times T, or `seq_lens` of the single packed row.

    Raises ValueError where the tensor and `seq_lens` disagree.
    """
    if batch < 1 or tokens < 1:
        raise ValueError(f"at least one sequence and one token are needed, not a batch of {batch} x {tokens} tokens")
    if seq_lens is None:
        return (tokens,) * batch
    if batch != 1:
        raise ValueError(f"seq_lens describes one packed row, not a batch of {batch}: flatten it to [1, B*T, ...]")
    lengths = tuple(int(length) for length in seq_lens)
    if not lengths or min(lengths) < 1 or sum(lengths) != tokens:
        raise ValueError(f"seq_lens {lengths} must be positive and sum to the {tokens} tokens of the row")
    return lengths
