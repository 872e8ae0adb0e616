"""reset_prompt_cache: the seed's table, who reuses cached prefixes after a switch, and what becomes of a stream in flight.

A prefix that shall be found by a request of another session is cached on every replica before the switch.
"""

from __future__ import annotations

from typing import Any

from midstream.conformance.rows import FIREWORKS, OWN, PROTOCOL, Evidence, expect, row
from midstream.conformance.session import Session
from midstream.conformance.snapshots import UNSAID
from midstream.conformance.traffic import Crossing, cross

TABLE = f"{FIREWORKS}: reset_prompt_cache"
NEEDS = ("publish", "cache_policies")
HIT, MISS = "reuses", "recomputes"
NEAR_SEAM = 8  # tokens behind the seam that are looked at


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
    expect(other == 0, "another isolation key finds the prefix", cached_tokens=other)
    expect(same * 2 >= len(prompt), "the same isolation key finds nothing", cached_tokens=same)
    return {"other": other, "same": same}


@row(
    "policies.active_stream",
    "A stream in flight keeps its KV even under all: behind the seam its tokens are not what a recomputed prefix gives",
    TABLE,
    ("publish", "prompt_logprobs"),
)
async def active_stream(session: Session) -> Evidence:
    async def run(session: Session) -> Crossing:
        async with session.transition("ASYNC"):
            return await cross(session, "same", "all")

    crossing = await session.once("crossing to other weights", run)
    expect(crossing.scores, "no stream has tokens of both snapshots", **crossing.summary)
    before, after = _off_own(crossing)
    evidence = {
        "streams": len(crossing.scores),
        "median_difference_before": before,
        "median_difference_behind": after,
    }
    expect(before <= session.tolerance, "before the seam tokens are not the old snapshot's", **evidence)
    expect(after > session.tolerance, "behind the seam tokens are those of a recomputed prefix", **evidence)
    return evidence


def _off_own(crossing: Crossing) -> tuple[float, float]:
    """The median difference between logprobs and those of all KV made by the label's weights: before the seams, behind them."""
    sides: tuple[list[float], list[float]] = ([], [])
    for attempt, old, new in crossing.scores:
        tokens = attempt.answer.choice.generated if attempt.answer else []
        at = next(i for i, token in enumerate(tokens) if token.label == crossing.new)
        for i, token in enumerate(tokens[: at + NEAR_SEAM]):
            behind = i >= at
            sides[behind].append(abs(token.logprob - (new if behind else old)[len(attempt.prompt) + i]))
    before, after = ([*sorted(side), 0.0][len(side) // 2] for side in sides)
    return before, after


async def _after(session: Session, policy: Any, **expected: str) -> dict[str, Any]:
    """What is found after a switch with `policy` by the same session, a new one, and a request without one.

    expected: HIT or MISS of each of `same`, `new`, `none`.
    """
    snapshots = session.snapshots
    await snapshots.any()
    old = session.key()
    prompts = {who: session.prompt() for who in ("same", "new", "none")}
    before = {}
    for who, prompt in prompts.items():
        await session.turn(prompt, old)
        if who != "same":
            await session.prime(prompt)
        asker = old if who == "same" else session.key()
        before[who] = (await session.turn(prompt, asker)).cached
    await snapshots.serve(snapshots.other(), policy)
    keys = {"same": old, "new": session.key(), "none": None}
    found = {who: (await session.turn(prompts[who], keys[who])).cached for who in prompts}
    evidence = {**found, "before": list(before.values())}
    half = len(prompts["same"]) / 2
    expect(min(before.values()) >= half, "the prefixes were not cached before the switch", **evidence)
    for who, wanted in expected.items():
        holds = found[who] == 0 if wanted == MISS else found[who] >= half
        expect(holds, f"policy {policy!r}: {_WHO[who]} {wanted} its prefix, it was promised", **evidence)
    return evidence


_WHO = {"same": "the same session", "new": "a new session", "none": "a request without session"}
