"""The deltas' figures as text: results/delta.json to the marked part of docs/benchmarks.md.

Always holds: the text depends on the JSON alone (a test compares them).

    python delta_table.py     # render again
"""

from __future__ import annotations

import json
from typing import Any

from document import table, write_part
from hardware import RESULTS


def render(result: dict[str, Any]) -> str:
    """The marked part."""
    layouts = result["layouts"]
    parts = [_heading(result), table(["GB/s of tensors (CPU s per GB)", *layouts], _speeds(layouts))]
    parts += [_ratios(layouts), _sizes(layouts)]
    return "\n\n".join(parts) + "\n"


def _heading(result: dict[str, Any]) -> str:
    hardware, versions = result["hardware"], result["versions"]
    busiest = max(row["others"] for layout in result["layouts"].values() for row in layout["rows"].values())
    counts = sorted({layout["rounds"] for layout in result["layouts"].values()})
    return (
        f"{result['at'][:10]}, commit {result['commit'][:10]}{result['commit'][40:]}; {hardware['cores']} cores of an "
        f"{hardware['cpu']}, Python {versions['python']}, zstandard {versions['zstandard']}, zlib-ng {versions['zlib-ng']}, "
        f"torch {versions['torch']}, fireworks-delta-compression {versions['fireworks-delta-compression']}; "
        f"{counts[0]} rounds. Other processes of the machine used at most {busiest:.2f} cores."
    )


def _speeds(layouts: dict[str, Any]) -> list[list[str]]:
    names = next(iter(layouts.values()))["rows"]
    return [
        [
            name,
            *(
                f"{layout['rows'][name]['gb_per_s']:.2f} ({layout['rows'][name]['cpu_s_per_gb']:.2f})"
                for layout in layouts.values()
            ),
        ]
        for name in names
    ]


def best(layout: dict[str, Any], prefix: str) -> tuple[str, float]:
    """The fastest row of that beginning, and its GB/s."""
    rows = {name: row["gb_per_s"] for name, row in layout["rows"].items() if name.startswith(prefix)}
    name = max(rows, key=lambda name: rows[name])
    return name, rows[name]


def _ratios(layouts: dict[str, Any]) -> str:
    lines = []
    for title, layout in layouts.items():
        for work in ("rebuild", "encode"):
            name, speed = best(layout, f"reference {work}")
            ours = layout["rows"][f"midstream {work}"]["gb_per_s"]
            lines.append(
                f"- {title}, {work}: {ours / speed:.2f} x the reference's best ({name.partition(', ')[2]})."
            )
    return "\n".join(lines)


def _sizes(layouts: dict[str, Any]) -> str:
    lines = []
    for title, layout in layouts.items():
        ours, theirs = layout["delta_bytes"]["midstream"], layout["delta_bytes"]["reference"]
        peak = {what: f"{size / 1e6:.0f} MB" for what, size in layout["peak_bytes"].items()}
        lines.append(
            f"- {title}: {layout['bytes'] / 1e6:.1f} MB of tensors, delta {ours / 1e6:.2f} MB, the reference's "
            f"{theirs / 1e6:.2f} MB; peak memory over the imports {peak['rebuild']} (rebuild), {peak['encode']} (encode)."
        )
    return "\n".join(lines)


def write_table(result: dict[str, Any]) -> None:
    write_part("delta", render(result))


if __name__ == "__main__":
    write_table(json.loads((RESULTS / "delta.json").read_text()))
