"""The trace of a session: its turns as token ids, with their records, as a replica tells them. Pure.

Always holds: a turn's tokens are its parent's tokens, then `added`, then `token_ids`. `parent` is 0 where there is none, and a
parent comes before its children.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from midstream.core.errors import InvalidRequest
from midstream.core.types import HEADER_RECORDS, FinishReason

#: What is kept of each token beside its id: nothing, both log-probabilities, or these and its route.
RecordsKept = Literal["none", "logprobs", "routes"]


class Span(msgspec.Struct, frozen=True):
    """The snapshot of positions `start` to `end`, which is exclusive."""

    snapshot: str
    start: int
    end: int


class TracedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a session.

    added: token ids of the request behind its parent's tokens. token_ids: those that were sampled, which the loss is about.
    logprobs, sampling_logprobs: in nats, of each sampled token; None where they were not asked for or the engine cannot tell.
    routing_matrix: of each sampled token, layers x top-k expert numbers in base64; None likewise.
    snapshots: over the sampled tokens. kv_snapshots: over all positions, which snapshot computed the KV.
    branch: why the turn continues none, as responses say it. model: without a snapshot.
    """

    turn: int
    parent: int
    model: str
    added: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    created: float
    logprobs: list[float] | None
    sampling_logprobs: list[float | None] | None
    routing_matrix: list[str] | None
    routing_matrix_dtype: str | None
    snapshots: list[Span]
    kv_snapshots: list[Span]
    branch: dict[str, Any] | None = None


class Trace(msgspec.Struct, frozen=True):
    """forgotten: turns of the session were dropped for want of memory."""

    turns: list[TracedTurn]
    forgotten: bool = False


def records_kept(given: str | None) -> RecordsKept:
    """What the header HEADER_RECORDS asks for. Raises InvalidRequest."""
    for kept in ("none", "logprobs", "routes"):
        if given == kept or (not given and kept == "none"):
            return kept
    message = f"{HEADER_RECORDS}: expected none, logprobs or routes, got {given!r}"
    raise InvalidRequest(message, param=HEADER_RECORDS)
