"""What Firecracker is asked, over HTTP on its Unix socket (its API specification, firecracker.yaml, of version 1.8 on).

Paths in the requests are relative: Firecracker runs in the machine's folder and writes them into its snapshots, and each
copy of a machine must find its own files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonlet.errors import SandboxDiedError, SandboxError, StorageError
from moonlet.sandbox.microvm.qemu import Boot, Hardware, kernel_command_line

API_SOCKET, AGENT_SOCKET, DISK = "api.sock", "agent.sock", "disk"
AGENT_PORT = 5252
_GUEST_CID = 3  # the same in all machines: each has a socket of its own
_ANSWER_S = 120.0  # of a request that writes all of a machine's memory


@dataclass(frozen=True)
class Request:
    """One request; a body of None is none."""

    method: str
    path: str
    body: dict[str, Any] | None = None


def boot_requests(hardware: Hardware, boot: Boot) -> list[Request]:
    """A machine that starts from nothing, with a disk and a vsock and no network."""
    words = ["console=ttyS0", "reboot=k", "pci=off", f"moonlet.vsock={AGENT_PORT}"]
    source = {"kernel_image_path": str(boot.kernel), "initrd_path": str(boot.initramfs)}
    drive = {"drive_id": "disk", "path_on_host": DISK, "is_root_device": False, "is_read_only": False}
    return [
        Request(
            "PUT", "/machine-config", {"vcpu_count": hardware.cpus, "mem_size_mib": hardware.ram_mib, "smt": False}
        ),
        Request("PUT", "/boot-source", {**source, "boot_args": kernel_command_line(boot, words)}),
        Request("PUT", "/drives/disk", {**drive, "cache_type": "Unsafe"}),
        Request("PUT", "/vsock", {"guest_cid": _GUEST_CID, "uds_path": AGENT_SOCKET}),
        Request("PUT", "/actions", {"action_type": "InstanceStart"}),
    ]


def save_request(state: Path, ram: Path) -> Request:
    """Processors and devices to `state`, all memory to `ram`; the machine must stand still."""
    body = {"snapshot_type": "Full", "snapshot_path": str(state), "mem_file_path": str(ram)}
    return Request("PUT", "/snapshot/create", body)


def load_request(state: Path, ram: Path) -> Request:
    """A saved machine, whose RAM file is mapped copy on write: all that start from it share what they do not change."""
    backend = {"backend_type": "File", "backend_path": str(ram)}
    body = {"snapshot_path": str(state), "mem_backend": backend, "enable_diff_snapshots": False, "resume_vm": False}
    return Request("PUT", "/snapshot/load", body)


def state_request(is_running: bool) -> Request:
    return Request("PATCH", "/vm", {"state": "Resumed" if is_running else "Paused"})


class FirecrackerApi:
    """Sends requests to one Firecracker."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def send(self, requests: Sequence[Request]) -> dict[str, Any]:
        """One after the other; what the last answered. Raises SandboxError, StorageError, SandboxDiedError."""
        import httpx

        answer: dict[str, Any] = {}
        transport = httpx.AsyncHTTPTransport(uds=str(self._path))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=_ANSWER_S) as client:
                for request in requests:
                    response = await client.request(request.method, request.path, json=request.body)
                    answer = _answer(request, response)
        except httpx.HTTPError as error:
            raise SandboxDiedError(
                f"Firecracker does not answer on {self._path}: {error or type(error).__name__}"
            ) from error
        return answer


def _answer(request: Request, response: Any) -> dict[str, Any]:
    try:
        fields = response.json() if response.content else {}
    except ValueError:
        fields = {}
    if response.is_success:
        return fields if isinstance(fields, dict) else {}
    fault = fields.get("fault_message") if isinstance(fields, dict) else None
    message = f"Firecracker refused {request.method} {request.path}: {fault or response.text[:500]}"
    if "No space left" in message or "os error 28" in message:
        raise StorageError(f"{message}; free some space")
    raise SandboxError(message)
