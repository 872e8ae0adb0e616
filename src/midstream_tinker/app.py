"""The Tinker API as an ASGI app: sessions, sampling, training and the futures of submissions.

Owns: the long poll. Always holds: a submission is answered at once with a request id. A refused one leaves no gap in its
model's counting, and a session ends after the submissions that came before its finish are in their turns. retrieve_future holds
an unfinished submission for POLL_S and then answers 408. It never answers a 5xx: the SDK would ask again without a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from midstream.core.beside import beside
from midstream.core.endpoints import Endpoint, Nothing, endpoints_of, serves
from midstream.core.errors import MidstreamError
from midstream.http.auth import Authenticator
from midstream.http.bodies import answered
from midstream.http.routes import routes_of
from midstream_tinker import answers, codec, json_losses, serving
from midstream_tinker.accepted import response_to
from midstream_tinker.answers import Submitted, given
from midstream_tinker.futures import JSON, PROTOBUF, Future, Futures
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.runs import Runs
from midstream_tinker.serving import EITHER, SAMPLES, TRAINS, body_of, caller, endpoint_of, get, post
from midstream_tinker.store import SamplingSession, Store, no_session
from midstream_tinker.trainer.types import ForwardBackward
from midstream_tinker.types import (
    CancelBody,
    CreateModelBody,
    CreateSamplingSessionBody,
    CreateSessionBody,
    LoadWeightsBody,
    OptimStepBody,
    RetrieveBody,
    SampleBody,
    SaveWeightsBody,
    SaveWeightsForSamplerBody,
    Served,
    SessionBody,
    TinkerBody,
    TrainingBody,
    addressee,
    decode,
)

# The SDK hangs up after 45 s.
POLL_S = 30.0
# Larger results are announced first, when the client takes that.
INLINE_BYTES = 1 << 20
EXPIRE_EVERY_S = 60.0

logger = logging.getLogger(__name__)


class SamplingPort(Protocol):
    async def submit(self, tenant: str, api_key: str | None, body: SampleBody) -> tuple[str, list[str]]:
        """request_id, and an id per sequence. Raises TinkerRefusal."""


class TrainingPort(Protocol):
    def refuse(self, tenant: str, model_id: str, seq_id: int, error: TinkerRefusal) -> str | None:
        """A request id that ends with `error` in its turn, so that what follows it does not wait; None: no model waits."""

    async def submit(self, tenant: str, api_key: str | None, body: TrainingBody) -> str:
        """Its request id. Raises TinkerRefusal."""

    async def create_sampling_session(
        self, tenant: str, api_key: str | None, body: CreateSamplingSessionBody
    ) -> SamplingSession:
        """Of a model_path. Raises TinkerRefusal."""

    async def delete_checkpoint(self, tenant: str, uri: str) -> None:
        """Raises TinkerRefusal."""

    async def finish_session(self, tenant: str, session_id: str) -> None:
        """The client is done with it."""


_B = TypeVar("_B", bound=TinkerBody)

#: What is submitted in JSON alone.
SUBMISSIONS = (
    post("create_model", TRAINS, "Submits the making of a model to be trained.", CreateModelBody),
    post("load_weights", TRAINS, "Submits the loading of a checkpoint.", LoadWeightsBody),
    post("optim_step", TRAINS, "Submits an optimizer's step.", OptimStepBody),
    post("save_weights", TRAINS, "Submits the saving of a training state.", SaveWeightsBody),
    post(
        "save_weights_for_sampler",
        TRAINS,
        "Submits the publishing of weights to be sampled.",
        SaveWeightsForSamplerBody,
    ),
)


def tinker_app(
    *,
    store: Store,
    futures: Futures,
    sampling: SamplingPort,
    training: TrainingPort,
    authenticator: Authenticator,
    served: Served,
    poll_s: float = POLL_S,
) -> Starlette:
    """The app, for paths below /api/v1."""
    front = _Front(store, futures, sampling, training, served, poll_s)
    runs = Runs(store, training.delete_checkpoint, served)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(_expire(store, futures), name="tinker expiry")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        TinkerRefusal: serving.tinker_error,
        MidstreamError: serving.midstream_error,
        HTTPException: serving.http_error,
        ClientDisconnect: serving.disconnected,
        Exception: serving.unexpected,
    }

    def check(request: Request, endpoint: Endpoint) -> None:
        serving.check_scope(authenticator, request, endpoint, served.deployment)

    app = Starlette(
        routes=routes_of((front, runs), check, read_body), exception_handlers=handlers, lifespan=lifespan
    )
    # A redirect would send the client to the host that it claims.
    app.router.redirect_slashes = False
    return app


async def _expire(store: Store, futures: Futures) -> None:
    while True:
        await asyncio.sleep(EXPIRE_EVERY_S)
        futures.expire()
        futures.cancel_abandoned()
        try:
            store.expire()
        except TinkerRefusal as error:
            logger.warning("old sessions stay for now: %s", error)


class _Front:
    def __init__(
        self,
        store: Store,
        futures: Futures,
        sampling: SamplingPort,
        training: TrainingPort,
        served: Served,
        poll_s: float,
    ) -> None:
        self._store = store
        self._futures = futures
        self._sampling = sampling
        self._training = training
        self._served = served
        self._poll_s = poll_s
        # Maps the end of a request that is still being read to its tenant.
        self._submitting: dict[asyncio.Event, str] = {}

    # -- the client's start

    @get("healthz", "Says that the front is up.", need=None)
    async def _healthz(self, request: Request) -> answers.FrontUp:
        return answers.FrontUp()

    @post("client/config", EITHER, "Gives the SDK its configuration.")
    async def _config(self, request: Request) -> answers.SdkConfig:
        await body_of(request)
        return answers.SdkConfig()

    @post("client/dynamic_config", EITHER, "Gives the SDK the part of its configuration that may change.")
    async def _dynamic_config(self, request: Request) -> answers.SdkDynamicConfig:
        await body_of(request)
        return answers.SdkDynamicConfig()

    @get("get_server_capabilities", "Lists the models that can be sampled and trained.")
    async def _capabilities(self, request: Request) -> answers.OfferedModels:
        served = self._served
        return answers.OfferedModels(
            supported_models=[
                answers.OfferedModel(
                    model_name=name, max_context_length=served.max_context, trainable=served.trainable
                )
                for name in served.names
            ]
        )

    @post("telemetry", EITHER, "Takes the SDK's telemetry and drops it.")
    async def _telemetry(self, request: Request) -> answers.TelemetryDropped:
        """Read and dropped: nothing is kept of what a client reports of itself."""
        async for _ in request.stream():
            pass
        return answers.TelemetryDropped()

    # -- sessions

    @post("create_session", EITHER, "Begins a session of a client.")
    async def _create_session(self, request: Request, body: CreateSessionBody) -> answers.ClientSessionMade:
        tenant, _ = caller(request)
        session = self._store.create_session(
            tenant, display_name=body.display_name, user_metadata=body.user_metadata
        )
        return answers.ClientSessionMade(session_id=session.id)

    @post("session_heartbeat", EITHER, "Keeps a session alive.")
    async def _heartbeat(self, request: Request, body: SessionBody) -> answers.HeartbeatTaken:
        tenant, _ = caller(request)
        if not self._store.touch_session(tenant, body.session_id):
            error = no_session(body.session_id)
            # A 410 ends the client's heartbeats.
            raise TinkerRefusal(410, error.detail, error.param)
        return answers.HeartbeatTaken()

    @post("sessions/{session_id}/finish", EITHER, "Ends a session.")
    async def _finish(self, request: Request) -> Nothing:
        tenant, _ = caller(request)
        await body_of(request)
        session_id = request.path_params["session_id"]
        if self._store.session(tenant, session_id) is not None:
            for over in [over for over, owner in self._submitting.items() if owner == tenant]:
                await over.wait()
            await self._training.finish_session(tenant, session_id)
        # Also for an unknown session: the client is leaving, and an error would end it in a traceback.
        return Nothing()

    @get("sessions", "Lists the sessions.")
    async def _sessions(self, request: Request) -> answers.ClientSessions:
        tenant, _ = caller(request)
        return answers.ClientSessions(sessions=[session.id for session in self._store.sessions(tenant)])

    @get("sessions/{session_id}", "Shows the training runs and samplers of a session.")
    async def _session(self, request: Request) -> answers.ClientSession:
        tenant, _ = caller(request)
        session_id = request.path_params["session_id"]
        session = self._store.session(tenant, session_id)
        if session is None:
            raise no_session(session_id)
        return answers.ClientSession(
            training_run_ids=[model.id for model in self._store.models(tenant, session_id)],
            sampler_ids=[one.id for one in self._store.sampling_sessions(tenant, session_id)],
            user_metadata=given(serving.texts(session.user_metadata)),
            display_name=given(session.display_name),
        )

    # -- sampling

    @post("create_sampling_session", SAMPLES, "Begins sampling from the base model or a checkpoint.")
    async def _create_sampling_session(
        self, request: Request, body: CreateSamplingSessionBody
    ) -> answers.SamplerMade:
        tenant, api_key = caller(request)
        if body.model_path is not None:
            made = await self._training.create_sampling_session(tenant, api_key, body)
        else:
            made = self._of_base_model(tenant, body)
        return answers.SamplerMade(sampling_session_id=made.id)

    def _of_base_model(self, tenant: str, body: CreateSamplingSessionBody) -> SamplingSession:
        if body.base_model not in self._served.names:
            served = ", ".join(self._served.names)
            message = f"base_model {body.base_model!r} is not served here; these names are: {served}"
            raise TinkerRefusal(400, message, "base_model")
        policy = self._served.base_policy
        return self._store.create_sampling_session(
            tenant,
            body.session_id,
            body.sampling_session_seq_id,
            base_model=body.base_model,
            policy=policy,
            snapshot="base" if policy == "exact" else None,
        )

    @get("samplers/{sampling_session_id}", "Shows a sampling session.")
    async def _sampler(self, request: Request) -> answers.ClientSampler:
        tenant, _ = caller(request)
        asked = request.path_params["sampling_session_id"]
        session = self._store.sampling_session(tenant, asked)
        if session is None:
            message = f"there is no sampling session {asked!r} of this API key"
            raise TinkerRefusal(404, message, "sampling_session_id")
        return answers.ClientSampler(
            sampler_id=session.id, base_model=session.base_model, model_path=given(session.model_path)
        )

    @post("asample", SAMPLES, "Submits a prompt to be sampled.")
    async def _asample(self, request: Request, body: SampleBody) -> answers.SampleSubmitted:
        tenant, api_key = caller(request)
        request_id, sequence_ids = await self._sampling.submit(tenant, api_key, body)
        return answers.SampleSubmitted(request_id=request_id, sample_sequence_ids=sequence_ids)

    # -- training

    @serves(*SUBMISSIONS)
    async def _submit(self, request: Request) -> Submitted:
        into: Any = endpoint_of(request).body
        return await self._submitted(request, lambda sent: decode(sent, into), addressee)

    @serves(
        post(
            "forward_backward",
            TRAINS,
            "Submits a forward and a backward pass.",
            json_losses.LossesBody,
            also_read=(PROTOBUF,),
        ),
        # SDK 0.18 has a route of its own for a pass without gradients.
        post(
            "forward",
            TRAINS,
            "Submits a forward pass alone, as SDKs up to 0.18 ask for it.",
            json_losses.LossesBody,
            also_read=(PROTOBUF,),
        ),
    )
    async def _forward_backward(self, request: Request) -> Submitted:
        if PROTOBUF in request.headers.get("content-type", ""):
            decoded, to, limit = codec.forward_backward, codec.addressee, serving.MAX_TRAINING_BYTES
        else:
            decoded, to, limit = json_losses.forward_backward, addressee, serving.MAX_JSON_LOSS_BYTES
        without_gradients = endpoint_of(request).path.endswith("/forward")

        def read(sent: bytes) -> ForwardBackward:
            body = decoded(sent)
            if without_gradients and not body.forward_only:
                message = (
                    "this path takes a pass without gradients: forward_input, or forward_only in protobuf"
                )
                raise TinkerRefusal(400, message, "forward_input")
            return body

        # Sparse tensors may be large in a small body.
        return await self._submitted(request, read, to, limit, always_beside=True)

    async def _submitted(
        self,
        request: Request,
        read: Callable[[bytes], Any],
        to: Callable[[bytes], tuple[str, int] | None],
        limit: int = serving.MAX_JSON_BYTES,
        *,
        always_beside: bool = False,
    ) -> Submitted:
        """`to` says which turn of which model a body that cannot be read was for.

        A request behind this one may be submitted first: the seq_id keeps the order. A finish behind it waits for it, no
        longer than this request takes: it ends with its connection.
        """
        tenant, api_key = caller(request)
        over = asyncio.Event()
        self._submitting[over] = tenant
        try:
            sent = await body_of(request, limit)
            run = beside.always if always_beside else partial(beside.run, len(sent))
            try:
                body = await run(lambda: read(sent))
            except TinkerRefusal as error:
                return self._refused(tenant, await run(lambda: to(sent)), error)
            request_id = await self._training.submit(tenant, api_key, body)
            return Submitted(request_id=request_id, model_id=given(getattr(body, "model_id", None)))
        finally:
            del self._submitting[over]
            over.set()

    def _refused(self, tenant: str, to: tuple[str, int] | None, error: TinkerRefusal) -> Submitted:
        """Its seq_id is used up: the error comes in its turn, as its future's."""
        request_id = None if to is None else self._training.refuse(tenant, *to, error)
        if to is None or request_id is None:
            raise error
        return Submitted(request_id=request_id, model_id=to[0])

    # -- futures

    @post(
        "retrieve_future",
        EITHER,
        "Gives the result of a submission, or answers 408 while there is none.",
        RetrieveBody,
        answer=answers.Result,
        kinds=(JSON, PROTOBUF),
    )
    async def _retrieve_future(self, request: Request) -> Response:
        try:
            return await self._retrieved(request, await read_body(request, RetrieveBody))
        except (TinkerRefusal, MidstreamError, ClientDisconnect):
            raise
        except Exception:
            # This is a bug of the front. After a 5xx the SDK would ask again at full speed.
            logger.exception("a result cannot be encoded")
            message = "the server failed on this result; its log says why"
            return answered(answers.FutureFailed(error=message, category="server"))

    async def _retrieved(self, request: Request, body: RetrieveBody) -> Response:
        future = self._future(request, body.request_id, 410)
        if not future.done:
            await self._wait(request, future)
        outcome = future.outcome
        if outcome is None:
            return answered(answers.TryAgain(request_id=future.request_id), 408)
        if body.allow_metadata_only and outcome.status == 200 and len(outcome.body) > INLINE_BYTES:
            return answered(answers.ResultAnnounced(response_payload_size=len(outcome.body)))
        response = await response_to(request.headers.get("accept", ""), outcome)
        self._futures.fetched(future)
        return response

    def _future(self, request: Request, asked: str, unknown: int) -> Future:
        """Raises TinkerRefusal (`unknown`)."""
        future = self._futures.find(caller(request)[0], asked)
        if future is None:
            message = f"there is no request {asked!r} of this API key, or its result has expired"
            raise TinkerRefusal(unknown, message, "request_id")
        return future

    async def _wait(self, request: Request, future: Future) -> None:
        """Until it has ended, the client has left, or for poll_s."""
        tasks = (
            asyncio.create_task(self._futures.wait(future, self._poll_s)),
            asyncio.create_task(_left(request)),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @post("cancel_future", EITHER, "Cancels a submission.")
    async def _cancel_future(self, request: Request, body: CancelBody) -> answers.FutureCancelled:
        tenant, _ = caller(request)
        future = self._futures.find(tenant, body.request_id)
        if future is not None:
            future.cancel()
        return answers.FutureCancelled(request_id=body.request_id)

    @get("midstream/requests/{request_id}", "Says which snapshot and replica served a submission.")
    async def _request(self, request: Request) -> answers.RequestFacts:
        """The versions extension: what is known of a request beside its result."""
        asked = request.path_params["request_id"]
        future = self._future(request, asked, 404)
        if future.outcome is None:
            return answers.RequestFacts(request_id=asked, status="pending")
        known = future.outcome.facts
        status: Any = "gone" if future.outcome.status == 410 else "done" if known.error is UNSET else "failed"
        return answers.RequestFacts(request_id=asked, status=status, **msgspec.structs.asdict(known))


#: All that the front serves.
ENDPOINTS = endpoints_of(_Front, Runs)


async def read_body(request: Request, into: type[_B]) -> _B:
    """Raises TinkerRefusal."""
    sent = await body_of(request, into.bytes_max)
    return await beside.run(len(sent), lambda: decode(sent, into))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
