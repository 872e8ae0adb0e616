"""verl trains on rollouts from a server; and, without verl, what its adapter asks of a server and reads in the answers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from recipes import needs, run_recipe
from serving import Server, serve

from midstream.client import PublishError, SnapshotPublisher
from midstream.client.calls import RetryingCaller
from midstream.client.errors import SignalRefused
from midstream.client.server import ServerClient
from midstream.integrations import verl_wire
from midstream.integrations.verl_wire import (
    Generator,
    VerlSettings,
    extra_fields,
    generated,
    request_of,
    serving,
)

SETTINGS = VerlSettings(url="http://server/", bucket="/bucket", served="/model", run="a/run")
STEPS, ROLLOUTS = 12, 64


def sessions_of(server: Server) -> list[str]:
    asked = ServerClient(server.url)
    with contextlib.closing(asked):
        return list(asked.sessions.keys())


@needs("verl")
def test_verl_learns_from_rollouts_that_go_on_while_it_publishes(tmp_path: Path) -> None:
    with serve(tmp_path / "state") as server:
        taken = run_recipe("verl", server, STEPS, timeout_s=900)
        trajectories = sessions_of(server)
    assert taken[0].behind == 0.0
    # One batch is sampled while the step before it trains.
    assert all(0 < step.behind <= 2 for step in taken[1:])
    assert taken[-1].reward > taken[0].reward + 0.4
    # verl's request ids are session keys.
    assert len(trajectories) >= STEPS * ROLLOUTS


def a_choice(**changed: Any) -> dict[str, Any]:
    return {
        "token_ids": [4, 8, 6],
        "logprobs": {"content": [{"logprob": -9.0, "sampling_logprob": -0.5 * i} for i in range(3)]},
        "weight_versions": [
            {"version": "a/run/2", "start": 0, "end": 1},
            {"version": "a/run/3", "start": 1, "end": 3},
        ],
        "finish_reason": "length",
        **changed,
    }


def encoded(array: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_each_id_has_what_it_was_sampled_with() -> None:
    one = generated({"choices": [a_choice()]}, SETTINGS, routes=False)
    assert (one.token_ids, one.logprobs, one.versions) == ([4, 8, 6], [0.0, -0.5, -1.0], [2, 3, 3])
    assert one.snapshots == ["a/run/2", "a/run/3", "a/run/3"]
    assert (one.experts, one.stop_reason) == (None, "length")
    told = extra_fields(one)
    assert (told["min_global_steps"], told["max_global_steps"], told["global_steps"]) == (2, 3, 3)


def test_an_answer_that_ended_by_itself_is_completed() -> None:
    answer = {"choices": [a_choice(finish_reason="stop")]}
    assert generated(answer, SETTINGS, routes=False).stop_reason == "completed"


def test_routes_are_those_of_all_positions_that_were_read() -> None:
    routes = np.arange(2 * 4 * 2, dtype=np.uint8).reshape(2, 4, 2)
    one = generated({"choices": [a_choice(routed_experts=encoded(routes))]}, SETTINGS, routes=True)
    assert one.experts is not None
    assert one.experts.tolist() == routes.tolist()


@pytest.mark.parametrize(
    "changed",
    [
        {"token_ids": [4, 8]},
        {"logprobs": {"content": []}},
        {"weight_versions": [{"version": "a/run/2", "start": 1, "end": 3}]},
        {"weight_versions": [{"version": "a/run/2", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "base", "start": 0, "end": 3}]},
        {"weight_versions": [{"version": "other/2", "start": 0, "end": 3}]},
        {"routed_experts": "no base64"},
        {"routed_experts": encoded(np.full((3, 4, 2), None))},
        {"routed_experts": encoded(np.zeros((3, 8), np.uint8))},
    ],
    ids=str,
)
def test_what_is_missing_is_never_guessed(changed: dict[str, Any]) -> None:
    whole = {"routed_experts": encoded(np.zeros((3, 4, 2), np.uint8))}
    generated({"choices": [a_choice(**whole)]}, SETTINGS, routes=True)
    with pytest.raises(ValueError):  # noqa: PT011
        generated({"choices": [a_choice(**whole | changed)]}, SETTINGS, routes=True)


def asked(prompt: int, sampling: dict[str, Any], **given: Any) -> dict[str, Any]:
    return request_of(
        range(prompt), sampling, **{"prompt_length": 10, "response_length": 6, "routes": False} | given
    )


@pytest.mark.parametrize(
    ("prompt", "sampling", "limit"),
    [
        (4, {}, 6),
        # A later turn's prompt has earlier answers in it, and takes from what is left of both.
        (13, {}, 3),
        (4, {"max_tokens": 2}, 2),
        (13, {"max_new_tokens": 5}, 3),
        (16, {}, 1),
    ],
)
def test_an_answer_may_be_as_long_as_verl_has_room_for(
    prompt: int, sampling: dict[str, Any], limit: int
) -> None:
    assert asked(prompt, sampling)["sampling_params"]["max_tokens"] == limit


def test_sampling_parameters_keep_their_names_and_unknown_ones_are_refused() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": False}
    body = asked(2, given, routes=True, model="m")
    assert body == {
        "model": "m",
        "token_ids": [0, 1],
        "sampling_params": given | {"logprobs": 1, "max_tokens": 6, "return_routed_experts": True},
    }
    with pytest.raises(ValueError, match="structured_outputs"):
        asked(2, {"structured_outputs": {}})


def a_generator(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], requests: list[httpx.Request]
) -> Generator:
    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        versions = [{"version": f"a/run/{len(requests)}", "start": 0, "end": 3}]
        error = {"error": {"message": "no such field"}}
        return httpx.Response(
            statuses[len(requests) - 1],
            json={"choices": [a_choice(weight_versions=versions)]} | error,
        )

    http = httpx.Client(transport=httpx.MockTransport(answer))
    caller = RetryingCaller(http, bounded=False, sleep=lambda _: None)
    monkeypatch.setattr(RetryingCaller, "of_rollouts", lambda key, parallel: caller)
    return Generator(SETTINGS, "a/run/0")


def test_a_trajectory_keeps_its_session_and_what_a_retry_cures_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[httpx.Request] = []
    generator = a_generator(monkeypatch, [503, 429, 200], requests)
    one = asyncio.run(generator.generate("trajectory", asked(2, {}), routes=False))
    assert one.versions == [3, 3, 3]
    assert [request.headers["x-multi-turn-session-id"] for request in requests] == ["trajectory"] * 3
    assert {request.headers["x-midstream-min-snapshot"] for request in requests} == {"a/run/0"}
    with pytest.raises(SignalRefused, match="no such field"):
        asyncio.run(a_generator(monkeypatch, [400], []).generate("trajectory", asked(2, {}), routes=False))


def test_a_long_run_asks_for_a_snapshot_whose_place_the_server_still_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verl_wire, "SEEN", 4)
    requests: list[httpx.Request] = []
    generator = a_generator(monkeypatch, [200] * 8, requests)

    async def several() -> None:
        for _ in range(8):
            await generator.generate("trajectory", asked(2, {}), routes=False)

    asyncio.run(several())
    least = [request.headers["x-midstream-min-snapshot"] for request in requests]
    assert least == [f"a/run/{number}" for number in (0, 0, 0, 0, 1, 2, 3, 4)]


def test_a_generator_that_is_sent_to_another_process_opens_its_own_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[httpx.Request] = []
    generator = a_generator(monkeypatch, [200, 200], requests)
    asyncio.run(generator.generate("one", asked(2, {}), routes=False))
    sent = copy.copy(generator)
    assert sent._open is None
    assert generator._open is not None
    assert asyncio.run(sent.generate("two", asked(2, {}), routes=False)).versions == [2, 2, 2]


@pytest.mark.variant
def test_a_real_server_tells_ids_routes_and_versions_of_this_run_alone(tmp_path: Path) -> None:
    with serve(tmp_path / "state") as server:
        base = server.state_dir / "models" / "tiny-moe"
        settings = VerlSettings(url=server.url, bucket=str(server.bucket), served=str(base), run="this")
        with pytest.raises(PublishError, match="publish weights of the run 'this' first"):
            serving(settings)
        with SnapshotPublisher(server.url, settings.bucket) as publisher:
            publisher.publish(settings.snapshot(7), base)
            assert serving(settings) == "this/7"
            generator = Generator(settings, serving(settings))
            prompt = list(b"Write digits")
            body = request_of(prompt, {"temperature": 1.0}, prompt_length=20, response_length=5, routes=True)
            one = asyncio.run(generator.generate("trajectory", body, routes=True))
            publisher.publish("another/0", base)
        with pytest.raises(PublishError, match="not of the run 'this'"):
            asyncio.run(generator.generate("trajectory", body, routes=True))
        generator.close()
        sessions = sessions_of(server)
    assert 1 <= len(one.token_ids) <= 5
    assert one.versions == [7] * len(one.token_ids)
    assert one.experts is not None
    assert one.experts.shape == (len(prompt) + len(one.token_ids) - 1, 4, 2)
    assert sessions == ["trajectory"]
