"""Golden vectors from MOONLET_GOLDEN (default ../shared/golden), and one thread per process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from safetensors.torch import load_file

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(os.environ.get("MOONLET_GOLDEN") or ROOT.parent / "shared" / "golden")


class Golden:
    """The golden folder: configurations, cases and tensors by file stem; nothing about a case is known here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stems(self, pattern: str) -> list[str]:
        """Stems of the vector files that match, e.g. `g_text_*`, without their weight files."""
        found = {path.name.split(".")[0] for path in self.folder.glob(f"{pattern}.safetensors")}
        return sorted(found)

    def info(self, stem: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{stem}.json").read_text())

    def tensors(self, stem: str, prefix: str = "") -> dict[str, torch.Tensor]:
        """Tensors of `stem`, those under `prefix/` only and without it."""
        tensors = load_file(self.folder / f"{stem}.safetensors")
        start = f"{prefix}/" if prefix else ""
        return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


@pytest.fixture(scope="session")
def golden() -> Golden:
    if not GOLDEN.is_dir():
        pytest.skip(f"golden vectors are not at {GOLDEN}; set MOONLET_GOLDEN to their folder")
    return Golden(GOLDEN)


def golden_stems(pattern: str) -> list[str]:
    """Stems to parametrise a test over; one placeholder where the folder is absent, so that the skip is printed."""
    return Golden(GOLDEN).stems(pattern) or ["absent"]
