"""The real client's DeploymentSampler: token ids in; ids, log-probabilities, routes and metrics out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fireworks_helpers import Endpoint, assert_served, score

PROMPT = list(b"Count: one, two, ")
P, C = len(PROMPT), 6


@pytest.fixture(scope="module")
def got(endpoint: Endpoint) -> dict[str, Any]:
    session = {"FIREWORKS_SESSION_ID": "0b0e7f0e-32c5-4f0e-9d6c-0a4d2f8f8a11"}
    result: dict[str, Any] = endpoint.run("sampling", env=session)
    return result


def test_ids_and_both_logprobs_of_a_completion(got: dict[str, Any], tiny_model: Callable[..., Path]) -> None:
    first, second = got["plain"]
    assert first == second, "equal seeds gave different tokens"
    assert (first["prompt_len"], first["completion_len"], first["finish_reason"]) == (P, C, "length")
    assert first["full_tokens"][:P] == PROMPT
    expected, _ = score(tiny_model(), first["full_tokens"])
    assert first["inference_logprobs"] == pytest.approx(expected[P - 1 :], abs=1e-4)
    assert first["sampling_logprobs"] == first["inference_logprobs"]
    assert first["logprobs_echoed"] is False
    cold = got["cold"][0]
    assert all(s > raw for s, raw in zip(cold["sampling_logprobs"], cold["inference_logprobs"], strict=True))


def test_echo_gives_a_trainer_every_position_with_its_route(
    got: dict[str, Any], tiny_model: Callable[..., Path]
) -> None:
    (echoed,) = got["echo"]
    assert echoed["full_tokens"] == got["plain"][0]["full_tokens"]
    assert len(echoed["inference_logprobs"]) == len(echoed["routing_matrices"]) == P + C - 1
    assert echoed["echoed_prompt_logprob_count"] == P - 1
    assert echoed["sampling_logprobs"][: P - 1] == [None] * (P - 1)
    assert_served(echoed, tiny_model())
    assert [len(ids) for ids in echoed["inference_topk_token_ids"]] == [3] * (P + C - 1)
    best = [max(row) for row in echoed["inference_topk_logprobs"]]
    assert all(top >= own for top, own in zip(best, echoed["inference_logprobs"], strict=True))
    (partly,) = got["echo_last"]
    assert partly["inference_logprobs"] == echoed["inference_logprobs"][P - 5 :]
    assert partly["routing_matrices"] == echoed["routing_matrices"][P - 5 :]
    (routes,) = got["routes"]
    assert routes["routing_matrices"] == echoed["routing_matrices"][P - 1 :]


def test_routes_as_files_are_refused_so_that_the_client_takes_them_inline(got: dict[str, Any]) -> None:
    assert got["agreed"] == "base64_inline"
    assert [one["routing_matrices"] for one in got["offered_files"]] == [
        one["routing_matrices"] for one in got["routes"]
    ]
    assert (got["mask_files"]["status"], got["mask_files"]["param"]) == (400, "sampling_mask")


def test_stop_strings_and_chat_messages(got: dict[str, Any]) -> None:
    (stopped,), text = got["stopped"], got["plain"][0]["text"]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.index(got["stop"], 1)]
    (chat,) = got["chat"]
    assert chat["full_tokens"][: chat["prompt_len"]] == [
        *[257, *b"user\nhi", 258, 10],
        *[257, *b"assistant\n"],
    ]
    assert len(chat["inference_logprobs"]) == chat["completion_len"]


def test_server_metrics_reach_the_client(got: dict[str, Any]) -> None:
    metrics = got["metrics"]
    assert (got["attempts"], metrics["http_status_code"], metrics["error"]) == (1, 200, None)
    assert (metrics["prompt_tokens"], metrics["completion_tokens"], metrics["cached_prompt_tokens"]) == (
        P,
        C,
        0,
    )
    assert 0 < metrics["server_ttft"] <= metrics["server_processing_time"] <= metrics["client_latency"]
    assert 0 <= metrics["prefill_queue_duration"] <= metrics["server_ttft"]
    assert metrics["num_concurrent_requests"] == 1
    assert metrics["response_request_id"] == "rollout-17"
    assert metrics["backend_host"] in ("replica-0", "replica-1")
    assert metrics["deployment"] == "accounts/acme/deployments/policy"
    assert got["response_id"].startswith("cmpl-")


def test_a_session_is_what_the_rollout_says_not_what_the_process_says(got: dict[str, Any]) -> None:
    assert set(got["spread"]) == {"replica-0", "replica-1"}, "X-Fireworks-Session-Id was taken for a session"
    assert len(got["spread"]) == 16
    assert len(set(got["sticky"])) == 1
    assert len(got["sticky"]) == 8


def test_mistakes_are_refused_at_once_and_named(got: dict[str, Any]) -> None:
    assert got["unknown_field"]["status"] == 400
    assert got["unknown_field"]["message"] == "Extra inputs are not permitted, field: 'no_such_field'"
    assert (got["bad_value"]["status"], got["bad_value"]["param"]) == (400, "temperature")
