"""A counted resource that is handed out in the order of asking."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class _Ticket:
    wish: object
    answer: asyncio.Future[Any]


class Gate:
    """At most `capacity` units are held at once; who waits longest is next.

    A waiter may also be given a thing that makes the unit needless: `give` takes the first whose `wish` is that thing's.
    `on_wait` is called when somebody starts to wait, `on_return` with a thing that was given to a waiter just cancelled.
    """

    def __init__(self, capacity: int, on_wait: Callable[[], None], on_return: Callable[[Any], None]) -> None:
        self.capacity, self.num_held = capacity, 0
        self._waiting: deque[_Ticket] = deque()
        self._refusal: Callable[[], Exception] | None = None
        self._on_wait, self._on_return = on_wait, on_return

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_held

    def try_acquire(self) -> bool:
        """Take a unit if one is free and nobody waits for it."""
        if self._waiting or self.num_free <= 0:
            return False
        self.num_held += 1
        return True

    async def acquire(self, wish: object = None) -> Any:
        """Wait for a unit and hold it: None. Or whatever was given instead, and no unit is held. Safe to cancel."""
        if self._refusal:
            raise self._refusal()
        if self.try_acquire():
            return None
        ticket = _Ticket(wish, asyncio.get_running_loop().create_future())
        self._waiting.append(ticket)
        self._on_wait()
        try:
            return await ticket.answer
        except asyncio.CancelledError:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            elif not ticket.answer.cancelled() and ticket.answer.exception() is None:
                self._take_back(ticket.answer.result())
            raise

    def give(self, wish: object, thing: Any) -> bool:
        """Give `thing` to the first waiter with this wish; False if there is none."""
        ticket = next((ticket for ticket in self._waiting if ticket.wish is wish and not ticket.answer.done()), None)
        if ticket is None:
            return False
        self._waiting.remove(ticket)
        ticket.answer.set_result(thing)
        return True

    def release(self) -> None:
        """Give a unit back; the next waiter gets it at once."""
        self.num_held -= 1
        while self._waiting and self.num_free > 0:
            ticket = self._waiting.popleft()
            if not ticket.answer.done():
                self.num_held += 1
                ticket.answer.set_result(None)

    def refuse_all(self, error: Callable[[], Exception]) -> None:
        """From now on every waiter gets an error, and who asks later as well."""
        self._refusal = error
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.answer.done():
                ticket.answer.set_exception(error())

    def _take_back(self, thing: Any) -> None:
        if thing is None:
            self.release()
        else:
            self._on_return(thing)
