"""Session affinity: where the turns of a trajectory go, and that they find there what the turns before left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from midstream_conformance.answers import Answer, is_hit
from midstream_conformance.checks.asking import together
from midstream_conformance.endpoint import AFFINITY_HEADER, TRAJECTORY_HEADER
from midstream_conformance.outcome import expect
from midstream_conformance.rows import FIREWORKS, PROTOCOL, SKYRL, Evidence, row
from midstream_conformance.session import Session

AFFINITY = f"{FIREWORKS}: Session affinity"
KEYS, TURNS = 20, 2
# Long enough for requests that are sent together to meet.
LASTING = {"max_tokens": 16, "ignore_eos": True}
TRAJECTORIES = 4
RETRIED = 12
# Tokens of a prompt and of its answer. Half of both is found only where the answer's KV is kept.
SHORT, LONG = 64, 224
#: Requests for each replica, and the share of these that each one must get. Chance spreads keys.
SPREAD, SPREAD_SHARE = 16, 1 / 8
#: The same for requests that are balanced by load.
BALANCED, BALANCED_SHARE = 12, 1 / 3
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
    answers = await together(
        _ask(session, {TRAJECTORY_HEADER: session.key(), AFFINITY_HEADER: shared}, LASTING)
        for _ in range(KEYS)
    )
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
    name = f"sampling_{session.key()}"
    return await _sticky(session, lambda key, turn: ({SKYRL_HEADER: f"{name}:{int(key[-6:], 16)}"}, {}))


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
    count = SPREAD * _replicas(session)
    asked = (_ask(session, {TRAJECTORY_HEADER: session.key()}, LASTING) for _ in range(count))
    return _shared_out(session, await together(asked), SPREAD_SHARE)


@row("affinity.no_key", "Requests without a key are balanced by load", f"{SKYRL}: Routing key", TWO)
async def no_key(session: Session) -> Evidence:
    count = BALANCED * _replicas(session)
    asked = (_ask(session, {}, {"max_tokens": 64, "ignore_eos": True}) for _ in range(count))
    return _shared_out(session, await together(asked), BALANCED_SHARE)


@row(
    "affinity.turns",
    "The next turn of a trajectory finds prompt and answer of the one before in the cache",
    AFFINITY,
)
async def turns(session: Session) -> Evidence:
    begun = [(session.key(), session.prompt(SHORT)) for _ in range(TRAJECTORIES)]
    first = await together(session.turn(prompt, key, max_tokens=LONG, logprobs=True) for key, prompt in begun)
    lengths = [len(answer.choice.ids) for answer in first]
    expect(lengths == [LONG] * TRAJECTORIES, f"answers of {LONG} tokens were expected", lengths=lengths)
    second = await together(
        session.turn([*prompt, *answer.choice.ids, *session.prompt(8)], key)
        for (key, prompt), answer in zip(begun, first, strict=True)
    )
    found = [answer.cached for answer in second]
    evidence = {"cached_tokens": found, "prompt": SHORT, "answer": LONG}
    expect(is_hit(min(found), SHORT + LONG), "a second turn computed its prefix again", **evidence)
    return evidence


@row(
    "affinity.retry",
    "A retried request goes where the first one went, and finds its prompt there",
    f"{SKYRL}: When you'd care, Retries",
)
async def retry(session: Session) -> Evidence:
    found, homes = [], []
    for _ in range(RETRIED):
        key, prompt = session.key(), session.prompt()
        answers = [await session.turn(prompt, key, seed=1) for _ in range(2)]
        found.append(answers[1].cached)
        homes.append(len({answer.replica for answer in answers}))
    expect(max(homes) == 1, "a retry went to another replica")
    expect(is_hit(min(found), len(prompt)), "a retry computed its prompt again", cached_tokens=found)
    return {"cached_tokens": found}


@row(
    "affinity.choices",
    "All n choices of a request are on one replica: every one's next turn finds the prompt and its answer",
    f"{SKYRL}: When you'd care, num_samples > 1",
)
async def choices(session: Session) -> Evidence:
    key, prompt = session.key(), session.prompt(SHORT)
    answer = await session.turn(prompt, key, n=4, max_tokens=LONG, logprobs=True)
    lengths = [len(choice.ids) for choice in answer.choices.values()]
    expect(lengths == [LONG] * 4, f"four choices of {LONG} tokens were expected", lengths=lengths)
    turns = [await session.turn([*prompt, *choice.ids], key) for choice in answer.choices.values()]
    found = [turn.cached for turn in turns]
    evidence = {"cached_tokens": found, "prompt": SHORT, "answer": LONG}
    expect(
        is_hit(min(found), SHORT + LONG), "a choice's next turn computed what came before again", **evidence
    )
    homes = {turn.replica for turn in turns} | {answer.replica}
    expect(len(homes) == 1, "the turns are on several replicas", replicas=sorted(map(str, homes)))
    return evidence


async def _ask(session: Session, headers: Mapping[str, str], fields: Mapping[str, Any]) -> Answer:
    """A short request with a prompt of its own, so that no cached prefix decides where it goes."""
    asked = {"max_tokens": 1, **fields}
    return await session.endpoint.complete(session.prompt(48), headers=headers, **asked)


async def _sticky(
    session: Session, naming: Callable[[str, int], tuple[dict[str, str], dict[str, Any]]]
) -> Evidence:
    """naming(key, turn): headers and body fields of a request."""
    keys = [session.key() for _ in range(KEYS)]
    # All at once: one by one, new sessions may for a while go where the fewest are.
    first = await together(
        _ask(session, headers, LASTING | fields) for headers, fields in (naming(key, 0) for key in keys)
    )
    homes = {key: {answer.replica} for key, answer in zip(keys, first, strict=True)}
    for turn in range(1, TURNS):
        # In one order, taking turns would look like affinity.
        for key in session.shuffled(keys):
            homes[key].add((await _ask(session, *naming(key, turn))).replica)
    expect(
        all(None not in seen for seen in homes.values()),
        "no header names the replica: x-midstream-replica or fireworks-backend-host",
    )
    moved = [sorted(map(str, seen)) for seen in homes.values() if len(seen) > 1]
    expect(not moved, f"{len(moved)} of {KEYS} keys were on several replicas", first=moved[:1])
    used = set.union(*homes.values())
    expect(len(used) > 1, f"all {KEYS} keys went to one replica, so this is no key", replicas=[*used])
    return {"keys": KEYS, "turns": TURNS, "replicas": len(used)}


def _replicas(session: Session) -> int:
    return session.target.replicas or 2


def _shared_out(session: Session, answers: Sequence[Answer], share: float) -> Evidence:
    """Each replica has at least `share` of what it would have if all had equally many."""
    counts = Counter(str(answer.replica) for answer in answers)
    even = len(answers) / _replicas(session)
    fewest = min(counts.values()) if len(counts) >= _replicas(session) else 0
    expect(fewest >= share * even, "a replica has too few of them", replicas=dict(counts), even=even)
    return {"replicas": dict(counts)}
