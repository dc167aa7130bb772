"""Container images as templates: all forms that they come in, and damage to each part."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox.oci_images import Layout, config_of, docker_save, sha256, tar_bytes

from moonlet.errors import TemplateError
from moonlet.sandbox.backend import Template
from moonlet.sandbox.template.oci import OciSource
from moonlet.sandbox.template.source import parse_source
from moonlet.sandbox.template.store import TemplateStore

BASE = tar_bytes({"bin": None, "bin/tool": b"one", "etc": None, "etc/old": b"old", "lib": "usr/lib"})
TOP = tar_bytes({"bin/tool": b"two", "etc/.wh.old": b"", "opt/new": b"new"})


@pytest.fixture
def build(tmp_path: Path) -> Callable[[Path, str], Template]:
    store = TemplateStore(tmp_path / "store")

    def built(path: Path, name: str = "") -> Template:
        return asyncio.run(store.build("image", OciSource(path, name)))

    return built


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def check(template: Template) -> None:
    root = template.rootfs
    assert root is not None
    assert (root / "bin/tool").read_bytes() == b"two"
    assert (root / "opt/new").read_bytes() == b"new"
    assert not (root / "etc/old").exists()
    assert os.readlink(root / "lib") == "usr/lib"


@pytest.mark.parametrize("compress", [bytes, lambda data: __import__("gzip").compress(data)], ids=["plain", "gzip"])
def test_layout_in_a_folder(build, layout: Layout, compress) -> None:
    layout.add([BASE, TOP], env=["PATH=/bin", "A=b=c", "broken"], workdir="/srv", compress=compress)
    template = build(layout.folder)
    check(template)
    assert template.env == {"PATH": "/bin", "A": "b=c"}


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the program zstd")
def test_layers_in_zstd(build, layout: Layout) -> None:
    layout.add(
        [BASE, TOP], compress=lambda data: subprocess.run(["zstd", "-c"], input=data, capture_output=True).stdout
    )
    check(build(layout.folder))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_layout_in_a_tar(tmp_path: Path, build, layout: Layout, mode: str) -> None:
    layout.add([BASE, TOP])
    check(build(layout.as_tar(tmp_path / "image.tar", mode)))


def test_what_docker_saves(tmp_path: Path, build) -> None:
    path = docker_save(tmp_path / "saved.tar", {"tool:1": [BASE, TOP], "tool:2": [BASE]}, env=["X=y"])
    template = build(path, "tool:1")
    check(template)
    assert template.env == {"X": "y"}
    with pytest.raises(TemplateError, match="tool:1, tool:2"):
        build(path)


def test_an_index_of_an_index(build, layout: Layout) -> None:
    layout.add([BASE, TOP], nested=True)
    check(build(layout.folder))


def test_the_processor_and_the_name_choose(build, layout: Layout) -> None:
    layout.add([BASE], name="one")
    layout.add([BASE, TOP], name="repo/two:latest")
    layout.add([TOP], name="repo/two:latest", architecture="pdp11")
    check(build(layout.folder, "latest"))
    check(build(layout.folder, "repo/two:latest"))
    with pytest.raises(TemplateError, match="say which"):
        build(layout.folder)
    with pytest.raises(TemplateError, match="did you mean 'one'"):
        build(layout.folder, "onne")


def test_an_image_for_another_processor(build, layout: Layout) -> None:
    layout.add([BASE], architecture="pdp11")
    with pytest.raises(TemplateError, match="nothing for"):
        build(layout.folder)


def test_images_share_their_layers(tmp_path: Path, layout: Layout) -> None:
    big = tar_bytes({"data": os.urandom(300_000)})
    layout.add([big, BASE], name="one")
    layout.add([big, BASE, TOP], name="two")
    store = TemplateStore(tmp_path / "store")

    async def work() -> None:
        one = await store.build("one", OciSource(layout.folder, "one"))
        blob = layout.folder / "blobs/sha256"
        for path in blob.iterdir():  # the second build finds them in the cache
            if path.read_bytes()[:2] == b"\x1f\x8b" and path.stat().st_size > 200_000:
                path.unlink()
        two = await store.build("two", OciSource(layout.folder, "two"))
        assert one.rootfs is not None and two.rootfs is not None
        assert (one.rootfs / "data").samefile(two.rootfs / "data")
        check(two)
        assert store.num_bytes() < 500_000

    asyncio.run(work())


def test_the_same_image_is_the_same_template(tmp_path: Path, build, layout: Layout) -> None:
    layout.add([BASE, TOP])
    first = build(layout.folder)
    assert build(layout.as_tar(tmp_path / "image.tar")).id == first.id
    assert build(docker_save(tmp_path / "saved.tar", {"t:1": [BASE, TOP]})).id == first.id


# -- damage -----------------------------------------------------------------------------------------------------------
def _blobs(layout: Layout) -> dict[str, Path]:
    """By what they are."""
    found = {}
    for path in sorted((layout.folder / "blobs/sha256").iterdir()):
        data = path.read_bytes()
        kind = "layer" if not data.startswith(b"{") else "config" if b"diff_ids" in data else "manifest"
        found[kind] = path
    return found


@pytest.mark.parametrize("kind", ["layer", "config", "manifest"])
@pytest.mark.parametrize("how", ["change", "cut", "remove"])
def test_damaged_blobs_are_refused(build, layout: Layout, kind: str, how: str) -> None:
    layout.add([BASE])
    path = _blobs(layout)[kind]
    data = bytearray(path.read_bytes())
    if how == "change":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    with pytest.raises(TemplateError):
        build(layout.folder)


def test_a_layer_that_is_not_the_one_of_the_configuration(build, layout: Layout) -> None:
    layout.add([BASE])
    manifest = json.loads(_blobs(layout)["manifest"].read_text())
    manifest["layers"] = [layout.blob(TOP)]
    found = layout.blob(json.dumps(manifest).encode())
    (layout.folder / "index.json").write_text(json.dumps({"manifests": [found]}))
    with pytest.raises(TemplateError, match="digest"):
        build(layout.folder)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"manifests": 3}',
        '{"manifests": [3]}',
        '{"manifests": [{}]}',
        '{"manifests": [{"digest": "sha256:../../../../etc/passwd"}]}',
        '{"manifests": [{"digest": 7, "platform": "x", "annotations": []}]}',
        "[" * 100_000,
    ],
)
def test_an_index_that_is_none(build, layout: Layout, index: str) -> None:
    (layout.folder / "index.json").write_text(index)
    with pytest.raises(TemplateError):
        build(layout.folder)


@pytest.mark.parametrize(
    "config",
    [
        b"{}",
        b"[]",
        b"3",
        b'{"rootfs": {"diff_ids": "x"}}',
        b'{"rootfs": {"diff_ids": []}}',
        b'{"rootfs": {"diff_ids": ["../.."]}}',
    ],
)
def test_a_configuration_that_is_none(build, layout: Layout, config: bytes) -> None:
    manifest = {"config": layout.blob(config), "layers": [layout.blob(BASE)]}
    found = layout.blob(json.dumps(manifest).encode())
    (layout.folder / "index.json").write_text(json.dumps({"manifests": [found]}))
    with pytest.raises(TemplateError):
        build(layout.folder)


def test_odd_settings_are_left_out(build, layout: Layout) -> None:
    config = json.loads(config_of([BASE]))
    config["config"] = {"Env": [1, "=x", "A=b", "N=\0", None], "WorkingDir": 5}
    manifest = {"config": layout.blob(json.dumps(config).encode()), "layers": [layout.blob(BASE)]}
    found = layout.blob(json.dumps(manifest).encode())
    (layout.folder / "index.json").write_text(json.dumps({"manifests": [found]}))
    assert build(layout.folder).env == {"A": "b"}


def test_a_saved_image_with_links_in_a_ring(tmp_path: Path, build) -> None:
    entries = [{"Config": "c.json", "RepoTags": None, "Layers": ["l.tar"]}]
    files = {
        "manifest.json": json.dumps(entries).encode(),
        "c.json": config_of([BASE]),
        "l.tar": "m.tar",
        "m.tar": "l.tar",
    }
    path = tmp_path / "saved.tar"
    path.write_bytes(tar_bytes(files))
    with pytest.raises(TemplateError):
        build(path)


def test_what_is_no_image(tmp_path: Path, build) -> None:
    (tmp_path / "junk.tar").write_bytes(os.urandom(5000))
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain.tar").write_bytes(tar_bytes({"a": b"b"}))
    for name in ("junk.tar", "empty", "plain.tar", "missing"):
        with pytest.raises(TemplateError):
            build(tmp_path / name)


def test_sources_by_their_text(tmp_path: Path) -> None:
    assert parse_source(f"oci:{tmp_path}/x.tar@tag") == OciSource(tmp_path / "x.tar", "tag")
    (tmp_path / "a@b").mkdir()
    assert parse_source(f"oci:{tmp_path}/a@b") == OciSource(tmp_path / "a@b")
    assert str(parse_source("debian:python3, git")) == "debian:python3,git"
    assert str(parse_source("dir:x")) == "dir:x"
    for text in ("", "dir:", "x", "ocy:x", "debian:Bad Name"):
        with pytest.raises(TemplateError):
            parse_source(text)
    assert len(sha256(b"")) == 64
