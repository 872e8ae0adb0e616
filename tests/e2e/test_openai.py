"""The OpenAI SDK against a running server: near ties, a session in the path, clients that leave, many streams. The rest of what
it is promised, tests/conformance asks of the same server."""

from __future__ import annotations

import math
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from serving import Server

pytestmark = pytest.mark.fast

# Of a busy machine.
DEADLINE_S = 200.0
ATTEMPTS = 4
# Tokens.
LONG, CHOICES = 4000, 12


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
