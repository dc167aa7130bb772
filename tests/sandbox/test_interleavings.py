"""Random operations at once, with a service that is killed in between (kill -9): nothing acknowledged is ever lost.

A worker process has the manager. It runs a batch of operations at the same time, says of each when it is done, and may be
killed at any moment. A model notes what was acknowledged; the next worker is asked what is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sandbox.managed import machines, managed, names
from sandbox.scripted_backend import ScriptedBackend

from moonlet.errors import GuestFileError, SandboxLimitError, SandboxNotFoundError, SandboxStateError
from moonlet.sandbox.api import SandboxSpec, State
from moonlet.sandbox.lifecycle.box import Box
from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.manager import Manager

_FINE = (SandboxLimitError, SandboxNotFoundError, SandboxStateError)


@dataclass(frozen=True)
class Operation:
    """`target` picks one of the sandboxes that are known when the batch starts; `delay_ms` passes before it."""

    kind: str
    target: int
    delay_ms: int


@dataclass(frozen=True)
class Batch:
    """`kill_after_ms` None: the worker lives through it."""

    operations: tuple[Operation, ...]
    kill_after_ms: int | None


_KINDS = ("create", "pause", "resume", "write", "snapshot", "fork", "destroy", "expire", "exec", "reap")
_operations = st.builds(Operation, st.sampled_from(_KINDS), st.integers(0, 5), st.integers(0, 15))
_batches = st.builds(
    Batch, st.lists(_operations, min_size=1, max_size=8).map(tuple), st.one_of(st.none(), st.integers(0, 60))
)


# -- the worker -------------------------------------------------------------------------------------------------------
async def _serve(folder: Path, frees_memory: bool, link: socket.socket) -> None:
    """Batches come in as lists of (number, kind, sandbox, value, delay); answers go out as (number, result)."""
    reader, writer = await asyncio.open_connection(sock=link)
    settings_ = {"drain_s": 0.05, "max_running": 6, "max_total": 10, "scoring_slack_s": 0.0}
    async with managed(folder, ScriptedBackend(frees_memory=frees_memory), **settings_) as manager:

        async def do(number: int, kind: str, *args: Any) -> None:
            try:
                result = await _do(manager, folder, kind, *args)
            except Exception as error:
                result = error
            writer.write(_frame((number, result)))

        while True:
            size = int.from_bytes(await reader.readexactly(4), "big")
            batch = pickle.loads(await reader.readexactly(size))
            if batch is None:
                return
            await asyncio.gather(*(do(*item) for item in batch))
            writer.write(_frame(None))


async def _do(manager: Manager, folder: Path, kind: str, name: str, value: bytes, delay_ms: int) -> Any:
    await asyncio.sleep(delay_ms / 1000)
    sandbox = LocalSandbox(manager, name)
    match kind:
        case "create":
            return (await manager.create(SandboxSpec(ttl_s=None))).id
        case "write":
            await sandbox.write_file("file", value)
        case "exec":
            with contextlib.suppress(TimeoutError):  # paused in the middle, it waits for a resume that does not come
                async with asyncio.timeout(1):
                    assert (await sandbox.exec("echo on")).text == "on\n"
        case "expire":
            await sandbox.set_timeout(0.001)
        case "fork":
            return [child.id for child in await sandbox.fork(2) if isinstance(child, LocalSandbox)]
        case "reap":
            from moonlet.sandbox.reaper import reap

            await reap(manager._core)
        case "look":
            return await _look(manager, folder)
        case "read":
            await sandbox.set_timeout(None)
            await sandbox.resume()
            with contextlib.suppress(GuestFileError):
                return await sandbox.read_file("file")
        case _:
            return await getattr(sandbox, kind)()


async def _look(manager: Manager, folder: Path) -> dict[str, State]:
    """What is there, once nothing moves any more; fails unless disk, processes and records say the same."""
    core = manager._core
    while any(map(_moves, core.boxes.values())):
        await asyncio.sleep(0.005)
    wanted = set()
    for box in core.boxes.values():
        wanted.add(f"sandboxes/{box.id}")
        if box.machine is not None:
            wanted.add(f"sandboxes/{box.id}/live")
        if box.image is not None:
            wanted.add(f"sandboxes/{box.id}/{box.image.name}")
    found = {name for name in names(folder) if not name.startswith("snapshots/")}
    assert found == wanted, (found ^ wanted, {box.id: (box.state, box.row.reason) for box in core.boxes.values()})
    kept = {*core.snapshots, *(box.row.origin for box in core.boxes.values() if box.row.origin)}
    assert set(os.listdir(folder / "snapshots")) == kept
    living = sorted(box.id for box in core.boxes.values() if box.machine is not None)
    assert machines(folder) == living, (machines(folder), living)
    rows = {row.id: row.state for row in await core.write(core.records.sandboxes)}
    states = {box.id: box.state for box in core.boxes.values()}
    assert rows == states
    return states


def _moves(box: Box) -> bool:
    """Whether a transition runs, or will: only `expire` gives a sandbox an end."""
    return box.task is not None or (box.state == State.RUNNING and box.deadline is not None)


def _frame(value: Any) -> bytes:
    data = pickle.dumps(value)
    return len(data).to_bytes(4, "big") + data


class Worker:
    """The process, from outside."""

    def __init__(self, folder: Path, frees_memory: bool) -> None:
        self._link, other = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                self._link.close()
                asyncio.run(_serve(folder, frees_memory, other))
                status = 0
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                os._exit(status)
        other.close()

    def send(self, batch: Any) -> None:
        self._link.sendall(_frame(batch))

    def answers(self) -> Iterator[tuple[int, Any]]:
        """Until the batch is over or the process is gone."""
        while (head := self._receive(4)) and (data := self._receive(int.from_bytes(head, "big"))):
            answer = pickle.loads(data)
            if answer is None:
                return
            yield answer

    def ask(self, kind: str, name: str = "") -> Any:
        self.send([(0, kind, name, b"", 0)])
        ((_, result),) = self.answers()
        if isinstance(result, Exception):
            raise result
        return result

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._link.recv(size - len(data))
            if not piece:
                return b""
            data += piece
        return data

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._link.close()

    def close(self) -> None:
        self.send(None)
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0
        self._link.close()


# -- the model --------------------------------------------------------------------------------------------------------
@dataclass
class Known:
    """What must be true of a sandbox. `values`: the file may hold any of these (None: there is none); empty: who knows."""

    values: set[bytes | None] = field(default_factory=lambda: {None})
    may_be_gone: bool = False


class Model:
    def __init__(self) -> None:
        self.sandboxes: dict[str, Known] = {}
        self.gone: set[str] = set()
        self._values = itertools.count()

    def plan(self, batch: Batch) -> list[tuple[int, str, str, bytes, int]]:
        known = sorted(self.sandboxes)
        plan = []
        for number, operation in enumerate(batch.operations):
            if operation.kind not in ("create", "reap") and not known:
                continue
            name = known[operation.target % len(known)] if known else ""
            plan.append((number, operation.kind, name, b"value %d" % next(self._values), operation.delay_ms))
        return plan

    def note(self, plan: list[tuple[int, str, str, bytes, int]], answers: dict[int, Any]) -> None:
        """All of a batch happened at once, in no order that is known."""
        written: dict[str, list[tuple[bytes, bool]]] = {}
        before = {name: set(known.values) for name, known in self.sandboxes.items()}
        for number, kind, name, value, _ in plan:
            answer = answers.get(number, "unknown")
            if isinstance(answer, Exception) and not isinstance(answer, _FINE):
                raise answer
            if kind == "write":
                written.setdefault(name, []).append((value, answer is None))
            elif kind == "destroy":
                self.sandboxes[name].may_be_gone = True
                if answer is None or isinstance(answer, SandboxNotFoundError):
                    self.gone.add(name)
        for name, values in written.items():
            known = self.sandboxes[name]
            if any(is_acknowledged for _, is_acknowledged in values):  # what was there before is not there any more
                known.values = {value for value, _ in values}
            elif known.values:
                known.values |= {value for value, _ in values}
        for number, kind, name, _, _ in plan:
            answer = answers.get(number)
            if kind == "create" and isinstance(answer, str):
                self.sandboxes[answer] = Known()
            elif kind == "fork" and isinstance(answer, list):
                during = before[name] and before[name] | self.sandboxes[name].values
                self.sandboxes.update({child: Known(set(during)) for child in answer})
        for name in self.gone:
            self.sandboxes.pop(name, None)

    def check(self, found: dict[str, State]) -> None:
        assert set(found.values()) <= {State.RUNNING, State.PAUSED}
        assert not self.gone & set(found)
        for name, known in list(self.sandboxes.items()):
            if name not in found:
                assert known.may_be_gone, f"{name} is lost"
                del self.sandboxes[name]
                self.gone.add(name)
        for name in found:  # of a create or a fork that was killed before it was acknowledged
            if name not in self.sandboxes:
                self.sandboxes[name] = Known(set())


def _play(batches: list[Batch], frees_memory: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), Model()
        worker = Worker(folder, frees_memory)
        try:
            for batch in batches:
                plan = model.plan(batch)
                worker.send(plan)
                if batch.kill_after_ms is None:
                    model.note(plan, dict(worker.answers()))
                else:
                    answers = _answers_until(worker, batch.kill_after_ms)
                    worker.kill()
                    model.note(plan, answers)
                    worker = Worker(folder, frees_memory)
                model.check(worker.ask("look"))
            _check_files(worker, model)
            for sandbox in list(model.sandboxes):
                worker.ask("destroy", sandbox)
            assert worker.ask("look") == {}
            worker.close()
            assert machines(folder) == []
        except BaseException:
            worker.kill()
            _end_all(folder)
            raise


def _answers_until(worker: Worker, limit_ms: int) -> dict[int, Any]:
    """What the worker says before its time is over."""
    answers: dict[int, Any] = {}
    worker._link.settimeout(max(limit_ms, 1) / 1000)
    with contextlib.suppress(TimeoutError):
        for number, answer in worker.answers():
            answers[number] = answer
    return answers


def _check_files(worker: Worker, model: Model) -> None:
    for name, known in model.sandboxes.items():
        while True:
            try:
                value = worker.ask("read", name)
                break
            except SandboxLimitError:  # too many run: this one was looked at already
                other = next(each for each, state in worker.ask("look").items() if state == State.RUNNING)
                worker.ask("pause", other)
        assert not known.values or value in known.values, f"{name} holds {value!r}, not one of {known.values}"


def _end_all(folder: Path) -> None:
    from moonlet.sandbox.state_dir import label_of

    asyncio.run(ScriptedBackend().sweep(label_of(folder), set()))


# No shrinking: what happens depends on the clock too.
_SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.explicit, Phase.generate]}


@pytest.mark.parametrize("frees_memory", [True, False], ids=["disk", "memory"])
@settings(max_examples=8, **_SETTINGS)  # type: ignore[arg-type]
@given(batches=st.lists(_batches, min_size=1, max_size=5))
def test_nothing_acknowledged_is_lost(batches: list[Batch], frees_memory: bool) -> None:
    _play(batches, frees_memory)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("frees_memory", [True, False], ids=["disk", "memory"])
@settings(max_examples=60, **_SETTINGS)  # type: ignore[arg-type]
@given(batches=st.lists(_batches, min_size=3, max_size=8))
def test_nothing_acknowledged_is_lost_for_long(batches: list[Batch], frees_memory: bool) -> None:
    _play(batches, frees_memory)
