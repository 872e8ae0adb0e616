"""Samples of a running server: routing keys, labels, clients that give up, weights that are superseded."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from sdk_venvs import API_KEY, VERSIONS, run_sdk
from serving import Server, serve, words_of

# Scripts may take 400.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
PROMPT = list(b"Count to ten: one, two, three,")
KEY = {"x-api-key": API_KEY}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """Two replicas of the tiny MoE in float32."""
    directory = tmp_path_factory.mktemp("tinker")
    config = directory / "midstream.toml"
    config.write_text(f'account = "acme"\n[gateway]\napi_keys = ["{API_KEY}", "tml-another"]\n')
    with serve(directory / "state", "--model", str(tiny_model()), "--config", str(config)) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/api/v1", headers=KEY, timeout=60) as client:
        yield client


@pytest.fixture
def sampling_session(server: Server, api: httpx.Client) -> str:
    session = api.post("/create_session", json={}).json()["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": server.model}
    made: str = api.post("/create_sampling_session", json=asked).json()["sampling_session_id"]
    return made


def submitted(api: httpx.Client, prompt: list[int], **fields: Any) -> httpx.Response:
    chunks = [{"type": "encoded_text", "tokens": prompt}]
    # No stop: a sample that draws the end token at once would be shorter.
    params = {"max_tokens": 4, "stop": []}
    return api.post("/asample", json={"prompt": {"chunks": chunks}, "sampling_params": params, **fields})


def sampled(api: httpx.Client, prompt: list[int], **fields: Any) -> httpx.Response:
    """The answer that carries the result."""
    request_id = submitted(api, prompt, **fields).raise_for_status().json()["request_id"]
    while True:
        answer = api.post("/retrieve_future", json={"request_id": request_id})
        if answer.status_code != 408:
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"] == "application/x-protobuf", answer.text
            assert told(api, request_id)["request_id"] == request_id
            return answer


def told(api: httpx.Client, request_id: str) -> dict[str, Any]:
    answer: dict[str, Any] = api.get(f"/midstream/requests/{request_id}").raise_for_status().json()
    return answer


def test_a_key_that_is_kept_over_turns_stays_on_its_replica(
    server: Server, api: httpx.Client, sampling_session: str
) -> None:
    """As SkyRL's client does it: the trajectory's number is the seq_id of all its turns."""
    for trajectory in range(6):
        key, replicas = f"{sampling_session}:{trajectory}", []
        for turn in range(3):
            prompt = [*PROMPT, trajectory, turn]
            answer = sampled(api, prompt, sampling_session_id=sampling_session, seq_id=trajectory)
            assert answer.headers["x-midstream-session-id"] == key
            assert answer.headers["x-midstream-snapshot"] == "base"
            replicas.append(answer.headers["x-midstream-replica"])
            if turn:
                assert answer.headers["x-midstream-route-reason"] == "sticky"
        assert len(set(replicas)) == 1, replicas
        known = httpx.get(f"{server.url}/v1/sessions/{key}", headers=KEY, timeout=60)
        assert known.raise_for_status().json()["turns"] == 3
        assert f"model={server.model} session_id={key}" in server.log.read_text()


def test_without_a_key_samples_are_balanced(api: httpx.Client, server: Server) -> None:
    answers = [sampled(api, [*PROMPT, 200 + i], base_model=server.model) for i in range(6)]
    assert all("x-midstream-session-id" not in answer.headers for answer in answers)
    assert {answer.headers["x-midstream-route-reason"] for answer in answers} <= {"balanced", "prefix"}


def test_the_labels_of_a_sample_and_of_its_scored_prompt(api: httpx.Client, sampling_session: str) -> None:
    fields = {"sampling_session_id": sampling_session, "seq_id": 9, "num_samples": 2, "prompt_logprobs": True}
    request_id = submitted(api, PROMPT, **fields).raise_for_status().json()["request_id"]
    while api.post("/retrieve_future", json={"request_id": request_id}).status_code == 408:
        pass
    details = told(api, request_id)
    assert details["session_id"] == f"{sampling_session}:9"
    assert [sequence["snapshots"] for sequence in details["sequences"]] == [
        [{"snapshot": "base", "start": 0, "end": 4}]
    ] * 2
    assert details["prompt_snapshots"] == [{"snapshot": "base", "start": 0, "end": len(PROMPT)}]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"sampling_session_id": "a:b", "seq_id": 0}, 400, "sampling_session_id"),
        ({"sampling_session_id": "sampling_0", "seq_id": 0}, 404, "sampling_session_id"),
        ({"base_model": "no/such-model"}, 404, "base_model"),
        ({}, 400, "sampling_session_id"),
    ],
)
def test_a_sample_of_nothing_is_refused_in_words(
    api: httpx.Client, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = submitted(api, PROMPT, **fields)
    assert (answer.status_code, answer.json()["param"]) == (status, param)
    assert len(answer.json()["detail"]) > 20


def test_another_keys_sampling_session_is_unknown(api: httpx.Client, sampling_session: str) -> None:
    api.headers["x-api-key"] = "tml-another"
    assert submitted(api, PROMPT, sampling_session_id=sampling_session, seq_id=0).status_code == 404


def test_a_sample_that_is_given_up_ends_on_its_replica(server: Server) -> None:
    """By the client's own word: the sample would have run to its 4000 tokens otherwise."""
    arguments = {"url": server.url, "api_key": API_KEY, "base_model": server.model, "prompt": PROMPT}
    told = run_sdk(VERSIONS[0], HERE / "sdk_cancel.py", {**arguments, "max_tokens": 4000, "replicas": 2})
    assert told["generated"] < 4000
    assert len(told["tokens"]) == 4


def pid_of(server: Server, named: str) -> int:
    """The process whose command line has this word."""
    for pid in server.children():
        if named in words_of(pid):
            return pid
    raise AssertionError(f"no process is called {named}")


@pytest.mark.parametrize("victim", ["midstream.launch.gateway", "replica-0"])
def test_samples_survive_the_death_of_a_process(server: Server, victim: str) -> None:
    """With the tokens that they would have had; the client only sees that it takes longer."""
    count, max_tokens = 24, 160
    arguments = {"url": server.url, "api_key": API_KEY, "base_model": server.model, "prompt": PROMPT}
    told = run_sdk(
        VERSIONS[0],
        HERE / "sdk_losses.py",
        {**arguments, "count": count, "max_tokens": max_tokens, "victim": pid_of(server, victim)},
    )
    assert told["unfinished"] > 0
    for number, tokens in enumerate(told["tokens"]):
        body = {"model": server.model, "prompt": [*PROMPT, number], "temperature": 0, "ignore_eos": True}
        asked = {**body, "max_tokens": max_tokens, "return_token_ids": True}
        own = httpx.post(f"{server.url}/v1/completions", json=asked, headers=KEY, timeout=60)
        assert tokens == own.raise_for_status().json()["choices"][0]["token_ids"]


def test_a_client_of_superseded_weights_is_told_once_by_name(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    shutil.copytree(tiny_model(seed=1), server.bucket / "step-1")
    arguments = {"url": server.url, "api_key": API_KEY, "base_model": server.model, "identity": "step-1"}
    told = run_sdk(VERSIONS[0], HERE / "sdk_swap.py", {**arguments, "prompt": PROMPT})
    assert len(told["before"]["sequences"][0]["tokens"]) == 4
    assert told["after"]["type"] == "RequestFailedError"
    for named in ("'base'", "'step-1'", "base_model_clients"):
        assert named in told["after"]["text"]
