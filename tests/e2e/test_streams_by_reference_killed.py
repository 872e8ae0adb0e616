"""A replica is killed in the middle of streams by reference: another one goes on, and its files have every row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from serving import command, serve, words_of

from midstream.client.decode import routes_of, sampling_masks_of
from midstream.client.journal import read_records
from midstream.client.references import read_reference
from midstream.client.shared_references import read_masks, read_routes

TOKENS, UNDER_WAY = 300, 20
FORMS: tuple[dict[str, Any], ...] = (
    {"include_routing_matrix": True, "return_sampling_mask": True, "return_record_reference": True},
    {"include_routing_matrix": True, "return_sampling_mask": True, "return_record_reference": True, "n": 2},
    {"routing_matrix_format": "parquet_v1", "sampling_mask": "parquet_v1", "echo": True},
)


class Stream(threading.Thread):
    """Reads one stream to its end. under_way: is set when some of its tokens are there."""

    def __init__(self, url: str, store: str, number: int, body: dict[str, Any]) -> None:
        super().__init__()
        self._url, self._body = url, body
        self._headers = {"x-session-id": f"s-{number}", "x-fireworks-r3-store-id": store}
        self.events: list[dict[str, Any]] = []
        self.under_way, self.complete, self.replica = threading.Event(), False, ""

    def run(self) -> None:
        asked = {**self._body, "stream": True}
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=asked, headers=self._headers, timeout=300) as answer:
            self.replica = answer.headers["x-midstream-replica"]
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.complete = True
                elif line.startswith("data: "):
                    self.events.append(json.loads(line.removeprefix("data: ")))
                if len(self.events) == UNDER_WAY:
                    self.under_way.set()

    def inline(self) -> Any:
        """The same, undisturbed and in the answer."""
        own = {name for form in FORMS for name in form} - {"n", "echo"}
        body = {name: value for name, value in self._body.items() if name not in own}
        body |= {"include_routing_matrix": True, "return_sampling_mask": True, "logprobs": True}
        return httpx.post(f"{self._url}/v1/completions", json=body, timeout=300).json()["choices"]

    def tokens(self, choice: int) -> list[int]:
        own = [one for event in self.events for one in event["choices"] if one["index"] == choice]
        return [token for one in own for token in one.get("token_ids") or ()]


def rows_of(entries: list[dict[str, Any]]) -> list[Any]:
    return [np.sort(routes_of({"content": entries}, top_k=2), axis=-1), sampling_masks_of(entries)]


def check_ours(stream: Stream, store: str) -> None:
    (reference,) = [e["record_reference"] for e in stream.events if "record_reference" in e]
    for found, choice in zip(read_reference(store, reference), stream.inline(), strict=True):
        entries = choice["logprobs"]["content"]
        assert stream.tokens(found.index) == found.token_ids.tolist() == [e["token_id"] for e in entries]
        assert found.logprobs.tolist() == [entry["logprob"] for entry in entries]
        assert found.sampling_logprobs.tolist() == [entry["sampling_logprob"] for entry in entries]
        routes, masks = rows_of(entries)
        assert np.array_equal(found.routes, routes.reshape(np.shape(found.routes)))
        own = found.sampling_masks()
        assert (own.ids.tolist(), own.offsets.tolist()) == (masks.ids.tolist(), masks.offsets.tolist())


def check_shared(stream: Stream) -> None:
    (choice,) = [c for e in stream.events for c in e["choices"] if "routing_references" in c]
    (inline,) = stream.inline()
    entries = inline["logprobs"]["content"]
    routes, known = read_routes(choice["routing_references"])
    assert known.tolist() == [False, *[True] * (len(entries) - 1)]
    expected, masks = rows_of(entries[1:])[0], rows_of(entries[-TOKENS:])[1]
    assert np.array_equal(routes[1:], expected.reshape(np.shape(routes[1:])))
    own, drawn = read_masks(choice["sampling_mask_references"])
    assert (own.ids.tolist(), drawn.all()) == (masks.ids.tolist(), True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_row_of_a_killed_stream_is_lost_or_comes_twice(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    store, model = (tmp_path / "kept").as_uri(), tiny_model()
    options = ("--model", str(model), "--replicas", "2", "--records", store, "--no-tinker")
    with serve(tmp_path / "state", *options) as server:
        fixed = {"model": server.model, "max_tokens": TOKENS, "top_p": 0.9, "logprobs": True}
        fixed |= {"ignore_eos": True, "return_token_ids": True}
        streams = [
            Stream(server.url, store, number, {**fixed, "prompt": [5 + number] * 40, "seed": number, **form})
            for number, form in enumerate(FORMS * 2)
        ]
        for stream in streams:
            stream.start()
        for stream in streams:
            assert stream.under_way.wait(120)
        victim = streams[0].replica
        (pid,) = [pid for pid in server.children() if victim in words_of(pid)]
        os.kill(pid, signal.SIGKILL)
        for stream in streams:
            stream.join()
        assert all(stream.complete for stream in streams), [stream.events[-1] for stream in streams]
        seams = [
            e["midstream"]["resumed"]
            for s in streams
            for e in s.events
            if "resumed" in e.get("midstream", {})
        ]
        assert seams
        assert all(seam["exact"] and sum(seam["tokens"]) for seam in seams)
        for stream in streams:
            if any("record_reference" in event for event in stream.events):
                check_ours(stream, store)
            else:
                check_shared(stream)
        assert server.stop() == 0
    turns = [record for record in read_records(store) if record["kind"] == "turn"]
    for number, stream in enumerate(streams):
        own = [turn["turn"]["token_ids"] for turn in turns if turn["session"] == f"s-{number}"]
        assert sorted(own) == sorted(stream.tokens(index) for index in range(len(own)))
        assert len(own) == FORMS[number % len(FORMS)].get("n", 1)
    (tmp_path / "snapshots").mkdir()
    arguments = [store, "--bucket", (tmp_path / "snapshots").as_uri(), "--base", str(model)]
    done = subprocess.run(command("verify", *arguments), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
