"""`fireworks.Fireworks`: completions and chat through the typed client, and the resources around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fireworks_helpers import Endpoint, score

# Can be deployed, though another model is served.
BUILT_IN = "accounts/acme/models/tiny-moe"


@pytest.fixture(scope="module")
def got(endpoint: Endpoint) -> dict[str, Any]:
    result: dict[str, Any] = endpoint.run("inference")
    return result


@pytest.fixture(scope="module")
def labelled(endpoint: Endpoint) -> str:
    return f"{endpoint.server.model}@base"


def test_a_completion_with_ids_logprobs_and_routes(
    got: dict[str, Any], labelled: str, tiny_model: Callable[..., Path]
) -> None:
    completion = got["completion"]
    (choice,) = completion["choices"]
    content = choice["logprobs"]["content"]
    assert completion["model"] == labelled
    assert choice["prompt_token_ids"] == list(b"Once")
    assert choice["token_ids"] == choice["raw_output"]["completion_token_ids"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    expected, _ = score(tiny_model(), [*b"Once", *choice["token_ids"]])
    assert [entry["logprob"] for entry in content] == pytest.approx(expected[3:], abs=1e-4)
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 5
    assert all(entry["routing_matrix"] for entry in content)
    assert completion["usage"]["completion_tokens"] == 5
    assert completion["perf_metrics"]["prompt-tokens"] == 4
    legacy = got["legacy"]["choices"][0]["logprobs"]
    assert legacy["token_ids"] == choice["token_ids"]
    assert legacy["token_logprobs"] == [entry["logprob"] for entry in content]
    several = got["several"]["choices"]
    assert [choice["index"] for choice in several] == [0, 1, 2, 3]


def test_a_chat_answer_by_the_name_of_the_deployment(got: dict[str, Any], labelled: str) -> None:
    chat = got["chat"]
    (choice,) = chat["choices"]
    assert chat["model"] == labelled
    assert choice["message"]["role"] == "assistant"
    assert chat["prompt_token_ids"] == choice["raw_output"]["prompt_token_ids"]
    assert [e["token_id"] for e in choice["logprobs"]["content"]] == choice["token_ids"]
    assert len(choice["token_ids"]) == 5


@pytest.mark.parametrize(("stream", "plain"), [("completion_chunks", "completion"), ("chat_chunks", "chat")])
def test_a_stream_holds_what_the_plain_answer_holds(
    got: dict[str, Any], labelled: str, stream: str, plain: str
) -> None:
    chunks, (choice,) = got[stream], got[plain]["choices"]
    assert {chunk["model"] for chunk in chunks} == {labelled}
    deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    content = [e for d in deltas if d.get("logprobs") for e in d["logprobs"]["content"]]
    if stream == "completion_chunks":
        text, whole = "".join(d["text"] for d in deltas), choice["text"]
        assert [e["routing_matrix"] for e in content] == [
            e["routing_matrix"] for e in choice["logprobs"]["content"]
        ]
    else:
        text, whole = "".join(d["delta"].get("content") or "" for d in deltas), choice["message"]["content"]
    if stream == "completion_chunks":
        assert [i for d in deltas for i in d.get("token_ids") or []] == choice["token_ids"]
        assert deltas[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [e["logprob"] for e in content] == [e["logprob"] for e in choice["logprobs"]["content"]]
        assert text == whole
    assert len(content) == 5
    assert [d["finish_reason"] for d in deltas if d.get("finish_reason")] == [choice["finish_reason"]]
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_concurrent_answers_of_one_seed_are_equal(got: dict[str, Any]) -> None:
    assert len(set(got["concurrent"])) == 1
    assert len(got["concurrent"]) == 8
    assert got["concurrent"][0] == got["chat"]["choices"][0]["message"]["content"]


def test_response_headers(got: dict[str, Any]) -> None:
    headers = got["headers"]
    assert headers["x-request-id"] == "mine"
    assert headers["fireworks-prompt-tokens"] == "4"
    assert headers["fireworks-deployment"] == "accounts/acme/deployments/policy"
    assert headers["fireworks-backend-host"] == headers["x-midstream-replica"]
    assert float(headers["fireworks-server-processing-time"]) > 0


def test_the_account_and_its_models(got: dict[str, Any], endpoint: Endpoint) -> None:
    assert [account["name"] for account in got["accounts"]] == ["accounts/acme"]
    assert got["account"]["name"] == "accounts/acme"
    assert [model["name"] for model in got["models"]] == [endpoint.server.model, BUILT_IN]
    assert got["model"]["name"] == endpoint.server.model
    assert got["model"]["state"] == "READY"


def test_errors_are_of_the_kind_the_client_expects(got: dict[str, Any]) -> None:
    assert (got["wrong_key"]["kind"], got["wrong_key"]["status"]) == ("AuthenticationError", 401)
    assert (got["wrong_model"]["kind"], got["wrong_model"]["param"]) == ("NotFoundError", "model")
    assert (got["wrong_snapshot"]["kind"], got["wrong_snapshot"]["code"]) == (
        "ConflictError",
        "snapshot_not_served",
    )
    assert got["unknown_field"]["kind"] == "BadRequestError"
    assert got["unknown_field"]["message"] == "Extra inputs are not permitted, field: 'zap'"
