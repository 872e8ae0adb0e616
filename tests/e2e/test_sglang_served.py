"""`midstream serve --engine sglang`: gateway and replica before a server that speaks SGLang's API (fake_sglang.py)."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_sglang import FakeSglang, in_a_thread, logprobs_of, weights_of
from serving import Server, serve

from midstream.client import SnapshotPublisher

HELD = 5


class Chat(threading.Thread):
    """One chat that is read as it comes: of each token its id, log-probability and label."""

    def __init__(self, server: Server, max_tokens: int, leaves_at: int | None = None) -> None:
        super().__init__()
        self.tokens: list[tuple[int, float, str]] = []
        self.finish = ""
        self._leaves_at = leaves_at
        self._url = f"{server.url}/v1/chat/completions"
        self._body = {
            "model": server.model,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": max_tokens,
            "stream": True,
            "logprobs": True,
            "ignore_eos": True,
        }

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line[6:]))
                if len(self.tokens) == self._leaves_at:
                    return

    def _take(self, chunk: dict[str, Any]) -> None:
        label = chunk["model"].partition("@")[2]
        for choice in chunk["choices"]:
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                self.tokens.append((entry["token_id"], entry["logprob"], label))
            self.finish = choice["finish_reason"] or self.finish


def until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Stand:
    def __init__(self, fake: FakeSglang, loop: Any, server: Server, model: Path) -> None:
        self.fake, self.server, self.model = fake, server, model
        self._loop = loop

    def hold(self, at: int | None) -> None:
        def change() -> None:
            self.fake.hold_at = at
            if at is None:
                self.fake.go.set()
            else:
                self.fake.go.clear()

        self._loop.call_soon_threadsafe(change)
        until(lambda: self.fake.hold_at == at)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Stand]:
    model, place = tiny_model(), tmp_path_factory.mktemp("sglang")
    with in_a_thread(model) as (fake, loop):
        arguments = ("--model", str(model), "--replicas", "1", "--engine", "sglang", "--sglang-url", fake.url)
        with serve(place / "state", *arguments) as server:
            yield Stand(fake, loop, server, model)


def test_a_chat_crosses_a_hot_load_and_each_token_is_that_of_its_label(
    stand: Stand, tiny_model: Callable[..., Path]
) -> None:
    server, fake = stand.server, stand.fake
    stand.hold(HELD)
    chat = Chat(server, 12)
    chat.start()
    until(lambda: len(chat.tokens) == HELD)
    prompt = next(body["input_ids"] for path, body in reversed(fake.calls) if path == "/generate")
    checkpoint = tiny_model(seed=1)
    shutil.copytree(checkpoint, server.bucket / "step-1")
    with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
        publisher.snapshots.signal("step-1")
        publisher.snapshots.wait_until_ready("step-1", timeout_s=120)
    assert len(chat.tokens) == HELD, "it stood still meanwhile"
    stand.hold(None)
    chat.join(120)
    assert chat.finish == "length"
    assert [label for _, _, label in chat.tokens] == ["base"] * HELD + ["step-1"] * 7
    weights = {"base": weights_of(stand.model), "step-1": weights_of(checkpoint)}
    made = [(token, weights[label]) for token, _, label in chat.tokens]
    expected = logprobs_of(prompt, made, fake.vocab)
    assert [logprob for _, logprob, _ in chat.tokens] == pytest.approx(expected, abs=1e-4)


def test_a_chat_that_its_client_leaves_ends_at_the_server(stand: Stand) -> None:
    stand.hold(3)
    chat = Chat(stand.server, 200, leaves_at=3)
    chat.start()
    chat.join(120)
    assert len(chat.tokens) == 3
    name = next(body["rid"] for path, body in reversed(stand.fake.calls) if path == "/generate")
    until(lambda: name in stand.fake.aborted and not stand.fake.running)
    stand.hold(None)


def test_what_it_lacks_is_shown_and_refused_with_the_reason(stand: Stand) -> None:
    (model,) = httpx.get(f"{stand.server.url}/v1/models").json()["data"]
    engine = model["midstream"]["engine"]
    assert (engine["kind"], engine["version"]) == ("sglang", "0.5.23")
    assert "full_snapshots" in engine["features"]
    asked = {"model": stand.server.model, "prompt": "Hello", "max_tokens": 2, "logprobs": True}
    for field, value, feature in (
        ("min_tokens", 1, "token_limits"),
        ("return_sampling_mask", True, "sampling_masks"),
    ):
        answer = httpx.post(f"{stand.server.url}/v1/completions", json=asked | {field: value})
        assert answer.status_code == 400
        assert f"(feature {feature})" in answer.text
        assert engine["why"][feature] in answer.json()["error"]["message"]
    answer = httpx.post(f"{stand.server.url}/v1/completions", json=asked | {"repetition_penalty": 1.1})
    assert answer.status_code == 400
    assert "does not count the tokens of the prompt" in answer.text


def test_a_bias_changes_the_draw_and_no_number(stand: Stand) -> None:
    asked = {"model": stand.server.model, "prompt": "Hello", "max_tokens": 3, "logprobs": True}
    answer = httpx.post(f"{stand.server.url}/v1/completions", json=asked | {"logit_bias": {"5": 100.0}})
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]["logprobs"]["content"]
    assert [token["token_id"] for token in found] == [5, 5, 5]
    prompt = next(body["input_ids"] for path, body in reversed(stand.fake.calls) if path == "/generate")
    expected = logprobs_of(prompt, [(5, stand.fake.weights)] * 3, stand.fake.vocab)
    assert [token["logprob"] for token in found] == pytest.approx(expected, abs=1e-5)
