"""`--swap-order one-by-one` with sync transitions: real replicas switch in turn, and somebody always takes requests."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import serve

from midstream.client import SnapshotPublisher

REPLICAS = 2


@pytest.mark.variant
def test_one_replica_at_a_time_is_closed_and_their_weights_agree(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    options = ("--replicas", str(REPLICAS), "--transition", "sync", "--swap-order", "one-by-one")
    with serve(tmp_path / "state", *options) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        stop = threading.Event()
        statuses: list[int] = []

        def ask() -> None:
            body = {"model": server.model, "prompt": [1, 2, 3], "max_tokens": 4, "seed": 1}
            with httpx.Client(base_url=server.url, timeout=60) as mine:
                while not stop.is_set():
                    # A door may close while a request is on its way to it.
                    for _ in range(20):
                        statuses.append(mine.post("/v1/completions", json=body).status_code)
                        if statuses[-1] != 425:
                            break
                    else:
                        statuses.append(-1)

        asking = [threading.Thread(target=ask) for _ in range(3)]
        for thread in asking:
            thread.start()
        try:
            with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
                for step in range(1, 3):
                    shutil.copytree(tiny_model(seed=step, dtype="bfloat16"), server.bucket / f"step-{step}")
                    publisher.snapshots.signal(f"step-{step}")
                    publisher.snapshots.wait_until_ready(f"step-{step}", timeout_s=150)
        finally:
            stop.set()
            for thread in asking:
                thread.join()
        assert set(statuses) <= {200, 425}, "somebody always takes requests"
        ledger = _complete_ledger(http, f"/v1/{server.deployment}/ledger")
        assert ledger["disagreements"] == []
        for snapshot in ledger["snapshots"]:
            spans = sorted(_switch(snapshot, f"replica-{i}") for i in range(REPLICAS))
            assert spans[0][1] <= spans[1][0], f"both switched at once: {spans}"


def _complete_ledger(http: httpx.Client, path: str) -> dict[str, Any]:
    """The ledger once it has the end of each switch: a replica's report is told before it is stored."""
    deadline = time.monotonic() + 150
    while True:
        ledger: dict[str, Any] = http.get(path).json()
        ends = [
            moved for one in ledger["snapshots"] for moved in one["transitions"] if moved["stage"] == "idle"
        ]
        if len(ends) == 2 * REPLICAS:
            return ledger
        assert time.monotonic() < deadline, ledger
        time.sleep(0.05)


def _switch(snapshot: dict[str, Any], replica: str) -> tuple[float, float]:
    """From the commit to the end of the check."""
    at = {t["stage"]: float(t["at"]) for t in snapshot["transitions"] if t["replica"].endswith(replica)}
    return at["committing"], at["idle"]
