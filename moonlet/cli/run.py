"""`moonlet run RECIPE`: corpus, tokenizer, training stages, evaluation, report; with --resume from where it stopped."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonlet.cli.progress import Phases, open_sink
from moonlet.config import dump_toml, load_recipe

if TYPE_CHECKING:
    from moonlet.config import RunConfig
    from moonlet.train.rundir import RunDirectory


def run(
    recipe: Annotated[Path, typer.Argument(help="Recipe in TOML, e.g. recipes/laptop.toml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to it: stages.0.tokens=1000 ...")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory.", show_default="runs/NAME")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")] = False,
) -> None:
    """Run a whole recipe: corpus, tokenizer, training stages, evaluation, report."""
    config = load_recipe(recipe, overrides or [])
    if dry_run:
        typer.echo(dump_toml(config), nl=False)
        return
    from moonlet.train.rundir import open_run

    started = time.monotonic()
    with open_run(out or Path("runs") / config.name, config, resume) as directory:
        prepare(config, directory)
        train(config, directory, resume)
        results = measure(config, directory)
    summarise(results, directory.root, time.monotonic() - started)


def prepare(config: RunConfig, directory: RunDirectory) -> None:
    """Corpus and tokenizer; at once where they are there already."""
    from moonlet.data.corpus import prepare_corpus

    phases = Phases()
    corpus = prepare_corpus(config, directory.data, config.seed, phases)
    phases.close()
    tokens = sum(corpus.source(name).num_tokens for name in corpus.source_names)
    typer.echo(f"corpus: {tokens:,} tokens to train on, {len(corpus.heldout)} documents held out")


def train(config: RunConfig, directory: RunDirectory, resume: bool) -> None:
    """All stages, with the held-out score at the end of each."""
    from moonlet.eval.measure import stage_lines
    from moonlet.train.pretrain import pretrain

    score = partial(stage_lines, max_tokens=config.eval.heldout_tokens)
    pretrain(config, directory, resume, open_sink=open_sink, measure=score)


def measure(config: RunConfig, directory: RunDirectory) -> dict[str, Any]:
    """eval/*.json, report.html and results.json."""
    from moonlet.eval.measure import measure_run
    from moonlet.report.html import build_report

    results = measure_run(directory.root, settings=config.eval)
    build_report(directory.root)
    return results


def summarise(results: dict[str, Any], root: Path, seconds: float) -> None:
    """What the model learned, in a few lines."""
    heldout, recall = results["heldout"], results.get("recall")
    rivals = ", ".join(
        f"{name} {bits:.3f}" for name, bits in sorted(heldout["compressors"].items(), key=lambda x: x[1])
    )
    typer.echo(f"\nheld-out bits per byte: {heldout['bits_per_byte']:.3f}   ({rivals})")
    for stage in heldout["by_stage"]:
        typer.echo(f"  after stage {stage['stage']}: {stage['bits_per_byte']:.3f}")
    if recall:
        pairs = ", ".join(f"{d}: {a:.2f}" for d, a in zip(recall["distances"], recall["accuracy"]))
        typer.echo(f"recall by distance (chance {recall['chance']:.2f}): {pairs}")
    parses = [sample["parses"] for sample in results["samples"] if sample.get("parses") is not None]
    if parses:
        typer.echo(f"samples that parse as Python: {sum(parses)} of {len(parses)}")
    typer.echo(f"took {seconds / 60:.1f} min; report: {root / 'report.html'}")
