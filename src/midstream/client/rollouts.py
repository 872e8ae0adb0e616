"""Samples rollouts as token ids, with what a trainer needs of each token: both log-probabilities and its snapshot.

Always holds: rollouts come in the order of their prompts, whatever finished first. `logprobs`, `sampling_logprobs` and
`snapshots` have one entry for each of `token_ids`. A request is sent again only where the retry
table of `core/retry.py` allows it.

Also computes how stale a rollout is, and the importance ratios of its tokens. These functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from midstream.client.calls import RETRY_S, RetryingCaller
from midstream.client.decode import Routes, SamplingMasks, routes_of, sampling_masks_of, token_snapshots
from midstream.client.errors import PublishError
from midstream.client.server import check_url


@dataclass(frozen=True)
class Rollout:
    """One sampled answer. Its lists have one entry for each of `token_ids`.

    prompt_ids: as the model read the prompt. token_ids: that were sampled, the end token among them.
    logprobs: of the model as it is, in nats. sampling_logprobs: of what was sampled from, after temperature and filters, in
    nats. They are the denominator of an importance ratio. snapshots: the one of the pass that gave each token's logits.
    finish_reason: "stop", "length" or another of the API. text: of the tokens, without the prompt. session: its key, if it had
    one. routes: expert numbers, an array [tokens, moe_layers, num_experts_per_tok] of uint8, or uint16 above 256 experts. Row j
    is of the pass that gave token j its logits. That pass read the token before it. None unless the client asks for routes, and
    for an answer without tokens. masks: the tokens that each one was drawn from. None unless the client asks for them.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    snapshots: list[str]
    finish_reason: str
    text: str
    session: str | None = None
    routes: Routes | None = field(default=None, repr=False, compare=False)
    masks: SamplingMasks | None = field(default=None, repr=False, compare=False)


class RolloutClient:
    """Samples from a server, many prompts at a time. A context manager.

    server: its URL, without /v1. model: a model or a policy; None where the server has one deployment.
    api_key: a key with the scope `sample`, where the server has keys. parallel: requests in flight.
    num_experts_per_tok: of the model's config.json. With it each rollout of an MoE model has `routes`, for router replay. A
    dense model, or an engine without routes, then refuses the request. sampling_masks: each rollout has `masks`; an engine
    without them refuses the request. Raises ValueError for a number below 1, and for a
    server's URL with credentials or a query.
    """

    def __init__(
        self,
        server: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        parallel: int = 64,
        num_experts_per_tok: int | None = None,
        sampling_masks: bool = False,
    ) -> None:
        if num_experts_per_tok is not None and num_experts_per_tok < 1:
            raise ValueError(f"num_experts_per_tok must be at least 1, got {num_experts_per_tok}")
        check_url("server", server)
        self._caller = RetryingCaller.of_rollouts(api_key, parallel)
        self._url = server.rstrip("/") + "/v1/completions"
        self._model = {} if model is None else {"model": model}
        self._top_k = num_experts_per_tok
        self._masks = sampling_masks
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="rollouts")

    def __repr__(self) -> str:
        return f"RolloutClient({self._url!r})"

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the requests in flight, and drops those that have not begun."""
        self._pool.shutdown(cancel_futures=True)
        self._caller.close()

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
        """`n` rollouts of each prompt, [prompts][n], in their order.

        prompts: token ids, or text. Text is a raw completion prompt: the server tokenizes it as it is, without a chat template.
        For a chat, give the ids of `apply_chat_template`. max_tokens: of each answer. n: at most 128.
        at_least: the snapshot that serves, or one that was signalled after it. wait_s: how long a request waits for that
        snapshot, in seconds. sessions: a key for each prompt. It keeps the prompt on the replica that has its KV.
        fields: others of a request to /v1/completions, such as temperature, seed or stop.

        Raises SignalRefused with the server's message, and Unanswered after 300 s of failures that a retry may cure. Raises
        PublishError on an answer without records or routes, and ValueError for another number of sessions than prompts.
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
            **({} if self._top_k is None else {"include_routing_matrix": True}),
            **({"return_sampling_mask": True} if self._masks else {}),
        } | fields
        keys: Sequence[str | None] = sessions or [None] * len(prompts)
        asked = [
            self._pool.submit(self._one, body, prompt, headers, key)
            for prompt, key in zip(prompts, keys, strict=True)
        ]
        try:
            return [one.result() for one in asked]
        finally:
            # Once one has failed, nobody waits for those that have not begun.
            for one in asked:
                one.cancel()

    def _one(
        self, body: dict[str, Any], prompt: Sequence[int] | str, headers: dict[str, str], session: str | None
    ) -> list[Rollout]:
        asked = body | {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        if session is not None:
            headers = headers | {"x-multi-turn-session-id": session}
        answer = self._caller.call("POST", self._url, deadline_s=RETRY_S, json=asked, headers=headers).body
        try:
            return [self._rollout(answer, choice, session) for choice in answer["choices"]]
        except (KeyError, TypeError, ValueError) as error:
            raise PublishError(
                f"{self._url}: answered something else than records of tokens: {error!r}"
            ) from error

    def _rollout(self, answer: Mapping[str, Any], choice: Mapping[str, Any], session: str | None) -> Rollout:
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
            routes=routes_of(records, top_k=self._top_k) if self._top_k is not None and records else None,
            masks=sampling_masks_of(records) if self._masks else None,
        )


class Labelled(Protocol):
    """A `Rollout`, or a `TrainingSequence`. A label is None where a token was not sampled."""

    @property
    def snapshots(self) -> Sequence[str | None]:
        """Of each token, in order."""
        ...


LabelledT = TypeVar("LabelledT", bound=Labelled)


def staleness(rollout: Labelled, signalled: Sequence[str]) -> float:
    """How many snapshots the oldest sampled token is behind the newest: a whole number, 0 without sampled tokens.

    rollout: a `Rollout` or a `TrainingSequence`. signalled: identities in their order, the newest last, as
    `TrainingRun.signalled` has them. A token of a snapshot that is not among them makes it `math.inf`: the age and the
    owner of its weights are not known. A loop that samples before its first signal puts first what the server had, such as
    "base".
    """
    # One that was signalled again is as new as its last signal.
    behind = {name: float(len(signalled) - number) for number, name in enumerate(signalled, 1)}
    sampled = {name for name in rollout.snapshots if name is not None}
    return max((behind.get(name, math.inf) for name in sampled), default=0.0)


def fresh(rollouts: Iterable[LabelledT], signalled: Sequence[str], most: float) -> list[LabelledT]:
    """The rollouts that are at most `most` snapshots behind, in their order.

    rollouts: `Rollout` or `TrainingSequence`. signalled: as `staleness` takes it. most: in snapshots. A rollout with a token of
    a snapshot that is not in `signalled` is never fresh.
    """
    return [one for one in rollouts if staleness(one, signalled) <= most]


def importance_ratios(
    logprobs: Sequence[float], sampling_logprobs: Sequence[float], *, most: float | None = None
) -> list[float]:
    """p(trainer) / p(sampler) of each token. They are plain numbers, so no gradient goes through them.

    logprobs: the trainer's, in nats, of the distribution that was sampled from: divide logits by the temperature first.
    sampling_logprobs: those of the `Rollout`. most: ratios above it become it, as in truncated importance sampling
    (https://arxiv.org/abs/2210.08270). Raises ValueError where the two have different lengths.
    """
    pairs = zip(logprobs, sampling_logprobs, strict=True)
    ratios = [math.exp(ours - theirs) for ours, theirs in pairs]
    return ratios if most is None else [min(ratio, most) for ratio in ratios]
