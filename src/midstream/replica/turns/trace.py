"""A session's tree of turns as a trace (core/traces.py). Pure."""

from __future__ import annotations

import math
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from midstream.core.references import LeftOut
from midstream.core.traces import Trace, TracedTurn
from midstream.core.types import ALLOWED, Session
from midstream.replica.response.shapes import earlier_spans, spans
from midstream.replica.turns.tree import Trees, Turn


def trace_of(trees: Trees, session: Session, model: str, *, top_k: int, wide_routes: bool) -> Trace | None:
    """None: nothing is known of the session. top_k: experts of a token in each MoE layer. wide_routes: their numbers are of
    16 bits, little-endian."""
    tree, forgotten = trees.of(session), trees.forgot(session)
    if tree is None:
        return Trace([], forgotten) if forgotten else None
    # The loop's thread may add one meanwhile.
    turns, rewards = list(tree.turns), list(tree.rewards.values())
    return Trace([traced(turn, model, top_k, wide_routes) for turn in turns], forgotten, rewards)


#: By column of a record file: the field of a TurnRecord, empty.
_LEFT_OUT: dict[LeftOut, dict[str, Any]] = {
    "logprob": {"logprobs": array("d")},
    "sampling_logprob": {"sampling_logprobs": array("d")},
    "route": {"routes": b""},
    "router_weights": {"router_weights": b""},
    "sampling_mask": {"masks": ()},
}


def recorded(turn: Turn, model: str, top_k: int, wide_routes: bool) -> TracedTurn:
    """As a trace has the turn, without the columns that a file has."""
    assert turn.record is not None
    reference = turn.record.reference
    return traced(turn, model, top_k, wide_routes, without=() if reference is None else reference.columns)


def traced(
    turn: Turn, model: str, top_k: int, wide_routes: bool, *, without: Sequence[LeftOut] = ()
) -> TracedTurn:
    record, count = turn.record, len(turn.sampled)
    assert record is not None
    for column in without:
        record = record._replace(**_LEFT_OUT[column])
    size = len(record.routes) // count if count else 0
    routes = _rows(record.routes, count)
    sampling = [None if math.isnan(value) else value for value in record.sampling_logprobs]
    return TracedTurn(
        turn=turn.number,
        parent=0 if turn.parent is None else turn.parent.number,
        model=record.model or model,
        added=list(turn.added),
        token_ids=list(turn.sampled),
        loss_mask=[0] * len(turn.added) + [1] * count,
        finish_reason=record.finish,
        created=record.created,
        logprobs=list(record.logprobs) or None,
        sampling_logprobs=sampling or None,
        routing_matrix=routes or None,
        routing_matrix_dtype=("uint16" if wide_routes else "uint8") if routes else None,
        routing_matrix_shape=[size // (top_k * (1 + wide_routes)), top_k] if routes and top_k else None,
        snapshots=spans(record.snapshots),
        kv_snapshots=spans(record.kv),
        earlier_kv_snapshots=earlier_spans(record.earlier_kv),
        branch=record.branch,
        resumed=record.resumed,
        logprob_of=ALLOWED if record.constrained else None,
        sampling_masks=[b64encode(mask).decode() for mask in record.masks] or None,
        record_reference=record.reference,
        router_weights=_rows(record.router_weights, count) or None,
        sampling=record.sampling,
    )


def _rows(data: bytes, count: int) -> list[str]:
    """In base64, one of equal size for each of `count` tokens."""
    size = len(data) // count if count else 0
    return [b64encode(data[at : at + size]).decode() for at in range(0, len(data), size or 1)]
