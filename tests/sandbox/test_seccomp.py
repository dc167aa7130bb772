"""The filter, run through an interpreter of its own for both processors, and tried in a real machine."""

from __future__ import annotations

import errno
import platform
import signal
import struct

import pytest

from moonlet.sandbox.namespace.seccomp import AF_INET, AF_UNIX, build_filter
from moonlet.sandbox.namespace.syscalls import ARCHITECTURES, Architecture
from tests.sandbox.conftest import Bench, open_bench

ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
CLONE_NEWUSER, CLONE_THREAD = 0x10000000, 0x10000


def verdict(program: bytes, audit: int, number: int, *arguments: int) -> int:
    """What the kernel would make of a call: classic BPF over `struct seccomp_data`."""
    data = struct.pack("=IIQ6Q", number, audit, 0, *arguments, *([0] * (6 - len(arguments))))
    at = accumulator = 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, operand)[0]
        elif code == 0x06:
            return operand
        else:
            holds = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[code]
            at += if_true if holds else if_false


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return ARCHITECTURES[request.param]


def ask(architecture: Architecture, name: str, *arguments: int, families: tuple[int, ...] = (AF_UNIX, AF_INET)) -> int:
    number = architecture.number(name)
    assert number is not None
    return verdict(build_filter(architecture, families), architecture.audit, number, *arguments)


def test_what_is_refused(architecture: Architecture) -> None:
    for name in ("mount", "setns", "bpf", "ptrace", "keyctl", "io_uring_setup", "userfaultfd", "open_by_handle_at"):
        assert ask(architecture, name) == REFUSE, name
    assert ask(architecture, "clone3") == UNKNOWN


def test_flags_decide(architecture: Architecture) -> None:
    assert ask(architecture, "clone", CLONE_THREAD) == ALLOW
    assert ask(architecture, "clone", CLONE_THREAD | CLONE_NEWUSER) == REFUSE
    assert ask(architecture, "unshare", 0x400) == ALLOW
    assert ask(architecture, "unshare", CLONE_NEWUSER) == REFUSE
    assert ask(architecture, "personality", 0xFFFFFFFF) == ALLOW
    assert ask(architecture, "personality", 0x0040000) == REFUSE


def test_only_the_half_that_the_kernel_reads_counts(architecture: Architecture) -> None:
    """A request number with rubbish above bit 31 is the same request to the kernel."""
    for upper in (0, 1 << 32, 0xFFFFFFFF << 32):
        assert ask(architecture, "ioctl", 0, 0x5412 | upper) == REFUSE
        assert ask(architecture, "ioctl", 0, 0x541C | upper) == REFUSE
        assert ask(architecture, "clone", CLONE_NEWUSER | upper) == REFUSE
    assert ask(architecture, "ioctl", 0, 0x5401) == ALLOW


def test_families_of_sockets(architecture: Architecture) -> None:
    assert ask(architecture, "socket", AF_UNIX) == ALLOW
    for vsock_or_alg in (40, 38, 17):
        assert ask(architecture, "socket", vsock_or_alg) == REFUSE
    assert ask(architecture, "socket", AF_UNIX, families=()) == REFUSE


def test_everyday_calls_pass(architecture: Architecture) -> None:
    program = build_filter(architecture)
    read_write_futex = {"x86_64": (0, 1, 202, 59, 257), "aarch64": (63, 64, 98, 221, 56)}[architecture.name]
    assert {verdict(program, architecture.audit, number) for number in read_write_futex} == {ALLOW}


def test_other_processors_calls_kill() -> None:
    program = build_filter(ARCHITECTURES["x86_64"])
    i386 = 0x40000003
    assert verdict(program, i386, 0) == KILL
    assert verdict(program, ARCHITECTURES["x86_64"].audit, 0x40000000) == KILL  # x32


_TRY = """
import ctypes, os, socket, fcntl
libc = ctypes.CDLL(None, use_errno=True)
def call(*words):
    result = libc.syscall(*[ctypes.c_long(word) if isinstance(word, int) else word for word in words])
    return ctypes.get_errno() if result < 0 else 0
NUMBERS = %r
print({
    "unshare": call(NUMBERS["unshare"], 0x10000000),
    "clone": call(NUMBERS["clone"], 0x10000011, 0, 0, 0, 0),
    "clone3": call(NUMBERS["clone3"], 0, 0),
    "mount": call(NUMBERS["mount"], b"x", b"/tmp", b"tmpfs", 0, 0),
    "ptrace": call(NUMBERS["ptrace"], 0, 0, 0, 0),
    "keyctl": call(NUMBERS["keyctl"], 0, -3, 1),
    "bpf": call(NUMBERS["bpf"], 0, 0, 0),
    "io_uring": call(NUMBERS["io_uring_setup"], 1, 0),
    "handle": call(NUMBERS["open_by_handle_at"], 0, 0, 0),
})
def family(number):
    try:
        socket.socket(number, socket.SOCK_DGRAM if number != 38 else socket.SOCK_SEQPACKET).close()
        return 0
    except OSError as error:
        return error.errno
print([family(number) for number in (1, 2, 10, 16, 17, 38, 40)])
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory):
    with open_bench("namespace", tmp_path_factory.mktemp("state") / "s") as opened:
        yield opened


def test_in_a_real_machine(machine: Bench) -> None:
    architecture = ARCHITECTURES[platform.machine()]
    names = ["unshare", "clone", "clone3", "mount", "ptrace", "keyctl", "bpf", "io_uring_setup", "open_by_handle_at"]
    script = _TRY % {name: architecture.number(name) for name in names}
    done = machine.run(machine.shared().exec(["python3", "-c", script]))
    refused, families = done.text.splitlines()
    expected = dict.fromkeys(
        ["unshare", "clone", "clone3", "mount", "ptrace", "keyctl", "bpf", "io_uring", "handle"], errno.EPERM
    )
    assert eval(refused) == {**expected, "clone3": errno.ENOSYS}, done.error_text
    assert eval(families) == [0, 0, 0, 0, errno.EPERM, errno.EPERM, errno.EPERM]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the gate of 32-bit calls is x86's")
def test_the_gate_of_32_bit_calls_is_shut(machine: Bench) -> None:
    script = (
        "import ctypes, mmap; code = bytes.fromhex('b814000000cd80c3')\n"  # getpid by int 0x80
        "page = mmap.mmap(-1, 4096, prot=7); page.write(code)\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()"
    )
    done = machine.run(machine.shared().exec(["python3", "-c", script]))
    assert done.exit_code == 128 + signal.SIGSYS
