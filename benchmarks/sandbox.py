"""What a sandbox costs on this machine: every operation of every backend that works here, in one run.

    python benchmarks/sandbox.py [--quick] [--backend NAME]... [--state-dir DIR]

Milliseconds, median / 99th percentile (the largest where there are fewer than a hundred samples). The two yardsticks are
taken in turn with what they are compared to, since a machine that is busy now may be idle a second later: `subprocess` runs
the same program without a sandbox, `bubblewrap` sets up the mounts and namespaces of the backend `namespace` and runs
/bin/true in them, without an agent, limits, files of its own or a filter of system calls. `machine` is what the backend
does, until the agent answers; `start` is all that `Sandbox.create` does, with records that survive a crash.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moonlet.sandbox.api import Limits, Sandbox, SandboxSpec
from moonlet.sandbox.backend import Backend, Machine, MachineSpec, Template
from moonlet.sandbox.choose import all_backends
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.local import LocalSandbox
from moonlet.sandbox.manager import Manager, ServiceConfig

MIB = 1 << 20
FILE_BYTES = 8 * MIB
PYTHON = "/usr/bin/python3"
SPEC = SandboxSpec(ttl_s=None, limits=Limits(memory_bytes=256 * MIB))


@dataclass
class Series:
    """Times of one operation, in seconds."""

    times: list[float] = field(default_factory=list)

    async def measure(self, work: Awaitable[object]) -> object:
        start = time.perf_counter()
        result = await work
        self.times.append(time.perf_counter() - start)
        return result

    def quantile(self, share: float) -> float:
        return sorted(self.times)[min(len(self.times) - 1, int(share * len(self.times)))]

    def __str__(self) -> str:
        if not self.times:
            return "-"
        return f"{_ms(self.quantile(0.5))} / {_ms(self.quantile(0.99))}"


def _ms(seconds: float) -> str:
    return (
        f"{1e3 * seconds:.2f}"
        if seconds < 0.01
        else f"{1e3 * seconds:.1f}"
        if seconds < 0.1
        else f"{1e3 * seconds:.0f}"
    )


@dataclass
class Counts:
    """How often each thing is done."""

    starts: int
    execs: int
    cycles: int
    alive: int  # machines at once


COUNTS = {"namespace": Counts(100, 300, 30, 50), "landlock": Counts(100, 300, 30, 20)}
SLOW, QUICK = Counts(20, 50, 10, 4), Counts(5, 20, 3, 3)


class Bench:
    """All measurements of one backend."""

    def __init__(self, name: str, manager: Manager, counts: Counts) -> None:
        self.name, self.manager, self.counts = name, manager, counts
        self.series: dict[str, Series] = {}
        self.texts: dict[str, str] = {}

    def __getitem__(self, what: str) -> Series:
        return self.series.setdefault(what, Series())

    async def create(self) -> Sandbox:
        return LocalSandbox(self.manager, (await self.manager.create(SPEC)).id)

    @asynccontextmanager
    async def sandbox(self):
        made = await self.create()
        try:
            yield made
        finally:
            await made.destroy()

    async def run(self) -> None:
        start = time.perf_counter()
        async with self.sandbox():  # whatever a template needs is made at the first start
            self.texts["first start, s"] = f"{time.perf_counter() - start:.1f}"
        await self.launches(self.manager.config.state_dir / "bench")
        await self.starts()
        await self.execs()
        await self.files()
        await self.cycles()
        await self.density()

    async def starts(self) -> None:
        for _ in range(self.counts.starts):
            if BUBBLEWRAP:
                await self["bubblewrap"].measure(run_plain(BUBBLEWRAP))
            made = await self["start"].measure(self.create())
            assert isinstance(made, Sandbox)
            await self["delete"].measure(made.destroy())

    async def launches(self, folder: Path) -> None:
        """The machine alone, until its agent answers: no records on the disk, nothing of the service around it."""
        backend, label = all_backends()[self.name], f"bench-{os.getpid()}"
        for index in range(self.counts.starts):
            live = folder / f"m{index}"
            live.mkdir(mode=0o700, parents=True)
            spec = MachineSpec(f"m{index}", label, Template("host"), SPEC.limits, "bench")
            if BUBBLEWRAP:
                await self["bare bubblewrap"].measure(run_plain(BUBBLEWRAP))
            machine = await self["machine"].measure(launch(backend, spec, live))
            await machine.destroy()  # type: ignore[attr-defined]
            shutil.rmtree(live)

    async def execs(self) -> None:
        async with self.sandbox() as box:
            has_python = (await box.exec([PYTHON, "-c", "pass"])).exit_code == 0
            for _ in range(self.counts.execs):
                await self["subprocess true"].measure(run_plain(["/bin/true"]))
                await self["exec true"].measure(box.exec(["/bin/true"]))
            for _ in range(self.counts.execs // 10 if has_python else 0):
                await self["subprocess python"].measure(run_plain([PYTHON, "-c", "pass"]))
                await self["exec python"].measure(box.exec([PYTHON, "-c", "pass"]))

    async def files(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "file")
            path.write_bytes(os.urandom(FILE_BYTES))
            async with self.sandbox() as box:
                for _ in range(self.counts.cycles):
                    await self["upload 8 MiB"].measure(box.upload(path, "file"))
                    await self["download 8 MiB"].measure(box.download("file", path))

    async def cycles(self) -> None:
        async with self.sandbox() as box:
            await box.start("while :; do sleep 0.1; echo; done > ticks")
            self.texts["PSS, MiB"] = f"{await self.pss(box):.1f}"
            for number in range(self.counts.cycles):
                await self["pause" if number else "pause, first"].measure(box.pause())
                self.texts["PSS paused, MiB"] = f"{await self.pss(box):.1f}"
                await self["resume"].measure(box.resume())
            for _ in range(self.counts.cycles):
                snapshot = await self["snapshot"].measure(box.snapshot())
                await self.manager.delete_snapshot(str(snapshot))
                children = await self["fork"].measure(box.fork(1))
                assert isinstance(children, list)
                for child in children:
                    if isinstance(child, Exception):
                        raise child
                    await child.destroy()

    async def pss(self, box: Sandbox) -> float:
        return (await self.manager.usage(box.id)).memory_bytes / MIB

    async def density(self) -> None:
        """Many at once: time and memory of each."""
        start = time.perf_counter()
        boxes = await asyncio.gather(*(self.create() for _ in range(self.counts.alive)))
        each = (time.perf_counter() - start) / len(boxes)
        memory = [await self.pss(box) for box in boxes]
        await asyncio.gather(*(box.destroy() for box in boxes))
        self.texts["at once"] = f"{len(boxes)}: {_ms(each)} each"
        self.texts["PSS idle, MiB"] = f"{sum(memory) / len(memory):.1f}"


async def launch(backend: Backend, spec: MachineSpec, folder: Path) -> Machine:
    machine = await backend.launch(spec, folder)
    stream = await GuestStream.open(machine.endpoint(), is_fresh=True)
    stream.close()
    return machine


async def run_plain(command: list[str]) -> None:
    """What somebody would do without a sandbox: run it, take its output."""
    await asyncio.get_running_loop().run_in_executor(
        None, lambda: subprocess.run(command, capture_output=True, check=True)
    )


def bare_bubblewrap(folder: Path) -> list[str]:
    """Same namespaces and mounts as a machine of the backend `namespace` has, and nothing in them."""
    from moonlet.sandbox.namespace.bwrap import find_bubblewrap

    program = find_bubblewrap()
    if program is None:
        return []
    root = folder / "bare"
    (root / "workspace").mkdir(parents=True)
    words = [str(program.path), *(f"--unshare-{name}" for name in ("user", "pid", "net", "ipc", "uts", "cgroup"))]
    words += ["--uid", "0", "--gid", "0", "--hostname", "bare", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    words += ["--clearenv", "--bind", str(root), "/"]
    for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), root / name)
        elif os.path.isdir(f"/{name}"):
            words += ["--ro-bind", f"/{name}", f"/{name}"]
    words += ["--ro-bind", str(folder), "/etc", "--proc", "/proc", "--dev", "/dev"]
    words += ["--perms", "1777", "--size", str(64 * MIB), "--tmpfs", "/dev/shm", "--ro-bind", "/bin/true", "/dev/agent"]
    words += ["--remount-ro", "/dev", "--chdir", "/workspace", "--", "/dev/agent"]
    works = subprocess.run(words, capture_output=True, text=True)
    if works.returncode:
        print(f"bare bubblewrap does not work here: {works.stderr.strip()}")
        return []
    return words


BUBBLEWRAP: list[str] = []
ROWS = (
    *(
        "machine",
        "start",
        "exec true",
        "exec python",
        "upload 8 MiB",
        "download 8 MiB",
        "pause, first",
        "pause",
        "resume",
    ),
    *("snapshot", "fork", "delete"),
)
YARDSTICKS = {
    "machine": "bare bubblewrap",
    "start": "bubblewrap",
    "exec true": "subprocess true",
    "exec python": "subprocess python",
}
TEXTS = ("first start, s", "at once", "PSS idle, MiB", "PSS, MiB", "PSS paused, MiB")


def machine_facts() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    user = "root" if os.geteuid() == 0 else "not root"
    return f"{model}, {os.cpu_count()} processors, {memory:.0f} GiB, Linux {platform.release()}, {user}"


def load() -> str:
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def show(benches: list[Bench]) -> None:
    """One Markdown table; a ratio follows where there is a yardstick."""
    print(f"\n| ms, median / p99 | {' | '.join(bench.name for bench in benches)} |")
    print(f"|---|{'---|' * len(benches)}")
    for row in ROWS:
        print(f"| {row} | {' | '.join(_cell(bench, row) for bench in benches)} |")
        if row in YARDSTICKS:
            name = YARDSTICKS[row]
            print(f"| {name}, in turn | {' | '.join(str(bench[name]) for bench in benches)} |")
    for row in TEXTS:
        print(f"| {row} | {' | '.join(bench.texts.get(row, '-') for bench in benches)} |")


def _cell(bench: Bench, row: str) -> str:
    text = str(bench[row])
    if row in YARDSTICKS and bench[row].times and bench[YARDSTICKS[row]].times:
        ratio = bench[row].quantile(0.5) / bench[YARDSTICKS[row]].quantile(0.5)
        text += f" ({ratio:.1f}x)"
    return text


async def measure(name: str, state_dir: Path, is_quick: bool) -> Bench | None:
    """None, with the reason on the screen, for a backend that does not work here."""
    backend = all_backends()[name]
    probe = await backend.probe()
    if probe.caps is None:
        print(f"{name}: not here: {' '.join(probe.reason.split())}", flush=True)
        return None
    print(f"{name} {probe.version}, load {load()} ...", flush=True)
    counts = QUICK if is_quick else COUNTS.get(name, SLOW)
    config = ServiceConfig(state_dir / name, backend=name, max_running=200, max_total=400)
    async with Manager(config, backends={name: backend}) as manager:
        bench = Bench(name, manager, counts)
        try:
            await bench.run()
        finally:
            await _destroy_all(manager)
    return bench


async def _destroy_all(manager: Manager) -> None:
    for sandbox_id in manager.ids():
        await manager.destroy(sandbox_id)
    for snapshot in await manager.snapshots():
        await manager.delete_snapshot(snapshot.id)


async def main(names: list[str], state_dir: Path, is_quick: bool, note: Callable[..., None] = print) -> None:
    note(machine_facts())
    note(f"load average at the start: {load()}")
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    BUBBLEWRAP[:] = bare_bubblewrap(state_dir)
    found = [await measure(name, state_dir, is_quick) for name in names]
    note(f"load average at the end: {load()}")
    show([bench for bench in found if bench])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure every sandbox backend that works here.")
    parser.add_argument("--quick", action="store_true", help="few samples: a minute instead of several")
    parser.add_argument("--backend", action="append", choices=[*all_backends()], help="only this one; repeatable")
    parser.add_argument("--state-dir", type=Path, help="where machines keep their files (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moonlet-bench-") as folder:
        asyncio.run(main(options.backend or [*all_backends()], options.state_dir or Path(folder), options.quick))
