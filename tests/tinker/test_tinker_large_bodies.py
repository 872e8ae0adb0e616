"""Bodies that take long to read: where they are read, how many parts they have, and what their neighbours see meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from test_tinker_app import KEY, SAMPLE, Front, Played, play
from training_fakes import BASE, World, world

from midstream.core.beside import stepwise_json
from midstream.http.auth import Authenticator, tenant_of
from midstream_tinker import codec, messages, types
from midstream_tinker.answers import SampledSequence, Samples
from midstream_tinker.app import tinker_app
from midstream_tinker.futures import PROTOBUF
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.types import SampleBody, Served, decode

DATUM = b"\x1a\x00"
#: What the SDK sends together: 1024 datums or 5 MB.
SDK_DATUMS = 1024
#: More chunks than a rollout of many turns has, and more tensors than any loss takes.
CHUNKS, TENSORS = 32, 12


def datums(count: int, chunks: int = 1, tensors: int = 1, items: int = 2, values: int | None = None) -> bytes:
    """values: of each tensor; None: as many as tokens of a chunk."""
    message = messages.ForwardBackwardRequest(model_id="known", seq_id=1, loss_fn="cross_entropy")
    for _ in range(count):
        datum = message.data.add()
        for _ in range(chunks):
            datum.model_input.add().encoded_text.tokens = np.arange(items, dtype="<i4").tobytes()
        for number in range(tensors):
            tensor = datum.loss_fn_inputs[f"input-{number}"]
            tensor.dtype, tensor.dense = codec.FLOAT32, bytes(4 * (items if values is None else values))
    return bytes(message.SerializeToString())


def test_a_million_empty_parts_are_refused_after_as_many_as_a_batch_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = 0
    fields = codec.fields

    def counted(*given: Any) -> Any:
        nonlocal seen
        for field in fields(*given):
            seen += 1
            yield field

    monkeypatch.setattr(codec, "fields", counted)
    with pytest.raises(TinkerRefusal, match="more than 65536 datums and inputs") as caught:
        codec.forward_backward(datums(1) + DATUM * 1_000_000)
    assert (caught.value.status, caught.value.param) == (400, "data")
    assert seen <= 65_536 + 1


def test_the_largest_batch_of_the_sdk_is_taken() -> None:
    read = codec.forward_backward(datums(SDK_DATUMS, CHUNKS, TENSORS))
    assert len(read.data) == SDK_DATUMS
    assert read.data[-1].tokens == (0, 1) * CHUNKS
    assert sorted(read.data[-1].inputs) == sorted(f"input-{number}" for number in range(TENSORS))


def test_a_datum_of_more_tokens_than_any_context_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_TOKENS", 8)
    assert len(codec.forward_backward(datums(2, items=4)).data) == 2
    with pytest.raises(TinkerRefusal, match="more than 8 tokens") as caught:
        codec.forward_backward(datums(3, items=4))
    assert caught.value.param == "data[2].model_input"


def test_datums_and_fields_may_come_in_any_order() -> None:
    """Readers of protobuf take the last value of a field, wherever it stands among the datums."""
    one, other = datums(1, items=3), datums(2, items=4)
    late = messages.ForwardBackwardRequest(model_id="late", seq_id=9, forward_only=True).SerializeToString()
    read = codec.forward_backward(one + other + late)
    assert (read.model_id, read.seq_id, read.forward_only) == ("late", 9, True)
    assert [len(datum.tokens) for datum in read.data] == [3, 4, 4]


class Threads:
    """Which threads a function ran on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.seen: list[int] = []
        real = getattr(module, name)

        def spied(*given: Any, **named: Any) -> Any:
            self.seen.append(threading.get_ident())
            return real(*given, **named)

        monkeypatch.setattr(module, name, spied)

    def beside(self) -> bool:
        """Whether it ran, and never on this thread, which is the event loop's."""
        return bool(self.seen) and threading.get_ident() not in self.seen


def proto(body: bytes) -> dict[str, Any]:
    return {"content": body, "headers": {"content-type": PROTOBUF}}


async def test_a_training_request_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one too: its sparse tensors may be large."""
    walked, read = Threads(monkeypatch, codec, "fields"), Threads(monkeypatch, codec, "read_request")

    async with play() as front:
        url = "/api/v1/forward_backward"
        assert (await front.client.post(url, **proto(datums(1)))).json()["model_id"] == "known"
        assert walked.beside()
        assert (await front.client.post(url, **proto(datums(4000)))).json()["model_id"] == "known"
        assert walked.beside()
        assert read.beside()
        # Who it was from is read there, too, when it is refused.
        walked.seen.clear()
        refused = await front.client.post(url, **proto(datums(1) + DATUM * 50_000))
        assert (
            "data[1].model_input has no tokens" in (await front.retrieve(refused.json()["request_id"])).text
        )
        assert walked.beside()


async def test_the_routes_of_one_long_datum_are_taken() -> None:
    """12,000 tokens through 48 layers of 8 experts, as 64-bit integers."""
    body = datums(1, values=12_000 * 48 * 8 * 2)

    async def test(front: Front) -> None:
        answer = await front.client.post("/api/v1/forward_backward", **proto(body))
        assert (answer.status_code, answer.json()["model_id"]) == (200, "known")

    assert len(body) > 36_000_000
    async with play() as front:
        await test(front)


@pytest.mark.parametrize("path", ["asample", "create_session", "forward_backward"])
async def test_a_large_body_in_json_is_read_beside_the_loop(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Threads(monkeypatch, types, "refuse_unknown")
    tokens = list(range(20_000))
    chunks = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    datum = {"model_input": chunks, "loss_fn_inputs": {}}
    bodies: dict[str, Any] = {
        "asample": SAMPLE | {"prompt": chunks},
        "create_session": {"x": tokens},
        "forward_backward": {
            "model_id": "known",
            "seq_id": 1,
            "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"},
        },
    }

    async with play() as front:
        answered = await front.post(path, bodies[path])
        assert answered.status_code == 200, answered.text
        assert read.beside()


def test_a_small_request_that_overtakes_a_large_one_still_waits_for_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large one is not read before the small one behind it was accepted."""

    async def main() -> None:
        async with world(tmp_path) as made, served(made) as client:
            model_id = await new_model(made, client)
            large, may_go_on = await held_pass(client, model_id, monkeypatch)
            step = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.5}}
            small = await submitted(client, "optim_step", json=step)
            assert not large.done()
            may_go_on.set()
            for request_id in (await large, small):
                await made.ended(request_id, tenant_of(KEY))
            assert made.trainer.weights[model_id] == ["loss 1", "step 0.5"]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_finish_that_overtakes_a_large_request_waits_until_it_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with world(tmp_path) as made, served(made) as client:
            model_id = await new_model(made, client)
            large, may_go_on = await held_pass(client, model_id, monkeypatch)
            seen = asyncio.Event()
            session = made.store.session

            def spied(*given: Any) -> Any:
                seen.set()
                return session(*given)

            monkeypatch.setattr(made.store, "session", spied)
            finish = asyncio.create_task(client.post(f"/api/v1/sessions/{made.session}/finish", json={}))
            await seen.wait()
            # A finish of another key waits for none of it.
            theirs = made.store.create_session(tenant_of("another")).id
            other = await client.post(
                f"/api/v1/sessions/{theirs}/finish", json={}, headers={"X-API-Key": "another"}
            )
            assert other.status_code == 200
            assert not finish.done()
            may_go_on.set()
            future = await made.ended(await large, tenant_of(KEY))
            assert future.outcome is not None
            assert future.outcome.media_type == PROTOBUF, future.outcome.body
            assert (await finish).json() == {}

    asyncio.run(asyncio.wait_for(main(), 60))


async def new_model(made: World, client: httpx.AsyncClient) -> str:
    made.new_session(tenant_of(KEY))
    named = {"session_id": made.session, "model_seq_id": 0, "base_model": BASE}
    await made.result(await submitted(client, "create_model", json=named), tenant_of(KEY))
    (model_id,) = made.trainer.weights
    return model_id


async def held_pass(
    client: httpx.AsyncClient, model_id: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Task[str], threading.Event]:
    """A large forward_backward that is being read until the event is set."""
    may_go_on, reading = threading.Event(), threading.Event()
    real = codec.forward_backward

    def held(body: bytes) -> Any:
        reading.set()
        assert may_go_on.wait(60)
        return real(body)

    message = messages.ForwardBackwardRequest.FromString(datums(4000))
    message.model_id = model_id
    monkeypatch.setattr(codec, "forward_backward", held)
    sent = submitted(client, "forward_backward", **proto(message.SerializeToString()))
    large = asyncio.create_task(sent)
    await asyncio.to_thread(reading.wait, 60)
    return large, may_go_on


async def submitted(client: httpx.AsyncClient, path: str, **sent: Any) -> str:
    """The request_id."""
    answered = await client.post(f"/api/v1/{path}", **sent)
    assert answered.status_code == 200, answered.text
    return str(answered.json()["request_id"])


@contextlib.asynccontextmanager
async def served(made: World) -> AsyncIterator[httpx.AsyncClient]:
    """What sends requests to `made`."""
    app = tinker_app(
        store=made.store,
        futures=made.futures,
        sampling=Played(made.futures, made.store),
        training=made.training,
        authenticator=Authenticator(()),
        served=Served(names=(BASE,), directory="/models/tiny"),
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://t", headers={"X-API-Key": KEY}
    ) as client:
        yield client


def test_a_result_in_json_is_written_in_steps_as_it_is_in_one() -> None:
    samples = Samples(
        sequences=[SampledSequence(stop_reason="stop", tokens=[*range(40_000)], logprobs=[])],
        prompt_cache_hit_tokens=3,
        prompt_logprobs=[None, -0.5],
    )
    assert stepwise_json(samples) == msgspec.json.encode(samples)
    value = {
        "metrics": {"loss:sum": 1.5, "": float("nan")},
        "outputs": [{"data": np.arange(40_000, dtype="<f4").tolist(), "shape": [40_000]}, {}],
        "rows": [[(1, -0.5)], None, []],
        "none": [],
        "text": '\u2028"',
    }
    assert stepwise_json(value) == msgspec.json.encode(value)


def test_an_unknown_field_is_refused_whatever_is_around_it_and_however_long_it_is() -> None:
    for value in ("1.5", "[0]", '{"a":[]}', "true", '"x"', json.dumps([1] * 9000)):
        for body in (
            b' \n{"x": %b}',
            b'{"prompt":{"chunks":[ {"tokens":[1], "x" : %b } ]},"sampling_params":{}}',
        ):
            with pytest.raises(TinkerRefusal, match=r"the field .*x is not supported here"):
                decode(body % value.encode(), SampleBody)
    for nothing in ("null", "false", "0", "0.0", '""', "[ ]", "{ }"):
        decode(b'{"x":%b,"prompt":{"chunks":[]},"sampling_params":{}}' % nothing.encode(), SampleBody)
    with pytest.raises(TinkerRefusal, match="more than 1048576 values"):
        decode(b'{"prompt":{"chunks":[{"tokens":[' + b"1," * (2**20 + 1) + b"1]}]}}", SampleBody)
