"""Incremental snapshots: deltas that load, and those that must not."""

from __future__ import annotations

import json
from pathlib import Path

from midstream.snapshots.layout import read_file_layout
from midstream_conformance.answers import largest_difference
from midstream_conformance.checks.asking import everywhere, must_not_load
from midstream_conformance.endpoint import TRAJECTORY_HEADER
from midstream_conformance.outcome import expect
from midstream_conformance.rows import PROTOCOL, Evidence, row
from midstream_conformance.session import Session
from midstream_conformance.variants import Variant

DELTAS = f"{PROTOCOL}: Hot load, incremental_snapshot_metadata"
NEEDS = ("publish", "prompt_logprobs")
MIN_DIFFERENCE = 0.2


@row(
    "incremental.delta",
    "A delta on what serves becomes the weights of the whole checkpoint, and another one stands on it",
    DELTAS,
    NEEDS,
)
async def delta(session: Session) -> Evidence:
    snapshots, prompt = session.snapshots, session.prompt(64)
    await snapshots.hold("head")
    whole = await session.endpoint.score(prompt)
    parent = await snapshots.hold("same")
    plain = await session.endpoint.score(prompt)
    chain = [parent]
    apart = []
    steps: tuple[tuple[Variant, Variant], ...] = (("same", "head"), ("head", "same"))
    for before, after in steps:
        name = await snapshots.put_delta(before, after)
        await snapshots.signal(name, previous=chain[-1])
        await snapshots.wait(name)
        chain.append(name)
        wanted = whole if after == "head" else plain
        apart += [largest_difference(wanted, scores) for scores in await _scores(session, prompt)]
    worst = max(apart)
    evidence = {"chain": len(chain), "max_difference": worst, "compared": len(apart)}
    telling = largest_difference(whole, plain)
    expect(
        telling > MIN_DIFFERENCE, "the two checkpoints do not differ, so nothing is shown", difference=telling
    )
    expect(
        worst <= session.tolerance,
        "a delta gave other weights than the checkpoint it was made of",
        **evidence,
    )
    return evidence


async def _scores(session: Session, prompt: list[int]) -> list[list[float]]:
    """As every replica scores it."""
    answers = await everywhere(session, lambda key: session.endpoint.scored(prompt, {TRAJECTORY_HEADER: key}))
    return [answer.choice.logprobs for answer in answers]


@row(
    "incremental.parent",
    "A delta on something that does not serve is refused, and the message names the previous snapshot",
    DELTAS,
    ("publish",),
)
async def parent(session: Session) -> Evidence:
    snapshots = session.snapshots
    serving = await snapshots.hold("same")
    name = await snapshots.put_delta("same", "head")
    said = await must_not_load(session, name, serving, previous=f"{snapshots.prefix}-nobody")
    expect(
        "previous" in said or "nobody" in said, "the message does not name the previous snapshot", said=said
    )
    return {"said": said}


@row(
    "incremental.checksum",
    "A delta with a wrong checksum never serves; the status says so, and the old snapshot keeps serving",
    DELTAS,
    ("publish",),
)
async def checksum(session: Session) -> Evidence:
    snapshots = session.snapshots
    serving = await snapshots.hold("same")
    name = await snapshots.put_delta("same", "head", spoil=_wrong_checksums)
    said = await must_not_load(session, name, serving, previous=serving)
    expect("checksum" in said.lower(), "the message does not say that a checksum is wrong", said=said)
    return {"said": said}


def _wrong_checksums(directory: Path) -> None:
    for file in directory.glob("*.safetensors"):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header["__metadata__"] = {name: str(int(value) ^ 1) for name, value in header["__metadata__"].items()}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        # Whole, but for the checksums.
        read_file_layout(file)
