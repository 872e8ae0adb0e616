"""The decision about one replica, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.control.reconcile import Action, decide, failure
from midstream.ledger import DeploymentState
from midstream.types import BASE_SNAPSHOT, Desired, ReplicaReport, Stage, Transition

A = Desired(snapshot="a", generation=3, url="file:///bucket/a")
OLD = Desired(snapshot="old", generation=3, url="file:///bucket/old")
OLDER = Desired(snapshot="older", generation=3, url="file:///bucket/older")
NOTHING = DeploymentState(None)
WANT_A = DeploymentState(A, (OLD, OLDER))
FIRST_A = DeploymentState(A)


def report(snapshot: str = BASE_SNAPSHOT, *failed: Desired, **fields: Any) -> ReplicaReport:
    moves = tuple(
        Transition(
            seq=i, at=0.0, snapshot=d.snapshot, generation=d.generation, stage=Stage.ERROR, detail="short"
        )
        for i, d in enumerate(failed)
    )
    given: dict[str, Any] = {"replica": "replica-0", "boot": "b", "ready": True} | fields
    return ReplicaReport(snapshot=snapshot, transitions=moves, **given)


@pytest.mark.parametrize(
    ("case", "state", "seen", "admitted", "action"),
    [
        ("unreachable, was in", WANT_A, None, True, Action(None, True)),
        ("unreachable, was out", WANT_A, None, False, Action(None, False)),
        ("nothing signalled, not ready", NOTHING, report(ready=False), False, Action(None, False)),
        ("nothing signalled, ready", NOTHING, report(), False, Action(None, True)),
        ("ledger lost, replica kept its snapshot", NOTHING, report("x", generation=9), False, Action(None, True)),
        ("fresh boot", WANT_A, report(), False, Action(A, False)),
        ("fresh boot, not ready yet", WANT_A, report(ready=False), False, Action(A, False)),
        ("fresh boot, told", WANT_A, report(generation=3, target="a"), False, Action(None, False)),
        ("in rotation on base at the first signal", FIRST_A, report(), True, Action(A, True)),
        ("loading beside serving", WANT_A, report("old", generation=3, target="a"), True, Action(None, True)),
        ("serves it", WANT_A, report("a", generation=3), False, Action(None, True)),
        ("serves it, not ready", WANT_A, report("a", generation=3, ready=False), False, Action(None, False)),
        ("serves it, an older generation", WANT_A, report("a", generation=2), True, Action(A, True)),
        ("the gateway restarted while it serves an older one", WANT_A, report("old"), False, Action(A, True)),
        ("missed this generation, is at another", WANT_A, report("old", generation=3, target="z"), True,
         Action(A, True)),
        ("a younger ledger", WANT_A, report("z", generation=9), True, Action(A, True)),
        ("failed, keeps what serves", WANT_A, report("old", A, generation=3, target="a"), True, Action(None, True)),
        ("failed on a fresh boot", WANT_A, report("base", A, generation=3, target="a"), False, Action(OLD, False)),
        ("failed, fallback on its way", WANT_A, report("base", A, generation=3, target="old"), False,
         Action(None, False)),
        ("failed, fallback serves", WANT_A, report("old", A, generation=3), False, Action(None, True)),
        ("failed, fallback failed", WANT_A, report("base", A, OLD, generation=3, target="old"), False,
         Action(OLDER, False)),
        ("all failed", WANT_A, report("base", A, OLD, OLDER, generation=3, target="older"), False,
         Action(None, False)),
        ("failed and nothing was ever ready", FIRST_A, report("base", A, generation=3, target="a"), False,
         Action(None, True)),
        ("failed in an earlier generation", WANT_A,
         report("old", Desired(snapshot="a", generation=2), generation=2, target="a"), True, Action(A, True)),
    ],
)  # fmt: skip
def test_the_action_for_a_replica(
    case: str, state: DeploymentState, seen: ReplicaReport | None, admitted: bool, action: Action
) -> None:
    assert decide(state, seen, admitted) == action, case


def test_a_failure_is_forgotten_once_the_same_attempt_is_begun_again() -> None:
    moves = [
        Transition(seq=i, at=0.0, snapshot="a", generation=3, stage=stage, detail=detail)
        for i, (stage, detail) in enumerate([(Stage.FETCHING, ""), (Stage.ERROR, "x"), (Stage.FETCHING, "")])
    ]
    reports = [
        ReplicaReport(replica="r", boot="b", ready=True, transitions=tuple(moves[:n])) for n in range(4)
    ]
    assert [failure(seen, A) for seen in reports] == [None, None, "x", None]
