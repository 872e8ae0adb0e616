"""More policies than the replicas hold: each is sampled as itself, what makes way comes back, nobody's stream is touched."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from policy_helpers import DEADLINE_S, HOT_LOAD, Adapters, checked, sample, signalled
from serving import Server, serve
from test_failover import itself, running

PLACES, REPLICAS, POLICIES = 2, 2, 8


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, adapter_base: Path, adapters: Adapters
) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("placed")
    options = ("--replicas", str(REPLICAS), "--resident-policies", str(PLACES), "--no-tinker")
    with serve(place / "state", "--model", str(adapter_base), *options) as running:
        for number in range(POLICIES):
            adapters.put(running, identity(number), 100 + number)
            published(running, number)
        yield running


def identity(number: int) -> str:
    return f"placed-{number}-step-1"


def policy(number: int) -> str:
    return f"placed-{number}"


def published(server: Server, number: int) -> None:
    """Signalled, and waited for as a publisher waits."""
    answer = signalled(server, identity(number), policy(number))
    assert answer.status_code == 200, answer.text
    until = time.monotonic() + DEADLINE_S
    while True:
        rows = status(server, number)["replicas"]
        if rows and all(row["loading_state"]["stage"] in ("done", "unloaded") for row in rows):
            return
        assert time.monotonic() < until, rows
        time.sleep(0.02)


def status(server: Server, number: int) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(server.url + HOT_LOAD, params={"policy": policy(number)}).json()
    return found


def resident(server: Server) -> dict[str, list[str]]:
    """Replica to the policies that are served there."""
    listed = httpx.get(f"{server.url}/v1/{server.deployment}/policies", timeout=120).json()["policies"]
    found: dict[str, list[str]] = {f"replica-{number}": [] for number in range(REPLICAS)}
    for one in listed:
        for row in one["replicas"]:
            if row["readiness"]:
                found[row["midstream"]["replica"]].append(one["policy"])
        assert len(one["replicas"]) + len(one["unloaded"]) >= REPLICAS
    return found


def sampled(server: Server, adapters: Adapters, number: int, **headers: str) -> str:
    """The replica that sampled the policy; its numbers are its own."""
    prompt = [number + 1, 2, 3, 5, 8, 13]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        raw = client.completions.with_raw_response.create(
            model=policy(number),
            prompt=prompt,
            max_tokens=6,
            seed=3,
            logprobs=0,
            extra_body={"return_token_ids": True},
            extra_headers=headers,
        )
    checked(adapters, raw.parse(), identity(number), prompt)
    return str(raw.headers["x-midstream-replica"])


class Stream(threading.Thread):
    """A long stream of one policy. It is read as fast as it comes, so that the thread ends with the stream."""

    def __init__(self, server: Server, number: int, choices: int = 128) -> None:
        super().__init__()
        self.server, self.number, self.choices = server, number, choices
        self.begun = threading.Event()
        self.replica = ""
        self.parts: list[bytes] = []

    def run(self) -> None:
        body = {
            "model": policy(self.number),
            "prompt": list(range(9)),
            "max_tokens": 480,
            "n": self.choices,
            "seed": 1,
        }
        try:
            with httpx.stream(
                "POST", f"{self.server.url}/v1/completions", json={**body, "stream": True}, timeout=DEADLINE_S
            ) as answer:
                self.replica = answer.headers.get("x-midstream-replica", "")
                for part in answer.iter_raw():
                    self.parts.append(part)
                    self.begun.set()
        finally:
            self.begun.set()

    def whole(self) -> None:
        """Every event of the stream is the policy's, and its end came."""
        self.join()
        *events, last = [line[6:] for line in b"".join(self.parts).split(b"\n") if line.startswith(b"data: ")]
        assert last == b"[DONE]", last
        labels = {json.loads(event)["model"].partition("@")[2] for event in events}
        assert labels == {identity(self.number)}


@pytest.mark.variant
def test_each_of_many_policies_is_sampled_as_itself_and_what_made_way_comes_back(
    server: Server, adapters: Adapters
) -> None:
    for _ in range(2):
        for number in range(POLICIES):
            sampled(server, adapters, number)
            assert all(len(held) <= PLACES for held in resident(server).values())
    with ThreadPoolExecutor(POLICIES) as pool:
        list(pool.map(lambda number: sampled(server, adapters, number), range(POLICIES)))
    listed = [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]]
    assert {policy(number) for number in range(POLICIES)} <= set(listed)


@pytest.mark.variant
def test_a_policy_with_a_running_stream_never_makes_way(server: Server, adapters: Adapters) -> None:
    streams = [Stream(server, 0), Stream(server, 1)]
    for stream in streams:
        stream.start()
    for stream in streams:
        assert stream.begun.wait(DEADLINE_S)
    ran_beside = 0
    for number in range(2, POLICIES):
        sampled(server, adapters, number)
        ran_beside += all(stream.is_alive() for stream in streams)
        held = resident(server)
        for stream in streams:
            if stream.is_alive():
                assert policy(stream.number) in held[stream.replica]
    for stream in streams:
        stream.whole()
    assert ran_beside, "the streams ended before another policy was loaded"


def test_a_session_stays_where_it_is_when_its_policy_comes_back(server: Server, adapters: Adapters) -> None:
    homes = {
        number: sampled(server, adapters, number, **{"x-session-id": f"of-{number}"}) for number in range(4)
    }
    for number in range(4, POLICIES):
        sampled(server, adapters, number)
    for number, home in homes.items():
        assert sampled(server, adapters, number, **{"x-session-id": f"of-{number}"}) == home


@pytest.mark.variant
def test_a_new_snapshot_of_a_policy_that_is_not_loaded_is_served_and_a_hint_loads_one(
    server: Server, adapters: Adapters
) -> None:
    for number in range(4, POLICIES):
        sampled(server, adapters, number)
    held = [name for names in resident(server).values() for name in names]
    gone = next(number for number in range(4) if policy(number) not in held)
    until = time.monotonic() + DEADLINE_S
    hint = httpx.post(f"{server.url}{HOT_LOAD}/hint", json={"policy": policy(gone)}, timeout=120)
    assert hint.status_code == 202, hint.text
    while not any(policy(gone) in names for names in resident(server).values()):
        # Policies that were just loaded may hold every place for a while.
        httpx.post(f"{server.url}{HOT_LOAD}/hint", json={"policy": policy(gone)}, timeout=120)
        assert time.monotonic() < until
        time.sleep(0.05)
    for number in range(POLICIES):
        if number != gone:
            sampled(server, adapters, number)
    adapters.put(server, "placed-again-step-2", 199)
    assert signalled(server, "placed-again-step-2", policy(gone)).status_code == 200
    answer = sample(server, f"{policy(gone)}@placed-again-step-2", [3, 4, 5])
    checked(adapters, answer, "placed-again-step-2", [3, 4, 5])
    assert signalled(server, identity(gone), policy(gone)).status_code == 200
    published(server, gone)


def test_a_stream_goes_on_when_the_only_replica_with_its_policy_dies(
    server: Server, adapters: Adapters
) -> None:
    # Nobody else holds it.
    for number in (4, 5, 6, 7, 0):
        sampled(server, adapters, number)
    stream = Stream(server, 0, 64)
    stream.start()
    assert stream.begun.wait(DEADLINE_S)
    held = resident(server)
    assert [name for name, names in held.items() if policy(0) in names] == [stream.replica]
    assert stream.is_alive(), "the stream ended before its replica did"
    os.kill(running(server, itself)[stream.replica], signal.SIGKILL)
    stream.whole()
    for number in range(POLICIES):
        sampled(server, adapters, number)


@pytest.mark.variant
def test_an_ended_policy_is_gone_whether_it_is_loaded_or_not(server: Server, adapters: Adapters) -> None:
    policies = f"{server.url}/v1/{server.deployment}/policies"
    for number in (0, 1):
        sampled(server, adapters, number)
    for number in range(4):
        assert httpx.delete(f"{policies}/{policy(number)}", timeout=120).status_code == 200
    until = time.monotonic() + DEADLINE_S
    while any(httpx.get(f"{policies}/{policy(number)}").status_code != 404 for number in range(4)):
        assert time.monotonic() < until
        time.sleep(0.02)
    with pytest.raises(openai.NotFoundError):
        sample(server, policy(0), [1, 2])
    for number in range(4, POLICIES):
        sampled(server, adapters, number)
    published(server, 0)
    sampled(server, adapters, 0)
