"""Where saved pieces of model state go when the engine's memory is needed for others: RAM, disk, Redis, Mooncake, S3.

One batch protocol (`StateStore`) in front of any stack of tiers. Whatever happens below it, a caller gets the bytes that
were put under a key, or nothing, within its deadline.

    open_store ──> TieredStore ──> GuardedTier ──> Tier (RamTier, DiskTier, RedisTier, MooncakeTier, ArchiveTier)
                   down and up     deadlines,      blobs by key; may fail, hang or lie
                                   checksums
"""

from moonlet.serve.state_store.disk_tier import DiskTier
from moonlet.serve.state_store.guard import GuardedTier
from moonlet.serve.state_store.lane import Patience
from moonlet.serve.state_store.opening import open_store
from moonlet.serve.state_store.protocol import StateStore, StoreStats
from moonlet.serve.state_store.ram_tier import RamTier
from moonlet.serve.state_store.tier import Tier
from moonlet.serve.state_store.tiered import TieredStore

__all__ = [
    "DiskTier",
    "GuardedTier",
    "Patience",
    "RamTier",
    "StateStore",
    "StoreStats",
    "Tier",
    "TieredStore",
    "open_store",
]
