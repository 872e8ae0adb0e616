"""The security page names tests that exist, and every place that reads the time of day."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
ACTORS = (
    "Rollout client",
    "Trainer",
    "Operator",
    "Another tenant",
    "Hostile bucket",
    "Neighbour on the machine",
)
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
#: How the time of day is read.
WALL_CLOCK = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.(now|utcnow|today)\b")


@cache
def defined_in(file: str) -> frozenset[str]:
    path = ROOT / file
    tree = ast.parse(path.read_text()) if path.exists() else ast.parse("")
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@pytest.mark.parametrize(("file", "test"), sorted(set(NAMED)))
def test_a_test_that_the_page_names_is_there(file: str, test: str) -> None:
    assert test.startswith("test_")
    assert test in defined_in(file)


def test_every_promise_names_its_test() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| ") and row.count(" | ") == 2]
    promises = [row for row in rows if not re.search(r"\| (shown in|is trusted with) \|$", row)]
    actors = [
        row
        for row in promises
        if re.match(r"\| (rollout client|trainer|operator|another|hostile|neigh)", row)
    ]
    without = [row for row in promises if "`tests/" not in row and row not in actors and "(#" not in row]
    assert len(promises) > 40
    assert without == []


@pytest.mark.parametrize("actor", ACTORS)
def test_each_actor_has_a_section_that_says_what_does_not_hold(actor: str) -> None:
    _, _, section = PAGE.partition(f"\n## {actor}\n")
    assert "**Does not hold.**" in section.partition("\n## ")[0]


def test_the_page_names_every_module_that_reads_the_time_of_day() -> None:
    source = ROOT / "src"
    reading = {
        str(file.relative_to(source)).removeprefix("midstream/")
        for file in source.rglob("*.py")
        if WALL_CLOCK.search(file.read_text())
    }
    _, _, clocks = PAGE.partition("The time of day is read")
    assert set(re.findall(r"`([a-z_/]+\.py)`", clocks)) == reading
