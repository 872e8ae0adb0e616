"""The trace of a session: its turns as token ids, with their records and rewards, as a replica returns them. Pure.

Always holds: a turn's tokens are its parent's tokens, then `added`, then `token_ids`. `parent` is 0 where there is none, and a
parent comes before its children.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from midstream.core.errors import InvalidRequest
from midstream.core.headers import HEADER_RECORDS
from midstream.core.references import TurnReference
from midstream.core.types import FinishReason, GenerateRequest, ShapedSampling

#: What is kept of each token beside its id: nothing, both log-probabilities, or these, its route and the mask that its request
#: asked for. "masks": likewise, and a mask of each token, also where no request asks for one.
RecordsKept = Literal["none", "logprobs", "routes", "masks"]
#: With these a token's route is kept.
WITH_ROUTES = frozenset[RecordsKept](("routes", "masks"))


class Span(msgspec.Struct, frozen=True):
    """The snapshot of positions `start` to `end`, which is exclusive: of the sampled tokens, or of all in `kv_snapshots`."""

    snapshot: str
    start: int
    end: int


class TracedEarlierKv(msgspec.Struct, frozen=True):
    """What the sampled tokens before number `tokens` stood on, from where the entry before it ends."""

    tokens: int
    kv_snapshots: list[Span]


class TurnSampling(ShapedSampling, frozen=True, kw_only=True, omit_defaults=True):
    """That of a turn: only what is not the default. stop_token_ids: which `min_tokens` forbids, only beside that. grammar: one
    shaped the distributions, too, and no record has it. bad_words: their tokens are the engine's alone."""

    grammar: bool = False


_DEFAULTS = TurnSampling()


def sampling_of(request: GenerateRequest) -> TurnSampling:
    """What the record of the request's turns has."""
    given = request.sampling
    found: dict[str, Any] = {name: getattr(given, name, None) for name in TurnSampling.__struct_fields__}
    found["stop_token_ids"] = given.stop_token_ids if given.min_tokens else ()
    found["bad_words"] = () if given.bad_tokens else given.bad_words
    found["grammar"] = request.grammar is not None
    return TurnSampling(**{name: value for name, value in found.items() if value != getattr(_DEFAULTS, name)})


class TracedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a session.

    added: token ids of the request behind its parent's tokens. token_ids: those that were sampled, which the loss is about.
    loss_mask: over `added` and `token_ids`: 0 and 1.
    logprobs, sampling_logprobs: in nats, of each sampled token; None where they were not asked for or the engine does not know
    them.
    routing_matrix: of each sampled token, layers x top-k expert numbers in base64, of the pass that gave its logits; None
    likewise. routing_matrix_shape: [layers, top-k].
    router_weights: of each expert of the route, little-endian float32 in base64, likewise, where the request asked for them.
    sampling_masks: of each sampled token, the tokens that its draw was from, in base64 of the form of core/masks.py; None
    likewise.
    snapshots: over the sampled tokens. kv_snapshots: over all positions, which snapshot computed the KV.
    earlier_kv_snapshots: of tokens that were sampled before that KV was computed again.
    branch: why the turn continues none, as responses say it. model: without a snapshot.
    resumed: how many of the sampled tokens, from the first on, another replica sampled before it was lost. Only the response
    has their numbers, so a turn with such tokens has no log-probabilities, routes and masks here.
    record_reference: where the columns are that a record in a bucket leaves out. A trace has them.
    sampling: what shaped the distributions that it was drawn from; None: the record is older, and does not say.
    logprob_of: "allowed": logprobs are of the tokens that the answer's grammar allowed. None: they are the raw model's.
    """

    turn: int
    parent: int
    model: str
    added: list[int]
    token_ids: list[int]
    loss_mask: list[int]
    finish_reason: FinishReason
    created: float
    logprobs: list[float] | None
    sampling_logprobs: list[float | None] | None
    routing_matrix: list[str] | None
    routing_matrix_dtype: str | None
    routing_matrix_shape: list[int] | None
    snapshots: list[Span]
    kv_snapshots: list[Span]
    earlier_kv_snapshots: list[TracedEarlierKv] = []
    branch: dict[str, Any] | None = None
    resumed: int = 0
    logprob_of: str | None = None
    sampling_masks: list[str] | None = None
    record_reference: TurnReference | None = None
    router_weights: list[str] | None = None
    sampling: TurnSampling | None = None


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of one turn, or of the whole session (turn None). created: seconds since the epoch.

    A later reward with the same turn and name replaces the earlier one.
    """

    reward: float
    turn: int | None = None
    name: str = "reward"
    metadata: dict[str, Any] | None = None
    created: float


class Trace(msgspec.Struct, frozen=True):
    """forgotten: turns of the session were dropped for want of memory."""

    turns: list[TracedTurn]
    forgotten: bool = False
    rewards: list[Reward] = []


METADATA_BYTES_MAX = 4096
#: Of one session on one replica.
REWARDS_MAX = 4096


class RewardGiven(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request that rewards a session. replica: which one's turn is meant, where several have turns."""

    reward: float
    turn: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    replica: Annotated[str, Meta(max_length=512)] | None = None
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")] = "reward"
    metadata: dict[str, Any] | None = None


class RewardAsked(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway sends a replica. look: only whether it has turns of the session, and that turn."""

    tenant: str
    key: str
    given: RewardGiven
    look: bool = False


class RewardTaken(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. has: turns of the session are here. taken: the turn is here too, and the reward is kept unless `look`."""

    has: bool = False
    taken: bool = False


def check_reward(given: RewardGiven) -> None:
    """Raises InvalidRequest that names the field."""
    if not isfinite(given.reward):
        raise InvalidRequest("reward: must be a finite number", param="reward")
    if given.replica is not None and given.turn is None:
        raise InvalidRequest("replica: says which replica's turn is meant; give turn, too", param="replica")
    size = len(msgspec.json.encode(given.metadata))
    if size > METADATA_BYTES_MAX:
        message = f"metadata: must be at most {METADATA_BYTES_MAX} bytes as JSON, got {size}"
        raise InvalidRequest(message, param="metadata")


def records_kept(given: str | None, default: RecordsKept) -> RecordsKept:
    """What the header HEADER_RECORDS asks for. Raises InvalidRequest."""
    if not given:
        return default
    for kept in ("none", "logprobs", "routes", "masks"):
        if given == kept:
            return kept
    message = f"{HEADER_RECORDS}: expected none, logprobs, routes or masks, got {given!r}"
    raise InvalidRequest(message, param=HEADER_RECORDS)


_Count = Annotated[int, Meta(ge=0)]
_Size = Annotated[int, Meta(ge=1)]


class _TurnRead(msgspec.Struct):
    """What training records need of a turn in a trace."""

    turn: _Size
    parent: _Count
    model: str
    added: list[int]
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float | None] | None
    sampling_logprobs: list[float | None] | None
    routing_matrix: list[str] | None
    routing_matrix_dtype: Literal["uint8", "uint16"] | None
    routing_matrix_shape: tuple[_Size, _Size] | None
    snapshots: list[Span]
    #: Records of older servers do not have it.
    sampling_masks: list[str] | None = None


class _RewardRead(msgspec.Struct):
    reward: float
    turn: int | None
    name: str


class _TreeRead(msgspec.Struct):
    replica: str
    turns: list[_TurnRead]
    rewards: list[_RewardRead] | None = None


class _TraceRead(msgspec.Struct):
    id: str
    traces: list[_TreeRead]


def check_trace(trace: Mapping[str, Any]) -> None:
    """Raises ValueError unless training records can be made of a decoded answer: each turn comes once, behind its parent."""
    try:
        read = msgspec.convert(trace, _TraceRead)
    except msgspec.ValidationError as error:
        raise ValueError(f"this is no trace of a session: {error}") from error
    for tree in read.traces:
        where = f"session {read.id!r}, {tree.replica}"
        known = {0}
        shapes = set()
        for turn in tree.turns:
            if turn.turn in known or turn.parent not in known:
                raise ValueError(f"{where}, turn {turn.turn}: it comes twice, or before its parent")
            known.add(turn.turn)
            if turn.routing_matrix:
                shapes.add(turn.routing_matrix_shape)
        if len(shapes) > 1 or None in shapes:
            raise ValueError(f"{where}: its routes have no shape, or several")
