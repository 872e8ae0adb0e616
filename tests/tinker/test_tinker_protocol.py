"""The unmodified SDK, in three versions, against the front itself; sampling and training are played."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from sdk_venvs import API_KEY, SDKS, run_sdk

from midstream.http.auth import Authenticator
from midstream_tinker import codec
from midstream_tinker.answers import ModelMade
from midstream_tinker.app import tinker_app
from midstream_tinker.futures import PROTOBUF, Future, Futures
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.store import CheckpointRow, Store
from midstream_tinker.types import CreateModelBody, DrawnSequence, SampleBody, SampleResult, Served

# Scripts may take 400.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POLL_S = 0.05
LARGE = 500_000
HELD, FAILED, GONE, LARGE_ONE, REFUSED, BUSY, ABANDONED, WHEN_POLLED, WHEN_CANCELLED = range(1, 10)


class Played:
    """A sample ends in the way its prompt's first token says."""

    def __init__(self, futures: Futures, store: Store) -> None:
        self.futures = futures
        self.store = store
        # By first token, the seq_ids.
        self.submitted: dict[int, list[int | None]] = defaultdict(list)
        # By kind; one future is "held".
        self.polled: Counter[str] = Counter()
        self.finished: list[str] = []
        self.abandoned_polled, self.abandoned_cancelled = asyncio.Event(), asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        wait = futures.wait

        async def counted(future: Future, timeout_s: float) -> bool:
            self.polled[future.kind] += 1
            if future.kind == "held" and self.polled["held"] == 3:
                future.resolve(result(), PROTOBUF)
            if future.kind == "abandoned":
                self.abandoned_polled.set()
            return await wait(future, timeout_s)

        futures.wait = counted  # type: ignore[method-assign]

    async def submit(self, tenant: str, api_key: str | None, body: SampleBody | CreateModelBody) -> Any:
        if isinstance(body, CreateModelBody):
            return self._made(tenant, body)
        way = body.prompt.token_ids()[0]
        self.submitted[way].append(body.seq_id)
        first = len(self.submitted[way]) == 1
        if way == REFUSED:
            raise TinkerRefusal(400, "there is no such thing as a five", "prompt")
        if way == BUSY and first:
            raise TinkerRefusal(429, "come again")
        kind = {HELD: "held", ABANDONED: "abandoned"}.get(way, "sample")
        future = self.futures.new(tenant, kind)
        if way == FAILED:
            future.fail("a two cannot be sampled", "user")
        elif way == GONE and first:
            future.gone()
        elif way == LARGE_ONE:
            future.resolve(result(prompt_logprobs=(None, *[-0.5] * (LARGE - 1))), PROTOBUF)
        elif way == ABANDONED:
            future.on_cancel(self.abandoned_cancelled.set)
        elif way in (WHEN_POLLED, WHEN_CANCELLED):
            event = self.abandoned_polled if way == WHEN_POLLED else self.abandoned_cancelled
            self.tasks.append(asyncio.create_task(resolve_after(event, future)))
        elif way != HELD:
            future.resolve(result(), PROTOBUF)
        return future.request_id, [f"{future.request_id}-{index}" for index in range(body.num_samples)]

    def _made(self, tenant: str, body: CreateModelBody) -> str:
        row = self.store.create_model(
            tenant, body.session_id, body.model_seq_id, base_model=body.base_model, lora=body.lora_config
        )
        for age, kind in enumerate(("sampler_weights", "weights")):
            checkpoint = CheckpointRow(
                uri=f"tinker://{row.id}/{kind}/one",
                tenant=tenant,
                model_id=row.id,
                kind=kind,  # type: ignore[arg-type]
                name="one",
                created=row.created - age,
                snapshot=None,
                base_model=row.base_model,
            )
            self.store.add_checkpoint(tenant, checkpoint)
        future = self.futures.new(tenant, "create_model")
        future.resolve_json(ModelMade(model_id=row.id))
        return future.request_id

    async def delete_checkpoint(self, tenant: str, uri: str) -> None:
        assert self.store.delete_checkpoint(tenant, uri)

    async def finish_session(self, tenant: str, session_id: str) -> None:
        self.finished.append(session_id)

    def __getattr__(self, name: str) -> Any:
        """What the script does not use."""
        if name.startswith(("refuse", "create_")):
            return None
        raise AttributeError(name)


async def resolve_after(event: asyncio.Event, future: Future) -> None:
    await event.wait()
    future.resolve(result(), PROTOBUF)


def result(**more: Any) -> bytes:
    sequences = tuple(DrawnSequence(tokens=(index,), logprobs=(-0.25,), stopped=False) for index in range(2))
    return codec.sample_response(SampleResult(sequences=sequences, cached_tokens=3, **more))


SAMPLED = {
    "sequences": [{"tokens": [index], "logprobs": [-0.25], "stop_reason": "length"} for index in range(2)],
    "prompt_logprobs": None,
    "topk_prompt_logprobs": None,
    "cached": 3,
}


class Front:
    """The app on a port, in a thread of its own."""

    def __init__(self) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="tinker front")
        self._thread.start()

    async def _serve(self) -> None:
        futures, store = Futures(), Store(":memory:")
        self.played = Played(futures, store)
        app = tinker_app(
            store=store,
            futures=futures,
            sampling=self.played,
            training=self.played,
            authenticator=Authenticator([API_KEY]),
            served=Served(names=("tiny",), directory="/models/tiny"),
            poll_s=POLL_S,
        )
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        await self._server.serve([self._sock])
        store.close()

    def close(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join(120)
        assert not self._thread.is_alive()
        self._sock.close()


@pytest.fixture(scope="module", params=SDKS)
def ran(request: pytest.FixtureRequest) -> Iterator[tuple[dict[str, Any], Played]]:
    front = Front()
    try:
        script = Path(__file__).with_name("sdk_protocol.py")
        told = {"url": front.url, "api_key": API_KEY}
        yield run_sdk(request.param, script, told), front.played
    finally:
        front.close()


def test_a_held_sample_is_polled_until_it_is_done(ran: tuple[dict[str, Any], Played]) -> None:
    answered, played = ran
    assert answered["held"] == SAMPLED
    assert played.polled["held"] == 3


def test_a_large_result_arrives_whole(ran: tuple[dict[str, Any], Played]) -> None:
    assert ran[0]["large"] == [LARGE, None, -0.5]


def test_an_error_is_shown_once_and_not_tried_again(ran: tuple[dict[str, Any], Played]) -> None:
    answered, played = ran
    assert "a two cannot be sampled" in answered["failed"]["text"]
    assert len(played.submitted[FAILED]) == 1
    assert "there is no such thing as a five" in answered["refused"]["text"]
    assert answered["refused"]["status"] == 400
    assert len(played.submitted[REFUSED]) == 1


def test_a_lost_result_is_sampled_anew_and_a_busy_server_asked_again(
    ran: tuple[dict[str, Any], Played],
) -> None:
    answered, played = ran
    assert (answered["gone"], answered["busy"]) == (SAMPLED, SAMPLED)
    gone, busy = played.submitted[GONE], played.submitted[BUSY]
    assert len(gone) == 2
    assert gone[0] != gone[1]
    assert len(busy) == 2
    assert busy[0] == busy[1]


def test_a_sample_that_is_given_up_is_cancelled_here(
    ran: tuple[dict[str, Any], Played], request: pytest.FixtureRequest
) -> None:
    answered, played = ran
    if request.node.callspec.params["ran"] == "0.24":
        # It tells nobody: Futures.cancel_abandoned is for it.
        assert "cancelled" not in answered
    else:
        assert (answered["polled"], answered["cancelled"]) == (SAMPLED, SAMPLED)
        assert played.submitted[ABANDONED]


def test_what_a_client_asks_about_is_answered_as_its_version_reads_it(
    ran: tuple[dict[str, Any], Played],
) -> None:
    answered, _ = ran
    asked = answered["rest"]
    unknown = asked.pop("unknown")
    assert (unknown["status"], "'nothing'" in unknown["text"]) == (404, True)
    assert asked == {
        "capabilities": ["tiny"],
        "info": ["tiny", "/models/tiny", True, 4],
        "run": [True, "tiny", True, 4],
        "runs": 1,
        "checkpoints": ["sampler_weights/one", "weights/one"],
        "weights": ["tiny", True, 4],
        "left": ["sampler_weights/one"],
        "session": [True, 1],
        "sessions": 1,
        "sampler": "tiny",
    }


def test_a_client_that_ends_says_so(
    ran: tuple[dict[str, Any], Played], request: pytest.FixtureRequest
) -> None:
    _, played = ran
    version = request.node.callspec.params["ran"]
    # 0.24 cannot.
    assert len(played.finished) == (0 if version == "0.24" else 1)
