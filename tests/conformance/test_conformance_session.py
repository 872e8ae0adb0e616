"""What rows share: every replica is asked, what was found out once, and what was changed is put back."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import scripted
from scripted import DEPLOYMENT, MODEL, Scripted

import midstream_conformance.session
from midstream.core.wires import HOT_LOAD_PATH
from midstream_conformance.endpoint import TRAJECTORY_HEADER
from midstream_conformance.outcome import Failed, Skipped
from midstream_conformance.rows import Evidence, Row
from midstream_conformance.runner import run_row
from midstream_conformance.session import SIGHTINGS, Session
from midstream_conformance.snapshots import Snapshots
from midstream_conformance.target import Target
from midstream_conformance.traffic import NEWCOMERS_TOKENS, Crossing, switch

pytestmark = pytest.mark.fast


def session_of(server: Scripted, *, limit_s: float = 30.0, **known: object) -> Session:
    target = Target(MODEL, False, **{"deployment": DEPLOYMENT, "transition": "ASYNC", **known})  # type: ignore[arg-type]
    return Session(server.endpoint(model=MODEL), target, None, tolerance=0.05, limit_s=limit_s)


def answering(homes: Iterator[str | None]) -> Scripted:
    server = Scripted()
    server.on["POST", "/v1/completions"] = lambda request: scripted.completed(request, replica=next(homes))
    return server


def test_asking_goes_on_until_every_replica_answered() -> None:
    homes = iter(["a"] * 35 + ["b", "c", *["a"] * 100])
    server = answering(homes)
    session = session_of(server, replicas=3)
    found = asyncio.run(session.on_every_replica(lambda key: session.turn([20], key)))
    assert {name: len(answers) for name, answers in found.items()} == {"a": 46, "b": 1, "c": 1}
    keys = [request.headers[TRAJECTORY_HEADER] for request in server.asked]
    assert len(set(keys)) == len(keys), "a session's key was used twice"


@pytest.mark.parametrize(
    ("home", "replicas", "asked"),
    [
        ("a", 1, 1),
        (None, 1, 1),
        # The other one is never seen.
        ("a", 2, 2 * SIGHTINGS + 8 * (2 + 4 + 8)),
        (None, 2, 2 * SIGHTINGS),
        # Nobody knows how many there are.
        ("a", None, SIGHTINGS),
    ],
)
def test_asking_ends_where_replicas_cannot_be_told_apart(
    home: str | None, replicas: int | None, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(midstream_conformance.session, "PAUSES_S", (1e-6,) * 3)
    server = answering(itertools.repeat(home))
    session = session_of(server, replicas=replicas)
    asyncio.run(session.on_every_replica(lambda key: session.turn([20], key)))
    assert len(server.asked) == asked


def test_a_replica_is_reached_that_gets_no_new_session_while_the_other_is_idle() -> None:
    """Sessions go where the fewest are: after a switch that held one replica back, many go to one."""
    busy = 0

    async def complete(request: httpx.Request) -> httpx.Response:
        nonlocal busy
        home, busy = "b" if busy > 1 else "a", busy + 1
        await asyncio.sleep(0)
        busy -= 1
        return scripted.completed(request, replica=home)

    server = Scripted()
    server.on["POST", "/v1/completions"] = complete
    session = session_of(server, replicas=2)
    found = asyncio.run(session.on_every_replica(lambda key: session.turn([20], key)))
    assert sorted(found) == ["a", "b"]


def test_a_replica_is_reached_that_gets_no_new_session_until_its_next_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was busy when it reported last, so however many ask at once, none goes there for a while."""
    waited = 0.0

    async def pause(seconds: float) -> None:
        nonlocal waited
        waited += seconds

    monkeypatch.setattr(midstream_conformance.session.asyncio, "sleep", pause)
    server = Scripted()
    server.on["POST", "/v1/completions"] = lambda request: scripted.completed(
        request, replica="b" if waited >= 1 else "a"
    )
    session = session_of(server, replicas=2)
    found = asyncio.run(session.on_every_replica(lambda key: session.turn([20], key)))
    assert sorted(found) == ["a", "b"]


@pytest.mark.parametrize("error", [Failed("no"), Skipped("no"), OverflowError("no"), httpx.ReadError("no")])
async def test_what_failed_once_is_not_tried_for_every_row(error: Exception) -> None:
    tries = 0

    async def fail(_: Session) -> Evidence:
        nonlocal tries
        tries += 1
        raise error

    session = session_of(Scripted())
    for _ in range(2):
        with pytest.raises(type(error)):
            await session.once("that", fail)
    assert tries == 1


def test_what_a_rows_limit_cut_short_fails_the_next_row_at_once() -> None:
    async def forever(session: Session) -> Evidence:
        async def never(_: Session) -> Evidence:
            await asyncio.Event().wait()
            return {}

        return await session.once("that", never)

    async def ask() -> list[str]:
        session = session_of(Scripted(), limit_s=0.05)
        row = Row("group.row", "", "", (), forever)
        first = await run_row(row, session)
        session.limit_s = 1000.0
        return [first.why, (await run_row(row, session)).why]

    first, second = asyncio.run(ask())
    assert "not done after" in first
    assert "that was not done" in second


@pytest.mark.parametrize(
    "error",
    [
        OverflowError("math range error"),
        RuntimeError("StopIteration"),
        httpx.DecodingError("gzip"),
        AssertionError(),
    ],
)
def test_whatever_a_row_raises_is_its_failure(error: Exception) -> None:
    async def check(_: Session) -> Evidence:
        raise error

    result = asyncio.run(run_row(Row("group.row", "", "", (), check), session_of(Scripted())))
    assert result.verdict == "fail"
    assert type(error).__name__ in result.why


def deployments(refuse: Callable[[int, str], bool]) -> tuple[Scripted, list[str]]:
    """Whose transition can be changed unless refuse(number of the request, wanted); what it is set to, in order."""
    server, kept, count = Scripted(), ["ASYNC"], itertools.count()

    def patch(request: httpx.Request) -> httpx.Response:
        wanted = json.loads(request.content)["hotLoadTransitionType"]
        if refuse(next(count), wanted):
            return scripted.refused(503, "not now")
        kept.append(wanted)
        return httpx.Response(200, json={})

    server.on["PATCH", f"/v1/{DEPLOYMENT}"] = patch
    return server, kept


async def sync_row(session: Session, why: str | None = None) -> None:
    async with session.transition("SYNC"):
        if why is not None:
            raise Failed(why)


def test_a_transition_that_cannot_be_set_back_is_a_failure_and_tried_again() -> None:
    server, kept = deployments(lambda number, _: number == 1)

    async def ask() -> str | None:
        session = session_of(server)
        with pytest.raises(Failed, match="not now"):
            await sync_row(session)
        assert session.target.transition == "SYNC"
        # What is there already is not changed, nor taken for what was there before.
        await sync_row(session)
        return await session.restore_transition()

    assert asyncio.run(ask()) == "ASYNC"
    assert kept == ["ASYNC", "SYNC", "ASYNC"]


async def test_what_a_row_found_is_not_hidden_by_the_transition() -> None:
    server, kept = deployments(lambda _, wanted: wanted == "ASYNC")

    session = session_of(server)
    with pytest.raises(Failed, match="the row's own"):
        await sync_row(session, "the row's own")
    with pytest.raises(Failed, match="not now"):
        await session.restore_transition()
    assert kept == ["ASYNC", "SYNC"]


def test_a_transition_that_cannot_be_changed_skips_and_leaves_nothing_to_put_back() -> None:
    server, kept = deployments(lambda *_: True)

    async def ask() -> str | None:
        session = session_of(server)
        with pytest.raises(Skipped, match="not now"):
            await sync_row(session)
        return await session.restore_transition()

    assert asyncio.run(ask()) is None
    assert kept == ["ASYNC"]
    assert len(server.asked) == 1


def pausing(refuse: Callable[[str], bool]) -> tuple[Scripted, list[str]]:
    """Which may be paused, and the calls that it took unless refuse(path)."""
    server, taken = Scripted(), list[str]()

    def take(request: httpx.Request) -> httpx.Response:
        if refuse(request.url.path):
            return scripted.refused(503, "not now")
        taken.append(request.url.path)
        return httpx.Response(200, json={})

    paused = httpx.Response(200, json={"is_paused": False, "mode": None})
    server.on["GET", "/is_paused"] = lambda _: paused
    server.on["POST", "/pause"] = server.on["POST", "/resume"] = take
    return server, taken


@pytest.mark.parametrize("again", [False, True])
async def test_a_row_that_is_interrupted_in_its_pause_ends_the_pause(again: bool) -> None:
    server, taken = pausing(lambda _: False)

    session, begun, reached = session_of(server), asyncio.Event(), asyncio.Event()

    async def resume(_: httpx.Request) -> httpx.Response:
        if again and not reached.is_set():
            reached.set()
            await asyncio.Event().wait()
        taken.append("/resume")
        return httpx.Response(200, json={})

    async def row() -> None:
        async with session.paused("/pause"):
            begun.set()
            await asyncio.Event().wait()

    server.on["POST", "/resume"] = resume
    running = asyncio.create_task(row())
    await asyncio.wait([running, asyncio.create_task(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    if again:
        await reached.wait()
        running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    # What the second interruption kept from it is done at the end of the run.
    assert await session.restore_pause() is again
    assert not await session.restore_pause()
    assert taken == ["/pause", "/resume"]


async def test_a_pause_whose_answer_is_lost_is_ended_all_the_same() -> None:
    server, taken = pausing(lambda path: path == "/pause")

    session = session_of(server)
    with pytest.raises(Failed, match="not now"):
        async with session.paused("/pause"):
            pass
    assert not await session.restore_pause()
    assert taken == ["/resume"]


async def test_what_others_paused_is_not_resumed() -> None:
    server, taken = pausing(lambda _: False)
    server.on["GET", "/is_paused"] = lambda _: httpx.Response(200, json={"is_paused": True, "mode": "wait"})

    session = session_of(server)
    with pytest.raises(Failed, match="should not be paused"):
        async with session.paused("/pause"):
            pass
    assert not await session.restore_pause()
    assert taken == []


class Replicas:
    """Two replicas that load what is signalled when a test says so."""

    def __init__(self) -> None:
        self.server = Scripted()
        self.signals: list[str] = []
        self.refuse = False
        # Instead of being ready at once.
        self.rows: list[tuple[str, str, str | None]] | None = None
        self.server.on["POST", HOT_LOAD_PATH] = self._signal
        self.server.on["GET", HOT_LOAD_PATH] = self._status

    def _signal(self, request: httpx.Request) -> httpx.Response:
        if self.refuse:
            return scripted.refused(400, "no")
        self.signals.append(json.loads(request.content)["identity"])
        return httpx.Response(200, json={})

    def _status(self, _: httpx.Request) -> httpx.Response:
        ready = self.signals[-1] if self.signals else "step-400"
        return scripted.replicas(*(self.rows or [(ready, "done", ready)] * 2))


@pytest.fixture
def snapshots(tmp_path: Path, checkpoint: Path) -> tuple[Replicas, Snapshots]:
    there = Replicas()
    place = tmp_path / "bucket"
    made = Snapshots(there.server.endpoint(model=MODEL), place.as_uri(), checkpoint, "conformance-test", 0.2)
    return there, made


async def test_a_switch_that_was_cut_short_is_undone_at_the_end(
    snapshots: tuple[Replicas, Snapshots],
) -> None:
    there, made = snapshots

    same = await made.serve("same")
    head = await made.ready("head")
    # And still ready, on the one before.
    there.rows = [(same, "downloading", head)] * 2
    await made.signal(head)
    with pytest.raises(Failed, match="was not ready"):
        await made.wait(head)
    assert made.serving is None
    there.rows = None
    left_on = await made.leave()
    assert left_on is not None
    assert made.variants[left_on] == "same"
    assert there.signals[-1] == left_on


async def test_a_snapshot_that_failed_is_not_left_desired(snapshots: tuple[Replicas, Snapshots]) -> None:
    there, made = snapshots

    same = await made.serve("same")
    broken = made.name()
    await made.post(broken)
    there.rows = [(same, "error", broken)] * 2
    assert await made.wait_failed(broken) == "it is cut short"
    there.rows = None
    left_on = await made.leave()
    assert there.signals[-1] == left_on, "the snapshot that failed is desired still"


def test_a_refused_signal_changes_nothing(snapshots: tuple[Replicas, Snapshots]) -> None:
    there, made = snapshots

    async def run() -> tuple[str, str]:
        same = await made.serve("same")
        there.refuse = True
        await made.post("..")
        return same, await made.any()

    same, now = asyncio.run(run())
    assert same == now


async def test_nothing_is_ready_while_a_replica_is_on_its_way_elsewhere(
    snapshots: tuple[Replicas, Snapshots],
) -> None:
    there, made = snapshots

    same = await made.serve("same")
    there.rows = [(same, "done", same), (same, "staging", "another")]
    with pytest.raises(Failed, match="was not ready"):
        await made.wait(same)


def test_a_failure_is_told_when_no_replica_loads_any_more(snapshots: tuple[Replicas, Snapshots]) -> None:
    there, made = snapshots
    made._ready_s = 60.0
    stages = iter(["verifying", "pending", "error", "done"])

    def status(_: httpx.Request) -> httpx.Response:
        return scripted.replicas(("step-400", "error", "x"), ("step-400", next(stages), "x"))

    there.server.on["GET", HOT_LOAD_PATH] = status
    assert asyncio.run(made.wait_failed("x")) == "it is cut short"
    assert next(stages) == "done", "the other replica was not waited for"


def test_a_failure_while_others_load_to_the_end_is_no_answer(snapshots: tuple[Replicas, Snapshots]) -> None:
    there, made = snapshots
    there.rows = [("step-400", "error", "x"), ("step-400", "verifying", "x")]
    with pytest.raises(Failed, match="replicas still load after"):
        asyncio.run(made.wait_failed("x"))


def test_nothing_is_put_back_where_nothing_was_loaded(snapshots: tuple[Replicas, Snapshots]) -> None:
    there, made = snapshots
    assert asyncio.run(made.leave()) is None
    assert there.server.asked == []


@pytest.mark.parametrize(("enough_after", "lengths"), [(1, 1), (2, 2), (99, 3)])
def test_a_switch_is_made_again_with_longer_streams_until_it_shows_something(
    snapshots: tuple[Replicas, Snapshots], enough_after: int, lengths: int
) -> None:
    there, made = snapshots

    def complete(request: httpx.Request) -> httpx.Response:
        home = random.choice(["a", "b"])
        return scripted.completed(request, replica=home, label=there.signals[-1])

    there.server.on["POST", "/v1/completions"] = complete
    target = Target(MODEL, False, replicas=2, stream_tokens=30, stream_tokens_max=100)
    session = Session(there.server.endpoint(model=MODEL), target, made, tolerance=0.05, limit_s=30)
    seen: list[Crossing] = []

    def enough(crossing: Crossing) -> bool:
        seen.append(crossing)
        return len(seen) >= enough_after

    crossing = asyncio.run(switch(session, "same", "head", enough))
    assert len(seen) == lengths
    assert crossing is seen[-1]
    assert list(crossing.later) == [crossing.new], "requests after the switch have another label"
    long = [min(a.asked for a in found.attempts if a.asked > NEWCOMERS_TOKENS) for found in seen]
    assert all(shortest >= least for shortest, least in zip(long, (10, 30, 33), strict=False)), long
