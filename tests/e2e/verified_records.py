"""Records of a real server whose weights changed under its sessions, for the tests of `midstream verify`."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from policy_helpers import Adapters, load
from serving import Server, serve

from midstream.client import SnapshotPublisher
from midstream.snapshots.arc2.encode import encode_delta

CROSSING_TOKENS = 3000
ATTEMPTS = 4


@dataclass(frozen=True)
class Kept:
    """records: the URL of --records. base: the model of the start."""

    records: str
    bucket: Path
    base: Path


class Rollouts:
    def __init__(self, server: Server, make: Callable[..., Path]) -> None:
        self.server, self._make = server, make
        self.random = random.Random(0)
        self.said: dict[str, list[int]] = {}

    def turn(self, session: str, tokens: int = 12, model: str | None = None, **more: Any) -> dict[str, Any]:
        """The session's next turn, behind its first choice."""
        added = [self.random.randrange(2, 250) for _ in range(20)]
        prompt = self.said.get(session, []) + added
        body = {
            "model": model or self.server.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "seed": self.random.randrange(2**20),
            "return_token_ids": True,
            **more,
        }
        headers = {"x-multi-turn-session-id": session, "x-midstream-records": "routes"}
        answer = httpx.post(f"{self.server.url}/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        self.said[session] = prompt + found["choices"][0]["token_ids"]
        return found

    def crossing(self, session: str) -> threading.Thread:
        """A turn that runs while the next swap comes."""
        begun = threading.Event()
        prompt = [self.random.randrange(2, 250) for _ in range(40)]
        body = {
            "model": self.server.model,
            "prompt": prompt,
            "max_tokens": CROSSING_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "seed": 5,
            "return_token_ids": True,
        }
        headers = {"x-multi-turn-session-id": session, "x-midstream-records": "routes"}
        labels: set[str] = set()

        def read() -> None:
            url = f"{self.server.url}/v1/completions"
            with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        labels.add(json.loads(line[6:])["model"])
                        begun.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        self.labels = labels
        return thread

    def swap(
        self, publisher: SnapshotPublisher, name: str, policy: Any, whole: Path, old: Any = None
    ) -> None:
        """old: (name, checkpoint) of the snapshot that it is a delta of."""
        body = {"identity": name, "reset_prompt_cache": policy}
        place = self.server.bucket / name
        if old is None:
            shutil.copytree(whole, place)
        else:
            encode_delta(old[1], whole, place, "arc_v2")
            body["incremental_snapshot_metadata"] = {
                "previous_snapshot_identity": old[0],
                "compression_format": "arc_v2",
                "checksum_format": "alder32",
            }
        answer = httpx.post(f"{self.server.url}/hot_load/v1/models/hot_load", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        publisher.snapshots.wait_until_ready(name, timeout_s=150, poll_s=0.02)


def make_records(place: Path, make: Callable[..., Path]) -> Kept:
    """Sessions over three swaps with different cache policies, and a policy whose adapter changes."""
    url, base = (place / "kept").as_uri(), make()
    config = place / "config.toml"
    config.write_text("[embedded]\nrouter_weights = true\n")
    options = (
        "--model",
        str(base),
        "--replicas",
        "1",
        "--no-tinker",
        "--records",
        url,
        "--config",
        str(config),
    )
    with serve(place / "state", *options) as server:
        made = Rollouts(server, make)
        adapters = Adapters(base)
        with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
            _play(made, publisher, adapters, make)
        assert server.stop() == 0
    return Kept(url, server.bucket, base)


def _play(
    made: Rollouts, publisher: SnapshotPublisher, adapters: Adapters, make: Callable[..., Path]
) -> None:
    server = made.server
    for session in ("a", "b"):
        made.turn(session)
        made.turn(session, n=2)
    for attempt in range(ATTEMPTS):
        thread = made.crossing(f"crossing-{attempt}")
        made.swap(publisher, f"step-1-{attempt}", "none", make(seed=1 + attempt % 2))
        thread.join()
        if len(made.labels) > 1:
            break
    assert len(made.labels) > 1, "no stream crossed a swap"
    for session in ("a", "b", "c"):
        made.turn(session)
        made.turn(session, n=2)
    made.swap(publisher, "step-2", "new_session", make(seed=3))
    # The old one reuses its KV, the new one does not.
    for session in ("a", "d", "c"):
        made.turn(session)
        made.turn(session)
    made.swap(publisher, "step-3", "all", make(seed=4), ("step-2", make(seed=3)))
    for session in ("a", "b", "e"):
        made.turn(session)
        made.turn(session, temperature=0)
    # Filters, and an answer that a stop string ends.
    made.turn("f", temperature=0.8, top_p=0.9, logprobs=True, return_sampling_mask=True)
    made.turn("f", tokens=200, stop=["a", "e", "i", "o"])
    # Router weights, in the record itself and in a file.
    weights = {"logprobs": True, "include_routing_matrix": True, "return_router_weights": True}
    made.turn("w", **weights)
    made.turn("w", **weights, return_record_reference=True)
    adapters.put(server, "v1", 1)
    adapters.put(server, "v2", 2)
    load(server, "v1", "team")
    for session in ("p", "q"):
        made.turn(session, model="team")
        made.turn(session, model="team")
    load(server, "v2", "team")
    for session in ("p", "r"):
        made.turn(session, model="team")
        made.turn(session, model="team")
