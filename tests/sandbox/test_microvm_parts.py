"""What virtual machines are made of, each part on its own: nothing here boots."""

from __future__ import annotations

import gzip
import lzma
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonlet.errors import BackendUnavailableError, SandboxDiedError, SandboxStateError, SnapshotError, StorageError
from moonlet.sandbox.microvm import image, memory
from moonlet.sandbox.microvm.hostfiles import HostFiles
from moonlet.sandbox.microvm.image import add_top_layer, copy_file, make_disk, make_layer, share
from moonlet.sandbox.microvm.initramfs import initramfs_bytes
from moonlet.sandbox.microvm.kernel import Kernel, find_kernel, load_order
from moonlet.sandbox.microvm.qemu import Boot, Hardware, Listeners, Qemu, Start, command
from moonlet.sandbox.microvm.saved import Saved
from moonlet.sandbox.microvm.spawn import MAX_SOCKET_PATH, SocketFolder

MIB = 1 << 20
PATH = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
needs_qemu_img = pytest.mark.skipif(not shutil.which("qemu-img"), reason="qemu-utils is not installed")
needs_mke2fs = pytest.mark.skipif(not shutil.which("mke2fs"), reason="e2fsprogs is not installed")


# -- initramfs --------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not shutil.which("cpio"), reason="cpio is not installed")
def test_cpio_reads_the_initramfs(tmp_path: Path) -> None:
    modules = [("virtio_ring", b"ring\0"), ("virtio", b"v" * 4097)]
    archive = initramfs_bytes(b"#!agent", modules)
    assert archive == initramfs_bytes(b"#!agent", modules)
    command = ["cpio", "-id", "--no-absolute-filenames", "--quiet"] + ([] if os.geteuid() == 0 else ["init", "mod*"])
    subprocess.run(command, input=archive, cwd=tmp_path, check=True)
    assert (tmp_path / "init").read_bytes() == b"#!agent"
    assert stat.S_IMODE((tmp_path / "init").stat().st_mode) == 0o755
    assert (tmp_path / "modules/virtio.ko").read_bytes() == b"v" * 4097
    assert (tmp_path / "modules.list").read_text() == "virtio_ring.ko\nvirtio.ko\n"
    listing = subprocess.run(["cpio", "-tv", "--quiet"], input=archive, capture_output=True, check=True).stdout.decode()
    console = next(line for line in listing.splitlines() if line.endswith("dev/console"))
    assert console.startswith("crw-------") and "5,   1" in console


# -- kernel and modules -----------------------------------------------------------------------------------------------
def make_kernel(root: Path, version: str = "6.1.0-9-amd64") -> Kernel:
    modules = root / "lib/modules" / version
    (modules / "kernel").mkdir(parents=True)
    (root / "boot").mkdir(exist_ok=True)
    (root / "boot" / f"vmlinuz-{version}").write_bytes(version.encode())
    return Kernel(root / "boot" / f"vmlinuz-{version}", modules, version)


def module(name: str, depends: str = "", hint: str = "") -> bytes:
    fields = [f"license=GPL\0depends={depends}\0name={name}\0"] + ([f"softdep=pre: {hint}\0"] if hint else [])
    return b"\x7fELF\0" + "".join(fields).encode()


def test_modules_load_after_those_that_they_need(tmp_path: Path) -> None:
    kernel = make_kernel(tmp_path)
    at = kernel.modules / "kernel"
    (at / "virtio-pci.ko").write_bytes(module("virtio_pci", "virtio,virtio-ring"))
    (at / "virtio.ko.xz").write_bytes(lzma.compress(module("virtio", "virtio_ring")))
    (at / "virtio_ring.ko.gz").write_bytes(gzip.compress(module("virtio_ring")))
    (at / "ext4.ko").write_bytes(module("ext4", "jbd2", hint="crc32c not_here"))
    (at / "crc32c.ko").write_bytes(module("crc32c"))
    (kernel.modules / "modules.builtin").write_text("kernel/fs/jbd2/jbd2.ko\n")
    order = load_order(kernel, ["virtio_pci", "ext4", "virtio"])
    assert [name for name, _ in order] == ["virtio_ring", "virtio", "virtio_pci", "crc32c", "ext4"]
    assert dict(order)["virtio"] == module("virtio", "virtio_ring")


def test_a_missing_module_is_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="no module 'virtio_blk': install linux-image"):
        load_order(make_kernel(tmp_path), ["virtio_blk"])


def test_the_newest_kernel_of_the_cache_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moonlet.sandbox.microvm import kernel

    monkeypatch.setattr(kernel, "INSTALLED", (tmp_path / "none", ()))
    for version in ("6.1.0-9-amd64", "6.1.0-57-amd64", "6.1.0-58-amd64"):
        made = make_kernel(tmp_path / f"kernel-{version}", version)
        if version != "6.1.0-58-amd64":
            (made.modules / "virtio_blk.ko").write_bytes(module("virtio_blk"))
    found = find_kernel(tmp_path, ["virtio_blk"])
    assert found.version == "6.1.0-57-amd64"
    assert found.digest == Kernel(found.image, found.modules, found.version).digest


# -- command line -----------------------------------------------------------------------------------------------------
QEMU = Qemu("/usr/bin/qemu-system-x86_64", "7.2.22", "tcg")


def test_the_machine_has_no_network_and_qemu_can_start_nothing() -> None:
    start = Start("label", "box", Hardware(256, 2), "disk-2")
    words = command(QEMU, start, Listeners(5, 6, 7))
    assert {"-nodefaults", "-no-user-config", "-no-reboot"} < set(words)
    assert not {word for word in words if "net" in word.split(",")[0] or word == "-nic"}
    options = {words[at]: words[at + 1] for at in range(len(words) - 1) if words[at].startswith("-")}
    assert options["-sandbox"] == "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
    assert options["-name"] == "guest=moonlet/label/box"
    assert (options["-m"], options["-smp"], options["-incoming"]) == ("256M", "2", "defer")
    assert "share=off" in options["-object"] and "-kernel" not in options


def test_a_boot_hands_the_agent_its_limits() -> None:
    boot = Boot(Path("k"), Path("i"), ("--init", "--processes", "64"), 64)
    words = command(QEMU, Start("l", "i", Hardware(256, 1), "disk-1", boot, is_ram_shared=True), Listeners(5, 6, 7))
    append = words[words.index("-append") + 1]
    assert append.endswith("-- --init --processes 64")
    assert "moonlet.root=/dev/vda" in append and "threads-max=160" in append
    assert "-incoming" not in words


def test_a_path_too_long_for_a_socket_is_shortened(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 80) / ("e" * 80)
    folder.mkdir(parents=True)
    (folder / "x").write_text("here")
    at = SocketFolder(folder)
    try:
        path = at.path("x")
        assert len(str(path)) <= MAX_SOCKET_PATH and path.read_text() == "here"
    finally:
        at.close()


# -- memory -----------------------------------------------------------------------------------------------------------
GUEST = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    ram = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
print(flush=True)
for line in sys.stdin:
    page, text = line.split()
    if text == "?":
        print(ram[int(page) * 4096 : int(page) * 4096 + 4].hex(), flush=True)
    else:
        ram[int(page) * 4096 : int(page) * 4096 + 4096] = bytes.fromhex(text) * 1024
        print(flush=True)
"""


class FakeGuest:
    """A process that has mapped a RAM file as QEMU does."""

    def __init__(self, ram: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", GUEST, str(ram)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()
        self.pid = self._process.pid

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, page: int, text: str = "?") -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{page} {text}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def guest(folder: Path) -> Iterator[FakeGuest]:
    one = FakeGuest(folder / memory.RAM_FILE)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def ram(tmp_path: Path) -> Path:
    with (tmp_path / memory.RAM_FILE).open("wb") as file:
        file.write(b"base" * 1024 * 64)
        file.truncate(64 * MIB)
    return tmp_path


def test_changed_pages_go_to_another_process(ram: Path) -> None:
    chosen = random.Random(0).sample(range(64 * 256), 500)
    expected = {page: f"{page:08x}" for page in chosen}
    before = (ram / memory.RAM_FILE).read_bytes()
    with guest(ram) as one, guest(ram) as other:
        for page, text in expected.items():
            one.ask(page, text)
        for page in (5, 9999):  # reading changes nothing
            one.ask(page)
        num_bytes = memory.save_changed(one.pid, ram / "pages")
        assert 500 * 4096 <= num_bytes < 600 * 4096
        memory.load_changed(other.pid, ram / "pages")
        assert {page: other.ask(page) for page in chosen} == expected
        untouched = next(page for page in range(64) if page not in expected)
        assert other.ask(untouched) == b"base".hex()
        memory.save_changed(other.pid, ram / "pages2")
        assert (ram / "pages2").read_bytes() == (ram / "pages").read_bytes()
    assert (ram / memory.RAM_FILE).read_bytes() == before


def test_more_than_one_buffer_of_pages(ram: Path) -> None:
    with guest(ram) as one, guest(ram) as other:
        for page in range(0, 3000):
            one.ask(page, f"{page:08x}")
        memory.save_changed(one.pid, ram / "pages")
        memory.load_changed(other.pid, ram / "pages")
        assert [other.ask(page) for page in (0, 1023, 1024, 2047, 2999)] == [
            f"{page:08x}" for page in (0, 1023, 1024, 2047, 2999)
        ]


@pytest.mark.parametrize("damage", ["cut", "head", "elsewhere", "endless"])
def test_damaged_pages_are_refused(ram: Path, damage: str) -> None:
    with guest(ram) as one:
        one.ask(3, "abcdef01")
        memory.save_changed(one.pid, ram / "pages")
        data = bytearray((ram / "pages").read_bytes())
        if damage == "cut":
            del data[-1:]
        elif damage == "head":
            data[0] ^= 1
        elif damage == "elsewhere":
            data[16:24] = (1 << 60).to_bytes(8, "little")
        else:
            data[8:16] = (1 << 60).to_bytes(8, "little")
        (ram / "bad").write_bytes(data)
        with pytest.raises(SnapshotError):
            memory.load_changed(one.pid, ram / "bad")


def test_a_process_that_is_gone(ram: Path) -> None:
    with guest(ram) as one:
        pass
    with pytest.raises(SandboxDiedError):
        memory.save_changed(one.pid, ram / "pages")


# -- disks ------------------------------------------------------------------------------------------------------------
def test_a_copy_keeps_holes(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(64 * MIB)
        for at in (5 * MIB, 40 * MIB + 123):
            file.seek(at)
            file.write(os.urandom(70_000))
    copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert (tmp_path / "b").stat().st_blocks * 512 < MIB
    with pytest.raises(FileExistsError):
        copy_file(tmp_path / "a", tmp_path / "b")


def test_files_are_shared_by_links_where_that_is_possible(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    share(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").samefile(tmp_path / "a")
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        return
    with tempfile.TemporaryDirectory(dir=elsewhere) as name:
        share(tmp_path / "a", Path(name, "c"))
        assert Path(name, "c").read_text() == "x"


def layers(folder: Path, size: int = 256 * MIB) -> Path:
    folder.mkdir()
    with (folder / "disk-0").open("wb") as file:
        file.truncate(size)
    return folder


def qemu_io(folder: Path, layer: int, script: str) -> None:
    """Raises where a pattern that is read is not the expected one."""
    done = subprocess.run(
        ["qemu-io", "-f", image.layer_format(layer), "-c", script, f"disk-{layer}"], cwd=folder, capture_output=True
    )
    assert b"verification failed" not in done.stdout and done.returncode == 0, done.stdout + done.stderr


@needs_qemu_img
def test_a_small_top_layer_is_copied(tmp_path: Path) -> None:
    first = layers(tmp_path / "first")
    make_layer(first, 1)
    qemu_io(first, 1, "write -P 7 1M 1M")
    (tmp_path / "second").mkdir()
    assert add_top_layer(tmp_path / "second", first, 1, 1) == 1
    qemu_io(tmp_path / "second", 1, "write -P 9 1M 64k")
    qemu_io(first, 1, "read -P 7 1M 1M")
    shutil.rmtree(first)
    qemu_io(tmp_path / "second", 1, "read -P 9 1M 64k")
    qemu_io(tmp_path / "second", 1, "read -P 7 1088k 960k")


@needs_qemu_img
def test_a_large_top_layer_gets_one_upon_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "COPY_LIMIT_BYTES", MIB)
    first = layers(tmp_path / "first")
    make_layer(first, 1)
    qemu_io(first, 1, "write -P 7 1M 4M")
    (tmp_path / "second").mkdir()
    assert add_top_layer(tmp_path / "second", first, 1, 1) == 2
    assert (tmp_path / "second/disk-1").samefile(first / "disk-1")
    shutil.rmtree(first)
    qemu_io(tmp_path / "second", 2, "read -P 7 1M 4M")


@needs_qemu_img
def test_many_layers_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "COPY_LIMIT_BYTES", MIB)
    monkeypatch.setattr(image, "MAX_LAYERS", 5)
    at, layer = layers(tmp_path / "0"), 1
    make_layer(at, 1)
    make_layer(at, 2)
    layer, sizes = 2, []
    for number in range(1, 12):
        qemu_io(at, layer, f"write -P {number} {number}M 2M")
        folder = tmp_path / str(number)
        folder.mkdir()
        layer = add_top_layer(folder, at, layer, 2)
        sizes.append(layer)
        shutil.rmtree(at)
        at = folder
        for earlier in range(1, number):
            qemu_io(at, layer, f"read -P {earlier} {earlier}M 1M")
    assert max(sizes) <= 5 and 2 in sizes
    assert {path.name for path in at.iterdir()} == {f"disk-{number}" for number in range(layer + 1)}


@needs_qemu_img
def test_a_disk_written_over_and_over_stays_within_twice_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "COPY_LIMIT_BYTES", MIB)
    at, layer = layers(tmp_path / "0", 16 * MIB), 1
    make_layer(at, 1)
    for number in range(1, 7):
        qemu_io(at, layer, f"write -P {number} 0 8M")
        folder = tmp_path / str(number)
        folder.mkdir()
        layer = add_top_layer(folder, at, layer, 1)
        shutil.rmtree(at)
        at = folder
        qemu_io(at, layer, f"read -P {number} 0 8M")
        assert sum(image.used_bytes(path) for path in at.iterdir()) <= 40 * MIB


@needs_mke2fs
def test_a_disk_holds_the_files_and_room(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub/file").write_bytes(os.urandom(3 * MIB))
    (root / "link").symlink_to("sub/file")
    make_disk(root, tmp_path / "disk", 32 * MIB)
    read = ["debugfs", "-R", "cat /sub/file", str(tmp_path / "disk")]
    assert subprocess.run(read, capture_output=True, check=True).stdout == (root / "sub/file").read_bytes()
    facts = subprocess.run(
        ["dumpe2fs", "-h", str(tmp_path / "disk")], capture_output=True, text=True, check=True
    ).stdout
    fields = {line.split(":")[0]: line.split(":")[1].strip() for line in facts.splitlines() if ":" in line}
    free = int(fields["Free blocks"]) * int(fields["Block size"])
    assert 32 * MIB <= free <= 64 * MIB
    assert "has_journal" not in fields["Filesystem features"]


@needs_mke2fs
def test_a_disk_that_does_not_fit_is_a_storage_error(tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("no /dev/full")
    with pytest.raises(StorageError, match="make room"):
        image.run_tool(["dd", "if=/dev/zero", "of=/dev/full", "count=1"], "a disk")


# -- the host's files -------------------------------------------------------------------------------------------------
def test_the_host_template_runs_by_itself(tmp_path: Path) -> None:
    if os.geteuid() != 0 and not image.can_map_to_root():
        pytest.skip("chroot needs root or a user namespace")
    files = HostFiles()
    assert files.digest == HostFiles().digest and files.num_bytes < 300 * MIB
    files.copy(tmp_path)
    code = "import ctypes, hashlib, json, sqlite3, ssl, subprocess, zlib; print(json.dumps([1]))"
    script = f"python3 -c '{code}' && printf 'b\\na\\n' | sort | sed s/a/x/ | grep x && tar --version | head -1"
    enter = ["chroot"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "chroot"]
    done = subprocess.run([*enter, str(tmp_path), "/bin/sh", "-c", script], capture_output=True, text=True, env=PATH)
    assert done.stdout.splitlines()[:2] == ["[1]", "x"], done.stderr
    hidden = [name for name in ("home", "root", "var/log", "etc/ssh", "opt") if any((tmp_path / name).glob("*"))]
    assert hidden == []
    setuid = [path for path in tmp_path.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o6000]
    assert setuid == []


# -- what is saved ----------------------------------------------------------------------------------------------------
def test_a_machine_of_another_version_is_refused(tmp_path: Path) -> None:
    saved = Saved("QEMU 7.2 tcg/max", "k", "a", Hardware(256, 1), 3, 2)
    saved.write(tmp_path)
    assert Saved.read(tmp_path) == saved
    saved.check("QEMU 7.2 tcg/max")
    with pytest.raises(SandboxStateError, match=r"saved by QEMU 7\.2 tcg/max .* here is QEMU 10 kvm/host"):
        Saved.read(tmp_path).check("QEMU 10 kvm/host")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"identity": "x"}'])
def test_a_folder_without_a_machine_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(SandboxStateError, match="holds no machine"):
        Saved.read(tmp_path)
