"""Hot load: signals, what replicas are said to do with them, and that what failed its checks never serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream.core.wires import HOT_LOAD_PATH
from midstream_conformance.answers import is_hit, largest_difference
from midstream_conformance.checks.asking import everywhere, must_not_load
from midstream_conformance.endpoint import TRAJECTORY_HEADER, error_of, refusal
from midstream_conformance.outcome import Skipped, expect
from midstream_conformance.rows import OWN, PROTOCOL, Evidence, row
from midstream_conformance.session import Session
from midstream_conformance.variants import Variant

HOT_LOAD = f"{PROTOCOL}: Hot load"
PUBLISH = ("publish",)
SOURCE_HEADER = "x-fireworks-hot-load-source-url"
LEDGER_TRIES, POLL_S = 50, 0.1
# A repeated signal is watched for as long as a load takes, within these bounds.
SETTLE_S = (
    0.5,
    10.0,
)
# Names that config.json may give a model's width.
WIDTHS = ("hidden_size", "n_embd", "d_model")
# Nats between different weights, on the average of a prompt's tokens.
MIN_DIFFERENCE = 0.2


@row(
    "hotload.status",
    "GET says of each replica what serves, whether it is ready, and a loading_state that is never null",
    HOT_LOAD,
)
async def status(session: Session) -> Evidence:
    response = await session.endpoint.request("GET", HOT_LOAD_PATH)
    expect(response.status_code == 200, refusal(response))
    rows = response.json()["replicas"]
    expect(isinstance(rows, list) and rows, "there are no replicas")
    for entry in rows:
        loading = entry.get("loading_state")
        sound = isinstance(entry.get("readiness"), bool) and isinstance(loading, dict)
        sound = sound and isinstance(loading.get("stage"), str) and "target_snapshot_identity" in loading
        expect(
            sound and "current_snapshot_identity" in entry,
            "a replica's entry is not of the form",
            entry=entry,
        )
    return {
        "replicas": len(rows),
        "serving": sorted({str(entry["current_snapshot_identity"]) for entry in rows}),
    }


@row(
    "hotload.ready",
    "After a signal every replica gets ready on the snapshot, and answers carry its name",
    HOT_LOAD,
    PUBLISH,
)
async def ready(session: Session) -> Evidence:
    identity = await session.snapshots.serve(session.snapshots.other())
    answers = await everywhere(session, lambda key: session.turn([20, 21], key))
    labels = sorted({str(answer.label) for answer in answers})
    expect(labels == [identity], f"the label {identity} was expected", labels=labels)
    return {"identity": identity, "asked": len(answers)}


@row(
    "hotload.weights",
    "The weights really change: a prompt's logprobs do, on every replica, and come back with the first files under a new name",
    HOT_LOAD,
    ("publish", "prompt_logprobs"),
)
async def weights(session: Session) -> Evidence:
    prompt = session.prompt(64)
    first = await _scores(session, "same", prompt)
    other = await _scores(session, "all", prompt)
    again = await _scores(session, "same", prompt)
    expect(again[0] != first[0], "the same name was used again")
    came_back = max(largest_difference(first[1][0], scores) for scores in (*first[1], *again[1]))
    differs = min(_mean_difference(first[1][0], scores) for scores in other[1])
    evidence = {"max_difference_same_weights": came_back, "mean_difference_other_weights": differs}
    expect(differs >= MIN_DIFFERENCE, "other weights give the same logprobs somewhere", **evidence)
    expect(came_back <= session.tolerance, "the same weights give other logprobs", **evidence)
    return evidence


async def _scores(session: Session, variant: Variant, prompt: list[int]) -> tuple[str, list[list[float]]]:
    """A new identity that serves `variant`, and the prompt's scores on every replica."""
    identity = await session.snapshots.serve(variant, fresh=True)
    answers = await everywhere(session, lambda key: session.endpoint.scored(prompt, {TRAJECTORY_HEADER: key}))
    return identity, [answer.choice.logprobs for answer in answers]


def _mean_difference(first: list[float], second: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


@row(
    "hotload.idempotent",
    "Signalling what serves again changes nothing, and no replica loads",
    HOT_LOAD,
    PUBLISH,
)
async def idempotent(session: Session) -> Evidence:
    snapshots, clock = session.snapshots, asyncio.get_running_loop().time
    began = clock()
    identity = await snapshots.serve(snapshots.other())
    watched_s = min(max(clock() - began, SETTLE_S[0]), SETTLE_S[1])
    key, prompt = session.key(), session.prompt()
    await session.turn(prompt, key)
    for _ in range(2):
        await snapshots.signal(identity)
    end, watching = clock() + watched_s, True
    while watching:
        # One more look after the end.
        watching = clock() < end
        now = await snapshots.status()
        expect(now.serves(identity), "a replica is not ready any more", status=str(now))
        await asyncio.sleep(POLL_S / 2)
    found = (await session.turn(prompt, key)).cached
    expect(is_hit(found, len(prompt)), "the repeated signal reset the prompt cache", cached_tokens=found)
    return {"identity": identity, "cached_tokens": found, "watched_s": watched_s}


@row("hotload.identity", "An identity that could lead out of the bucket is a 400", HOT_LOAD, PUBLISH)
async def identity(session: Session) -> Evidence:
    asked = ["", ".", "..", "../up", "a/../b", "/root", "a\\b", "a\x00b", "x" * 513]
    for name in asked:
        response = await session.snapshots.post(name)
        expect(response.status_code == 400, f"{name[:20]!r}: 400 was expected, got {refusal(response)}")
    return {"refused": len(asked)}


@row("hotload.unknown_field", "An unknown field of a signal is a 400 that names it", HOT_LOAD, PUBLISH)
async def unknown_field(session: Session) -> Evidence:
    response = await session.snapshots.post(session.snapshots.name(), no_such_field=1)
    expect(response.status_code == 400, f"400 was expected, got {refusal(response)}")
    expect(
        "no_such_field" in str(error_of(response)),
        "the error does not name the field",
        error=error_of(response),
    )
    return {"status": 400}


@row(
    "hotload.missing",
    "A snapshot that is not in the bucket is refused or fails; the old one keeps serving",
    HOT_LOAD,
    PUBLISH,
)
async def missing(session: Session) -> Evidence:
    before = await session.snapshots.any()
    said = await must_not_load(session, session.snapshots.name(), before)
    return {"still": before, "said": said}


@row(
    "hotload.corrupt",
    "A snapshot with a truncated file fails, the status names the file, and the old one keeps serving",
    HOT_LOAD,
    PUBLISH,
)
async def corrupt(session: Session) -> Evidence:
    found = await session.once("snapshot with a truncated file", _truncated)
    expect(found.file in found.said, f"the error does not name {found.file}", said=found.said)
    return {"still": found.before, "said": found.said}


@dataclass(frozen=True)
class _Spoilt:
    """A snapshot that did not load; before: what serves. said: of it, by the status."""

    identity: str
    file: str
    before: str
    said: str


async def _truncated(session: Session) -> _Spoilt:
    files: list[str] = []

    def truncate(directory: Path) -> None:
        file = max(directory.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-64])
        files.append(file.name)

    before = await session.snapshots.any()
    name = await session.snapshots.put_changed(truncate)
    return _Spoilt(name, files[0], before, await must_not_load(session, name, before))


@row(
    "hotload.config",
    "A snapshot with another config.json fails with 'Config value mismatch for FIELD'; the old one keeps serving",
    HOT_LOAD,
    PUBLISH,
)
async def config(session: Session) -> Evidence:
    fields: list[str] = []

    def widen(settings: dict[str, Any]) -> None:
        for place, inner in (("", settings), ("text_config", settings.get("text_config") or {})):
            for field in WIDTHS:
                if not fields and isinstance(inner.get(field), int):
                    inner[field] *= 2
                    # Some servers name the field at the top only.
                    fields.append(place or field)
        if not fields:
            raise Skipped(f"config.json has none of {', '.join(WIDTHS)}")

    before = await session.snapshots.any()
    name = await session.snapshots.put_changed(lambda directory: _edit_config(directory, widen))
    said = await must_not_load(session, name, before)
    expect(f"Config value mismatch for {fields[0]}" in said.replace("'", ""), "the error does not name the field",
           field=fields[0], said=said)  # fmt: skip
    return {"still": before, "said": said}


@row(
    "hotload.extra_fields_ignore",
    "A config field of another value fails, and is skipped when validation.extra_fields_ignore names it",
    HOT_LOAD,
    PUBLISH,
)
async def extra_fields_ignore(session: Session) -> Evidence:
    def add(directory: Path) -> None:
        _edit_config(directory, lambda settings: settings.update(conformance_extra=1))

    snapshots = session.snapshots
    before = await snapshots.any()
    said = await must_not_load(session, await snapshots.put_changed(add), before)
    name = await snapshots.put_changed(add)
    response = await snapshots.post(name, validation={"extra_fields_ignore": ["conformance_extra"]})
    expect(response.is_success, refusal(response))
    await snapshots.wait(name)
    return {"without": said, "with": name}


@row(
    "hotload.source_url",
    f"{SOURCE_HEADER} says where the files lie; outside the bucket it is a 400",
    HOT_LOAD,
    PUBLISH,
)
async def source_url(session: Session) -> Evidence:
    snapshots = session.snapshots
    lies_at = await snapshots.ready(snapshots.other(), fresh=True)
    name = snapshots.name()
    response = await snapshots.post_from(name, snapshots.url_of(lies_at))
    expect(response.is_success, refusal(response))
    await snapshots.wait(name)
    label = (await session.turn([20, 21], session.key())).label
    expect(label == name, f"the label {name} was expected", label=label)
    refused = await snapshots.post_from(snapshots.name(), "file:///etc/conformance")
    expect(refused.status_code == 400, f"outside: 400 was expected, got {refusal(refused)}")
    return {"identity": name, "files_of": lies_at}


@row(
    "hotload.ledger",
    "The ledger has every signal: full or delta, when each replica was ready, and the error of what failed",
    f"{OWN}: Hot load",
    ("publish", "midstream"),
)
async def ledger(session: Session) -> Evidence:
    snapshots = session.snapshots
    spoilt = await session.once("snapshot with a truncated file", _truncated)
    full = await snapshots.serve(snapshots.other())
    parent = snapshots.variants[full]
    delta = await snapshots.put_delta(parent, "head" if parent == "same" else "same")
    await snapshots.signal(delta, previous=full)
    await snapshots.wait(delta)
    # The ledger is written a moment after the replicas serve.
    for _ in range(LEDGER_TRIES):
        body, rows = await _ledger(session)
        if all(
            _complete(session, rows.get(name), name != spoilt.identity)
            for name in (full, delta, spoilt.identity)
        ):
            break
        await asyncio.sleep(POLL_S)
    desired = body["desired_snapshot_identity"]
    expect(desired == delta, "the desired snapshot is another", desired=desired)
    for name, kind, ready in ((full, "full", True), (delta, "delta", True), (spoilt.identity, "full", False)):
        entry = rows.get(name)
        expect(entry is not None and entry["kind"] == kind, f"{name} is not there as {kind}", entry=entry)
        what = "ready_at" if ready else "ready_at null and an error"
        expect(
            _complete(session, entry, ready), f"{name}: not every replica is there with {what}", entry=entry
        )
    previous = rows[delta]["previous_snapshot_identity"]
    expect(previous == full, f"the delta stands on {full}", previous=previous)
    return {"snapshots": len(body["snapshots"]), "replicas": len(_replicas(rows[delta]))}


async def _ledger(session: Session) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The ledger, and the last row of each identity in it."""
    response = await session.endpoint.request("GET", f"/v1/{session.target.deployment}/ledger")
    expect(response.status_code == 200, refusal(response))
    body = response.json()
    return body, {entry["identity"]: entry for entry in body["snapshots"]}


def _complete(session: Session, entry: dict[str, Any] | None, ready: bool) -> bool:
    """Whether every replica is in a row of the ledger: with the time when it was ready, or with its error."""
    replicas = _replicas(entry) if entry else []
    if len(replicas) != (session.target.replicas or len(replicas)) or not replicas:
        return False
    if ready:
        return all(replica.get("ready_at") for replica in replicas)
    return all(replica.get("error") and not replica.get("ready_at") for replica in replicas)


def _replicas(entry: dict[str, Any]) -> list[dict[str, Any]]:
    replicas = entry["replicas"]
    return list(replicas.values() if isinstance(replicas, dict) else replicas)


def _edit_config(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    file = directory / "config.json"
    settings = json.loads(file.read_text())
    edit(settings)
    file.write_text(json.dumps(settings))
