"""A row: one behaviour that the seeds promise, and a coroutine function that finds out whether it holds.

Always holds: a row's function returns the numbers it saw when the behaviour holds. It raises Failed when it does not hold, and
Skipped when that could not be found out (outcome.py). Ids are unique. Rows of a module run in its order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from midstream.core.types import ENGINE_FEATURES
from midstream_conformance.session import Session
from midstream_conformance.target import NEEDS

Verdict = Literal["pass", "fail", "skip"]
# Values are of JSON's types.
Evidence = Mapping[str, Any]
Check = Callable[[Session], Awaitable[Evidence]]

#: The documents that promise.
FIREWORKS = "fireworks-inference-for-rl-rollouts.txt"
SKYRL = "skyrl-session-based-routing.txt"
PROTOCOL = "protocol/fireworks.md"
OWN = "docs/api.md"
MESSAGES = "docs/messages.md"
RESPONSES = "docs/responses.md"
#: Of other companies' APIs, whose own references promise them.
ANTHROPIC = f"{MESSAGES}: introduction (the stock SDK works)"
OPENAI = f"{RESPONSES}: introduction (the stock SDK works)"


@dataclass(frozen=True)
class Row:
    """`source`: which document promises it, and its section there."""

    id: str
    statement: str
    source: str
    needs: tuple[str, ...]
    check: Check = field(repr=False)

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]


@dataclass(frozen=True)
class Result:
    """`why`: empty when it passed."""

    row: Row
    verdict: Verdict
    why: str
    evidence: Evidence
    seconds: float


_REGISTERED: dict[str, Row] = {}


def row(row_id: str, statement: str, source: str, needs: tuple[str, ...] = ()) -> Callable[[Check], Check]:
    """Register the decorated coroutine function. Raises ValueError on an id that is taken, or an unknown need."""

    def register(check: Check) -> Check:
        if row_id in _REGISTERED:
            raise ValueError(f"there are two rows {row_id}")
        if unknown := [need for need in needs if need not in NEEDS and need not in ENGINE_FEATURES]:
            raise ValueError(f"row {row_id}: no such need: {', '.join(unknown)}")
        _REGISTERED[row_id] = Row(row_id, statement, source, needs, check)
        return check

    return register


def registered() -> tuple[Row, ...]:
    """All rows of the modules imported so far, in their order."""
    return tuple(_REGISTERED.values())
