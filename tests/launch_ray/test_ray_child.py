"""A child in an actor, of a Ray that is played: calls that fail and calls that are answered, groups that stay, no room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from playedray import DEADLINE_S, UNAVAILABLE, Actor, Cluster, until
from ray.exceptions import ActorDiedError, RayActorError, RaySystemError, RayTaskError

from midstream.core.config import EngineSettings, GatewaySettings
from midstream.core.supervision import Listening
from midstream.launch import ray_child
from midstream.launch.process import Child, ChildMessages, HostUnwell, StartFailed
from midstream.launch.ray_actor import ChildActor
from midstream.launch.ray_child import RayChild
from midstream.launch.ray_demand import Demand
from midstream.launch.specs import GatewaySpec, ReplicaSpec


class Note(msgspec.Struct, frozen=True):
    text: str


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def replica_spec(model_dir: Path, state: Path) -> ReplicaSpec:
    return ReplicaSpec(
        name="replica-0", host="127.0.0.1", port=0, model_dir=str(model_dir), model="accounts/a/models/m",
        deployment="d", cache_dir=str(state / "snapshots" / "replica-0"), token="t",
        engine=EngineSettings(), log_level="info",
    )  # fmt: skip


def child(name: str = "replica-0", **more: Any) -> RayChild:
    return RayChild(name, "midstream.launch.replica", Note("spec"), Demand(bundle={"CPU": 2.0}), **more)


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def failing_in_the_actor(error: Exception) -> RayTaskError:
    """As Ray raises what a method of the actor raised."""
    raised = RayTaskError("start", "Traceback ...", error).as_instanceof_cause()
    assert isinstance(raised, RayTaskError)
    return raised


# -- what is said through an actor that cannot be reached for a moment


def test_a_gateway_is_told_and_heard_after_its_actor_could_not_be_reached(cluster: Cluster) -> None:
    heard: list[bytes] = []

    async def main() -> None:
        gateway = child("gateway", conversation=ChildMessages(heard.append, lambda: Note("greeting")))
        await gateway.start()
        [handle] = cluster.handles
        actor = handle.actor
        actor.says(b"before")
        await until(lambda: heard == [b"before"] and actor.child.told == [Note("greeting")])
        ended = asyncio.create_task(gateway.ended())
        await until(lambda: "ended" in handle.under_way() and len(handle.under_way()) == 2)
        handle.blip()
        handle.failing["tell"] = UNAVAILABLE
        actor.says(b"while it could not be reached")
        gateway.tell(Note("while it could not be reached"))
        await until(lambda: len(heard) == 2 and len(actor.child.told) == 2)
        actor.says(b"after")
        gateway.tell(Note("after"))
        await until(lambda: len(heard) == 3 and len(actor.child.told) == 3)
        assert not ended.done(), "a moment is not the end"
        await cancelled(ended)
        await gateway.stop(1.0)
        texts = ["while it could not be reached", "after"]
        assert actor.child.told == [Note("greeting"), *map(Note, texts)]

    cluster.run(main())
    assert heard == [b"before", b"while it could not be reached", b"after"]


def test_an_older_message_that_comes_late_is_left_out() -> None:
    async def main() -> list[msgspec.Struct]:
        actor = Actor("gateway", "m", None, ())
        await actor.start(None)
        for number, text in ((1, "a"), (3, "c"), (2, "b"), (3, "c"), (4, "d")):
            await actor.tell(number, Note(text))
        return actor.child.told

    assert asyncio.run(main()) == [Note("a"), Note("c"), Note("d")]


# -- what of a start's trouble is the host's


INIT_FAILED = ActorDiedError(RayTaskError("__init__", "Traceback ...", ImportError("no midstream here")))


@pytest.mark.parametrize(
    ("method", "error", "of_the_host"),
    [
        ("where", ActorDiedError(), True),
        ("start", ActorDiedError(), True),
        ("start", UNAVAILABLE, True),
        ("where", RaySystemError("no connection"), True),
        ("start", OSError("no connection"), True),
        ("where", RuntimeError("no connection"), True),
        ("where", INIT_FAILED, False),
        ("start", failing_in_the_actor(AttributeError("another version")), False),
        ("start", failing_in_the_actor(OSError("in the actor")), False),
        ("where", ValueError("no such strategy"), False),
    ],
)
def test_trouble_of_the_host_is_told_from_the_childs_own(
    cluster: Cluster, method: str, error: Exception, of_the_host: bool
) -> None:
    assert not isinstance(error, RayActorError) or error.actor_init_failed == (error is INIT_FAILED)
    setattr(cluster, f"{method}_fails", error)

    async def main() -> None:
        replica = child()
        with pytest.raises(StartFailed, match=r"^replica-0: .") as raised:
            await replica.start()
        assert isinstance(raised.value, HostUnwell) == of_the_host
        await replica.stop(1.0)

    cluster.run(main())
    assert not cluster.groups


def test_what_the_node_lacks_is_not_the_hosts_trouble(cluster: Cluster) -> None:
    cluster.answer = Listening(error="on node 10.0.0.7: there is no model in /m")

    async def main() -> None:
        replica = child()
        with pytest.raises(StartFailed, match=r"replica-0: on node 10\.0\.0\.7: there is no model") as raised:
            await replica.start()
        assert not isinstance(raised.value, HostUnwell)
        await replica.stop(1.0)

    cluster.run(main())
    assert not cluster.groups


# -- groups and actors


def test_where_it_could_not_start_keeps_its_room_until_another_group_has_some(cluster: Cluster) -> None:
    async def main() -> None:
        cluster.answer = Listening(error="on node 10.0.0.7: no space left on device")
        with pytest.raises(StartFailed):
            await child().start()
        cluster.answer = Listening(port=7)
        # ReplicaProcesses makes a new one for each attempt.
        again = child()
        await again.start()
        first, second = cluster.names
        calls = [call for call in cluster.calls if call.split()[0] in ("create", "wait", "remove")]
        assert calls == [f"create {first}", f"create {second}", f"wait {second}", f"remove {first}"]
        assert set(cluster.groups) == {second}
        await again.stop(1.0)

    cluster.run(main())
    assert not cluster.groups


def test_a_child_that_could_not_start_and_is_not_wanted_any_more_leaves_nothing(cluster: Cluster) -> None:
    async def main() -> None:
        cluster.start_fails = ActorDiedError()
        replica = child()
        with pytest.raises(HostUnwell):
            await replica.start()
        await replica.stop(1.0)

    cluster.run(main())
    assert cluster.names
    assert not cluster.groups


def test_a_group_that_cannot_be_removed_is_removed_later_and_in_nobodys_way(cluster: Cluster) -> None:
    async def main() -> None:
        replica = child()
        await replica.start()
        cluster.failing = {"kill": RaySystemError("unwell"), "remove": RuntimeError("unwell")}
        cluster.handles[0].lost = ActorDiedError()
        assert (await replica.ended()).startswith("is lost with its actor on node 10.0.0.7: ")
        assert not cluster.failing, "that the one failed kept nobody from the other"
        assert len(cluster.groups) == 1
        await replica.start()
        assert set(cluster.groups) == {cluster.names[1]}, "the first one is gone"
        await replica.stop(1.0)

    cluster.run(main())
    assert not cluster.groups
    assert all(name.startswith("replica-0-") for name in cluster.names)


def test_nothing_of_rays_runs_on_the_event_loop(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_child, "PLACED_WITHIN_S", 0.01)

    async def main() -> None:
        replica = child()
        cluster.placed.clear()
        starting = asyncio.create_task(replica.start())
        await until(lambda: "table" in cluster.calls)
        cluster.placed.set()
        await starting
        replica.kill()
        await until(lambda: "kill" in cluster.calls)
        await replica.stop(1.0)

    cluster.run(main())
    done = {call.split()[0] for call in cluster.calls}
    assert done == {"create", "actor", "table", "nodes", "kill", "remove"}
    assert threading.current_thread() not in cluster.threads


def test_a_start_that_is_cancelled_while_ray_makes_a_group_leaves_none(cluster: Cluster) -> None:
    go_on = threading.Event()
    cluster.creating = lambda: assert_true(go_on.wait(DEADLINE_S))

    async def main() -> None:
        replica = child()
        starting = asyncio.create_task(replica.start())
        await until(lambda: cluster.calls)
        starting.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await replica.stop(1.0)

    cluster.run(main())
    assert len(cluster.names) == 1
    assert not cluster.groups


def assert_true(value: bool) -> None:
    assert value


# -- what waiting says


def test_waiting_is_said_once_for_each_reason_and_withdrawn(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_child, "PLACED_WITHIN_S", 0.01)
    monkeypatch.setattr(ray_child, "LOOK_AGAIN_S", 0.01)
    caplog.set_level(logging.WARNING)
    said: list[str] = []

    async def looked_at(times: int) -> None:
        before = cluster.calls.count("table")
        await until(lambda: cluster.calls.count("table") >= before + times)

    async def main() -> None:
        replica = child()
        cluster.placed.clear()
        starting = asyncio.create_task(replica.start(said.append))
        await looked_at(4)
        cluster.state = "CREATED"
        await looked_at(4)
        cluster.placed.set()
        await starting
        await replica.stop(1.0)

    cluster.run(main())
    no_room = "replica-0: waits for {CPU: 2}: the cluster has 10.0.0.7 {CPU: 4}; free is {CPU: 1}"
    not_up = "replica-0: has room on node 10.0.0.7, but its actor is not up: Ray's log files there say why"
    assert said == [no_room, not_up, "replica-0: starts on node 10.0.0.7"]
    assert [record.message for record in caplog.records] == [no_room, not_up]


def test_who_does_not_have_to_wait_says_nothing_of_it(cluster: Cluster) -> None:
    said: list[str] = []

    async def main() -> None:
        replica = child()
        await replica.start(said.append)
        await replica.stop(1.0)

    cluster.run(main())
    assert said == []


# -- the end


@pytest.mark.parametrize("error", [RaySystemError("unwell"), OSError("unwell"), RuntimeError("unwell")])
def test_whatever_ray_raises_is_the_loss_of_the_actor_and_no_hindrance_to_stop(
    cluster: Cluster, error: Exception
) -> None:
    async def main() -> None:
        replica = child()
        await replica.start()
        cluster.handles[0].lost = error
        how = await replica.ended()
        assert how.startswith("is lost with its actor on node 10.0.0.7: ")
        assert how.endswith("unwell")
        await replica.start()
        cluster.handles[1].lost = error
        await replica.stop(1.0)

    cluster.run(main())
    assert cluster.calls.count("kill") == 2
    assert not cluster.groups


def test_an_actor_that_cannot_be_reached_for_long_is_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_child, "UNREACHABLE_S", 0.05)

    async def main() -> None:
        replica = child()
        await replica.start()
        cluster.handles[0].lost = UNAVAILABLE
        assert "is lost with its actor on node 10.0.0.7" in await replica.ended()
        assert not replica.running
        await replica.stop(1.0)

    cluster.run(main())
    assert not cluster.groups


def test_kill_does_not_need_an_actor_that_answers(cluster: Cluster) -> None:
    async def main() -> None:
        replica = child()
        await replica.start()
        handle = cluster.handles[0]
        ended = asyncio.create_task(replica.ended())
        await until(lambda: "ended" in handle.under_way())
        handle.lost = UNAVAILABLE
        replica.kill()
        await until(lambda: isinstance(handle.lost, ActorDiedError))
        assert "is lost with its actor" in await ended
        await replica.stop(1.0)

    cluster.run(main())
    assert not cluster.groups


PARENT = """
import subprocess, sys
command = [sys.executable, "-m", "midstream.launch.ray_replica", "replica-0"]
subprocess.Popen(command, start_new_session=True).wait()
"""


def test_a_replica_ends_with_its_actors_process_before_its_standard_input_does(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None
    assert parent.stdout is not None
    try:
        parent.stdin.write(msgspec.json.encode(replica_spec(tiny_model(), tmp_path / "state")) + b"\n")
        parent.stdin.flush()
        listening = msgspec.json.decode(parent.stdout.readline(), type=Listening)
        assert listening.error is None
        parent.kill()
        parent.wait()
        assert select.select([parent.stdout], [], [], DEADLINE_S)[0], "the replica has it open"
        assert parent.stdout.read() == b""
    finally:
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()


def test_an_actor_starts_a_replica_that_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    started: list[tuple[Any, ...]] = []

    async def start(self: Child, *_: Any) -> None:
        started.append((self._module, type(self._spec)))

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    replica = replica_spec(tiny_model(), tmp_path / "state")
    gateway = GatewaySpec(
        host="127.0.0.1", port=7, model="m", deployment="d", replicas=1, models=("m",), bucket="b",
        transition="async", ledger="l", token="t", settings=GatewaySettings(), log_level="info",
    )  # fmt: skip

    async def main() -> None:
        for spec, module in ((replica, "midstream.launch.replica"), (gateway, "midstream.launch.gateway")):
            actor = ChildActor("c", module, None, ())
            answer = await actor.start(spec)  # type: ignore[arg-type]
            assert answer.error is None

    asyncio.run(main())
    assert started == [
        ("midstream.launch.ray_replica", ReplicaSpec),
        ("midstream.launch.gateway", GatewaySpec),
    ]
