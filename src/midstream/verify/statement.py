"""The statement of a verification: what was verified, against what, by what, with which result. Pure.

Always holds: a statement lists each file it stands on. The digest covers all but itself and the signature. The signature is an
HMAC of the same bytes, so that whoever has the key can check it, and nobody without it can make one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.types import Content
from midstream.snapshots.content import content_fingerprint
from midstream.verify.claims import ClaimedRecords
from midstream.verify.findings import Finding
from midstream.verify.verifier import Report

FORMAT = "midstream.verify.v1"
#: Of a key for signatures, in bytes.
KEY_BYTES_MIN = 16
STATEMENT_BYTES_MAX = 2**28
_SEALS = ("sha256", "signature")
#: Findings that a statement lists; it counts all.
FINDINGS_MAX = 1000


def statement_body(
    records: ClaimedRecords,
    report: Report,
    findings: Sequence[Finding],
    snapshots: Mapping[str, Content],
    stands_on: Mapping[str, str],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """about: where things were, versions, tolerances and what was asked for."""
    segments = [{"path": one.path, "sha256": one.sha256, "bytes": one.size} for one in records.segments]
    return {
        "format": FORMAT,
        "result": "differences" if findings else "clean",
        **about,
        "records": {
            "segments": segments,
            "sha256": hashlib.sha256(_encoded({"segments": segments})).hexdigest(),
        },
        # Such as gaps: what replicas lost.
        "other_records": dict(sorted(records.others.items())),
        "snapshots": {
            name: {
                "content": content_fingerprint(content).removeprefix("content:"),
                **({"stands_on": stands_on[name]} if name in stands_on else {}),
                "files": [
                    {"name": one.name, "bytes": one.size, "sha256_of_parts": one.digest} for one in content
                ],
            }
            for name, content in sorted(snapshots.items())
        },
        "verified": {
            "turns": report.turns,
            "tokens": report.tokens,
            "routes": report.routes,
            "router_weights": dict(sorted(report.weights.items())),
            "sampling_masks": report.masks,
            "positions_computed": report.positions,
            "largest_difference": report.off,
            "explained_by_router_ties": report.ties,
            "sampling_logprobs": dict(sorted(report.sampling.items())),
        },
        "not_verified": dict(sorted(report.unverified.items())),
        "record_files_gone": records.gone.facts(),
        "findings_count": len(findings),
        "findings": [msgspec.to_builtins(finding) for finding in findings[:FINDINGS_MAX]],
    }


def sealed(body: dict[str, Any], key: bytes | None) -> dict[str, Any]:
    """The statement with its digest and, with a key, its signature. Raises ValueError on a key that is too short."""
    data = _encoded(body)
    statement = {**body, "sha256": hashlib.sha256(data).hexdigest()}
    if key is not None:
        _check_key(key)
        statement["signature"] = {
            "algorithm": "hmac-sha256",
            "key": _key_name(key),
            "value": hmac.new(key, data, "sha256").hexdigest(),
        }
    return statement


def check_statement(data: bytes, key: bytes | None = None) -> dict[str, Any]:
    """The statement in `data`. Raises ValueError unless its digest is its own and, with a key, its signature is of this key."""
    try:
        found: dict[str, Any] = msgspec.json.decode(data[: STATEMENT_BYTES_MAX + 1], type=dict)
    except NOT_JSON as error:
        raise ValueError(f"this is no statement: {error}") from error
    if found.get("format") != FORMAT:
        raise ValueError(f"format: must be {FORMAT!r}")
    body = _encoded({name: value for name, value in found.items() if name not in _SEALS})
    if found.get("sha256") != hashlib.sha256(body).hexdigest():
        raise ValueError("sha256: is not that of this statement")
    if key is not None:
        _check_key(key)
        signature = found.get("signature")
        given = signature.get("value") if isinstance(signature, dict) else None
        if not isinstance(given, str) or not hmac.compare_digest(
            given.encode(), hmac.new(key, body, "sha256").hexdigest().encode()
        ):
            raise ValueError("signature: is not of this key")
    return found


def _encoded(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body, order="deterministic")


def _key_name(key: bytes) -> str:
    """Says which key it was, and nothing about it."""
    return hashlib.sha256(b"midstream.verify key " + key).hexdigest()[:16]


def _check_key(key: bytes) -> None:
    if len(key) < KEY_BYTES_MIN:
        raise ValueError(f"the key must have at least {KEY_BYTES_MIN} bytes, got {len(key)}")
