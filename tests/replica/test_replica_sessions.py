"""The replica's session table: what is held, what closes it, what readers are told, what turns were like."""

from __future__ import annotations

import msgspec
import pytest

from midstream.core.headers import HEADER_PLACED
from midstream.core.measures import TURN_MEASURES
from midstream.core.sessions import SessionsReport
from midstream.core.types import Session
from midstream.replica import sessions as module
from midstream.replica.sessions import Feed, Sessions, stamp_of

A, B, C = ("", "a"), ("", "b"), ("t", "a")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def table(clock: Clock, **more: int) -> Sessions:
    return Sessions(clock=clock, monotonic=clock, **more)


def one_turn(sessions: Sessions, session: Session | None, stamp: int | None = None) -> None:
    with sessions.turn(session, stamp):
        pass


def told(sessions: Sessions, feed: Feed) -> tuple[dict[Session, int], set[Session]]:
    held: dict[Session, int] = {}
    closed: set[Session] = set()
    for line in sessions.reports(feed):
        said = msgspec.json.decode(line, type=SessionsReport)
        held |= dict(said.held)
        closed |= set(said.closed)
    return held, closed


def test_a_reader_is_told_all_that_is_held_and_then_what_changes() -> None:
    sessions = table(Clock())
    one_turn(sessions, A, 5)
    one_turn(sessions, C)
    one_turn(sessions, None)
    with sessions.feed() as feed, sessions.feed() as other:
        assert told(sessions, feed) == ({A: 5, C: 1_000_000}, set())
        assert told(sessions, feed) == ({}, set())
        one_turn(sessions, A)
        assert told(sessions, feed) == ({}, set()), "a turn of a session that is known is no news"
        one_turn(sessions, B, 7)
        assert sessions.close(A)
        assert not sessions.close(A)
        assert told(sessions, feed) == ({B: 7}, {A})
        assert told(sessions, other) == ({B: 7, C: 1_000_000}, {A}), "only the last that is true of each"


def test_many_sessions_are_told_in_bounded_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORTED_AT_ONCE_MAX", 4)
    sessions = table(Clock())
    for number in range(10):
        one_turn(sessions, ("", f"s{number}"))
    with sessions.feed() as feed:
        lines = [msgspec.json.decode(line, type=SessionsReport) for line in sessions.reports(feed)]
    assert [len(line.held) for line in lines] == [4, 4, 2]
    assert {key for line in lines for (_, key), _ in line.held} == {f"s{n}" for n in range(10)}


def test_a_reader_that_is_far_behind_has_to_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNREPORTED_MAX", 2)
    sessions = table(Clock())
    with sessions.feed() as feed:
        for key in "abc":
            assert not feed.behind
            one_turn(sessions, ("", key))
        assert feed.behind


def test_a_session_placed_again_later_is_told_with_the_later_stamp() -> None:
    sessions = table(Clock())
    one_turn(sessions, A, 5)
    with sessions.feed() as feed:
        told(sessions, feed)
        one_turn(sessions, A, 4)
        assert told(sessions, feed) == ({}, set())
        one_turn(sessions, A, 9)
        assert told(sessions, feed) == ({A: 9}, set())


def test_a_reader_hears_at_once_of_a_session_that_a_request_brings_here_or_brings_anew() -> None:
    sessions = table(Clock())
    heard: list[None] = []
    with sessions.feed(lambda: heard.append(None)) as feed:
        with sessions.turn(A, 5):
            assert len(heard) == 1, "before the request is answered"
        one_turn(sessions, A)
        assert len(heard) == 1
        with sessions.turn(A, 9):
            assert len(heard) == 2
        sessions.close(A)
        assert len(heard) == 2, "that it was closed is in no hurry"
        assert told(sessions, feed) == ({}, {A})


def test_sessions_close_when_idle_and_the_least_recently_used_first() -> None:
    clock = Clock()
    sessions = table(clock, sessions_max=2, idle_s=60)
    one_turn(sessions, A)
    clock.now += 50
    one_turn(sessions, B)
    clock.now += 50
    with sessions.feed() as feed:
        sessions.sweep()
        assert told(sessions, feed) == ({B: 1_050_000}, {A})
        one_turn(sessions, A)
        one_turn(sessions, B)
        one_turn(sessions, C)
        assert told(sessions, feed)[1] == {A}
    assert len(sessions) == 2


def test_a_session_with_a_turn_under_way_is_not_idle() -> None:
    clock = Clock()
    sessions = table(clock, idle_s=60)
    with sessions.turn(A, None):
        clock.now += 100
        sessions.sweep()
        assert sessions.one(A) is not None
        clock.now += 100
    clock.now += 59
    sessions.sweep()
    assert sessions.one(A) is not None
    clock.now += 2
    sessions.sweep()
    assert sessions.one(A) is None


def test_what_turns_were_like_adds_up() -> None:
    clock = Clock()
    sessions = table(clock)
    with sessions.turn(A, None) as turn:
        turn.prompt_tokens, turn.cached_tokens, turn.generated_tokens, turn.longest = 100, 0, 12, 6
        turn.first_token_s, turn.generation_s = 0.5, 1.0
        turn.request_s, turn.queued_s, turn.finishes = 1.5, 0.25, ("stop", "tool_calls")
        clock.now += 2
    with sessions.turn(A, None) as turn:
        turn.prompt_tokens, turn.cached_tokens, turn.generated_tokens, turn.longest = 110, 96, 3, 3
        turn.first_token_s, turn.generation_s = 0.25, 0.5
        turn.request_s, turn.finishes = 0.75, ("stop",)
    with sessions.turn(A, None):
        stats = sessions.one(A)
        assert stats is not None
        assert msgspec.to_builtins(stats) == {
            "tenant": "", "key": "a", "stamp": 1_000_000, "opened_at": 1000.0, "used_at": 1002.0, "turns": 3,
            "open_turns": 1, "prompt_tokens": 210, "cached_prompt_tokens": 96, "generated_tokens": 15,
            "first_tokens": 2, "time_to_first_token_s": 0.75, "last_time_to_first_token_s": 0.25,
            "generation_s": 1.5, "token_gaps": 7, "last_reward": None, "rewarded_at": 0.0, "wait": None,
        }  # fmt: skip
    sessions.close(A)
    told = sessions.trajectories()
    assert told.counts["finishes"] == {"stop": 2, "length": 0, "tool_calls": 1, "abort": 0, "dead_end": 0}
    measures = {name: told.measures[name] for name in TURN_MEASURES}
    assert {name: (sum(m.counts), m.sum) for name, m in measures.items()} == {
        "time_to_first_token_seconds": (2, 0.75),
        "inter_token_seconds": (2, 0.2 + 0.25),
        "generation_seconds": (2, 1.5),
        "request_seconds": (2, 2.25),
        "queue_seconds": (1, 0.25),
        "prompt_tokens": (2, 210),
        "generated_tokens": (2, 15),
        "cached_prompt_share": (2, 96 / 110),
        "turns_per_session": (1, 3),
    }
    bounds = TURN_MEASURES["time_to_first_token_seconds"]
    counts = measures["time_to_first_token_seconds"].counts
    assert (counts[bounds.index(0.25)], counts[bounds.index(0.5)]) == (1, 1), "a bound belongs to its bucket"


def test_a_tenants_sessions_are_listed_in_order_and_in_pages() -> None:
    sessions = table(Clock())
    for session in (("t", "c"), B, A, ("t", "b"), C):
        one_turn(sessions, session)
    assert [s.key for s in sessions.of("t", None, 2)] == ["a", "b"]
    assert [s.key for s in sessions.of("t", "b", 2)] == ["c"]
    assert [s.key for s in sessions.of("", None, 9)] == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "stamp"), [("12", 12), ("", None), ("-1", None), ("x", None), ("9" * 19, None), ("²", None)]
)
def test_a_stamp_is_a_number_or_nothing(value: str, stamp: int | None) -> None:
    assert stamp_of({HEADER_PLACED: value}) == stamp
