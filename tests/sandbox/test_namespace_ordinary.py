"""The backend namespace without privileges."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

MIB = 1 << 20
AS_ROOT = os.geteuid() == 0


def test_as_an_ordinary_user(tmp_path_factory: pytest.TempPathFactory, rootfs: Path) -> None:
    """The same without privileges: limits by rlimits, pauses by signals, templates in a user namespace."""
    if not AS_ROOT:
        pytest.skip("all other tests are this test already")
    interpreter = _world_readable_python()
    base = Path("/var/tmp") / f"moonlet-test-{uuid.uuid4().hex[:8]}"
    try:
        (base / "home").mkdir(parents=True)
        base.chmod(0o755)
        shutil.copytree(
            Path(__file__).parents[2] / "moonlet", base / "moonlet", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copytree(rootfs, base / "rootfs", symlinks=True)
        subprocess.run(["chown", "-R", "65534:65534", base / "home", base / "rootfs"], check=True)
        subprocess.run(["chmod", "-R", "a+rX", base], check=True)
        paths = os.pathsep.join([str(base), *(path for path in sys.path if path.endswith("-packages"))])
        words = [
            "setpriv",
            "--reuid",
            "65534",
            "--regid",
            "65534",
            "--clear-groups",
            interpreter,
            "-c",
            _ORDINARY,
            base,
        ]
        environment = {
            "HOME": str(base / "home"),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": paths,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        said = json.loads(done.stdout)
        assert said["notes"] == 4
        assert said["user"] == "0 0000000000000000 2"
        assert said["grew"] and said["stood_still"]
        assert said["copy"] == "x\nlower\n"
        assert said["template"] == "root:x:0:0::/root:/bin/sh\nmore\n"
        assert said["bomb"] == "survived\n"
        assert said["left"] == []
    finally:
        subprocess.run(["rm", "-rf", base], check=True)


def _world_readable_python() -> str:
    for name in ("/usr/bin/python3", os.path.realpath(sys.executable)):
        words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", name, "-c"]
        done = subprocess.run(
            [*words, "import sys; sys.exit(sys.version_info < (3, 11))"], capture_output=True, cwd="/"
        )
        if done.returncode == 0:
            return name
    pytest.skip("there is no Python >= 3.11 that an ordinary user can read")


_ORDINARY = """
import asyncio, json, os, sys, time
from pathlib import Path
from moonlet.sandbox.api import Limits
from moonlet.sandbox.backend import MachineSpec, Template
from moonlet.sandbox.guest.client import Guest
from moonlet.sandbox.guest.stream import GuestStream
from moonlet.sandbox.namespace.backend import NamespaceBackend
from moonlet.sandbox.namespace.bwrap import Bubblewrap, find_bubblewrap

base = Path(sys.argv[1])
state = base / "home" / "state"
state.mkdir()

async def main():
    backend, said, alive = NamespaceBackend(), {}, []
    probe = await backend.probe()
    assert probe.caps is not None, probe.reason
    said["notes"] = len(probe.caps.notes)

    async def start(name, template=Template("host"), image=None, **limits):
        await backend.prepare(template, Limits(), lambda *_: None)
        (state / name).mkdir()
        spec = MachineSpec(name, "ordinary", template, Limits(**limits), name)
        machine = await (backend.restore(spec, state / name, image) if image else backend.launch(spec, state / name))
        guest = Guest(await GuestStream.open(machine.endpoint()))
        alive.append((machine, guest))
        return machine, guest

    machine, guest = await start("one", processes=40)
    done = await guest.exec("echo $(id -u) $(grep CapBnd /proc/self/status | cut -f2) $(grep Seccomp: /proc/self/status | cut -f2)")
    said["user"] = done.text.strip()
    await guest.exec("mkdir d; echo x > d/f; chmod 000 d/f d")
    counter = state / "one/upper/workspace/count"
    start_counting = "i=0; while :; do i=$((i+1)); echo $i > t; mv t count; sleep 0.005; done"
    await guest.stream.call("start", command="c", argv=["sh", "-c", start_counting], env={}, cwd="/workspace")
    while not counter.exists():
        await asyncio.sleep(0.01)
    await machine.freeze()
    first = counter.read_text()
    await asyncio.sleep(0.1)
    said["stood_still"] = counter.read_text() == first
    image = state / "image"
    image.mkdir()
    await machine.save(image, is_final=False)
    while counter.read_text() == first:
        await asyncio.sleep(0.01)
    said["grew"] = True
    await guest.exec("chmod 755 d; chmod 644 d/f; echo changed > d/f")
    _, copy = await start("copy", image=image)
    said["copy"] = (await copy.exec("chmod 755 d; chmod 644 d/f; cat d/f; touch lower; ls lower")).text
    tiny, inside = await start("tiny", Template("tiny", base / "rootfs"))
    said["template"] = (await inside.exec("echo more >> /etc/passwd; cat /etc/passwd")).text
    bomb = await guest.exec("bomb() { bomb | bomb & }; bomb; sleep 1; echo survived", timeout_s=30)
    said["bomb"] = bomb.text
    for machine, guest in alive:
        guest.stream.close()
        await machine.destroy()
    said["left"] = await backend.sweep("ordinary", set())
    print(json.dumps(said))

asyncio.run(main())
"""
