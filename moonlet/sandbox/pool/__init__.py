"""Many sandboxes, few of which run at once: spares ahead of need, fair turns, pause while the model thinks.

lease ── wait for a place ── spare or new machine ── work ── idle (model thinks) ── work ── destroyed
                                                        │                        ^
                                          somebody waits: paused        its turn: resumed
"""

from moonlet.sandbox.pool.config import PoolConfig, PoolStats
from moonlet.sandbox.pool.pool import Lease, Pool

__all__ = ["Lease", "Pool", "PoolConfig", "PoolStats"]
