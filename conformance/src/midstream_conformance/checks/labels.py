"""Policy versions in responses: which snapshot served each token. How labels cross a switch is in transitions.py."""

from __future__ import annotations

import re

from midstream_conformance.checks.asking import serving
from midstream_conformance.outcome import expect
from midstream_conformance.rows import FIREWORKS, Evidence, row
from midstream_conformance.session import Session

VERSION = f"{FIREWORKS}: Policy version in responses"
_LABELLED = re.compile(r"accounts/[^/@]+/models/[^/@]+@[^@]+")


@row("labels.stream", "Every chunk's model is accounts/A/models/M@snapshot", f"{VERSION}, Streaming")
async def stream(session: Session) -> Evidence:
    answer = await session.endpoint.complete(session.prompt(16), max_tokens=8, ignore_eos=True, stream=True)
    named = [str(event.get("model")) for event in answer.events if isinstance(event, dict)]
    odd = [model for model in named if not _LABELLED.fullmatch(model)]
    expect(not odd, "a chunk's model names no snapshot", models=sorted(set(odd)), chunks=len(named))
    expect(len(set(named)) == 1, "the label changed without a switch", models=sorted(set(named)))
    return {"chunks": len(named), "model": named[0]}


@row(
    "labels.plain",
    "A plain answer's model names the snapshot too, completions and chat",
    f"{VERSION}, Non-streaming",
)
async def plain(session: Session) -> Evidence:
    answers = [
        await session.endpoint.complete(session.prompt(16), max_tokens=2),
        await session.endpoint.chat("Say something.", max_tokens=2),
    ]
    odd = [answer.model for answer in answers if not _LABELLED.fullmatch(answer.model)]
    expect(not odd, "an answer's model names no snapshot", models=odd)
    return {"model": answers[0].model}


@row("labels.served", "The label is the snapshot that the hot-load API says is served", VERSION)
async def served(session: Session) -> Evidence:
    known = await serving(session)
    answer = await session.endpoint.complete(session.prompt(16), max_tokens=2, stream=True)
    expect(answer.label in known, "the label is not what a replica serves", label=answer.label, serving=known)
    return {"label": answer.label, "serving": known}
