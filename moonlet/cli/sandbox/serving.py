"""`moonlet sandbox serve`: the service of one state directory."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moonlet.errors import ConfigError, nearest_name


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8490,
    state_dir: Annotated[Path | None, typer.Option(help="State directory.", show_default="$MOONLET_STATE_DIR")] = None,
    backend: Annotated[str, typer.Option(help="What makes machines where a client does not say.")] = "auto",
    max_running: Annotated[int, typer.Option(min=1, help="Machines that run at once.")] = 64,
    max_total: Annotated[int, typer.Option(min=1, help="Sandboxes, paused ones too.")] = 1000,
    snapshot_url: Annotated[str | None, typer.Option(help="Where snapshots are kept: a folder, or s3://...")] = None,
    domain: Annotated[str | None, typer.Option(help="Domain whose names <port>-<id>.<domain> lead here.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other setting, NAME=VALUE; repeatable.")
    ] = None,
) -> None:
    """Serve sandboxes with the API of E2B until Ctrl-C, which pauses what runs."""
    from moonlet.sandbox.server.app import serve as serve_service
    from moonlet.sandbox.server.config import ServerConfig
    from moonlet.sandbox.settings import ServiceConfig

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    values: dict[str, Any] = {"backend": backend, "max_running": max_running, "max_total": max_total}
    values |= {"snapshot_url": snapshot_url} | ({"state_dir": state_dir} if state_dir else {})
    service = ServiceConfig.from_mapping(values | parse_settings(settings or []))

    def started(url: str, *_: object) -> None:
        print(f"sandboxes at {url}, state and API key in {service.state_dir}", flush=True)

    asyncio.run(serve_service(ServerConfig(host=host, port=port, domain=domain, service=service), started))


def parse_settings(texts: list[str]) -> dict[str, Any]:
    """Fields of ServiceConfig with values of their types. Raises ConfigError with the nearest name."""
    from dataclasses import fields

    from moonlet.sandbox.settings import ServiceConfig

    kinds = {field.name: str(field.type) for field in fields(ServiceConfig)}
    parsed: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in kinds:
            raise ConfigError(f"there is no setting '{name}' of the sandbox service{nearest_name(name, kinds)}")
        try:
            parsed[name] = _typed(kinds[name], value)
        except ValueError:
            raise ConfigError(f"setting {name}: '{value}' is no {kinds[name]}") from None
    return parsed


def _typed(kind: str, value: str) -> Any:
    if "None" in kind and value in ("", "none"):
        return None
    return int(value) if kind.startswith("int") else float(value) if kind.startswith("float") else value
