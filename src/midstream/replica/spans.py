"""The spans of a replica's requests and swaps. Pure.

Always holds: no span contains a part of a prompt or an answer. Of a request's error it has the code, since the message may
quote the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from midstream.core.errors import MidstreamError
from midstream.core.headers import HEADER_POLICY, HEADER_SESSION
from midstream.core.served_names import ServedNames, served_model_name
from midstream.core.tracing import Attribute, SpanEvent, SpanRecord, Tracer, trace_of_signal
from midstream.replica.response.generation import Generation
from midstream.replica.sessions import TurnStats
from midstream.replica.swap.history import SwapHistory


class ClientLeft(MidstreamError):
    """No client reads this error. It has the status that the gateway's metrics count."""

    status = 499
    code = "client_left"


def request_span(
    wire: str,
    headers: Mapping[str, str],
    replica: str,
    generation: Generation | None,
    error: type[MidstreamError] | None,
    times: tuple[float, float, float],
) -> SpanRecord:
    """generation: None when the request was not admitted. error: what it failed by. times: its beginning and end, and what to
    add to the replica's monotonic clock, each in seconds since the epoch."""
    begin_s, end_s, epoch_s = times
    attributes: dict[str, Attribute] = {"midstream.replica": replica, "midstream.wire": wire}
    if (session := headers.get(HEADER_SESSION)) is not None:
        attributes["midstream.session"] = unquote(session)
    if (policy := headers.get(HEADER_POLICY)) is not None:
        attributes["midstream.policy"] = policy
    attributes["http.response.status_code"] = 200 if error is None else error.status
    children: list[SpanRecord] = []
    if generation is not None:
        attributes |= _measured(generation)
        admitted_s = generation.timings.admitted + epoch_s
        children = [
            SpanRecord("admit", begin_s, admitted_s),
            _engine(generation, admitted_s, end_s, epoch_s),
        ]
    return SpanRecord(
        f"replica {wire}",
        begin_s,
        end_s,
        attributes,
        children=children,
        error=None if error is None else error.code,
        kind="server",
    )


def _measured(generation: Generation) -> dict[str, Attribute]:
    names, turn = generation.names, generation.turn
    snapshots = list(generation.labels)
    attributes: dict[str, Attribute] = {
        "gen_ai.request.model": names.model,
        "midstream.deployment": names.deployment,
        "midstream.snapshots": snapshots,
        "gen_ai.usage.input_tokens": turn.prompt_tokens,
        "gen_ai.usage.output_tokens": turn.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": turn.cached_tokens,
        "gen_ai.response.finish_reasons": turn.finishes,
    }
    if snapshots:
        attributes["gen_ai.response.model"] = served_model_name(names.model, snapshots[-1])
    return attributes


def _engine(generation: Generation, begin_s: float, end_s: float, epoch_s: float) -> SpanRecord:
    """From the gate to the end: waiting for a place in a step, prompt tokens, generated tokens."""
    turn: TurnStats = generation.turn
    children = []
    at_s = begin_s
    if turn.queued_s is not None:
        at_s = min(begin_s + turn.queued_s, end_s)
        children.append(SpanRecord("queue", begin_s, at_s))
    first = generation.timings.first_token
    if first is not None:
        first_s = first + epoch_s
        crossed = [
            SpanEvent("snapshot", at + epoch_s, {"midstream.snapshot": label})
            for label, at in generation.labels.items()
        ]
        children.append(SpanRecord("prefill", min(at_s, first_s), first_s))
        children.append(SpanRecord("decode", first_s, end_s, events=crossed))
    return SpanRecord("engine", begin_s, end_s, children=children)


def trace_swap(
    tracer: Tracer, history: SwapHistory, replica: str, names: ServedNames, epoch_s: float
) -> None:
    """epoch_s: what to add to the driver's clock."""
    desired, timing = history.desired, history.timing
    attributes: dict[str, Attribute] = {
        "midstream.replica": replica,
        "midstream.deployment": names.deployment,
        "midstream.snapshot": desired.snapshot,
        "midstream.generation": desired.generation,
        "midstream.transition": desired.transition,
        "midstream.outcome": history.outcome,
    }
    if desired.policy:
        attributes["midstream.policy"] = desired.policy
    if timing is not None:
        attributes["midstream.pause_seconds"] = timing.pause_ms / 1e3
        attributes["midstream.streams_crossed"] = timing.streams_crossed
    span = SpanRecord(
        "swap",
        history.began_s + epoch_s,
        history.ended_s + epoch_s,
        attributes,
        children=[
            SpanRecord(stage, since_s + epoch_s, until_s + epoch_s)
            for stage, since_s, until_s in history.stages()
        ],
        error=history.error if history.outcome == "failed" else None,
    )
    tracer.record(span, trace=trace_of_signal(names.deployment, desired))
