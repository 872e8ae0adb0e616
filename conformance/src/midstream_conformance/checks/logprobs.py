"""Log-probabilities of generated tokens: the raw model's, the sampler's, and the formats they come in."""

from __future__ import annotations

import math
from typing import Any

from midstream_conformance.answers import Token, largest_difference
from midstream_conformance.checks.asking import plain_and_streamed
from midstream_conformance.endpoint import TRAJECTORY_HEADER
from midstream_conformance.outcome import expect
from midstream_conformance.rows import FIREWORKS, PROTOCOL, Evidence, row
from midstream_conformance.session import Session

FORMAT = f"{FIREWORKS}: MoE Router Replay, example response"
LOGPROBS = f"{PROTOCOL}: Logprobs"
FILTERED: dict[str, Any] = {"temperature": 0.7, "top_k": 3, "top_logprobs": 5, "logprobs": True}
TOKENS = 16


@row(
    "logprobs.content",
    "logprobs.content has token, logprob, sampling_logprob and token_id of every token: completions, chat, streams",
    FORMAT,
)
async def content(session: Session) -> Evidence:
    fields: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": True}
    endpoint = session.endpoint
    answers = {
        "completions": await endpoint.complete(session.prompt(24), **fields),
        "completions, stream": await endpoint.complete(session.prompt(24), stream=True, **fields),
        "chat": await endpoint.chat("Say something.", **fields),
        "chat, stream": await endpoint.chat("Say something.", stream=True, **fields),
    }
    for where, answer in answers.items():
        choice = answer.choice
        expect(len(choice.tokens) == TOKENS, f"{where}: {len(choice.tokens)} entries for {TOKENS} tokens")
        for token in choice.tokens:
            sampling = token.sampling_logprob
            sound = isinstance(token.entry.get("token"), str) and token.logprob <= 1e-4
            sound = sound and isinstance(sampling, int | float) and sampling <= 1e-4
            expect(sound, f"{where}: an entry is not of the format", entry=str(dict(token.entry))[:200])
    return {"tokens": TOKENS * len(answers)}


@row("logprobs.stream", "A stream's log-probabilities are those of the plain answer", LOGPROBS)
async def stream(session: Session) -> Evidence:
    answers = await plain_and_streamed(session, session.prompt(24), max_tokens=TOKENS, logprobs=True)
    plain, streamed = (answer.choice for answer in answers)
    expect(plain.ids == streamed.ids, "greedy tokens differ", plain=plain.ids, streamed=streamed.ids)
    return _near(session, plain.logprobs, streamed.logprobs, "plain and streamed logprobs differ", TOKENS)


@row(
    "logprobs.raw",
    "logprob is the raw model's, whatever temperature and filters: an echo of the tokens scores them the same",
    LOGPROBS,
    ("prompt_logprobs",),
)
async def raw(session: Session) -> Evidence:
    prompt = session.prompt(24)
    tokens = await _filtered(session, prompt, "temperature", "top_k")
    scores = await session.endpoint.score([*prompt, *(token.id for token in tokens)])
    given = [token.logprob for token in tokens]
    return _near(session, given, scores[len(prompt) :], "logprob is not what the echo says", TOKENS)


async def _filtered(session: Session, prompt: list[int], *names: str) -> list[Token]:
    """TOKENS generated tokens, under those of FILTERED that are named."""
    fields: dict[str, Any] = {name: FILTERED[name] for name in names}
    answer = await session.endpoint.complete(
        prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=True, **fields
    )
    tokens = answer.choice.tokens
    expect(len(tokens) == TOKENS, f"{len(tokens)} entries for {TOKENS} tokens")
    return tokens


@row(
    "logprobs.sampling",
    "sampling_logprob is after temperature and top_k: it follows from the raw ones of the tokens that were left",
    LOGPROBS,
    ("sampling_logprobs",),
)
async def sampling(session: Session) -> Evidence:
    prompt = session.prompt(24)
    free = await _filtered(session, prompt)
    worst = largest_difference([t.logprob for t in free], _sampled(free))
    expect(
        worst <= session.tolerance, "without filters sampling_logprob is not logprob", max_difference=worst
    )
    tokens = await _filtered(session, prompt, "temperature", "top_k", "top_logprobs")
    expected = []
    for token in tokens:
        left = sorted((top["logprob"] for top in token.entry["top_logprobs"]), reverse=True)[
            : FILTERED["top_k"]
        ]
        weights = [math.exp(value / FILTERED["temperature"]) for value in left]
        expected.append(token.logprob / FILTERED["temperature"] - math.log(sum(weights)))
    got = _sampled(tokens)
    apart = largest_difference(got, [t.logprob for t in tokens])
    expect(apart > session.tolerance, "sampling_logprob is the raw one, as if nothing were filtered")
    why = "sampling_logprob is not that of temperature 0.7 and top_k 3"
    return _near(session, got, expected, why, TOKENS)


def _sampled(tokens: list[Token]) -> list[float]:
    """Of generated tokens, the sampling_logprob of each."""
    found = [token.sampling_logprob for token in tokens]
    given = [value for value in found if isinstance(value, int | float)]
    expect(len(given) == len(found), "a generated token has no sampling_logprob", sampling_logprobs=found)
    return given


@row(
    "logprobs.top",
    "top_logprobs are the likeliest tokens in order; a greedy token is the first of them",
    LOGPROBS,
)
async def top(session: Session) -> Evidence:
    answer = await session.endpoint.complete(
        session.prompt(24), max_tokens=8, temperature=0, logprobs=True, top_logprobs=4, ignore_eos=True
    )
    tokens = answer.choice.tokens
    expect(len(tokens) == 8, f"{len(tokens)} entries for 8 tokens")
    for token in tokens:
        listed = token.entry.get("top_logprobs") or []
        values = [entry["logprob"] for entry in listed]
        expect(len(listed) == 4, f"4 alternatives were expected, got {len(listed)}")
        expect(values == sorted(values, reverse=True), "alternatives are not in order", logprobs=values)
        near = abs(values[0] - token.logprob) <= session.tolerance
        expect(near, "a greedy token is not the likeliest", logprob=token.logprob, top=values[0])
    return {"tokens": len(tokens)}


@row("logprobs.legacy", "logprobs as a whole number gives the legacy lists, with the same numbers", LOGPROBS)
async def legacy(session: Session) -> Evidence:
    prompt, headers = session.prompt(24), {TRAJECTORY_HEADER: session.key()}
    fields: dict[str, Any] = {
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "prompt_cache_max_len": 0,
    }
    new = (await session.endpoint.complete(prompt, headers=headers, logprobs=True, **fields)).choice
    old = (await session.endpoint.complete(prompt, headers=headers, logprobs=2, **fields)).choice
    lists = old.extra.get("logprobs") or {}
    lengths = {
        name: len(lists.get(name) or ())
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    expect(set(lengths.values()) == {8}, "four lists of 8 were expected", lengths=lengths)
    return _near(session, lists["token_logprobs"], new.logprobs, "the two formats give other numbers", 8)


def _near(session: Session, got: list[float], expected: list[float], why: str, count: int) -> Evidence:
    """Both are `count` numbers that are equal within the tolerance."""
    expect(
        len(got) == len(expected) == count, f"{count} numbers were expected", got=[len(got), len(expected)]
    )
    worst = largest_difference(got, expected)
    expect(worst <= session.tolerance, why, max_difference=worst, tolerance=session.tolerance)
    return {"tokens": len(got), "max_difference": worst}
