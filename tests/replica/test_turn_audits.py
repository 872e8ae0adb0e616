"""When a replica audits its turns, which ones, and what it counts: a real replica, and an auditor that does as told."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from replica_fakes import MODEL, FakeEngine, Running, running

from midstream.core.audits import (
    CAUSES,
    ENDED,
    GONE,
    NO_TIME,
    AuditAnswer,
    AuditJob,
    AuditMismatch,
    AuditStats,
)
from midstream.core.traces import TracedTurn
from midstream.core.types import GenerateRequest, GenerationEvent
from midstream.engine.base import AtOnce
from midstream.engine.vllm.arguments import vllm_card
from midstream.replica import audit
from midstream.replica.audit import Auditor, AuditorLost, Audits, is_chosen
from midstream.replica.turns.tree import Turn
from midstream.verify.findings import Cause

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}
OFF = AuditMismatch("moved logprob", "the tokens behind it fit", "base")


class Told(Auditor):
    """Answers as the test says. heard: jobs. events: what happened, in order, with those of the engine."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.heard: list[dict[str, Any]] = []
        self.files: list[dict[str, str]] = []
        self.asked, self.closed = asyncio.Event(), asyncio.Event()
        self.answer: asyncio.Future[AuditAnswer]

    def halt(self) -> None:
        self.events.append("halt")

    def proceed(self) -> None:
        self.events.append("proceed")

    async def audit(self, job: AuditJob) -> AuditAnswer:
        self.heard.append(msgspec.json.decode(job.record))
        self.files.append(job.files)
        self.answer = asyncio.get_running_loop().create_future()
        self.asked.set()
        try:
            return await self.answer
        finally:
            self.asked.clear()

    async def close(self) -> None:
        self.events.append("close")
        self.closed.set()


class Noting(FakeEngine):
    """Says when it gets a request."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._notes = events
        self.tells_kv = True

    def generate(
        self, request: GenerateRequest, at_once: AtOnce | None = None
    ) -> AsyncIterator[GenerationEvent]:
        self._notes.append("generate")
        return super().generate(request, at_once)


class Stand:
    def __init__(self, here: Running, audits: Audits, told: Told, events: list[str]) -> None:
        self.here, self.audits, self.told, self.events = here, audits, told, events
        #: Why the next starts of an auditor fail.
        self.no_start = list[Exception]()

    async def turn(self, session: str, **more: Any) -> None:
        headers = {"x-session-id": session, **more.pop("headers", {})}
        answer = await self.here.http.post("/v1/chat/completions", json={**BODY, **more}, headers=headers)
        assert answer.status_code == 200, answer.text

    async def answered(self, answer: AuditAnswer | Exception) -> AuditStats:
        """The auditor answers what it was asked last, or is asked next. The counts behind that."""
        await self.told.asked.wait()
        counted = self.here.replica.changed(60)
        if isinstance(answer, Exception):
            self.told.answer.set_exception(answer)
        else:
            self.told.answer.set_result(answer)
        await counted
        return self.stats()

    def stats(self) -> AuditStats:
        found = self.here.replica.report().audit
        assert found is not None
        return found


@asynccontextmanager
async def play(
    tmp_path: Path, *, share: float = 1.0, idle_s: float = 0.0, keep_s: float = 60.0
) -> AsyncIterator[Stand]:
    events: list[str] = []
    told = Told(events)
    stands = list[Stand]()

    async def start() -> Auditor:
        events.append("start")
        if stands[0].no_start:
            raise stands[0].no_start.pop()
        return told

    audits = Audits(
        "replica-0",
        share,
        start,
        base=tmp_path,
        model=MODEL,
        clock=lambda: 50.0,
        idle_s=idle_s,
        keep_s=keep_s,
    )
    async with running(tmp_path, Noting(events), audits=audits) as here:
        events.clear()
        stands.append(Stand(here, audits, told, events))
        yield stands[0]


async def test_a_turn_is_audited_as_a_record_that_stands_alone(tmp_path: Path) -> None:
    async with play(tmp_path) as stand:
        await stand.turn("s", temperature=0.5)
        counts = await stand.answered(AuditAnswer(worst=2e-6))
        assert (counts.audited, counts.waiting, counts.max_dlogprob, counts.last) == (1, 0, 2e-6, None)
        assert counts.mismatches == dict.fromkeys(CAUSES, 0)
        [record] = stand.told.heard
        assert (record["session"], record["replica"]) == ("s", "replica-0")
        turn = record["turn"]
        assert (turn["turn"], turn["parent"]) == (1, 0)
        assert len(turn["logprobs"]) == len(turn["token_ids"]) == 4
        assert turn["kv_snapshots"][-1]["end"] == len(turn["added"]) + 3
        assert turn["sampling"]["temperature"] == 0.5
        assert stand.told.files == [{"base": str(tmp_path)}]


async def test_the_auditor_is_halted_before_the_engine_has_a_request_and_proceeds_when_none_is_left(
    tmp_path: Path,
) -> None:
    async with play(tmp_path) as stand:
        await stand.turn("s")
        await stand.told.asked.wait()
        stand.events.clear()
        await stand.turn("other")
        assert stand.events[:2] == ["halt", "generate"]
        counts = await stand.answered(AuditAnswer())
        # It was asked before, so it was let go on before it answered what it was asked next.
        await stand.answered(AuditAnswer())
        assert stand.events == ["halt", "generate", "proceed"]
        assert counts.audited == 1
        assert stand.stats().audited == 2


async def test_the_auditor_is_halted_while_a_swap_is_under_way(tmp_path: Path) -> None:
    async with play(tmp_path) as stand:
        await stand.turn("s")
        await stand.told.asked.wait()
        stand.events.clear()
        stand.here.source.blocked = {"step-1"}
        await stand.here.swap("step-1")
        assert stand.events == ["halt"]
        await stand.here.source.fetching.wait()
        await stand.turn("t")
        # The request has ended, and the fetch has not.
        assert stand.events == ["halt", "generate"]
        await stand.here.swapped("step-2")
        counts = await stand.answered(AuditAnswer())
        await stand.answered(AuditAnswer())
        assert stand.events[2:] == ["generate", "proceed"]
        assert counts.audited == 1


@pytest.mark.parametrize("large", [False, True])
async def test_a_large_turn_is_encoded_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    by = set[bool]()
    if large:
        monkeypatch.setattr(audit, "LARGE_BYTES", 1)

    async with play(tmp_path) as stand:
        traced = stand.audits.traced

        def noted(turn: Turn) -> TracedTurn:
            by.add(threading.current_thread() is threading.main_thread())
            return traced(turn)

        stand.audits.traced = noted
        await stand.turn("s")
        assert (await stand.answered(AuditAnswer())).audited == 1
    assert by == {not large}


async def test_no_auditor_is_started_for_a_large_turn_behind_whose_encoding_a_swap_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded_own = Audits._encoded
    began, goes_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def encoded(self: Audits, one: Any) -> bytes:
        record = await encoded_own(self, one)
        began.set()
        await goes_on.wait()
        done.set()
        return record

    monkeypatch.setattr(Audits, "_encoded", encoded)

    async with play(tmp_path) as stand:
        await stand.turn("s")
        await began.wait()
        stand.here.source.blocked = {"step-1"}
        await stand.here.swap("step-1")
        goes_on.set()
        await done.wait()
        await stand.here.source.fetching.wait()
        await stand.here.swapped("step-2")
        assert (await stand.answered(AuditAnswer())).audited == 1
        assert [event for event in stand.events if event != "generate"] == ["start"]


async def test_nothing_is_audited_while_requests_come_one_behind_the_other(tmp_path: Path) -> None:
    async with play(tmp_path, idle_s=3600.0) as stand:
        for number in range(5):
            await stand.turn(f"s-{number}")
        assert stand.events == ["generate"] * 5
        assert stand.stats().waiting == 5
        assert stand.stats().audited == 0

    # It would be idle an hour behind the last one.


async def test_a_mismatch_is_counted_by_cause_and_named_in_log_and_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(stand: Stand) -> None:
        await stand.turn("s")
        counts = await stand.answered(AuditAnswer(worst=0.5, mismatches=[OFF]))
        assert counts.mismatches["moved logprob"] == sum(counts.mismatches.values()) == 1
        assert counts.max_dlogprob == 0.5
        last = counts.last
        assert last is not None
        assert (last.session, last.turn, last.snapshot, last.cause, last.at) == (
            "s",
            1,
            "base",
            "moved logprob",
            50.0,
        )

    with caplog.at_level(logging.ERROR):
        async with play(tmp_path) as stand:
            await scenario(stand)
    assert any(
        "audit: session 's', turn 1, on replica-0, snapshot base: moved logprob: the tokens behind it fit"
        in one
        for one in caplog.messages
    )


async def test_a_name_that_means_other_files_since_is_no_mismatch(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"

    async with play(tmp_path) as stand:
        for place in (before, after):
            place.mkdir()
        stand.audits.serves(MODEL, "step-1", before)
        stand.here.engine.serving = "step-1"
        await stand.turn("s")
        await stand.told.asked.wait()
        await stand.turn("t")
        stand.audits.serves(MODEL, "step-1", after)
        # What waited was dropped, and what is being computed is not believed.
        counts = await stand.answered(AuditAnswer(mismatches=[OFF]))
        assert counts.not_audited == {GONE: 2}
        assert (counts.audited, counts.waiting) == (0, 0)
        await stand.turn("u")
        await stand.told.asked.wait()
        assert stand.told.files[-1]["step-1"] == str(after)
        after.rmdir()
        counts = await stand.answered(AuditAnswer(mismatches=[OFF]))
        assert counts.not_audited == {GONE: 3}


async def test_a_name_whose_files_went_and_that_means_others_now_is_no_mismatch(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"

    async with play(tmp_path) as stand:
        for place in (before, after):
            place.mkdir()
        await stand.turn("first")
        await stand.told.asked.wait()
        stand.audits.serves(MODEL, "step-1", before)
        stand.here.engine.serving = "step-1"
        await stand.turn("s")
        # The cache has no room for it, behind a swap.
        before.rmdir()
        stand.audits.serves(MODEL, "step-2", tmp_path)
        stand.audits.serves(MODEL, "step-1", after)
        counts = await stand.answered(AuditAnswer())
        assert (counts.audited, counts.not_audited, counts.waiting) == (1, {GONE: 1}, 0)


async def test_an_auditor_that_cannot_be_started_costs_one_turn_and_is_tried_again(tmp_path: Path) -> None:
    async with play(tmp_path) as stand:
        stand.no_start.append(BlockingIOError(11, "Resource temporarily unavailable"))
        await stand.turn("s")
        while not stand.stats().not_audited:
            await stand.here.replica.changed(60)
        assert stand.stats().not_audited == {ENDED: 1}
        await stand.turn("t")
        assert (await stand.answered(AuditAnswer())).audited == 1


async def test_an_auditor_that_ends_costs_one_turn_and_is_started_again(tmp_path: Path) -> None:
    async with play(tmp_path) as stand:
        await stand.turn("s")
        counts = await stand.answered(AuditorLost("killed"))
        assert counts.not_audited == {ENDED: 1}
        await stand.turn("t")
        counts = await stand.answered(AuditAnswer(unaudited="its engine does not say what computed its KV"))
        assert counts.not_audited["its engine does not say what computed its KV"] == 1
        assert [one for one in stand.events if one in ("start", "close")] == ["start", "close", "start"]


async def test_it_ends_when_no_turn_waits(tmp_path: Path) -> None:
    async with play(tmp_path, keep_s=0.01) as stand:
        await stand.turn("s")
        await stand.answered(AuditAnswer())
        await stand.told.closed.wait()


async def test_it_ends_when_the_replica_is_busy_for_long_and_its_turn_waits_again(tmp_path: Path) -> None:
    async with play(tmp_path, keep_s=0.01) as stand:
        await stand.turn("s")
        await stand.told.asked.wait()
        stand.audits.moved(busy=True)
        await stand.told.closed.wait()
        assert (stand.stats().waiting, stand.stats().not_audited) == (1, {})
        stand.audits.moved(busy=False)
        assert (await stand.answered(AuditAnswer())).audited == 1
        assert [one for one in stand.events if one in ("start", "close")][:3] == ["start", "close", "start"]


async def test_older_turns_make_room_for_newer_ones_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "WAITING_MAX", 2)

    async with play(tmp_path, idle_s=3600.0) as stand:
        for number in range(5):
            await stand.turn(f"s-{number}")
        assert stand.stats().waiting == 2
        assert stand.stats().not_audited == {NO_TIME: 3}


async def test_turns_without_records_and_without_a_session_are_not_audited(tmp_path: Path) -> None:
    async with play(tmp_path, idle_s=3600.0) as stand:
        await stand.turn("s", headers={"x-midstream-records": "none"})
        answer = await stand.here.http.post("/v1/chat/completions", json=BODY)
        assert answer.status_code == 200
        assert stand.stats().waiting == 0


def test_which_turns_are_chosen_follows_from_their_names_alone() -> None:
    turns = [(("", f"session-{number}"), turn) for number in range(2000) for turn in (1, 2)]
    chosen = [one for one in turns if is_chosen(0.05, 0, *one)]
    assert 130 < len(chosen) < 270
    assert chosen == [one for one in turns if is_chosen(0.05, 0, *one)]
    assert chosen != [one for one in turns if is_chosen(0.05, 1, *one)]
    # A larger share has those of a smaller one.
    assert {*chosen} < {one for one in turns if is_chosen(0.1, 0, *one)}
    assert not any(is_chosen(0.0, 0, *one) for one in turns)
    assert all(is_chosen(1.0, 0, *one) for one in turns)
    assert is_chosen(1.0, 0, ("t", "\ud800"), 1)


def test_the_causes_that_are_counted_are_those_of_the_verifier() -> None:
    # The others are of several records, or of a bucket.
    never = {Cause.REPEATED_TURN, Cause.MISSING_RECORD, Cause.NO_SNAPSHOT, Cause.FOLLOWS}
    assert {*CAUSES} == {cause.value for cause in {*Cause} - never}


def test_vllm_lacks_it_by_name() -> None:
    card = vllm_card("0.32.0")
    assert not card.has("audit")
