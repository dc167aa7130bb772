"""What a machine of the backend namespace leaves to be restored: all that its files are, and nothing that leads elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from moonlet.errors import SandboxStateError, StorageError
from moonlet.sandbox.api import ExecResult
from moonlet.sandbox.backend import Template
from moonlet.sandbox.namespace import files
from moonlet.sandbox.namespace.backend import NamespaceBackend
from moonlet.sandbox.processes import ProcessId
from tests.sandbox.namespace_life import life, old_bubblewrap

MIB = 1 << 20
AS_ROOT = os.geteuid() == 0


def test_an_image_keeps_what_files_are(tmp_path: Path, label: str) -> None:
    make = (
        "mkdir -p d/locked; echo x > d/locked/f; chmod 000 d/locked/f d/locked; ln -s /etc/passwd d/link; echo 1 > d/a; ln d/a d/b; "
        "chmod 4755 d/a; mkfifo d/pipe; truncate -s 50M d/sparse; touch -d '2020-02-02 02:02:02' d/old; "
        "printf y > \"d/line\nfeed\"; python3 -c \"import os; os.setxattr('d/a', 'user.note', b'kept'); open(b'd/\\xff', 'w')\""
    )
    look = (
        "chmod 700 d/locked; stat -c '%n %a %h %s %Y %F' d/locked/f d/link d/a d/pipe d/sparse d/old; readlink d/link; du -k d/sparse;"
        "python3 -c \"import os; print(os.getxattr('d/a', 'user.note'), sorted(os.listdir(b'd')))\""
    )

    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, guest = await one.start()
            assert (await guest.exec(make)).exit_code == 0
            before = await _plain(guest.exec(look + "; chmod 000 d/locked"))
            for number, is_final in enumerate((False, True)):
                image = await one.image(machine, f"image{number}", is_final=is_final)
                _, other = await one.start(one.spec(f"copy{number}"), image)
                assert await _plain(other.exec(look)) == before
                assert sorted(path.name for path in image.iterdir()) == ["image.json", "upper"]

    asyncio.run(work())


async def _plain(running) -> str:
    done: ExecResult = await running
    return done.text.replace("\n", "|")


@pytest.mark.parametrize("age", ["this", "old"])
def test_changes_over_a_template_are_saved(tmp_path: Path, rootfs: Path, label: str, age: str) -> None:
    """What the overlay changed, removed and replaced comes back; the template stays as it is. With any bubblewrap."""
    backend = NamespaceBackend(old_bubblewrap() if age == "old" else None)
    template = Template("tiny", rootfs, env={"FROM": "template"})

    async def work() -> None:
        async with life(tmp_path, label, backend) as one:
            machine, guest = await one.start(one.spec("a", template))
            assert (await guest.exec("id -u; echo $FROM; pwd")).text == "0\ntemplate\n/workspace\n"
            done = await guest.exec(
                "echo more >> /etc/passwd && rm /lower/gone && rm -r /lower/deep && mkdir /lower/deep && "
                "touch /bin/added /lower/deep/new && echo home > f"
            )
            assert done.exit_code == 0, done.stderr
            image = await one.image(machine)
            _, other = await one.start(one.spec("b", template), image)
            look = "cat /etc/passwd f; ls /lower /lower/deep; ls /bin/added"
            assert (await other.exec(look)).text == (
                "root:x:0:0::/root:/bin/sh\nmore\nhome\n/lower:\ndeep\n\n/lower/deep:\nnew\n/bin/added\n"
            )
            assert (await other.exec("echo b > f; rm /bin/added")).exit_code == 0
            assert (await guest.exec("cat f; ls /bin/added")).text == "home\n/bin/added\n"

    before = sorted(str(path) for path in rootfs.rglob("*"))
    asyncio.run(work())
    assert sorted(str(path) for path in rootfs.rglob("*")) == before
    assert (rootfs / "etc/passwd").read_text() == "root:x:0:0::/root:/bin/sh\n"


def test_links_that_a_guest_lays_lead_nowhere(tmp_path: Path, rootfs: Path, label: str) -> None:
    """A saved root is what a guest made it: what will be mounted over must not be a link to somewhere else."""
    secret = tmp_path / "outside"
    secret.mkdir()
    template = Template("tiny", rootfs)

    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, _ = await one.start(one.spec("a", template))
            image = await one.image(machine)
            upper = image / "upper"
            for name in ("proc", "dev", "workspace"):
                if (upper / name).exists():
                    shutil.rmtree(upper / name)
                (upper / name).symlink_to(secret)
            (upper / "etc").rename(upper / "etc2") if (upper / "etc").exists() else None
            (upper / "etc").symlink_to(secret)
            _, other = await one.start(one.spec("b", template), image)
            assert (await other.exec("echo here > f; cat /workspace/f")).text == "here\n"
            await other.refresh(hostname="b", machine_id="0" * 32)

    asyncio.run(work())
    assert list(secret.iterdir()) == []


def test_a_full_disk_during_a_save_changes_nothing(tmp_path: Path, label: str) -> None:
    if not AS_ROOT:
        pytest.skip("only root can make a small file system")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", small], check=True)

    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, guest = await one.start()
            await guest.exec("head -c 4000000 /dev/urandom > data")
            with pytest.raises(StorageError, match="free some space"):
                await machine.save(small, is_final=False)
            assert (await guest.exec("stat -c %s data")).text == "4000000\n"

    try:
        asyncio.run(work())
    finally:
        subprocess.run(["umount", small], check=True)


def test_images_of_others_are_refused(tmp_path: Path, rootfs: Path, label: str) -> None:
    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, _ = await one.start()
            image = await one.image(machine)
            with pytest.raises(SandboxStateError, match="template"):
                await one.start(one.spec("b", Template("tiny", rootfs)), image)
            (image / "image.json").write_text(json.dumps({"format": 0, "template": "host"}))
            with pytest.raises(SandboxStateError, match="another version"):
                await one.start(one.spec("c"), image)

    asyncio.run(work())


def test_the_folder_of_a_dead_machine_is_an_image(tmp_path: Path, label: str) -> None:
    """So that files are not lost with a host that was restarted."""

    async def work() -> None:
        async with life(tmp_path, label) as one:
            machine, guest = await one.start()
            await guest.exec("echo kept > f")
            await machine.destroy()
            _, other = await one.start(one.spec("again"), tmp_path / "one")
            assert (await other.exec("cat f")).text == "kept\n"

    asyncio.run(work())


def test_sizes_are_measured_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "big").write_bytes(b"x" * MIB)
    (tmp_path / "in/link").symlink_to(tmp_path / "big")
    assert files.disk_bytes(tmp_path / "in") < MIB // 2
    assert files.disk_bytes(tmp_path / "nowhere") == 0


def test_processes_are_told_apart_by_their_start() -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None and me.is_alive()
    assert not ProcessId(me.pid, me.start - 1).is_alive()
    assert not ProcessId(me.pid, me.start - 1).kill(0)
    assert ProcessId.of(1 << 30) is None


def test_a_shared_etc_holds_no_secret(tmp_path: Path, label: str) -> None:
    async def work() -> None:
        async with life(tmp_path, label) as one:
            _, guest = await one.start()
            await guest.refresh(hostname="one", machine_id="0" * 32)
            done = await guest.exec(
                "cat /etc/hostname; grep -c one /etc/hosts; wc -c < /etc/machine-id; hostname; ls /home /root /etc/ssh"
            )
            assert done.text.split() == ["one", "1", "33", "one", "/home:", "/root:"]

    asyncio.run(work())
    assert stat.S_IMODE(os.stat("/dev/null").st_mode) == 0o666
