"""`moonlet size NAME`: how large a model is, by formula and by its modules, without allocating it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from moonlet.config import ModelConfig, VisionConfig
    from moonlet.model.size import Size


def size(
    target: Annotated[str, typer.Argument(help="A preset (nano, micro, mini, k3) or the path of a config.json.")],
    context: Annotated[int, typer.Option(help="Tokens in a sequence, for the attention part of the FLOPs.")] = 8192,
) -> None:
    """Count the parameters, FLOPs, bytes and decode state of a model."""
    from moonlet.errors import MoonletError
    from moonlet.model.size import count_built, count_parameters

    config, vision = _read(target)
    result = count_parameters(config, vision, context=context)
    if (built := count_built(config, vision)) != result.total:
        raise MoonletError(
            f"the formula gives {result.total:,} parameters but the modules have {built:,}: a bug, report it"
        )
    _print(target, result)


def _read(target: str) -> tuple[ModelConfig, VisionConfig | None]:
    from moonlet.config import preset_names, resolve_model
    from moonlet.config.vision import load_vision_preset

    path = Path(target)
    if target in preset_names() or not (path.exists() or path.suffix or len(path.parts) > 1):
        return resolve_model({"preset": target}), load_vision_preset(target)
    from moonlet.model.hf import read_config

    released = read_config(path)
    return released.text, released.vision


def _print(target: str, size: Size) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("part")
    for column in ("parameters", "share", "checkpoint bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for part, count in size.parts.items():
        table.add_row(part, f"{count:,}", f"{count / size.total:.2%}", f"{size.bytes_by_part[part]:,}")
    console = Console()
    title = f"{target}: by formula, checked against its modules on the meta device"
    console.print(title, soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    for name, value in _totals(size):
        console.print(f"{name:<28}{value}", soft_wrap=True, highlight=False)


def _totals(size: Size) -> list[tuple[str, str]]:
    flops, decode = size.flops, size.decode
    vision = [("with vision", f"{size.total:,}")] if size.total != size.text else []
    return [
        ("text parameters", f"{size.text:,}"),
        *vision,
        ("active for a token", f"{size.active:,}"),
        ("checkpoint bytes", f"{size.checkpoint_bytes:,}"),
        ("checkpoint tensors", f"{size.tensors:,}"),
        (
            "forward FLOPs for a token",
            f"{flops.forward:.4g} at {flops.context:,} tokens "
            f"(weights {flops.weights:.4g}, KDA {flops.kda:.4g}, MLA {flops.mla:.4g}); training three times that",
        ),
        (
            "decode state of a sequence",
            f"{decode.kda_state + decode.conv_windows:,} bytes, and {decode.mla_per_token:,} for each token",
        ),
    ]
