"""Requests that ask for exact, minimum or recent snapshots, against real replicas that switch one after the other."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Server, serve

from midstream.client import SnapshotPublisher, snapshot_of

DRAIN_S = 300.0
DEADLINE_S = 150.0
ATTEMPTS = 4
# Tokens.
LONG = 4000
#: A stream with these is slow enough to outlast a swap.
SLOW: dict[str, Any] = {"logprobs": True, "top_logprobs": 20}
ENDLESS = 30_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("served") / "state"
    with serve(state, "--replicas", "2", "--pin-drain-s", str(DRAIN_S), "--no-tinker") as running:
        yield running


@pytest.fixture
def publisher(server: Server) -> Iterator[SnapshotPublisher]:
    with SnapshotPublisher(server.url, server.bucket.as_uri()) as made:
        yield made


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as made:
        yield made


class Steps:
    """Snapshots of this module's server, signalled one after another."""

    def __init__(self, server: Server, tiny_model: Callable[..., Path], **options: int) -> None:
        self.server, self.tiny_model, self.options, self.count = server, tiny_model, options, 0

    def put(self) -> str:
        self.count += 1
        identity = f"step-{self.count}"
        made = self.tiny_model(seed=self.count, dtype="bfloat16", **self.options)
        shutil.copytree(made, self.server.bucket / identity)
        return identity


@pytest.fixture(scope="module")
def steps(server: Server, tiny_model: Callable[..., Path]) -> Steps:
    return Steps(server, tiny_model)


class Stream(threading.Thread):
    """The label of each token, as they come; `error` is what the stream ended with."""

    def __init__(self, server: Server, headers: dict[str, str], max_tokens: int, **fields: Any) -> None:
        super().__init__()
        self.server, self.headers = server, headers
        self.body = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self.body["return_token_ids"] = True
        self.body |= {"model": server.model} | fields
        self.labels: list[str] = []
        self.error: dict[str, Any] | None = None
        self.done = False
        self.replica = ""
        self.started = threading.Event()

    def run(self) -> None:
        url = f"{self.server.url}/v1/completions"
        try:
            with httpx.stream(
                "POST", url, json=self.body, headers=self.headers, timeout=180, trust_env=False
            ) as answer:
                self.replica = answer.headers.get("x-midstream-replica", "")
                rest = b""
                # A text may hold what httpx takes for the end of a line.
                for data in answer.iter_bytes():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self._take(line)
        finally:
            self.started.set()

    def _take(self, line: bytes) -> None:
        if line == b"data: [DONE]":
            self.done = True
        elif line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            self.error = event.get("error")
            for choice in event.get("choices", ()):
                self.labels += [event["model"].rpartition("@")[2]] * len(choice.get("token_ids") or ())
                self.started.set()

    def begin(self) -> Stream:
        self.start()
        self.started.wait()
        return self


def ask(
    http: httpx.Client, server: Server, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = {"model": server.model, "prompt": [1, 2, 3], "max_tokens": 2, **fields}
    return http.post("/v1/completions", json=body, headers=headers)


def label(answer: httpx.Response) -> str | None:
    assert answer.status_code == 200, answer.text
    return snapshot_of(answer.json()["model"])


def wanting(**constraint: object) -> dict[str, str]:
    return {f"x-midstream-{name.replace('_', '-')}": str(value) for name, value in constraint.items()}


def serving(publisher: SnapshotPublisher) -> dict[str, str | None]:
    return {replica.name: replica.snapshot for replica in publisher.snapshots.status().replicas}


def stages(publisher: SnapshotPublisher) -> dict[str, str]:
    return {replica.name: replica.stage for replica in publisher.snapshots.status().replicas}


def switched_or_staged(publisher: SnapshotPublisher, replica: str, step: str) -> bool:
    (row,) = [row for row in publisher.snapshots.status().replicas if row.name == replica]
    return row.stage == "staged" or row.snapshot == step


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to be"


def test_requests_are_served_by_what_they_ask_for_from_the_signal_on(
    server: Server, publisher: SnapshotPublisher, http: httpx.Client, steps: Steps
) -> None:
    step = steps.put()
    publisher.snapshots.signal(step)
    # Right after the signal: they wait for the swap.
    for session in range(6):
        headers = wanting(min_snapshot=step) | {"x-session-id": f"early-{session}"}
        assert label(ask(http, server, headers)) == step
    publisher.snapshots.wait_until_ready(step, timeout_s=150)
    assert label(ask(http, server, wanting(snapshot=step, max_staleness=0))) == step
    assert label(ask(http, server, model=f"{server.model}@{step}")) == step
    assert label(ask(http, server, midstream={"min_snapshot": "base", "max_staleness": 0})) == step
    assert label(ask(http, server, wanting(min_snapshot="base"), midstream={"snapshot": step})) == step
    newer = steps.put()
    publisher.snapshots.signal(newer)
    publisher.snapshots.wait_until_ready(newer, timeout_s=150)
    answer = ask(http, server, wanting(snapshot=step))
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "1")
    body = answer.json()
    assert body["error"]["code"] == "snapshot_not_served"
    assert [(row["replica"], row["snapshot"], row["stage"]) for row in body["serving"]] == [
        ("replica-0", newer, "idle"),
        ("replica-1", newer, "idle"),
    ]
    assert body["newest"] == newer
    for constraint in ({"snapshot": "nobody's", "wait": 0}, {"min_snapshot": "nobody's", "wait": 0}):
        assert ask(http, server, midstream=constraint).status_code == 409
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        with pytest.raises(openai.ConflictError, match=f"snapshot '{step}'"):
            client.completions.create(model=f"{server.model}@{step}", prompt="a", max_tokens=1)
        with pytest.raises(
            openai.BadRequestError, match="x-midstream-max-staleness: expected a whole number"
        ):
            client.completions.create(
                model=server.model, prompt="a", max_tokens=1, extra_headers=wanting(max_staleness="few")
            )


def test_a_replica_waits_for_its_pinned_stream_while_the_other_one_switches(
    server: Server, publisher: SnapshotPublisher, http: httpx.Client, steps: Steps
) -> None:
    for _ in range(ATTEMPTS):
        before = next(iter(serving(publisher).values()))
        assert before is not None
        step = steps.put()
        pinned = Stream(server, wanting(snapshot=before), LONG, **SLOW).begin()
        free = Stream(server, {}, LONG, **SLOW).begin()
        publisher.snapshots.signal(step)
        until(lambda: step in serving(publisher).values())  # noqa: B023
        at = serving(publisher)
        # Here the old one serves, there the new one; who asks for the old one would hold the swap off for ever.
        asked = [ask(http, server, wanting(min_snapshot=step)), ask(http, server, wanting(max_staleness=0))]
        either = [ask(http, server, wanting(max_staleness=1)) for _ in range(4)]
        until(lambda: switched_or_staged(publisher, pinned.replica, step))  # noqa: B023
        refused = ask(http, server, model=f"{server.model}@{before}")
        waited = stages(publisher)[pinned.replica] == "staged"
        pinned.join()
        publisher.snapshots.wait_until_ready(step, timeout_s=150)
        free.join()
        assert (pinned.error, pinned.done, set(pinned.labels), len(pinned.labels)) == (
            None,
            True,
            {before},
            LONG,
        )
        assert (free.error, free.done, len(free.labels)) == (None, True, LONG)
        assert free.labels == sorted(free.labels, key=[before, step].index)
        assert [label(answer) for answer in asked] == [step, step]
        assert {label(answer) for answer in either} <= {before, step}
        assert refused.status_code == 409, refused.text
        if waited:
            # Otherwise the stream ended before one had looked.
            break
    assert waited
    assert at[pinned.replica] == before
    assert (pinned.replica, before, "staged") in [
        (row["replica"], row["snapshot"], row["stage"]) for row in refused.json()["serving"]
    ]


@pytest.mark.variant
def test_a_pinned_stream_that_takes_too_long_is_ended_and_never_crossed(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model(dtype="bfloat16", max_positions=ENDLESS + 8)
    arguments = ("--model", str(model), "--replicas", "1", "--pin-drain-s", "0.2")
    with serve(tmp_path / "state", *arguments) as server:
        step = Steps(server, tiny_model, max_positions=ENDLESS + 8).put()
        stream = Stream(server, {}, ENDLESS, model=f"{server.model}@base").begin()
        with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
            publisher.snapshots.signal(step)
            publisher.snapshots.wait_until_ready(step, timeout_s=150)
        stream.join()
        assert set(stream.labels) == {"base"}
        assert not stream.done
        assert stream.error is not None
        assert (stream.error["code"], stream.error["status_code"]) == ("snapshot_not_served", 409)
        assert f"'base', to which this request is pinned, is replaced by '{step}'" in stream.error["message"]
