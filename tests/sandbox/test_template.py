"""The store of templates: whole or not there, found by name and content, thrown away only when unused."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from sandbox.managed import managed

from moonlet.errors import StorageError, TemplateError
from moonlet.sandbox.api import Limits, SandboxSpec
from moonlet.sandbox.backend import MachineSpec
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.gvisor import GvisorBackend
from moonlet.sandbox.template.debian import DebianSource, choose_mode, read_mirrors
from moonlet.sandbox.template.directory import DirectorySource
from moonlet.sandbox.template.source import Made, Source, Workshop
from moonlet.sandbox.template.store import TemplateStore, open_store


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


def make_tree(folder: Path, text: str = "text", size: int = 0) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/sh").write_text(text)
    (folder / "bin/sh").chmod(0o755)
    (folder / "lib").symlink_to("usr/lib")
    (folder / "data").write_bytes(os.urandom(size))
    return folder


@dataclass(frozen=True)
class Scripted(Source):
    """Fills the root as it is told to."""

    work: object

    def __str__(self) -> str:
        return "scripted"

    def fill(self, workshop: Workshop) -> Made:
        self.work(workshop)  # type: ignore[operator]
        return Made(env={"A": "b"}, workdir="/srv")


def leftovers(store: TemplateStore) -> list[str]:
    return [str(path) for name in ("roots", "names", "tmp") for path in (store.folder / name).iterdir()]


# -- building and finding ---------------------------------------------------------------------------------------------
def test_directory_becomes_a_template(tmp_path: Path, tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    os.link(tree / "bin/sh", tree / "bin/bash")
    with socket.socket(socket.AF_UNIX) as peer:
        peer.bind(str(tree / "socket"))
    store = TemplateStore(tmp_path / "store")
    told: list[tuple[str, float | None]] = []
    template = asyncio.run(store.build("mine", DirectorySource(tree), lambda what, share: told.append((what, share))))
    root = template.rootfs
    assert root is not None
    assert (root / "bin/sh").read_text() == "text"
    assert stat.S_IMODE((root / "bin/sh").stat().st_mode) == 0o755
    assert (root / "bin/sh").samefile(root / "bin/bash")
    assert os.readlink(root / "lib") == "usr/lib"
    assert not (root / "pipe").exists() and not (root / "socket").exists()
    assert told[0][0].startswith("copying") and told[-1][1] == 1.0
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


def test_every_root_has_what_guests_need(tmp_path: Path, tree: Path) -> None:
    """Also where the source has links in the places on which backends mount."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (tree / "workspace").symlink_to(outside)
    (tree / "etc").symlink_to("/etc")
    (tree / "proc").write_text("no directory")
    store = TemplateStore(tmp_path / "store")
    root = asyncio.run(store.build("mine", DirectorySource(tree))).rootfs
    assert root is not None
    for name in ("proc", "sys", "dev", "run", "tmp", "etc", "workspace", ".moonlet"):
        assert (root / name).is_dir() and not (root / name).is_symlink()
    assert (root / "etc/resolv.conf").read_text() == ""
    assert (root / "etc/passwd").read_text().startswith("root:x:0:0:")
    assert list(outside.iterdir()) == []


def test_found_by_name_and_by_hash(tmp_path: Path, tree: Path) -> None:
    store = TemplateStore(tmp_path / "store")

    async def work() -> None:
        built = await store.build("python:3.11", DirectorySource(tree))
        assert await store.resolve("python:3.11") == built
        assert await store.resolve(built.id) == await store.resolve(built.id[:12]) == built
        assert (await store.resolve("host")).rootfs is None
        assert (await store.build("other", DirectorySource(tree))).id == built.id
        (info,) = await store.list()
        assert info.names == ("other", "python:3.11")
        assert info.source == f"dir:{tree}"
        with pytest.raises(TemplateError, match=r"did you mean 'python:3\.11'"):
            await store.resolve("python:3.1")
        for name in ("", "a" * 65, "f" * 64, "../names", "python"):
            with pytest.raises(TemplateError):
                await store.resolve(name)

    asyncio.run(work())


def test_env_and_directory_are_kept(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path / "store")
    built = asyncio.run(store.build("mine", Scripted(lambda workshop: None)))
    again = TemplateStore(tmp_path / "store")
    assert asyncio.run(again.resolve("mine")).env == built.env == {"A": "b"}
    assert asyncio.run(again.list())[0].workdir == "/srv"


@pytest.mark.parametrize("name", ["", "host", "a/../b\n", ".hidden", "-x", "f" * 64, "x" * 129, "a b", "\0"])
def test_names_that_cannot_be(tmp_path: Path, tree: Path, name: str) -> None:
    with pytest.raises(TemplateError, match="cannot name"):
        asyncio.run(TemplateStore(tmp_path / "store").build(name, DirectorySource(tree)))


def test_a_name_moves_to_what_was_built_last(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path / "store")

    async def work() -> None:
        first = await store.build("mine", DirectorySource(make_tree(tmp_path / "one", "1")))
        second = await store.build("mine", DirectorySource(make_tree(tmp_path / "two", "2")))
        assert (await store.resolve("mine")).id == second.id != first.id
        assert (await store.resolve(first.id)).id == first.id

    asyncio.run(work())


def test_the_hash_is_of_names_modes_and_contents(tmp_path: Path, tree: Path) -> None:
    store = TemplateStore(tmp_path / "store")

    async def work() -> None:
        ids = [(await store.build("mine", DirectorySource(tree))).id]
        os.utime(tree / "bin/sh", (1, 1))
        assert (await store.build("mine", DirectorySource(tree))).id == ids[0]
        for change in (
            lambda: (tree / "bin/sh").chmod(0o700),
            lambda: (tree / "bin/sh").write_text("tex"),
            lambda: (tree / "bin/sh").rename(tree / "bin/ash"),
            lambda: (tree / "more").symlink_to("x"),
            lambda: (tree / "empty").mkdir(),
        ):
            change()
            ids.append((await store.build("mine", DirectorySource(tree))).id)
        assert len(set(ids)) == len(ids)

    asyncio.run(work())


def test_sources_that_cannot_be_copied(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path / "store")
    with pytest.raises(TemplateError, match="no directory"):
        asyncio.run(store.build("mine", DirectorySource(tmp_path / "missing")))
    with pytest.raises(TemplateError, match="holds the store"):
        asyncio.run(store.build("mine", DirectorySource(tmp_path)))
    assert leftovers(store) == []


# -- faults -----------------------------------------------------------------------------------------------------------
def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(workshop: Workshop) -> None:
        (workshop.rootfs / "half").write_text("half")
        raise TemplateError("broken")

    store = TemplateStore(tmp_path / "store")
    with pytest.raises(TemplateError, match="broken"):
        asyncio.run(store.build("mine", Scripted(fail)))
    assert leftovers(store) == []


def test_a_cancelled_build_ends_and_leaves_nothing(tmp_path: Path) -> None:
    begun = threading.Event()

    def work_on(workshop: Workshop) -> None:
        begun.set()
        while True:
            workshop.tick()

    store = TemplateStore(tmp_path / "store")

    async def work() -> None:
        task = asyncio.ensure_future(store.build("mine", Scripted(work_on)))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert leftovers(store) == []


def test_a_killed_build_counts_for_nothing(tmp_path: Path, tree: Path) -> None:
    store = TemplateStore(tmp_path / "store")
    code = f"""
        import asyncio, os, signal
        from pathlib import Path
        from moonlet.sandbox.template.store import TemplateStore
        from sandbox.test_template import Scripted

        def die(workshop):
            (workshop.rootfs / "half").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(TemplateStore(Path({str(store.folder)!r})).build("mine", Scripted(die)))
    """
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=here, timeout=60)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(TemplateError):
        asyncio.run(store.resolve("mine"))
    assert asyncio.run(store.list()) == []
    assert len(list((store.folder / "tmp").iterdir())) == 1
    asyncio.run(store.build("mine", DirectorySource(tree)))
    assert list((store.folder / "tmp").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    try:
        store = TemplateStore(folder)
        kept = asyncio.run(store.build("small", DirectorySource(make_tree(tmp_path / "small"))))
        before = leftovers(store)
        with pytest.raises(StorageError, match="free some space"):
            asyncio.run(store.build("mine", DirectorySource(make_tree(tmp_path / "big", size=4 << 20))))
        assert leftovers(store) == before
        assert asyncio.run(store.resolve("small")) == kept
    finally:
        subprocess.run(["umount", folder], check=True)


def test_two_builders_of_the_same(tmp_path: Path) -> None:
    """In two processes, each with its own store object, of the same tree under the same name."""
    tree = make_tree(tmp_path / "tree", size=100_000)
    code = f"""
        import asyncio
        from pathlib import Path
        from moonlet.sandbox.template.directory import DirectorySource
        from moonlet.sandbox.template.store import TemplateStore

        async def main():
            store = TemplateStore(Path({str(tmp_path / "store")!r}), cache_bytes=0)
            for _ in range(20):
                print((await store.build("mine", DirectorySource(Path({str(tree)!r})))).id)

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ids = {line for builder in builders for line in builder.communicate(timeout=120)[0].split()}
    assert [builder.returncode for builder in builders] == [0, 0]
    assert len(ids) == 1
    store = TemplateStore(tmp_path / "store")
    root = asyncio.run(store.resolve("mine")).rootfs
    assert root is not None and (root / "bin/sh").read_text() == "text"


# -- throwing away ----------------------------------------------------------------------------------------------------
def test_the_longest_unused_goes_first_and_never_one_in_use(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path / "store", cache_bytes=1_300_000)
    trees = [make_tree(tmp_path / f"tree{number}", str(number), size=300_000) for number in range(5)]

    async def work() -> None:
        ids = [(await store.build(f"t{number}", DirectorySource(tree))).id for number, tree in enumerate(trees[:3])]
        for when, template_id in enumerate(ids):
            os.utime(store.folder / "roots" / template_id, (when, when))
        await store.resolve("t1")  # used: now t0, then t2 are the oldest
        with store.hold(ids[0]), store.hold(ids[0]):
            await store.build("t3", DirectorySource(trees[3]))
            assert {name for info in await store.list() for name in info.names} == {"t0", "t1", "t3"}
        await store.build("t4", DirectorySource(trees[4]))
        assert {name for info in await store.list() for name in info.names} == {"t1", "t3", "t4"}
        with pytest.raises(TemplateError, match="build it again"), store.hold(ids[0]):
            pass
        assert store.num_bytes() <= 1_300_000

    asyncio.run(work())


def test_a_hold_of_another_process_counts(tmp_path: Path, tree: Path) -> None:
    store = TemplateStore(tmp_path / "store", cache_bytes=0)
    held = asyncio.run(store.build("held", DirectorySource(tree)))
    code = f"""
        import sys
        from pathlib import Path
        from moonlet.sandbox.template.store import TemplateStore

        with TemplateStore(Path({str(store.folder)!r})).hold({held.id!r}):
            print("held", flush=True)
            sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        asyncio.run(store.build("next", DirectorySource(make_tree(tmp_path / "next", "n"))))
        assert asyncio.run(store.resolve("held")) == held
        holder.kill()  # a lock of a process that was killed holds nothing
    asyncio.run(store.build("last", DirectorySource(make_tree(tmp_path / "last", "l"))))
    with pytest.raises(TemplateError):
        asyncio.run(store.resolve("held"))


def test_templates_of_paused_sandboxes_stay(tmp_path: Path, tree: Path) -> None:
    used: list[str] = []
    store = TemplateStore(tmp_path / "store", cache_bytes=0, in_use=lambda: used)
    used.append(asyncio.run(store.build("paused", DirectorySource(tree))).id)
    asyncio.run(store.build("next", DirectorySource(make_tree(tmp_path / "next", "n"))))
    assert asyncio.run(store.resolve("paused")).id == used[0]


def test_templates_of_recorded_sandboxes_stay_without_a_service(tmp_path: Path) -> None:
    async def work() -> None:
        async with managed(tmp_path / "state") as manager:
            held = await manager.templates.build("held", DirectorySource(make_tree(tmp_path / "held")))
            box = await manager.create(SandboxSpec(template="held"))
            await manager.pause(box.id)
        store = open_store(tmp_path / "state", 0)
        await store.build("next", DirectorySource(make_tree(tmp_path / "next", "n")))
        await store.remove("held")
        assert (await store.resolve(held.id)).id == held.id
        async with managed(tmp_path / "state") as manager:
            await manager.resume(box.id)
            await manager.destroy(box.id)
        await store.remove(held.id)
        with pytest.raises(TemplateError):
            await store.resolve(held.id)

    asyncio.run(work())


def test_removal(tmp_path: Path, tree: Path) -> None:
    store = TemplateStore(tmp_path / "store")

    async def work() -> None:
        template = await store.build("one", DirectorySource(tree))
        await store.build("two", DirectorySource(tree))
        await store.remove("one")
        assert await store.resolve("two") == template
        with store.hold(template.id):
            await store.remove("two")
            assert template.rootfs is not None and template.rootfs.is_dir()
            with pytest.raises(TemplateError):
                await store.resolve("two")
        await store.remove(template.id)
        assert leftovers(store) == []
        for name in ("one", "host"):
            with pytest.raises(TemplateError):
                await store.remove(name)

    asyncio.run(work())


# -- Debian packages --------------------------------------------------------------------------------------------------
def test_mirrors_are_those_of_the_host_without_other_vendors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "apt"
    (folder / "sources.list.d").mkdir(parents=True)
    (folder / "sources.list").write_text(
        "# deb http://mirror/debian stable main\n"
        "deb [arch=amd64 signed-by=/usr/share/keyrings/a.gpg] http://mirror/debian stable main contrib\n"
        "deb-src http://mirror/debian stable main\n"
        "deb http://vendor/apt stable vendor\n"
    )
    (folder / "sources.list.d/more.sources").write_text(
        "Types: deb deb-src\nURIs: http://mirror/security\nSuites: stable-security stable-updates\n"
        "Components: main\nSigned-By: /usr/share/keyrings/b.gpg\n\n"
        "Types: deb\nEnabled: no\nURIs: http://off/debian\nSuites: stable\nComponents: main\n\n"
        "# a comment\nTypes: deb\nURIs: http://vendor/x\nSuites: nodistro\nComponents: main\n"
    )
    monkeypatch.setattr("moonlet.sandbox.template.debian._APT_FOLDER", folder)
    assert read_mirrors("stable").splitlines() == [
        "deb [arch=amd64 signed-by=/usr/share/keyrings/a.gpg] http://mirror/debian stable main contrib",
        "deb [signed-by=/usr/share/keyrings/b.gpg] http://mirror/security stable-security main",
        "deb [signed-by=/usr/share/keyrings/b.gpg] http://mirror/security stable-updates main",
    ]
    with pytest.raises(TemplateError, match="no source for other/main"):
        read_mirrors("other")


def test_the_mode_fits_the_privileges() -> None:
    if os.geteuid() == 0:
        assert choose_mode() == "root"
        return
    try:
        assert choose_mode() in ("unshare", "fakechroot")
    except TemplateError as error:
        assert "apt-get install" in str(error)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_template_of_debian_packages_runs(tmp_path: Path, require_backend) -> None:
    """Built from the host's own archives, then used as the root of a machine."""
    require_backend("gvisor")
    store = TemplateStore(tmp_path / "store")
    told: list[str] = []

    async def work() -> None:
        template = await store.build("deb", DebianSource(("hello",)), lambda what, share: told.append(what))
        machine = await GvisorBackend().launch(
            MachineSpec("a", "test-debian", template, Limits(memory_bytes=256 << 20), "deb"), live
        )
        try:
            stream = await GuestStream.open(machine.endpoint(), timeout_s=20)
            done = await Guest(stream).exec(
                "hello && dpkg -s hello | grep Status && touch /usr/bin/new && cat /etc/resolv.conf"
            )
            stream.close()
        finally:
            await machine.destroy()
        assert done.text == "Hello, world!\nStatus: install ok installed\n"
        assert template.rootfs is not None and not (template.rootfs / "usr/bin/new").exists()

    live = tmp_path / "live"
    live.mkdir()
    asyncio.run(work())
    assert any("installing" in line for line in told)


@pytest.mark.slow
def test_a_killed_build_takes_mmdebstrap_along(tmp_path: Path) -> None:
    if shutil.which("mmdebstrap") is None or shutil.which("setpriv") is None:
        pytest.skip("needs mmdebstrap and setpriv")
    code = f"""
        import asyncio, os, signal
        from pathlib import Path
        from moonlet.sandbox.template.debian import DebianSource
        from moonlet.sandbox.template.store import TemplateStore

        def tell(what, share):
            if "apt-get update" in what:
                os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(TemplateStore(Path({str(tmp_path)!r})).build("mine", DebianSource(()), tell))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=120)
    assert done.returncode == -signal.SIGKILL

    def remains() -> list[str]:
        lines = subprocess.run(["ps", "axo", "args"], capture_output=True, text=True).stdout.splitlines()
        return [line for line in lines if f"{tmp_path}/tmp" in line]

    deadline = time.monotonic() + 20
    while remains():
        assert time.monotonic() < deadline, remains()
        time.sleep(0.1)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
