"""`moonlet eval RUN`: what a trained run knows, in figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(help="Run directory, or one of its checkpoints.")] = Path("runs/latest"),
    distances: Annotated[
        str | None, typer.Option(help="Recall distances in tokens, such as 64,512,4096; default: the recipe's.")
    ] = None,
) -> None:
    """Measure held-out bits per byte, recall by distance, samples and depth attention; write them to RUN/eval."""
    asked = parse_distances(distances)
    from moonlet.eval.measure import measure_run

    for line in describe(measure_run(run, asked)):
        typer.echo(line)


def parse_distances(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [0]
    if any(distance < 1 for distance in found):
        raise typer.BadParameter(
            f"'{text}' is not a list of positive whole numbers such as 64,512", param_hint="--distances"
        )
    return found


def describe(pieces: dict[str, Any]) -> Iterator[str]:
    """The lines of the table; `pieces` as `eval.measure.measure_run` returns them."""
    yield from _describe_heldout(pieces["heldout"])
    if "recall" in pieces:
        yield from _describe_recall(pieces["recall"])
    samples = pieces["samples"]
    judged = [sample["parses"] for sample in samples if sample["parses"] is not None]
    verdict = f", {sum(judged)} of {len(judged)} are valid Python" if judged else ""
    yield f"\n{len(samples)} samples{verdict}"


def _describe_heldout(heldout: dict[str, Any]) -> Iterator[str]:
    yield f"\nheld-out text: {heldout['documents']} documents, {heldout['bytes']:,} bytes, {heldout['tokens']:,} tokens"
    yield f"  {'bits per byte':<16}{heldout['bits_per_byte']:8.4f}   ({heldout['nats_per_token']:.4f} nats per token)"
    for stage in heldout["by_stage"]:
        yield f"  {'after ' + str(stage['stage']):<16}{stage['bits_per_byte']:8.4f}"
    for name, bits in sorted(heldout["compressors"].items(), key=lambda item: item[1]):
        yield f"  {name:<16}{bits:8.4f}"


def _describe_recall(recall: dict[str, Any]) -> Iterator[str]:
    yield f"\nrecall of a planted fact: {recall['probes']} questions a distance, chance {recall['chance']:.0%}"
    yield f"  {'tokens between':<16}{'right':>8}   95 % interval"
    for distance, share, low, high in zip(*(recall[key] for key in ("distances", "accuracy", "low", "high"))):
        yield f"  {distance:<16,}{share:8.1%}   {low:.1%} to {high:.1%}"
