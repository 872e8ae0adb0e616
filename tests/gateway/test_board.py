"""What the dashboard is fed with: swaps as replicas report them, rates that do not cross a boot, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_harness import reconciler
from reports import replica_report

from midstream.api import dashboard
from midstream.api.board import SAMPLE_EVERY_S, SAMPLES_KEPT, SWAPS_KEPT, Board
from midstream.api.dashboard import DashboardApi
from midstream.core.kv import KvStats
from midstream.core.measures import Distribution, Rewarded, Trajectories
from midstream.core.reports import PolicyReport
from midstream.core.scopes import EVERYTHING, parse_grant
from midstream.core.served_names import ServedNames
from midstream.core.types import EngineStats, Stage, SwapTiming, Transition
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.fleet.tally import Siblings, Tally
from midstream.ledger import Signalled
from midstream.proxy.metrics import GatewayMetrics

NAME = "accounts/a/deployments/default"


class Bed:
    def __init__(self) -> None:
        self.now = 0.0
        self.replicas = ReplicaSet(
            DeploymentReplicas([("replica-0", "http://r0"), ("replica-1", "http://r1")])
        )
        names = ServedNames("accounts/a/models/m", NAME)
        # Its reconciler hears no report: that takes a loop.
        idle = reconciler(ReplicaSet(DeploymentReplicas()))
        self.deployment = Deployment(names, self.replicas, idle)
        deployments = Deployments(self.deployment)
        self.metrics = GatewayMetrics(deployments)
        self.board = Board(
            deployments, self.metrics, now=lambda: 1000.0 + self.now, monotonic=lambda: self.now
        )

    def report(self, index: int, **fields: Any) -> None:
        name = f"replica-{index}"
        given = {"replica": name, "boot": "b", "ready": True, **fields}
        self.replicas.views[index].replica.hear(replica_report(**given))
        self.board.look()


def moves(
    snapshot: str, generation: int, stages: tuple[Stage, ...], first: int = 0
) -> tuple[Transition, ...]:
    return tuple(
        Transition(seq=first + i, at=float(first + i), snapshot=snapshot, generation=generation, stage=stage)
        for i, stage in enumerate(stages)
    )


LOADS = (Stage.FETCHING, Stage.STAGING, Stage.STAGED, Stage.COMMITTING, Stage.CHECKING, Stage.IDLE)


def test_two_swaps_between_two_looks_are_both_shown_with_their_times_and_pauses() -> None:
    bed = Bed()
    first, second = moves("s1", 1, LOADS), moves("s2", 2, LOADS, first=6)
    timings = tuple(
        SwapTiming(snapshot=f"s{n}", generation=n, pause_ms=n / 2, streams_crossed=n) for n in (1, 2)
    )
    bed.report(0, transitions=first + second, swaps=timings)
    found = bed.board.swaps(EVERYTHING)
    assert [(s.snapshot, s.generation, s.pause_ms, s.streams_crossed) for s in found] == [
        ("s1", 1, 0.5, 1),
        ("s2", 2, 1.0, 2),
    ]
    assert found[0].stages == [
        ("downloading", 0.0), ("staging", 1.0), ("staged", 2.0), ("committing", 3.0), ("checking", 4.0), ("idle", 5.0),
    ]  # fmt: skip


def test_a_look_shows_what_changed_since_the_last_one_and_nothing_twice() -> None:
    bed = Bed()
    bed.report(0, transitions=moves("s1", 1, LOADS[:2]))
    [begun] = bed.board.swaps(EVERYTHING)
    assert (begun.stages[-1][0], begun.pause_ms) == ("staging", None)
    seen = begun.number
    bed.board.look()
    assert bed.board.swaps(EVERYTHING, seen) == []
    failed = Transition(seq=2, at=2.0, snapshot="s1", generation=1, stage=Stage.ERROR, detail="torn")
    bed.report(0, transitions=(*moves("s1", 1, LOADS[:2]), failed))
    [ended] = bed.board.swaps(EVERYTHING, seen)
    assert (ended.error, [stage for stage, _ in ended.stages]) == (
        "torn",
        ["downloading", "staging", "error"],
    )


def test_swaps_of_policies_and_of_other_boots_are_others() -> None:
    bed = Bed()
    red = PolicyReport(policy="red", transitions=moves("s1", 1, LOADS))
    bed.report(0, transitions=moves("s1", 1, LOADS), policies=(red,))
    bed.report(0, boot="c", transitions=moves("s1", 1, LOADS))
    bed.report(1, transitions=moves("s1", 1, LOADS))
    found = {(s.replica, s.boot, s.policy): len(s.stages) for s in bed.board.swaps(EVERYTHING)}
    assert found == {
        ("replica-0", "b", ""): 6, ("replica-0", "b", "red"): 6, ("replica-0", "c", ""): 6, ("replica-1", "b", ""): 6,
    }  # fmt: skip


def test_a_sample_has_the_counts_of_each_boot_and_how_far_behind_its_snapshot_is() -> None:
    bed = Bed()
    bed.deployment.order.learn(
        [Signalled("s1", 1, True), Signalled("s2", 2, False), Signalled("s3", 3, False)]
    )
    engine = EngineStats(
        generated_tokens=7, prompt_tokens=5, cached_prompt_tokens=3, running=2, waiting=1, kv=KvStats(used=1, total=4)
    )  # fmt: skip
    bed.metrics.requests["completions", 200] += 3
    bed.metrics.requests["completions", 503] += 1
    bed.metrics.requests["control", 503] += 9
    bed.metrics.cut_responses["replica-0"] += 1
    bed.report(0, snapshot="s1", engine=engine)
    bed.now += SAMPLE_EVERY_S
    bed.replicas.views[0].replica.trajectories = Trajectories(
        measures={"time_to_first_token_seconds": Distribution([0] * 8 + [3] + [0] * 9, 0.75)}
    )
    bed.report(0, boot="c", snapshot="s3", engine=EngineStats(generated_tokens=1))
    [(first, old), (second, new)] = bed.board.samples(EVERYTHING)
    assert old.replicas == {"replica-0": (7, 5, 3, 2, 1, 0.25, 2, 0, 0, 0.0)}
    assert new.replicas == {"replica-0": (1, 0, 0, 0, 0, 0.0, 0, 1, 3, 0.75)}
    assert (old.at, old.answered, old.failed, old.cut) == (1000.0, 4, 1, 1)
    assert list(bed.board.samples(EVERYTHING, first)) == [(second, new)]


def test_what_is_kept_has_a_bound() -> None:
    bed = Bed()
    for number in range(SWAPS_KEPT + 10):
        bed.report(0, boot=f"b{number}", transitions=moves("s1", 1, LOADS))
        bed.now += SAMPLE_EVERY_S
    found = bed.board.swaps(EVERYTHING)
    assert (len(found), found[-1].boot) == (SWAPS_KEPT, f"b{SWAPS_KEPT + 9}")
    assert len(list(bed.board.samples(EVERYTHING))) == SAMPLES_KEPT
    # One replica, one boot.
    assert len(bed.board._seen) == 1


def test_a_key_for_another_deployment_sees_nothing_of_this_one() -> None:
    bed = Bed()
    bed.metrics.requests["completions", 200] += 3
    bed.report(0, transitions=moves("s1", 1, LOADS))
    other = parse_grant(["observe:other"])
    assert bed.board.swaps(other) == []
    [(_, sample)] = bed.board.samples(other)
    assert (sample.replicas, sample.answered, sample.sessions) == ({}, None, None)
    sections = bed.board.sections(other)
    assert (sections["replicas"], sections["server"]["deployments"], "counts" in sections) == ([], [], False)


def test_rewards_of_a_snapshot_are_one_mean_over_all_replicas_in_the_order_of_the_steps() -> None:
    def told(*rows: tuple[str, str, float, int, float]) -> Trajectories:
        fields = ("snapshot", "name", "first_at", "count", "sum")
        rewards = [Rewarded(policy="", **dict(zip(fields, row, strict=True))) for row in rows]
        return Trajectories(measures={}, rewards=rewards)

    bed = Bed()
    bed.replicas.views[0].replica.trajectories = told(
        ("s1", "reward", 5.0, 3, 1.5), ("s2", "reward", 9.0, 1, 1.0)
    )
    bed.replicas.views[1].replica.trajectories = told(
        ("s2", "reward", 8.0, 1, 0.0), ("s1", "judge", 6.0, 1, 4.0)
    )
    rows = bed.board.sections(EVERYTHING)["rewards"]
    assert [(row["snapshot"], row["name"], row["count"], row["mean"]) for row in rows] == [
        ("s1", "reward", 3, 0.5), ("s1", "judge", 1, 4.0), ("s2", "reward", 2, 0.5),
    ]  # fmt: skip
    assert bed.board.sections(parse_grant(["observe:other"]))["rewards"] == []


def test_a_policy_that_is_made_anew_has_swaps_of_its_own() -> None:
    bed = Bed()
    bed.report(0, policies=(PolicyReport(policy="red", made=1.0, transitions=moves("s1", 1, LOADS)),))
    bed.report(0, policies=(PolicyReport(policy="red", made=2.0, transitions=moves("s2", 1, LOADS[:2])),))
    found = [(s.snapshot, [stage for stage, _ in s.stages]) for s in bed.board.swaps(EVERYTHING)]
    assert found[-1] == ("s2", ["downloading", "staging"])
    assert len(bed.board._seen) == 2


def test_a_pause_is_of_the_snapshot_that_it_names() -> None:
    bed = Bed()
    timing = SwapTiming(snapshot="older", generation=1, pause_ms=9.0)
    bed.report(0, transitions=moves("s1", 1, LOADS[:2]), swaps=(timing,))
    [swap] = bed.board.swaps(EVERYTHING)
    assert swap.pause_ms is None


def test_counts_of_other_gateways_begin_another_row_of_counts() -> None:
    bed = Bed()
    bed.report(0)
    told = Siblings(listening=1, tally=Tally(requests=[("completions", 200, 1_000_000)]))
    bed.metrics.siblings = lambda: told
    for _ in range(2):
        bed.now += SAMPLE_EVERY_S
        bed.board.look()
    samples = [sample for _, sample in bed.board.samples(EVERYTHING)]
    assert [sample.answered for sample in samples] == [0, 1_000_000, 1_000_000]
    assert samples[0].counts != samples[1].counts == samples[2].counts


def test_a_fallback_hides_no_failure_of_its_generation() -> None:
    bed = Bed()
    failed = Transition(seq=2, at=2.0, snapshot="s2", generation=2, stage=Stage.ERROR, detail="torn")
    bed.report(
        0, transitions=(*moves("s2", 2, LOADS[:2]), failed, *moves("s1", 2, LOADS, first=3)),
        swaps=(SwapTiming(snapshot="s1", generation=2, pause_ms=0.5),),
    )  # fmt: skip
    found = [(s.snapshot, s.error, s.pause_ms) for s in bed.board.swaps(EVERYTHING)]
    assert found == [("s2", "torn", None), ("s1", None, 0.5)]


async def test_what_changes_between_two_looks_of_a_stream_is_in_its_next_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dashboard, "LOOK_EVERY_S", 0.0)
    rounds = iter((True, True, False))
    api = DashboardApi(Bed().board, lambda: next(rounds))
    states = iter((b"old", *[b"new"] * 8))
    monkeypatch.setattr(api, "_look", lambda grant: {"server": next(states)})

    shown = b"".join([part async for part in api._stream(EVERYTHING)])
    assert shown.count(b"data: old") == shown.count(b"data: new") == 1
