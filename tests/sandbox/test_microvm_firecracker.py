"""The contract with Firecracker: the requests that it is sent, recorded by a stand-in over a real Unix socket."""

from __future__ import annotations

import asyncio
import json
import lzma
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonlet.errors import BackendUnavailableError, SandboxStateError, StorageError
from moonlet.sandbox.api import FailReason, Limits
from moonlet.sandbox.backend import MachineSpec, Template
from moonlet.sandbox.guest.build import guest_binary
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.microvm import firecracker, firecracker_machine
from moonlet.sandbox.microvm.firecracker import FirecrackerBackend
from moonlet.sandbox.microvm.kernel import Kernel
from moonlet.sandbox.microvm.vmlinux import unpack_kernel

PROGRAM = Path(__file__).with_name("recording_firecracker.py")
MIB = 1 << 20
LIMITS = Limits(memory_bytes=256 * MIB, disk_bytes=16 * MIB, processes=64, open_files=1024, cpus=1.5)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if not shutil.which("mke2fs"):
        pytest.skip("e2fsprogs is not installed")
    kernel = tmp_path / "vmlinuz-6.1.0-9"
    kernel.write_bytes(b"\x7fELF kernel")
    monkeypatch.setattr(firecracker_machine, "find_kernel", lambda *_: Kernel(kernel, tmp_path, "6.1.0-9"))
    monkeypatch.setattr(firecracker_machine, "load_order", lambda *_: [("virtio", b"module")])
    monkeypatch.setattr(firecracker, "KVM_DEVICE", "/dev/null")
    monkeypatch.setenv("MOONLET_RECORD", str(tmp_path / "record"))
    monkeypatch.setenv("MOONLET_AGENT", str(guest_binary()))
    yield tmp_path / "record"


def recorded(record: Path) -> list[list[Any]]:
    requests = [json.loads(line) for line in record.read_text().splitlines()]
    record.unlink()
    return requests


def make_backend(tmp_path: Path, program: Path = PROGRAM) -> FirecrackerBackend:
    return FirecrackerBackend(str(program), tmp_path / "cache")


def folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def spec(rootfs: Path, name: str = "m") -> MachineSpec:
    return MachineSpec(name, "label", Template("small", rootfs), LIMITS, name)


async def say(machine: firecracker_machine.FirecrackerMachine, command: str) -> str:
    stream = await GuestStream.open(machine.endpoint(), timeout_s=20)
    try:
        return (await Guest(stream).exec(command)).text
    finally:
        stream.close()


def test_requests_of_a_whole_life(tmp_path: Path, record: Path) -> None:
    """Boot, template, start, pause, resume and snapshot, each with exactly these requests in this order."""
    rootfs = folder(tmp_path, "rootfs")

    async def work() -> None:
        backend = make_backend(tmp_path)
        probe = await backend.probe()
        assert probe.caps is not None, probe.reason
        assert probe.version.startswith("Firecracker v1.12.0 kvm ")
        record.unlink()

        await backend.prepare(Template("small", rootfs), LIMITS, lambda what, share: None)
        boot = recorded(record)
        cache = tmp_path / "cache/firecracker"
        assert boot == booting(cache)

        machine = await backend.launch(spec(rootfs), folder(tmp_path, "live"))
        template = next((cache / "templates").iterdir())
        assert recorded(record) == [loading(template), ["PATCH", "/vm", {"state": "Resumed"}]]
        assert await say(machine, "echo hello > file; cat file") == "hello\n"

        await machine.freeze()
        await machine.freeze()
        await machine.thaw()
        await machine.save(folder(tmp_path, "snapshot"), is_final=False)
        await machine.save(folder(tmp_path, "image"), is_final=True)
        await machine.destroy()
        paused, resumed = ["PATCH", "/vm", {"state": "Paused"}], ["PATCH", "/vm", {"state": "Resumed"}]
        assert recorded(record) == [
            paused,
            resumed,
            paused,
            ["PUT", "/snapshot/create", saving(tmp_path / "snapshot")],
            resumed,
            paused,
            ["PUT", "/snapshot/create", saving(tmp_path / "image")],
        ]
        assert {path.name for path in (tmp_path / "image").iterdir()} == {"machine.json", "state", "guest.ram", "disk"}

        machine = await backend.restore(spec(rootfs), folder(tmp_path, "again"), tmp_path / "image")
        assert recorded(record) == [loading(tmp_path / "image"), resumed]
        assert not (tmp_path / "again/disk").samefile(tmp_path / "image/disk")
        await machine.destroy()
        await machine.destroy()

    asyncio.run(work())


def booting(cache: Path) -> list[list[Any]]:
    """What the first boot of a template is to look like, for `LIMITS`."""
    (template,) = (cache / "templates").iterdir()
    unfinished = template.with_name(f"{template.name}.tmp")
    line = (
        "console=ttyS0 reboot=k pci=off moonlet.vsock=5252 quiet panic=-1 oops=panic mitigations=off "
        "moonlet.root=/dev/vda sysctl.kernel.threads-max=160 -- --init --processes 64 --open-files 1024"
    )
    files = {"kernel_image_path": str(*cache.glob("vmlinux-*")), "initrd_path": str(*cache.glob("initramfs-*"))}
    drive = {"drive_id": "disk", "path_on_host": "disk", "is_root_device": False, "is_read_only": False}
    return [
        ["PUT", "/machine-config", {"vcpu_count": 2, "mem_size_mib": 256, "smt": False}],
        ["PUT", "/boot-source", {**files, "boot_args": line}],
        ["PUT", "/drives/disk", {**drive, "cache_type": "Unsafe"}],
        ["PUT", "/vsock", {"guest_cid": 3, "uds_path": "agent.sock"}],
        ["PUT", "/actions", {"action_type": "InstanceStart"}],
        ["PATCH", "/vm", {"state": "Paused"}],
        ["PUT", "/snapshot/create", saving(unfinished)],
    ]


def saving(image: Path) -> dict[str, str]:
    return {"snapshot_type": "Full", "snapshot_path": f"{image}/state", "mem_file_path": f"{image}/guest.ram"}


def loading(image: Path) -> list[Any]:
    backend = {"backend_type": "File", "backend_path": f"{image}/guest.ram"}
    body = {"snapshot_path": f"{image}/state", "mem_backend": backend}
    return ["PUT", "/snapshot/load", {**body, "enable_diff_snapshots": False, "resume_vm": False}]


def test_faults(tmp_path: Path, record: Path) -> None:
    """A full disk while saving, a damaged image, one of another version, a monitor that is killed, a new service."""
    rootfs = folder(tmp_path, "rootfs")

    async def work() -> None:
        backend = make_backend(tmp_path)
        machine = await backend.launch(spec(rootfs), folder(tmp_path, "live"))
        (tmp_path / "live/full").touch()
        with pytest.raises(StorageError, match="os error 28"):
            await machine.save(folder(tmp_path, "image"), is_final=True)
        assert await say(machine, "echo alive") == "alive\n"
        (tmp_path / "live/full").unlink()
        assert recorded(record)[-1] == ["PATCH", "/vm", {"state": "Resumed"}]

        machine = await backend.attach(spec(rootfs), tmp_path / "live")
        await machine.save(tmp_path / "image", is_final=False)
        (tmp_path / "image/state").write_text("damaged")
        with pytest.raises(Exception, match="bad magic"):
            await backend.restore(spec(rootfs), folder(tmp_path, "bad"), tmp_path / "image")
        facts = json.loads((tmp_path / "image/machine.json").read_text())
        (tmp_path / "image/machine.json").write_text(json.dumps({**facts, "identity": "Firecracker v1.9.0"}))
        with pytest.raises(SandboxStateError, match=r"saved by Firecracker v1\.9\.0"):
            await backend.restore(spec(rootfs), folder(tmp_path, "other"), tmp_path / "image")

        machine.process.kill()
        assert await machine.wait_dead() == FailReason.CRASH
        await machine.destroy()

    asyncio.run(work())


@pytest.mark.parametrize("text", ["echo Firecracker v1.4.1", "echo", "exit 1"])
def test_another_program_is_refused(tmp_path: Path, record: Path, text: str) -> None:
    program = tmp_path / "old"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    probe = asyncio.run(make_backend(tmp_path, program).probe())
    assert probe.caps is None and "1.8 or later is needed" in probe.reason


def test_without_the_program_or_kvm_it_says_so(tmp_path: Path, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(tmp_path, tmp_path / "none")
    probe = asyncio.run(backend.probe())
    assert probe.caps is None and "no program" in probe.reason
    with pytest.raises(BackendUnavailableError, match="does not work here: no program"):
        asyncio.run(backend.launch(spec(tmp_path), tmp_path))
    monkeypatch.setattr(firecracker, "KVM_DEVICE", str(tmp_path / "no-kvm"))
    probe = asyncio.run(make_backend(tmp_path).probe())
    assert probe.caps is None and "needs KVM" in probe.reason


# -- the kernel -------------------------------------------------------------------------------------------------------
def boot_image(payload: bytes) -> bytes:
    image = bytearray(1024)
    image[0x1F1] = 1
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 16, len(payload))
    return bytes(image) + b"\0" * 16 + payload + b"trailer"


ELF = b"\x7fELF" + bytes(range(256)) * 40


def lz4_legacy(data: bytes) -> bytes:
    """Literals only, but for the last 40 bytes before the end: a copy of what lies one byte back, which overlaps itself."""
    head, tail = data, b"\xaa" * 40
    literals = head + b"\xaa"
    length = bytes([0xFF]) + b"\xff" * ((len(literals) - 15) // 255) + bytes([(len(literals) - 15) % 255])
    copy = struct.pack("<H", 1) + bytes([40 - 1 - 4 - 15])
    block = length + literals + copy + bytes([0x10]) + b"\xbb"
    return b"\x02\x21\x4c\x18" + struct.pack("<I", len(block)) + block + struct.pack("<I", len(head) + len(tail) + 1)


@pytest.mark.parametrize("how", ["plain", "xz", "lz4"])
def test_a_kernel_is_unpacked(tmp_path: Path, how: str) -> None:
    size = struct.pack("<I", len(ELF))
    data = {"plain": ELF, "xz": boot_image(lzma.compress(ELF) + size), "lz4": boot_image(lz4_legacy(ELF))}[how]
    (tmp_path / "vmlinuz").write_bytes(data)
    unpack_kernel(tmp_path / "vmlinuz", tmp_path / "vmlinux")
    expected = ELF + b"\xaa" * 40 + b"\xbb" if how == "lz4" else ELF
    assert (tmp_path / "vmlinux").read_bytes() == expected


@pytest.mark.parametrize("payload", [b"", b"\x02\x21\x4c\x18\x40\0\0\0\x10", lzma.compress(b"no kernel"), b"unknown"])
def test_what_is_no_kernel_is_refused(tmp_path: Path, payload: bytes) -> None:
    (tmp_path / "vmlinuz").write_bytes(boot_image(payload))
    with pytest.raises(BackendUnavailableError):
        unpack_kernel(tmp_path / "vmlinuz", tmp_path / "vmlinux")
    (tmp_path / "vmlinuz").write_bytes(b"x" * 2000)
    with pytest.raises(BackendUnavailableError, match="no kernel image"):
        unpack_kernel(tmp_path / "vmlinuz", tmp_path / "vmlinux")
    assert not (tmp_path / "vmlinux").exists()
