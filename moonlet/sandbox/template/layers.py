"""Layers of an image: unpacked once into a cache, named by the digest of what is in them, and applied to a tree.

    layers/DIGEST/  entries.jsonl  files/0 files/1 ...  bytes

Unpacking never uses a name of the tar for a file. Applying resolves names in the tree and follows links within it only.
Files of a tree are hard links of those in the cache: templates that share layers share their bytes, and nobody writes
to either.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from moonlet.errors import TemplateError
from moonlet.sandbox.template.tarball import Digested, Entry, Readable, decompressed, read_entries
from moonlet.sandbox.template.tree import Tree

_COPY_BYTES = 1 << 20

Tick = Callable[[int], None]  # so many bytes were done; raises to stop the work


@dataclass(frozen=True)
class Layer:
    """An unpacked layer."""

    folder: Path

    @property
    def digest(self) -> str:
        return self.folder.name

    @property
    def num_bytes(self) -> int:
        return int((self.folder / "bytes").read_text())

    def entries(self) -> Iterator[tuple[Entry, Path | None]]:
        number = 0
        with (self.folder / "entries.jsonl").open() as lines:
            for line in lines:
                entry = Entry(**json.loads(line))
                content = None
                if entry.kind == "file":
                    content, number = self.folder / "files" / str(number), number + 1
                yield entry, content


class LayerCache:
    """Unpacked layers by digest. A folder appears whole, by a rename."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def find(self, digest: str) -> Layer | None:
        layer = Layer(self.folder / digest)
        if not layer.folder.is_dir():
            return None
        os.utime(layer.folder)
        return layer

    def add(self, stream: Readable, scratch: Path, tick: Tick, expected: str) -> Layer:
        """Unpack a layer below `scratch` and keep it.

        Raises TemplateError for a tar that is none, is hostile or does not have the expected digest.
        """
        unfinished = scratch / f"layer-{uuid.uuid4().hex}"
        unfinished.mkdir()
        digest = unpack_layer(stream, unfinished, tick)
        if digest != expected:
            raise TemplateError(
                f"a layer has the digest {digest}, not {expected[:100]} as the image says: it is damaged"
            )
        try:
            unfinished.rename(self.folder / digest)
        except OSError:  # another builder was faster
            if self.find(digest) is None:
                raise
        return Layer(self.folder / digest)

    def __iter__(self) -> Iterator[Layer]:
        return (Layer(path) for path in sorted(self.folder.iterdir()))


def unpack_layer(stream: Readable, folder: Path, tick: Tick) -> str:
    """Unpack a tar (plain, gzip or zstd) into the empty `folder`; returns its digest.

    That is the SHA-256 of the uncompressed tar, by which images know their layers.
    """
    tar = Digested(decompressed(stream))
    number = total = 0
    (folder / "files").mkdir()
    with (folder / "entries.jsonl").open("w") as lines:
        for entry, content in read_entries(tar):
            if content is not None:
                total += _write_file(folder / "files" / str(number), entry, content, tick)
                number += 1
            lines.write(json.dumps(asdict(entry)) + "\n")
            tick(0)
    (folder / "bytes").write_text(str(total))
    return tar.finish()


def _write_file(path: Path, entry: Entry, content: Readable, tick: Tick) -> int:
    size = 0
    with path.open("xb") as file:
        while data := content.read(_COPY_BYTES):
            file.write(data)
            size += len(data)
            tick(len(data))
    if size != entry.size:
        raise TemplateError(f"the tar is cut short in {entry.path!r}")
    path.chmod(entry.mode | 0o400)
    os.utime(path, (entry.mtime, entry.mtime))
    return size


def apply_layer(layer: Layer, root: Path, tick: Tick) -> None:
    """Lay a layer over the tree below `root`. What it hides of the layers below goes first, wherever in the tar it stands."""
    tree = Tree(root)
    for entry, _ in layer.entries():
        if entry.kind in ("whiteout", "opaque"):
            tree.hide(entry)
            tick(0)
    for entry, content in layer.entries():
        if entry.kind not in ("whiteout", "opaque"):
            tree.put(entry, content)
            tick(0)
