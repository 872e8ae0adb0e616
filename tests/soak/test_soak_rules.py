"""The rules of the soak can fail: a leak, a wrong label, wrong numbers, a refusal out of season are each found."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soakwatch
from simclient import Broken, Turn, Wrong
from soakflat import FDS, RSS_MB, SAMPLES_MIN, SECONDS_MIN, Allowed, judged
from soakload import Client
from soakoracle import Job, Numbers, RealOracle, merged
from soaktrain import LOST, Lost, Trainee
from soaktrouble import Trouble

WARM_UP_S = 60.0
ALLOWED = Allowed(absolute=8.0, share=0.08)


def grows(value: Callable[[float], float], seconds: int = 600) -> bool:
    """With the noise of an allocator on top."""
    noise = random.Random(0)
    samples = [(float(at), value(at) + noise.uniform(-1.5, 1.5)) for at in range(0, seconds, 4)]
    verdict = judged("replica 1", "rss_mb", samples, WARM_UP_S, ALLOWED)
    assert len(verdict.quarters) == 4, "or there is nothing to judge"
    return verdict.grows


def test_a_leak_grows() -> None:
    assert grows(lambda at: 76 + 35 * at / 300)
    assert grows(lambda at: 76 + 4 * (at / 60) ** 0.9)


@pytest.mark.parametrize(
    "value",
    [
        lambda at: 100.0,
        # It warms up.
        lambda at: 60 + min(at, WARM_UP_S),
        # One step, and rest.
        lambda at: 90.0 if at < 330 else 130.0,
        # A peak at the end.
        lambda at: 400.0 if at > 570 else 100.0,
        lambda at: 130.0 - at / 20,
        # Of many megabytes, a few more are within what wavers.
        lambda at: 900 + 0.05 * at,
    ],
)
def test_what_has_come_to_rest_does_not_grow(value: Callable[[float], float]) -> None:
    assert not grows(value)


def told(**stalls: tuple[int, float]) -> str:
    """As /metrics tells them: how many, and their sum in seconds."""
    name = "midstream_event_loop_stall_seconds"
    lines = [f"# TYPE {name} histogram"]
    for process, (count, seconds) in stalls.items():
        lines += [
            f'{name}_bucket{{le="+Inf",process="{process}"}} {float(count)}',
            f'{name}_count{{process="{process}"}} {float(count)}',
            f'{name}_sum{{process="{process}"}} {seconds}',
        ]
    return "\n".join(lines)


def test_a_stalled_event_loop_is_found_once_and_a_process_that_began_anew_counts_from_nothing() -> None:
    stalls = soakwatch.Stalls()
    stalls.look(told(gateway=(2, 0.2), replica=(1, 0.3)))
    assert stalls.look(told(gateway=(2, 0.2), replica=(1, 0.3))) == []
    assert stalls.look(told(gateway=(4, 0.5), replica=(0, 0.0), tinker=(1, 0.06))) == [
        "the event loop of gateway stood still for 0.300 s, in 2 steps",
        "the event loop of tinker stood still for 0.060 s, in 1 steps",
    ]
    assert stalls.look(told(replica=(1, 0.4))) == [
        "the event loop of replica stood still for 0.400 s, in 1 steps"
    ]


def test_few_samples_are_said_to_be_too_few() -> None:
    samples = [(WARM_UP_S + 4.0 * at, 100.0 * at) for at in range(SAMPLES_MIN - 1)]
    verdict = judged("engine 1", "rss_mb", [(0.0, 0.0), *samples], WARM_UP_S, RSS_MB)
    assert (verdict.quarters, verdict.grows) == ((), False)
    assert "too short" in str(verdict)
    close = [(0.5 * at, 2.0 * at) for at in range(int(2 * (WARM_UP_S + SECONDS_MIN)))]
    assert not judged("engine 1", "rss_mb", close, WARM_UP_S, RSS_MB).quarters
    longer = [*close, (WARM_UP_S + SECONDS_MIN, 999.0)]
    assert judged("engine 1", "rss_mb", longer, WARM_UP_S, RSS_MB).grows


def test_a_descriptor_for_every_request_grows() -> None:
    samples = [(4.0 * at, 60.0 + 2 * at) for at in range(150)]
    assert judged("gateway 1", "fds", samples, WARM_UP_S, FDS).grows


@pytest.fixture(scope="module")
def numbers(tiny_model: Callable[..., Path]) -> Numbers:
    small = {"layers": 1, "hidden": 64, "experts": 2, "top_k": 2, "max_positions": 128}
    return Numbers({"a": tiny_model(seed=1, **small), "b": tiny_model(seed=2, **small)})


@pytest.fixture
def job(numbers: Numbers) -> Job:
    """Greedy: five tokens of weights `a`, three of `b`, with the KV that goes with them."""
    prompt, tokens, logprobs = [7, 8, 9], list[int](), list[float]()
    labels = ["a"] * 5 + ["b"] * 3
    spans = (("a", 0, 7), ("b", 7, 10))
    kv = ["a"] * 7 + ["b"] * 3
    for _ in labels:
        row = numbers._recomputer.passes([*prompt, *tokens], kv).logprobs[-1]
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return Job(tuple(prompt), tuple(tokens), tuple(labels), tuple(logprobs), ((8, spans),), True, "told")


def test_right_numbers_are_computed_once_and_looked_up_after(numbers: Numbers, job: Job) -> None:
    first, second = numbers.judge(job), numbers.judge(job)
    assert (first.wrong, first.computed, first.looked_up) == (None, 8, 0)
    assert (second.wrong, second.computed, second.looked_up) == (None, 0, 8)


def test_a_token_under_the_label_of_other_weights_is_found(numbers: Numbers, job: Job) -> None:
    late = dataclasses.replace(job, labels=("a",) * 6 + ("b",) * 2, parts=((8, (("a", 0, 8), ("b", 8, 10))),))
    assert "of token 5, by" in str(numbers.judge(late).wrong)
    unlike = dataclasses.replace(job, labels=("a",) * 8)
    assert "not of the pass that gave the token" in str(numbers.judge(unlike).wrong)


def test_a_wrong_number_and_a_token_that_is_not_the_likeliest_are_found(numbers: Numbers, job: Job) -> None:
    off = dataclasses.replace(job, logprobs=(*job.logprobs[:7], job.logprobs[7] + 0.01))
    assert "1 of 8 logprobs" in str(numbers.judge(off).wrong)
    other = (job.tokens[7] + 1) % 256
    row = numbers._recomputer.passes([*job.prompt, *job.tokens[:7]], ["a"] * 7 + ["b"] * 3).logprobs[-1]
    drawn = dataclasses.replace(
        job, tokens=(*job.tokens[:7], other), logprobs=(*job.logprobs[:7], float(row[other]))
    )
    assert "not the likeliest" in str(numbers.judge(drawn).wrong)
    assert numbers.judge(dataclasses.replace(drawn, greedy=False)).wrong is None


def test_kv_that_is_not_what_it_is_said_to_be_is_found(numbers: Numbers, job: Job) -> None:
    """The label is right, and another snapshot is named for the prompt's KV."""
    other = dataclasses.replace(job, parts=((8, (("b", 0, 2), ("a", 2, 7), ("b", 7, 10))),))
    assert "logprobs are not those of their labels" in str(numbers.judge(other).wrong)


def test_neighbours_of_the_same_weights_are_one_span() -> None:
    assert merged([("a", 0, 3), ("a", 3, 4), ("b", 4, 9)]) == (("a", 0, 4), ("b", 4, 9))


def whole(tokens: list[int], label: str = "s1") -> Turn:
    kv = [(label, 0, 2 + len(tokens))]
    return Turn([1, 2, 3], [label] * len(tokens), tokens, [-1.0] * len(tokens), kv=kv)


def test_an_equal_request_that_draws_other_tokens_is_found() -> None:
    with ThreadPoolExecutor(1) as executor:
        oracle = RealOracle({1: "a", 2: "b"}, executor, [])
    oracle.weights |= {"s1": 1, "s2": 1, "s3": 2}
    oracle.check_drawn(whole([4, 5]), (2, 0))
    # Other weights and another seed draw others.
    oracle.check_drawn(whole([6, 7], "s3"), (2, 0))
    oracle.check_drawn(whole([6, 7]), (2, 1))
    oracle.check_drawn(whole([4, 5], "s2"), (2, 0))
    assert oracle.counts["drawn as before"] == 2
    with pytest.raises(Wrong, match="drew other tokens"):
        oracle.check_drawn(whole([4, 6], "s2"), (2, 0))


def trouble(
    windows: list[tuple[float, float | None]], of_trainer: list[tuple[float, float | None]] | None = None
) -> Trouble:
    made = Trouble.__new__(Trouble)
    made.windows, made.of_trainer = windows, of_trainer or []
    return made


def test_a_killed_trainer_is_trouble_for_who_trains_alone() -> None:
    killed = trouble([(1.0, 2.0)], [(4.0, 5.0)])
    assert killed.calm_since(3.0)
    assert not killed.trainer_lives_since(3.0)
    assert killed.trainer_lives_since(5.5)
    assert not trouble([(4.0, None)]).trainer_lives_since(5.0)


class Front:
    """Answers a trainee's calls: each with what is next, the error of a lost model where that is None."""

    def __init__(self, *results: dict[str, Any] | None) -> None:
        self.results = list(results)
        self.asked: list[str] = []

    async def call(self, path: str, body: Any) -> dict[str, str]:
        self.asked.append(path)
        return {"request_id": path}

    async def polled(self, request: str) -> dict[str, Any]:
        given = self.results.pop(0)
        return {"error": f"it is gone. {LOST}", "category": "server"} if given is None else given


def trainee(front: Front, *, lives: bool) -> Trainee:
    made = Trainee("t", 1, random.Random(0), SimpleNamespace(), lambda _: None, lambda _: lives)  # type: ignore[arg-type]
    made._call, made._polled = front.call, front.polled  # type: ignore[method-assign, assignment]
    made._model, made._session = "m", "s"
    made._states = {"a": ("tinker://m/weights/a", (3.0,))}
    return made


def loss(value: float) -> dict[str, Any]:
    return {"metrics": {"loss:sum": value}}


def test_a_training_call_that_fails_is_found_unless_its_trainer_ended() -> None:
    with pytest.raises(Lost):
        asyncio.run(trainee(Front(None), lives=False)._loss())
    with pytest.raises(Wrong, match="nothing explains it"):
        asyncio.run(trainee(Front(None), lives=True)._loss())
    with pytest.raises(Wrong, match="nothing explains it"):
        asyncio.run(trainee(Front({"error": "bad", "category": "user"}), lives=False)._loss())


def test_a_state_with_another_loss_than_it_was_saved_with_is_found() -> None:
    asyncio.run(trainee(Front(None, {}, loss(3.0)), lives=False)._resumed())
    with pytest.raises(Wrong, match="it was saved with"):
        asyncio.run(trainee(Front(None, {}, loss(3.1)), lives=False)._resumed())


def test_a_step_of_a_model_that_was_lost_is_found() -> None:
    with pytest.raises(Wrong, match="a step of it is carried out"):
        asyncio.run(trainee(Front({"metrics": {}}), lives=False)._resumed())


def test_a_save_that_did_not_end_leaves_both_losses_possible() -> None:
    client = trainee(Front(None), lives=False)
    client._states = {f"m-{number}": ("path", (3.0,)) for number in range(3)}
    with pytest.raises(Lost):
        asyncio.run(client._save(2.0))
    assert sorted(losses for _, losses in client._states.values()) == [(3.0,), (3.0,), (3.0, 2.0)]


def test_it_is_calm_only_since_the_end_of_the_last_trouble() -> None:
    assert trouble([]).calm_since(0.0)
    assert trouble([(1.0, 2.0), (4.0, 5.0)]).calm_since(5.5)
    assert not trouble([(1.0, 2.0), (4.0, 5.0)]).calm_since(4.5)
    assert not trouble([(1.0, 2.0), (4.0, None)]).calm_since(5.0)


@pytest.mark.parametrize(
    ("status", "calm", "pinned", "synchronous", "allowed"),
    [
        (503, False, False, False, True),
        (429, False, False, False, True),
        (503, True, False, False, False),
        (500, False, False, False, False),
        (502, False, False, False, False),
        (404, False, False, False, False),
        (409, True, True, False, True),
        (409, True, False, False, False),
        (425, True, False, True, True),
        (425, True, False, False, False),
    ],
)
def test_only_documented_refusals_in_season_are_taken(
    status: int, calm: bool, pinned: bool, synchronous: bool, allowed: bool
) -> None:
    trainer: Any = SimpleNamespace(swaps_synchronously=lambda _: synchronous)
    oracle: Any = SimpleNamespace()
    client = Client("c", 1, oracle, Counter(), trainer, lambda _: calm, [])
    refusal = client._refused(status, b'{"error": {"code": "x"}}', pinned=pinned)
    assert isinstance(refusal, Broken if allowed else Wrong)


def test_a_process_and_the_metrics_of_a_server_are_measured() -> None:
    own = soakwatch.of_process(os.getpid())
    assert own["rss_mb"] > 10
    assert own["fds"] >= 3
    assert own["threads"] >= 1
    text = 'midstream_gateway_sessions 12.0\nmidstream_replica_kv_blocks_used{replica="a"} 3.0\n'
    text += 'midstream_replica_kv_blocks_used{replica="b"} 4.5\nmidstream_replica_kv_blocks_capacity{replica="b"} 9\n'
    assert soakwatch.of_metrics(text) == {
        "sessions": 12.0,
        "kv_blocks_used": 7.5,
        "in_flight": 0,
        "long_texts": 0,
    }
