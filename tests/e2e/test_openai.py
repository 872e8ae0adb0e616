"""The OpenAI SDK against a running server: shapes, extensions, affinity, errors."""

from __future__ import annotations

import base64
import math
import socket
import threading
import time
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from serving import Server

pytestmark = pytest.mark.fast

# Of a busy machine.
DEADLINE_S = 200.0
ATTEMPTS = 4
# Tokens.
LONG, CHOICES = 4000, 12
CHAT: list[Any] = [{"role": "user", "content": "Say something."}]


def test_a_border_of_top_p_within_rounding_is_marked_plain_streamed_and_for_stock_clients(
    client: openai.OpenAI, server: Server
) -> None:
    """A top_p that is what the heaviest token weighs: another rounding keeps one token more."""
    fields: dict[str, Any] = {"model": server.model, "prompt": list(b"A border"), "max_tokens": 1}
    probe = client.completions.create(**fields, extra_body={"logprobs": True, "top_logprobs": 2})
    weights = [math.exp(t["logprob"]) for t in _entries(probe)[0]["top_logprobs"]]
    for top_p, expected in ((weights[0], True), (weights[0] / 2, False)):
        body = {"logprobs": True, "seed": 1}
        plain = client.completions.create(**fields, top_p=top_p, extra_body=body)
        chunks = client.completions.create(**fields, top_p=top_p, stream=True, extra_body=body)
        streamed = [entry for chunk in chunks for entry in _entries(chunk)]
        assert ["top_p" in entry.get("near_tie", ()) for entry in streamed] == [expected]
        assert _entries(plain) == streamed


def _entries(answer: Any) -> list[dict[str, Any]]:
    found = [choice["logprobs"]["content"] for choice in answer.model_dump()["choices"] if choice["logprobs"]]
    return [entry for content in found for entry in content]


@pytest.mark.parametrize("prefix", ["/v1", "/inference/v1"])
def test_chat_and_completions_stream_and_plain_agree(server: Server, prefix: str) -> None:
    with openai.OpenAI(base_url=server.url + prefix, api_key="k", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == [server.model]
        plain = client.chat.completions.create(model=server.model, messages=CHAT, max_tokens=12, seed=5)
        chunks = list(
            client.chat.completions.create(
                model=server.model, messages=CHAT, max_tokens=12, seed=5, stream=True
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == plain.choices[0].message.content
        assert {c.model for c in chunks} == {plain.model} == {f"{server.model}@base"}
        assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason

        whole = client.completions.create(model=server.model, prompt="abc", max_tokens=9, seed=1)
        parts = list(
            client.completions.create(model=server.model, prompt="abc", max_tokens=9, seed=1, stream=True)
        )
        assert "".join(c.choices[0].text for c in parts if c.choices) == whole.choices[0].text
        assert {c.model for c in parts} == {whole.model} == {f"{server.model}@base"}


def test_logprobs_routes_token_ids_and_echo_are_aligned(client: openai.OpenAI, server: Server) -> None:
    prompt = list(b"The quick brown fox jumps over the lazy dog, again and again.")
    extra = {
        "include_routing_matrix": True,
        "return_token_ids": True,
        "echo": True,
        "logprobs": True,
        "seed": 3,
        "user": "aligned",
    }
    answers = [
        client.completions.create(model=server.model, prompt=prompt, max_tokens=8, extra_body=extra)
        for _ in range(2)
    ]
    choices = [answer.choices[0].model_dump() for answer in answers]
    content = choices[0]["logprobs"]["content"]
    assert [t["token_id"] for t in content] == prompt + choices[0]["token_ids"]
    assert choices[0]["prompt_token_ids"] == prompt
    assert content[0]["logprob"] == 0.0
    assert content[0].get("routing_matrix") is None
    for entry in content[1:]:
        route = np.frombuffer(base64.b64decode(entry["routing_matrix"]), dtype=np.uint8).reshape(4, 2)
        assert (route < 8).all()
        assert (route[:, 0] != route[:, 1]).all()
    assert all(t["sampling_logprob"] is not None for t in content[len(prompt) :])
    warm = answers[1].usage
    assert warm is not None
    assert warm.prompt_tokens_details is not None
    assert warm.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16
    # Warm equals cold, bit for bit.
    assert choices[1]["logprobs"] == choices[0]["logprobs"]


def test_turns_of_a_session_stay_on_one_replica_and_reuse_its_cache(
    client: openai.OpenAI, server: Server
) -> None:
    replicas: dict[str, set[str]] = {}
    cached = []
    for turn in range(3):
        for session in ("alpha", "beta", "gamma", "delta"):
            messages: list[Any] = [
                {"role": "user", "content": f"I am {session}, and this is what I have to say. " * 3},
                *[{"role": "user", "content": f"Turn {t}."} for t in range(turn)],
            ]
            raw = client.chat.completions.with_raw_response.create(
                model=server.model,
                messages=messages,
                max_tokens=4,
                extra_headers={"x-multi-turn-session-id": session, "x-session-affinity": f"other-{turn}"},
            )
            replicas.setdefault(session, set()).add(raw.headers["x-midstream-replica"])
            assert raw.headers["x-midstream-route-reason"] == ("new" if turn == 0 else "sticky")
            usage = raw.parse().usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached.append((turn, usage.prompt_tokens_details.cached_tokens or 0))
    assert all(len(names) == 1 for names in replicas.values())
    assert all(tokens >= 100 for turn, tokens in cached if turn > 0)


def test_an_sdk_whose_base_url_names_the_session_has_its_turns_on_one_replica(server: Server) -> None:
    said, homes = "", set()
    with openai.OpenAI(base_url=f"{server.url}/sessions/in%20path/v1", api_key="k", max_retries=0) as own:
        assert [model.id for model in own.models.list()] == [server.model]
        assert own.models.retrieve(server.model).id == server.model
        for turn in range(3):
            raw = own.completions.with_raw_response.create(
                model=server.model, prompt="It begins, and it goes on. " * 4 + said, max_tokens=8, user="u"
            )
            homes.add(raw.headers["x-midstream-replica"])
            assert raw.headers["x-midstream-route-reason"] == ("new" if turn == 0 else "sticky")
            answer = raw.parse()
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            if turn:
                assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= 64
            said += answer.choices[0].text
        stream = own.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": said}], max_tokens=4, stream=True
        )
        assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] in ("length", "stop")
        with pytest.raises(openai.BadRequestError) as refused:
            own.completions.create(model=server.model, prompt="a", extra_headers={"X-Session-ID": "other"})
        assert refused.value.param == "x-session-id"
    assert len(homes) == 1
    shown = httpx.get(f"{server.url}/v1/sessions/in%20path", timeout=60).json()
    assert (shown["id"], shown["turns"]) == ("in path", 4)


def test_an_unknown_field_is_refused_by_name_in_the_words_clients_match(server: Server) -> None:
    body = {"model": server.model, "prompt": "a", "max_tokens": 1, "no_such_field": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_request_error"
    assert error["message"] == "Extra inputs are not permitted, field: 'no_such_field'"


@pytest.mark.parametrize(
    ("changes", "status", "names"),
    [
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"temperature": 9}, 400, "temperature"),
        ({"model": "another"}, 404, "another"),
        ({"prompt": [1, 999]}, 400, "prompt"),
        ({"prompt": "x" * 5000, "max_tokens": 5}, 400, "4096"),
        ({"include_routing_matrix": True}, 400, "logprobs"),
    ],
)
def test_bad_input_is_refused_with_the_field_and_the_expectation(
    server: Server, changes: dict[str, Any], status: int, names: str
) -> None:
    body = {"model": server.model, "prompt": "a", "max_tokens": 1, **changes}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == status
    assert names in answer.json()["error"]["message"]


def gauge(server: Server, name: str) -> float:
    """A metric summed over replicas."""
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{")]
    assert values, f"no metric {name}"
    return sum(values)


def left_early(server: Server, body: dict[str, Any]) -> float:
    """How many tokens are made for a client that leaves once a replica is seen to work for it; nothing holds blocks then."""
    used, made = "midstream_replica_kv_blocks_used", "midstream_replica_generated_tokens_total"
    deadline = time.monotonic() + DEADLINE_S
    request = httpx.Request("POST", f"{server.url}/v1/completions", json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    before = gauge(server, made)
    with socket.create_connection((request.url.host, request.url.port or 80)) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + request.read())
        while gauge(server, used) == 0 and gauge(server, made) < before + CHOICES * LONG:
            assert time.monotonic() < deadline, "no replica works on it"
    while gauge(server, used) > 0:
        assert time.monotonic() < deadline, "its blocks are not freed"
    return gauge(server, made) - before


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_and_frees_its_blocks(server: Server, stream: bool) -> None:
    body = {"model": server.model, "prompt": "gone", "max_tokens": LONG, "stream": stream, "ignore_eos": True}
    # One choice may be through before a replica has reported that it began.
    body |= {"n": CHOICES, "temperature": 1}
    for _ in range(ATTEMPTS):
        if (generated := left_early(server, body)) < CHOICES * LONG:
            break
    assert generated < CHOICES * LONG, "nobody wanted the rest"
    log = server.log.read_text()
    assert "Traceback" not in log


def test_many_streams_at_once_all_end_whole(server: Server) -> None:
    results: list[tuple[str, int]] = []

    def one(i: int) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as own:
            chunks = list(
                own.completions.create(
                    model=server.model,
                    prompt=f"stream {i}",
                    max_tokens=40,
                    stream=True,
                    extra_body={"ignore_eos": True, "logprobs": True},
                    extra_headers={"x-session-affinity": f"many-{i}"},
                )
            )
        tokens = sum(
            len(c.choices[0].logprobs.content) for c in chunks if c.choices and c.choices[0].logprobs
        )  # type: ignore[attr-defined, arg-type]
        results.append((chunks[-1].choices[0].finish_reason, tokens))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(48)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [("length", 40)] * 48
