"""Sandboxes of two hosts: a local Ray cluster of two nodes' worth of processes, each with a manager and real machines."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonlet.errors import (
    ConfigError,
    GuestFileError,
    SandboxDiedError,
    SandboxLimitError,
    SandboxNotFoundError,
    SandboxStateError,
    TemplateError,
)
from moonlet.sandbox.api import Caps, Limits, SandboxSpec, State
from moonlet.sandbox.hosts import Cluster, HostConfig, HostedSandbox
from moonlet.sandbox.hosts.actor import describe, rebuild
from moonlet.sandbox.pool import Pool, PoolConfig
from moonlet.sandbox.settings import ServiceConfig

SPEC = SandboxSpec(limits=Limits(memory_bytes=128 << 20), ttl_s=600.0)


@pytest.mark.parametrize(
    "error",
    [
        SandboxDiedError("gone", "oom"),
        SandboxLimitError("full", 2.5),
        GuestFileError("no such file", "ENOENT"),
        SandboxStateError("paused"),
    ],
)
def test_errors_travel_whole(error: Exception) -> None:
    back = rebuild(describe(error))
    assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)


def test_errors_of_a_newer_version_are_told() -> None:
    assert str(rebuild(("NewError", "what happened", {}))) == "NewError: what happened"


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_hosts_have_names_of_their_own(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name of its own"):
        Cluster([HostConfig(name, ServiceConfig(tmp_path / "s")) for name in names])


@pytest.fixture(scope="module")
def nodes(require_backend: Callable[[str], Caps]) -> Iterator[list[str]]:
    """Ids of two nodes."""
    require_backend("namespace")
    import ray
    from ray.cluster_utils import Cluster as RayCluster

    cluster = RayCluster()
    try:
        small: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
        both = [cluster.add_node(**small) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        yield [node.node_id for node in both]
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def configs(nodes: list[str], tmp_path: Path) -> list[HostConfig]:
    def config(name: str) -> ServiceConfig:
        return ServiceConfig(tmp_path / name, backend="namespace", max_running=3, scoring_slack_s=0.0)

    return [HostConfig(name, config(name), node) for name, node in zip("ab", nodes)]


def run(configs: list[HostConfig], work: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with Cluster(configs) as cluster:
            try:
                await work(cluster)
            finally:
                for _, info in await cluster.list():
                    await (await cluster.attach(info.id)).destroy()

    asyncio.run(whole())


async def machine_is_back(sandbox: HostedSandbox) -> None:
    """Wait until its host answers again."""
    async with asyncio.timeout(120):
        while True:
            try:
                await sandbox.info()
                return
            except SandboxDiedError:
                await asyncio.sleep(0.1)


@pytest.mark.slow
def test_a_sandbox_of_another_host_does_all_that_one_here_does(configs: list[HostConfig], tmp_path: Path) -> None:
    async def work(cluster: Cluster) -> None:
        box = await cluster.create(SPEC)
        result = await box.exec("echo out; echo bad >&2; cat; exit 3", stdin=b"in")
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\nin", b"bad\n")
        process = await box.start("read x; echo got $x", stdin=True, tag="reader")
        await (await box.process("reader")).write_stdin(b"word\n")
        assert b"".join([piece.data async for piece in process.output()]) == b"got word\n"
        data = os.urandom(9_000_001)
        (tmp_path / "data").write_bytes(data)
        (tmp_path / "data").chmod(0o755)
        await box.upload(tmp_path / "data", "deep/data")
        assert (await box.stat("deep/data")).mode & 0o777 == 0o755
        assert (await box.exec("sha256sum deep/data")).text.split()[0] == hashlib.sha256(data).hexdigest()
        await box.download("deep/data", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == data
        for call in (box.read_file("nothing"), box.download("nothing", tmp_path / "x"), box.stat("nothing")):
            with pytest.raises(GuestFileError) as error:
                await call
            assert error.value.code == "ENOENT"
        with pytest.raises(GuestFileError):
            await box.upload(tmp_path / "data", "deep/data/below")
        watching = box.watch("deep")
        first = asyncio.ensure_future(anext(watching))
        while not first.done():
            await box.write_file("deep/new", b"x")
            await asyncio.sleep(0.05)
        assert first.result().path.startswith(("new", "."))
        await watching.aclose()
        children = await box.fork(2)
        assert all(isinstance(child, HostedSandbox) and child.host is box.host for child in children)
        for child in children:
            await child.destroy()  # type: ignore[union-attr]
        snapshot = await box.snapshot("kept")
        assert (await (await cluster.create(SandboxSpec(template=snapshot))).stat("deep/data")).size == len(data)
        await box.pause()
        with pytest.raises(SandboxStateError):
            await box.exec("true")
        await box.resume()
        await box.destroy()
        await box.destroy()
        with pytest.raises(SandboxNotFoundError):
            await box.info()

    run(configs, work)


@pytest.mark.slow
def test_placement_by_room(configs: list[HostConfig]) -> None:
    async def work(cluster: Cluster) -> None:
        boxes = await asyncio.gather(*(cluster.create(SPEC) for _ in range(4)))
        assert sorted(box.host.name for box in boxes) == ["a", "a", "b", "b"]
        boxes += [await cluster.create(SPEC), await cluster.create(SPEC)]
        with pytest.raises(SandboxLimitError, match="no host has room"):
            await cluster.create(SPEC)
        await boxes[0].destroy()
        assert (await cluster.create(SPEC)).host.name == boxes[0].host.name
        with pytest.raises(SandboxLimitError):
            await cluster.create(SPEC)
        for box in boxes[1:]:
            await box.destroy()
        with pytest.raises(TemplateError, match="no such"):
            await cluster.create(SandboxSpec(template="no such"))

    run(configs, work)


@pytest.mark.slow
def test_creates_in_turn_are_spread_too(configs: list[HostConfig]) -> None:
    """However quick they are: the load that is known is older than the last create."""

    async def work(cluster: Cluster) -> None:
        boxes = [await cluster.create(SPEC) for _ in range(4)]
        assert sorted(box.host.name for box in boxes) == ["a", "a", "b", "b"]

    run(configs, work)


@pytest.mark.slow
def test_a_lost_actor_takes_only_its_own_and_comes_back(configs: list[HostConfig]) -> None:
    async def work(cluster: Cluster) -> None:
        boxes = [await cluster.create(SPEC) for _ in range(2)]
        mine, other = sorted(boxes, key=lambda box: box.host.name)
        await mine.start("i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.02; done")
        load = (await cluster.loads())["a"]
        assert load is not None
        waiting = asyncio.ensure_future(mine.exec("sleep 60"))
        while not any("sleep 60" in " ".join(each.argv) for each in await mine.processes()):
            await asyncio.sleep(0.02)
        os.kill(load.pid, signal.SIGKILL)
        with pytest.raises(SandboxDiedError) as error:
            await waiting
        assert error.value.reason == "lost" and "host a" in str(error.value)
        assert (await other.exec("echo here")).text == "here\n"
        await machine_is_back(mine)
        before = int((await mine.read_file("count")).strip() or 0)
        while int((await mine.read_file("count")).strip() or 0) <= before:
            await asyncio.sleep(0.02)
        assert (await cluster.attach(mine.id)).host.name == "a"
        again = (await cluster.loads())["a"]
        assert again is not None and again.pid != load.pid

    run(configs, work)


@pytest.mark.slow
def test_machines_go_on_without_the_actors(configs: list[HostConfig]) -> None:
    """A cluster that is closed without pausing, and one opened later on the same state directories."""

    async def whole() -> None:
        async with Cluster(configs) as cluster:
            box = await cluster.create(SPEC)
            await box.start("sleep 600", tag="sleeper")
            await cluster.close(pause_running=False)
        async with Cluster(configs) as cluster:
            box = await cluster.attach(box.id)
            assert (await box.process("sleeper")).pid > 0
            assert [info.state for _, info in await cluster.list()] == [State.RUNNING]
            await box.destroy()
            with pytest.raises(SandboxNotFoundError, match="2 hosts"):
                await cluster.attach(box.id)

    asyncio.run(whole())


@pytest.mark.slow
def test_a_cancelled_call_ends_on_its_host(configs: list[HostConfig]) -> None:
    async def work(cluster: Cluster) -> None:
        box = await cluster.create(SPEC)
        waiting = asyncio.ensure_future(box.exec("sleep 1234", timeout_s=None))
        while not any("sleep 1234" in " ".join(each.argv) for each in await box.processes()):
            await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.wait([waiting])
        async with asyncio.timeout(60):
            while (await box.exec("pgrep -f 'sleep 123[4]'")).exit_code == 0:
                await asyncio.sleep(0.02)
        await box.destroy()
        for moment in (0.0, 0.01, 0.03, 0.1, 0.2):
            making = asyncio.ensure_future(cluster.create(SPEC))
            await asyncio.sleep(moment)
            making.cancel()
            await asyncio.wait([making])
            if not making.cancelled():
                await making.result().destroy()
        async with asyncio.timeout(60):
            while await cluster.list():
                await asyncio.sleep(0.02)

    run(configs, work)


@pytest.mark.slow
def test_a_pool_over_two_hosts(configs: list[HostConfig]) -> None:
    async def work(cluster: Cluster) -> None:
        hosts: set[str] = set()

        async def agent(lease) -> None:
            hosts.add(lease.sandbox.host.name)
            for _ in range(2):
                assert (await lease.sandbox.exec("echo work")).text == "work\n"
                async with lease.idle():
                    await asyncio.sleep(0.05)

        async with Pool(cluster.create, PoolConfig(max_running=4, max_alive=10, idle_grace_s=0)) as pool:
            await asyncio.gather(*(pool.run(agent, SPEC) for _ in range(10)))
        assert hosts == {"a", "b"} and await cluster.list() == []

    run(configs, work)
