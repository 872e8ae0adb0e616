"""The tables of docs/metrics.md, made of the table in the code. Run as a script it writes them."""

from __future__ import annotations

from pathlib import Path

from midstream.proxy.families import SECTIONS, shown_name

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN, END = "<!-- begin: metrics -->\n", "<!-- end: metrics -->\n"


def tables() -> str:
    parts = []
    for heading, families in SECTIONS.items():
        rows = [f"**{heading}**", "", "| name | kind | labels | what it says |", "|---|---|---|---|"]
        for name, family in families.items():
            labels = ", ".join(f"`{label}`" for label in family.labels)
            rows.append(f"| `{shown_name(name)}` | {family.kind} | {labels} | {family.help} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def written(text: str) -> str:
    """The document with the tables in their place."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + tables() + END + rest.partition(END)[2]


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
