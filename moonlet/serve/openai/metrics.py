"""The engine's counters in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moonlet.serve.engine_thread import EngineThread

_TOTALS = {
    "num_requests": ("requests", "Requests taken in"),
    "num_preempted": ("preempted", "Times that a request lost its place to another one"),
    "num_prompt_tokens": ("prompt_tokens", "Tokens of prompts"),
    "num_cached_tokens": ("cached_tokens", "Tokens read from the prefix cache"),
    "num_prefill_tokens": ("prefill_tokens", "Tokens of prompts that were computed"),
    "num_decode_tokens": ("decode_tokens", "Tokens computed one by one"),
    "num_steps": ("steps", "Steps of the engine"),
}


class EngineMetrics:
    """A collector that reads the engine when it is asked, without waiting for a step to end."""

    def __init__(self, thread: EngineThread) -> None:
        from prometheus_client import CollectorRegistry

        self._thread = thread
        self._registry = CollectorRegistry()
        self._registry.register(self)  # type: ignore[arg-type]

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        engine = self._thread.engine
        for field, (name, text) in _TOTALS.items():
            yield CounterMetricFamily(f"moonlet_engine_{name}", text, value=getattr(engine.counters, field))
        finished = CounterMetricFamily("moonlet_engine_finished", "Answers by how they ended", labels=["finish"])
        for finish, number in dict(engine.counters.num_finished).items():
            finished.add_metric([finish], number)
        yield finished
        gauges = {
            "running": ("Requests that are read or answered", len(engine.scheduler.running)),
            "waiting": ("Requests that wait", engine.scheduler.num_waiting),
            "free_pages": ("Pages that hold nothing", engine.pool.num_free),
            "pages": ("Pages in all", engine.config.num_pages),
            "weights_version": ("Version of the weights", engine.weights_version),
            "paused": ("1 while no step begins", int(self._thread.is_paused)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"moonlet_engine_{name}", text, value=value)
