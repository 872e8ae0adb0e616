"""What a row is: one behaviour that the seeds promise, and a coroutine function that finds out whether it holds.

Always holds: a row's function returns the numbers it saw when the behaviour holds, raises Failed when it does not, and
Skipped when it could not be found out; ids are unique, and rows run in the order in which they were registered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from midstream.types import ENGINE_FEATURES

if TYPE_CHECKING:
    from midstream.conformance.session import Session

Verdict = Literal["pass", "fail", "skip"]
Evidence = Mapping[str, Any]  # of JSON's types
Check = Callable[["Session"], Awaitable[Evidence]]

#: The documents that promise.
FIREWORKS = "fireworks-inference-for-rl-rollouts.txt"
SKYRL = "skyrl-session-based-routing.txt"
PROTOCOL = "protocol/fireworks.md"
OWN = "docs/api.md"

#: What a row may need beside a feature of the engine (types.ENGINE_FEATURES).
NEEDS: dict[str, str] = {
    "publish": "snapshots can be published (--bucket and --checkpoint)",
    "moe": "a model with mixture-of-experts layers",
    "replicas>=2": "at least two replicas",
    "sync": "a transition that is SYNC, or can be set to it over the Deployments API",
    "keys": "an endpoint that asks for API keys",
    "midstream": "a midstream server: the behaviour is one of its own",
}


class Failed(Exception):
    """The behaviour does not hold; `evidence`: what was seen."""

    def __init__(self, why: str, /, **evidence: Any) -> None:
        super().__init__(why)
        self.evidence = evidence


class Skipped(Exception):
    """Whether the behaviour holds cannot be found out here."""


def expect(holds: object, why: str, /, **evidence: Any) -> None:
    """Raise Failed unless `holds`."""
    if not holds:
        raise Failed(why, **evidence)


def fail(why: str, /, **evidence: Any) -> NoReturn:
    raise Failed(why, **evidence)


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
    """Register the decorated coroutine function. Raises ValueError on an id that is taken, or a need nobody knows."""

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
