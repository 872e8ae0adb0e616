"""What a Tinker sample asks of the completions API, and what becomes of its answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sampling_fakes import DEPLOYMENT, entry

from midstream.core.traces import Span
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.samples import UNBOUNDED, CheckedSample, CompletedSample, check, sampled
from midstream_tinker.trainer.types import WorkFailed
from midstream_tinker.types import SampleBody, decode

PROMPT = [5, 6, 7, 8]


def body(*, params: dict[str, Any] | None = None, **fields: Any) -> SampleBody:
    """As an SDK sends it, all defaults said."""
    said = {
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"temperature": 1, "top_k": -1, "top_p": 1, **(params or {})},
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
        **fields,
    }
    return decode(json.dumps(said).encode(), SampleBody)


def asked(**given: Any) -> dict[str, Any]:
    return json.loads(check(body(**given)).completion(DEPLOYMENT))


def test_a_plain_sample_asks_for_its_tokens_and_nothing_else() -> None:
    assert asked(num_samples=3, params={"max_tokens": 9, "temperature": 0.5, "top_k": 7, "top_p": 0.9}) == {
        "model": DEPLOYMENT,
        "prompt": PROMPT,
        "n": 3,
        "max_tokens": 9,
        "context_length_exceeded_behavior": "error",
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "logprobs": True,
    }


def test_without_max_tokens_a_sample_may_fill_the_context() -> None:
    request = asked()
    assert request["max_tokens"] == UNBOUNDED
    assert request["context_length_exceeded_behavior"] == "truncate"


def test_chunks_are_one_prompt_and_empty_ones_add_nothing() -> None:
    chunks = [{"type": "encoded_text", "tokens": part} for part in ([1, 2], [], [3])]
    assert asked(prompt={"chunks": chunks})["prompt"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("\n\nUser:", {"stop": ["\n\nUser:"]}),
        (["a", "b"], {"stop": ["a", "b"]}),
        ([3, 4], {"stop_token_ids": [3, 4]}),
        ([], {"ignore_eos": True}),
    ],
)
def test_stop_in_all_its_forms(stop: Any, expected: dict[str, Any]) -> None:
    request = asked(params={"stop": stop})
    told = {field: request[field] for field in ("stop", "stop_token_ids", "ignore_eos") if field in request}
    assert told == expected


@pytest.mark.parametrize(("seed", "expected"), [(7, 7), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_seeds_of_64_bits_stay_apart(seed: int, expected: int) -> None:
    assert asked(params={"seed": seed})["seed"] == expected


def test_prompt_logprobs_are_asked_for_by_echo() -> None:
    assert asked(prompt_logprobs=True)["echo_last"] == 4
    assert "top_logprobs" not in asked(prompt_logprobs=True)
    assert asked(topk_prompt_logprobs=5)["echo_last"] == 4
    assert asked(topk_prompt_logprobs=5)["top_logprobs"] == 5
    assert asked(prompt_logprobs=True, prompt_logprobs_last_n=2)["echo_last"] == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"topk_sample_logprobs": 1}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"target_prompt_logprobs": {"data": [], "dtype": "int64"}}, "target_prompt_logprobs"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 129}, "num_samples"),
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n"),
        ({"params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"params": {"seed": 2**64}}, "sampling_params.seed"),
        ({"params": {"stop": ["a", 1]}}, "sampling_params.stop"),
        ({"params": {"stop": [""]}}, "sampling_params.stop"),
        ({"params": {"stop": ""}}, "sampling_params.stop"),
        ({"params": {"stop": [str(i) for i in range(65)]}}, "sampling_params.stop"),
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x", "format": "png"}]}}, "prompt.chunks[0]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(TinkerRefusal) as refused:
        check(body(**fields))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.detail


def answer(sample: CheckedSample, choices: list[dict[str, Any]], **usage: Any) -> CompletedSample:
    headers = {"x-midstream-replica": "replica-0", "x-midstream-route-reason": "sticky"}
    return sampled(sample, json.dumps({"choices": choices, "usage": usage}).encode(), headers, "s:1")


def choice(index: int, entries: list[Any], *, finish: str = "stop", **more: Any) -> dict[str, Any]:
    spans = [{"snapshot": "base", "start": 0, "end": len(entries)}]
    return {
        "index": index,
        "finish_reason": finish,
        "logprobs": {"content": entries},
        "snapshots": spans,
        **more,
    }


def test_sequences_hold_what_they_were_drawn_with_and_come_in_order() -> None:
    sample = check(body(num_samples=2))
    second = choice(1, [entry(9, -3.0, -0.5)], finish="length")
    first = choice(0, [entry(1, -1.0, -0.25), entry(2, -2.0, -0.75)])
    result = answer(sample, [second, first], prompt_tokens_details={"cached_tokens": 4}).result
    assert [(s.tokens, s.logprobs, s.stopped) for s in result.sequences] == [
        ((1, 2), (-0.25, -0.75), True),
        ((9,), (-0.5,), False),
    ]
    assert (result.cached_tokens, result.replica, result.route_reason, result.key) == (
        4,
        "replica-0",
        "sticky",
        "s:1",
    )
    assert result.prompt_logprobs is None
    assert result.topk_prompt_logprobs is None


@pytest.mark.parametrize(("finish", "stopped"), [("stop", True), ("length", False), ("abort", False)])
def test_only_a_sequence_that_ended_by_itself_is_said_to_have_stopped(finish: str, stopped: bool) -> None:
    """A trainer's call may cut a sample off, which is then no answer to reward as a whole one."""
    result = answer(check(body()), [choice(0, [entry(1, -1.0, -0.25)], finish=finish)]).result
    assert [sequence.stopped for sequence in result.sequences] == [stopped]


def echoed(last: int = 4, k: int = 0) -> list[Any]:
    """The prompt's last entries, of log-probability -0.1 times the position, then one generated token."""
    top = [[(i, -float(i))] * k for i in range(4)]
    entries = [entry(t, -0.1 * i if i else 0.0, None, top[i]) for i, t in enumerate(PROMPT)]
    return [*entries[4 - last :], entry(11, -4.0, -1.5)]


def test_the_first_prompt_token_has_no_log_probability() -> None:
    sample = check(body(prompt_logprobs=True))
    spans = [{"snapshot": "a", "start": 0, "end": 3}, {"snapshot": "b", "start": 3, "end": 4}]
    done = answer(sample, [choice(0, echoed(), prompt_snapshots=spans)])
    assert done.result.prompt_logprobs == pytest.approx((None, -0.1, -0.2, -0.3))
    assert done.result.sequences[0].tokens == (11,)
    assert done.prompt_snapshots == (Span(snapshot="a", start=0, end=3), Span(snapshot="b", start=3, end=4))
    assert done.labels() == {"a", "b", "base"}


def test_a_prompt_that_fills_the_context_is_scored_without_a_token_behind_it() -> None:
    """compute_logprobs asks for one token and does not read it. So a rollout that was cut at the context can be scored."""
    given = body(prompt_logprobs=True, params={"max_tokens": 1})
    sample = check(given, max_context=len(PROMPT))
    assert json.loads(sample.completion(DEPLOYMENT))["max_tokens"] == 0
    done = answer(sample, [choice(0, echoed()[:-1], finish="length") | {"snapshots": []}])
    assert done.result.prompt_logprobs == pytest.approx((None, -0.1, -0.2, -0.3))
    assert [(each.tokens, each.stopped) for each in done.result.sequences] == [((), False)]
    for other in (
        check(given, max_context=len(PROMPT) + 1),
        check(body(params={"max_tokens": 1}), max_context=len(PROMPT)),
        check(body(prompt_logprobs=True, params={"max_tokens": 2}), max_context=len(PROMPT)),
    ):
        assert json.loads(other.completion(DEPLOYMENT))["max_tokens"] > 0


def test_only_the_last_prompt_tokens_when_only_they_were_asked_for() -> None:
    sample = check(body(prompt_logprobs=True, prompt_logprobs_last_n=2))
    spans = [{"snapshot": "a", "start": 0, "end": 2}]
    done = answer(sample, [choice(0, echoed(2), prompt_snapshots=spans)])
    assert done.result.prompt_logprobs == pytest.approx((None, None, -0.2, -0.3))
    assert done.prompt_snapshots == (Span(snapshot="a", start=2, end=4),)


def test_top_k_rows_of_the_prompt() -> None:
    sample = check(body(topk_prompt_logprobs=2))
    result = answer(sample, [choice(0, echoed(4, k=2))]).result
    assert result.prompt_logprobs is None
    assert result.topk_prompt_logprobs == (None, *(((i, -float(i)),) * 2 for i in (1, 2, 3)))


@pytest.mark.parametrize(
    ("fields", "choices", "told"),
    [
        ({"num_samples": 2}, [choice(0, [entry(1, -1.0, -1.0)])], "1 sequences instead of 2"),
        ({}, [choice(0, [])], "without tokens"),
        ({}, [choice(0, [entry(1, -1.0, None)])], "feature sampling_logprobs"),
        ({"prompt_logprobs": True}, [choice(0, [entry(1, -1.0, -1.0)] * 5)], "another prompt"),
        ({}, [{"index": 0}], "cannot be read"),
    ],
)
def test_an_answer_that_is_none_fails_the_sample(
    fields: dict[str, Any], choices: list[dict[str, Any]], told: str
) -> None:
    with pytest.raises(WorkFailed, match=told) as failed:
        answer(check(body(**fields)), choices)
    assert failed.value.category == "server"
