"""Two gateway processes on one port: one view from outside, and the death of either of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from serving import Server, serve, words_of

DEADLINE_S = 150.0
KEYS = [f"trajectory-{number}" for number in range(12)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    with serve(tmp_path / "state", "--replicas", "2", "--gateway-workers", "2") as running:
        yield running


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        # The dead worker's part of it.
        with contextlib.suppress(httpx.TransportError):
            if holds():
                return
    raise AssertionError("it did not come to be")


def metric(server: Server, pattern: str) -> float:
    """The sum of the samples whose line matches."""
    text = httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False).text
    return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))


def completed(server: Server) -> float:
    return metric(server, r'midstream_gateway_requests_total\{path="completions",status="200"\}')


def workers(server: Server) -> float:
    return metric(server, "midstream_gateway_workers")


def turn(client: HTTPConnection, server: Server, key: str) -> str:
    """The replica that served it."""
    body = json.dumps({"model": server.model, "prompt": "hello", "max_tokens": 1})
    client.request("POST", "/v1/completions", body, {"x-session-id": key, "content-type": "application/json"})
    answer = client.getresponse()
    text = answer.read()
    assert answer.status == 200, text
    return str(answer.headers["x-midstream-replica"])


def fresh(server: Server) -> HTTPConnection:
    """A client of one connection, which it does not open again."""
    client = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    client.connect()
    client.auto_open = 0
    return client


def fresh_of_the_living(server: Server) -> HTTPConnection:
    """A connection that a process accepted which runs: one that was killed may have had the first ones in its queue."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        client = fresh(server)
        try:
            client.request("GET", "/health")
            client.getresponse().read()
        except OSError:
            client.close()
        else:
            return client
    raise AssertionError("no process accepts")


def process_of(server: Server, name: str) -> int:
    """Its pid; 0 when there is none."""
    for pid in server.children():
        words = words_of(pid)
        if "midstream.launch.gateway" in words and name in words:
            return pid
    return 0


@pytest.mark.variant
def test_processes_on_one_port_look_like_one_and_one_that_dies_is_replaced(served: Server) -> None:
    until(lambda: workers(served) == 2)
    homes: dict[str, set[str]] = {key: set() for key in KEYS}
    for _ in range(3):
        for key in KEYS:
            # Each connection goes to one of the processes.
            with contextlib.closing(fresh(served)) as client:
                homes[key].add(turn(client, served, key))
    assert all(len(found) == 1 for found in homes.values()), homes
    assert {home for found in homes.values() for home in found} == {"replica-0", "replica-1"}
    # Whoever counted it.
    until(lambda: completed(served) == 3 * len(KEYS))
    clients = [fresh(served) for _ in range(24)]
    before = process_of(served, "gateway-1")
    try:
        for client, key in zip(clients, KEYS * 2, strict=True):
            assert {turn(client, served, key)} == homes[key]
        until(lambda: completed(served) == 5 * len(KEYS))
        os.kill(before, signal.SIGKILL)
        until(lambda: process_of(served, "gateway-1") not in (0, before) and workers(served) == 2)
        lost = 0
        for client, key in zip(clients, KEYS * 2, strict=True):
            try:
                assert {turn(client, served, key)} == homes[key]
            except OSError:
                lost += 1
        assert 0 < lost < len(clients), "some connections were the dead worker's, and only those are lost"
    finally:
        for client in clients:
            client.close()
    until(lambda: completed(served) == 5 * len(KEYS) + len(clients) - lost)
    first = process_of(served, "gateway-0")
    os.kill(first, signal.SIGKILL)
    # None of them is the first.
    with contextlib.closing(fresh_of_the_living(served)) as client:
        assert all({turn(client, served, key)} == homes[key] for key in KEYS)
    until(lambda: process_of(served, "gateway-0") not in (0, first) and workers(served) == 2)
    with contextlib.closing(fresh(served)) as client:
        assert all({turn(client, served, key)} == homes[key] for key in KEYS)
    children = served.children()
    assert served.stop() == 0
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
