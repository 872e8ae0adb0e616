"""Prompt caching: who finds whose prefix, without a switch of snapshots."""

from __future__ import annotations

from midstream_conformance.answers import is_hit, is_miss
from midstream_conformance.endpoint import ISOLATION_HEADER, TRAJECTORY_HEADER
from midstream_conformance.outcome import expect
from midstream_conformance.rows import FIREWORKS, PROTOCOL, Evidence, row
from midstream_conformance.session import Session

SESSION_ID = f"{FIREWORKS}: KV cache behavior, Session ID"
FIELDS = f"{PROTOCOL}: Session headers"


@row(
    "cache.reuse",
    "The same prompt again is cached; one whose first token differs is not: tokens must match",
    SESSION_ID,
)
async def reuse(session: Session) -> Evidence:
    key, prompt = session.key(), session.prompt()
    cold = (await session.turn(prompt, key)).cached
    warm = (await session.turn(prompt, key)).cached
    other = (await session.turn([prompt[0] ^ 1, *prompt[1:]], key)).cached
    evidence = {"cold": cold, "warm": warm, "first_token_differs": other, "prompt": len(prompt)}
    expect(is_miss(cold, len(prompt)), "a prompt that was never sent before is cached", **evidence)
    expect(is_hit(warm, len(prompt)), "the same prompt is not cached", **evidence)
    expect(is_miss(other, len(prompt)), "a prompt that differs in its first token is cached", **evidence)
    return evidence


@row(
    "cache.session_is_no_hit",
    "A session ID alone is no hit: another prompt of the session finds nothing",
    SESSION_ID,
)
async def session_is_no_hit(session: Session) -> Evidence:
    key, another = session.key(), session.prompt()
    await session.turn(session.prompt(), key)
    found = (await session.turn(another, key)).cached
    expect(is_miss(found, len(another)), "another prompt of the session is cached", cached_tokens=found)
    return {"cached_tokens": found}


@row(
    "cache.isolation",
    "A prefix is reused only under the same prompt-cache isolation key, as a header or in the body",
    SESSION_ID,
)
async def isolation(session: Session) -> Evidence:
    key, prompt = session.key(), session.prompt()
    ours, theirs = session.key(), session.key()
    await session.turn(prompt, key, prompt_cache_isolation_key=ours)
    same = (await session.turn(prompt, key, prompt_cache_isolation_key=ours)).cached
    header = {TRAJECTORY_HEADER: key, ISOLATION_HEADER: theirs}
    other = (await session.endpoint.complete(prompt, headers=header, max_tokens=1)).cached
    none = (await session.turn(prompt, key)).cached
    header[ISOLATION_HEADER] = ours
    named = (await session.endpoint.complete(prompt, headers=header, max_tokens=1)).cached
    evidence = {"same": same, "same_by_header": named, "other": other, "without": none}
    expect(is_hit(same, len(prompt)), "the same isolation key finds nothing", **evidence)
    expect(
        is_hit(named, len(prompt)), f"{ISOLATION_HEADER} does not mean what the body field means", **evidence
    )
    found = max(other, none)
    expect(is_miss(found, len(prompt)), "another isolation key finds the prefix", **evidence)
    return evidence


@row(
    "cache.off",
    "prompt_cache_max_len 0 reuses nothing",
    f"{PROTOCOL}: Inference request fields beyond OpenAI's",
)
async def off(session: Session) -> Evidence:
    key, prompt = session.key(), session.prompt()
    await session.turn(prompt, key)
    found = (await session.turn(prompt, key, prompt_cache_max_len=0)).cached
    again = (await session.turn(prompt, key)).cached
    expect(is_miss(found, len(prompt)), "a prefix was reused", cached_tokens=found)
    expect(is_hit(again, len(prompt)), "with the cache on nothing is found either", cached_tokens=again)
    return {"off": found, "on": again}
