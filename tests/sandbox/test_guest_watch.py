"""Watching directories of a guest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox.guest_process import AgentProcess, with_guest

from moonlet.errors import GuestFileError, SandboxError
from moonlet.sandbox.api import FileEvent
from moonlet.sandbox.guest.client import Guest


class Watching:
    """A watch that is set up before anything happens, and what it has told."""

    def __init__(self, guest: Guest, path: str, *, recursive: bool = False) -> None:
        self._guest, self._path, self._recursive = guest, path, recursive
        self._events: AsyncIterator[FileEvent] = guest.watch(path, recursive=recursive)
        self._next: asyncio.Future[FileEvent] | None = None

    async def __aenter__(self) -> Watching:
        self._next = asyncio.ensure_future(anext(self._events))
        await asyncio.sleep(0)  # it has asked
        await self._guest.stream.call("usage")  # the agent answers in order: by now it watches
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)

    async def until(self, path: str, kind: str) -> list[tuple[str, str]]:
        """All events up to this one."""
        seen = []
        async with asyncio.timeout(20):
            while True:
                assert self._next is not None
                event = await self._next
                self._next = asyncio.ensure_future(anext(self._events))
                seen.append((event.path, event.kind))
                if seen[-1] == (path, kind):
                    return seen


def test_what_happens_to_a_file(tmp_path: Path) -> None:
    home = tmp_path / "home"

    async def work(guest: Guest) -> None:
        async with Watching(guest, ".") as watching:
            (home / "file").write_text("x")
            assert await watching.until("file", "write") == [("file", "create"), ("file", "write")]
            os.chmod(home / "file", 0o600)
            assert await watching.until("file", "chmod") == [("file", "chmod")]
            os.rename(home / "file", home / "other")
            assert await watching.until("other", "create") == [("file", "rename"), ("other", "create")]
            os.remove(home / "other")
            assert (await watching.until("other", "remove"))[-1] == ("other", "remove")
            (home / "a\nb\udcff").touch()
            assert (await watching.until("a\nb\udcff", "create"))[-1] == ("a\nb\udcff", "create")
            (home / "sub").mkdir()
            await watching.until("sub", "create")
            (home / "sub" / "unseen").touch()
            (home / "last").touch()
            assert ("sub/unseen", "create") not in await watching.until("last", "create")

    with_guest(tmp_path, work)


def test_directories_that_come_later(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "old" / "deep").mkdir(parents=True)
    (tmp_path / "moved" / "in").mkdir(parents=True)
    (tmp_path / "moved" / "in" / "file").touch()

    async def work(guest: Guest) -> None:
        async with Watching(guest, ".", recursive=True) as watching:
            (home / "old" / "deep" / "file").touch()
            await watching.until("old/deep/file", "create")
            (home / "new" / "er").mkdir(parents=True)
            (home / "new" / "er" / "file").touch()
            await watching.until("new/er/file", "create")
            os.rename(tmp_path / "moved", home / "moved")
            await watching.until("moved/in/file", "create")
            (home / "moved" / "in" / "file").write_text("x")
            await watching.until("moved/in/file", "write")
            os.rename(home / "old", home / "renamed")
            await watching.until("renamed", "create")
            (home / "renamed" / "deep" / "late").touch()
            await watching.until("renamed/deep/late", "create")

    with_guest(tmp_path, work)


def test_too_much_at_once_is_told(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.stream.call("watch", watch="w", path=".")
        for i in range(6000):
            (tmp_path / "home" / str(i)).touch()
        events, overflow, last = 0, False, 0
        while not overflow:
            reply = await guest.stream.call("changes", watch="w", wait_s=20)  # confirms nothing: all is kept
            last, events = reply.number("last"), len(reply.objects("events"))
            overflow = reply.flag("overflow")
        assert events == 4096
        (tmp_path / "home" / "after").touch()
        found: list[dict[str, object]] = []
        while {"path": "after", "kind": "create"} not in found:
            reply = await guest.stream.call("changes", watch="w", after=last, wait_s=20)
            found, last = reply.objects("events"), reply.number("last")
            if reply.flag("overflow"):  # the kernel still held some of the first ones, and it may have been among them
                (tmp_path / "home" / "after").unlink()
                (tmp_path / "home" / "after").touch()

    with_guest(tmp_path, work)


def test_the_iterator_says_that_some_were_lost(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        async with Watching(guest, ".") as watching:
            await guest.exec("i=0; while [ $i -lt 6000 ]; do : > f$i; i=$((i+1)); done")
            with pytest.raises(SandboxError, match="more changed"):
                await watching.until("never", "create")

    with_guest(tmp_path, work)


def test_a_watch_ends_with_its_iterator_and_outlives_its_host(tmp_path: Path) -> None:
    async def run() -> None:
        agent = AgentProcess(tmp_path)
        try:
            first = await agent.open()
            with pytest.raises(GuestFileError) as caught:
                await anext(first.watch("absent"))
            assert caught.value.code == "ENOENT"
            async with Watching(first, "."):
                pass
            await first.stream.call("watch", watch="kept", path=".")
            waiting = first.stream.request("changes", watch="kept", wait_s=20)
            waiting.cancel()
            first.stream.close()
            (tmp_path / "home" / "meanwhile").touch()
            second = await agent.open()
            reply = await second.stream.call("changes", watch="kept", wait_s=20)
            assert reply.objects("events") == [{"path": "meanwhile", "kind": "create"}]
            for i in range(63):  # as many as there may be, with the one above: the iterators' own are closed
                await second.stream.call("watch", watch=str(i), path=".")
            with pytest.raises(GuestFileError) as caught:
                await second.stream.call("watch", watch="one more", path=".")
            assert caught.value.code == "EAGAIN"
            second.stream.close()
        finally:
            assert agent.end() == 0

    asyncio.run(run())
