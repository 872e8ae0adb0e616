"""How a row says that its behaviour does not hold, or that this could not be found out."""

from __future__ import annotations

from typing import Any, NoReturn


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
