"""The decision about one replica, case by case."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest
from reports import changed, reported

from midstream.core.reports import Reported
from midstream.core.types import BASE_SNAPSHOT, Desired, Stage, Transition
from midstream.fleet.reconcile import (
    BootLoss,
    Delivered,
    ReplicaAction,
    decide,
    effective_reset,
    failure,
    loss,
    serves,
    serving_generation,
)
from midstream.ledger import BootHistory, Death, DeploymentState, Disagreement, TransitionRow

A = Desired(snapshot="a", generation=3, url="file:///bucket/a", reset_prompt_cache="none")
OLD = Desired(snapshot="old", generation=3, url="file:///bucket/old", reset_prompt_cache="none")
OLDER = Desired(snapshot="older", generation=3, url="file:///bucket/older", reset_prompt_cache="none")
FIRST = frozenset({"first"})
SINCE = {"a": 3, "old": 2, "older": 1}
NOTHING = DeploymentState(None)
WANT_A = DeploymentState(A, (OLD, OLDER), since=SINCE, ever_ready=True, first_boots=FIRST)
FIRST_A = DeploymentState(A, since={"a": 3}, first_boots=FIRST)
ONLY_A = DeploymentState(A, since={"a": 3}, ever_ready=True, first_boots=FIRST)
AGAIN_A = msgspec.structs.replace(A, generation=5)
WANT_A_AGAIN = DeploymentState(AGAIN_A, (), since={"a": 3}, ever_ready=True)
OTHER_FILES = DeploymentState(AGAIN_A, (), since={"a": 5}, ever_ready=True)
DIED = "the engine died while loading it"


def moves(*stages: tuple[str, int, Stage]) -> tuple[Transition, ...]:
    return tuple(
        Transition(
            seq=i,
            at=0.0,
            snapshot=s,
            generation=g,
            stage=stage,
            detail="short" if stage is Stage.ERROR else "",
        )
        for i, (s, g, stage) in enumerate(stages)
    )


def report(snapshot: str = BASE_SNAPSHOT, *failed: Desired, **fields: Any) -> Reported:
    """Ready, on `snapshot` since generation `on`, after failures; loading `target` if it is given."""
    served = fields.pop("on", 0)
    history = [] if snapshot == BASE_SNAPSHOT else [(snapshot, served, Stage.IDLE)]
    history += [(d.snapshot, d.generation, Stage.ERROR) for d in failed]
    given = fields.copy()
    if "target" in given:
        history.append((given["target"], given["generation"], Stage.STAGING))
        given["stage"] = Stage.STAGING
    elif failed:
        given |= {"stage": Stage.ERROR, "target": failed[-1].snapshot}
    return reported(snapshot=snapshot, transitions=moves(*history), **given)


def checking(snapshot: str, *, on: int) -> Reported:
    """It switched to `snapshot`, and the check of that has not passed yet."""
    return changed(report(snapshot, on=on), stage=Stage.CHECKING, target=snapshot, generation=on)


def dead(state: DeploymentState, count: int, identity: str = "a", generation: int = 3) -> DeploymentState:
    values = {name: getattr(state, name) for name in DeploymentState.__dataclass_fields__}
    deaths = (*state.deaths, *[Death("replica-0", identity, generation, DIED)] * count)
    return DeploymentState(**values | {"deaths": deaths})


@pytest.mark.parametrize(
    ("case", "state", "seen", "admitted", "action"),
    [
        ("unreachable, was in", WANT_A, None, True, ReplicaAction(None, True)),
        ("unreachable, was out", WANT_A, None, False, ReplicaAction(None, False)),
        ("nothing signalled, not ready", NOTHING, report(ready=False), False, ReplicaAction(None, False)),
        ("nothing signalled, ready", NOTHING, report(), False, ReplicaAction(None, True)),
        ("ledger lost, replica kept its snapshot", NOTHING, report("x", on=9), False, ReplicaAction(None, True)),
        ("fresh boot", WANT_A, report(), False, ReplicaAction(A, False)),
        ("fresh boot, not ready yet", WANT_A, report(ready=False), False, ReplicaAction(A, False)),
        ("fresh boot, at it", WANT_A, report(generation=3, target="a"), False, ReplicaAction(None, False)),
        ("in rotation on base at the first signal", FIRST_A, report(), True, ReplicaAction(A, True)),
        ("loading beside serving", WANT_A, report("old", on=2, generation=3, target="a"), True, ReplicaAction(None, True)),
        ("serves it", WANT_A, report("a", on=3), False, ReplicaAction(None, True)),
        ("serves it, not ready", WANT_A, report("a", on=3, ready=False), False, ReplicaAction(None, False)),
        ("fresh boot, switched to it and is being checked", WANT_A, checking("a", on=3), False, ReplicaAction(None, False)),
        ("in rotation, switched to it and is being checked", WANT_A, checking("a", on=3), True, ReplicaAction(None, True)),
        ("fresh boot, the check of an older one", WANT_A, checking("old", on=2), False, ReplicaAction(A, True)),
        ("serves other files of that name", WANT_A, report("a", on=2), True, ReplicaAction(A, True)),
        ("the gateway restarted while it serves an older one", WANT_A, report("old", on=2), False, ReplicaAction(A, True)),
        ("missed this generation, is at another", WANT_A, report("old", on=2, generation=3, target="z"), True,
         ReplicaAction(A, True)),
        ("a younger ledger", WANT_A, report("z", on=9), True, ReplicaAction(A, True)),
        ("failed, keeps what serves", WANT_A, report("old", A, on=2), True, ReplicaAction(None, True)),
        ("failed on a fresh boot", WANT_A, report("base", A), False, ReplicaAction(OLD, False)),
        ("failed, fallback on its way", WANT_A, report("base", A, generation=3, target="old"), False,
         ReplicaAction(None, False)),
        ("failed, fallback serves", WANT_A, report("old", A, on=3), False, ReplicaAction(None, True)),
        ("failed, fallback failed", WANT_A, report("base", A, OLD), False, ReplicaAction(OLDER, False)),
        ("all failed", WANT_A, report("base", A, OLD, OLDER), False, ReplicaAction(None, False, stuck=True)),
        ("failed and nothing was ever ready", FIRST_A, report("base", A), False, ReplicaAction(None, True)),
        ("failed, but it is ready elsewhere", ONLY_A, report("base", A), False, ReplicaAction(None, False, stuck=True)),
        ("failed in an earlier generation", WANT_A,
         report("old", Desired(snapshot="a", generation=2), on=1), True, ReplicaAction(A, True)),
        ("on base since before the first signal", ONLY_A, report(boot="first"), False, ReplicaAction(A, True)),
        ("on base since before it, not ready", ONLY_A, report(boot="first", ready=False), False,
         ReplicaAction(A, False)),
        ("on base since after the first signal", ONLY_A, report(), False, ReplicaAction(A, False)),
        ("asked for again, serves it", WANT_A_AGAIN, report("a", on=3), True, ReplicaAction(None, True)),
        ("asked for again, is at it", WANT_A_AGAIN, report("old", on=2, generation=3, target="a"), True,
         ReplicaAction(None, True)),
        ("asked for again, failed on it", WANT_A_AGAIN, report("old", A, on=2), True, ReplicaAction(AGAIN_A, True)),
        ("other files, serves the old ones", OTHER_FILES, report("a", on=3), True, ReplicaAction(AGAIN_A, True)),
        ("other files, is at the old ones", OTHER_FILES, report("old", on=2, generation=3, target="a"), True,
         ReplicaAction(AGAIN_A, True)),
        ("other files, serves them", OTHER_FILES, report("a", on=5), True, ReplicaAction(None, True)),
        ("one boot died of it", dead(WANT_A, 1), report(), False, ReplicaAction(A, False)),
        ("two boots died of it", dead(WANT_A, 2), report(), False, ReplicaAction(OLD, False)),
        ("two boots died of it under an earlier signal", dead(WANT_A, 2, generation=2), report(), False,
         ReplicaAction(A, False)),
        ("two boots died of it, nothing else was ever ready", dead(FIRST_A, 2), report(), False,
         ReplicaAction(None, True)),
        ("two boots died of each", dead(dead(dead(WANT_A, 2), 2, "old"), 2, "older"), report(), False,
         ReplicaAction(None, False, stuck=True)),
        ("two boots died of it, this one is at it", dead(WANT_A, 2), report(generation=3, target="a"), False,
         ReplicaAction(None, False)),
        ("two boots died of it, this one serves it", dead(WANT_A, 2), report("a", on=3), False,
         ReplicaAction(None, True)),
    ],
)  # fmt: skip
def test_the_action_for_a_replica(
    case: str, state: DeploymentState, seen: Reported | None, admitted: bool, action: ReplicaAction
) -> None:
    assert decide(state, seen, admitted) == action, case


def test_a_retry_of_a_stuck_replica_forgives_what_failed_before_it() -> None:
    seen = report("base", A, OLD, OLDER)
    retried = msgspec.structs.replace(A, generation=7)
    assert decide(WANT_A, seen, False, retry_generation=7) == ReplicaAction(retried, False)
    at_it = report("base", A, OLD, OLDER, generation=7, target="a")
    assert decide(WANT_A, at_it, False, retry_generation=7) == ReplicaAction(None, False)
    failed_again = report("base", A, OLD, OLDER, retried)
    fallback = msgspec.structs.replace(OLD, generation=7)
    assert decide(WANT_A, failed_again, False, retry_generation=7) == ReplicaAction(fallback, False)
    assert decide(dead(WANT_A, 2), report(), False, retry_generation=7) == ReplicaAction(retried, False)
    assert serves(WANT_A, report("a", on=7), A)


def test_a_failure_is_forgotten_once_the_same_attempt_is_begun_again() -> None:
    begun = moves(("a", 3, Stage.FETCHING), ("a", 3, Stage.ERROR), ("a", 3, Stage.FETCHING))
    reports = [reported(transitions=begun[:n]) for n in range(4)]
    assert [failure(WANT_A, seen, A) for seen in reports] == [None, None, "short", None]


def test_what_serves_counts_as_done_although_loading_it_once_more_failed() -> None:
    history = moves(("a", 3, Stage.IDLE), ("b", 4, Stage.FETCHING), ("a", 5, Stage.ERROR))
    seen = reported(snapshot="a", stage=Stage.ERROR, target="a", transitions=history)
    assert failure(WANT_A_AGAIN, seen, AGAIN_A) is None
    assert decide(WANT_A_AGAIN, seen, True) == ReplicaAction(None, True)
    assert failure(OTHER_FILES, seen, AGAIN_A) == "short"


def test_going_back_to_what_serves_loads_nothing() -> None:
    loaded = [("a", 3, Stage.COMMITTING), ("a", 3, Stage.CHECKING), ("a", 3, Stage.IDLE)]
    back = [*loaded, ("b", 4, Stage.FETCHING), ("a", 5, Stage.IDLE)]
    seen = reported(snapshot="a", generation=5, transitions=moves(*back))
    assert serving_generation(seen) == 3
    assert decide(WANT_A_AGAIN, seen, True) == ReplicaAction(None, True)
    assert not serves(OTHER_FILES, seen, AGAIN_A), "other files have to be committed"
    forgotten = changed(seen, transitions=seen.own.transitions[2:])
    assert (serving_generation(forgotten), decide(WANT_A_AGAIN, forgotten, True)) == (
        5,
        ReplicaAction(None, True),
    )
    nothing_left = changed(seen, transitions=())
    assert serving_generation(nothing_left) == 5


@pytest.mark.parametrize(
    ("served", "reset_all", "reset_new_session", "policy"),
    [
        (5, 0, 0, "none"),
        (5, 5, 4, "none"),
        (4, 4, 5, "new_session"),
        (4, 5, 5, "all"),
        (3, 4, 5, "all"),
        (0, 1, 5, "all"),
    ],
)
def test_the_policy_is_the_strongest_since_what_the_replica_serves(
    served: int, reset_all: int, reset_new_session: int, policy: str
) -> None:
    state = DeploymentState(A, reset_all=reset_all, reset_new_session=reset_new_session)
    seen = report("x", on=served) if served else report()
    assert effective_reset(state, seen) == policy
    sent = decide(state, seen, True).send
    assert sent is not None
    assert sent.reset_prompt_cache == policy


def test_a_replica_that_is_let_go_has_the_strongest_policy_too() -> None:
    """It switches as it was let go: the rules of a signal that it never loaded must not be lost then."""
    state = DeploymentState(A, since=SINCE, reset_all=2)
    staged = report("older", on=1, generation=3, target="a")
    history = (
        *staged.own.transitions[:-1],
        msgspec.structs.replace(staged.own.transitions[-1], stage=Stage.STAGED),
    )
    staged = changed(staged, stage=Stage.STAGED, transitions=history, held=True)
    sent = decide(state, staged, True, turn=True).send
    assert sent is not None
    assert (sent.hold, sent.reset_prompt_cache) == (False, "all")
    # Also by a gateway that no longer lets them go one by one; nobody else is told again what it was told.
    assert decide(state, staged, True, turn=None).send == sent
    assert decide(state, staged, True, turn=False).send is None
    assert decide(state, changed(staged, held=False), True, turn=None).send is None


@pytest.mark.parametrize(("verdict", "policy"), [("reload", "all"), ("out", "all"), ("agreed", "none")])
def test_kv_of_weights_that_were_not_the_others_is_used_by_no_later_snapshot(
    verdict: Literal["reload", "out", "agreed"], policy: str
) -> None:
    wrong = Disagreement("replica-0", "b", "old", 2, 2, "differs", verdict)
    state = DeploymentState(A, (OLD,), since=SINCE, disagreements=(wrong,))
    sent = decide(state, report("old", on=2), True).send
    assert sent is not None
    assert (sent.snapshot, sent.reset_prompt_cache) == ("a", policy)


def row(stage: Stage, identity: str = "a", generation: int = 3, seq: int = 4) -> TransitionRow:
    detail = "CUDA error" if stage is Stage.ERROR else ""
    return TransitionRow("replica-0", "b1", seq, identity, generation, stage, 0.0, detail)


def died(detail: str, seq: int | None, identity: str = "a", generation: int = 3) -> BootLoss:
    return BootLoss(Death("replica-0", identity, generation, detail), seq)


SENT_A = Delivered("b1", "a", 3, 2)


@pytest.mark.parametrize(
    ("case", "tail", "sent", "watched", "expected"),
    [
        ("staging", [row(Stage.STAGING)], SENT_A, True, died(f"{DIED} (stage: staging)", 5)),
        ("staging, unseen", [row(Stage.STAGING)], None, False, died(f"{DIED} (stage: staging)", 5)),
        ("committing, told of another", [row(Stage.COMMITTING)], Delivered("b1", "z", 9, 3), True,
         died(f"{DIED} (stage: committing)", 5)),
        ("fetching, seen", [row(Stage.FETCHING)], SENT_A, True, died(f"{DIED} (stage: fetching)", 5)),
        ("fetching, unseen: a server that was stopped", [row(Stage.FETCHING)], None, False, None),
        ("sent, nothing heard", [], SENT_A, True, died(f"{DIED} (stage: not reported)", 0)),
        ("sent, nothing heard of it", [row(Stage.IDLE, "old", 2)], SENT_A, True,
         died(f"{DIED} (stage: not reported)", 5)),
        ("the replica said so", [row(Stage.STAGING, seq=3), row(Stage.ERROR)], SENT_A, True,
         died("CUDA error", None)),
        ("failed before the engine had it", [row(Stage.VERIFYING, seq=3), row(Stage.ERROR)], SENT_A, True, None),
        ("failed, the stage before is not known", [row(Stage.ERROR)], SENT_A, True, None),
        ("failed after another one was staged", [row(Stage.STAGED, "old", 2, 3), row(Stage.ERROR)], SENT_A, True,
         None),
        ("served", [row(Stage.COMMITTING, seq=3), row(Stage.IDLE)], SENT_A, True, None),
        ("served a newer one, which another gateway sent", [row(Stage.IDLE, "b", 4)], SENT_A, True, None),
        ("an older one after a newer one failed", [row(Stage.ERROR, "b", 4)], Delivered("b1", "a", 3, 4), True,
         died(f"{DIED} (stage: not reported)", 5)),
        ("sent to the boot before it", [], Delivered("b0", "a", 3, 2), True, None),
        ("never told anything", [], None, True, None),
    ],
)  # fmt: skip
def test_whether_a_boot_that_ended_died_of_a_snapshot(
    case: str,
    tail: list[TransitionRow],
    sent: Delivered | None,
    watched: bool,
    expected: BootLoss | None,
) -> None:
    history = BootHistory(last_seq=-1, previous_boot="b1", tail=tuple(tail))
    assert loss("replica-0", history, sent, watched) == expected, case
