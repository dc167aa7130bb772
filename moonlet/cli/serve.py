"""`moonlet serve RUN`: a trained model behind OpenAI's API."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moonlet.errors import StorageError

if TYPE_CHECKING:
    from fastapi import FastAPI


def serve(
    run: Annotated[Path, typer.Argument(help="Run directory, or one of its checkpoints.")] = Path("runs/latest"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="MOONLET_API_KEY", help="What clients must send as bearer key.")
    ] = None,
    mode: Annotated[str, typer.Option(help="recurrent is fast; replay gives the bits of training.")] = "recurrent",
    pages: Annotated[int, typer.Option(min=2, help="Pages of 64 tokens: the context of all requests together.")] = 1024,
    store: Annotated[
        list[str] | None, typer.Option(help="Where prefixes go that the cache forgets, such as ram:256MiB; repeatable.")
    ] = None,
) -> None:
    """Answer chats and completions with the newest checkpoint of a run, until Ctrl-C."""
    from moonlet.serve.engine import Engine, EngineConfig
    from moonlet.serve.engine_thread import EngineThread
    from moonlet.serve.openai import ServeConfig, build_app
    from moonlet.serve.state_store import open_store
    from moonlet.train.restore import load_model_for_inference

    settings = EngineConfig(mode=_mode(mode), num_pages=pages)
    listener = listen(host, port)
    model, config, tokenizer = load_model_for_inference(run)
    held = open_store(store) if store else None
    try:
        with EngineThread(Engine(model, settings, store=held)) as thread:
            app = build_app(thread, tokenizer, ServeConfig(model_name=config.name, api_key=api_key or None))
            at = f"[{host}]" if ":" in host else host
            typer.echo(f"{config.name} listens on http://{at}:{listener.getsockname()[1]}/v1 (Ctrl-C ends it)")
            serve_app(app, listener)
    finally:
        listener.close()
        if held is not None:
            held.close()


def _mode(name: str) -> Literal["recurrent", "replay"]:
    if name == "recurrent" or name == "replay":
        return name
    raise typer.BadParameter(f"'{name}' is not one of recurrent, replay", param_hint="--mode")


def listen(host: str, port: int) -> socket.socket:
    """Raises StorageError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With the protocol named, asyncio turns off Nagle's algorithm, which would hold back small chunks.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        raise StorageError(
            f"cannot listen on {host}:{port} ({error}): choose another with --host and --port"
        ) from error
    return listener


def serve_app(app: FastAPI, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; open answers have a few seconds to end."""
    import uvicorn

    class Server(uvicorn.Server):
        """Takes signals for itself: uvicorn would raise them again, which ends the process before the store is closed."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    settings = uvicorn.Config(
        app,
        lifespan="off",
        http="h11",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=60,
    )
    Server(settings).run(sockets=[listener])
