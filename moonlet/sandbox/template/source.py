"""Where the files of a template come from. A source fills an empty folder; all else is the store's."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moonlet.errors import TemplateError, nearest_name
from moonlet.sandbox.backend import Progress
from moonlet.sandbox.template.layers import LayerCache


@dataclass(frozen=True)
class Made:
    """What a source has to say beside the files."""

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""
    layers: tuple[str, ...] = ()  # digests of the cached layers whose files the tree shares


class BuildStoppedError(Exception):
    """The build was cancelled."""


@dataclass(frozen=True)
class Workshop:
    """What a source works with, in a thread of its own: `rootfs` is to be filled, `scratch` goes away at the end."""

    rootfs: Path
    scratch: Path
    layers: LayerCache
    progress: Progress
    stop: threading.Event

    def tell(self, what: str, share: float | None = None) -> None:
        self.tick()
        self.progress(what, share)

    def tick(self, num_bytes: int = 0) -> None:
        """To be called often; raises BuildStoppedError once the build is cancelled."""
        if self.stop.is_set():
            raise BuildStoppedError


class Source(ABC):
    """`str(source)` is what lists show of it."""

    @abstractmethod
    def fill(self, workshop: Workshop) -> Made:
        """Blocking. Raises TemplateError for a source that is broken, and OSError."""


def parse_source(text: str) -> Source:
    """`dir:PATH`, `oci:PATH` or `oci:PATH@NAME` (a layout, its tar, or what `docker save` writes), `debian:PACKAGE,...`.

    Raises TemplateError for anything else.
    """
    from moonlet.sandbox.template.debian import DebianSource
    from moonlet.sandbox.template.directory import DirectorySource
    from moonlet.sandbox.template.oci import OciSource

    kind, colon, rest = text.partition(":")
    if not colon or not rest:
        raise TemplateError(f"a template's source is dir:PATH, oci:PATH[@NAME] or debian:PACKAGE,...; not {text!r}")
    if kind == "dir":
        return DirectorySource(Path(rest))
    if kind == "oci":
        path, at, name = rest.rpartition("@")
        return OciSource(Path(path), name) if at and not Path(rest).exists() else OciSource(Path(rest))
    if kind == "debian":
        return DebianSource(tuple(name.strip() for name in rest.split(",") if name.strip()))
    raise TemplateError(f"there is no kind of source '{kind}'{nearest_name(kind, ['dir', 'oci', 'debian'])}")
