"""Hot load: signals, what replicas are said to do with them, and that what failed its checks never serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from midstream.client.server import HOT_LOAD_PATH
from midstream.conformance.answers import largest_difference
from midstream.conformance.endpoint import TRAJECTORY_HEADER, error_of, refusal
from midstream.conformance.rows import OWN, PROTOCOL, Evidence, Failed, expect, row
from midstream.conformance.session import Session
from midstream.conformance.variants import Variant

HOT_LOAD = f"{PROTOCOL}: Hot load"
PUBLISH = ("publish",)
PROBES = 6  # sessions that look at what serves, so that more than one replica is seen
SOURCE_HEADER = "x-fireworks-hot-load-source-url"
LEDGER_TRIES, LEDGER_POLL_S = 50, 0.1
MIN_DIFFERENCE = 0.2  # nats: between other weights, on the average of a prompt's tokens


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
    labels = {(await session.turn([20, 21], session.key())).label for _ in range(PROBES)}
    expect(labels == {identity}, f"the label {identity} was expected", labels=sorted(map(str, labels)))
    return {"identity": identity}


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
    """A new identity that serves `variant`, and the prompt's scores as several sessions get them."""
    identity = await session.snapshots.serve(variant, fresh=True)
    headers = [{TRAJECTORY_HEADER: session.key()} for _ in range(PROBES)]
    return identity, [await session.endpoint.score(prompt, one) for one in headers]


def _mean_difference(first: list[float], second: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


@row(
    "hotload.idempotent",
    "Signalling what serves again changes nothing, and no replica loads",
    HOT_LOAD,
    PUBLISH,
)
async def idempotent(session: Session) -> Evidence:
    snapshots = session.snapshots
    identity = await snapshots.serve(snapshots.other())
    key, prompt = session.key(), session.prompt()
    await session.turn(prompt, key)
    for _ in range(2):
        await snapshots.signal(identity)
    now = await snapshots.status()
    expect(now.serves(identity), "a replica is not ready any more", status=str(now))
    found = (await session.turn(prompt, key)).cached
    expect(found * 2 >= len(prompt), "the repeated signal reset the prompt cache", cached_tokens=found)
    return {"identity": identity, "cached_tokens": found}


@row("hotload.identity", "An identity that could lead out of the bucket is a 400", HOT_LOAD, PUBLISH)
async def identity(session: Session) -> Evidence:
    asked = ["", ".", "..", "../up", "a/../b", "/root", "a\\b", "a\x00b", "x" * 513]
    for name in asked:
        response = await session.snapshots.post(name)
        expect(response.status_code == 400, f"{name[:20]!r}: 400 was expected, got {refusal(response)}")
    return {"refused": len(asked)}


@row(
    "hotload.unknown_field", "A field of a signal that nobody knows is a 400 that names it", HOT_LOAD, PUBLISH
)
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
    "A snapshot that is not in the bucket is refused or fails; the old one goes on serving",
    HOT_LOAD,
    PUBLISH,
)
async def missing(session: Session) -> Evidence:
    before = await _serving(session)
    name = session.snapshots.name()
    response = await session.snapshots.post(name)
    if response.is_success:
        said = await session.snapshots.wait_failed(name)
    else:
        expect(response.status_code == 400, f"400 was expected, got {refusal(response)}")
        said = refusal(response)
    return await _still(session, before, said)


@row(
    "hotload.corrupt",
    "A snapshot with a truncated file fails, the status says where, and the old one goes on serving",
    HOT_LOAD,
    PUBLISH,
)
async def corrupt(session: Session) -> Evidence:
    def truncate(directory: Path) -> None:
        file = max(directory.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-64])

    return await _fails(session, truncate)


@row(
    "hotload.config",
    "A snapshot whose config.json differs fails with 'Config value mismatch for FIELD'; the old one goes on serving",
    HOT_LOAD,
    PUBLISH,
)
async def config(session: Session) -> Evidence:
    def widen(directory: Path) -> None:
        _edit_config(directory, lambda settings: settings.update(hidden_size=settings["hidden_size"] * 2))

    evidence = await _fails(session, widen)
    said = str(evidence["said"])
    expect(
        "Config value mismatch for" in said and "hidden_size" in said,
        "the error does not name the field",
        said=said,
    )
    return evidence


@row(
    "hotload.extra_fields_ignore",
    "A config field of another value fails, and is skipped when validation.extra_fields_ignore names it",
    HOT_LOAD,
    PUBLISH,
)
async def extra_fields_ignore(session: Session) -> Evidence:
    def add(directory: Path) -> None:
        _edit_config(directory, lambda settings: settings.update(conformance_extra=1))

    evidence = await _fails(session, add)
    snapshots = session.snapshots
    name = await _changed(session, add)
    response = await snapshots.post(name, validation={"extra_fields_ignore": ["conformance_extra"]})
    expect(response.is_success, refusal(response))
    await snapshots.wait(name)
    return {"without": evidence["said"], "with": name}


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
    identity = await snapshots.serve(snapshots.other())
    body, entry = await _ledger(session, identity)
    for _ in range(LEDGER_TRIES):  # it is written a moment after the replicas serve
        if all(replica.get("ready_at") for replica in _replicas(entry)):
            break
        await asyncio.sleep(LEDGER_POLL_S)
        body, entry = await _ledger(session, identity)
    expect(
        body["desired_snapshot_identity"] == identity,
        "the desired snapshot is another",
        desired=body["desired_snapshot_identity"],
    )
    shown = _replicas(entry)
    expect(entry["kind"] == "full", "its kind is not full", kind=entry["kind"])
    expect(all(replica.get("ready_at") for replica in shown), "a replica has no ready_at", replicas=shown)
    return {"snapshots": len(body["snapshots"]), "replicas": len(shown)}


async def _ledger(session: Session, identity: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ledger, and the last row of `identity` in it."""
    response = await session.endpoint.request("GET", f"/v1/{session.target.deployment}/ledger")
    expect(response.status_code == 200, refusal(response))
    body = response.json()
    rows = [entry for entry in body["snapshots"] if entry["identity"] == identity]
    expect(rows, f"{identity} is not in the ledger")
    return body, rows[-1]


def _replicas(entry: dict[str, Any]) -> list[dict[str, Any]]:
    replicas = entry["replicas"]
    return list(replicas.values() if isinstance(replicas, dict) else replicas)


def _edit_config(directory: Path, edit: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    file = directory / "config.json"
    settings = json.loads(file.read_text())
    edit(settings)
    file.write_text(json.dumps(settings))


async def _changed(session: Session, change: Callable[[Path], None]) -> str:
    """The identity of the checkpoint's own files, changed."""
    return await session.snapshots.put_changed(change)


async def _serving(session: Session) -> str:
    return await session.snapshots.any()


async def _fails(session: Session, change: Callable[[Path], None]) -> dict[str, object]:
    """Signal files that must not load."""
    before = await _serving(session)
    name = await _changed(session, change)
    response = await session.snapshots.post(name)
    said = await session.snapshots.wait_failed(name) if response.is_success else refusal(response)
    return await _still(session, before, said)


async def _still(session: Session, before: str, said: str) -> dict[str, object]:
    labels = {(await session.turn([20, 21], session.key())).label for _ in range(PROBES)}
    if labels != {before}:
        raise Failed(f"{before} should go on serving", labels=sorted(map(str, labels)))
    expect(said, "there is no error message")
    return {"still": before, "said": said}
