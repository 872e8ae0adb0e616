"""Samples rollouts as token ids, with what a trainer needs of each token: both log-probabilities and its snapshot.

Always holds: rollouts come in the order of their prompts, whatever finished first. `logprobs`, `sampling_logprobs` and
`snapshots` have one entry for each of `token_ids`. A request is sent again only where the retry rules of `server.py` allow it.

How far behind a rollout is, and what it weighs. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx

from midstream.client.decode import token_snapshots
from midstream.client.server import Caller, PublishError

#: Rollouts may take long; a connection that is lost is seen at once.
TIMEOUT = httpx.Timeout(30.0, read=3600.0)
RETRY_S = 300.0


@dataclass(frozen=True)
class Rollout:
    """One sampled answer.

    logprobs: of the model as it is, in nats. sampling_logprobs: of what was sampled from, after temperature and filters: the
    denominator of an importance ratio. snapshots: whose pass gave each token's logits. session: its key, if it had one.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    snapshots: list[str]
    finish_reason: str
    text: str
    session: str | None = None


class RolloutClient:
    """Samples from a server, many prompts at a time. A context manager.

    model: None where the server has one deployment. parallel: requests in flight.
    """

    def __init__(
        self,
        server: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        parallel: int = 64,
    ) -> None:
        headers = {} if api_key is None else {"x-api-key": api_key}
        limits = httpx.Limits(max_connections=parallel, max_keepalive_connections=parallel)
        self._http = httpx.Client(headers=headers, timeout=TIMEOUT, limits=limits)
        self._caller = Caller(self._http)
        self._url = server.rstrip("/") + "/v1/completions"
        self._model = {} if model is None else {"model": model}
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="rollouts")

    def __repr__(self) -> str:
        return f"RolloutClient({self._url!r})"

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def sample(
        self,
        prompts: Sequence[Sequence[int] | str],
        *,
        max_tokens: int,
        n: int = 1,
        at_least: str | None = None,
        wait_s: float = 60.0,
        sessions: Sequence[str] | None = None,
        **fields: Any,
    ) -> list[list[Rollout]]:
        """`n` rollouts of each prompt, in order.

        prompts: token ids, or text. at_least: the snapshot that serves, or one that was signalled after it; a request waits
        for it for `wait_s`. sessions: a key for each prompt. fields: of the request, such as temperature, seed or stop.

        Raises SignalRefused with the server's message, Unanswered, and PublishError on an answer without records.
        """
        if sessions is not None and len(sessions) != len(prompts):
            raise ValueError(f"sessions: {len(sessions)} keys for {len(prompts)} prompts")
        headers = (
            {}
            if at_least is None
            else {"x-midstream-min-snapshot": at_least, "x-midstream-snapshot-wait": f"{wait_s:g}"}
        )
        body = {
            **self._model,
            "max_tokens": max_tokens,
            "n": n,
            "logprobs": True,
            "return_token_ids": True,
        } | fields
        keys: Sequence[str | None] = sessions or [None] * len(prompts)
        asked = [
            self._pool.submit(self._one, body, prompt, headers, key)
            for prompt, key in zip(prompts, keys, strict=True)
        ]
        return [one.result() for one in asked]

    def _one(
        self, body: dict[str, Any], prompt: Sequence[int] | str, headers: dict[str, str], session: str | None
    ) -> list[Rollout]:
        asked = body | {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        if session is not None:
            headers = headers | {"x-multi-turn-session-id": session}
        answer = self._caller.call("POST", self._url, deadline_s=RETRY_S, json=asked, headers=headers).body
        try:
            return [_rollout(answer, choice, session) for choice in answer["choices"]]
        except (KeyError, TypeError, ValueError) as error:
            raise PublishError(
                f"{self._url}: answered something else than records of tokens: {error!r}"
            ) from error


def _rollout(answer: Mapping[str, Any], choice: Mapping[str, Any], session: str | None) -> Rollout:
    records = choice["logprobs"]["content"]
    ids = list(choice["token_ids"])
    if len(records) != len(ids):
        raise ValueError(f"{len(records)} records of {len(ids)} tokens")
    return Rollout(
        prompt_ids=list(choice["prompt_token_ids"]),
        token_ids=ids,
        logprobs=[float(one["logprob"]) for one in records],
        sampling_logprobs=[float(one["sampling_logprob"]) for one in records],
        snapshots=token_snapshots(answer, choice["index"]),
        finish_reason=choice["finish_reason"],
        text=choice["text"],
        session=session,
    )


class Labelled(Protocol):
    """A `Rollout`, or a `TrainingSequence`, whose label is None where a token was not sampled."""

    @property
    def snapshots(self) -> Sequence[str | None]: ...


LabelledT = TypeVar("LabelledT", bound=Labelled)


def staleness(rollout: Labelled, signalled: Sequence[str]) -> int:
    """How many snapshots the oldest sampled token is behind the newest. signalled: identities in their order.

    A snapshot that is not in it, such as that of the start, came before all."""
    place = {name: number for number, name in enumerate(signalled)}
    sampled = {name for name in rollout.snapshots if name is not None}
    return max((len(signalled) - 1 - place.get(name, -1) for name in sampled), default=0)


def fresh(rollouts: Iterable[LabelledT], signalled: Sequence[str], most: int) -> list[LabelledT]:
    """Those that are at most so many snapshots behind, in their order."""
    return [one for one in rollouts if staleness(one, signalled) <= most]


def importance_ratios(
    logprobs: Sequence[float], sampling_logprobs: Sequence[float], *, most: float | None = None
) -> list[float]:
    """p(trainer) / p(sampler) of each token, from log-probabilities in nats; truncated at `most` (as in truncated importance
    sampling, https://arxiv.org/abs/2210.08270). Raises ValueError where their numbers differ."""
    pairs = zip(logprobs, sampling_logprobs, strict=True)
    ratios = [math.exp(ours - theirs) for ours, theirs in pairs]
    return ratios if most is None else [min(ratio, most) for ratio in ratios]
