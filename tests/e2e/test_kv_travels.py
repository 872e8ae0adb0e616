"""Two real replicas, one of which is drained: a session's next turn finds at its new home what it would have found before."""

from __future__ import annotations

import contextlib
import io
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from serving import Server, serve

from midstream.cli import main
from midstream.client import SnapshotPublisher
from midstream.core.types import BASE_SNAPSHOT

#: Computing it takes long enough for a copy to be worth it.
BEGIN, ADDED = 1500, 40
#: On a machine that stands still for long, a copy is given up and the history is computed.
ROUNDS = 6


class Session:
    def __init__(self, server: Server, key: str, seed: int) -> None:
        self.server, self.key, self.random = server, key, random.Random(seed)
        self.history: list[int] = []

    def turn(self) -> dict[str, Any]:
        """What is said of its next turn."""
        self.history += [self.random.randrange(2, 250) for _ in range(ADDED if self.history else BEGIN)]
        body = {
            "model": self.server.model,
            "prompt": self.history,
            "max_tokens": 12,
            "seed": len(self.history),
            "temperature": 0.8,
            "top_p": 0.9,
            "ignore_eos": True,
            "logprobs": True,
            "include_routing_matrix": True,
            "return_sampling_mask": True,
            "perf_metrics_in_response": True,
            "return_token_ids": True,
            "prompt_cache_isolation_key": self.key,
        }
        headers = {"x-multi-turn-session-id": self.key, "x-midstream-expected-tokens": "10"}
        answer = httpx.post(f"{self.server.url}/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        shown = answer.json()
        (choice,) = shown["choices"]
        self.history += choice["token_ids"]
        return {
            "replica": answer.headers["x-midstream-replica"],
            "cached": shown["usage"]["prompt_tokens_details"]["cached_tokens"],
            "kv": choice["kv_snapshots"],
            "records": choice["logprobs"]["content"],
        }

    def end(self) -> None:
        httpx.delete(f"{self.server.url}/v1/sessions/{self.key}", timeout=60)


def drained(server: Server, name: str, *, drain: bool) -> None:
    url = f"{server.url}/v1/{server.deployment}/replicas"
    answer = httpx.patch(f"{url}/{name}", json={"drain": drain}, timeout=60)
    assert answer.status_code == 200, answer.text
    end = time.monotonic() + 60
    while True:
        shown = httpx.get(url, timeout=60).json()["replicas"]
        if next(one for one in shown if one["name"] == name)["usable"] is not drain:
            return
        assert time.monotonic() < end, f"{name} did not become what it was asked to be"
        time.sleep(0.05)


def swap(server: Server, publisher: SnapshotPublisher, name: str, whole: Path, reset: str) -> None:
    shutil.copytree(whole, server.bucket / name)
    body = {"identity": name, "reset_prompt_cache": reset}
    answer = httpx.post(f"{server.url}/hot_load/v1/models/hot_load", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    publisher.snapshots.wait_until_ready(name, timeout_s=150, poll_s=0.02)


def moved(server: Server, number: int, between: Callable[[], None]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The third turns of two equal sessions: one stays, and the home of the other is drained. between: before their second."""
    drained(server, "replica-1", drain=True)
    stays, moves = (Session(server, f"{name}-{number}", number) for name in ("stays", "moves"))
    for one in (stays, moves):
        assert one.turn()["replica"] == "replica-0"
    drained(server, "replica-1", drain=False)
    between()
    for one in (stays, moves):
        one.turn()
    expected = stays.turn()
    drained(server, "replica-0", drain=True)
    found = moves.turn()
    drained(server, "replica-0", drain=False)
    for one in (stays, moves):
        one.end()
    assert (expected.pop("replica"), found.pop("replica")) == ("replica-0", "replica-1")
    return expected, found


def test_a_session_of_a_drained_replica_is_copied_and_its_records_are_those_of_one_that_stays(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    config, records, base = tmp_path / "c.toml", (tmp_path / "kept").as_uri(), tiny_model()
    config.write_text("[embedded]\nkv_cache_tokens = 32768\nthreads = 1\nspare_after_s = 0\n")
    options = ("--model", str(base), "--replicas", "2", "--no-tinker", "--records", records)
    with serve(tmp_path / "state", *options, "--config", str(config)) as server:
        with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
            swapped: list[str] = []

            def swaps() -> None:
                swapped.append(f"step-{len(swapped)}")
                swap(server, publisher, swapped[-1], tiny_model(seed=1 + len(swapped) % 2), "none")

            for number in range(ROUNDS):
                expected, found = moved(server, number, swaps)
                if found["cached"] == expected["cached"]:
                    break
            assert found == expected, "its KV is that of the old home, and so is all that is said of it"
            before = swapped[-2] if len(swapped) > 1 else BASE_SNAPSHOT
            assert {span["snapshot"] for span in found["kv"]} == {before, swapped[-1]}
            came = re.search(
                r'kv_travelled_tokens_total\{replica="replica-1"\} (\S+)',
                httpx.get(f"{server.url}/metrics", timeout=60).text,
            )
            assert came is not None
            assert float(came[1]) >= BEGIN - 16

            # What a swap ended is found nowhere.
            gone = Session(server, "gone", 99)
            home = gone.turn()["replica"]
            swap(server, publisher, "last", tiny_model(seed=4), "all")
            drained(server, home, drain=True)
            after = gone.turn()
            assert (after["replica"] != home, after["cached"]) == (True, 0)
            assert {span["snapshot"] for span in after["kv"]} == {"last"}
            drained(server, home, drain=False)
        assert server.stop() == 0
        bucket = server.bucket.as_uri()
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(["verify", records, "--bucket", bucket, "--base", str(base)])
    assert (code, errors.getvalue()) == (0, ""), out.getvalue() + errors.getvalue()
