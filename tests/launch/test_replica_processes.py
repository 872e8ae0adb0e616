"""Replica processes: what runs becomes what is wanted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from midstream.fleet.desired_state import Wanted, WantedReplica
from midstream.launch.caches import remove_all, remove_caches, set_strange_caches_aside
from midstream.launch.process import Child, ignore
from midstream.launch.replica_processes import ReplicaProcesses

SCRIPTED = """
import json, os, pathlib, signal, sys, time
from midstream.http.channel import StdioChannel; from midstream.core.supervision import Listening

def mark_own_pid(path):
    mark = pathlib.Path(path)
    if mark.exists() and mark.read_text():
        try:
            os.kill(int(mark.read_text()), 0)
        except ProcessLookupError:
            pass
        else:
            raise SystemExit("two at once")
    mark.write_text(str(os.getpid()))

def main():
    spec = json.loads(sys.stdin.readline())
    port = spec["port"] or int(pathlib.Path(__file__).with_name("free port").read_text())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    exec(spec["code"], {**globals(), "spec": spec, "port": port, "say": StdioChannel().send})
"""


class Script(msgspec.Struct):
    code: str
    port: int = 0


LISTEN = "say(Listening(port=port)); sys.stdin.read()"
DEADLINE_S = 60


class Scene:
    """Replica processes that are scripted children; the code of a replica is `codes[name]`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "free port").write_text("7")
        self.codes: dict[str, str] = {}
        self.cleaned: list[tuple[str, Set[str]]] = []
        self._changed = asyncio.Event()
        self.processes = ReplicaProcesses(
            self._make,
            lambda r, others: self.cleaned.append((r.name, others)),
            self._changed.set,
            stop_s=1000,
        )

    async def _make(self, wanted: WantedReplica) -> Child:
        # Who runs notes its pid: two at once would be seen.
        mark = self.path / wanted.name
        code = f"mark_own_pid({str(mark)!r})\n{self.codes.get(wanted.name, LISTEN)}"
        return Child(wanted.name, "scripted_replica", Script(code), host="h", movable=True)

    def want(self, *names: str) -> None:
        """Names are DEPLOYMENT-NUMBER."""
        self.processes.want(
            Wanted(tuple(WantedReplica(name=n, deployment=n.partition("-")[0], model="m") for n in names))
        )

    def pid(self, name: str) -> int:
        return int((self.path / name).read_text())

    async def until(self, **urls: str | None) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while {r.name.replace("-", "_"): r.url for r in self.processes.running().replicas} != urls:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], AbstractAsyncContextManager[Scene]]:
    (tmp_path / "scripted_replica.py").write_text(SCRIPTED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))

    @asynccontextmanager
    async def run() -> AsyncIterator[Scene]:
        here = Scene(tmp_path)
        try:
            yield here
        finally:
            await here.processes.close()
        assert repr(here.processes) == "ReplicaProcesses([] wanted, 0 alive)"

    return run


URL = "http://h:7"


async def test_replicas_come_and_go_and_the_others_are_left_alone(scene) -> None:  # type: ignore[no-untyped-def]
    async with scene() as here:
        here.want("a-0", "a-1", "b-0")
        await here.until(a_0=URL, a_1=URL, b_0=URL)
        kept, gone = here.pid("a-0"), here.pid("a-1")
        here.want("a-0", "b-0")
        assert [(r.name, r.url) for r in here.processes.running().replicas][1] == ("a-1", None), (
            "it is there while it ends"
        )
        await here.until(a_0=URL, b_0=URL)
        with pytest.raises(ProcessLookupError):
            os.kill(gone, 0)
        here.want("a-0", "a-1")
        await here.until(a_0=URL, a_1=URL)
        assert here.pid("a-0") == kept
        assert here.pid("a-1") != gone, "the one before had ended: it would have said so"
        await here.processes.close()
        assert here.cleaned == [("b-0", {"a-0", "a-1"})], (
            "what is left of a deployment goes with it, not with a replica"
        )


async def test_one_that_is_dismissed_at_once_leaves_nothing_behind(scene) -> None:  # type: ignore[no-untyped-def]
    async with scene() as here:
        here.want("a-0", "a-1")
        here.want("a-0")
        await here.until(a_0=URL)
        first = here.pid("a-0")
        # Two lists in one step: the task of the second a-0 is cancelled before it begins.
        other = WantedReplica(name="a-0", deployment="a", model="other")
        here.processes.want(Wanted((other,)))
        here.processes.want(Wanted())
        await here.until()
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert [name for name, _ in here.cleaned] == ["a-0"]


def test_caches_of_a_deployment_go_all_and_no_others(tmp_path: Path) -> None:
    names = (
        "b-replica-0",
        "b-replica-1",
        "b-replica-12",
        "b-replica-2",
        "bb-replica-0",
        "replica-0",
        "a-b-replica-0",
        "b-replica",
    )
    for name in names:
        (tmp_path / name / "step-1").mkdir(parents=True)
    remove_caches(tmp_path / "b-replica-0", {"b-replica-2"})
    left = {directory.name for directory in tmp_path.iterdir()}
    assert left == set(names) - {"b-replica-0", "b-replica-1", "b-replica-12"}


def test_caches_of_deployments_that_went_while_no_server_ran_go_too(tmp_path: Path) -> None:
    names = ("replica-0", "replica-3", "b-replica-0", "c-replica-1", "replica-x", "notes")
    for name in names:
        (tmp_path / name / "step-1").mkdir(parents=True)
    aside = set_strange_caches_aside(tmp_path, {"replica-0", "b-replica-4"})
    assert {d.name for d in tmp_path.iterdir()} - {d.name for d in aside} == set(names) - {"c-replica-1"}
    assert len(set_strange_caches_aside(tmp_path, {"replica-0", "b-replica-4"})) == 1, "a crash forgets none"
    remove_all(aside)
    assert {d.name for d in tmp_path.iterdir()} == set(names) - {"c-replica-1"}


async def test_one_that_cannot_start_says_why_is_tried_again_and_holds_up_nobody(scene) -> None:  # type: ignore[no-untyped-def]
    async with scene() as here:
        here.codes["a-0"] = "say(Listening(error='no such model'))"
        here.want("a-0", "b-0")
        await here.until(a_0=None, b_0=URL)
        async with asyncio.timeout(DEADLINE_S):
            while not (why := here.processes.running().replicas[0].error):
                here._changed.clear()
                await here._changed.wait()
        assert why == here.processes.failure("a") == "a-0: no such model"
        assert (here.processes.waiting("a"), here.processes.failure("b")) == (set(), None)
        here.codes["a-0"] = LISTEN
        await here.until(a_0=URL, b_0=URL)
        assert here.processes.running().replicas[0].error is here.processes.failure("a") is None


class Waiting(Child):
    """Waits for room, which is there from when `room` is set; runs somewhere else then."""

    room: asyncio.Event

    async def start(self, on_waiting: Callable[[str], None] = ignore) -> None:
        if not self.room.is_set():
            on_waiting("a-0: waits for room")
            await self.room.wait()
        await super().start(on_waiting)
        self.place = "node there"


async def test_one_that_waits_for_room_says_so_and_has_not_failed(scene) -> None:  # type: ignore[no-untyped-def]
    async with scene() as here:
        child = Waiting("a-0", "scripted_replica", Script(LISTEN), host="h")
        child.room = asyncio.Event()

        async def make(wanted: WantedReplica) -> Child:
            return child

        here.processes = ReplicaProcesses(make, lambda r, others: None, here._changed.set, stop_s=1000)
        here.want("a-0")
        async with asyncio.timeout(DEADLINE_S):
            while here.processes.running().replicas[0].error != "a-0: waits for room":
                here._changed.clear()
                await here._changed.wait()
        assert (here.processes.waiting("a"), here.processes.failure("a"), here.processes.places()) == (
            {"a-0"},
            None,
            {},
        )
        child.room.set()
        await here.until(a_0=URL)
        assert (here.processes.waiting("a"), here.processes.places()) == (set(), {"a-0": "node there"})


async def test_one_that_died_and_cannot_be_started_again_says_why_until_it_can(scene) -> None:  # type: ignore[no-untyped-def]
    async with scene() as here:
        here.codes["a-0"] = f"broken = pathlib.Path({str(here.path / 'broken')!r})\n" + (
            "if broken.exists(): say(Listening(error='no memory')); sys.exit(1)\n" + LISTEN
        )
        here.want("a-0")
        await here.until(a_0=URL)

        async def until_error_is(error: str | None) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while here.processes.running().replicas[0].error != error:
                    here._changed.clear()
                    await here._changed.wait()

        (here.path / "free port").write_text("8")
        (here.path / "broken").touch()
        os.kill(here.pid("a-0"), signal.SIGKILL)
        await until_error_is("a-0: no memory")
        assert here.processes.running().replicas[0].url == URL, "it is a member of its deployment still"
        (here.path / "broken").unlink()
        await until_error_is(None)
        # Somebody else may have its port by now.
        await here.until(a_0="http://h:8")


async def test_one_that_is_not_wanted_any_more_while_it_starts_is_ended(scene) -> None:  # type: ignore[no-untyped-def]
    async with scene() as here:
        here.codes["a-0"] = "time.sleep(1000)"
        here.want("a-0")
        async with asyncio.timeout(DEADLINE_S):
            while not (here.path / "a-0").exists() or not (here.path / "a-0").read_text():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
        pid = here.pid("a-0")
        here.want()
        await here.processes.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.timeout(60)
async def test_at_the_end_the_stubborn_are_killed_sooner_than_one_that_leaves_alone(scene) -> None:  # type: ignore[no-untyped-def]
    async with scene() as here:
        here.codes["a-0"] = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + LISTEN + "; time.sleep(1000)"
        here.want("a-0")
        await here.until(a_0=URL)
        pid = here.pid("a-0")
        await here.processes.close(0.1)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
