"""`moonlet train RECIPE`: corpus and training stages only; `--explain` prints which parameter is trained by which rule."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonlet.cli.progress import open_sink
from moonlet.cli.run import prepare
from moonlet.config import load_recipe

if TYPE_CHECKING:
    from moonlet.config import RunConfig
    from moonlet.train.rundir import RunDirectory


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe in TOML, e.g. recipes/laptop.toml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to it: stages.0.tokens=1000 ...")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory.", show_default="runs/NAME")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print how each parameter is trained, and stop.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that is there.")] = False,
    reset_optimizer: Annotated[
        bool, typer.Option("--reset-optimizer", help="Resume the weights alone, with a fresh optimiser.")
    ] = False,
) -> None:
    """Train a recipe's stages without the evaluation, alone or under torchrun."""
    config = load_recipe(recipe, overrides or [])
    if explain:
        typer.echo(explain_recipe(config))
        return
    from moonlet.train.rundir import RunDirectory, open_run

    root = out or Path("runs") / config.name
    if int(os.environ.get("RANK", "0")) > 0:  # under torchrun the first rank makes the run directory
        train_stages(config, RunDirectory(root.resolve()), resume, reset_optimizer)
        return
    with open_run(root, config, resume) as directory:
        train_stages(config, directory, resume, reset_optimizer)
        typer.echo(f"checkpoints are in {directory.checkpoints}")


def train_stages(config: RunConfig, directory: RunDirectory, resume: bool, reset_optimizer: bool) -> None:
    """The corpus if it is not there yet, then all stages."""
    from moonlet.eval.measure import stage_lines
    from moonlet.train.pretrain import pretrain

    prepare(config, directory)
    score = partial(stage_lines, max_tokens=config.eval.heldout_tokens)
    pretrain(config, directory, resume, reset_optimizer=reset_optimizer, open_sink=open_sink, measure=score)


def explain_recipe(config: RunConfig) -> str:
    """The table of `optim/groups.py` for a recipe's model, from shapes alone: nothing is allocated."""
    from moonlet.model.empty import build_empty
    from moonlet.optim.groups import assign_groups, explain_groups

    return explain_groups(assign_groups(build_empty(config.model, device="meta"), config.optim))
