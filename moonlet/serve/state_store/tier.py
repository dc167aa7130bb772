"""A place that keeps blobs by key. It may fail, hang, forget and damage them: `GuardedTier` makes that harmless."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence


class Tier(ABC):
    """Blobs by key, called from at most one reading and one writing thread at a time.

    All methods may raise anything. `until` is a time of `time.monotonic()`: whoever asked does not wait longer, so a
    reader may stop there with what it has; writers finish. A blob becomes visible only when all of it is there.

    Attributes:
        name: in counters and logs; never a URL, which may hold a password.
        may_block: calls can take long, so each is made in a thread that the caller need not wait for.
        is_volatile: what it holds dies with this process.
        max_blob_bytes: larger ones are not offered to it.
        evictions: blobs that made room for others.
        on_evict: called with key and blob while the blob can still be read here, so that it is never nowhere.
    """

    name: str
    may_block = True
    is_volatile = False
    max_blob_bytes: int | None = None
    evictions = 0
    on_evict: Callable[[bytes, bytes], None] | None = None

    @abstractmethod
    def read(self, keys: Sequence[bytes], until: float) -> dict[bytes, bytes]: ...

    @abstractmethod
    def write(self, blobs: Mapping[bytes, bytes], until: float) -> None:
        """Store blobs in place of those under the same keys."""

    @abstractmethod
    def contains(self, keys: Sequence[bytes], until: float) -> set[bytes]: ...

    @abstractmethod
    def remove(self, keys: Sequence[bytes], until: float) -> None:
        """Forget blobs; it is no error where there are none."""

    def heads(self, keys: Sequence[bytes], num_bytes: int, until: float) -> dict[bytes, bytes]:
        """The first bytes of blobs, as far as that is cheap: a blob that is here already is not written again."""
        return {}

    def held_keys(self) -> list[bytes]:
        """Keys of a volatile tier, oldest first."""
        return []

    def held_bytes(self) -> int:
        """Bytes of all blobs, where it is known."""
        return 0

    def close(self) -> None:
        """Let go of connections and files."""
        return
