"""Which replicas hold other weights than the rest, and what becomes of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from reports import reported

from midstream.core.reports import Reported
from midstream.core.types import Desired, FileContent, SnapshotCheck, SnapshotContent, Stage, Transition
from midstream.fleet.agree import (
    CANARY_TOLERANCE,
    difference,
    findings,
    is_out,
    settled,
    standing_of,
)
from midstream.fleet.reconcile import decide, failure
from midstream.ledger import DeploymentState, Disagreement

A = Desired(snapshot="a", generation=3, url="file:///b/a")
STATE = DeploymentState(A, since={"a": 3}, ever_ready=True, proven=True)
GOOD, BAD = (-1.0, -2.0), (-1.0, -2.5)


def check(
    canary: tuple[float, ...] = GOOD, weights: str | None = "w", generation: int = 3, **fields: Any
) -> Any:
    return SnapshotCheck(
        **{"snapshot": "a", "generation": generation, "weights": weights, "canary": canary} | fields
    )


def report(index: int, found: SnapshotCheck | None, **fields: Any) -> Reported:
    moved = Transition(seq=0, at=1.0, snapshot="a", generation=3, stage=Stage.IDLE)
    given = {"replica": f"r{index}", "snapshot": "a", "generation": 3}
    return reported(**given | {"check": found, "transitions": (moved,)} | fields)  # type: ignore[arg-type]


def fleet(*checks: SnapshotCheck | None) -> list[Reported]:
    return [report(i, found) for i, found in enumerate(checks)]


def disagreeing(**fields: Any) -> Disagreement:
    given: dict[str, Any] = {"replica": "r1", "boot": "b", "identity": "a", "generation": 3}
    return Disagreement(**given | {"retry_generation": 4, "detail": "differs"} | fields)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (check(), check(), None),
        (check((-1.0, -2.0 - CANARY_TOLERANCE / 2)), check(), None),
        (check((-1.0, -2.0 - CANARY_TOLERANCE * 2)), check(), "canary token 2 is -2.1 instead of -2"),
        (check((-1.0, math.nan)), check(), "canary token 2 is nan"),
        (check((-1.0,)), check(), "1 log-probabilities instead of 2"),
        (check(weights="x"), check(), "digest of its weights is x instead of w"),
        (check(weights=None), check(), None),
    ],
)
def test_what_counts_as_a_difference(one: SnapshotCheck, other: SnapshotCheck, words: str | None) -> None:
    found = difference(one, other)
    assert (found is None) == (words is None)
    assert words is None or words in str(found)


@pytest.mark.parametrize(
    ("checks", "accused"),
    [
        ([check(), check(), check()], []),
        # Of two, the earlier one is right.
        ([check(), check(BAD)], ["r1"]),
        # Else the majority.
        ([check(BAD), check(), check()], ["r0"]),
        ([check(BAD), check(), check(BAD), check()], ["r1", "r3"]),
        ([check(), None, check(BAD)], ["r2"]),
        ([check(), check(weights="x"), check()], ["r1"]),
        # Of other files under the same name.
        ([check(), check(BAD, generation=2)], []),
        ([check(), check(BAD, snapshot="z")], []),
        ([check(BAD)], []),
        ([check(), check(BAD), check((-9.0, -9.0))], ["r1", "r2"]),
        # One without a digest agrees with all, and hides no difference of the others.
        ([check(weights=None), check(weights="k:1"), check(weights="k:2")], ["r2"]),
        ([check(weights=None), check(weights="k:1"), check(weights="k:2"), check(weights="k:2")], ["r1"]),
        ([check(weights="other:x"), check(weights="k:1"), check(weights="k:2")], ["r2"]),
        ([check(weights="k:1"), check(weights="other:x"), *[check(weights="k:2")] * 2], ["r0"]),
        # Nor does it outvote a digest that more replicas have.
        ([check(weights="k:1"), *[check(weights="k:2")] * 2, *[check(weights=None)] * 2], ["r0"]),
        ([check(BAD, weights=None), check(weights="k:1"), check(weights=None)], ["r0"]),
        # Both are near enough to the first one's canary, so nobody is judged by the other's.
        ([check((-1.0, -2.0), None), check((-1.0, -2.04), "k:1"), check((-1.0, -1.96), None)], []),
    ],
)
def test_the_majority_is_right(checks: list[Any], accused: list[str]) -> None:
    found = findings(STATE, fleet(*checks))
    assert [(f.replica, f.verdict) for f in found] == [(name, "reload") for name in accused]


def test_the_first_difference_is_a_reload_the_second_the_end() -> None:
    reports = fleet(check(), check(BAD))
    (first,) = findings(STATE, reports)
    assert (first.verdict, first.generation) == ("reload", 3)
    assert "a is not what r0 serves under that name: the log-probability of canary token 2" in first.detail

    state = replace(STATE, disagreements=(disagreeing(),))
    assert findings(state, reports) == [], "the check is the one of before"
    send = decide(state, reports[1], True).send
    assert send is not None
    assert (send.snapshot, send.generation, send.reload) == ("a", 4, 4)
    again = report(1, check(BAD, generation=4), generation=4)
    assert decide(state, again, True).send is None
    (second,) = findings(state, [reports[0], again])
    assert second == disagreeing(verdict="out", detail=second.detail)

    state = replace(STATE, disagreements=(disagreeing(verdict="out", detail="differs still"),))
    assert is_out(state, again)
    assert findings(state, [reports[0], again]) == []
    action = decide(state, again, True)
    assert (action.send, action.admit, action.stuck) == (None, False, False)
    assert failure(state, again, A) == "differs still"


def test_a_reload_that_helps_settles_it() -> None:
    state = replace(STATE, disagreements=(disagreeing(),))
    mended = report(1, check(generation=4), generation=4)
    assert findings(state, [*fleet(check()), mended]) == [disagreeing(verdict="agreed")]
    settled = replace(STATE, disagreements=(disagreeing(verdict="agreed"),))
    assert standing_of(settled, mended) is None
    assert decide(settled, mended, False).admit


def test_a_reload_that_cannot_be_done_is_the_end_too() -> None:
    state = replace(STATE, disagreements=(disagreeing(),))
    moves = (Transition(seq=1, at=1.0, snapshot="a", generation=4, stage=Stage.ERROR, detail="gone"),)
    stopped = report(
        1, check(BAD), generation=4, stage=Stage.ERROR, error="the files are gone", transitions=moves
    )
    (found,) = findings(state, [*fleet(check()), stopped])
    assert (found.verdict, found.retry_generation) == ("out", 4)
    assert found.detail.endswith("loading it again failed: the files are gone")
    accepted = report(1, check(BAD), generation=4)
    assert findings(state, [*fleet(check()), accepted]) == [], "it has not begun yet"


def test_who_is_out_does_not_vote() -> None:
    """r0 lost against r1 and r2; now r2 is gone, and r0 would win against r1 as the earlier of two."""
    out = disagreeing(replica="r0", verdict="out")
    reports = [report(0, check(BAD, generation=4), generation=4), report(1, check())]
    assert findings(replace(STATE, disagreements=(out,)), reports) == []
    assert [f.replica for f in findings(STATE, reports)] == ["r1"], "as it would be without the memory"


def test_who_is_out_comes_back_with_a_later_snapshot_on_which_it_agrees() -> None:
    b = Desired(snapshot="b", generation=5, url="file:///b/b")
    state = replace(STATE, desired=b, since={"b": 5, "a": 3}, disagreements=(disagreeing(verdict="out"),))
    behind = report(1, check(BAD, generation=4), generation=4)
    action = decide(state, behind, False)
    assert action.send is not None
    assert (action.send.snapshot, action.send.reload, action.admit) == ("b", 0, False)
    on_b = [report(i, check(snapshot="b", generation=5), snapshot="b", generation=5) for i in range(2)]
    assert not decide(state, on_b[1], False).admit, "only once that is known"
    assert findings(state, on_b) == [disagreeing(verdict="agreed")]
    wrong = report(1, check(BAD, snapshot="b", generation=5), snapshot="b", generation=5)
    (found,) = findings(state, [on_b[0], wrong])
    assert (found.verdict, found.identity, found.generation) == ("reload", "b", 5)
    assert findings(state, [report(0, None), wrong]) == [], "nobody to compare with yet"


def test_the_last_one_left_is_not_out_for_good() -> None:
    out, reload = disagreeing(verdict="out"), disagreeing()
    loaded = report(1, check(BAD, generation=4), generation=4)
    assert findings(replace(STATE, disagreements=(out,)), [loaded]) == [], "proved to be wrong"
    assert findings(replace(STATE, disagreements=(reload,)), [report(1, check(BAD))]) == [], (
        "not loaded again"
    )
    agreed = [disagreeing(verdict="agreed")]
    assert findings(replace(STATE, disagreements=(reload,)), [loaded]) == agreed
    b = Desired(snapshot="b", generation=5, url="file:///b/b")
    later = replace(STATE, desired=b, since={"b": 5, "a": 3}, disagreements=(out,))
    on_b = report(1, check(snapshot="b", generation=5), snapshot="b", generation=5)
    assert findings(later, [on_b]) == agreed


def test_who_differs_takes_no_requests_until_it_is_known_to_agree() -> None:
    state = replace(STATE, disagreements=(disagreeing(),))
    assert not decide(state, report(1, check(BAD)), True).admit
    assert not decide(state, report(1, check(generation=4), generation=4), False).admit
    assert decide(
        replace(STATE, disagreements=(disagreeing(verdict="agreed"),)), report(1, check()), False
    ).admit


def test_signalling_it_again_gives_who_is_out_another_try() -> None:
    again = replace(
        STATE, desired=Desired(snapshot="a", generation=6), disagreements=(disagreeing(verdict="out"),)
    )
    reports = [report(0, check()), report(1, check(BAD, generation=4), generation=4)]
    (found,) = findings(again, reports)
    assert (found.verdict, found.generation) == ("reload", 4)


def test_a_new_boot_begins_with_a_clean_slate() -> None:
    state = replace(STATE, disagreements=(disagreeing(verdict="out"),))
    fresh = report(1, check(), boot="b2")
    assert decide(state, fresh, False).admit
    assert not is_out(state, fresh)


def test_base_weights_are_compared_too_before_anything_is_signalled() -> None:
    state = DeploymentState(None, since={"base": 0})
    base = [report(i, check(c, snapshot="base", generation=0), snapshot="base", generation=0, transitions=())
            for i, c in enumerate((GOOD, BAD))]  # fmt: skip
    (found,) = findings(state, base)
    assert (found.replica, found.identity) == ("r1", "base")
    disputed = replace(state, disagreements=(disagreeing(identity="base", generation=0, retry_generation=1),))
    send = decide(disputed, base[1], True).send
    assert send == Desired(snapshot="base", generation=1, reload=1, reset_prompt_cache="all")


def test_a_boot_joins_when_its_check_is_done() -> None:
    checking = report(0, None, stage=Stage.CHECKING, target="a")
    assert not decide(STATE, checking, False).admit
    assert decide(STATE, checking, True).admit, "a running one goes on"
    assert decide(STATE, report(0, check()), False).admit


def test_a_check_that_failed_is_the_snapshots_failure_and_asks_for_a_fallback() -> None:
    old = Desired(snapshot="old", generation=3, url="file:///b/old")
    moves = tuple(
        Transition(seq=i, at=1.0, snapshot="a", generation=3, stage=stage, detail=detail)
        for i, (stage, detail) in enumerate([(Stage.CHECKING, ""), (Stage.ERROR, "canary token 3 is nan")])
    )
    unsound = report(0, None, ready=False, stage=Stage.ERROR, transitions=moves)
    assert failure(STATE, unsound, A) == "canary token 3 is nan"
    action = decide(replace(STATE, fallbacks=(old,), since={"a": 3, "old": 1}), unsound, True)
    assert action.send is not None
    assert action.send.snapshot == "old"


ONE = (FileContent("model.safetensors", 9, "1" * 64),)
OTHER = (FileContent("model.safetensors", 9, "2" * 64),)


def known(weights: dict[str, str] | None = None, content: Any = None) -> DeploymentState:
    """The ledger knows more of what is desired."""
    desired = structs.replace(A, fingerprint="f", content=content)
    return replace(STATE, desired=desired, weights={"a": weights or {}})


def test_a_digest_that_the_ledger_does_not_have_is_wrong_whoever_agrees_with_it() -> None:
    state = known({"k": "right"})
    found = findings(
        state, fleet(check(weights="k:wrong"), check(weights="k:wrong"), check(weights="k:right"))
    )
    assert [(f.replica, f.verdict) for f in found] == [("r0", "reload"), ("r1", "reload")]
    says = "a is not what the ledger has under that name: the digest of its weights is wrong instead of right"
    assert {f.detail for f in found} == {says}


def test_a_replica_that_makes_the_same_wrong_weights_again_is_out_though_it_is_the_only_one() -> None:
    state = replace(known({"k": "right"}), disagreements=(disagreeing(replica="r0"),))
    again = report(0, check(weights="k:wrong", generation=4), generation=4)
    assert [(f.replica, f.verdict) for f in findings(state, [again])] == [("r0", "out")]


def test_digests_of_other_kinds_of_engines_are_not_compared() -> None:
    assert difference(check(weights="k:x"), check(weights="other:y")) is None
    assert findings(known({"k": "w"}), fleet(check(weights="k:w"), check(weights="other:z"))) == []


def test_a_replica_that_found_other_bytes_before_the_ledger_knew_them_loads_again() -> None:
    def with_content(index: int, files: Any) -> Reported:
        seen = SnapshotContent(snapshot="a", fingerprint="f", files=files)
        return report(index, check(), contents=(seen,))

    found = findings(known(content=ONE), [with_content(0, OTHER), with_content(1, ONE)])
    assert [(f.replica, f.verdict) for f in found] == [("r0", "reload")]
    assert found[0].detail.endswith(f"model.safetensors has the digest {'2' * 64} instead of {'1' * 64}")


@pytest.mark.parametrize(
    ("checks", "weights", "learnt"),
    [
        ([check(weights="k:w"), check(weights="k:w")], {}, ["k:w"]),
        ([check(weights="k:w"), check(weights="other:x")], {}, ["k:w", "other:x"]),
        ([check(weights="k:w"), check(weights="k:w")], {"k": "w"}, []),
        # One may still say something else.
        ([check(weights="k:w"), None], {}, []),
        ([check(weights="k:w"), check(weights="k:w", generation=2)], {}, []),
        ([check(weights=None), check(weights=None)], {}, []),
        # The first digest may be the wrong one.
        ([check(weights="k:w"), check(weights=None, unread=True)], {}, []),
        # Two of a kind that differ: one of them is wrong.
        ([check(weights=None), check(weights="k:1"), check(weights="k:2")], {}, []),
        ([check(weights="k:1"), check(weights="other:x"), check(weights="k:2")], {}, ["other:x"]),
    ],
)
def test_the_ledger_learns_digests_once_every_replica_has_been_checked(
    checks: list[Any], weights: dict[str, str], learnt: list[str]
) -> None:
    assert [found.weights for found in settled(known(weights), fleet(*checks))] == learnt


def test_a_replica_that_was_loaded_again_agrees_once_its_weights_are_read() -> None:
    state = replace(STATE, disagreements=(disagreeing(),))
    given = {"generation": 4}
    read = check(**given)
    unread = check(weights=None, unread=True, **given)
    found = [findings(state, [*fleet(check()), report(1, mended, **given)]) for mended in (unread, read)]
    assert found == [[], [disagreeing(verdict="agreed")]]
    wrong = report(1, check(weights="other", **given), **given)
    assert [f.verdict for f in findings(state, [*fleet(check()), wrong])] == ["out"]


def test_nothing_is_learnt_of_doubted_replicas_and_failed_ones_are_not_waited_for() -> None:
    doubted = replace(known(), disagreements=(disagreeing(),))
    assert settled(doubted, fleet(check(), check())) == []
    failed = report(1, None, stage=Stage.ERROR)
    assert [found.weights for found in settled(known(), [report(0, check(weights="k:w")), failed])] == ["k:w"]
