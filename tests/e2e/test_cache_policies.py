"""Who reuses prompt-prefix KV after a swap: the table of policies, row by row, seen from outside by `cached_tokens`.

One replica, so that every request could find what was cached. Prompts are whole blocks of 16 tokens, and each row has its own.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from recompute import Recomputer
from serving import Server, serve
from tiers import variant

from midstream.client import SnapshotPublisher, snapshot_of
from midstream.client.decode import decode_routing_matrix

# Tokens.
PROMPT = 96
ATTEMPTS = 4
Policy = str | bool | dict[str, int]
_number = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("served") / "state"
    with serve(state, "--model", str(tiny_model()), "--replicas", "1", "--no-tinker") as running:
        yield running


@pytest.fixture
def swap(server: Server, tiny_model: Callable[..., Path]) -> Iterator[Callable[[Policy | None], str]]:
    """swap(policy): a new snapshot serves when it returns. None: the signal does not say."""
    # Written before any stream.
    checkpoints = [tiny_model(seed=1), tiny_model(seed=2)]
    with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:

        def to_next(policy: Policy | None) -> str:
            number = next(_number)
            identity = f"step-{number}"
            shutil.copytree(checkpoints[number % 2], server.bucket / identity)
            body = {"identity": identity} | ({} if policy is None else {"reset_prompt_cache": policy})
            answer = httpx.post(f"{server.url}/hot_load/v1/models/hot_load", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            publisher.snapshots.wait_until_ready(identity, timeout_s=150, poll_s=0.02)
            return identity

        yield to_next


def fresh_prompt() -> list[int]:
    rng = random.Random(next(_number))
    return [rng.randrange(256) for _ in range(PROMPT)]


def cached(server: Server, prompt: list[int], session: str | None) -> int:
    """Ask for one token; how many prompt tokens came from the cache."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1}
    headers = {} if session is None else {"x-multi-turn-session-id": session}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


class Askers:
    """An old session that has cached a prompt for each kind of later request."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._names = (f"old-{next(_number)}", f"new-{next(_number)}")
        self._prompts = [fresh_prompt() for _ in range(3)]
        for prompt in self._prompts:
            assert cached(server, prompt, self._names[0]) == 0
            assert cached(server, prompt, self._names[0]) == PROMPT

    def ask(self) -> tuple[int, int, int]:
        """What the old session, a session never seen before, and a request without session find."""
        old, new = self._names
        sessions = (old, f"{new}-{next(_number)}", None)
        found = [cached(self._server, p, s) for p, s in zip(self._prompts, sessions, strict=True)]
        return found[0], found[1], found[2]


ALL, HIT = (0, 0, 0), (PROMPT, PROMPT, PROMPT)
ONLY_OLD = (PROMPT, 0, 0)

TWO_SWAPS: list[tuple[Policy, Policy, tuple[int, int, int]]] = [
    ("all", "none", ALL),
    ("new_session", "new_session", ONLY_OLD),
    ({"max_age": 1}, {"max_age": 1}, ALL),
    # The limit is that of the snapshot that serves.
    ({"max_age": 0}, "none", HIT),
]


@pytest.mark.parametrize(
    ("first", "second", "found"),
    TWO_SWAPS,
    ids=[f"{json.dumps(a)} {json.dumps(b)}" for a, b, _ in TWO_SWAPS],
)
def test_who_finds_what_after_two_swaps_in_a_row(
    server: Server, swap: Callable[..., str], first: Policy, second: Policy, found: tuple[int, int, int]
) -> None:
    askers = Askers(server)
    swap(first)
    swap(second)
    assert askers.ask() == found


def test_mixed_policies_with_requests_between_the_swaps(server: Server, swap: Callable[..., str]) -> None:
    """Three requests of one prompt: an old session's, a later session's, and one without, from swap to swap."""
    prompt, old, later = fresh_prompt(), f"old-{next(_number)}", f"later-{next(_number)}"
    assert cached(server, prompt, old) == 0
    table: list[tuple[Policy, int, int, int]] = [
        # policy, found by the old session, by the later one, without session; asked in this order
        # The later one has just cached it for those like itself.
        ("new_session", PROMPT, 0, PROMPT),
        ("none", PROMPT, PROMPT, PROMPT),
        ("new_session", PROMPT, PROMPT, 0),
        ("all", 0, PROMPT, PROMPT),
        ({"max_age": 1}, PROMPT, PROMPT, PROMPT),
        ({"max_age": 1}, 0, PROMPT, PROMPT),
        ({"max_age": 0}, 0, PROMPT, PROMPT),
        (False, PROMPT, PROMPT, PROMPT),
        (True, 0, PROMPT, PROMPT),
    ]
    for policy, *found in table:
        swap(policy)
        assert [cached(server, prompt, session) for session in (old, later, None)] == found, policy


class Stream(threading.Thread):
    """A long completion; `begun` at its first token."""

    def __init__(self, server: Server, prompt: list[int], session: str) -> None:
        super().__init__()
        self.server, self.prompt, self.session = server, prompt, session
        self.begun = threading.Event()
        self.tokens: list[int] = []
        self.labels: list[str] = []
        self.kv: list[tuple[str, int, int]] = []
        self.cached: int | None = None
        self.finish: str | None = None

    def run(self) -> None:
        body: dict[str, Any] = {
            "model": self.server.model,
            "prompt": self.prompt,
            "max_tokens": 3800,
            "ignore_eos": True,
            "stream": True,
            "logprobs": True,
            "perf_metrics_in_response": True,
        }
        headers = {"x-multi-turn-session-id": self.session}
        url = f"{self.server.url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer:
                data = b""
                # Lines of text would also be cut at U+0085 and its like.
                for received in answer.iter_bytes():
                    *events, data = (data + received).split(b"\n\n")
                    for event in events:
                        if event.startswith(b"data: {"):
                            self._take(json.loads(event.removeprefix(b"data: ")))
        finally:
            self.begun.set()

    def _take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        (choice,) = chunk["choices"]
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            self.tokens.append(entry["token_id"])
            self.labels.append(snapshot_of(chunk["model"]) or "")
            self.begun.set()
        self.kv += [
            (span["snapshot"], span["start"], span["end"]) for span in choice.get("kv_snapshots") or ()
        ]
        if chunk.get("usage"):
            self.cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.finish = choice["finish_reason"] or self.finish


# Policy, whether the next turn of its session finds what it computed.
IN_FLIGHT: list[tuple[Policy, bool]] = [
    ("all", False),
    ("none", True),
    ({"max_age": 0}, False),
    ("new_session", True),
    ({"max_age": 1}, True),
]


@pytest.mark.parametrize(
    ("policy", "found"),
    [*IN_FLIGHT[:2], *(variant(*row) for row in IN_FLIGHT[2:])],
    ids=lambda value: json.dumps(value),
)
def test_a_stream_in_flight_keeps_its_kv_and_its_next_turn_follows_the_policy(
    server: Server, swap: Callable[..., str], policy: Policy, found: bool
) -> None:
    for _ in range(ATTEMPTS):
        before = swap("all")
        prompt, session = fresh_prompt(), f"flight-{next(_number)}"
        assert cached(server, prompt, session) == 0
        stream = Stream(server, prompt, session)
        stream.start()
        stream.begun.wait()
        after = swap(policy)
        stream.join()
        assert (stream.finish, stream.cached, len(stream.tokens)) == ("length", PROMPT, 3800)
        if after in stream.labels:
            # Otherwise it ended before the swap.
            break
    crossed = stream.labels.index(after)
    assert stream.labels == [before] * crossed + [after] * (3800 - crossed)
    # The pass that gave the first new label consumed the last old token.
    at = PROMPT + crossed - 1
    assert stream.kv == [(before, 0, at), (after, at, PROMPT + 3799)], "its KV was recomputed"
    turn = prompt + stream.tokens[:1200]
    assert cached(server, turn, session) == (len(turn) // 16 * 16 if found else 0)


@pytest.mark.variant
def test_a_stream_that_began_under_an_age_limit_keeps_its_kv_beyond_it(
    server: Server, swap: Callable[..., str]
) -> None:
    for _ in range(ATTEMPTS):
        before = swap({"max_age": 0})
        stream = Stream(server, fresh_prompt(), f"flight-{next(_number)}")
        stream.start()
        stream.begun.wait()
        after = swap({"max_age": 0})
        stream.join()
        assert stream.finish == "length"
        if after in stream.labels:
            # Otherwise it ended before the swap.
            break
    assert stream.kv[0][:2] == (before, 0)
    assert stream.kv[0][2] >= PROMPT
    assert len(stream.kv) == 2


def test_the_isolation_key_and_the_cache_switch_are_beside_the_policy(
    server: Server, swap: Callable[..., str]
) -> None:
    """`none` shares with every later request, but never across isolation keys."""
    prompt = fresh_prompt()
    assert cached(server, prompt, None) == 0
    swap("none")
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "prompt_cache_isolation_key": "other"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cached(server, prompt, None) == PROMPT


def test_kv_is_told_as_it_was_computed_where_prompts_of_several_snapshots_meet(
    server: Server, swap: Callable[..., str], tiny_model: Callable[..., Path]
) -> None:
    """A prompt's beginning was computed again under younger weights: what stood on the old beginning is not found behind it."""
    prompt = [*fresh_prompt(), 1, 2, 3, 4]
    old = swap("all")
    assert cached(server, prompt, None) == 0
    young = swap({"max_age": 0})
    assert cached(server, prompt[:40], None) == 0
    now = swap("none")
    body = {"model": server.model, "prompt": prompt, "max_tokens": 20, "ignore_eos": True, "logprobs": True}
    body |= {"include_routing_matrix": True, "perf_metrics_in_response": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    (choice,) = answer.json()["choices"]
    told = [(span["snapshot"], span["start"], span["end"]) for span in choice["kv_snapshots"]]
    records = choice["logprobs"]["content"]
    seeds = {snapshot: 1 + int(snapshot.removeprefix("step-")) % 2 for snapshot in (old, young, now)}
    recomputer = Recomputer({snapshot: tiny_model(seed=seed) for snapshot, seed in seeds.items()})
    kv = [snapshot for snapshot, start, end in told for _ in range(start, end)]
    ids = prompt + [record["token_id"] for record in records[:-1]]
    made = recomputer.passes(ids, kv)
    for position, record in enumerate(records, start=len(prompt) - 1):
        assert made.logprobs[position, record["token_id"]].item() == pytest.approx(
            record["logprob"], abs=2e-4
        )
        route = decode_routing_matrix(record["routing_matrix"], top_k=2)
        assert np.sort(route).tolist() == np.sort(made.routes[position]).tolist()
    assert told == [(old, 0, 96), (now, 96, 119)]
