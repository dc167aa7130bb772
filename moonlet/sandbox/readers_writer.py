"""A lock of one event loop: many readers or one writer; a writer that waits keeps new readers out, but not for ever."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress


class ReadersWriter:
    """Calls to a guest are readers, transitions are writers."""

    def __init__(self) -> None:
        self.num_readers = 0
        self._is_written = False
        self._writers: deque[asyncio.Future[None]] = deque()
        self._readers: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        while self._is_written or self._writers:
            await self._wait(self._readers)
        self.num_readers += 1
        try:
            yield
        finally:
            self.num_readers -= 1
            self._wake()

    @asynccontextmanager
    async def write(
        self, *, patience_s: float | None = None, cut: Callable[[], object] | None = None
    ) -> AsyncIterator[None]:
        """Wait for the readers to leave. After `patience_s` `cut` is called once, which must make them leave; without
        `cut` the writer gives up with TimeoutError.
        """
        try:
            await self._acquire(patience_s)
        except TimeoutError:
            if cut is None:
                raise
            cut()
            await self._acquire(None)
        try:
            yield
        finally:
            self._is_written = False
            self._wake()

    @asynccontextmanager
    async def quiet(self, patience_s: float) -> AsyncIterator[None]:
        """As a writer if the readers leave within `patience_s`, else beside them."""
        async with AsyncExitStack() as stack:
            with suppress(TimeoutError):
                await stack.enter_async_context(self.write(patience_s=patience_s))
            yield

    async def _acquire(self, patience_s: float | None) -> None:
        async with asyncio.timeout(patience_s):
            while self._is_written or self.num_readers:
                await self._wait(self._writers)
        self._is_written = True

    async def _wait(self, queue: deque[asyncio.Future[None]] | list[asyncio.Future[None]]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except BaseException:
            queue.remove(turn)
            self._wake()
            raise
        queue.remove(turn)

    def _wake(self) -> None:
        """Let the next ones look again: the first waiting writer, else all readers."""
        if self._is_written:
            return
        if self._writers:
            if self.num_readers == 0 and not self._writers[0].done():
                self._writers[0].set_result(None)
            return
        for turn in self._readers:
            if not turn.done():
                turn.set_result(None)
