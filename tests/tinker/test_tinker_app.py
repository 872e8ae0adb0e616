"""The Tinker endpoints as a client meets them over HTTP, with sampling and training played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openapi_answers import Checked

from midstream.core.key_settings import KeySettings
from midstream.core.traces import Span
from midstream.http.auth import Authenticator
from midstream_tinker import app as module
from midstream_tinker import messages, serving
from midstream_tinker.answers import SampleFacts, SpansOfSequence
from midstream_tinker.app import ENDPOINTS, INLINE_BYTES, SUBMISSIONS, tinker_app
from midstream_tinker.codec import sample_json, sample_response
from midstream_tinker.futures import PROTOBUF, Futures
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.store import CheckpointRow, SamplingSession, Store
from midstream_tinker.trainer.types import ForwardBackward, LoraConfig
from midstream_tinker.types import (
    CreateModelBody,
    CreateSamplingSessionBody,
    DrawnSequence,
    OptimStepBody,
    SampleBody,
    SampleResult,
    Served,
)

KEY = "tml-one"
OTHER = {"X-API-Key": "tml-two"}


class Played:
    """Sampling and training: futures that the test ends."""

    def __init__(self, futures: Futures, store: Store) -> None:
        self.futures = futures
        self.store = store
        self.calls: list[tuple[str, Any, Any]] = []
        self.submitted: list[Any] = []
        self.turns: list[tuple[str, int]] = []

    async def submit(self, tenant: str, api_key: str | None, body: Any) -> Any:
        """A sample has ids of its sequences beside its request_id."""
        self.calls.append(("submit", api_key, body))
        future = self.futures.new(tenant, "submitted")
        self.submitted.append(future)
        if not isinstance(body, SampleBody):
            return future.request_id
        return future.request_id, [f"{future.request_id}-s{index}" for index in range(body.num_samples)]

    def refuse(self, tenant: str, model_id: str, seq_id: int, error: TinkerRefusal) -> str | None:
        if model_id != "known":
            return None
        self.turns.append((model_id, seq_id))
        future = self.futures.new(tenant, "refused")
        future.fail(error.detail)
        return future.request_id

    async def create_sampling_session(
        self, tenant: str, api_key: str | None, body: CreateSamplingSessionBody
    ) -> SamplingSession:
        self.calls.append(("create_sampling_session", api_key, body))
        return self.store.create_sampling_session(
            tenant,
            body.session_id,
            body.sampling_session_seq_id,
            base_model="tiny",
            model_path=body.model_path,
            policy="exact",
        )

    async def delete_checkpoint(self, tenant: str, uri: str) -> None:
        if not self.store.delete_checkpoint(tenant, uri):
            raise TinkerRefusal(404, f"there is no {uri}", "path")

    async def finish_session(self, tenant: str, session_id: str) -> None:
        self.calls.append(("finish_session", None, session_id))


class Front:
    def __init__(
        self, keys: tuple[str | KeySettings, ...] = (), poll_s: float = 30.0, base_policy: Any = "exact"
    ) -> None:
        self.futures = Futures()
        self.store = Store(":memory:")
        self.played = Played(self.futures, self.store)
        self.app = tinker_app(
            store=self.store,
            futures=self.futures,
            sampling=self.played,
            training=self.played,
            authenticator=Authenticator(keys),
            served=Served(
                names=("tiny", "Org/Alias"),
                directory="/models/tiny",
                deployment="accounts/acme/deployments/policy",
                max_context=512,
                base_policy=base_policy,
            ),
            poll_s=poll_s,
        )
        self.checked = Checked(self.app)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.checked, raise_app_exceptions=False),
            base_url="http://tinker",
            headers={"X-API-Key": KEY},
            timeout=10,
        )

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.client.post(f"/api/v1/{path}", json={} if body is None else body, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.get(f"/api/v1/{path}", **options)

    async def session(self) -> str:
        body = {
            "tags": [],
            "user_metadata": {"n": 1, "s": "t"},
            "sdk_version": "0.38.0",
            "display_name": "run",
        }
        answered = await self.post("create_session", body)
        assert answered.status_code == 200
        return str(answered.json()["session_id"])

    async def sample(self, **extra: Any) -> str:
        answered = await self.post("asample", SAMPLE | extra)
        assert answered.status_code == 200, answered.text
        return str(answered.json()["request_id"])

    async def retrieve(self, request_id: str, metadata: bool = True, **options: Any) -> httpx.Response:
        body = {"request_id": request_id, "allow_metadata_only": metadata}
        return await self.post("retrieve_future", body, **options)


SAMPLE: dict[str, Any] = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    "sampling_params": {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
    "sampling_session_id": "sampling_1",
    "seq_id": 0,
    "num_samples": 2,
    "type": "sample",
}


@asynccontextmanager
async def play(**options: Any) -> AsyncIterator[Front]:
    front = Front(**options)
    async with front.client:
        yield front


# -- starting and sessions


async def test_what_an_sdk_asks_at_its_start() -> None:
    async with play() as front:
        config = (await front.post("client/config", {"sdk_version": "0.24.0"})).json()
        assert config["proto_write_fwdbwd"] is True
        assert config["fwd_via_fwdbwd"] is True
        assert config["create_model_via_load_weights"] is True
        assert config["parallel_fwdbwd_chunks"] is False
        assert (await front.post("client/dynamic_config")).json() == {"sample_cancel_enabled": True}
        models = (await front.get("get_server_capabilities")).json()["supported_models"]
        assert [(one["model_name"], one["max_context_length"]) for one in models] == [
            ("tiny", 512),
            ("Org/Alias", 512),
        ]
        session = await front.session()
        beat = await front.post("session_heartbeat", {"session_id": session})
        assert beat.json() == {"type": "session_heartbeat"}
        told = await front.post("telemetry", {"events": [{"x": "y" * 1000}] * 100, "session_id": session})
        assert told.json() == {"status": "accepted"}
        assert (await front.get(f"sessions/{session}")).json() == {
            "training_run_ids": [],
            "sampler_ids": [],
            "user_metadata": {"n": "1", "s": "t"},
            "display_name": "run",
        }
        ended = await front.post(
            f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}
        )
        assert ended.status_code == 200
        assert front.played.calls[-1] == ("finish_session", None, session)


async def test_a_client_can_leave_a_session_that_is_gone_and_stops_its_heartbeats() -> None:
    async with play() as front:
        assert (
            await front.post("sessions/session_0/finish", {"reason": {"type": "success"}})
        ).status_code == 200
        beat = await front.post("session_heartbeat", {"session_id": "session_0"})
        assert beat.status_code == 410
        assert "session_0" in beat.json()["detail"]


async def test_a_sampling_session_on_the_base_model_is_made_once_and_found() -> None:
    async with play() as front:
        session = await front.session()
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "Org/Alias"}
        first, again = [(await front.post("create_sampling_session", body)).json() for _ in range(2)]
        assert first == again
        sampler = first["sampling_session_id"]
        assert (await front.get(f"samplers/{sampler}")).json() == {
            "sampler_id": sampler,
            "base_model": "Org/Alias",
        }
        row = front.store.sampling_session(serving.tenant_of(KEY), sampler)
        assert row is not None
        assert (row.policy, row.snapshot) == ("exact", "base")
        assert (await front.get(f"samplers/{sampler}", headers=OTHER)).status_code == 404


async def test_the_setting_lets_base_model_clients_sample_whatever_serves() -> None:
    async with play(base_policy="serving") as front:
        body = {"session_id": await front.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = (await front.post("create_sampling_session", body)).json()["sampling_session_id"]
        row = front.store.sampling_session(serving.tenant_of(KEY), sampler)
        assert row is not None
        assert (row.policy, row.snapshot) == ("serving", None)


async def test_a_sampling_session_on_saved_weights_is_the_training_ports() -> None:
    async with play() as front:
        path = "tinker://m/sampler_weights/final"
        body = {"session_id": await front.session(), "sampling_session_seq_id": 1, "model_path": path}
        sampler = (await front.post("create_sampling_session", body)).json()["sampling_session_id"]
        assert front.played.calls[-1][:2] == ("create_sampling_session", KEY)
        assert (await front.get(f"samplers/{sampler}")).json()["model_path"] == path


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"base_model": "unknown/model"}, 400, "base_model"),
        ({}, 400, "base_model"),
        ({"base_model": "tiny", "session_id": "session_0"}, 404, "session_id"),
        ({"base_model": "tiny", "sampling_session_seq_id": -1}, 400, "sampling_session_seq_id"),
        ({"base_model": "tiny", "draft_model": "x"}, 400, "draft_model"),
    ],
)
async def test_a_sampling_session_that_cannot_be_is_refused(
    body: dict[str, Any], status: int, param: str
) -> None:
    async with play() as front:
        whole = {"session_id": await front.session(), "sampling_session_seq_id": 0} | body
        answered = await front.post("create_sampling_session", whole)
        assert (answered.status_code, answered.json()["param"]) == (status, param)
        assert len(answered.json()["detail"]) > 20


# -- futures


async def test_a_sample_is_submitted_held_and_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    async with play() as front:
        answered = (await front.post("asample", SAMPLE)).json()
        request_id = answered["request_id"]
        assert len(answered["sample_sequence_ids"]) == 2
        held = asyncio.Event()
        wait = front.futures.wait

        async def noticed(*arguments: Any) -> bool:
            held.set()
            return await wait(*arguments)

        monkeypatch.setattr(front.futures, "wait", noticed)
        polling = asyncio.create_task(front.retrieve(request_id))
        await held.wait()
        assert not polling.done()
        front.played.submitted[0].resolve(b"\x08\x01", PROTOBUF, headers={"x-midstream-replica": "replica-1"})
        fetched = await polling
        assert (fetched.status_code, fetched.content) == (200, b"\x08\x01")
        assert fetched.headers["content-type"] == PROTOBUF
        assert fetched.headers["x-midstream-replica"] == "replica-1"
        # The first answer was lost.
        assert (await front.retrieve(request_id)).content == b"\x08\x01"


async def test_an_unfinished_future_is_asked_for_again() -> None:
    async with play(poll_s=0) as front:
        request_id = await front.sample()
        answered = await front.retrieve(request_id)
        assert answered.status_code == 408
        assert answered.json() == {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        assert not front.played.submitted[0].fetched


async def test_an_error_is_told_as_the_sdk_reads_it() -> None:
    async with play() as front:
        request_id = await front.sample()
        front.played.submitted[0].fail("max_tokens is too large", "user")
        answered = await front.retrieve(request_id)
        assert answered.status_code == 200
        assert answered.json() == {"error": "max_tokens is too large", "category": "user"}


async def test_unknown_ids_anothers_ids_and_cancelled_ones_are_gone() -> None:
    async with play() as front:
        request_id = await front.sample()
        assert (await front.retrieve(request_id, headers=OTHER)).status_code == 410
        assert (await front.retrieve("req_0")).status_code == 410
        refused = await front.post("cancel_future", {"request_id": request_id}, headers=OTHER)
        assert refused.status_code == 200
        assert not front.played.submitted[0].done
        assert (await front.post("cancel_future", {"request_id": request_id})).status_code == 200
        answered = await front.retrieve(request_id)
        assert answered.status_code == 410
        assert "cancelled" in answered.json()["detail"]


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, "application/x-protobuf"),
        ("*/*", "application/x-protobuf"),
        ("application/x-protobuf", "application/x-protobuf"),
        ("application/x-protobuf, application/json", "application/x-protobuf"),
        ("application/json", "application/json"),
        ("application/json, application/x-protobuf;q=0.5", "application/json"),
        ("application/x-protobuf;q=0, */*", "application/json"),
        ("text/html, application/*;q=0.3", "application/x-protobuf"),
        ("text/html", None),
    ],
)
async def test_a_result_comes_in_the_form_that_the_client_accepts(
    accept: str | None, form: str | None
) -> None:
    result = SampleResult(
        sequences=(DrawnSequence(tokens=(7, 9), logprobs=(-0.5, -0.25), stopped=True),), cached_tokens=3
    )
    encoded = sample_response(result)

    async with play() as front:
        request_id = await front.sample()
        front.played.submitted[0].resolve(encoded, PROTOBUF, as_json=sample_json, headers={"x-a": "b"})
        if accept is None:
            del front.client.headers["accept"]
        answered = await front.retrieve(request_id, headers={} if accept is None else {"accept": accept})
        if form is None:
            assert (answered.status_code, answered.json()["param"]) == (406, "accept")
            # It is still there.
            answered = await front.retrieve(request_id)
        assert answered.headers["content-type"] == form or form is None
        assert answered.headers["x-a"] == "b"
        if form == "application/json":
            assert answered.json() == {
                "type": "sample",
                "sequences": [{"stop_reason": "stop", "tokens": [7, 9], "logprobs": [-0.5, -0.25]}],
                "prompt_cache_hit_tokens": 3,
            }
        else:
            assert answered.content == encoded


async def test_errors_are_json_whatever_the_client_accepts() -> None:
    async with play() as front:
        request_id = await front.sample()
        front.played.submitted[0].fail("no such snapshot")
        answered = await front.retrieve(request_id, headers={"accept": "application/x-protobuf"})
        assert (answered.status_code, answered.json()["error"]) == (200, "no such snapshot")


async def test_a_large_result_is_announced_first_if_the_client_takes_that() -> None:
    async with play() as front:
        large = b"x" * (INLINE_BYTES + 1)
        request_id = await front.sample()
        front.played.submitted[0].resolve(large, PROTOBUF)
        announced = await front.retrieve(request_id)
        assert announced.json() == {"status": "complete_metadata", "response_payload_size": len(large)}
        assert not front.played.submitted[0].fetched
        assert (await front.retrieve(request_id, metadata=False)).content == large
        other = await front.sample()
        front.played.submitted[1].resolve(large[1:], PROTOBUF)
        assert (await front.retrieve(other)).content == large[1:]


async def test_a_client_that_leaves_its_poll_leaves_nothing_behind() -> None:
    async with play(poll_s=3600) as front:
        request_id = await front.sample()
        sent: list[Any] = []
        body = b'{"request_id":"%s"}' % request_id.encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/api/v1/retrieve_future",
            "headers": [(b"x-api-key", KEY.encode())],
            "query_string": b"",
        }
        async with asyncio.timeout(120):
            await front.app(scope, receive, send)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not front.played.submitted[0].done
        assert not front.played.submitted[0].fetched
        front.played.submitted[0].resolve(b"x", PROTOBUF)
        assert (await front.retrieve(request_id)).content == b"x"


async def test_a_result_that_cannot_be_told_is_an_error_and_never_asked_for_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with play() as front:
        request_id = await front.sample()
        front.played.submitted[0].resolve(b"x", PROTOBUF, headers={"x-midstream-snapshot": "schöß\r\nx: y"})
        told = await front.retrieve(request_id)
        assert told.headers["x-midstream-snapshot"] == "sch\\xf6\\xdf\\r\\nx: y"
        assert "x" not in told.headers

        def find(*_: Any) -> None:
            raise RuntimeError("a secret")

        monkeypatch.setattr(front.futures, "find", find)
        failed = await front.retrieve(request_id)
        # The SDK asks again at once, for ever, after a 5xx.
        assert failed.status_code == 200
        assert failed.json()["category"] == "server"
        assert "secret" not in failed.text


async def test_a_poll_whose_body_cannot_be_read_is_no_500(monkeypatch: pytest.MonkeyPatch) -> None:
    async with play() as front:

        def decode(*_: Any) -> None:
            raise RuntimeError("a secret")

        monkeypatch.setattr(module, "decode", decode)
        failed = await front.retrieve("req_1")
        assert failed.status_code == 200
        assert failed.json()["category"] == "server"
        assert "secret" not in failed.text


async def test_the_versions_of_a_request_are_told_beside_its_result() -> None:
    async with play() as front:
        request_id = await front.sample()
        path = f"midstream/requests/{request_id}"
        assert (await front.get(path)).json() == {"request_id": request_id, "status": "pending"}
        facts = SampleFacts(replica="replica-1", sequences=[SpansOfSequence(snapshots=(Span("s", 0, 2),))])
        front.played.submitted[0].resolve(b"x", PROTOBUF, facts=facts)
        assert (await front.get(path)).json() == {
            "request_id": request_id,
            "status": "done",
            "replica": "replica-1",
            "sequences": [{"snapshots": [{"snapshot": "s", "start": 0, "end": 2}]}],
        }
        assert (await front.get(path, headers=OTHER)).status_code == 404
        other = await front.sample()
        front.played.submitted[1].fail("the run was replaced", facts=SampleFacts(replica="replica-0"))
        assert (await front.get(f"midstream/requests/{other}")).json() == {
            "request_id": other,
            "status": "failed",
            "error": "the run was replaced",
            "replica": "replica-0",
        }


# -- training


def forward_backward_body(**changes: Any) -> bytes:
    message = messages.ForwardBackwardRequest(model_id="known", seq_id=1, loss_fn="cross_entropy", **changes)
    message.data.add().model_input.add().encoded_text.tokens = b"\x01\0\0\0"
    return bytes(message.SerializeToString())


async def test_training_requests_reach_their_port_with_the_callers_key() -> None:
    async with play() as front:
        bodies: dict[str, Any] = {
            "create_model": {
                "session_id": "session_1",
                "model_seq_id": 0,
                "base_model": "tiny",
                "lora_config": {"rank": 0, "train_unembed": True, "train_mlp": True, "train_attn": True},
                "optimizer_config": {"type": "adamw"},
            },
            "load_weights": {
                "session_id": "session_1",
                "model_seq_id": 0,
                "path": "tinker://m/weights/a",
                "optimizer": True,
            },
            "optim_step": {"model_id": "m", "seq_id": 2, "adam_params": {"learning_rate": 0.5}},
            "save_weights": {"model_id": "m", "seq_id": 3, "path": "a", "overwrite": False},
            "save_weights_for_sampler": {
                "model_id": "m",
                "seq_id": 4,
                "sampling_session_seq_id": 0,
                "kind": "snapshot",
            },
        }
        read_into = {endpoint.path: endpoint.body for endpoint in SUBMISSIONS}
        for path, body in bodies.items():
            answered = await front.post(path, body | {"type": path})
            assert answered.status_code == 200, answered.text
            assert answered.json()["request_id"] == front.played.submitted[-1].request_id
            assert answered.json().get("model_id") == body.get("model_id")
            assert front.played.calls[-1][:2] == ("submit", KEY)
            assert type(front.played.calls[-1][2]) is read_into[f"/api/v1/{path}"]
        created = front.played.calls[0][2]
        assert isinstance(created, CreateModelBody)
        assert created.lora_config.rank == 0
        assert front.played.calls[2][2].adam_params.learning_rate == 0.5


async def test_a_line_break_behind_a_path_is_no_error_of_the_server() -> None:
    """Starlette takes the path as the route's. What a request is for is not read from the path again."""

    async with play() as front:
        step = {"model_id": "m", "seq_id": 2, "adam_params": {"learning_rate": 0.5}}
        answered = await front.post("optim_step%0A", step)
        assert answered.status_code == 200, answered.text
        assert isinstance(front.played.calls[-1][2], OptimStepBody)
        headers = {"content-type": PROTOBUF}
        sent = forward_backward_body()
        refused = await front.client.post("/api/v1/forward%0A", content=sent, headers=headers)
        failed = (await front.retrieve(refused.json()["request_id"])).json()
        assert "a pass without gradients" in failed["error"]


async def test_a_forward_backward_is_read_in_protobuf() -> None:
    async with play() as front:
        url, headers = "/api/v1/forward_backward", {"content-type": PROTOBUF}
        answered = await front.client.post(url, content=forward_backward_body(), headers=headers)
        assert answered.json()["model_id"] == "known"
        name, api_key, read = front.played.calls[-1]
        assert (name, api_key) == ("submit", KEY)
        assert isinstance(read, ForwardBackward)
        assert read.data[0].tokens == (1,)


@pytest.mark.parametrize("path", ["forward_backward", "forward"])
async def test_a_loss_in_json_is_read_as_sdk_0_18_sends_it(path: str) -> None:
    async with play() as front:
        datum = {"model_input": {"chunks": [{"tokens": [1], "type": "encoded_text"}]}, "loss_fn_inputs": {}}
        given = {f"{path}_input": {"data": [datum], "loss_fn": "cross_entropy"}}
        answered = await front.post(path, {"model_id": "known", "seq_id": 1, **given})
        assert answered.json()["model_id"] == "known"
        name, api_key, read = front.played.calls[-1]
        assert (name, api_key, read.data[0].tokens) == ("submit", KEY, (1,))
        assert read.forward_only == (path == "forward")
        refused = await front.post(path, {"model_id": "known", "seq_id": 2, f"{path}_input": {"data": []}})
        failed = (await front.retrieve(refused.json()["request_id"])).json()
        assert failed["category"] == "user"
        assert front.played.turns == [("known", 2)]


@pytest.mark.parametrize("in_json", [True, False])
async def test_a_pass_without_gradients_has_none_whatever_its_body_asks_for(in_json: bool) -> None:
    async with play() as front:
        datum = {"model_input": {"chunks": [{"tokens": [1], "type": "encoded_text"}]}, "loss_fn_inputs": {}}
        trains = {"forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
        if in_json:
            answered = await front.post("forward", {"model_id": "known", "seq_id": 1, **trains})
        else:
            headers = {"content-type": PROTOBUF}
            sent = forward_backward_body()
            answered = await front.client.post("/api/v1/forward", content=sent, headers=headers)
        failed = (await front.retrieve(answered.json()["request_id"])).json()
        assert "a pass without gradients" in failed["error"]
        assert (front.played.turns, front.played.calls) == ([("known", 1)], [])


async def test_a_refused_training_request_fails_in_its_turn() -> None:
    async with play() as front:
        message = messages.ForwardBackwardRequest(model_id="known", seq_id=7, loss_fn="ppo")
        headers = {"content-type": PROTOBUF}
        sent = message.SerializeToString()
        answered = await front.client.post("/api/v1/forward_backward", content=sent, headers=headers)
        assert answered.status_code == 200
        failed = (await front.retrieve(answered.json()["request_id"])).json()
        assert failed == {"error": "there is no datum in the request", "category": "user"}
        await front.post("optim_step", {"model_id": "known", "seq_id": 8, "adam_params": {"beta1": 3}})
        assert front.played.turns == [("known", 7), ("known", 8)]
        nobody = await front.post(
            "optim_step", {"model_id": "unknown", "seq_id": 8, "adam_params": {"beta1": 3}}
        )
        assert (nobody.status_code, nobody.json()["param"]) == (400, "adam_params.beta1")


async def test_what_is_known_of_models_and_checkpoints() -> None:
    async with play() as front:
        tenant = serving.tenant_of(KEY)
        session = await front.session()
        store = front.store
        model = store.create_model(
            tenant,
            session,
            0,
            base_model="Org/Alias",
            lora=LoraConfig(rank=8, train_mlp=False),
            user_metadata={"a": 1},
        )
        for kind, created in (("weights", 1e9), ("sampler_weights", 1e9 + 1)):
            row = CheckpointRow(
                uri=f"tinker://{model.id}/{kind}/final",
                tenant=tenant,
                model_id=model.id,
                kind=kind,  # type: ignore[arg-type]
                name="final",
                created=created,
                snapshot=None,
                base_model="Org/Alias",
            )
            store.add_checkpoint(tenant, row)
        info = (await front.post("get_info", {"model_id": model.id})).json()
        assert info["model_data"] == {"model_name": "Org/Alias", "tokenizer_id": "/models/tiny"}
        assert (info["is_lora"], info["lora_rank"], info["model_id"]) == (True, 8, model.id)
        uri = f"tinker://{model.id}/weights/final"
        assert (await front.post("weights_info", {"tinker_path": uri})).json() == {
            "base_model": "Org/Alias",
            "is_lora": True,
            "lora_rank": 8,
            "train_unembed": True,
            "train_mlp": False,
            "train_attn": True,
        }
        run = (await front.get(f"training_runs/{model.id}?access_scope=owned")).json()
        assert (run["training_run_id"], run["user_metadata"]) == (model.id, {"a": "1"})
        assert run["last_checkpoint"]["tinker_path"] == uri
        assert run["last_sampler_checkpoint"]["checkpoint_type"] == "sampler"
        runs = (await front.get("training_runs?limit=5")).json()
        assert runs == {"training_runs": [run], "cursor": {"offset": 0, "limit": 5, "total_count": 1}}
        listed = (await front.get(f"training_runs/{model.id}/checkpoints")).json()["checkpoints"]
        assert [(one["checkpoint_id"], one["checkpoint_type"]) for one in listed] == [
            ("sampler_weights/final", "sampler"),
            ("weights/final", "training"),
        ]
        assert listed[1]["time"] == "2001-09-09T01:46:40+00:00"
        everything = (await front.get("checkpoints?offset=1")).json()
        assert everything["checkpoints"] == listed[1:]
        deleting = f"/api/v1/training_runs/{model.id}/checkpoints/weights/final"
        assert (await front.client.delete(deleting, headers=OTHER)).status_code == 404
        assert (await front.client.delete(deleting)).status_code == 204
        assert (await front.client.delete(deleting)).status_code == 404
        for path, body in (("get_info", {"model_id": model.id}), ("weights_info", {"tinker_path": uri})):
            assert (await front.post(path, body, headers=OTHER)).status_code == 404
        assert (await front.get(f"training_runs/{model.id}", headers=OTHER)).status_code == 404
        assert (await front.get("training_runs?limit=-1")).json()["param"] == "limit"


async def test_a_model_of_all_weights_can_be_made_again_by_the_oldest_sdk() -> None:
    async with play() as front:
        tenant = serving.tenant_of(KEY)
        model = front.store.create_model(
            tenant, await front.session(), 0, base_model="tiny", lora=LoraConfig(rank=0)
        )
        uri = f"tinker://{model.id}/weights/a"
        row = CheckpointRow(
            uri=uri,
            tenant=tenant,
            model_id=model.id,
            kind="weights",
            name="a",
            created=1.0,
            snapshot=None,
            base_model="tiny",
        )
        front.store.add_checkpoint(tenant, row)
        told = (await front.post("weights_info", {"tinker_path": uri})).json()
        # What SDK 0.24 asserts, and sends back.
        assert (told["is_lora"], told["lora_rank"]) == (True, 0)
        info = (await front.post("get_info", {"model_id": model.id})).json()
        assert info["is_lora"] is False


# -- who calls, and what goes wrong


async def test_configured_keys_are_asked_for_and_passed_on() -> None:
    async with play(keys=(KEY,)) as front:
        for headers in (
            {"X-API-Key": ""},
            {"X-API-Key": "tml-wrong"},
            {"Authorization": "Bearer no", "X-API-Key": "no"},
        ):
            refused = await front.post("asample", SAMPLE, headers=headers)
            assert refused.status_code == 401
            assert "API key" in refused.json()["detail"]
            assert (await front.post("client/config", headers=headers)).status_code == 401
        await front.post("asample", SAMPLE)
        await front.post(
            "asample", SAMPLE, headers={"Authorization": f"Bearer {KEY}", "X-API-Key": "tml-wrong"}
        )
        assert [api_key for _, api_key, _ in front.played.calls] == [KEY, KEY]
        assert {future.tenant for future in front.played.submitted} == {serving.tenant_of(KEY)}


TRAINING = {
    *("create_model", "load_weights", "forward_backward", "forward"),
    *("optim_step", "save_weights", "save_weights_for_sampler"),
}
SAMPLING = {"create_sampling_session", "asample"}
SCOPED = {
    "tml-sample": ("sample:policy",),
    "tml-publish": ("publish:policy",),
    "tml-both": ("sample", "publish"),
    "tml-operate": ("operate",),
    "tml-observe": ("observe",),
    "tml-elsewhere": ("sample:other", "publish:other"),
}


async def test_what_a_key_may_do_here_follows_from_its_scopes(caplog: pytest.LogCaptureFixture) -> None:
    async with play(
        keys=tuple(KeySettings(key=key, scopes=scopes) for key, scopes in SCOPED.items())
    ) as front:
        for method, path in sorted((one.method, one.path) for one in ENDPOINTS if one.need is not None):
            name = path.removeprefix("/api/v1/")
            served = {"tml-both", "tml-operate"}
            if name not in SAMPLING:
                served |= {"tml-publish"}
            if name not in TRAINING and method != "DELETE":
                served |= {"tml-sample"}
            for key in SCOPED:
                before = list(front.played.calls)
                asked = path.replace("{", "").replace(":path}", "").replace("}", "")
                headers = {"X-API-Key": key}
                answer = await front.client.request(method, asked, content=b"{}", headers=headers)
                if key in served:
                    assert answer.status_code not in (401, 403), (key, path)
                    continue
                assert (answer.status_code, answer.json()["param"]) == (403, None), (key, path)
                assert answer.json()["detail"].endswith("on the deployment of the Tinker API")
                assert front.played.calls == before
        lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
        tenant = serving.tenant_of("tml-sample")
        lacks = "this API key lacks the scope 'publish' on the deployment of the Tinker API"
        assert f"refused: tenant {tenant}, POST /api/v1/optim_step: {lacks}" in lines
    assert not any(key in caplog.text for key in SCOPED)


async def test_without_configured_keys_each_key_is_a_tenant() -> None:
    async with play() as front:
        await front.post("asample", SAMPLE)
        await front.post("asample", SAMPLE, headers=OTHER)
        await front.post("asample", SAMPLE, headers={"X-API-Key": ""})
        assert len({future.tenant for future in front.played.submitted}) == 3
        assert [api_key for _, api_key, _ in front.played.calls] == [KEY, "tml-two", None]


async def test_paths_that_are_not_there_say_so() -> None:
    async with play() as front:
        answered = await front.post("save_weights_external", {})
        assert answered.status_code == 404
        assert "POST /api/v1/save_weights_external is not part of" in answered.json()["detail"]
        answered = await front.get("asample")
        assert answered.status_code == 405
        assert "GET /api/v1/asample" in answered.json()["detail"]
        assert (await front.get("samplers/a/")).status_code == 404


async def test_a_body_beyond_the_limit_is_refused() -> None:
    async with play() as front:
        notes = "x" * (1 << 20)
        answered = await front.post("create_session", {"tags": [], "user_metadata": {"notes": notes}})
        assert answered.status_code == 413
        assert answered.json()["detail"] == "the body has more than 1 MiB"
        long = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [100_000] * 200_000}]}}
        assert await front.sample(**long)
        packed = await front.post("asample", SAMPLE, headers={"content-encoding": "zstd"})
        assert (packed.status_code, packed.json()["param"]) == (400, "content-encoding")


async def test_a_failure_inside_is_a_sentence_too() -> None:
    async with play() as front:

        async def submit(*_: Any) -> Any:
            raise RuntimeError("a secret")

        front.played.submit = submit  # type: ignore[method-assign]
        answered = await front.post("asample", SAMPLE)
        assert answered.status_code == 500
        assert "log" in answered.json()["detail"]
        assert "secret" not in answered.text


async def test_what_is_too_old_goes_while_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPIRE_EVERY_S", 0.0)

    @asynccontextmanager
    async def running(front: Front) -> AsyncIterator[None]:
        async with front.app.router.lifespan_context(front.app):
            yield

    async with play() as front:
        expired = asyncio.Event()
        monkeypatch.setattr(front.futures, "expire", lambda: None)

        def expire() -> None:
            if expired.is_set():
                return
            expired.set()
            # Which does not end it.
            raise TinkerRefusal(503, "the disk is full")

        monkeypatch.setattr(front.store, "expire", expire)
        async with running(front):
            await asyncio.wait_for(expired.wait(), 120)
        assert asyncio.all_tasks() == {asyncio.current_task()}
