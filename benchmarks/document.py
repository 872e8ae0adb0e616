"""docs/benchmarks.md: what each benchmark's JSON says, between marks that name the JSON.

Owns: tables, and the replacement of a marked part.
Always holds: what is outside the marks stays as it is.
"""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def table(head: list[str], body: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def replaced(document: str, name: str, part: str) -> str:
    """The document with the part of `name`.json replaced. Raises ValueError when it has no marks for it."""
    marks = [f"<!-- {which}: {name}.json -->\n" for which in ("begin", "end")]
    before, begin, rest = document.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"the document has no part marked as {name}.json's")
    return before + begin + part + end + after


def write_part(name: str, part: str, document: Path = DOCUMENT) -> None:
    document.write_text(replaced(document.read_text(), name, part))
