"""Sandboxes of several hosts: on each a Ray actor that has a manager, in front of them one `Cluster`.

Cluster ── placement ──┬─ actor on host a ── Manager ── machines
                       └─ actor on host b ── Manager ── machines
"""

from moonlet.sandbox.hosts.cluster import Cluster, HostConfig, HostLoad
from moonlet.sandbox.hosts.hosted import HostedSandbox

__all__ = ["Cluster", "HostConfig", "HostLoad", "HostedSandbox"]
