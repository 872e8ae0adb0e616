"""Prompts echoed and scored: what trainers read off a prompt, and that they may read it twice."""

from __future__ import annotations

from midstream_conformance.answers import Choice, is_hit, largest_difference
from midstream_conformance.checks.asking import plain_and_streamed
from midstream_conformance.outcome import expect
from midstream_conformance.rows import FIREWORKS, PROTOCOL, Evidence, row
from midstream_conformance.session import Session

FIELDS = f"{PROTOCOL}: Inference request fields beyond OpenAI's"
MODES = f"{FIREWORKS}: MoE Router Replay, Other API modes"
NEEDS = ("prompt_logprobs",)


@row(
    "echo.prompt",
    "echo puts the prompt's tokens before the answer's, each with a number as logprob, the first too",
    f"{PROTOCOL}: Logprobs",
    NEEDS,
)
async def prompt(session: Session) -> Evidence:
    asked = session.prompt(40)
    answer = await session.endpoint.complete(
        asked, max_tokens=6, ignore_eos=True, echo=True, logprobs=True, return_token_ids=True
    )
    choice = answer.choice
    expect(choice.ids == asked + (choice.token_ids or []), "content is not the prompt and then the answer",
           content=len(choice.ids), prompt=len(asked), answer=len(choice.token_ids or ()))  # fmt: skip
    made = [token for token in choice.tokens[len(asked) :] if not token.echoed]
    expect(
        len(made) == 6, "sampling_logprob is null on generated tokens, or they are not 6", generated=len(made)
    )
    return {"prompt_tokens": len(asked), "generated": 6}


@row("echo.text", "Under echo the text begins with the prompt's", FIELDS, NEEDS)
async def text(session: Session) -> Evidence:
    asked = "The quick brown fox jumps over the lazy dog."
    answer = await session.endpoint.complete(asked, max_tokens=4, echo=True)
    expect(
        answer.choice.text.startswith(asked),
        "the text does not begin with the prompt",
        text=answer.choice.text[:80],
    )
    return {"characters": len(answer.choice.text)}


@row("echo.last", "echo_last N echoes the last N prompt tokens only", MODES, NEEDS)
async def last(session: Session) -> Evidence:
    asked = session.prompt(40)
    answer = await session.endpoint.complete(
        asked, max_tokens=4, ignore_eos=True, echo=True, echo_last=7, logprobs=True
    )
    choice = answer.choice
    expect(len(choice.ids) == 11, "7 and 4 entries were expected", got=len(choice.ids))
    expect(choice.ids[:7] == asked[-7:], "the entries are not the last 7 prompt tokens")
    return {"entries": 11}


@row("echo.score", "max_tokens 0 with echo scores the prompt, and generates nothing", FIELDS, NEEDS)
async def score(session: Session) -> Evidence:
    asked = session.prompt(40)
    answer = await session.endpoint.complete(asked, max_tokens=0, echo=True, logprobs=True)
    choice = answer.choice
    expect(choice.ids == asked, "content is not the prompt", entries=len(choice.ids))
    expect((answer.usage or {}).get("completion_tokens") == 0, "tokens were generated", usage=answer.usage)
    expect(all(value < 0 for value in choice.logprobs[1:]), "a prompt token has logprob 0 or more")
    return {"tokens": len(asked), "mean_logprob": sum(choice.logprobs[1:]) / 39}


@row("echo.stream", "A stream echoes as the plain answer does", FIELDS, NEEDS)
async def stream(session: Session) -> Evidence:
    asked = session.prompt(40)
    answers = await plain_and_streamed(session, asked, max_tokens=4, echo=True, logprobs=True)
    plain, streamed = (answer.choice for answer in answers)
    _begins_with(plain, asked, 4)
    expect(plain.ids == streamed.ids, "the tokens differ", plain=len(plain.ids), streamed=len(streamed.ids))
    worst = largest_difference(plain.logprobs, streamed.logprobs)
    expect(worst <= session.tolerance, "the logprobs differ", max_difference=worst)
    return {"entries": len(plain.ids), "max_difference": worst}


@row(
    "echo.warm",
    "An echo of a cached prompt gives the same numbers as the first one",
    f"{PROTOCOL}: Router replay (R3) alignment",
    NEEDS,
)
async def warm(session: Session) -> Evidence:
    asked, key = session.prompt(), session.key()
    first, second = [(await session.turn(asked, key, echo=True, logprobs=True)).choice for _ in range(2)]
    for choice in (first, second):
        _begins_with(choice, asked, 1)
    worst = largest_difference(first.logprobs[: len(asked)], second.logprobs[: len(asked)])
    expect(worst <= session.tolerance, "the second echo gives other numbers", max_difference=worst)
    return {"tokens": len(asked), "max_difference": worst}


@row(
    "echo.cached",
    "echo with logprobs does not switch prompt-cache reuse off",
    f"{PROTOCOL}: Router replay (R3) alignment",
    (*NEEDS, "cached_prompt_logprobs"),
)
async def cached(session: Session) -> Evidence:
    asked, key = session.prompt(), session.key()
    answers = [await session.turn(asked, key, echo=True, logprobs=True) for _ in range(2)]
    for answer in answers:
        _begins_with(answer.choice, asked, 1)
    found = [answer.cached for answer in answers]
    expect(
        is_hit(found[1], len(asked)),
        "the second echo computed its prompt again",
        cached_tokens=found,
        prompt=len(asked),
    )
    return {"cached_tokens": found, "prompt": len(asked)}


def _begins_with(choice: Choice, asked: list[int], more: int) -> None:
    """Its entries are the prompt's tokens and `more`."""
    expect(
        len(choice.ids) == len(asked) + more,
        f"{len(asked)} + {more} entries were expected",
        got=len(choice.ids),
    )
    expect(choice.ids[: len(asked)] == asked, "the entries do not begin with the prompt's tokens")
