"""`moonlet report RUN`: the HTML report and its figures for machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Run directory, finished or not.", show_default=True)] = Path(
        "runs/latest"
    ),
) -> None:
    """Write report.html and results.json into a run directory, from whatever it holds so far."""
    from moonlet.report.html import build_report

    typer.echo(str(build_report(run)))
