"""Session affinity: where the turns of a trajectory go, and that they find there what the turns before left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from midstream.conformance.answers import Answer
from midstream.conformance.endpoint import AFFINITY_HEADER, TRAJECTORY_HEADER
from midstream.conformance.rows import FIREWORKS, PROTOCOL, SKYRL, Evidence, expect, row
from midstream.conformance.session import Session

AFFINITY = f"{FIREWORKS}: Session affinity"
KEYS, TURNS = 8, 3
SPREAD = 24
TWO = ("replicas>=2",)
SKYRL_HEADER = "x-session-id"


@row(
    "affinity.trajectory",
    "All turns of one x-multi-turn-session-id go to one replica, whatever their prompts",
    AFFINITY,
    TWO,
)
async def trajectory(session: Session) -> Evidence:
    return await _sticky(session, lambda key, turn: ({TRAJECTORY_HEADER: key}, {}))


@row(
    "affinity.fallback",
    "x-session-affinity is the key where x-multi-turn-session-id is absent",
    AFFINITY,
    TWO,
)
async def fallback(session: Session) -> Evidence:
    return await _sticky(session, lambda key, turn: ({AFFINITY_HEADER: key}, {}))


@row("affinity.order", "x-multi-turn-session-id wins over x-session-affinity", AFFINITY, TWO)
async def order(session: Session) -> Evidence:
    evidence = await _sticky(
        session, lambda key, turn: ({TRAJECTORY_HEADER: key, AFFINITY_HEADER: f"other-{turn}"}, {})
    )
    shared = session.key()
    answers = [
        await _ask(session, {TRAJECTORY_HEADER: session.key(), AFFINITY_HEADER: shared}, {})
        for _ in range(SPREAD)
    ]
    homes = {answer.replica for answer in answers}
    expect(
        len(homes) > 1,
        "trajectories that share x-session-affinity all go to one replica",
        replicas=sorted(map(str, homes)),
    )
    return evidence


@row(
    "affinity.skyrl",
    "X-Session-ID is a key, too: SESSION:SEQ_ID, as SkyRL's server sends it",
    f"{SKYRL}: Routing key",
    TWO,
)
async def skyrl(session: Session) -> Evidence:
    return await _sticky(session, lambda key, turn: ({SKYRL_HEADER: f"sampling_{key[-8:]}:7"}, {}))


@row(
    "affinity.body",
    "prompt_cache_key, then user, are keys where no header is",
    f"{PROTOCOL}: Session headers",
    TWO,
)
async def body(session: Session) -> Evidence:
    await _sticky(session, lambda key, turn: ({}, {"user": key}))
    return await _sticky(session, lambda key, turn: ({}, {"prompt_cache_key": key, "user": f"other-{turn}"}))


@row("affinity.spread", "Distinct keys are spread over the replicas", f"{SKYRL}: introduction", TWO)
async def spread(session: Session) -> Evidence:
    answers = [await _ask(session, {TRAJECTORY_HEADER: session.key()}, {}) for _ in range(SPREAD)]
    return _several(answers)


@row("affinity.no_key", "Requests without a key are balanced by load", f"{SKYRL}: Routing key", TWO)
async def no_key(session: Session) -> Evidence:
    asked = (_ask(session, {}, {"max_tokens": 64, "ignore_eos": True}) for _ in range(SPREAD))
    return _several(await asyncio.gather(*asked))


@row(
    "affinity.turns",
    "The next turn of a trajectory finds the prefix of the one before in the cache",
    AFFINITY,
)
async def turns(session: Session) -> Evidence:
    found = []
    for _ in range(4):
        key, prompt = session.key(), session.prompt()
        first = await session.turn(prompt, key, max_tokens=8, logprobs=True)
        longer = [*prompt, *first.choice.ids, *session.prompt(8)]
        found.append((await session.turn(longer, key)).cached)
    expect(
        min(found) * 2 >= len(prompt),
        "a second turn computed its prefix again",
        cached_tokens=found,
        prefix=len(prompt),
    )
    return {"cached_tokens": found, "prefix": len(prompt)}


@row(
    "affinity.retry",
    "A retried request goes where the first one went, and finds its prompt there",
    f"{SKYRL}: When you'd care, Retries",
)
async def retry(session: Session) -> Evidence:
    found, homes = [], []
    for _ in range(4):
        key, prompt = session.key(), session.prompt()
        answers = [await session.turn(prompt, key, seed=1) for _ in range(2)]
        found.append(answers[1].cached)
        homes.append(len({answer.replica for answer in answers}))
    expect(max(homes) == 1, "a retry went to another replica")
    expect(min(found) * 2 >= len(prompt), "a retry computed its prompt again", cached_tokens=found)
    return {"cached_tokens": found}


@row(
    "affinity.choices",
    "All n choices of a request are on one replica: every one's next turn finds its prefix",
    f"{SKYRL}: When you'd care, num_samples > 1",
)
async def choices(session: Session) -> Evidence:
    key, prompt = session.key(), session.prompt()
    answer = await session.turn(prompt, key, n=4, max_tokens=8, logprobs=True)
    expect(len(answer.choices) == 4, "four choices were expected", got=len(answer.choices))
    turns = [await session.turn([*prompt, *choice.ids], key) for choice in answer.choices.values()]
    found = [turn.cached for turn in turns]
    expect(
        min(found) * 2 >= len(prompt), "a choice's next turn computed its prefix again", cached_tokens=found
    )
    homes = {turn.replica for turn in turns} | {answer.replica}
    expect(len(homes) == 1, "the turns are on several replicas", replicas=sorted(map(str, homes)))
    return {"cached_tokens": found}


async def _ask(session: Session, headers: Mapping[str, str], fields: Mapping[str, Any]) -> Answer:
    """A short request with a prompt of its own, so that no cached prefix decides where it goes."""
    asked = {"max_tokens": 1, **fields}
    return await session.endpoint.complete(session.prompt(48), headers=headers, **asked)


async def _sticky(
    session: Session, naming: Callable[[str, int], tuple[dict[str, str], dict[str, Any]]]
) -> Evidence:
    """naming(key, turn): headers and body fields of a request."""
    homes: dict[str, set[str | None]] = {}
    keys = [session.key() for _ in range(KEYS)]
    for turn in range(TURNS):
        for key in session.shuffled(keys):  # in one order, taking turns would look like affinity
            answer = await _ask(session, *naming(key, turn))
            homes.setdefault(key, set()).add(answer.replica)
    expect(
        all(None not in seen for seen in homes.values()),
        "no header names the replica: x-midstream-replica or fireworks-backend-host",
    )
    moved = [sorted(map(str, seen)) for seen in homes.values() if len(seen) > 1]
    expect(not moved, f"{len(moved)} of {KEYS} keys were on several replicas", first=moved[:1])
    return {"keys": KEYS, "turns": TURNS, "replicas": len(set.union(*homes.values()))}


def _several(answers: list[Answer]) -> Evidence:
    counts: dict[str, int] = {}
    for answer in answers:
        counts[str(answer.replica)] = counts.get(str(answer.replica), 0) + 1
    expect(len(counts) > 1, "all of them went to one replica", replicas=counts)
    return {"replicas": counts}
