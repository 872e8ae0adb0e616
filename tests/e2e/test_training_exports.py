"""A session with tools, rewarded and exported in every format: the numbers are those of its responses."""

from __future__ import annotations

import base64
import json
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Server, command
from test_exact_sessions import TOOLS

from midstream.client import ServerClient
from midstream.client.decode import sampling_masks_of
from midstream.client.errors import SignalRefused

EXTRA = {
    "return_token_ids": True,
    "logprobs": True,
    "include_routing_matrix": True,
    "return_sampling_mask": True,
    "perf_metrics_in_response": True,
}


def two_turns(client: openai.OpenAI, server: Server, session: str) -> list[dict[str, Any]]:
    """A call of a tool, then what the model says to its result."""
    messages: list[Any] = [{"role": "user", "content": "Look at it."}]
    headers = {"x-session-id": session, "x-midstream-records": "routes"}
    answers = []
    for number, choice in enumerate(("required", "auto")):
        completion = client.chat.completions.create(
            model=server.model,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,  # type: ignore[arg-type]
            seed=number,
            top_p=0.9,
            max_tokens=40,
            extra_headers=headers,
            extra_body=EXTRA,
        )
        answers.append(completion.model_dump())
        messages.append(completion.choices[0].message.model_dump(exclude_none=True))
        calls = completion.choices[0].message.tool_calls or []
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "a wall"} for call in calls]
    return answers


def export(server: Server, out: Path, *arguments: str) -> list[Any]:
    done = subprocess.run(
        command("export", server.url, "--out", str(out), *arguments), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_exports_of_a_session_have_the_numbers_of_its_responses(
    client: openai.OpenAI, server: Server, tmp_path: Path
) -> None:
    key = "a/b trace"
    first, second = two_turns(client, server, key)
    with closing(ServerClient(server.url)) as http:
        http.sessions.reward(key, 0.25, metadata={"judge": "unit"})
        http.sessions.reward(key, 0.5)
        http.sessions.reward(key, 2.0, turn=2)
    whole = second["prompt_token_ids"] + second["choices"][0]["token_ids"]
    begin = len(first["prompt_token_ids"])
    # token -> place in the session's one sequence, logprob, route, of both answers
    sampled: dict[int, tuple[int, float, list[int]]] = {}
    for answer in (first, second):
        at = len(answer["prompt_token_ids"])
        for entry in answer["choices"][0]["logprobs"]["content"]:
            sampled[at] = (entry["token_id"], entry["logprob"], [*base64.b64decode(entry["routing_matrix"])])
            at += 1
    mask = [int(at in sampled) for at in range(len(whole))]
    scores = [pytest.approx(sampled[at][1], abs=1e-4) if at in sampled else 0.0 for at in range(len(whole))]

    (line,) = export(server, tmp_path / "all.jsonl", "--session", key)
    assert (line["token_ids"], line["loss_mask"], line["logprobs"]) == (whole, mask, scores)
    assert line["prompt_length"] == begin
    assert [turn["finish_reason"] for turn in line["turns"]] == [
        answer["choices"][0]["finish_reason"] for answer in (first, second)
    ]
    assert line["snapshots"] == [("base" if at in sampled else None) for at in range(len(whole))]
    for at, (token, _, route) in sampled.items():
        assert whole[at] == token
        assert [number for layer in line["routed_experts"][at - 1] for number in layer] == route
    kept = [sampling_masks_of(answer["choices"][0]) for answer in (first, second)]
    rows = [one.row(number).tolist() for one in kept for number in range(len(one.offsets) - 1)]
    assert [ids for ids in line["sampling_masks"] if ids is not None] == rows
    assert [ids is not None for ids in line["sampling_masks"]] == [at in sampled for at in range(len(whole))]
    assert 1 in map(len, rows)
    assert max(map(len, rows)) > 1
    assert (line["reward"], [one["reward"] for one in line["rewards"]]) == (2.5, [0.5, 2.0])

    (data,) = export(server, tmp_path / "tinker", "--session", key, "--format", "tinker")
    inputs = data["loss_fn_inputs"]
    assert data["model_input"]["chunks"][0]["tokens"] == whole[:-1]
    assert (inputs["target_tokens"], inputs["logprobs"]) == (whole[1:], scores[1:])
    assert inputs["advantages"] == [2.5 * counts for counts in mask[1:]]

    (row,) = export(server, tmp_path / "verl", "--session", key, "--format", "verl")
    assert (row["prompt_ids"], row["response_ids"]) == (whole[:begin], whole[begin:])
    assert (row["response_mask"], row["response_logprobs"]) == (mask[begin:], scores[begin:])
    assert (row["reward_score"], row["num_turns"]) == (2.5, 4)

    records = export(server, tmp_path / "gym", "--session", key, "--format", "nemo-gym")
    (rollout,) = export(server, tmp_path / "vf", "--session", key, "--format", "verifiers")
    sampled_nodes = rollout["nodes"][1::2]
    for answer, record, node in zip((first, second), records, sampled_nodes, strict=True):
        choice = answer["choices"][0]
        told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert record["prompt_token_ids"] == answer["prompt_token_ids"]
        assert record["generation_token_ids"] == node["token_ids"] == choice["token_ids"]
        assert record["generation_log_probs"] == node["logprobs"] == pytest.approx(told, abs=1e-4)
        routes = b"".join(
            base64.b64decode(entry["routing_matrix"]) for entry in choice["logprobs"]["content"]
        )
        assert base64.b64decode(record["routed_experts"]["data"]) == routes
    assert [token for node in rollout["nodes"] for token in node["token_ids"]] == whole
    assert rollout["rewards"] == {"reward": {"score": 2.5}}


def test_all_sessions_are_exported_and_one_without_numbers_is_named(
    published: Server, tmp_path: Path
) -> None:
    """On a server without sessions of other tests."""
    server = published
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    for key in ("all 1", "all 2/trace"):
        two_turns(client, server, key)
    out = tmp_path / "all.jsonl"
    lines = export(server, out, "--all", "--unscored", "mask")
    assert {"all 1", "all 2/trace"} <= {line["session"] for line in lines}
    client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=3,
        extra_headers={"x-session-id": "no numbers"},
    )
    before = out.read_bytes()
    arguments = command("export", server.url, "--all", "--out", str(out))
    failed = subprocess.run(arguments, capture_output=True, text=True)
    assert failed.returncode == 2
    assert "session 'no numbers'" in failed.stderr
    assert "send x-midstream-records: logprobs" in failed.stderr
    assert out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["all.jsonl"]


def test_a_key_that_ends_like_a_path_is_read_and_rewarded(client: openai.OpenAI, server: Server) -> None:
    two_turns(client, server, "x/trace")
    assert httpx.get(f"{server.url}/v1/sessions/x%2Ftrace").json()["id"] == "x/trace"
    assert httpx.get(f"{server.url}/v1/sessions/x%2Ftrace/trace").json()["id"] == "x/trace"
    for path in ("/v1/sessions", "/sessions"):
        done = httpx.post(f"{server.url}{path}/x%2Ftrace/reward", json={"reward": 1, "name": path[1:3]})
        assert (done.status_code, done.json()["id"]) == (200, "x/trace")
    (one,) = httpx.get(f"{server.url}/v1/sessions/x%2Ftrace/trace").json()["traces"]
    assert [(reward["name"], reward["reward"]) for reward in one["rewards"]] == [("v1", 1.0), ("se", 1.0)]


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({}, "reward: this field is required", "reward"),
        ({"reward": "1"}, "reward: expected float, got str", "reward"),
        ({"reward": 1, "turn": 0}, "turn: expected int >= 1", "turn"),
        ({"reward": 1, "turns": 2}, "'turns'", "turns"),
        (
            {"reward": 1, "replica": "r"},
            "replica: says which replica's turn is meant; give turn, too",
            "replica",
        ),
        ({"reward": 1, "metadata": {"a": "x" * 5000}}, "metadata: must be at most 4096 bytes", "metadata"),
    ],
)
def test_a_reward_that_is_none_is_refused_by_name(
    server: Server, body: dict[str, Any], said: str, param: str | None
) -> None:
    answer = httpx.post(f"{server.url}/v1/sessions/s/reward", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]


def test_a_reward_for_what_is_not_there_says_so(client: openai.OpenAI, server: Server) -> None:
    with closing(ServerClient(server.url)) as http:
        with pytest.raises(SignalRefused, match=r"404 no replica holds a session 'nobody'"):
            http.sessions.reward("nobody", 1.0)
        two_turns(client, server, "somebody")
        with pytest.raises(SignalRefused, match=r"404 \S+ has no turn 3 of the session"):
            http.sessions.reward("somebody", 1.0, turn=3)
