"""The routing key to the letter, and which weights a sampling session takes."""

from __future__ import annotations

import pytest

from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.routing import BASE, SERVING, SessionWeights, key_headers, may_come_back, routing_key
from midstream_tinker.trainer.types import WorkFailed

RUN = SessionWeights(policy="run", snapshot="tinker-ab-0-7", run="tinker-ab-0")
SAVED = SessionWeights(policy="exact", snapshot="tinker-ab-0-7-final")


def test_the_key_is_session_and_seq_id() -> None:
    assert routing_key("sampling_db29248d", 0) == "sampling_db29248d:0"
    assert routing_key("sampling_db29248d", 590000000000000017) == "sampling_db29248d:590000000000000017"
    assert key_headers("sampling_db29248d:0") == {
        "x-session-id": "sampling_db29248d:0",
        "x-midstream-follow-prefix": "1",
    }


@pytest.mark.parametrize(("session", "seq"), [(None, 3), ("sampling_1", None), (None, None)])
def test_without_session_or_seq_id_there_is_no_key(session: str | None, seq: int | None) -> None:
    assert routing_key(session, seq) is None
    assert key_headers(None) == {}


@pytest.mark.parametrize("seq", [None, 3])
def test_a_colon_in_the_session_is_refused(seq: int | None) -> None:
    with pytest.raises(TinkerRefusal) as refused:
        routing_key("a:b", seq)
    assert (refused.value.status, refused.value.param) == (400, "sampling_session_id")


def test_what_the_gateway_is_asked_for() -> None:
    assert SAVED.headers() == {"x-midstream-snapshot": "tinker-ab-0-7-final"}
    assert BASE.headers() == {"x-midstream-snapshot": "base"}
    assert RUN.headers() == {"x-midstream-min-snapshot": "tinker-ab-0-7"}
    assert SERVING.headers() == {}


def test_a_run_takes_its_own_later_weights_and_nobody_elses() -> None:
    RUN.check(["tinker-ab-0-7", "tinker-ab-0-12", "tinker-ab-0-13-final"])
    for other in ("base", "step-3", "tinker-ab-1-3", "tinker-ab-00-3", "tinker-ab-0"):
        with pytest.raises(WorkFailed, match=other) as failed:
            RUN.check(["tinker-ab-0-7", other])
        assert failed.value.category == "user"
        assert "tinker-ab-0-7" in failed.value.message


@pytest.mark.parametrize("older", ["tinker-ab-0-6", "tinker-ab-0-2-step10", "tinker-ab-0-x"])
def test_a_run_does_not_take_older_weights_of_its_own_that_serve_again(older: str) -> None:
    assert not RUN.allows(older)
    with pytest.raises(
        WorkFailed, match=f"'tinker-ab-0-7' or a later one of its run; tokens came from '{older}'"
    ):
        RUN.check(["tinker-ab-0-7", older])
    assert not may_come_back(RUN, {"newest": older})
    for later in ("tinker-ab-0-7", "tinker-ab-0-7-final", "tinker-ab-0-10"):
        assert RUN.allows(later)


def test_saved_weights_and_base_are_exact_and_the_setting_is_named() -> None:
    SAVED.check(["tinker-ab-0-7-final"])
    with pytest.raises(WorkFailed, match="tinker-ab-0-8"):
        SAVED.check(["tinker-ab-0-7-final", "tinker-ab-0-8"])
    with pytest.raises(WorkFailed, match="base_model_clients"):
        BASE.check(["step-3"])
    SERVING.check(["base", "anything"])


def test_a_refusal_names_both_snapshots() -> None:
    failed = SAVED.superseded(["tinker-ab-0-8", "tinker-ab-0-8"])
    assert failed.category == "user"
    assert "'tinker-ab-0-7-final'" in failed.message
    assert failed.message.count("'tinker-ab-0-8'") == 1
    assert "base_model_clients" in BASE.superseded(["step-3"]).message


def test_weights_that_are_still_the_newest_come_back() -> None:
    assert may_come_back(SAVED, {"newest": "tinker-ab-0-7-final"})
    assert may_come_back(RUN, {"newest": "tinker-ab-0-9"})
    assert may_come_back(BASE, {"newest": "base"})
    assert not may_come_back(SAVED, {"newest": "tinker-ab-0-8"})
    assert not may_come_back(BASE, {"newest": "step-3"})
    assert not may_come_back(SAVED, {})
