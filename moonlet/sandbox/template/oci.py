"""A template from a container image: an OCI layout (folder or tar) or what `docker save` writes.

Every blob is checked against its digest, and every layer against the one that the image's configuration gives for its
uncompressed content (OCI image specification, "layer" and "config").
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonlet.errors import TemplateError, nearest_name
from moonlet.sandbox.template.archive import Archive, blob_name, open_archive
from moonlet.sandbox.template.layers import Layer, apply_layer
from moonlet.sandbox.template.source import Made, Source, Workshop
from moonlet.sandbox.template.tarball import Digested

_NAME_NOTE = "org.opencontainers.image.ref.name"
_MAX_LAYERS = 1000
_MAX_NESTING = 4
_HASH = re.compile(r"[0-9a-f]{64}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class OciSource(Source):
    """`name` chooses among the images of one file: a tag, or a name with a tag."""

    path: Path
    name: str = ""

    def __str__(self) -> str:
        return f"oci:{self.path}" + (f"@{self.name}" if self.name else "")

    def fill(self, workshop: Workshop) -> Made:
        workshop.tell(f"reading {self.path}")
        with open_archive(self.path) as archive:
            image = _find_image(archive, self.name)
            layers = [_unpack(archive, image, number, workshop) for number in range(len(image.blobs))]
        for number, layer in enumerate(layers):
            workshop.tell(f"layer {number + 1} of {len(layers)}", 0.5 + 0.4 * number / len(layers))
            apply_layer(layer, workshop.rootfs, workshop.tick)
        return Made(image.env, image.workdir, tuple(layer.digest for layer in layers))


@dataclass(frozen=True)
class _Blob:
    """A file of the archive; `digest` ("" if unknown) is that of its bytes as they are there."""

    file: str
    algorithm: str = "sha256"
    digest: str = ""


@dataclass(frozen=True)
class _Image:
    blobs: Sequence[_Blob]
    diff_ids: Sequence[str]
    env: dict[str, str]
    workdir: str


def _find_image(archive: Archive, name: str) -> _Image:
    if archive.has("index.json"):
        manifest = _load_manifest(archive, archive.load("index.json"), name)
        blobs = [_Blob(*blob_name(layer)) for layer in _items(manifest, "layers")]
        return _image(archive.load_blob(_dict(manifest).get("config")), blobs)
    if archive.has("manifest.json"):
        entry = _choose_saved(archive.load("manifest.json"), name)
        blobs = [_Blob(str(layer)) for layer in _items(entry, "Layers")]
        return _image(archive.load(str(entry.get("Config"))), blobs)
    raise TemplateError("this is no image: neither index.json (OCI) nor manifest.json (docker save) is in it")


def _image(config: Any, blobs: Sequence[_Blob]) -> _Image:
    rootfs = config.get("rootfs") if isinstance(config, dict) else None
    diff_ids = [str(digest).removeprefix("sha256:") for digest in _items(rootfs, "diff_ids")]
    if len(diff_ids) != len(blobs) or len(blobs) > _MAX_LAYERS:
        raise TemplateError(f"the image has {len(blobs)} layers and digests for {len(diff_ids)}: it is damaged")
    settings = _dict(config.get("config"))
    env, workdir = settings.get("Env"), settings.get("WorkingDir")
    pairs = [str(item).partition("=") for item in env] if isinstance(env, list) else []
    return _Image(
        blobs=blobs,
        diff_ids=diff_ids,
        env={key: value for key, equals, value in pairs if key and equals and "\0" not in key + value},
        workdir=workdir if isinstance(workdir, str) else "",
    )


def _items(value: Any, key: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise TemplateError(f"the image lacks its list of {key}: it is damaged")
    return found


def _load_manifest(archive: Archive, index: Any, name: str, depth: int = 0) -> Any:
    """The manifest for this machine's processor, under the wanted name; an index may lead to another one."""
    if depth > _MAX_NESTING:
        raise TemplateError("the image is an index of an index of an index: it is damaged")
    loaded = archive.load_blob(_choose([item for item in _items(index, "manifests") if isinstance(item, dict)], name))
    if isinstance(loaded, dict) and "manifests" in loaded:
        return _load_manifest(archive, loaded, "", depth + 1)
    return loaded


def _choose(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    if name:
        named = [item for item in found if _is_called(_noted_name(item), name)]
        known = [its for its in map(_noted_name, found) if its]
        if not named:
            raise TemplateError(
                f"no image is named '{name}'{nearest_name(name, known)}: {', '.join(known) or 'none is'}"
            )
        found = named
    here = _ARCHITECTURES.get(platform.machine(), platform.machine())
    fitting = [item for item in found if _dict(item.get("platform")).get("architecture", here) == here]
    if not fitting:
        raise TemplateError(f"the image has nothing for {here}")
    if len({str(item.get("digest")) for item in fitting}) > 1:
        raise TemplateError(_say_which(list(map(_noted_name, fitting))))
    return fitting[0]


def _choose_saved(entries: Any, name: str) -> dict[str, Any]:
    images = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if name:
        images = [entry for entry in images if any(_is_called(tag, name) for tag in _tags(entry))]
    if len(images) != 1:
        raise TemplateError(_say_which([tag for entry in images for tag in _tags(entry)]))
    return images[0]


def _say_which(names: list[str]) -> str:
    known = ", ".join(filter(None, names))
    return (
        f"not one image but several or none, say which: oci:PATH@NAME, with one of: {known or '(they have no names)'}"
    )


def _is_called(its: str, name: str) -> bool:
    return its == name or its.endswith((f":{name}", f"/{name}"))


def _noted_name(item: dict[str, Any]) -> str:
    notes = _dict(item.get("annotations"))
    return str(notes.get("io.containerd.image.name") or notes.get(_NAME_NOTE) or "")


def _tags(entry: dict[str, Any]) -> list[str]:
    tags = entry.get("RepoTags")
    return list(map(str, tags)) if isinstance(tags, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _unpack(archive: Archive, image: _Image, number: int, workshop: Workshop) -> Layer:
    """From the cache, or unpacked into it and checked both ways."""
    blob, expected = image.blobs[number], image.diff_ids[number]
    cached = workshop.layers.find(expected) if _HASH.fullmatch(expected) else None
    if cached is not None:
        return cached
    workshop.tell(f"unpacking layer {number + 1} of {len(image.blobs)}", 0.5 * number / len(image.blobs))
    with archive.open(blob.file) as file:
        packed = Digested(file, blob.algorithm)
        layer = workshop.layers.add(packed, workshop.scratch, workshop.tick, expected)
        if blob.digest and packed.finish() != blob.digest:
            raise TemplateError(f"layer {number + 1} does not have the content that the image says: it is damaged")
    return layer
