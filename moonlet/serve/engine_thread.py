"""The engine in a thread of its own, for callers in other threads and in asyncio."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from moonlet.errors import MoonletError
from moonlet.serve.engine import Collector, Engine
from moonlet.serve.sequence import Completion, Request, TokenEvent


class EngineStoppedError(MoonletError):
    """The engine's thread has ended; `__cause__` says why if it failed."""


class EngineThread:
    """Steps the engine whenever it has work. Everything that touches the engine runs in its thread.

    Use as a context manager. A failure of a step ends all requests with the error and is logged; the thread goes on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._jobs: queue.SimpleQueue[tuple[Callable[[Engine], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="moonlet-engine", daemon=True)
        self._is_paused = self._is_stopped = False

    def __enter__(self) -> EngineThread:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Abort what runs and end the thread."""
        if not self._is_stopped:
            self._is_stopped = True
            self._jobs.put(None)
            self._thread.join()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    # -- from any thread ----------------------------------------------------------------------------------------------
    def call(self, job: Callable[[Engine], Any]) -> Future[Any]:
        """Run `job` in the engine's thread, between two steps."""
        future: Future[Any] = Future()
        if self._is_stopped:
            future.set_exception(EngineStoppedError("the engine has been stopped"))
        else:
            self._jobs.put((job, future))
        return future

    def pause(self) -> None:
        """No step begins from now on; running requests keep their states."""
        self.call(lambda _: setattr(self, "_is_paused", True)).result()

    def resume(self) -> None:
        self.call(lambda _: setattr(self, "_is_paused", False)).result()

    def complete(self, request: Request) -> Completion:
        """One request to its end, from a thread that may block."""
        done, collector = threading.Event(), Collector()

        def sink(event: TokenEvent) -> None:
            collector(event)
            if event.finish is not None:
                done.set()

        self.call(lambda engine: engine.submit(request, sink)).result()
        done.wait()
        return collector.completion()

    # -- from asyncio -------------------------------------------------------------------------------------------------
    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Events as they come; leaving the loop early aborts the request. Raises RequestError, EngineBusyError."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[TokenEvent]()

        def sink(event: TokenEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        name = await asyncio.wrap_future(self.call(lambda engine: engine.submit(request, sink)))
        finished = False
        try:
            while not finished:
                event = await events.get()
                finished = event.finish is not None
                yield event
        finally:
            if not finished:
                self.call(lambda engine: engine.abort(name))

    async def generate(self, request: Request) -> Completion:
        """One request to its end; cancelling aborts it."""
        collector = Collector()
        async for event in self.stream(request):
            collector(event)
        return collector.completion()

    # -- the thread ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            is_idle = self._is_paused or not self.engine.has_work
            try:
                job = self._jobs.get(block=is_idle)
            except queue.Empty:
                self._step()
                continue
            if job is None:
                self._abort_all("the engine has been stopped")
                self._refuse_rest()
                return
            function, future = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self.engine))
                except BaseException as error:
                    future.set_exception(error)

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as error:
            logging.getLogger("moonlet").exception("a step of the engine failed; its requests end with the error")
            self._abort_all(f"{type(error).__name__}: {error}")

    def _abort_all(self, reason: str) -> None:
        for sequence in self.engine.scheduler.everyone():
            sink = sequence.sink
            sequence.sink = lambda event, sink=sink: sink(replace(event, error=reason))
            self.engine.abort(sequence.id, "error")

    def _refuse_rest(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job[1].set_exception(EngineStoppedError("the engine has been stopped"))
