"""Sessions and their replicas through real processes that are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server, words_of

DEADLINE_S = 150.0
KEYS = [f"trajectory-{number}" for number in range(16)]


@pytest.fixture
def http(served: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as client:
        yield client


def process(server: Server, module: str, name: str = "") -> int:
    """The pid of the server's child that runs a module; of several, the one that has a snapshot cache of that name."""
    for pid in server.children():
        # It has ended.
        with contextlib.suppress(OSError):
            if module in words_of(pid) and (not name or holds_cache_of(pid, name)):
                return pid
    raise AssertionError(f"{module} {name} does not run")


def holds_cache_of(pid: int, name: str) -> bool:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # It is closed.
        with contextlib.suppress(OSError):
            if f"/snapshots/{name}" in str(link.readlink()):
                return True
    return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def turn(http: httpx.Client, server: Server, key: str | None, prompt: str = "hello") -> httpx.Response:
    headers = {} if key is None else {"x-session-id": key}
    body = {"model": server.model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    return http.post("/v1/completions", json=body, headers=headers)


def until(holds: Callable[[], Any]) -> Any:
    """Ask until it is so; what it said."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            if found := holds():
                return found
        except httpx.TransportError:
            pass
    raise AssertionError("it did not come to be")


def homes(http: httpx.Client, server: Server) -> dict[str, str]:
    return {key: home(http, server, key) for key in KEYS}


def home(http: httpx.Client, server: Server, key: str) -> str:
    answer = turn(http, server, key)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-midstream-replica"]


def homes_on_both(http: httpx.Client, server: Server) -> dict[str, str]:
    """Of the server's other tests, one replica may have more sessions, and gets none until the other one has as many."""
    until(lambda: usable(http) == 2)
    found: dict[str, str] = {}
    while min(list(found.values()).count(f"replica-{number}") for number in range(2)) < 4:
        assert len(found) < 400
        key = f"kept-{len(found)}"
        found[key] = home(http, server, key)
    return found


def usable(http: httpx.Client) -> int:
    return int(http.get("/health").json()["usable_replicas"])


def reachable(http: httpx.Client) -> bool:
    return http.get("/health").status_code in (200, 503)


def test_conversations_without_a_key_find_their_cache(served: Server, http: httpx.Client) -> None:
    """Four at a time, so that by load alone turns would alternate between the replicas."""
    prompts = [f"{number}: " + f"rollout {number} goes on and on. " * 40 for number in range(4)]
    before = [0] * len(prompts)
    for turns in range(4):
        for number, prompt in enumerate(prompts):
            answer = turn(http, served, None, prompt).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= before[number] // 16 * 16 - 16, f"turn {turns} of conversation {number}"
            before[number] = answer["usage"]["prompt_tokens"]
            prompts[number] = prompt + answer["choices"][0]["text"] + f" turn {turns} of {number}" * 20


def test_a_gateway_that_is_killed_keeps_every_session_where_it_was(
    served: Server, http: httpx.Client
) -> None:
    before = homes_on_both(http, served)
    kill(process(served, "midstream.launch.gateway"))
    until(lambda: reachable(http))
    # Requests of unknown sessions wait only so long for a replica.
    until(lambda: usable(http) == 2)
    answers = {key: turn(http, served, key) for key in before}
    assert {a.status_code for a in answers.values()} == {200}
    assert {key: a.headers["x-midstream-replica"] for key, a in answers.items()} == before
    assert {a.headers["x-midstream-route-reason"] for a in answers.values()} == {"sticky"}


def test_only_the_sessions_of_a_killed_replica_move_and_it_takes_new_ones_when_it_is_back(
    served: Server, http: httpx.Client
) -> None:
    before = homes(http, served)
    pid = process(served, "midstream.launch.replica", "replica-1")
    # It would start the replica again.
    os.kill(served.process.pid, signal.SIGSTOP)
    try:
        kill(pid)
        until(lambda: usable(http) == 1)
        after = homes(http, served)
    finally:
        os.kill(served.process.pid, signal.SIGCONT)
    assert [key for key in KEYS if before[key] == "replica-0" != after[key]] == []
    assert [key for key in KEYS if before[key] == "replica-1" == after[key]] == []
    until(lambda: usable(http) == 2)
    assert homes(http, served) == after, "nobody is moved back"
    fresh = {turn(http, served, f"new-{n}").headers["x-midstream-replica"] for n in range(8)}
    assert fresh == {"replica-1"}, "it has clearly fewer"
