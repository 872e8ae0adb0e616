"""Results for people and for programs. Pure.

Always holds: a line of the table says what was seen, and for a failure what was expected; the exit code follows from the
verdicts alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from midstream.commands.table import plain, seconds
from midstream.conformance.rows import Evidence, Result
from midstream.conformance.target import Target

SHOWN_CHARS = 160  # of evidence in a line
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


def exit_code(results: Sequence[Result], strict: bool) -> int:
    found = counts(results)
    return int(found["fail"] > 0 or (strict and found["skip"] > 0))


def as_json(
    results: Sequence[Result], target: Target, url: str, left_on: str | None, code: int
) -> dict[str, Any]:
    """The whole run as JSON's types."""
    return {
        "url": url,
        "model": target.model,
        "deployment": target.deployment,
        "engine": target.engine,
        "features": None if target.features is None else list(target.features),
        "replicas": target.replicas,
        "left_on_snapshot": left_on,
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
                "evidence": dict(result.evidence),
                "seconds": round(result.seconds, 3),
            }
            for result in results
        ],
    }
