"""The released checkpoint layout, both ways: `read_config`, `load_released`, `export_released`.

model, report = load_released(folder)
export_released(model, other_folder, ExportOptions.like(folder, report))  # byte for byte
"""

from __future__ import annotations

from moonlet.model.hf_config import ReleasedConfig, read_config
from moonlet.model.hf_load import LoadReport, load_released
from moonlet.model.hf_save import ExportOptions, ExportReport, export_released

__all__ = [
    "ExportOptions",
    "ExportReport",
    "LoadReport",
    "ReleasedConfig",
    "export_released",
    "load_released",
    "read_config",
]
