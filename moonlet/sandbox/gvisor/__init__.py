"""Machines of gVisor: a kernel in user space (the Sentry) that can be written to disk with all its processes."""

from moonlet.sandbox.gvisor.backend import GvisorBackend

__all__ = ["GvisorBackend"]
