"""Processes of a server are killed while record files are written: an answer that a client has names files that are whole."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server, serve, words_of
from test_gateway_workers import until
from tiers import of_tier

from midstream.client.journal import read_records
from midstream.client.references import read_reference
from midstream.client.shared_references import read_masks, read_routes
from midstream.core.record_files import is_file_name

#: What is killed, by a word of its command line.
VICTIMS = ("midstream.launch.replica", "midstream.engine.embedded.loop", "midstream.launch.gateway")
CLIENTS = 4
FORMS: tuple[dict[str, Any], ...] = (
    {"include_routing_matrix": True, "return_sampling_mask": True, "return_record_reference": True},
    {"routing_matrix_format": "parquet_v1", "sampling_mask": "parquet_v1", "echo": True},
)


class Clients:
    """Ask by turns in both forms, in sessions of their own, and keep each answer that came whole."""

    def __init__(self, server: Server, store: str) -> None:
        self._url, self._model, self._store = server.url, server.model, store
        self.answers: list[dict[str, Any]] = []
        self.failed = 0
        self._more, self._stopping = threading.Condition(), threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def until(self, count: int) -> None:
        """So many answers more are there."""
        with self._more:
            wanted = len(self.answers) + count
            assert self._more.wait_for(lambda: len(self.answers) >= wanted, timeout=150)

    def _ask(self, number: int) -> None:
        turn = 0
        while not self._stopping.is_set():
            turn += 1
            # No request twice: one that was there when replicas were lost is refused.
            prompt = [*[5 + number] * 38, turn % 250, turn // 250]
            body = {"model": self._model, "prompt": prompt, "max_tokens": 24, "logprobs": True}
            body |= {"return_token_ids": True, "top_p": 0.9, "ignore_eos": True, **FORMS[turn % len(FORMS)]}
            headers = {"x-session-id": f"s-{number}", "x-fireworks-r3-store-id": self._store}
            try:
                said = httpx.post(f"{self._url}/v1/completions", json=body, headers=headers, timeout=60)
            except httpx.TransportError:
                self.failed += 1
                # The gateway is not there yet.
                self._stopping.wait(0.05)
                continue
            if said.status_code != 200:
                self.failed += 1
                self._stopping.wait(0.05)
                continue
            with self._more:
                self.answers.append(said.json())
                self._more.notify_all()


def kill_one(server: Server, draw: random.Random) -> str:
    """Kills one that runs."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        victim = draw.choice(VICTIMS)
        for pid in server.children():
            if victim in words_of(pid):
                os.kill(pid, signal.SIGKILL)
                return victim
    raise AssertionError("there is nothing to kill")


def check(answer: dict[str, Any], url: str) -> None:
    (choice,) = answer["choices"]
    if "record_reference" in answer:
        (found,) = read_reference(url, answer["record_reference"])
        assert found.token_ids.tolist() == choice["token_ids"]
        assert found.routes is not None
        assert len(found.sampling_masks().offsets) == len(choice["token_ids"]) + 1
        return
    routes, known = read_routes(choice["routing_references"])
    assert len(routes) == len(choice["logprobs"]["content"]) == 40 + 24
    assert known.tolist() == [False, *[True] * (len(routes) - 1)]
    masks, drawn = read_masks(choice["sampling_mask_references"])
    assert drawn.all()
    for at, token in enumerate(choice["token_ids"]):
        assert token in masks.row(at) or not len(masks.row(at))


@pytest.mark.variant
@pytest.mark.timeout(1800)
def test_no_file_of_an_answer_is_lost_or_half_written(tmp_path: Path) -> None:
    """KILLS and SEED of the environment are for longer runs."""
    kills = int(os.environ.get("KILLS", of_tier(fast=1, test=2, all=6)))
    draw, url = random.Random(int(os.environ.get("SEED", 0))), (tmp_path / "kept").as_uri()
    with serve(tmp_path / "state", "--replicas", "2", "--records", url) as server:
        clients = Clients(server, url)
        clients.start()
        try:
            killed = []
            for _ in range(kills):
                clients.until(draw.randrange(1, 12))
                killed.append(kill_one(server, draw))
            clients.until(1)
            # Replicas take their journals there by turns; on a quick machine all kills were over before.
            until(lambda: (tmp_path / "kept" / "records").is_dir())
        finally:
            clients.stop()
        # The rest at once, and nobody writes what is still to come.
        for pid in server.children():
            os.kill(pid, signal.SIGKILL)
    print(f"killed {len(killed)}, answers {len(clients.answers)}, failed {clients.failed}")
    for answer in clients.answers:
        check(answer, url)
    for path in (tmp_path / "kept" / "record-files" / "default").iterdir():
        if is_file_name(path.name):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
        else:
            assert path.name.startswith("writing-")
    turns = [record["turn"] for record in read_records(url) if record["kind"] == "turn"]
    assert all(len(turn["routing_matrix"]) == len(turn["token_ids"]) for turn in turns)
