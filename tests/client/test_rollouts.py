"""Rollouts as a trainer gets them: order, records, what is asked of the server, and how old they are."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import math
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from midstream.client import PublishError, Rollout, RolloutClient, fresh, importance_ratios, staleness
from midstream.client import rollouts as module
from midstream.client.errors import SignalRefused


def choice(index: int, ids: list[int], **changed: Any) -> dict[str, Any]:
    records = [{"logprob": -0.5 * i, "sampling_logprob": -0.25 * i} for i in ids]
    return {
        "index": index,
        "text": "".join(map(chr, ids)),
        "token_ids": ids,
        "prompt_token_ids": [1, 2],
        "finish_reason": "length",
        "logprobs": {"content": records},
        "snapshots": [
            {"snapshot": "a", "start": 0, "end": 1},
            {"snapshot": "b", "start": 1, "end": len(ids)},
        ],
        **changed,
    }


def client(answer: Callable[[httpx.Request], httpx.Response], **given: Any) -> RolloutClient:
    made = RolloutClient("http://server/", **given)
    http = httpx.Client(transport=httpx.MockTransport(answer), headers=made._caller._http.headers)
    made._caller = module.RetryingCaller(http, sleep=lambda _: None)
    return made


def test_rollouts_come_in_the_order_of_their_prompts_whatever_is_done_first() -> None:
    last_is_done = threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        [number] = json.loads(request.content)["prompt"]
        if number == 0:
            assert last_is_done.wait(30)
        if number == 7:
            last_is_done.set()
        return httpx.Response(200, json={"choices": [choice(0, [number, number]), choice(1, [number, 9])]})

    with client(answer) as rollouts:
        found = rollouts.sample(
            [[n] for n in range(8)], max_tokens=2, n=2, sessions=[f"s{n}" for n in range(8)]
        )
    assert [[one.token_ids for one in group] for group in found] == [[[n, n], [n, 9]] for n in range(8)]
    assert [group[0].session for group in found] == [f"s{n}" for n in range(8)]


def test_a_rollout_has_both_log_probabilities_and_the_snapshot_of_each_token() -> None:
    with client(lambda _: httpx.Response(200, json={"choices": [choice(0, [4, 8, 6])]})) as rollouts:
        [[one]] = rollouts.sample(["text"], max_tokens=3)
    assert one == Rollout(
        prompt_ids=[1, 2],
        token_ids=[4, 8, 6],
        logprobs=[-2.0, -4.0, -3.0],
        sampling_logprobs=[-1.0, -2.0, -1.5],
        snapshots=["a", "b", "b"],
        finish_reason="length",
        text="\x04\x08\x06",
    )


def test_what_is_asked_of_the_server() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"choices": [choice(0, [4])]})

    with client(answer, model="m", api_key="k") as rollouts:
        rollouts.sample([[5]], max_tokens=1, at_least="step-3", wait_s=7, sessions=["s"], temperature=0.5)
    [request] = asked
    assert str(request.url) == "http://server/v1/completions"
    assert json.loads(request.content) == {
        "model": "m", "prompt": [5], "max_tokens": 1, "n": 1, "logprobs": True, "return_token_ids": True, "temperature": 0.5,
    }  # fmt: skip
    told = {name: request.headers[name] for name in request.headers if name.startswith("x-")}
    assert told == {
        "x-api-key": "k",
        "x-midstream-min-snapshot": "step-3",
        "x-midstream-snapshot-wait": "7",
        "x-multi-turn-session-id": "s",
    }


def test_what_a_retry_cures_is_asked_again_and_a_refusal_is_told() -> None:
    statuses = [503, 425, 200]

    def busy(_: httpx.Request) -> httpx.Response:
        return httpx.Response(statuses.pop(0), json={"choices": [choice(0, [4])]})

    with client(busy, parallel=1) as rollouts:
        [[one]] = rollouts.sample([[5]], max_tokens=1)
    assert (one.token_ids, statuses) == ([4], [])
    refusal = {"error": {"message": "max_tokens: must be above 0"}}
    with (
        client(lambda _: httpx.Response(400, json=refusal)) as rollouts,
        pytest.raises(SignalRefused, match="max_tokens: must be above 0"),
    ):
        rollouts.sample([[5]], max_tokens=0)


@pytest.mark.parametrize("proxied", [False, True])
def test_a_connection_that_waits_for_a_rollout_is_probed(
    monkeypatch: pytest.MonkeyPatch, proxied: bool
) -> None:
    """A server's machine that is lost says nothing. Without probes a client would wait an hour for its answer."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        if proxied:
            monkeypatch.setenv("http_proxy", url)
            url = "http://server"
        heads: list[bytes] = []

        def serve() -> None:
            accepted, _ = server.accept()
            with accepted:
                heads.append(accepted.recv(1 << 16))
                accepted.sendall(answer)

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            served = thread.submit(serve)
            caller = module.RetryingCaller.of_rollouts(None, 1)
            with caller._http.stream("GET", url) as response:
                own = response.extensions["network_stream"].get_extra_info("socket")
                probed = own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            caller.close()
            served.result(30)
    # A proxy of the environment is used as before.
    assert heads[0].startswith(b"GET http://server/ " if proxied else b"GET / ")
    assert proxied or probed == 1


def test_once_a_prompt_is_refused_those_that_have_not_begun_are_not_sampled() -> None:
    """Nobody would get them, and they would take the places of the next call."""
    asked: list[int] = []
    raised = threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        [number] = json.loads(request.content)["prompt"]
        asked.append(number)
        if number == 0:
            return httpx.Response(400, json={"error": {"message": "prompt: too long"}})
        assert raised.wait(30)
        return httpx.Response(200, json={"choices": [choice(0, [4])]})

    with client(answer, parallel=1) as rollouts:
        with pytest.raises(SignalRefused, match="too long"):
            rollouts.sample([[n] for n in range(8)], max_tokens=1)
        raised.set()
        # It has one thread, which takes tasks in their order.
        rollouts._pool.submit(lambda: None).result(30)
    assert asked in ([0], [0, 1])


@pytest.mark.parametrize(
    "changed", [{"logprobs": None}, {"token_ids": [4, 5, 6]}, {"snapshots": []}, {"token_ids": None}], ids=str
)
def test_an_answer_without_its_records_is_no_rollout(changed: dict[str, Any]) -> None:
    answer = {"choices": [choice(0, [4, 8], **changed)]}
    with (
        client(lambda _: httpx.Response(200, json=answer)) as rollouts,
        pytest.raises(PublishError, match="records of tokens"),
    ):
        rollouts.sample([[5]], max_tokens=2)


def routed(*routes: list[list[int]], **changed: Any) -> dict[str, Any]:
    told = [
        {"routing_matrix": base64.b64encode(bytes(expert for layer in route for expert in layer)).decode()}
        for route in routes
    ]
    records = [{"logprob": -1.0, "sampling_logprob": -1.0} | one for one in told]
    return choice(0, [4, 8], logprobs={"content": records}, **changed)


def test_a_rollout_has_the_routes_of_its_tokens_where_they_are_asked_for() -> None:
    asked: list[Any] = []
    routes = [[[0, 1], [2, 3], [1, 0]], [[3, 2], [1, 0], [2, 1]]]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content).get("include_routing_matrix"))
        return httpx.Response(200, json={"choices": [routed(*routes)]})

    with client(answer, num_experts_per_tok=2) as rollouts:
        [[one]] = rollouts.sample([[5]], max_tokens=2)
    assert one.routes is not None
    # Tokens, layers and experts.
    assert (one.routes.shape, one.routes.dtype, one.routes.tolist()) == ((2, 3, 2), "uint8", routes)
    with client(answer) as rollouts:
        assert rollouts.sample([[5]], max_tokens=2)[0][0].routes is None
    assert asked == [True, None]


def test_a_rollout_has_the_masks_of_its_tokens_where_they_are_asked_for() -> None:
    asked: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content).get("return_sampling_mask"))
        numbers = {"logprob": -1.0, "sampling_logprob": -1.0}
        records = [
            numbers | {"token_id": 4, "sampling_mask": "AA=="},
            numbers | {"token_id": 8, "sampling_mask": "AQ=="},
        ]
        return httpx.Response(200, json={"choices": [choice(0, [4, 8], logprobs={"content": records})]})

    with client(answer, sampling_masks=True) as rollouts:
        [[one]] = rollouts.sample([[5]], max_tokens=2)
    assert one.masks is not None
    assert (one.masks.ids.tolist(), one.masks.offsets.tolist()) == ([4], [0, 1, 1])
    with client(answer) as rollouts:
        assert rollouts.sample([[5]], max_tokens=2)[0][0].masks is None
    assert asked == [True, None]
    bare = choice(0, [4, 8])
    with (
        client(lambda _: httpx.Response(200, json={"choices": [bare]}), sampling_masks=True) as rollouts,
        pytest.raises(PublishError, match="has no sampling mask"),
    ):
        rollouts.sample([[5]], max_tokens=2)


def test_routes_that_do_not_fit_are_no_rollout() -> None:
    bare = choice(0, [4, 8])
    wrong = routed([[0, 1], [0, 2]], [[0, 1], [0, 2]])
    for told, top_k, says in (
        (bare, 2, "has no routing matrix"),
        (wrong, 4, "expert twice"),
        (wrong, 3, "is no .*, 3. array"),
    ):
        with (
            client(
                lambda _, told=told: httpx.Response(200, json={"choices": [told]}), num_experts_per_tok=top_k
            ) as rollouts,
            pytest.raises(PublishError, match=says),
        ):
            rollouts.sample([[5]], max_tokens=2)
    with pytest.raises(ValueError, match="num_experts_per_tok must be at least 1, got 0"):
        RolloutClient("http://server", num_experts_per_tok=0)


def test_an_answer_without_tokens_has_no_routes() -> None:
    empty = choice(0, [], snapshots=[])
    with client(lambda _: httpx.Response(200, json={"choices": [empty]}), num_experts_per_tok=2) as rollouts:
        assert rollouts.sample([[5]], max_tokens=1)[0][0].routes is None


def of(*snapshots: str) -> Rollout:
    count = len(snapshots)
    return Rollout([1], [0] * count, [0.0] * count, [0.0] * count, list(snapshots), "stop", "")


def test_a_rollout_is_as_old_as_its_oldest_token() -> None:
    signalled = ["s0", "s1", "s2"]
    asked = (("s2",), ("s1", "s2"), ("s0", "s2"), ())
    assert [staleness(of(*snapshots), signalled) for snapshots in asked] == [0, 1, 2, 0]
    old, new = of("s0", "s2"), of("s1")
    assert fresh([old, new, old], signalled, 1) == [new]
    # It went back to s0.
    assert staleness(of("s0"), ["s0", "s1", "s0"]) == 0


def test_a_rollout_of_an_unknown_snapshot_is_never_fresh() -> None:
    # Of another publisher, or of a run before. It was fresh by any bound of one more than there were signals.
    assert staleness(of("step-1r"), ["other"]) == staleness(of("other", "step-1r"), ["other"]) == math.inf
    assert fresh([of("step-1r"), of("other")], ["other"], 1) == [of("other")]
    assert fresh([of("step-1r")], [], 10**9) == []
    # A loop that samples what the server had before its first signal names it.
    assert fresh([of("base")], ["base"], 0) == [of("base")]
    assert staleness(of("base"), ["base", "s0"]) == 1


def test_importance_ratios_are_of_the_sampled_distribution_and_have_a_bound() -> None:
    assert importance_ratios([-1.0, -2.0], [-1.0, -1.0]) == pytest.approx([1.0, 0.36787944])
    assert importance_ratios([0.0, -1.0], [-2.0, -1.0], most=2.0) == [2.0, 1.0]
    with pytest.raises(ValueError, match="zip"):
        importance_ratios([0.0], [0.0, 1.0])


@pytest.mark.parametrize("url", ["http://user:secret@server", "http://server?key=secret"])
def test_a_url_that_would_tell_a_secret_in_messages_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="server must not hold a user, password or query") as caught:
        RolloutClient(url)
    assert "secret" not in str(caught.value)


def test_a_session_is_named_for_each_prompt_or_for_none() -> None:
    with (
        client(lambda _: httpx.Response(500)) as rollouts,
        pytest.raises(ValueError, match="sessions: 1 keys for 2"),
    ):
        rollouts.sample([[1], [2]], max_tokens=1, sessions=["s"])
