"""Calls to something slow, made in a thread of their own so that nobody waits for one longer than agreed."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How long a lane that failed or hung is left alone: doubled by each failure in a row, up to a limit."""

    backoff_s: float = 0.5
    max_backoff_s: float = 30.0

    def pause_s(self, failures: int) -> float:
        return min(self.backoff_s * 2.0 ** min(failures - 1, 60), self.max_backoff_s)


class LaneSkippedError(Exception):
    """The call was not made: the lane failed or hung shortly before, or is closed."""


class LaneLateError(Exception):
    """The call was not done in time. It may still be going on."""


class Lane:
    """Calls in order, one at a time. After a failure, and while an abandoned call still goes on, it takes none.

    The thread is a daemon: one that hangs for ever in a system call does not keep the process.
    """

    def __init__(self, name: str, patience: Patience, *, is_threaded: bool = True) -> None:
        self.name = name
        self._patience = patience
        self._is_threaded = is_threaded
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._abandoned: Future | None = None
        self._posted: Future | None = None
        self._failures = 0
        self._resume_at = 0.0
        self._is_closed = False

    def call(self, work: Callable[[], T], deadline_s: float) -> T:
        """What `work` returns.

        Raises:
            LaneSkippedError, LaneLateError, or what `work` raised.
        """
        if not self._is_threaded:
            return self._call_here(work)
        if deadline_s <= 0:
            raise LaneLateError(self.name)
        job = self._submit(work)
        wait([job], deadline_s)
        # A job that never began is no fault of the tier: the calls before it took the time.
        if job.cancel():
            raise LaneLateError(self.name)
        if not job.done():
            with self._lock:
                self._abandoned = job
            self._note_failure(f"no answer after {deadline_s:.3g} s")
            raise LaneLateError(self.name)
        return self._result(job.result)

    def post(self, work: Callable[[], Any]) -> bool:
        """Make a call without waiting for it; not while another such call is to be made. Whether it was taken."""
        if not self._is_threaded:
            try:
                self._call_here(work)
            except Exception:
                return False
            return True
        with self._lock:
            if self._posted is not None and not self._posted.done():
                return False
        try:
            self._posted = self._submit(work)
        except LaneSkippedError:
            return False
        return True

    def close(self, timeout_s: float) -> None:
        """Take no more calls; give the one that goes on some time to end."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._jobs.put(None)
        if thread is not None:
            thread.join(timeout_s)

    def _call_here(self, work: Callable[[], T]) -> T:
        with self._lock:
            self._check_open()
        return self._result(work)

    def _result(self, produce: Callable[[], T]) -> T:
        try:
            result = produce()
        except Exception as error:
            self._note_failure(f"{type(error).__name__}: {error}")
            raise
        with self._lock:
            was_failing, self._failures = self._failures > 0, 0
        if was_failing:
            log.info("%s works again", self.name)
        return result

    def _submit(self, work: Callable[[], Any]) -> Future:
        job: Future = Future()
        with self._lock:
            self._check_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._jobs.put((job, work))
        return job

    def _check_open(self) -> None:
        if self._abandoned is not None and self._abandoned.done():
            self._abandoned = None
        if self._is_closed or self._abandoned is not None or time.monotonic() < self._resume_at:
            raise LaneSkippedError(self.name)

    def _note_failure(self, reason: str) -> None:
        with self._lock:
            self._failures += 1
            pause_s = self._patience.pause_s(self._failures)
            self._resume_at = time.monotonic() + pause_s
            is_first = self._failures == 1
        log.log(logging.WARNING if is_first else logging.DEBUG, "%s: %s; off for %g s", self.name, reason, pause_s)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, work = item
            if job.set_running_or_notify_cancel():
                try:
                    job.set_result(work())
                except BaseException as error:
                    job.set_exception(error)
            del item, job, work  # a waiting thread must not hold the last values in memory
