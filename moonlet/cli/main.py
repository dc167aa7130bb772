"""The command line: `moonlet VERB`. A verb's file is imported when the verb is called, so `--help` needs no torch.

Exit codes: 0 done, 1 a MoonletError (one message on stderr, no traceback), 2 wrong usage, 130 Ctrl-C.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from moonlet.errors import MoonletError
from moonlet.process import settle_process


class Verb(NamedTuple):
    """`function` in `module` is the command, or a typer application with commands of its own.

    Its signature gives the options, `summary` stands in the overview.
    """

    module: str
    function: str
    summary: str


VERBS = {
    "run": Verb("moonlet.cli.run", "run", "Run a whole recipe: data, training stages, evaluation, report."),
    "train": Verb("moonlet.cli.train", "train", "Train from a recipe, or explain which parameter is trained how."),
    "eval": Verb("moonlet.cli.eval", "evaluate", "Measure a run: held-out bits per byte, recall by distance, samples."),
    "report": Verb("moonlet.cli.report", "report", "Write report.html and results.json from a run directory."),
    "chat": Verb("moonlet.cli.chat", "chat", "Talk to a trained run in the terminal."),
    "serve": Verb("moonlet.cli.serve", "serve", "Serve a trained run over OpenAI's API."),
    "export": Verb("moonlet.cli.export", "export", "Write a run in the released checkpoint layout."),
    "sandbox": Verb("moonlet.cli.sandbox", "app", "Machines that pause: start, exec, pause, resume, fork, snapshot."),
    "size": Verb("moonlet.cli.size", "size", "Count parameters, FLOPs and bytes without allocating anything."),
    "doctor": Verb("moonlet.cli.doctor", "doctor", "Say what this machine is, what will be used and what is missing."),
}


def load_command(name: str) -> Any:
    """The command object of a verb; imports the verb's module."""
    verb = VERBS[name]
    command = getattr(importlib.import_module(verb.module), verb.function)
    if isinstance(command, typer.Typer):
        return typer.main.get_command(command)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name)(command)
    return typer.main.get_command(app)


class VerbGroup(TyperGroup):
    """Lists the verbs by their summaries, replaces the one that is called by its real command, and maps errors."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in VERBS else command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MoonletError as error:
            _complain(f"error: {error}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            hint = "; what was saved is complete: the same command with --resume goes on" if self._resumes(ctx) else ""
            _complain(f"interrupted{hint}")
            raise typer.Exit(130) from None

    def _resumes(self, ctx: Any) -> bool:
        return ctx.invoked_subcommand in ("run", "train")


app = typer.Typer(
    name="moonlet",
    cls=VerbGroup,
    help="Moonlet: train, measure and take apart small K3 models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _placeholder() -> None:
    """Stands for a verb in the overview; `VerbGroup.resolve_command` puts the real command in its place."""


for _name, _verb in VERBS.items():
    app.command(_name, help=_verb.summary)(_placeholder)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"moonlet {importlib.import_module('importlib.metadata').version('moonlet')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Moonlet: train, measure and take apart small K3 models."""


def _complain(message: str) -> None:
    print(f"\x1b[31m{message}\x1b[0m" if sys.stderr.isatty() else message, file=sys.stderr, flush=True)


def main() -> None:
    """Entry point of the `moonlet` script and of `python -m moonlet`."""
    settle_process()
    app()
