"""Which documents are held out: decided by content hash, so neither file order nor file names matter."""

from __future__ import annotations

from collections.abc import Sequence


def is_heldout(content_hash: bytes, fraction: float) -> bool:
    """Whether the document with this sha256 is held out; true for about `fraction` of all documents."""
    return int.from_bytes(content_hash[:8], "big") < fraction * 2**64


def split_hashes(hashes: Sequence[bytes], fraction: float) -> list[bool]:
    """For each document whether it is held out. Of two or more documents at least one is, and at least one is not."""
    held = [is_heldout(content_hash, fraction) for content_hash in hashes]
    if len(hashes) > 1 and not any(held):
        held[hashes.index(min(hashes))] = True
    if len(hashes) > 1 and all(held):
        held[hashes.index(max(hashes))] = False
    return held


def cut_tail(text: str, fraction: float) -> tuple[str, str]:
    """A corpus of one document: its first part is trained on, its last `fraction` is held out; cut at a line end."""
    aim = round(len(text) * (1 - fraction))
    cut = text.rfind("\n", 0, aim) + 1 or aim
    return text[:cut], text[cut:]
