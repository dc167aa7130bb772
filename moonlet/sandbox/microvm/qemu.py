"""The QEMU that is installed, and the command lines with which it is run."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from moonlet.errors import BackendUnavailableError
from moonlet.sandbox.microvm.marks import mark
from moonlet.sandbox.microvm.memory import RAM_FILE

PROGRAM = "qemu-system-x86_64"
PORT = "moonlet.agent"
MARK = "guest"
DISK = "disk"  # the id of the drive
ROOT_DEVICE = "/dev/vda"
# Of code that emulation has translated. With 32 Python runs half as fast, since translations are thrown away and made
# again; 256 gain a third more and take up to 200 MiB more of each machine. QEMU's own default is a gigabyte.
TRANSLATION_MIB = 64
KERNEL_THREADS = 96
_LET_ALL_READ = (  # PR_SET_PTRACER, PR_SET_PTRACER_ANY: all processes of the same user
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
Accel = Literal["kvm", "tcg"]


@dataclass(frozen=True)
class Qemu:
    """`version` is the full one, with the distribution's revision: device states are exchanged between equals only."""

    program: str
    version: str
    accel: Accel

    @property
    def cpu(self) -> str:
        """Under emulation all that QEMU can emulate, which is the same on every host."""
        return "max" if self.accel == "tcg" else "host"

    @property
    def identity(self) -> str:
        """What must be the same where a saved machine goes on."""
        host = f" {processor_digest()}" if self.accel == "kvm" else ""
        return f"QEMU {self.version} {self.accel}/{self.cpu}{host} devices {devices_digest()}"


@dataclass(frozen=True)
class Hardware:
    """What cannot change during the life of a machine, pauses included."""

    ram_mib: int
    cpus: int


@dataclass(frozen=True)
class Boot:
    """What a machine needs that starts from nothing. `agent_args` are the arguments of /init."""

    kernel: Path
    initramfs: Path
    agent_args: tuple[str, ...]
    processes: int


@dataclass(frozen=True)
class Start:
    """One start of a machine, in whose folder QEMU runs. Without `boot` it waits for a saved device state."""

    label: str
    id: str
    hardware: Hardware
    top_layer: str  # file name of the layer that is written to
    boot: Boot | None = None
    is_ram_shared: bool = False  # what the guest writes goes into the RAM file


@dataclass(frozen=True)
class Listeners:
    """Descriptors of listening Unix sockets that QEMU serves."""

    qmp: int
    agent: int
    console: int


def find_qemu(accel: Accel) -> Qemu:
    """Raises BackendUnavailableError where it is not installed."""
    if platform.machine() != "x86_64":
        raise BackendUnavailableError(f"virtual machines are made for x86_64 only, this is {platform.machine()}")
    for tool, package in ((PROGRAM, "qemu-system-x86"), ("qemu-img", "qemu-utils"), ("mke2fs", "e2fsprogs")):
        if not shutil.which(tool):
            raise BackendUnavailableError(f"no program '{tool}': apt-get install --no-install-recommends {package}")
    done = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=False, timeout=30)
    found = re.search(r"version (\S.*)", done.stdout)
    if not found:
        raise BackendUnavailableError(f"'{PROGRAM} --version' fails: {(done.stderr or done.stdout).strip()[-300:]}")
    return Qemu(shutil.which(PROGRAM) or PROGRAM, found[1].replace("(", "").replace(")", ""), accel)


def command(qemu: Qemu, start: Start, listeners: Listeners) -> list[str]:
    """QEMU with neither network nor screen, in a seccomp sandbox that lets it start no process and become nobody else."""
    machine = (
        "q35,memory-backend=ram,hpet=off,usb=off,vmport=off,sata=off,smbus=off,mem-merge=off,dump-guest-core=off,"
        "suppress-vmdesc=on"
    )
    share = "on" if start.is_ram_shared else "off"
    size = f"{start.hardware.ram_mib}M"
    args = [
        qemu.program,
        "-name",
        mark(MARK, start.label, start.id),
        "-no-user-config",
        "-nodefaults",
        "-display",
        "none",
    ]
    args += ["-no-reboot", "-machine", machine, "-cpu", qemu.cpu, "-smp", str(start.hardware.cpus), "-m", size]
    args += ["-accel", f"tcg,tb-size={TRANSLATION_MIB}" if qemu.accel == "tcg" else "kvm"]
    args += ["-object", f"memory-backend-file,id=ram,size={size},mem-path={RAM_FILE},share={share},merge=off,dump=off"]
    for name, number in asdict(listeners).items():
        args += ["-chardev", f"socket,id={name},fd={number},server=on,wait=off"]
    args += ["-mon", "chardev=qmp,mode=control", "-serial", "chardev:console", "-device", "virtio-serial-pci"]
    args += ["-device", f"virtserialport,chardev=agent,name={PORT}"]
    args += ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]
    for name in ("send-configuration", "send-section-footer", "store-global-state"):
        args += ["-global", f"migration.{name}=off"]  # so that a state of devices alone can be read back
    # What has not reached the disk is lost with the host only, and then this machine is lost anyway.
    drive = f"file={start.top_layer},id={DISK},if=none,format=qcow2,cache=unsafe,discard=unmap"
    args += ["-drive", drive, "-device", f"virtio-blk-pci,drive={DISK}"]
    return args + (boot_args(start.boot) if start.boot else ["-S", "-incoming", "defer"])


def boot_args(boot: Boot) -> list[str]:
    append = kernel_command_line(boot, ["console=ttyS0"])
    return ["-kernel", str(boot.kernel), "-initrd", str(boot.initramfs), "-append", append]


def kernel_command_line(boot: Boot, words: list[str]) -> str:
    """With `words` of the monitor; what follows `--` are the arguments of /init."""
    words = [*words, "quiet", "panic=-1", "oops=panic", "mitigations=off", f"moonlet.root={ROOT_DEVICE}"]
    if boot.processes:
        words.append(f"sysctl.kernel.threads-max={boot.processes + KERNEL_THREADS}")  # rlimits do not bind root
    return " ".join([*words, "--", *boot.agent_args])


def devices_digest() -> str:
    """Of the machine that our command line describes: a change of it must not meet states that are older."""
    args = command(Qemu("", "", "kvm"), Start("", "", Hardware(1, 1), "disk"), Listeners(0, 0, 0))
    return hashlib.sha256("\0".join(args).encode()).hexdigest()[:8]


def processor_digest() -> str:
    """Of the host processor's model and instruction sets."""
    wanted = ("vendor_id", "model name", "flags")
    lines = sorted({line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(wanted)})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def readable_by_us(args: list[str]) -> list[str]:
    """The command, if need be through a launcher that lets processes of this user read QEMU's memory.

    Where Yama restricts that to parents, a service that was started anew could not save the machines of its predecessor.
    Raises BackendUnavailableError where the system forbids it altogether.
    """
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except OSError:
        scope = 0
    if scope == 0 or (_has_ptrace_capability() and scope < 3):
        return args
    if scope > 1:
        raise BackendUnavailableError(
            f"kernel.yama.ptrace_scope is {scope}: the memory of machines cannot be saved; set it to 1 or 0"
        )
    return [sys.executable, "-I", "-S", "-c", _LET_ALL_READ, *args]


def _has_ptrace_capability() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 19 & 1)
    return os.geteuid() == 0
