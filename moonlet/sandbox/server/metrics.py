"""Counters and latencies of the service for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from moonlet.errors import (
    BackendUnavailableError,
    SandboxDiedError,
    SandboxLimitError,
    SandboxNotFoundError,
    SandboxStateError,
    SandboxTimeoutError,
    StorageError,
    TemplateError,
)
from moonlet.sandbox.api import SandboxInfo

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_REASONS: dict[type[Exception], str] = {
    SandboxNotFoundError: "not_found",
    SandboxStateError: "state",
    SandboxTimeoutError: "timeout",
    SandboxLimitError: "limit",
    BackendUnavailableError: "backend_unavailable",
    TemplateError: "template",
    StorageError: "storage",
}


def failure_reason(error: BaseException) -> str:
    """A short fixed word for an error, so that the number of time series stays small."""
    if isinstance(error, SandboxDiedError):
        return str(error.reason)
    return next((word for kind, word in _REASONS.items() if isinstance(error, kind)), "other")


class Metrics:
    """One registry per service, so that two in one process do not mix."""

    def __init__(self, num_reaped: Callable[[], int]) -> None:
        from prometheus_client import CollectorRegistry, Gauge, Histogram
        from prometheus_client import Counter as TotalCounter

        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            "moonlet_sandbox_operation_seconds",
            "Time that an operation took, successful or not",
            ["operation"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._failures = TotalCounter(
            "moonlet_sandbox_failures", "Operations that failed", ["operation", "reason"], registry=self.registry
        )
        self.refused = TotalCounter(
            "moonlet_sandbox_refused",
            "Requests turned away before they were looked at",
            ["status"],
            registry=self.registry,
        )
        self.streams = Gauge("moonlet_sandbox_streams", "Streams that are open", registry=self.registry)
        self.lost_audit_lines = Gauge(
            "moonlet_sandbox_audit_lines_lost", "Audit lines that could not be written", registry=self.registry
        )
        reaped = Gauge("moonlet_sandbox_reaped", "Leftovers that the reaper removed", registry=self.registry)
        reaped.set_function(num_reaped)
        self._sandboxes = Gauge(
            "moonlet_sandboxes", "Sandboxes by state and backend", ["state", "backend"], registry=self.registry
        )

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Time what happens inside; an error is counted by its reason and goes on."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            self._failures.labels(operation, failure_reason(error)).inc()
            raise
        finally:
            self._seconds.labels(operation).observe(time.perf_counter() - start)

    def text(self, infos: Iterable[SandboxInfo]) -> bytes:
        """All of it in Prometheus' text format, with the sandboxes counted anew so that nothing drifts."""
        from prometheus_client import generate_latest

        self._sandboxes.clear()
        for (state, backend), number in Counter((info.state.value, info.backend) for info in infos).items():
            self._sandboxes.labels(state, backend).set(number)
        return generate_latest(self.registry)
