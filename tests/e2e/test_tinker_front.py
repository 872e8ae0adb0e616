"""The Tinker front of a real `midstream serve`: reached on the public port, started again, ended in order."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server, serve, words_of

from midstream_tinker.messages import SampleResponse

sys.path.append(str(Path(__file__).parents[1] / "gateway"))

from test_gateway_tls import certificate

KEY = "tml-secret-of-nobody-else"
QUESTION = list(b"A question that is long enough to be worth finding its cached beginning again.")


class Tinker:
    """The API as the SDK speaks it, without its retries."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/", headers={"x-api-key": KEY}, timeout=60, verify=False
        )

    def __enter__(self) -> Tinker:
        return self

    def __exit__(self, *raised: object) -> None:
        self.http.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def patiently(self, path: str, **body: Any) -> httpx.Response:
        """Again, while the gateway or the front is not there."""
        while True:
            try:
                answer = self.post(path, **body)
            except httpx.TransportError:
                continue
            if answer.status_code not in (429, 503):
                return answer
            assert answer.json().keys() == {"detail", "param"}
            assert answer.headers["retry-after"] == "1"

    def sampler(self, model: str) -> str:
        session = self.post("create_session", sdk_version="0.38.0").raise_for_status().json()["session_id"]
        made = self.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=model
        )
        return str(made.raise_for_status().json()["sampling_session_id"])

    def submit(self, sampler: str, seq_id: int, prompt: list[int], **params: Any) -> httpx.Response:
        return self.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=seq_id,
            prompt={"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            sampling_params={"temperature": 0, "max_tokens": 4, **params},
        )

    def request_id(self, *arguments: Any, **params: Any) -> str:
        return str(self.submit(*arguments, **params).raise_for_status().json()["request_id"])

    def result(self, request_id: str) -> httpx.Response:
        while (answer := self.patiently("retrieve_future", request_id=request_id)).status_code == 408:
            pass
        return answer

    def tokens(self, request_id: str) -> list[int]:
        answer = self.result(request_id)
        assert answer.status_code == 200, answer.text
        (sequence,) = SampleResponse.FromString(answer.content).sequences
        return list(memoryview(sequence.tokens).cast("i"))


def front(server: Server) -> int:
    """Its pid; 0 when there is none."""
    return process(server, "midstream_tinker.front")


def gateway(server: Server) -> int:
    return process(server, "midstream.launch.gateway")


def process(server: Server, module: str) -> int:
    return next((pid for pid in server.children() if module in words_of(pid)), 0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "midstream.toml"
    file.write_text(f'[gateway]\napi_keys = ["{KEY}"]\n')
    return file


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path], config: Path
) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("front") / "state"
    with serve(state, "--model", str(tiny_model()), "--config", str(config)) as running:
        yield running


def test_rollouts_whose_key_changes_every_turn_find_their_cache(server: Server) -> None:
    def turn(key: str, prompt: list[int], headers: dict[str, str]) -> httpx.Response:
        return httpx.post(
            f"{server.url}/v1/completions",
            headers={"x-api-key": KEY, "x-session-id": key, **headers},
            json={
                "model": server.model,
                "temperature": 0,
                "max_tokens": 16,
                "prompt": prompt,
                "return_token_ids": True,
            },
            timeout=60,
        ).raise_for_status()

    for number in range(4):
        prompt, home, before = [number, *QUESTION], None, 0
        for count in range(6):
            answer = turn(f"{number}:{count}", prompt, {"x-midstream-follow-prefix": "1"})
            cached = int(answer.headers["fireworks-cached-prompt-tokens"])
            if home is not None:
                assert answer.headers["x-midstream-replica"] == home
                assert answer.headers["x-midstream-route-reason"] == "prefix"
                assert cached >= before // 16 * 16
            home, before = answer.headers["x-midstream-replica"], len(prompt)
            prompt = [*prompt, *answer.json()["choices"][0]["token_ids"], count]


def test_a_front_that_dies_is_started_again_and_knows_its_sessions(server: Server) -> None:
    with Tinker(server.url) as tinker:
        sampler = tinker.sampler(server.model)
        expected = tinker.tokens(tinker.request_id(sampler, 0, QUESTION))
        pid = front(server)
        assert pid
        os.kill(pid, signal.SIGKILL)
        assert tinker.patiently("session_heartbeat", session_id="session_0").status_code == 410
        assert front(server) not in (0, pid)
        assert tinker.tokens(tinker.request_id(sampler, 1, QUESTION)) == expected
        assert tinker.result("req_of_the_first").status_code == 410, "the SDK samples anew"


def test_samples_under_way_outlive_the_gateway(server: Server) -> None:
    with Tinker(server.url) as tinker:
        sampler = tinker.sampler(server.model)
        prompts = [[number, *QUESTION] for number in range(24)]
        expected = [
            tinker.tokens(tinker.request_id(sampler, n, p, max_tokens=200)) for n, p in enumerate(prompts)
        ]
        asked = [tinker.request_id(sampler, 100 + n, p, max_tokens=200) for n, p in enumerate(prompts)]
        pid = gateway(server)
        assert pid
        os.kill(pid, signal.SIGKILL)
        assert [tinker.tokens(request_id) for request_id in asked] == expected
        assert gateway(server) != pid


@pytest.mark.variant
def test_workers_over_tls_pass_to_it_and_no_key_is_logged(
    tmp_path: Path, tiny_model: Callable[..., Path], config: Path
) -> None:
    cert, key = certificate(tmp_path)
    arguments = [
        "--model",
        str(tiny_model()),
        "--config",
        str(config),
        "--replicas",
        "1",
        "--gateway-workers",
        "2",
    ]
    arguments += ["--tls-cert", cert, "--tls-key", key, "--log-level", "debug"]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve(tmp_path / "state", *arguments))
        assert server.url.startswith("https:")
        # connections of both workers, most likely
        clients = [stack.enter_context(Tinker(server.url)) for _ in range(8)]
        sampler = clients[0].sampler(server.model)
        results = [tinker.tokens(tinker.request_id(sampler, n, QUESTION)) for n, tinker in enumerate(clients)]
        assert results == [results[0]] * 8
        stranger = httpx.get(
            f"{server.url}/api/v1/healthz", headers={"x-api-key": "tml-x"}, timeout=60, verify=False
        )
        assert (stranger.status_code, stranger.json().keys()) == (401, {"detail", "param"})
        log = server.log.read_text()
    assert KEY not in log
    assert f"session_id={sampler}:0" in log


@pytest.mark.variant
def test_a_stop_answers_polls_and_leaves_nothing(
    tmp_path: Path, tiny_model: Callable[..., Path], config: Path
) -> None:
    # It is not through with the sample before the stop.
    model = tiny_model(max_positions=32768)
    arguments = ("--model", str(model), "--config", str(config), "--replicas", "1")
    with (
        serve(tmp_path / "state", *arguments) as server,
        Tinker(server.url) as tinker,
        contextlib.closing(HTTPConnection(server.url.removeprefix("http://"), timeout=150)) as polling,
    ):
        sampler = tinker.sampler(server.model)
        tinker.tokens(tinker.request_id(sampler, 0, QUESTION))
        children = server.children()
        assert front(server) in children
        headers = {"x-api-key": KEY, "content-type": "application/json"}
        for seq_id, tokens in ((1, 1), (2, 32_000)):
            request_id = tinker.request_id(sampler, seq_id, QUESTION, max_tokens=tokens)
            polling.request(
                "POST", "/api/v1/retrieve_future", json.dumps({"request_id": request_id}), headers
            )
            if tokens == 1:
                # Its connection is open from end to end.
                with polling.getresponse() as answer:
                    answer.read()
        # Asked later, so the poll is there.
        tinker.post("session_heartbeat", session_id="session_0")
        assert server.stop() == 0
        assert polling.getresponse().status == 410
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
        assert "Traceback" not in server.log.read_text()


def test_without_the_tinker_api_its_paths_are_unknown(published: Server) -> None:
    answer = httpx.post(f"{published.url}/api/v1/create_session", json={}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found_error")
    assert front(published) == 0
