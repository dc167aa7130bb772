"""`moonlet export RUN FOLDER`: a trained model in the released checkpoint layout, with config.json and tokenizer."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Run directory, or one of its checkpoints.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; it must not exist yet or be empty.")],
    plain: Annotated[bool, typer.Option("--plain", help="BF16 experts instead of MXFP4 ones.")] = False,
    max_shard_mb: Annotated[
        int | None,
        typer.Option(min=1, help="Largest shard in megabytes.", show_default="one shard a layer"),
    ] = None,
) -> None:
    """Write the newest checkpoint of a run as a released one: safetensors shards, index, config.json, tokenizer.json."""
    from moonlet.model.hf import ExportOptions, export_released
    from moonlet.train.restore import load_model_for_inference

    model, _, tokenizer = load_model_for_inference(run)
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "tokenizer.json"
        tokenizer.save(file)
        options = ExportOptions(
            tokenizer_path=file,
            quantize_experts=not plain,
            max_shard_bytes=None if max_shard_mb is None else max_shard_mb * 1_000_000,
        )
        done = export_released(model, folder, options)
    typer.echo(f"{folder}: {done.tensors:,} tensors, {done.total_bytes:,} bytes in {len(done.files)} shards")
