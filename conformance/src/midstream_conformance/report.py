"""Results for people and for programs. Pure.

Always holds: a line of the table shows the observation, and for a failure also what was expected. The exit code follows from
the verdicts, and from whether the deployment was put back. The JSON is strict: a NaN or an infinity is null.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.core.text import plain, seconds
from midstream.core.types import BASE_SNAPSHOT
from midstream.core.wires import HOT_LOAD_PATH
from midstream_conformance.rows import Evidence, Result
from midstream_conformance.target import Target

# Exit code.
INTERRUPTED = 130
# Characters of evidence in a line.
SHOWN_CHARS = 160
_MARKS = {"pass": "pass", "fail": "FAIL", "skip": "skip"}


def line(result: Result, width: int) -> str:
    """One row of the table. width: of the id column."""
    said = result.why if result.verdict == "skip" else seen(result.evidence)
    head = f"{_MARKS[result.verdict]}  {result.row.id.ljust(width)}  {seconds(result.seconds):>7}"
    text = f"{head}  {plain(said)[:SHOWN_CHARS]}".rstrip()
    if result.verdict != "fail":
        return text
    return f"{text}\n      promised: {result.row.statement}\n      found: {plain(result.why)}"


def seen(evidence: Evidence) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in evidence.items())


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def counts(results: Sequence[Result]) -> dict[str, int]:
    found = Counter(result.verdict for result in results)
    return {"pass": found["pass"], "fail": found["fail"], "skip": found["skip"]}


def summary(results: Sequence[Result], strict: bool) -> str:
    found = counts(results)
    text = f"{found['pass']} passed, {found['fail']} failed, {found['skip']} skipped"
    return f"{text} (--strict: a skip is a failure)" if strict and found["skip"] else text


@dataclass(frozen=True)
class Left:
    """How the deployment was left. on_snapshot: one of ours, None if none ever served or it is unknown. put_back: it has the
    checkpoint's weights and the transition of before.
    """

    on_snapshot: str | None
    put_back: bool


def exit_code(results: Sequence[Result], strict: bool, put_back: bool) -> int:
    found = counts(results)
    return int(found["fail"] > 0 or (strict and found["skip"] > 0) or not put_back)


def had_before(target: Target) -> str:
    """What served before the run, and how to have it back; empty when that is unknown."""
    if not target.serving:
        return ""
    signals = [
        f'POST {HOT_LOAD_PATH} {{"identity": "{name}"}}' for name in target.serving if name != BASE_SNAPSHOT
    ]
    if BASE_SNAPSHOT in target.serving:
        signals.append(f"DELETE /v1/{target.deployment}/ledger")
    return f"{', '.join(target.serving)} served before: to have it back, {' or '.join(signals)}"


def as_json(results: Sequence[Result], target: Target, url: str, left: Left, code: int) -> dict[str, Any]:
    """The whole run as JSON's types, or what was done of it when it was interrupted."""
    return {
        "url": url,
        "model": target.model,
        "deployment": target.deployment,
        "engine": target.engine,
        "features": None if target.features is None else list(target.features),
        "replicas": target.replicas,
        "served_before": list(target.serving),
        "left_on_snapshot": left.on_snapshot,
        "put_back": left.put_back,
        "interrupted": code == INTERRUPTED,
        "counts": counts(results),
        "exit_code": code,
        "rows": [
            {
                "id": result.row.id,
                "group": result.row.group,
                "statement": result.row.statement,
                "source": result.row.source,
                "needs": list(result.row.needs),
                "verdict": result.verdict,
                "why": result.why,
                "evidence": _finite(result.evidence),
                "seconds": round(result.seconds, 3),
            }
            for result in results
        ],
    }


def _finite(value: Any) -> Any:
    """JSON has neither infinity nor NaN."""
    if isinstance(value, Mapping):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
