"""The contract of Miles and stitch with an external rollout service: versions that requests demand, in their words."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx

from midstream_conformance.answers import Json
from midstream_conformance.checks.paths import call
from midstream_conformance.endpoint import refusal
from midstream_conformance.outcome import expect
from midstream_conformance.rows import Evidence, row
from midstream_conformance.session import Session
from midstream_conformance.variants import Variant, write_variant

CONTRACT = "docs/trainer-calls.md: An external rollout service"
NEEDS = ("publish", "midstream", "sglang_generate")
#: As stitch names the refusal of a version.
NOT_READY = "WeightVersionNotReady"
RETRIES_MAX = 600
RETRY_S = 0.2


async def _version(session: Session, variant: Variant, number: int) -> int:
    """Weights under the name of a number, as their trainers publish them."""
    files = await session.snapshots.put(_copied(session, variant))
    response = await session.snapshots.post_from(str(number), session.snapshots.url_of(files))
    expect(response.is_success, f"the signal for version {number} was refused: {refusal(response)}")
    return number


def _copied(session: Session, variant: Variant) -> Any:
    return lambda directory: write_variant(session.snapshots.checkpoint, variant, directory)


def _new_number() -> int:
    """Higher than those of earlier runs."""
    return time.time_ns() // 1_000_000


async def _ask(
    session: Session, path: str, demand: Json, headers: dict[str, str] | None = None
) -> httpx.Response:
    prompt = session.prompt(16)
    if path == "/generate":
        params = {"max_new_tokens": 4, "ignore_eos": True}
        return await call(session, path, {"input_ids": prompt, "sampling_params": params, **demand}, headers)
    fields = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **demand}
    return await session.endpoint.post("/completions", fields, headers)


def _attributed(response: httpx.Response, path: str, wanted: int) -> None:
    """The answer says that this version served it, from the first token to the last."""
    expect(response.status_code == 200, f"{path}: {refusal(response)}")
    body = response.json()
    told = body.get("meta_info", {}) if path == "/generate" else body
    found = [told.get(f"weight_version_{end}") for end in ("start", "end")]
    expect(found == [wanted] * 2, f"{path}: weight_version_start and _end should be {wanted}", got=found)


@row(
    "contract.versions",
    "weight_version demands an exact or a least version; the answer has weight_version_start and weight_version_end",
    CONTRACT,
    NEEDS,
)
async def versions(session: Session) -> Evidence:
    number = await _version(session, "same", _new_number())
    await session.snapshots.wait(str(number))
    demands = ({"exact_version": number}, {"min_version": number}, {"min_version": 0, "exact_version": None})
    for path in ("/generate", "/completions"):
        for demand in demands:
            _attributed(await _ask(session, path, {"weight_version": demand}), path, number)
    return {"version": number, "demands": len(demands)}


@row(
    "contract.refusal",
    "A version that does not serve is a 409 with Retry-After, target_version and applied; another request is served",
    CONTRACT,
    NEEDS,
)
async def refused(session: Session) -> Evidence:
    number = await _version(session, "same", _new_number())
    await session.snapshots.wait(str(number))
    at_once = {"x-midstream-snapshot-wait": "0"}
    for name, target in (("exact_version", number - 1), ("min_version", number + 1)):
        for path in ("/generate", "/completions"):
            response = await _ask(session, path, {"weight_version": {name: target}}, at_once)
            expect(response.status_code == 409, f"{path}: 409 was expected, got {refusal(response)}")
            expect("retry-after" in response.headers, f"{path}: there is no Retry-After")
            body = response.json()
            told = [body.get(field) for field in ("type", "target_version", "applied")]
            expect(told == [NOT_READY, target, number], f"{path}: not what stitch says of it", got=told)
            expect(bool(body.get("message")), f"{path}: there is no message")
    _attributed(await _ask(session, "/generate", {"weight_version": {}}), "/generate", number)
    return {"version": number}


@row(
    "contract.admission",
    "A request for the next version, retried after each 409, is served by that version once it is there, and by no older one",
    CONTRACT,
    NEEDS,
)
async def admission(session: Session) -> Evidence:
    number = await _version(session, "same", _new_number())
    await session.snapshots.wait(str(number))
    asked = [asyncio.create_task(_retried(session, number + 1)) for _ in range(4)]
    try:
        await _version(session, "head", number + 1)
        answers = await asyncio.gather(*asked)
    finally:
        for one in asked:
            one.cancel()
    await session.snapshots.wait(str(number + 1))
    for response in answers:
        _attributed(response, "/generate", number + 1)
    return {"version": number + 1, "requests": len(answers)}


async def _retried(session: Session, least: int) -> httpx.Response:
    for _ in range(RETRIES_MAX):
        response = await _ask(session, "/generate", {"weight_version": {"min_version": least}})
        if response.status_code != 409:
            break
        await asyncio.sleep(RETRY_S)
    return response


@row(
    "contract.lineage",
    "A delta that says another base version than it may stand on never serves; the error says so",
    CONTRACT,
    ("publish", "midstream"),
)
async def lineage(session: Session) -> Evidence:
    snapshots = session.snapshots
    serving = await snapshots.hold("same")
    identity = await snapshots.put(_backwards)
    metadata = {"previous_snapshot_identity": serving, "compression_format": "miles_delta"}
    response = await snapshots.post(identity, incremental_snapshot_metadata=metadata)
    expect(response.is_success, f"the signal was refused: {refusal(response)}")
    said = await snapshots.wait_failed(identity)
    expect("version" in said, "the error does not name the version", said=said)
    labels = await session.labels()
    expect(labels == [serving], f"{serving} should keep serving", labels=labels)
    return {"said": said}


def _backwards(directory: Path) -> None:
    """A delta of no tensor that stands on a later version than its own."""
    metadata = {
        "version": "000005",
        "base_version": "000007",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    index = {"metadata": metadata, "weight_map": {}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
