"""Layers against a plain model of what they mean, and tars that mean harm."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonlet.errors import TemplateError
from moonlet.sandbox.template.layers import Layer, apply_layer, unpack_layer

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
LINK_NAMES = st.sampled_from(["l", "m"])  # nothing is ever put below these, so the model follows no link


@dataclass(frozen=True)
class Op:
    kind: str
    path: str
    text: str = ""


def _join(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name


FOLDERS = st.one_of(st.just(""), PATHS)
OPS = st.one_of(
    st.builds(Op, st.just("file"), PATHS, st.text("xyz", max_size=3)),
    st.builds(Op, st.just("dir"), PATHS),
    st.builds(Op, st.just("whiteout"), PATHS),
    st.builds(Op, st.just("opaque"), FOLDERS),
    st.builds(Op, st.just("link"), PATHS, PATHS),
    st.builds(lambda at, name, to: Op("symlink", _join(at, name), to), FOLDERS, LINK_NAMES, PATHS),
)
LAYERS = st.lists(st.lists(OPS, max_size=8), max_size=4)


class Model:
    """Path -> (kind, text), by the words of the OCI specification."""

    def __init__(self) -> None:
        self.tree: dict[str, tuple[str, str]] = {}

    def _is_folder(self, path: str) -> bool:
        return not path or self.tree.get(path, ("", ""))[0] == "dir"

    def _cut(self, path: str, *, itself: bool) -> None:
        below = f"{path}/" if path else ""
        self.tree = {p: v for p, v in self.tree.items() if not p.startswith(below) and not (itself and p == path)}

    def lay(self, ops: list[Op]) -> None:
        for op in ops:
            if op.kind == "whiteout":
                self._cut(op.path, itself=True)
            elif op.kind == "opaque" and self._is_folder(op.path):
                self._cut(op.path, itself=False)
        for op in ops:
            if op.kind not in ("whiteout", "opaque"):
                self._put(op)

    def _put(self, op: Op) -> None:
        parts = op.path.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            if not self._is_folder(parent):
                self._cut(parent, itself=True)
                self.tree[parent] = ("dir", "")
        if op.kind == "dir":
            if not self._is_folder(op.path):
                self._cut(op.path, itself=True)
                self.tree[op.path] = ("dir", "")
            return
        new = (op.kind, op.text)
        if op.kind == "link":
            new = self.tree.get(op.text, ("", ""))
            if new[0] not in ("file", "symlink"):
                raise TemplateError("link to nothing")
        self._cut(op.path, itself=True)
        self.tree[op.path] = new


def tar_of(ops: list[Op]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for op in ops:
            tar.addfile(*_member(op))
    return out.getvalue()


def _member(op: Op) -> tuple[tarfile.TarInfo, io.BytesIO | None]:
    parent, _, name = op.path.rpartition("/")
    if op.kind == "whiteout":
        return tarfile.TarInfo(_join(parent, f".wh.{name}")), None
    if op.kind == "opaque":
        return tarfile.TarInfo(_join(op.path, ".wh..wh..opq")), None
    member = tarfile.TarInfo(op.path)
    if op.kind == "file":
        member.size, member.mode, member.mtime = len(op.text), 0o640, 1_000_000_000
        return member, io.BytesIO(op.text.encode())
    member.type = {"dir": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE, "link": tarfile.LNKTYPE}[op.kind]
    member.mode = 0o755
    member.linkname = op.text
    return member, None


def lay_all(root: Path, scratch: Path, tars: list[bytes]) -> None:
    for data in tars:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        unpack_layer(io.BytesIO(data), folder, lambda num_bytes: None)
        apply_layer(Layer(folder), root, lambda num_bytes: None)


def listing(root: Path) -> dict[str, tuple[str, str]]:
    found = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("symlink", os.readlink(path))
        elif path.is_dir():
            found[name] = ("dir", "")
        else:
            found[name] = ("file", path.read_text())
    return found


@settings(max_examples=150, deadline=None)
@given(LAYERS)
@example([[Op("file", "a/a", "x"), Op("link", "a", "a/a")]])
@example([[Op("file", "a", "x"), Op("link", "a/b", "a")]])
def test_layers_are_what_the_specification_says(layers: list[list[Op]]) -> None:
    model = Model()
    error: TemplateError | None = None
    try:
        for ops in layers:
            model.lay(ops)
    except TemplateError as caught:
        error = caught
    with tempfile.TemporaryDirectory() as folder:
        root, scratch = Path(folder, "root"), Path(folder, "scratch")
        root.mkdir()
        scratch.mkdir()
        if error is not None:
            with pytest.raises(TemplateError):
                lay_all(root, scratch, [tar_of(ops) for ops in layers])
        else:
            lay_all(root, scratch, [tar_of(ops) for ops in layers])
            assert listing(root) == model.tree


@pytest.fixture
def lay(tmp_path: Path):
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    root.mkdir()
    scratch.mkdir()

    def laid(*tars: bytes) -> Path:
        lay_all(root, scratch, list(tars))
        return root

    return laid


def test_a_whiteout_hides_what_is_below_only(lay) -> None:
    """It stands after the file of its own layer, which stays."""
    root = lay(
        tar_of([Op("file", "a", "old"), Op("file", "b", "b")]), tar_of([Op("file", "a", "new"), Op("whiteout", "a")])
    )
    assert listing(root) == {"a": ("file", "new"), "b": ("file", "b")}


def test_modes_times_and_odd_names_stay(lay) -> None:
    member = tarfile.TarInfo("bin/tool \udcff\n")
    member.mode, member.mtime, member.size = 0o4751, 1_234_567, 1
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(member, io.BytesIO(b"x"))
    facts = (lay(out.getvalue()) / "bin" / "tool \udcff\n").stat()
    assert stat.S_IMODE(facts.st_mode) == 0o4751
    assert facts.st_mtime == 1_234_567
    assert facts.st_uid == os.getuid()


def test_a_file_goes_where_a_link_of_the_tree_leads(lay) -> None:
    """As on systems whose /lib is a link: a later layer has lib/x, and no entry for lib."""
    base = [Op("dir", "usr/lib"), Op("symlink", "lib", "usr/lib"), Op("symlink", "abs", "/usr")]
    root = lay(tar_of(base), tar_of([Op("file", "lib/x", "1"), Op("file", "abs/y", "2")]))
    assert (root / "usr/lib/x").read_text() == "1"
    assert (root / "usr/y").read_text() == "2"
    assert (root / "lib").is_symlink()


@pytest.mark.parametrize("target", ["../../../..", "/", "/../../outside", "a/../../../../outside", "."])
def test_no_link_leads_out_of_the_tree(tmp_path: Path, lay, target: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("kept")
    before = sorted(str(path) for path in tmp_path.rglob("*") if "scratch" not in str(path))
    harm = [
        Op("file", "out/new", "x"),
        Op("file", "out/outside/kept", "x"),
        Op("whiteout", "out/outside/kept"),
        Op("opaque", "out/outside"),
    ]
    with contextlib.suppress(TemplateError):
        lay(tar_of([Op("symlink", "out", target)]), tar_of(harm))
    assert (tmp_path / "outside" / "kept").read_text() == "kept"
    after = sorted(str(path) for path in tmp_path.rglob("*") if "scratch" not in str(path))
    assert [path for path in after if f"{tmp_path}/root" not in path] == [
        p for p in before if f"{tmp_path}/root" not in p
    ]


def test_a_link_that_leads_to_itself_ends(lay) -> None:
    root = lay(tar_of([Op("symlink", "a", "b"), Op("symlink", "b", "a")]), tar_of([Op("file", "a/x", "1")]))
    assert (root / "a/x").read_text() == "1"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "..", "a/../b", ".wh.", "a/.wh...", ".wh.."])
def test_names_that_lead_out_are_refused(lay, name: str) -> None:
    member = tarfile.TarInfo(name)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(member, io.BytesIO(b""))
    with pytest.raises(TemplateError):
        lay(out.getvalue())


def test_an_absolute_name_is_one_of_the_tree(tmp_path: Path, lay) -> None:
    root = lay(tar_of([Op("file", f"{tmp_path}/absolute", "x")]))
    assert not (tmp_path / "absolute").exists()
    assert (root / str(tmp_path)[1:] / "absolute").read_text() == "x"


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../../etc/passwd", "nothing", "a", ""])
def test_hard_links_are_to_files_of_the_tree(lay, target: str) -> None:
    with pytest.raises(TemplateError):
        lay(tar_of([Op("dir", "a"), Op("link", "b", target)]))


def test_a_hard_link_through_a_link_stays_inside(tmp_path: Path, lay) -> None:
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(TemplateError):
        lay(tar_of([Op("symlink", "out", "../"), Op("link", "b", "out/secret")]))


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_and_pipes_stay_out(lay, kind: bytes) -> None:
    member = tarfile.TarInfo("dev/thing")
    member.type, member.devmajor, member.devminor = kind, 1, 3
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(member)
        tar.addfile(*_member(Op("file", "after", "x")))
    assert listing(lay(out.getvalue())) == {"after": ("file", "x")}


def test_junk_is_no_tar(lay) -> None:
    for data in (b"", b"junk" * 1000, tar_of([Op("file", "a", "x" * 3)])[:700], b"\x1f\x8bjunk" * 50):
        with pytest.raises(TemplateError):
            lay(data)


def test_a_cut_file_is_noticed(lay) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        member = tarfile.TarInfo("big")
        member.size = 1 << 20
        tar.addfile(member, io.BytesIO(os.urandom(1 << 20)))
    with pytest.raises(TemplateError, match="whole tar"):
        lay(out.getvalue()[: 1 << 19])


def test_a_header_of_a_gigabyte_is_refused(lay) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 1 << 30
    with pytest.raises(TemplateError, match="header"):
        lay(header.tobuf() + b"\0" * 4096)


def test_directories_may_not_be_too_deep_nor_names_too_long(lay) -> None:
    with pytest.raises(TemplateError, match="deep"):
        lay(tar_of([Op("file", "d/" * 300 + "x", "1")]))
    with pytest.raises(TemplateError):
        lay(tar_of([Op("file", "n" * 300, "1")]))
    with pytest.raises(TemplateError):
        lay(tar_of([Op("file", "n" * 5000, "1")]))


def test_times_that_are_none(lay) -> None:
    for text in ("nan", "inf", "-5", "1e300"):
        member = tarfile.TarInfo(f"file-{text}")
        member.pax_headers = {"mtime": text}
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            tar.addfile(member)
        assert (lay(out.getvalue()) / member.name).stat().st_mtime >= 0


def test_directories_stay_open_to_their_owner(lay) -> None:
    member = tarfile.TarInfo("locked")
    member.type, member.mode = tarfile.DIRTYPE, 0
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(member)
        tar.addfile(*_member(Op("file", "locked/x", "1")))
    root = lay(out.getvalue())
    assert stat.S_IMODE((root / "locked").stat().st_mode) == 0o700
