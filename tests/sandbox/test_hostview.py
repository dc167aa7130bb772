"""The host as a guest sees it: its programs, and an `/etc` without its secrets."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from moonlet.sandbox.hostview import HOST_DIRS, host_dirs, write_minimal_etc


def test_accounts_and_names_are_made_here(tmp_path: Path) -> None:
    write_minimal_etc(tmp_path / "etc")
    etc = tmp_path / "etc"
    assert (etc / "passwd").read_text().startswith("root:x:0:0:root:/workspace:")
    assert (etc / "resolv.conf").read_text() == ""
    assert len((etc / "machine-id").read_text().strip()) == 32
    assert (etc / "machine-id").read_text() != Path("/etc/machine-id").read_text()
    assert "root:*:" in (etc / "shadow").read_text()


def test_two_guests_have_two_machine_ids(tmp_path: Path) -> None:
    for name in "ab":
        write_minimal_etc(tmp_path / name)
    assert (tmp_path / "a/machine-id").read_text() != (tmp_path / "b/machine-id").read_text()


def test_nothing_that_is_not_for_everyone(tmp_path: Path) -> None:
    write_minimal_etc(tmp_path)
    for path in tmp_path.rglob("*"):
        twin = Path("/etc") / path.relative_to(tmp_path)
        if path.is_symlink() or path.is_dir() or path.name in ("shadow", "machine-id", "hostname", "hosts"):
            continue
        assert path.stat().st_mode & stat.S_IROTH
        if twin.exists():
            assert twin.stat().st_mode & stat.S_IROTH, twin
    assert not (tmp_path / "ssh").exists()
    assert not (tmp_path / "ssl/private").exists()
    assert not (tmp_path / "environment").exists()


def test_links_lead_somewhere_in_the_guest(tmp_path: Path) -> None:
    write_minimal_etc(tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_symlink():
            target = os.readlink(path)
            inside = "/" not in target or target.startswith(("/proc/", *(f"{root}/" for root in HOST_DIRS)))
            assert inside or target.startswith("../"), (path, target)


def test_host_dirs_are_as_on_the_host() -> None:
    for found in host_dirs():
        assert os.path.islink(found.path) == bool(found.link_target)
        assert os.path.isdir(found.path)
    assert "/usr" in [found.path for found in host_dirs()]
