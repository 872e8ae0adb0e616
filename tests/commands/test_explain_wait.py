"""What `midstream explain-wait` says of a session."""

from __future__ import annotations

from typing import Any

from midstream.commands.explain_wait import render


def session(wait: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": "agent-7", "turns": 3, "open_turns": 1, "wait": wait}


WAIT = {
    "replica": "replica-0",
    "position": 2,
    "waited_s": 12.5,
    "begun": False,
    "needs_tokens": 432,
    "claimed_tokens": 1728,
    "budget_tokens": 1960,
    "sessions": 4,
}


def test_a_session_that_waits_is_told_what_it_needs_and_who_has_it() -> None:
    text = render(session(WAIT))
    for words in ("number 2", "replica-0", "432 tokens", "232 are left", "4 sessions claim 1728 of 1960"):
        assert words in text


def test_a_session_that_has_begun_is_told_that_older_ones_go_first() -> None:
    text = render(session({**WAIT, "begun": True}))
    assert "began before it" in text
    assert "432 tokens" in text


def test_a_session_that_does_not_wait_says_so() -> None:
    assert render(session(None)) == "agent-7 does not wait: it has had 3 turns, and 1 run now"


def test_a_report_that_claims_more_than_there_is_leaves_nothing() -> None:
    assert "0 are left" in render(session({**WAIT, "claimed_tokens": 9999}))
