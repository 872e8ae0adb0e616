"""reset_prompt_cache: the seed's table, who reuses cached prefixes after a switch, and what becomes of a stream in flight.

A prefix that shall be found by a request of another session is cached on every replica before the switch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from midstream_conformance.answers import is_hit, is_miss
from midstream_conformance.checks.asking import async_crossing, everywhere
from midstream_conformance.endpoint import AFFINITY_HEADER, TRAJECTORY_HEADER
from midstream_conformance.outcome import expect
from midstream_conformance.rows import FIREWORKS, OWN, PROTOCOL, Evidence, row
from midstream_conformance.session import Session
from midstream_conformance.snapshots import UNSAID
from midstream_conformance.traffic import Attempt, Crossing, switch
from midstream_conformance.variants import Variant

TABLE = f"{FIREWORKS}: reset_prompt_cache"
NEEDS = ("publish", "cache_policies")
HIT, MISS = "reuses", "recomputes"
# Tokens behind the seam that are compared.
NEAR_SEAM = 8
RECOMPUTED = "behind the seam tokens are those of a recomputed prefix"
# Streams that are compared, under a policy other than all.
STREAMS = 4


@row(
    "policies.default",
    "A signal without reset_prompt_cache means all: same session and new session recompute",
    TABLE,
    NEEDS,
)
async def default(session: Session) -> Evidence:
    return await _after(session, UNSAID, same=MISS, new=MISS, none=MISS)


@row("policies.all", "all: same session and new session recompute their prefix", TABLE, NEEDS)
async def everything(session: Session) -> Evidence:
    return await _after(session, "all", same=MISS, new=MISS, none=MISS)


@row(
    "policies.new_session",
    "new_session: the same session reuses its prefix; a new session, and a request without one, recompute",
    TABLE,
    NEEDS,
)
async def new_session(session: Session) -> Evidence:
    return await _after(session, "new_session", same=HIT, new=MISS, none=MISS)


@row(
    "policies.affinity_only",
    "new_session: a request with x-session-affinity alone, of an unused key, is a new session and recomputes",
    TABLE,
    NEEDS,
)
async def affinity_only(session: Session) -> Evidence:
    return await _after(session, "new_session", same=HIT, affinity=MISS)


@row(
    "policies.none",
    "none: same session, new session and a request without one reuse cached prefixes",
    TABLE,
    NEEDS,
)
async def nothing(session: Session) -> Evidence:
    return await _after(session, "none", same=HIT, new=HIT, none=HIT)


@row("policies.bool", "true means all, false means none", f"{PROTOCOL}: Hot load", NEEDS)
async def boolean(session: Session) -> Evidence:
    yes = await _after(session, True, same=MISS, new=MISS, none=MISS)
    no = await _after(session, False, same=HIT, new=HIT, none=HIT)
    return {"true": yes, "false": no}


@row(
    "policies.max_age",
    '{"max_age": 0} recomputes what older weights made, {"max_age": 1} reuses what the weights before made',
    f"{OWN}: Hot load",
    (*NEEDS, "max_cache_age", "midstream"),
)
async def max_age(session: Session) -> Evidence:
    old = await _after(session, {"max_age": 0}, same=MISS, new=MISS, none=MISS)
    young = await _after(session, {"max_age": 1}, same=HIT, new=HIT, none=HIT)
    return {"0": old, "1": young}


@row("policies.isolation", "none shares with later requests, but never across isolation keys", TABLE, NEEDS)
async def isolation(session: Session) -> Evidence:
    prompt, key = session.prompt(), session.key()
    ours, theirs = session.key(), session.key()
    await session.snapshots.any()
    await session.turn(prompt, key, prompt_cache_isolation_key=ours)
    await session.snapshots.serve(session.snapshots.other(), "none")
    other = (await session.turn(prompt, key, prompt_cache_isolation_key=theirs)).cached
    same = (await session.turn(prompt, key, prompt_cache_isolation_key=ours)).cached
    expect(is_miss(other, len(prompt)), "another isolation key finds the prefix", cached_tokens=other)
    expect(is_hit(same, len(prompt)), "the same isolation key finds nothing", cached_tokens=same)
    return {"other": other, "same": same}


@row(
    "policies.active_stream",
    "A stream in flight keeps its KV under all, new_session and none: its tokens behind the seam are not a recomputed prefix's",
    TABLE,
    ("publish", "prompt_logprobs"),
)
async def active_stream(session: Session) -> Evidence:
    found = await async_crossing(session, "same", "all")
    expect(found.scores, "no stream has tokens of both snapshots", **found.summary)
    before, after = _off_own(found)
    evidence = {
        "streams": len(found.scores),
        "median_difference_before": before,
        "median_difference_behind": after,
    }
    expect(before <= session.tolerance, "before the seam tokens are not the old snapshot's", **evidence)
    expect(after > session.tolerance, RECOMPUTED, **evidence)
    if session.target.missing("cache_policies"):
        return evidence
    switches: tuple[tuple[str, Variant, Variant], ...] = (
        ("new_session", "same", "all"),
        ("none", "all", "same"),
    )
    for policy, old, new in switches:
        evidence[f"behind_under_{policy}"] = apart = await _behind(session, old, new, policy)
        expect(apart > session.tolerance, f"{policy}: {RECOMPUTED}", **evidence)
    return evidence


def _off_own(found: Crossing) -> tuple[float, float]:
    """The median difference between logprobs and those of all KV made by the label's weights: before the seams, behind them."""
    before: list[float] = []
    behind: list[float] = []
    for attempt, old, new in found.scores:
        at = _seam(attempt, found.new)
        before += _apart(attempt, old, 0, at)
        behind += _apart(attempt, new, at, at + NEAR_SEAM)
    return median(before), median(behind)


async def _behind(session: Session, old: Variant, new: Variant, policy: str) -> float:
    """The median difference behind the seams of a switch with `policy`."""
    async with session.transition("ASYNC"):
        found = await switch(session, old, new, lambda found: found.crossed, policy)
    expect(found.crossed, f"{policy}: no stream has tokens of both snapshots", **found.summary)
    behind: list[float] = []
    for attempt in found.crossed[:STREAMS]:
        end = _seam(attempt, found.new) + NEAR_SEAM
        ids = attempt.answer.choice.ids if attempt.answer else []
        scores = await session.endpoint.score([*attempt.prompt, *ids[:end]])
        behind += _apart(attempt, scores, end - NEAR_SEAM, end)
    return median(behind)


def _seam(attempt: Attempt, new: str) -> int:
    """Where its first token of the snapshot `new` is."""
    tokens = attempt.answer.choice.generated if attempt.answer else []
    return next(i for i, token in enumerate(tokens) if token.label == new)


def _apart(attempt: Attempt, scores: Sequence[float], start: int, end: int) -> list[float]:
    """Of the generated tokens from `start` to `end`: how far their logprob is from that in `scores`, which has the prompt's
    too."""
    tokens = attempt.answer.choice.generated if attempt.answer else []
    given = scores[len(attempt.prompt) + start :]
    return [abs(token.logprob - value) for token, value in zip(tokens[start:end], given, strict=False)]


async def _after(session: Session, policy: Any, **expected: str) -> dict[str, Any]:
    """What is found after a switch with `policy`, by each of `_WHO` that is in `expected`, which says HIT or MISS of it."""
    snapshots = session.snapshots
    await snapshots.any()
    old = session.key()
    prompts = {who: session.prompt() for who in expected}
    before = {}
    for who, prompt in prompts.items():
        await session.turn(prompt, old)
        if who != "same":
            await _prime(session, prompt)
        asker = old if who == "same" else session.key()
        before[who] = (await session.turn(prompt, asker)).cached
    await snapshots.serve(snapshots.other(), policy)
    found = {
        who: await _cached(session, prompt, _headers(session, who, old)) for who, prompt in prompts.items()
    }
    evidence = {**found, "before": list(before.values())}
    length = len(prompts["same"])
    expect(is_hit(min(before.values()), length), "the prefixes were not cached before the switch", **evidence)
    for who, wanted in expected.items():
        holds = is_miss(found[who], length) if wanted == MISS else is_hit(found[who], length)
        expect(holds, f"policy {policy!r}: {_WHO[who]} {wanted} its prefix, it was promised", **evidence)
    return evidence


async def _prime(session: Session, prompt: list[int]) -> None:
    """Have every replica cache it."""
    await everywhere(session, lambda key: session.turn(prompt, key))


_WHO = {
    "same": "the same session",
    "new": "a new session",
    "none": "a request without session",
    "affinity": "a request with x-session-affinity alone",
}


def _headers(session: Session, who: str, old: str) -> Mapping[str, str]:
    """old: the key of the session that was there before the switch."""
    if who == "none":
        return {}
    if who == "affinity":
        return {AFFINITY_HEADER: session.key()}
    return {TRAJECTORY_HEADER: old if who == "same" else session.key()}


async def _cached(session: Session, prompt: list[int], headers: Mapping[str, str]) -> int:
    return (await session.endpoint.complete(prompt, headers=headers, max_tokens=1, ignore_eos=True)).cached
