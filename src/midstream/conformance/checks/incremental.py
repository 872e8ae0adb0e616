"""Incremental snapshots: deltas that load, and those that must not."""

from __future__ import annotations

import json
from pathlib import Path

from midstream.conformance.answers import largest_difference
from midstream.conformance.endpoint import refusal
from midstream.conformance.rows import PROTOCOL, Evidence, expect, row
from midstream.conformance.session import Session
from midstream.conformance.variants import Variant
from midstream.snapshots.layout import read_file_layout

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
    scores = []
    steps: tuple[tuple[Variant, Variant], ...] = (("same", "head"), ("head", "same"))
    for before, after in steps:
        name = await snapshots.put_delta(before, after)
        await snapshots.signal(name, previous=chain[-1])
        await snapshots.wait(name)
        chain.append(name)
        scores.append(await session.endpoint.score(prompt))
    worst = max(largest_difference(whole, scores[0]), largest_difference(plain, scores[1]))
    evidence = {"chain": len(chain), "max_difference": worst}
    apart = largest_difference(whole, plain)
    expect(apart > MIN_DIFFERENCE, "the two checkpoints do not differ, so nothing is shown", difference=apart)
    expect(
        worst <= session.tolerance,
        "a delta gave other weights than the checkpoint it was made of",
        **evidence,
    )
    return evidence


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
    response = await snapshots.post(name, previous=f"{snapshots.prefix}-nobody")
    if response.is_success:
        said = await snapshots.wait_failed(name)
    else:
        expect(response.status_code == 400, f"400 was expected, got {refusal(response)}")
        said = refusal(response)
    label = (await session.turn([20, 21], session.key())).label
    expect(label == serving, f"{serving} should go on serving", label=label)
    expect(
        "previous" in said or "nobody" in said, "the message does not name the previous snapshot", said=said
    )
    return {"said": said}


@row(
    "incremental.checksum",
    "A delta whose checksum is wrong never serves; the status says so, and the old snapshot goes on",
    DELTAS,
    ("publish",),
)
async def checksum(session: Session) -> Evidence:
    snapshots = session.snapshots
    serving = await snapshots.hold("same")
    name = await snapshots.put_delta("same", "head", spoil=_wrong_checksums)
    response = await snapshots.post(name, previous=serving)
    said = await snapshots.wait_failed(name) if response.is_success else refusal(response)
    expect("checksum" in said.lower(), "the message does not say that a checksum is wrong", said=said)
    label = (await session.turn([20, 21], session.key())).label
    expect(label == serving, f"{serving} should go on serving", label=label)
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
        read_file_layout(file)  # whole but for the checksums
