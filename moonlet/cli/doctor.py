"""`moonlet doctor`: what this machine is, what will be used, what is missing, and what its torch really can do."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from moonlet.errors import MoonletError

if TYPE_CHECKING:
    from moonlet.parallel.probe import Check

_GIB = 2**30
_FREE_DISK_BYTES = 2 * _GIB  # corpus, checkpoints and report of the laptop recipe, with room
_FREE_MEMORY_BYTES = 3 * _GIB  # two ranks of the laptop recipe
_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
_PACKAGES = ("numpy", "safetensors", "tokenizers", "huggingface_hub", "pydantic", "pyarrow")
_OPTIONAL = {"datasets": ("datasets", "Hugging Face datasets as a source of text")}


class Row(NamedTuple):
    """One line: `state` is ok, note (works, but something better is missing) or failed (Moonlet cannot do its job)."""

    name: str
    value: str
    state: str = "ok"


def doctor(
    probe: Annotated[bool, typer.Option(help="Also try sandboxes, processes and collectives for real (20 s).")] = True,
) -> None:
    """Say what this machine is, what will be used and what is missing; exit 1 if something needed is broken."""
    sections = {"machine": _machine(), "software": _software(), "will be used": _choices(), "missing": _missing()}
    for title, rows in sections.items():
        _show(title, rows or [Row("nothing", "")])
    if probe:
        typer.echo("\nsandboxes, each kind really started (some seconds) ...")
        sections["sandboxes"] = _sandboxes()
        _show("", sections["sandboxes"])
    if probe and importlib.util.find_spec("torch"):
        from moonlet.parallel.probe import probe as run_probe

        typer.echo("\nchecks, in two processes over gloo (some seconds) ...")
        sections["checks"] = [_check_row(check) for check in run_probe()]
        _show("", sections["checks"])
    broken = [row.name for rows in sections.values() for row in rows if row.state == "failed"]
    if broken:
        raise MoonletError(f"this machine cannot train as it is: {', '.join(broken)}; see the lines marked 'failed'")
    typer.echo("\nready: moonlet run recipes/smoke.toml takes about a minute")


def _show(title: str, rows: list[Row]) -> None:
    if title:
        typer.echo(f"\n{title}")
    width = max(len(row.name) for row in rows)
    colors = {"note": "yellow", "failed": "red"}
    for row in rows:
        mark = typer.style(f"{row.state:<6}", fg=colors.get(row.state))
        typer.echo(f"  {mark}  {row.name:<{width}}  {row.value}".rstrip())


def _machine() -> list[Row]:
    disk = shutil.disk_usage(Path.cwd())
    memory = _memory_bytes()
    rows = [
        Row("processor", _processor()),
        Row("instructions", " ".join(_instruction_sets()) or "unknown"),
        Row("cores", f"{num_usable_cores()} for this process, {os.cpu_count()} in all"),
        Row("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
    ]
    if memory:
        state = "ok" if memory["MemAvailable"] >= _FREE_MEMORY_BYTES else "note"
        free, total = memory["MemAvailable"] / _GIB, memory["MemTotal"] / _GIB
        rows.append(Row("memory", f"{free:.1f} GiB free of {total:.1f} (the laptop recipe wants 3)", state))
    state = "ok" if disk.free >= _FREE_DISK_BYTES else "note"
    rows.append(Row("disk", f"{disk.free / _GIB:.1f} GiB free here (the laptop recipe wants 2)", state))
    return rows


def _software() -> list[Row]:
    is_new = sys.version_info >= (3, 11)
    rows = [Row("python", platform.python_version(), "ok" if is_new else "failed")]
    try:
        import torch
    except ImportError as error:
        return [*rows, Row("torch", f"{error}: pip install -c constraints.txt -e .", "failed")]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    libraries = [name for name in ("mkl", "openmp") if getattr(torch.backends, name).is_available()]
    rows.append(Row("torch", f"{torch.__version__}, {build}, {' '.join(libraries) or 'no MKL, no OpenMP'}"))
    for name in _PACKAGES:
        try:
            rows.append(Row(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append(Row(name, "not installed: pip install -c constraints.txt -e .", "failed"))
    return rows


def _choices() -> list[Row]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    from moonlet.ops.backend import kernel_report
    from moonlet.ops.precision import matmul_dtype

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "none that torch can use"
    dtype = str(matmul_dtype(device)).removeprefix("torch.")
    why = "this processor multiplies it" if dtype == "bfloat16" else "bfloat16 would be emulated here"
    try:
        report = kernel_report()
    except MoonletError as error:
        report = {"kernels": "none", "why": str(error)}
    state = {"native": "ok", "none": "failed"}.get(report["kernels"], "note")
    rows = [Row("GPU", name), Row("kernels", f"{report['kernels']}: {report['why']}", state)]
    rows += [Row(f"  {key}", str(report[key])) for key in ("compiler", "flags", "path") if report.get(key)]
    rows.append(Row("precision", f"{dtype}: {why}"))
    rows.append(
        Row("processes", f"as the recipe says (train.num_processes), one thread each; {num_usable_cores()} fit here")
    )
    return rows


def _missing() -> list[Row]:
    """What would make Moonlet faster or able to do more, and how to get it."""
    from moonlet.ops.native.build import find_compiler

    rows = []
    try:
        find_compiler()
    except MoonletError as error:
        rows.append(Row("C++ compiler", f"the native kernels need one: {error}", "note"))
    for package, (extra, purpose) in _OPTIONAL.items():
        if importlib.util.find_spec(package) is None:
            rows.append(Row(package, f"{purpose}: pip install -e '.[{extra}]'", "note"))
    return rows


def _sandboxes() -> list[Row]:
    """What each kind of machine can do here; none of them is needed for training."""
    from moonlet.sandbox.choose import probe_all

    rows = []
    for found in asyncio.run(probe_all()):
        caps = found.caps
        if caps is None:
            rows.append(Row(found.backend, " ".join(found.reason.split()), "note"))
            continue
        pause = "a pause keeps processes on disk" if caps.processes_survive_pause else "a pause only freezes"
        fork = "forks processes" if caps.fork_processes else "forks files"
        rows.append(Row(found.backend, f"isolation {caps.isolation}, {pause}, {fork}", "ok"))
    return rows


def _check_row(check: Check) -> Row:
    if check.is_ok:
        return Row(check.name, "")
    return Row(check.name, check.message, "failed" if check.is_needed else "note")


def num_usable_cores() -> int:
    """Cores that this process may use: the affinity mask, cut by a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def _cpu_info(key: str) -> str:
    """First value under `key` in the kernel's description of the processor; '' where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == key), "")


def _processor() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _instruction_sets() -> list[str]:
    flags = set((_cpu_info("flags") or _cpu_info("Features")).split())
    return [name for name in _INSTRUCTION_SETS if name in flags]


def _memory_bytes() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.startswith(("MemTotal", "MemAvailable")))
    return {name.rstrip(":"): int(kibibytes) * 1024 for name, kibibytes, *_ in pairs}
