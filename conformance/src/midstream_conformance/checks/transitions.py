"""Rollouts while a snapshot is switched: what an async and a sync transition promise, and labels across the switch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from midstream.client import snapshot_of
from midstream_conformance.answers import Token
from midstream_conformance.checks.asking import async_crossing
from midstream_conformance.endpoint import TRAJECTORY_HEADER, refusal
from midstream_conformance.outcome import expect
from midstream_conformance.rows import FIREWORKS, PROTOCOL, Evidence, row
from midstream_conformance.session import Session
from midstream_conformance.traffic import Crossing, switch

SWAP = f"{FIREWORKS}: Behavior during weight swap"
STREAM = f"{FIREWORKS}: KV cache behavior, Active request stream"
VERSION = f"{FIREWORKS}: Policy version in responses, Streaming"
# Share of tokens whose logprob may miss its snapshot's. In bfloat16, experts may be near a tie.
MISFITS_SHARE = 0.02
# Share of streams whose token beside the seam may miss it.
SEAM_SHARE = 0.25
# Requests that a session repeats, at most, after it was held off.
RETRIES = 8


async def _async(session: Session) -> Crossing:
    """A switch between weights that differ only behind the KV, so that each token has one logprob per snapshot."""
    return await async_crossing(session, "same", "head")


@row(
    "transitions.async_crosses",
    "Async: streams in flight pause and continue with the new weights on the same connection, to their end",
    SWAP,
    ("publish",),
)
async def async_crosses(session: Session) -> Evidence:
    crossing = await _async(session)
    expect(crossing.crossed, "no stream has tokens of both snapshots", **crossing.summary)
    cut = [attempt for attempt in crossing.crossed if not attempt.whole]
    expect(
        not cut,
        f"{len(cut)} streams that crossed did not come to their end",
        reasons=[a.why for a in cut][:2],
    )
    for attempt in crossing.crossed:
        got = len(attempt.answer.choice.generated) if attempt.answer else 0
        expect(got == attempt.asked, f"{attempt.asked} tokens were expected of a stream", got=got)
    return crossing.summary


@row(
    "transitions.async_errors",
    "Async: no request fails: newcomers wait, none gets a 4xx or 5xx, no connection breaks",
    SWAP,
    ("publish",),
)
async def async_errors(session: Session) -> Evidence:
    crossing = await _async(session)
    failed = [attempt for attempt in crossing.attempts if not attempt.whole]
    expect(
        not failed,
        f"{len(failed)} of {len(crossing.attempts)} requests failed",
        first=[(a.status, a.why) for a in failed][:3],
    )
    return crossing.summary


@row(
    "labels.once",
    "A stream's label changes at most once, from the old snapshot to the new one; later requests have the new one",
    VERSION,
    ("publish",),
)
async def once(session: Session) -> Evidence:
    crossing = await _async(session)
    allowed = ([crossing.old], [crossing.new], [crossing.old, crossing.new])
    odd = [attempt.labels for attempt in crossing.attempts if attempt.labels not in allowed]
    expect(not odd, f"labels other than {crossing.old} and then {crossing.new}", labels=odd[:3])
    expect(crossing.crossed, "no stream has tokens of both snapshots", **crossing.summary)
    later = list(crossing.later)
    expect(later == [crossing.new], f"later requests should be of {crossing.new}", labels=later)
    return crossing.summary


@row(
    "labels.tokens",
    "Every token is of the snapshot that its label says: its logprob is that snapshot's, on both sides of the seam",
    VERSION,
    ("publish", "prompt_logprobs"),
)
async def tokens(session: Session) -> Evidence:
    crossing = await _async(session)
    expect(crossing.scores, "no stream has tokens of both snapshots", **crossing.summary)
    misfits = count = 0
    seam = {"before": 0, "after": 0}
    for attempt, old, new in crossing.scores:
        generated = attempt.answer.choice.generated if attempt.answer else []
        fits = _fits(generated, len(attempt.prompt), old, new, crossing, session.tolerance)
        at = next(i for i, token in enumerate(generated) if token.label == crossing.new)
        seam["before"] += not fits[at - 1]
        seam["after"] += not fits[at]
        misfits += fits.count(False)
        count += len(fits)
    telling = _mean_difference(crossing)
    evidence = {
        "streams": len(crossing.scores),
        "tokens": count,
        "misfits": misfits,
        "at_seams": seam,
        "mean_difference": telling,
    }
    expect(
        telling > 4 * session.tolerance,
        "the two snapshots are too alike to attribute a token to one",
        **evidence,
    )
    expect(misfits <= MISFITS_SHARE * count, "tokens whose logprob is the other snapshot's", **evidence)
    worst = max(seam.values())
    expect(
        worst <= SEAM_SHARE * len(crossing.scores), "labels change a token too early or too late", **evidence
    )
    return evidence


def _fits(
    tokens: Sequence[Token],
    prompt: int,
    old: list[float],
    new: list[float],
    crossing: Crossing,
    tolerance: float,
) -> list[bool]:
    """Of each token: whether its logprob is its label's within the tolerance, or at least nearer to it than to the other."""
    found = []
    for i, token in enumerate(tokens, start=prompt):
        own, other = (old, new) if token.label == crossing.old else (new, old)
        off = abs(token.logprob - own[i])
        found.append(off <= tolerance or off < abs(token.logprob - other[i]))
    return found


def _mean_difference(crossing: Crossing) -> float:
    """Between the two snapshots' logprobs, nats."""
    apart = [abs(a - b) for _, old, new in crossing.scores for a, b in zip(old, new, strict=True)]
    return sum(apart) / max(1, len(apart))


@dataclass(frozen=True)
class _Sync:
    """A sync switch under traffic. retried: of sessions that were held off, what each got when it asked again afterwards."""

    found: Crossing
    # The snapshot of the answer, or why there is none.
    retried: Sequence[str | None]

    @property
    def summary(self) -> dict[str, Any]:
        return {**self.found.summary, "held_off": len(self.found.held_off)}


async def _sync(session: Session) -> _Sync:
    async def run(session: Session) -> _Sync:
        async with session.transition("SYNC"):
            found = await switch(session, "same", "head", lambda found: found.held_off)
            keys = list(dict.fromkeys(attempt.session for attempt in found.held_off))
            return _Sync(found, [await _asks_again(session, key) for key in keys[:RETRIES]])

    return await session.once("sync switch", run)


async def _asks_again(session: Session, key: str) -> str | None:
    fields = {"prompt": session.prompt(16), "max_tokens": 1}
    response = await session.endpoint.post("/completions", fields, {TRAJECTORY_HEADER: key})
    return snapshot_of(response.json()["model"]) if response.status_code == 200 else refusal(response)


@row(
    "transitions.sync_one_policy",
    "Sync: requests in flight finish on the old weights; no answer mixes two snapshots",
    STREAM,
    ("publish", "sync"),
)
async def sync_one_policy(session: Session) -> Evidence:
    sync = await _sync(session)
    found = sync.found
    served = [attempt for attempt in found.attempts if attempt.status == 200]
    mixed = [attempt.labels for attempt in served if len(attempt.labels) != 1]
    expect(not mixed, f"{len(mixed)} answers are of several snapshots", labels=mixed[:3])
    cut = [attempt for attempt in served if not attempt.whole]
    expect(not cut, f"{len(cut)} answers did not come to their end", reasons=[a.why for a in cut][:2])
    labels = {label for attempt in served for label in attempt.labels}
    expect(found.old in labels and labels | {*found.later} == {found.old, found.new},
           "answers of the old snapshot and then of the new one were expected",
           labels=sorted(map(str, labels)), later=list(found.later))  # fmt: skip
    return {**sync.summary, "answers": len(served)}


@row(
    "transitions.sync_425",
    "Sync: newcomers get 425 with Retry-After until the switch is done; then requests are served by the new snapshot",
    SWAP,
    ("publish", "sync"),
)
async def sync_425(session: Session) -> Evidence:
    sync = await _sync(session)
    found, summary = sync.found, sync.summary
    expect({*summary["statuses"]} <= {200, 425}, "a status other than 200 and 425", **summary)
    expect(found.held_off, "no client got a 425 during the switch", **summary)
    bare = [attempt for attempt in found.held_off if not (attempt.retry_after or "").strip()]
    expect(not bare, f"{len(bare)} of the 425 have no Retry-After", **summary)
    later = list(found.later)
    expect(later == [found.new], f"later requests should be of {found.new}", labels=later)
    return summary


@row(
    "transitions.sync_retry",
    "Sync: who got a 425 and asks again with the same key when the switch is done is served by the new snapshot",
    SWAP,
    ("publish", "sync"),
)
async def sync_retry(session: Session) -> Evidence:
    sync = await _sync(session)
    expect(sync.retried, "no client got a 425 during the switch", **sync.summary)
    others = [got for got in sync.retried if got != sync.found.new]
    expect(
        not others,
        f"{len(others)} of {len(sync.retried)} were not served by {sync.found.new}",
        got=others[:3],
    )
    return {"retried": len(sync.retried)}


@row(
    "transitions.drain_header",
    "x-fireworks-hot-load-drain-timeout is understood on every request, async switch or not",
    f"{PROTOCOL}: Transitions",
)
async def drain_header(session: Session) -> Evidence:
    headers = {"x-fireworks-hot-load-drain-timeout": "5"}
    answer = await session.endpoint.complete(
        session.prompt(8), headers=headers, max_tokens=2, ignore_eos=True
    )
    expect((answer.usage or {}).get("completion_tokens") == 2, "two tokens were expected", usage=answer.usage)
    return {"tokens": 2}
