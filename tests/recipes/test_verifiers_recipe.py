"""examples/verifiers against a real server, and what its rollouts are made of, with objects in the shape of verifiers' own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recipes import needs, run_recipe
from serving import serve

from midstream.client import PublishError, staleness
from midstream.integrations.verifiers import request_headers, sample_groups, training_sequences


@needs("verifiers")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["", "text"])
def test_an_environment_of_verifiers_is_learnt_from_data_that_are_one_snapshot_old(
    tmp_path: Path, what: str
) -> None:
    with serve(tmp_path / "state") as server:
        steps = run_recipe("verifiers", server, 12, *([what] if what else []))
    assert steps[-1].reward > steps[0].reward + 0.3
    # The first rollouts are of the run's own weights.
    assert steps[0].behind == 0
    assert all(0 <= step.behind <= 1 for step in steps)


# -- without verifiers


def node(token_ids: list[int], sampled: int) -> SimpleNamespace:
    return SimpleNamespace(token_ids=token_ids, mask=[False] * (len(token_ids) - sampled) + [True] * sampled)


def rollout(*branches: list[SimpleNamespace], turns: int = 2, **changed: Any) -> SimpleNamespace:
    made = [SimpleNamespace(nodes=nodes) for nodes in branches]
    return SimpleNamespace(
        **{"id": "s", "num_turns": turns, "branches": made, "reward": 0.25, "ok": True} | changed
    )


def turn(number: int, parent: int, added: list[int], token_ids: list[int], snapshot: str) -> dict[str, Any]:
    return {
        "turn": number,
        "parent": parent,
        "model": "m",
        "added": added,
        "token_ids": token_ids,
        "loss_mask": [0] * len(added) + [1] * len(token_ids),
        "logprobs": [-9.0] * len(token_ids),
        "sampling_logprobs": [-float(i) for i in token_ids],
        "snapshots": [{"snapshot": snapshot, "start": 0, "end": len(token_ids)}],
        "finish_reason": "stop",
        "routing_matrix": None,
        "routing_matrix_dtype": None,
        "routing_matrix_shape": None,
    }


FIRST, SECOND = turn(1, 0, [1, 2], [3, 4], "a"), turn(2, 1, [5], [6], "b")
NODES = [node([1, 2], 0), node([3, 4], 2), node([5], 0), node([6], 1)]


def record(*replicas: list[dict[str, Any]], session: str = "s") -> dict[str, Any]:
    traces = [{"replica": f"r{at}", "turns": turns} for at, turns in enumerate(replicas)]
    return {"id": session, "traces": traces}


def test_a_rollout_is_its_record_with_the_environments_reward() -> None:
    [one] = training_sequences(rollout(NODES), record([FIRST, SECOND]))
    assert one.token_ids == [1, 2, 3, 4, 5, 6]
    assert one.loss_mask == [0, 0, 1, 1, 0, 1]
    # Those that were sampled from, not the raw model's.
    assert one.logprobs == [0, 0, -3, -4, 0, -6]
    assert one.snapshots == [None, None, "a", "a", None, "b"]
    assert one.reward == 0.25
    # The oldest sampled token counts, and those that were added do not.
    assert (staleness(one, ["a", "b"]), staleness(one, ["a", "b", "c"])) == (1, 2)
    # Of a snapshot that the run does not know.
    assert staleness(one, ["b"]) == math.inf


def test_a_rollout_on_two_replicas_has_each_sampled_token_once() -> None:
    elsewhere = turn(1, 0, [1, 2, 3, 4, 5], [6], "b")
    found = training_sequences(rollout(NODES), record([FIRST], [elsewhere]))
    assert [one.loss_mask for one in found] == [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1]]
    assert [one.reward for one in found] == [0.25, 0.25]


def test_a_rollout_without_tokens_takes_those_of_the_record() -> None:
    texts = [node([], 0) for _ in range(4)]
    [one] = training_sequences(rollout(texts), record([FIRST, SECOND]))
    assert one.token_ids == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("trace", "recorded", "why"),
    [
        (rollout(NODES), record([FIRST, SECOND], session="t"), "session 't'"),
        (rollout(NODES), record([FIRST]), "2 turns, the record 1"),
        (rollout(NODES[:2], turns=1), record([FIRST, SECOND]), "1 turns, the record 2"),
        (rollout([*NODES[:3], node([7], 1)]), record([FIRST, SECOND]), "tokens of message 3"),
        # The same answer behind other words.
        (rollout([node([1, 9], 0), *NODES[1:]]), record([FIRST, SECOND]), "tokens of message 1"),
    ],
)
def test_a_rollout_that_is_not_the_recorded_one_is_refused(trace: Any, recorded: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        training_sequences(trace, recorded)


def test_headers_ask_for_records_and_for_a_snapshot() -> None:
    assert request_headers() == {"x-midstream-records": "logprobs"}
    assert request_headers("run/3", wait_s=2.5) == {
        "x-midstream-records": "logprobs",
        "x-midstream-min-snapshot": "run/3",
        "x-midstream-snapshot-wait": "2.5",
    }


class Environment:
    """Two tasks; a slot is its answer: a rollout, or the message of a failure."""

    taskset = (0, 1)

    def __init__(self, *groups: list[Any]) -> None:
        self._groups = groups
        self.served = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.served += 1
        yield

    def slots(self, task: int, n: int) -> list[Any]:
        return self._groups[task][:n]

    async def run_slot(self, slot: Any, how: Any) -> SimpleNamespace:
        if not isinstance(slot, str):
            return SimpleNamespace(ok=True, errors=[], traces=[slot])
        trace = rollout(NODES, ok=False, errors=[SimpleNamespace(message=slot)])
        return SimpleNamespace(ok=False, errors=[], traces=[trace])


class Recorded:
    """A server that has the record of every session but those that it has lost."""

    @property
    def sessions(self) -> Recorded:
        return self

    def trace(self, session: str) -> dict[str, Any]:
        if session == "lost":
            raise PublishError("replica r0 is silent")
        return record([FIRST] if session == "half" else [FIRST, SECOND], session=session)


def test_groups_leave_out_rollouts_that_failed_or_have_no_record_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = Environment(
        [rollout(NODES, reward=0.5), rollout(NODES, id="lost"), rollout(NODES)],
        ["the server is full", rollout(NODES, reward=1), rollout(NODES, id="half")],
    )
    with caplog.at_level(logging.WARNING):
        groups = asyncio.run(sample_groups(env, None, Recorded(), 3))  # type: ignore[arg-type]
    assert [[one.reward for one in group] for group in groups] == [[0.5, 0.25], [1.0]]
    assert [line.getMessage().removeprefix("a rollout is left out: ") for line in caplog.records] == [
        "replica r0 is silent",
        "the server is full",
        "rollout half: verifiers has 2 turns, the record 1",
    ]
    assert env.served == 1


def test_a_group_of_failures_alone_is_an_error() -> None:
    env = Environment([rollout(NODES)], ["no such model"])
    with pytest.raises(RuntimeError, match="all 1 rollouts of a task failed: no such model"):
        asyncio.run(sample_groups(env, None, Recorded(), 1))  # type: ignore[arg-type]
