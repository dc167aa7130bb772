"""`moonlet sandbox template ...`: what sandboxes start from. Works on the state directory, also while a service has it."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonlet.cli.sandbox import tables

if TYPE_CHECKING:
    from moonlet.sandbox.template.store import TemplateStore

template_app = typer.Typer(help="What sandboxes start from.", no_args_is_help=True, pretty_exceptions_enable=False)

StateDir = Annotated[Path | None, typer.Option(help="State directory.", show_default="$MOONLET_STATE_DIR")]


@template_app.command()
def build(
    name: Annotated[str, typer.Argument(help="Name to start sandboxes from.")],
    source: Annotated[str, typer.Argument(help="dir:PATH, oci:PATH[@NAME] (layout or tar), or debian:PACKAGE,...")],
    state_dir: StateDir = None,
) -> None:
    """Make a template from a folder, a container image or Debian packages, and print its content hash."""
    from moonlet.sandbox.template.source import parse_source

    store, made_of = _store(state_dir), parse_source(source)
    lines = ProgressLines()
    try:
        template = asyncio.run(store.build(name, made_of, lines))
    finally:
        lines.close()
    print(template.id)


@template_app.command("ls")
def list_templates(state_dir: StateDir = None) -> None:
    """List templates, the last used first."""
    now = time.time()
    infos = asyncio.run(_store(state_dir).list())
    tables.show_table(
        ("name", "hash", "size", "age", "last used", "source"),
        (
            (
                ", ".join(info.names) or "-",
                info.id[:12],
                tables.size(info.num_bytes),
                tables.duration(now - info.created_at),
                f"{tables.duration(now - info.used_at)} ago",
                info.source,
            )
            for info in infos
        ),
        empty="no templates were built; 'host' is always there",
    )


@template_app.command("rm")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names or hashes.")], state_dir: StateDir = None
) -> None:
    """Forget templates; their files go when no sandbox and no snapshot needs them."""
    store = _store(state_dir)
    for name in names:
        asyncio.run(store.remove(name))
        print(name)


def _store(state_dir: Path | None) -> TemplateStore:
    from moonlet.sandbox.settings import ServiceConfig, default_state_dir
    from moonlet.sandbox.template.store import open_store

    config = ServiceConfig(state_dir or default_state_dir())
    return open_store(config.state_dir, config.template_cache_bytes)


class ProgressLines:
    """What is being done, on standard error: in one line that changes at a terminal, else a line for each new thing."""

    def __init__(self) -> None:
        self._last = ""
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, what: str, share: float | None) -> Any:
        text = what if share is None else f"{what} ({share:.0%})"
        if self._is_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif what != self._last:
            print(what, file=sys.stderr, flush=True)
        self._last = what

    def close(self) -> None:
        """End the line that changes."""
        if self._is_terminal and self._last:
            print(file=sys.stderr)
