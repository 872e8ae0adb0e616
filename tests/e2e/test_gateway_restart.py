"""A gateway that is replaced under streams and requests: none is cut, none is refused, and sessions stay."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest
from serving import Server, command, serve, words_of
from tiers import variant

STREAMS, TOKENS = 8, 1500
DEADLINE_S = 150.0
KEYS = [f"trajectory-{number}" for number in range(8)]


@pytest.fixture(params=[variant("1"), "2"], ids=["one", "workers"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    config = tmp_path / "config.toml"
    config.write_text(f"[gateway]\nworkers = {request.param}\n")
    with serve(tmp_path / "state", "--replicas", "2", "--no-tinker", "--config", str(config)) as running:
        yield running


def connected(server: Server) -> HTTPConnection:
    return HTTPConnection(server.url.removeprefix("http://"), timeout=DEADLINE_S)


def asked(client: HTTPConnection, server: Server, key: str, **fields: object) -> tuple[str, bytes]:
    """The replica that served a completion, and its body."""
    body = json.dumps({"model": server.model, "prompt": "hello", "max_tokens": 1, **fields})
    client.request("POST", "/v1/completions", body, {"x-session-id": key, "content-type": "application/json"})
    answer = client.getresponse()
    text = answer.read()
    assert answer.status == 200, text
    return str(answer.headers["x-midstream-replica"]), text


def gateways(server: Server) -> set[int]:
    """Pids of all processes on the port."""
    return {pid for pid in server.children() if "midstream.launch.gateway" in words_of(pid)}


def streamed(server: Server, number: int) -> list[int]:
    """The token ids of a long stream that came to its end."""
    fields = {"stream": True, "ignore_eos": True, "seed": number, "return_token_ids": True}
    with contextlib.closing(connected(server)) as client:
        _, text = asked(client, server, f"s{number}", max_tokens=TOKENS, **fields)
    events = [line[6:] for line in text.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"] for event in events[:-1]]
    return [token for choice in choices if choice for token in choice[0].get("token_ids") or ()]


class Asker:
    """Short requests, one after another: on one connection as long as the server keeps it, or on a new one each time."""

    def __init__(self, server: Server, number: int) -> None:
        self.server, self.number = server, number
        self.enough = threading.Event()
        self.count = 0

    def run(self) -> None:
        with contextlib.closing(connected(self.server)) as client:
            while not self.enough.is_set():
                asked(client, self.server, KEYS[self.number % len(KEYS)])
                self.count += 1
                if self.number % 2:
                    client.close()


def restart(server: Server) -> None:
    done = subprocess.run(
        command("restart", "gateway", "--state-dir", str(server.state_dir)), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the gateway was replaced")


def call(server: Server, target: str) -> None:
    with contextlib.closing(connected(server)) as client:
        client.request("POST", target)
        answer = client.getresponse()
        assert answer.status == 200, answer.read()


def until_in_flight(server: Server, count: int) -> None:
    """Wait until the replicas have so many requests."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with contextlib.closing(connected(server)) as client:
            client.request("GET", "/metrics")
            found = client.getresponse().read().decode()
        running = re.findall(r"^midstream_replica_requests_in_flight\{.*\} (\d+)", found, flags=re.MULTILINE)
        if sum(map(int, running)) >= count:
            return
        assert time.monotonic() < deadline, running
        time.sleep(0.01)


def until_gone(pids: set[int], server: Server) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while pids & gateways(server):
        assert time.monotonic() < deadline, "the old processes end once their requests are over"
        time.sleep(0.1)


def test_a_gateway_is_replaced_and_nobody_notices(served: Server) -> None:
    with contextlib.closing(connected(served)) as client:
        homes = {key: asked(client, served, key)[0] for key in KEYS}
    first = gateways(served)
    askers = [Asker(served, number) for number in range(4)]
    with ThreadPoolExecutor(STREAMS + len(askers)) as threads:
        streams = [threads.submit(streamed, served, number) for number in range(STREAMS)]
        asking = [threads.submit(asker.run) for asker in askers]
        try:
            # However fast the engine is, and however slow the restart, no stream ends before it.
            until_in_flight(served, STREAMS)
            call(served, "/pause?mode=keep")
            assert not any(stream.done() for stream in streams), "or this shows nothing"
            restart(served)
            assert first <= gateways(served), "the old process continues them"
            call(served, "/resume")
            counts = [asker.count for asker in askers]
            assert [len(stream.result()) for stream in streams] == [TOKENS] * STREAMS
            second = gateways(served) - first
            restart(served)
            assert all(asker.count > count for asker, count in zip(askers, counts, strict=True))
        finally:
            call(served, "/resume")
            for asker in askers:
                asker.enough.set()
        for one in asking:
            one.result()
    until_gone(first | second, served)
    assert len(gateways(served)) == len(first)
    with contextlib.closing(connected(served)) as client:
        assert {key: asked(client, served, key)[0] for key in KEYS} == homes
    log = served.log.read_text()
    assert "starting it again" not in log
    assert "Traceback" not in log
    assert served.stop() == 0


def test_a_restart_without_a_server_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(json.dumps({"pid": os.getpid()}))
    for state in (tmp_path, tmp_path / "none"):
        done = subprocess.run(
            command("restart", "gateway", "--state-dir", str(state)), capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "no `midstream serve` runs there" in done.stderr
