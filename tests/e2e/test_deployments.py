"""Two deployments on one server: made, hot-loaded, scaled, killed, restarted and deleted without each other's notice."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Server, descendants, serve, words_of

A = "accounts/local"
DEFAULT, B = f"{A}/deployments/default", f"{A}/deployments/b"
# Seconds, where nothing else runs; machines that run tests are busy.
WITHIN_S = 400.0
POLL_S = 0.5


class Api:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.http = httpx.Client(base_url=server.url, timeout=WITHIN_S, trust_env=False)

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def got(self, name: str) -> dict[str, Any]:
        body: dict[str, Any] = self.http.get(f"/v1/{name}").raise_for_status().json()
        return body

    def until(self, name: str, **fields: Any) -> dict[str, Any]:
        """Wait until the deployment shows these fields."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            got = self.got(name)
            if {field: got[field] for field in fields} == fields:
                return got
            assert time.monotonic() < deadline, f"still {got}; log:\n{self.server.log.read_text()[-3000:]}"
            time.sleep(POLL_S)

    def patch(self, name: str, mask: str, **body: Any) -> None:
        self.http.patch(f"/v1/{name}", params={"updateMask": mask}, json=body).raise_for_status()

    def load(self, name: str, identity: str) -> None:
        """Signal a snapshot and wait until every replica of the deployment serves it."""
        named = {"fireworks-deployment": name}
        path = "/hot_load/v1/models/hot_load"
        self.http.post(path, json={"identity": identity}, headers=named).raise_for_status()
        deadline = time.monotonic() + WITHIN_S
        while True:
            rows = self.http.get(path, headers=named).json()["replicas"]
            if all(r["readiness"] and r["current_snapshot_identity"] == identity for r in rows):
                return
            assert time.monotonic() < deadline, rows
            time.sleep(POLL_S)

    def label(self, model: str) -> str:
        """Which model@snapshot answers."""
        answer = self.http.post("/v1/completions", json={"model": model, "prompt": "ab", "max_tokens": 1})
        return str(answer.raise_for_status().json()["model"]).removeprefix(f"{A}/models/")


class Client(threading.Thread):
    """Streams of one session after another, until told to stop; `done` counts those that came whole."""

    def __init__(self, server: Server, model: str, session: str) -> None:
        super().__init__()
        self.server, self.model, self.session = server, model, session
        self.stopping = threading.Event()
        self.done = 0
        self.replicas: list[str] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="k", max_retries=0) as client:
                while not self.stopping.is_set():
                    self._stream(client)
        except (openai.OpenAIError, httpx.HTTPError, AssertionError) as error:
            self.error = error

    def _stream(self, client: openai.OpenAI) -> None:
        raw = client.completions.with_raw_response.create(
            model=self.model,
            prompt="abcd",
            max_tokens=40,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            extra_headers={"x-multi-turn-session-id": self.session},
        )
        tokens, finish = 0, None
        for chunk in raw.parse():
            for choice in chunk.choices:
                tokens += len(getattr(choice, "token_ids", None) or ())
                finish = choice.finish_reason or finish
        assert (tokens, finish) == (40, "length")
        self.done += 1
        self.replicas.append(raw.headers["x-midstream-replica"])

    def stop(self) -> None:
        self.stopping.set()
        self.join(timeout=WITHIN_S)
        assert self.error is None, repr(self.error)
        assert self.done > 0


def pid_of(server: Server, replica: str) -> int:
    for pid in descendants(server.process.pid):
        if replica in words_of(pid):
            return pid
    raise AssertionError(f"{replica} does not run")


def put(server: Server, identity: str, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, server.bucket / identity)


@pytest.mark.variant
@pytest.mark.timeout(1800)
def test_two_deployments_live_side_by_side(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    second = tmp_path / "second"
    shutil.copytree(tiny_model(seed=5), second)
    config = tmp_path / "midstream.toml"
    config.write_text(f'[models]\nsecond = "{second}"\n')
    arguments = ("--model", str(tiny_model()), "--replicas", "1", "--config", str(config))
    name = tiny_model().name
    with serve(tmp_path / "state", *arguments) as server, Api(server) as api:
        body = {"baseModel": "second", "minReplicaCount": 1, "hotLoadTransitionType": "ASYNC"}
        made = api.http.post(
            f"/v1/{A}/deployments", params={"deploymentId": "b"}, json=body
        ).raise_for_status()
        assert made.json()["name"] == B
        api.until(B, state="READY", replicaCount=1)
        assert [api.label(model) for model in ("second", "b", B, name, "default")] == [
            *("second@base",) * 3,
            *(f"{name}@base",) * 2,
        ]
        loads_each_by_itself(api, name, tiny_model)
        scales_under_streams(api)
        a_kill_is_its_own(api, name)
        api.patch(B, "hot_load_transition_type", hotLoadTransitionType="SYNC")
        assert api.got(DEFAULT)["hotLoadTransitionType"] == "ASYNC"
        assert server.stop() == 0
    with serve(tmp_path / "state", *arguments) as server, Api(server) as api:
        got = api.until(B, state="READY", replicaCount=1)
        assert (got["hotLoadTransitionType"], got["minReplicaCount"]) == ("SYNC", 1)
        assert [api.label("b"), api.label("default")] == ["second@step-1", f"{name}@step-2"]
        is_deleted(api)


def loads_each_by_itself(api: Api, name: str, tiny_model: Callable[..., Path]) -> None:
    put(api.server, "b/step-1", tiny_model(seed=6))
    put(api.server, "step-2", tiny_model(seed=7))
    api.load(B, "step-1")
    assert [api.label("b"), api.label("default")] == ["second@step-1", f"{name}@base"]
    api.load(DEFAULT, "step-2")
    assert [api.label("b"), api.label("default")] == ["second@step-1", f"{name}@step-2"]


def scales_under_streams(api: Api) -> None:
    clients = [Client(api.server, "b", f"session-{n}") for n in range(4)]
    for client in clients:
        client.start()
    api.patch(B, "min_replica_count", minReplicaCount=2)
    api.until(B, state="READY", replicaCount=2)
    late = [Client(api.server, "b", f"late-{n}") for n in range(6)]
    for client in late:
        client.start()
    while not any("b-replica-1" in client.replicas for client in late):
        assert not any(client.error for client in (*clients, *late))
        time.sleep(POLL_S)
    api.patch(B, "min_replica_count,max_replica_count", minReplicaCount=1, maxReplicaCount=1)
    api.until(B, state="READY", replicaCount=1)
    for client in (*clients, *late):
        client.stop()
    for client in clients:
        assert set(client.replicas) == {"b-replica-0"}, "who was there before stays where it was"


def a_kill_is_its_own(api: Api, name: str) -> None:
    client = Client(api.server, "default", "s")
    client.start()
    os.kill(pid_of(api.server, "b-replica-0"), signal.SIGKILL)
    answer = api.http.post("/v1/completions", json={"model": "b", "prompt": "ab", "max_tokens": 1})
    while answer.status_code == 503:
        assert "retry-after" in answer.headers
        time.sleep(POLL_S)
        answer = api.http.post("/v1/completions", json={"model": "b", "prompt": "ab", "max_tokens": 1})
    assert answer.json()["model"] == f"{A}/models/second@step-1"
    client.stop()
    assert set(client.replicas) == {"replica-0"}


def is_deleted(api: Api) -> None:
    pid = pid_of(api.server, "b-replica-0")
    assert api.http.delete(f"/v1/{B}").json() == {}
    deadline = time.monotonic() + WITHIN_S
    while api.http.get(f"/v1/{B}").status_code != 404:
        assert time.monotonic() < deadline
        time.sleep(POLL_S)
    assert not Path(f"/proc/{pid}").exists()
    assert not list((api.server.state_dir / "snapshots").glob("b-*"))
    assert api.http.post("/v1/completions", json={"model": "b", "prompt": "ab"}).status_code == 404
