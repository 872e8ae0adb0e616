"""asample: one submission becomes one completion of the gateway's public port, and its answer a future's result.

Always holds: every future ends, with a result, an error or gone. When a client cancels, or falls silent, its completion ends.
A submission that comes again under its key, as its answer was lost, is not sampled again. No part of a caller's API key is kept
longer than its request.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import ssl
from collections import Counter
from collections.abc import Mapping

import msgspec
from msgspec import UNSET

from midstream.core.beside import beside
from midstream.core.http_answer import HttpAnswer
from midstream.core.served_names import POLICY_INFIX
from midstream_tinker import codec
from midstream_tinker.adapters import SamplerAdapters
from midstream_tinker.answers import SampleFacts, SpansOfSequence
from midstream_tinker.completion import Completions, NotServed, NotThere
from midstream_tinker.futures import PROTOBUF, Future, Futures
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.routing import BASE, SERVING, SessionWeights, key_headers, may_come_back, routing_key
from midstream_tinker.samples import CheckedSample, CompletedSample, check, sampled
from midstream_tinker.store import Store
from midstream_tinker.trainer.types import WorkFailed
from midstream_tinker.types import SampleBody, Served
from midstream_tinker.weights import policy_of

logger = logging.getLogger(__name__)

KIND = "Sample"
# Prompt tokens of one tenant's unfinished samples. A token takes some 50 bytes.
MAX_WAITING_TOKENS = 1 << 26
# Of a token id in JSON, about.
ID_BYTES = 6
# How often an adapter that somebody else ends is loaded again for one sample, and the pause before.
LOADS_MAX = 8
LOAD_PAUSE_S = 0.5


class Sampling:
    """For use in one event loop."""

    def __init__(
        self,
        *,
        gateway_url: str,
        deployment: str,
        served: Served,
        futures: Futures,
        store: Store,
        adapters: SamplerAdapters,
        tls: ssl.SSLContext | None = None,
        completions: Completions | None = None,
    ) -> None:
        """deployment: the one that samples, as accounts/A/deployments/D. tls: for an https gateway."""
        self._completions = completions or Completions(gateway_url, tls=tls)
        self._deployment = deployment
        self._served = served
        self._futures = futures
        self._store = store
        self._adapters = adapters
        self._count = itertools.count()
        self._running: set[asyncio.Task[None]] = set()
        # By tenant.
        self._waiting_tokens: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"Sampling({self._completions!r}, {len(self._running)} under way)"

    @property
    def gateway_url(self) -> str:
        return self._completions.url

    @gateway_url.setter
    def gateway_url(self, url: str) -> None:
        self._completions.url = url

    async def submit(self, tenant: str, api_key: str | None, body: SampleBody) -> tuple[str, list[str]]:
        """request_id and an id per sequence. Raises TinkerRefusal: 400, 404 (no such session or model), 429."""
        key = routing_key(body.sampling_session_id, body.seq_id)
        tokens = sum(len(chunk.tokens) for chunk in body.prompt.chunks)
        sample, mark = await beside.run(
            ID_BYTES * tokens,
            lambda: (check(body, self._served.max_context), None if key is None else _mark_of(body)),
        )
        model, weights = self._weights(tenant, body)
        if mark is not None and (known := self._futures.unasked(tenant, mark)) is not None:
            return known.request_id, _sequence_ids(known.request_id, sample.n)
        self._check_room(tenant, len(sample.prompt))
        future = self._futures.new(tenant, KIND, mark)
        request_id = future.request_id
        headers = {**key_headers(key), **weights.headers(), "x-request-id": request_id}
        if api_key:
            headers["x-api-key"] = api_key
        logger.info(
            "[sticky-routing] dispatch idx=%d model=%s session_id=%s", next(self._count), model, key or "-"
        )
        task = asyncio.create_task(self._run(future, sample, weights, headers, key), name=request_id)
        self._running.add(task)
        self._waiting_tokens[tenant] += len(sample.prompt)
        task.add_done_callback(lambda task: self._over(task, tenant, len(sample.prompt)))
        future.on_cancel(task.cancel)
        return request_id, _sequence_ids(request_id, sample.n)

    async def close(self) -> None:
        """End what is under way; its futures are gone."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _check_room(self, tenant: str, tokens: int) -> None:
        """Raises TinkerRefusal (429), upon which the SDK submits again; one prompt alone is always let in."""
        waiting = self._waiting_tokens[tenant]
        if waiting and waiting + tokens > MAX_WAITING_TOKENS:
            message = f"unfinished samples of this API key have {waiting} prompt tokens"
            raise TinkerRefusal(429, message)

    def _over(self, task: asyncio.Task[None], tenant: str, tokens: int) -> None:
        self._running.discard(task)
        self._waiting_tokens[tenant] -= tokens
        if not self._waiting_tokens[tenant]:
            del self._waiting_tokens[tenant]

    def _weights(self, tenant: str, body: SampleBody) -> tuple[str, SessionWeights]:
        """What to call the model in the log, and which weights may serve it."""
        if body.sampling_session_id is not None:
            session = self._store.sampling_session(tenant, body.sampling_session_id)
            if session is None:
                message = (
                    f"there is no sampling session {body.sampling_session_id!r}; make a new sampling client"
                )
                raise TinkerRefusal(404, message, "sampling_session_id")
            # The server was restarted with another model.
            if session.base_model not in self._served.names:
                message = (
                    f"this sampling session is of {session.base_model!r}, which is not served here any more"
                )
                raise TinkerRefusal(404, message, "sampling_session_id")
            weights = SessionWeights(policy=session.policy, snapshot=session.snapshot, run=session.run)
            return session.base_model, weights
        if body.model_path is not None:
            message = "make a sampling session of it first (create_sampling_session); model_path alone is not sampled from"
            raise TinkerRefusal(400, message, "model_path")
        if body.base_model is None:
            raise TinkerRefusal(400, "sampling_session_id is required", "sampling_session_id")
        if body.base_model not in self._served.names:
            message = f"model {body.base_model!r} is not served here; this server has {self._served.names[0]}"
            raise TinkerRefusal(404, message, "base_model")
        return body.base_model, BASE if self._served.base_policy == "exact" else SERVING

    async def _run(
        self,
        future: Future,
        sample: CheckedSample,
        weights: SessionWeights,
        headers: Mapping[str, str],
        key: str | None,
    ) -> None:
        try:
            try:
                if weights.policy == "adapter":
                    answer = await self._of_adapter(sample, weights, headers)
                else:
                    answer = await self._complete(
                        await _completion(sample, self._deployment), weights, headers
                    )
            except NotServed as refused:
                raise weights.superseded(refused.serving) from refused
            done, encoded = await _read(sample, answer, key)
            weights.check(done.labels())
        except WorkFailed as error:
            future.fail(error.message, error.category, facts=SampleFacts(session_id=key))
        except asyncio.CancelledError:
            future.gone()
            raise
        except Exception:
            # This is a bug of the front: the client still gets an answer.
            logger.exception("sample %s failed", future.request_id)
            future.fail("the server failed on this sample; its log says why", "server")
        else:
            future.resolve(
                encoded,
                PROTOBUF,
                as_json=codec.sample_json,
                headers=_headers(done),
                facts=_facts(done),
            )

    async def _of_adapter(
        self, sample: CheckedSample, weights: SessionWeights, headers: Mapping[str, str]
    ) -> HttpAnswer:
        """Raises WorkFailed, NotServed."""
        snapshot = weights.snapshot or ""
        body = await _completion(sample, f"{self._deployment}{POLICY_INFIX}{policy_of(snapshot)}")
        async with self._adapters.use(snapshot):
            for _ in range(LOADS_MAX):
                try:
                    return await self._complete(body, weights, headers)
                except (NotServed, NotThere) as error:
                    # A gateway that has not heard of it, or somebody who ended it or serves something else there.
                    logger.debug("%s is loaded again: %s", snapshot, error)
                    await asyncio.sleep(LOAD_PAUSE_S)
                    await self._adapters.load_again(snapshot)
            return await self._complete(body, weights, headers)

    async def _complete(self, body: bytes, weights: SessionWeights, headers: Mapping[str, str]) -> HttpAnswer:
        return await self._completions.complete(
            body, headers, lambda refused: may_come_back(weights, refused.refusal)
        )


def _mark_of(body: SampleBody) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(body), digest_size=16).digest()


def _sequence_ids(request_id: str, n: int) -> list[str]:
    return [f"{request_id}-s{index}" for index in range(n)]


async def _read(sample: CheckedSample, answer: HttpAnswer, key: str | None) -> tuple[CompletedSample, bytes]:
    def read() -> tuple[CompletedSample, bytes]:
        done = sampled(sample, answer.body, answer.headers, key)
        return done, codec.sample_response(done.result)

    return await beside.run(len(answer.body), read)


async def _completion(sample: CheckedSample, model: str) -> bytes:
    return await beside.run(ID_BYTES * len(sample.prompt), lambda: sample.completion(model))


def _headers(done: CompletedSample) -> dict[str, str]:
    result = done.result
    headers = {
        "x-midstream-replica": result.replica,
        "x-midstream-route-reason": result.route_reason,
        "x-midstream-snapshot": done.last_snapshot,
        "x-midstream-session-id": result.key,
    }
    return {name: value for name, value in headers.items() if value is not None}


def _facts(done: CompletedSample) -> SampleFacts:
    result = done.result
    return SampleFacts(
        session_id=result.key,
        replica=result.replica,
        route_reason=result.route_reason,
        cached_prompt_tokens=result.cached_tokens,
        sequences=[SpansOfSequence(snapshots=sequence.snapshots) for sequence in result.sequences],
        prompt_snapshots=done.prompt_snapshots or UNSET,
    )
