"""What a turn says beside what was computed, column by column. Pure.

Owns: the tolerances, and the table of columns that are compared. Sampling masks are looked at without what was computed.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from midstream.core.masks import kept_ids
from midstream.core.traces import TurnSampling
from midstream.verify.claims import Claim
from midstream.verify.drawing import Redrawn, grown, is_greedy, is_plain
from midstream.verify.findings import TokenDifference
from midstream.verify.jobs import Numbers

#: In nats, by dtype. docs/engines.md has what rounding was measured to do: 4e-5 at most in float32, and as near ties elsewhere.
TOLERANCES = {"float32": 1e-4, "float16": 6e-3, "bfloat16": 5e-2}
#: Of a router weight, how many times these: a router's logits are larger than differences of log-probabilities.
WEIGHTS_WIDER = 4
#: How far from 0 rounding may move the sampling log-probability of a token that was drawn from itself alone.
ALONE_OFF = 1e-4
#: What stands in JSON for minus infinity.
LOGPROB_MIN = -9999.0


@dataclass(frozen=True)
class Compared:
    """Which sampled tokens of a turn differ, by column."""

    logprob: tuple[int, ...]
    route: tuple[int, ...]
    sampling: tuple[int, ...]
    label: tuple[int, ...]
    weights: tuple[int, ...]
    mask: tuple[int, ...]

    @property
    def clean(self) -> bool:
        return not self.tokens

    @property
    def tokens(self) -> set[int]:
        """Those that differ in any column."""
        return {*self.logprob, *self.route, *self.sampling, *self.label, *self.weights, *self.mask}


class Computed:
    """The numbers of all parts of a turn, put together: a row for each sampled token.

    sampling: the sampling log-probability of each token; None: the record does not have what shaped it.
    weights: of the experts in `routes`; None: not asked for, or the model's code hides them. wrong_masks: tokens whose mask the
    record's sampling parameters do not leave.
    """

    def __init__(self, claim: Claim, parts: Sequence[tuple[int, int, Numbers]]) -> None:
        self.claim = claim
        count = len(claim.labels)
        self.sampling: np.ndarray | None = None
        self.wrong_masks: Sequence[int] = ()
        self.logprobs, self.best = np.zeros(count), np.zeros(count)
        self.routes: np.ndarray | None = None
        self.weights: np.ndarray | None = None
        self.tied = any(numbers.tied for _, _, numbers in parts)
        for first, until, numbers in parts:
            size = min(until, count) - first
            self.logprobs[first:until] = numbers.logprobs[:size]
            self.best[first:until] = numbers.best[:size]
            if numbers.routes is not None:
                if self.routes is None:
                    self.routes = np.zeros((count, *numbers.routes.shape[1:]), dtype=np.int64)
                self.routes[first:until] = numbers.routes[:size]
            if numbers.weights is not None:
                if self.weights is None:
                    self.weights = np.zeros((count, *numbers.weights.shape[1:]), dtype=np.float32)
                self.weights[first:until] = numbers.weights[:size]

    def draw(self, drawn: Redrawn | None) -> None:
        """drawn: what heard the passes."""
        if drawn is not None:
            self.sampling, self.wrong_masks = drawn.values, drawn.wrong_masks
        elif is_plain(self.claim.turn.sampling):
            self.sampling = self.logprobs


def compare(claim: Claim, computed: Computed, tolerance: float) -> Compared:
    recorded = np.maximum(np.array(claim.logprobs), LOGPROB_MIN)
    off = np.abs(recorded - np.maximum(computed.logprobs, LOGPROB_MIN))
    logprob = np.flatnonzero(~(off <= tolerance * np.maximum(1.0, np.abs(recorded) / 100)))
    route = np.zeros(0, dtype=np.int64)
    if claim.routes is not None:
        if computed.routes is not None and claim.routes.shape == computed.routes.shape:
            differ = np.sort(claim.routes, -1) != np.sort(computed.routes, -1)
            route = np.flatnonzero(differ.any((1, 2)))
        else:
            route = np.arange(len(recorded))
    sampling = _sampled_otherwise(claim, computed, tolerance)
    weights = np.flatnonzero(weights_off(claim, computed, tolerance).any((1, 2)))
    return Compared(
        _tuple(logprob),
        _tuple(route),
        tuple(sampling),
        tuple(mislabelled(claim)),
        _tuple(weights),
        tuple(sorted({*computed.wrong_masks})),
    )


def weights_off(claim: Claim, computed: Computed, tolerance: float) -> np.ndarray:
    """Where recorded router weights are not those computed, [tokens, layers, top_k] in the order of the record.

    Those of an expert are compared, whatever its place. Where a layer's experts are others, nothing is: the route differs.
    tolerance: of a log-probability.
    """
    recorded, made, routes = claim.router_weights, computed.weights, computed.routes
    if (
        recorded is None
        or made is None
        or routes is None
        or claim.routes is None
        or recorded.shape != made.shape
    ):
        return np.zeros((0, 0, 0), dtype=bool)
    order, own = np.argsort(claim.routes, -1), np.argsort(routes, -1)
    experts = np.take_along_axis(claim.routes, order, -1) == np.take_along_axis(routes, own, -1)
    computed_there = np.take_along_axis(made, own, -1).astype(float)
    moved = np.abs(np.take_along_axis(recorded, order, -1) - computed_there)
    # Not a number is off, too.
    far = ~(moved <= WEIGHTS_WIDER * tolerance * np.maximum(1.0, np.abs(computed_there)))
    off = np.zeros(recorded.shape, dtype=bool)
    np.put_along_axis(off, order, far & experts.all(-1, keepdims=True), -1)
    return off


def _sampled_otherwise(claim: Claim, computed: Computed, tolerance: float) -> Iterator[int]:
    given, made = claim.turn.sampling, computed.sampling
    for at, value in enumerate(claim.turn.sampling_logprobs or ()):
        if value is not None and not value <= tolerance:
            yield at
        elif value is not None and given is not None and made is not None:
            own = max(float(made[at]), LOGPROB_MIN)
            if not abs(max(value, LOGPROB_MIN) - own) <= tolerance * grown(given) * max(1.0, abs(own) / 100):
                yield at


def drawn_raw(claim: Claim) -> bool:
    """Whether a turn was drawn from the raw distribution, so that both log-probabilities of its tokens are one. Of others an
    older record, which has no sampling parameters, cannot say how."""
    recorded = claim.turn.sampling_logprobs or []
    return bool(recorded) and all(
        value is not None and abs(value - raw) <= 1e-6
        for value, raw in zip(recorded, claim.logprobs, strict=True)
    )


def wrong_masks(claim: Claim, vocab: int) -> Iterator[TokenDifference]:
    """Masks that no draw of their token was from. vocab: ids below it are tokens."""
    turn = claim.turn
    sampled = turn.sampling_logprobs or [None] * len(turn.token_ids)
    for at, (mask, token, logprob) in enumerate(
        zip(turn.sampling_masks or (), turn.token_ids, sampled, strict=False)
    ):
        why = _wrong_mask(mask, token, logprob, vocab) or _unlike_its_draw(mask, token, turn.sampling, vocab)
        if why is not None:
            yield TokenDifference(at, "sampling_masks", mask[:40], why)


def _wrong_mask(mask: str, token: int, logprob: float | None, vocab: int) -> str | None:
    # No form of the vocabulary's ids is as long.
    if len(mask) > 6 * vocab + 8:
        return f"at most {6 * vocab + 8} characters"
    try:
        ids = kept_ids(b64decode(mask, validate=True), token)
    except ValueError as error:
        return str(error)
    if ids is None:
        return None
    if ids[-1] >= vocab:
        return f"ids below {vocab}"
    # Whatever the temperature was.
    if len(ids) == 1 and logprob is not None and abs(logprob) > ALONE_OFF:
        return f"the token alone, whose sampling_logprob is 0, not {logprob:.6f}"
    return None


def _unlike_its_draw(mask: str, token: int, sampling: TurnSampling | None, vocab: int) -> str | None:
    """Of the draws that leave one token, or every one. mask: well formed."""
    if sampling is None or not (is_plain(sampling) or is_greedy(sampling)):
        return None
    ids = kept_ids(b64decode(mask), token)
    count = vocab if ids is None else len(ids)
    if is_greedy(sampling):
        return None if count == 1 else "the token alone, as in a greedy draw"
    return None if count == vocab else "every token: no limit and no filter was asked for"


def mislabelled(claim: Claim) -> Iterator[int]:
    """Tokens whose label is not the snapshot whose pass gave their logits, as the KV says."""
    last, first = claim.length - len(claim.labels) - 1, 0
    for until, kv in claim.parts:
        for token in range(first, until):
            # All KV may have been there before the first one.
            free = token == first and (first == 0 or len(claim.parts) > 1)
            if not free and kv[last + token] != claim.labels[token]:
                yield token
        first = until


def differences(claim: Claim, computed: Computed, found: Compared, most: int) -> tuple[TokenDifference, ...]:
    """The first ones, in the order of tokens."""
    listed: list[TokenDifference] = []
    for column, (tokens, values) in _COLUMNS.items():
        listed += [TokenDifference(at, column, *values(claim, computed, at)) for at in tokens(found)[:most]]
    return tuple(sorted(listed, key=lambda one: one.token)[:most])


def _label_values(claim: Claim, _: Computed, token: int) -> tuple[str, str]:
    kv = next(kv for until, kv in claim.parts if until > token)
    return claim.labels[token], f"KV of {kv[claim.length - len(claim.labels) - 1 + token]}"


def _logprob_values(claim: Claim, computed: Computed, token: int) -> tuple[str, str]:
    return f"{claim.logprobs[token]:.6f}", f"{computed.logprobs[token]:.6f}"


def _sampling_values(claim: Claim, computed: Computed, token: int) -> tuple[str, str]:
    recorded = (claim.turn.sampling_logprobs or [])[token]
    return f"{recorded}", "at most 0" if computed.sampling is None else f"{computed.sampling[token]:.6f}"


def _route_values(claim: Claim, computed: Computed, token: int) -> tuple[str, str]:
    recorded = None if claim.routes is None else claim.routes[token].tolist()
    made = None if computed.routes is None else computed.routes[token].tolist()
    return f"{recorded}"[:120], f"{made}"[:120]


def _mask_values(claim: Claim, _: Computed, token: int) -> tuple[str, str]:
    return (claim.turn.sampling_masks or [])[token][:40], "what its recorded sampling parameters do not leave"


def _weight_values(claim: Claim, computed: Computed, token: int) -> tuple[str, str]:
    recorded, made = claim.router_weights, computed.weights
    return _by_expert(claim.routes, recorded, token), _by_expert(computed.routes, made, token)


def _by_expert(routes: np.ndarray | None, weights: np.ndarray | None, token: int) -> str:
    """Of each layer, the weight of each expert."""
    if routes is None or weights is None:
        return "none"
    layers = zip(routes[token].tolist(), weights[token].tolist(), strict=True)
    return f"{[{e: round(w, 6) for e, w in sorted(zip(*layer, strict=True))} for layer in layers]}"[:120]


_Values = Callable[[Claim, Computed, int], tuple[str, str]]
#: Column: its tokens that differ, and what stands there and was computed.
_COLUMNS: dict[str, tuple[Callable[[Compared], tuple[int, ...]], _Values]] = {
    "snapshots": (lambda found: found.label, _label_values),
    "logprobs": (lambda found: found.logprob, _logprob_values),
    "sampling_logprobs": (lambda found: found.sampling, _sampling_values),
    "routing_matrix": (lambda found: found.route, _route_values),
    "router_weights": (lambda found: found.weights, _weight_values),
    "sampling_masks": (lambda found: found.mask, _mask_values),
}


def _tuple(indices: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in indices)
