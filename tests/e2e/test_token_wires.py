"""Token ids in, token ids out, of a running server: vLLM's and SGLang's paths give the tokens and numbers of a completion."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import httpx
import numpy as np
import pytest
from serving import Server

PROMPT = [72, 101, 108, 108, 111]
NEW = 12


def post(server: Server, path: str, body: Any, **headers: str) -> Any:
    answer = httpx.post(server.url + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Server, path: str, body: Any) -> list[Any]:
    text = httpx.post(server.url + path, json=body | {"stream": True}, timeout=60).text
    found = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    assert found.pop() == "[DONE]"
    return [json.loads(event) for event in found]


def reference(server: Server) -> tuple[list[int], list[float], list[float], np.ndarray]:
    """Tokens, raw and sampling log-probabilities, and routes by position, as the completions path tells them."""
    asked = {"model": server.model, "prompt": PROMPT, "max_tokens": NEW, "seed": 7, "temperature": 0.8}
    more = {"logprobs": True, "echo": True, "include_routing_matrix": True, "return_token_ids": True}
    (choice,) = post(server, "/v1/completions", asked | more)["choices"]
    entries = choice["logprobs"]["content"]
    routes = [base64.b64decode(entry["routing_matrix"]) for entry in entries[1:]]
    made = entries[len(PROMPT) :]
    sampling = [entry["sampling_logprob"] for entry in made]
    return (
        choice["token_ids"],
        [entry["logprob"] for entry in made],
        sampling,
        np.frombuffer(b"".join(routes), "u1"),
    )


def test_vllms_path_tells_what_a_completion_tells(server: Server) -> None:
    tokens, raw, sampling, routes = reference(server)
    path = "/inference/v1/generate"
    body: dict[str, Any] = {
        "model": server.model,
        "token_ids": PROMPT,
        "sampling_params": {
            "max_tokens": NEW, "seed": 7, "temperature": 0.8, "logprobs": 1, "return_routed_experts": True,
        },
    }  # fmt: skip
    (choice,) = post(server, path, body)["choices"]
    entries = choice["logprobs"]["content"]
    assert choice["token_ids"] == tokens
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in tokens]
    assert np.allclose([entry["logprob"] for entry in entries], raw, atol=1e-5)
    assert np.allclose([entry["sampling_logprob"] for entry in entries], sampling, atol=1e-5)
    assert choice["weight_versions"] == [{"version": "base", "start": 0, "end": len(tokens)}]
    rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    assert len(rows) == len(PROMPT) + len(tokens) - 1
    assert rows.tobytes() == routes.tobytes()
    streamed = events(server, path, body)
    assert [token for event in streamed for token in event["choices"][0]["token_ids"]] == tokens
    assert streamed[-1]["choices"][0]["routed_experts"] == choice["routed_experts"]


def test_sglangs_path_tells_what_a_completion_tells(server: Server) -> None:
    tokens, raw, sampling, routes = reference(server)
    body: dict[str, Any] = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": NEW, "sampling_seed": 7, "temperature": 0.8},
        "return_logprob": True,
        "return_routed_experts": True,
    }
    plain = post(server, "/generate", body, **{"X-SMG-Routing-Key": "slime"})
    meta = plain["meta_info"]
    assert plain["output_ids"] == [row[1] for row in meta["output_token_logprobs"]] == tokens
    assert np.allclose([row[0] for row in meta["output_token_logprobs"]], raw, atol=1e-5)
    assert np.allclose(plain["midstream"]["sampling_logprobs"], sampling, atol=1e-5)
    found = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
    assert found.tolist() == routes.tolist()
    assert meta["weight_version"] == "base"
    held = httpx.get(f"{server.url}/v1/sessions/slime", timeout=60)
    assert held.status_code == 200
    last = events(server, "/generate", body)[-1]
    assert (last["text"], last["output_ids"]) == (plain["text"], tokens)


def turn_of(server: Server, wire: str, prompt: list[int], start: int) -> tuple[list[int], np.ndarray]:
    """The new tokens of a turn of one session, and the rows of routes from position `start` on."""
    session = {"x-session-id": f"turns on {wire}"}
    if wire == "vllm":
        sampling = {"max_tokens": NEW, "seed": 3, "return_routed_experts": True}
        sampling["routed_experts_prompt_start"] = start
        body: dict[str, Any] = {"model": server.model, "token_ids": prompt, "sampling_params": sampling}
        (choice,) = post(server, "/inference/v1/generate", body, **session)["choices"]
        rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
        return choice["token_ids"], rows.reshape(len(rows), -1)
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": NEW, "sampling_seed": 3}}
    body |= {"return_routed_experts": True, "routed_experts_start_len": start}
    said = post(server, "/generate", body, **session)
    assert said["meta_info"]["routed_experts_start_len"] == start
    rows = np.frombuffer(base64.b64decode(said["meta_info"]["routed_experts"]), "<i4")
    count = len(prompt) + len(said["output_ids"]) - 1 - start
    return said["output_ids"], rows.reshape(count, -1)


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
def test_rows_of_new_positions_alone_make_up_the_routes_of_a_trajectory(server: Server, wire: str) -> None:
    """Clients begin at the last sampled token of the turn before: its own pass comes with the next turn alone."""
    tokens, held = list(PROMPT), list[np.ndarray]()
    for turn in range(3):
        start = sum(map(len, held))
        new, rows = turn_of(server, wire, tokens, start)
        assert len(rows) == len(tokens) + len(new) - 1 - start
        held.append(rows)
        tokens += [*new, 10 + turn]
    # The whole again, from caches of the same session.
    again, rows = turn_of(server, wire, tokens[: -len(new) - 1], 0)
    assert again == new
    assert np.concatenate(held).tolist() == rows.tolist()
