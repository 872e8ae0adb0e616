"""vLLM's own trainer classes write weights into two real vLLM servers, under streams, by a backend in vLLM's own factory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm_bed import Bed, load, until
from vllm_streams import Stream, coming, expected_logprobs, kept_up, under_way

SOURCE = Path(__file__).parents[2] / "src"
TRAINER = Path(__file__).with_name("push_trainer.py")
STREAMS, TOKENS = 6, (150, 400)
# Nats, in float32: what was measured is 6e-6; another weight or token makes 0.1.
TOLERANCE = 1e-4
#: Of two servers at once, on a busy machine.
RESTART_S = 500.0
#: So that a trainer that dies has sent some.
PIECE_BYTES = 20_000


class Trainer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, order: str, **arguments: Any) -> dict[str, Any]:
        """Its answer; {"died": True} if it dies instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"order": order, **arguments}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("{"):
            if not line:
                return {"died": True}
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def trainer(python: Path, url: str) -> Iterator[Trainer]:
    """In a group with the servers."""
    process = subprocess.Popen(
        [str(python), str(TRAINER), url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    try:
        made = Trainer(process)
        made.answer()
        answer = made.ask("init", rank=0, packed_buffer_size_bytes=PIECE_BYTES)
        assert "error" not in answer, answer
        yield made
    finally:
        process.kill()
        process.communicate()


class Lost(Stream):
    """A stream that may end loudly, or be refused, while no replica serves."""

    async def run(self, http: httpx.AsyncClient, model: str, moved: Callable[[], None]) -> None:
        try:
            await super().run(http, model, moved)
        except (httpx.HTTPError, AssertionError) as error:
            self.error = error
            # Not all the next ones at once.
            await asyncio.sleep(0.2)


def losing(name: str) -> Iterator[Stream]:
    for stream in coming(name, TOKENS):
        yield Lost(stream.prompt, stream.max_tokens, stream.session, stream.seed)


@pytest.fixture(scope="module")
def one(weights: Callable[[int], Path]) -> Path:
    return weights(1)


def test_two_servers_take_weights_in_place_under_streams_and_survive_a_trainer_that_dies(
    in_place_bed: Bed, vllm_python: Path, checkpoint: Path, one: Path
) -> None:
    bed = in_place_bed
    models = {"base": load(checkpoint), "step-1": load(one)}
    models["again"] = models["base"]
    ran: dict[str, list[Stream]] = {}

    def streams(name: str, happen: Callable[[], Any], sessions: Iterator[Stream]) -> None:
        ran[name] = asyncio.run(kept_up(bed.server.url, bed.model, sessions, STREAMS, happen))

    with trainer(vllm_python, bed.server.url) as writing:
        answers: list[dict[str, Any]] = []

        def send() -> None:
            answers.append(writing.ask("send", directory=str(one), weight_version="step-1"))

        streams("push", send, coming("push", TOKENS))
    assert answers == [{}]
    assert all(stream.whole for stream in ran["push"])
    crossed = [stream for stream in ran["push"] if stream.labels == ["base", "step-1"]]
    assert {stream.replica for stream in crossed} == {"replica-0", "replica-1"}
    file = bed.server.bucket / "step-1" / "model.safetensors"
    until(file.exists, lambda: list(bed.server.bucket.iterdir()))

    killed = servers(bed)
    with trainer(vllm_python, bed.server.url) as dying:
        half = len(models["base"].state_dict()) // 2

        def die() -> None:
            answer = dying.ask("send", directory=str(checkpoint), weight_version="mixed", dies_after=half)
            assert answer == {"died": True}
            until(lambda: not killed & servers(bed), lambda: health(bed))

        streams("death", die, losing("death"))
    until(lambda: serving(bed) == {"step-1"}, lambda: health(bed), RESTART_S)
    # Those that were there then end loudly, or continue. Nobody saw a token of mixed weights.
    assert any(stream.error for stream in ran["death"])
    assert {label for stream in ran["death"] for label in stream.labels} == {"step-1"}

    with trainer(vllm_python, bed.server.url) as living:
        assert living.ask("send", directory=str(checkpoint), weight_version="again") == {}
    last = Stream([65, 66, 67], 20, "last")
    asyncio.run(under_way(bed.server.url, bed.model, [last], 1, lambda: None))
    assert (last.whole, last.labels) == (True, ["again"])
    for stream in (*ran["push"], *ran["death"], last):
        if stream.tokens:
            expected = expected_logprobs(stream, models)
            found = [logprob for _, logprob, _ in stream.tokens]
            assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= TOLERANCE, stream.session


def health(bed: Bed) -> Any:
    with bed.http() as http:
        return http.get("/health").json()


def serving(bed: Bed) -> set[str]:
    """What the replicas serve; "" for one that serves nothing."""
    return {one["snapshot"] if one["ready"] else "" for one in health(bed)["replicas"]}


def servers(bed: Bed) -> set[int]:
    """Those that run."""
    found = set()
    for number in range(2):
        with contextlib.suppress(AssertionError):
            found.add(bed.process_of(f"replica-{number}", "api_server"))
    return found
