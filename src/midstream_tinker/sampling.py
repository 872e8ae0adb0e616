"""asample: one submission becomes one completion of the gateway's public port, and its answer a future's result.

Always holds: every future ends, with a result, an error or gone. When a client cancels, or falls silent, its completion ends.
No part of a caller's key is kept longer than its request.

Which key a sample is routed by, and which weights it may see. Pure.

Always holds: one sampling session and seq_id are one key, also for a repeated submission. A request that lacks either has no
key and is balanced. A client never gets a token of other weights than its sampling session's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from midstream.core.beside import beside
from midstream.core.headers import HEADER_FOLLOW_PREFIX
from midstream.core.http_answer import HttpAnswer
from midstream.core.served_names import POLICY_INFIX
from midstream.core.types import BASE_SNAPSHOT
from midstream.core.versions import HEADER_MIN_SNAPSHOT, HEADER_SNAPSHOT
from midstream_tinker import codec
from midstream_tinker.adapters import Adapters
from midstream_tinker.answers import SampleFacts, SpansOfSequence
from midstream_tinker.completion import Completions, NotServed, NotThere
from midstream_tinker.futures import BUSY_RETRY_S, PROTOBUF, Future, Futures
from midstream_tinker.samples import Sample, Sampled, check, sampled
from midstream_tinker.serving import TinkerError
from midstream_tinker.store import Store
from midstream_tinker.trainer.types import Failed
from midstream_tinker.types import Policy, SampleBody, Served
from midstream_tinker.weights import policy_of, same_run_not_older

HEADER_KEY = "x-session-id"
_SETTING = '[tinker] base_model_clients = "serving"'


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampling session may be served by.

    exact: `snapshot` from the first token to the last. run: `snapshot` or what the same run saved later, not what it saved
    before and somebody serves again. serving: whatever serves. adapter: `snapshot`, which is an adapter, beside all others.
    """

    policy: Policy
    snapshot: str | None = None
    run: str | None = None

    def headers(self) -> dict[str, str]:
        if self.policy == "serving" or self.snapshot is None:
            return {}
        return {HEADER_MIN_SNAPSHOT if self.policy == "run" else HEADER_SNAPSHOT: self.snapshot}

    def allows(self, snapshot: str) -> bool:
        if self.policy == "serving" or snapshot == self.snapshot:
            return True
        return (
            self.policy == "run" and self.snapshot is not None and same_run_not_older(snapshot, self.snapshot)
        )

    def check(self, labels: Iterable[str]) -> None:
        """Raises Failed when a token was made by other weights than the client asked for."""
        others = sorted({label for label in labels if not self.allows(label)})
        if others:
            raise Failed(f"{self._asked()}; tokens came from {_listed(others)}, {self._advice()}")

    def superseded(self, serving: Iterable[str]) -> Failed:
        """The error of a sample that no replica can serve any more. serving: the snapshots that replicas serve."""
        others = sorted(set(serving))
        now = f"replicas serve {_listed(others)} now" if others else "no replica serves it now"
        return Failed(f"{self._asked()}; {now}, {self._advice()}")

    def _asked(self) -> str:
        if self.snapshot == BASE_SNAPSHOT:
            return f"this sampling client is of the base weights (snapshot {BASE_SNAPSHOT!r})"
        later = " or a later one of its run" if self.policy == "run" else ""
        return f"this sampling client is of snapshot {self.snapshot!r}{later}"

    def _advice(self) -> str:
        if self.snapshot == BASE_SNAPSHOT:
            return f"and the server's setting {_SETTING} would let such clients sample from whatever serves"
        return "which superseded it: make a new sampling client of the weights you want"


BASE = Weights(policy="exact", snapshot=BASE_SNAPSHOT)
SERVING = Weights(policy="serving")


def routing_key(sampling_session_id: str | None, seq_id: int | None) -> str | None:
    """`<sampling session>:<seq_id>`, None when either is missing. Raises TinkerError (400): the session's id has a colon."""
    if sampling_session_id is not None and ":" in sampling_session_id:
        raise TinkerError(400, "a sampling session's id holds no ':'", "sampling_session_id")
    if sampling_session_id is None or seq_id is None:
        return None
    return f"{sampling_session_id}:{seq_id}"


def key_headers(key: str | None) -> dict[str, str]:
    """A stock client has another key on every turn of a rollout: an unknown one follows its prompt to where that is cached."""
    return {} if key is None else {HEADER_KEY: key, HEADER_FOLLOW_PREFIX: "1"}


def may_come_back(weights: Weights, refusal: Mapping[str, Any]) -> bool:
    """Whether weights that no replica serves at the moment are still those that replicas load when they can.

    refusal: the body of the gateway's 409; its `newest` is what was last ready anywhere.
    """
    newest = refusal.get("newest")
    return isinstance(newest, str) and weights.policy != "serving" and weights.allows(newest)


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:4]) + (" and others" if len(names) > 4 else "")


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
        adapters: Adapters,
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
        """request_id and an id per sequence. Raises TinkerError: 400, 404 (no such session or model), 429."""
        key = routing_key(body.sampling_session_id, body.seq_id)
        tokens = sum(len(chunk.tokens) for chunk in body.prompt.chunks)
        sample = await beside.run(ID_BYTES * tokens, lambda: check(body))
        model, weights = self._weights(tenant, body)
        self._check_room(tenant, len(sample.prompt))
        future = self._futures.new(tenant, KIND)
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
        return request_id, [f"{request_id}-s{index}" for index in range(sample.n)]

    async def close(self) -> None:
        """End what is under way; its futures are gone."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _check_room(self, tenant: str, tokens: int) -> None:
        """Raises TinkerError (429), upon which the SDK submits again; one prompt alone is always let in."""
        waiting = self._waiting_tokens[tenant]
        if waiting and waiting + tokens > MAX_WAITING_TOKENS:
            message = f"unfinished samples of this API key have {waiting} prompt tokens"
            raise TinkerError(429, message, retry_after_s=BUSY_RETRY_S)

    def _over(self, task: asyncio.Task[None], tenant: str, tokens: int) -> None:
        self._running.discard(task)
        self._waiting_tokens[tenant] -= tokens
        if not self._waiting_tokens[tenant]:
            del self._waiting_tokens[tenant]

    def _weights(self, tenant: str, body: SampleBody) -> tuple[str, Weights]:
        """What to call the model in the log, and which weights may serve it."""
        if body.sampling_session_id is not None:
            session = self._store.sampling_session(tenant, body.sampling_session_id)
            if session is None:
                message = (
                    f"there is no sampling session {body.sampling_session_id!r}; make a new sampling client"
                )
                raise TinkerError(404, message, "sampling_session_id")
            # The server was restarted with another model.
            if session.base_model not in self._served.names:
                message = (
                    f"this sampling session is of {session.base_model!r}, which is not served here any more"
                )
                raise TinkerError(404, message, "sampling_session_id")
            weights = Weights(policy=session.policy, snapshot=session.snapshot, run=session.run)
            return session.base_model, weights
        if body.model_path is not None:
            message = "make a sampling session of it first (create_sampling_session); model_path alone is not sampled from"
            raise TinkerError(400, message, "model_path")
        if body.base_model is None:
            raise TinkerError(400, "sampling_session_id is required", "sampling_session_id")
        if body.base_model not in self._served.names:
            message = f"model {body.base_model!r} is not served here; this server has {self._served.names[0]}"
            raise TinkerError(404, message, "base_model")
        return body.base_model, BASE if self._served.base_policy == "exact" else SERVING

    async def _run(
        self, future: Future, sample: Sample, weights: Weights, headers: Mapping[str, str], key: str | None
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
        except Failed as error:
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

    async def _of_adapter(self, sample: Sample, weights: Weights, headers: Mapping[str, str]) -> HttpAnswer:
        """Raises Failed, NotServed."""
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

    async def _complete(self, body: bytes, weights: Weights, headers: Mapping[str, str]) -> HttpAnswer:
        return await self._completions.complete(
            body, headers, lambda refused: may_come_back(weights, refused.refusal)
        )


async def _read(sample: Sample, answer: HttpAnswer, key: str | None) -> tuple[Sampled, bytes]:
    def read() -> tuple[Sampled, bytes]:
        done = sampled(sample, answer.body, answer.headers, key)
        return done, codec.sample_response(done.result)

    return await beside.run(len(answer.body), read)


async def _completion(sample: Sample, model: str) -> bytes:
    return await beside.run(ID_BYTES * len(sample.prompt), lambda: sample.completion(model))


def _headers(done: Sampled) -> dict[str, str]:
    result = done.result
    headers = {
        "x-midstream-replica": result.replica,
        "x-midstream-route-reason": result.route_reason,
        "x-midstream-snapshot": done.last_snapshot,
        "x-midstream-session-id": result.key,
    }
    return {name: value for name, value in headers.items() if value is not None}


def _facts(done: Sampled) -> SampleFacts:
    result = done.result
    return SampleFacts(
        session_id=result.key,
        replica=result.replica,
        route_reason=result.route_reason,
        cached_prompt_tokens=result.cached_tokens,
        sequences=[SpansOfSequence(snapshots=sequence.snapshots) for sequence in result.sequences],
        prompt_snapshots=done.prompt_snapshots or UNSET,
    )
