"""`moonlet sandbox VERB`: start machines, work in them, pause, fork and keep them.

A command talks to the service that it is pointed to (--url or $MOONLET_SANDBOX_URL), else to the service of the state
directory, else it opens the state directory itself: machines live on when the command ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from moonlet.cli.sandbox import tables
from moonlet.cli.sandbox.place import Place, open_place
from moonlet.cli.sandbox.serving import serve
from moonlet.cli.sandbox.templates import template_app
from moonlet.errors import ConfigError, MoonletError, SandboxError

app = typer.Typer(
    help="Machines that pause: start, exec, pause, resume, fork, snapshot.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve)
app.add_typer(template_app, name="template")

Url = Annotated[str | None, typer.Option(help="Service to use.", show_default="$MOONLET_SANDBOX_URL")]
StateDir = Annotated[Path | None, typer.Option(help="State directory.", show_default="$MOONLET_STATE_DIR")]
Ids = Annotated[list[str], typer.Argument(metavar="SANDBOX...", help="Ids, as `ls` shows them.")]
Id = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id, as `ls` shows it.")]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE for its commands; repeatable.")]
Metadata = Annotated[list[str] | None, typer.Option("--metadata", "-m", help="NAME=VALUE; repeatable.")]

_PASSES_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def _in_place(url: str | None, state_dir: Path | None, work: Callable[[Place], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        async with open_place(url, state_dir) as place:
            return await work(place)

    return asyncio.run(whole())


async def _each(names: list[str], work: Callable[[str], Awaitable[None]]) -> None:
    """Do it for all; what fails for one does not keep the others from it. Raises one error for all that failed."""
    errors = []
    for name in names:
        try:
            await work(name)
        except MoonletError as error:
            errors.append(f"{name}: {error}" if len(names) > 1 else str(error))
        else:
            print(name)
    if errors:
        raise SandboxError("\n       ".join(errors))


@app.command()
def start(
    template: Annotated[str, typer.Argument(help="Template, snapshot, or host: this system, read-only.")] = "host",
    backend: Annotated[str, typer.Option(help="auto, namespace, gvisor, microvm, firecracker, landlock.")] = "auto",
    memory: Annotated[str, typer.Option(help="Largest memory, e.g. 512M.")] = "512M",
    disk: Annotated[str, typer.Option(help="Largest size of its files.")] = "2G",
    cpus: Annotated[float, typer.Option(min=0.1, help="Processors that it may use.")] = 1.0,
    processes: Annotated[int, typer.Option(min=1, help="Processes at once.")] = 256,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Host that it may reach, e.g. *.example.org:443; repeatable. None by default."),
    ] = None,
    ttl: Annotated[float, typer.Option(min=0, help="Seconds to live; 0: until it is removed.")] = 3600.0,
    kill_at_end: Annotated[bool, typer.Option("--kill-at-end", help="Remove it then, instead of pausing it.")] = False,
    idle_pause: Annotated[float | None, typer.Option(min=1, help="Pause after so many seconds without work.")] = None,
    env: Env = None,
    metadata: Metadata = None,
    url: Url = None,
    state_dir: StateDir = None,
) -> None:
    """Start a sandbox and print its id."""
    from moonlet.sandbox.api import Limits, SandboxSpec

    spec = SandboxSpec(
        template=template,
        backend=backend,
        limits=Limits(
            memory_bytes=tables.parse_size(memory),
            disk_bytes=tables.parse_size(disk),
            processes=processes,
            cpus=cpus,
        ),
        env=tables.parse_pairs(env or (), "variable"),
        metadata=tables.parse_pairs(metadata or (), "metadata"),
        allow_hosts=tuple(allow_host or ()),
        ttl_s=ttl or None,
        on_timeout="kill" if kill_at_end else "pause",
        idle_pause_s=idle_pause,
    )

    async def work(place: Place) -> None:
        print((await place.create(spec)).id)

    _in_place(url, state_dir, work)


@app.command("exec", context_settings=_PASSES_ON)
def execute(
    sandbox: Id,
    command: Annotated[list[str], typer.Argument(help="One word goes to the shell, several are run as they are.")],
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass standard input on.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the command's id and leave it running.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds after which all of it is killed; 0: never.")] = 0.0,
    cwd: Annotated[
        str | None, typer.Option("--cwd", "-w", help="Working directory.", show_default="/workspace")
    ] = None,
    env: Env = None,
    url: Url = None,
    state_dir: StateDir = None,
) -> None:
    """Run a command; its output and exit code become ours. A paused sandbox is resumed. Options stand before SANDBOX."""
    from moonlet.cli.sandbox.terminal import run_streaming

    argv = command[0] if len(command) == 1 else command
    variables = tables.parse_pairs(env or (), "variable")

    async def work(place: Place) -> int:
        box = await place.attach(sandbox)
        if detach:
            process = await box.start(argv, timeout_s=timeout or None, env=variables, cwd=cwd)
            print(process.command_id)
            return 0
        return await run_streaming(box, argv, timeout_s=timeout or None, env=variables, cwd=cwd, takes_input=stdin)

    raise typer.Exit(_in_place(url, state_dir, work))


@app.command(context_settings=_PASSES_ON)
def attach(
    sandbox: Id,
    command: Annotated[list[str] | None, typer.Argument(help="Instead of a shell.", show_default=False)] = None,
    url: Url = None,
    state_dir: StateDir = None,
) -> None:
    """A shell in the sandbox, in this terminal; it ends with the shell. A paused sandbox is resumed."""
    from moonlet.cli.sandbox.terminal import interact

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("attach needs a terminal; without one use `moonlet sandbox exec`")
    shell = "if command -v bash >/dev/null; then exec bash; fi; exec sh"
    argv = command or ["/bin/sh", "-c", shell]

    async def work(place: Place) -> int:
        return await interact(await place.attach(sandbox), argv)

    raise typer.Exit(_in_place(url, state_dir, work))


@app.command("cp")
def copy(
    source: Annotated[str, typer.Argument(help="PATH here, or SANDBOX:PATH.")],
    target: Annotated[str, typer.Argument(help="SANDBOX:PATH, or PATH here.")],
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Name each file.")] = False,
    url: Url = None,
    state_dir: StateDir = None,
) -> None:
    """Copy a file or a folder into a sandbox or out of it; links are left out. A paused sandbox is resumed."""
    from moonlet.sandbox.transfer import download_path, upload_path

    (from_box, from_path), (to_box, to_path) = _split_place(source), _split_place(target)
    if bool(from_box) == bool(to_box):
        raise ConfigError(
            "cp: one of the two places is SANDBOX:PATH, the other a path here (./a:b for one with a colon)"
        )
    note = (lambda path, size: print(f"{path}  {tables.size(size)}", file=sys.stderr)) if verbose else None

    async def work(place: Place) -> None:
        box = await place.attach(from_box or to_box)
        if from_box:
            copied = await download_path(box, from_path, Path(to_path), note)
        else:
            copied = await upload_path(box, Path(from_path), to_path, note)
        left = f", {len(copied.skipped)} links and special files left out" if copied.skipped else ""
        print(f"{copied.num_files} files, {tables.size(copied.num_bytes)}{left}", file=sys.stderr)

    _in_place(url, state_dir, work)


def _split_place(text: str) -> tuple[str, str]:
    """(sandbox, path); no sandbox for a path of ours. A path that starts with . or / has no sandbox before its colon."""
    name, colon, path = text.partition(":")
    if not colon or "/" in name or name.startswith("."):
        return "", text
    return name, path or "."


@app.command()
def pause(sandboxes: Ids, url: Url = None, state_dir: StateDir = None) -> None:
    """Stop machines; `resume` lets them go on where they were."""

    async def work(place: Place) -> None:
        async def one(name: str) -> None:
            await (await place.get(name)).pause()

        await _each(sandboxes, one)

    _in_place(url, state_dir, work)


@app.command()
def resume(sandboxes: Ids, url: Url = None, state_dir: StateDir = None) -> None:
    """Let paused machines go on."""

    async def work(place: Place) -> None:
        async def one(name: str) -> None:
            await place.attach(name)

        await _each(sandboxes, one)

    _in_place(url, state_dir, work)


@app.command()
def fork(
    sandbox: Id,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many copies.")] = 1,
    url: Url = None,
    state_dir: StateDir = None,
) -> None:
    """Make copies that go on from here, and print their ids."""

    async def work(place: Place) -> list[Exception]:
        children = await (await place.get(sandbox)).fork(count)
        for child in children:
            if not isinstance(child, Exception):
                print(child.id)
        return [child for child in children if isinstance(child, Exception)]

    if errors := _in_place(url, state_dir, work):
        raise SandboxError(f"{len(errors)} of {count} copies failed: {errors[0]}")


@app.command()
def snapshot(
    sandbox: Annotated[str | None, typer.Argument(metavar="[SANDBOX]", help="What to keep a copy of.")] = None,
    name: Annotated[str | None, typer.Option(help="A name for it.")] = None,
    shows_list: Annotated[bool, typer.Option("--list", help="List all snapshots.")] = False,
    delete: Annotated[str | None, typer.Option(help="Delete the snapshot of this id or name.")] = None,
    url: Url = None,
    state_dir: StateDir = None,
) -> None:
    """Keep a copy of a running sandbox; `moonlet sandbox start SNAPSHOT` starts from it."""
    if sum((sandbox is not None, shows_list, delete is not None)) != 1:
        raise ConfigError("snapshot: name one SANDBOX, or say --list, or --delete SNAPSHOT")

    async def work(place: Place) -> None:
        if sandbox is not None:
            print(await (await place.get(sandbox)).snapshot(name))
        elif delete is not None:
            await place.delete_snapshot(delete)
            print(delete)
        else:
            tables.show_table(("id", "name"), await place.snapshots(), empty="no snapshots")

    _in_place(url, state_dir, work)


@app.command("ls")
def list_sandboxes(
    metadata: Metadata = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Ids only.")] = False,
    url: Url = None,
    state_dir: StateDir = None,
) -> None:
    """List sandboxes, oldest first."""
    infos = _in_place(url, state_dir, lambda place: _matching(place, metadata))
    if quiet or as_json:
        for info in infos:
            print(info.id if quiet else json.dumps(asdict(info)))
        return
    tables.show_sandboxes(infos)


async def _matching(place: Place, metadata: list[str] | None) -> list[Any]:
    wanted = tables.parse_pairs(metadata or (), "metadata")
    return [info for info in await place.list() if wanted.items() <= dict(info.metadata).items()]


@app.command("rm")
def remove(
    sandboxes: Annotated[list[str] | None, typer.Argument(metavar="[SANDBOX]...", help="Ids.")] = None,
    removes_all: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    metadata: Metadata = None,
    url: Url = None,
    state_dir: StateDir = None,
) -> None:
    """Remove sandboxes in whatever state they are, by id or by metadata."""
    if not (sandboxes or removes_all or metadata):
        raise ConfigError("rm: name sandboxes, or say --metadata NAME=VALUE, or --all")

    async def work(place: Place) -> None:
        async def one(name: str) -> None:
            await (await place.get(name)).destroy()

        names = list(sandboxes or ())
        if removes_all or metadata:
            names += [info.id for info in await _matching(place, metadata)]
        await _each(names, one)

    _in_place(url, state_dir, work)


@app.command()
def logs(sandbox: Id, url: Url = None, state_dir: StateDir = None) -> None:
    """What the machine itself printed last, also after its death; not the output of commands."""
    from moonlet.cli.sandbox.terminal import write_all

    data = _in_place(url, state_dir, lambda place: place.logs(sandbox))
    write_all(1, data)


@app.command()
def probe() -> None:
    """Try each kind of machine for real, and say what it can do here or why it does not work."""
    from moonlet.sandbox.choose import probe_all

    tables.show_probes(asyncio.run(probe_all()))
