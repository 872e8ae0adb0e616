"""The figures of many streams and of two cores as text: results/gateway-scale.json to the marked part of docs/benchmarks.md.

Always holds: the text depends on the JSON alone (a test compares them).

    python -m gateway.scale_table     # render again
"""

from __future__ import annotations

import json
from typing import Any

from document import table, write_part
from hardware import RESULTS

DIRECT = "direct"
#: How they run on two cores.
LABELS = {"haproxy": "haproxy, two threads"}


def render(result: dict[str, Any]) -> str:
    """The marked part."""
    parts = [_heading(result), _streams(result["streams"]), _two_cores(result["two_cores"]), _notes(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(result: dict[str, Any]) -> str:
    hardware = result["hardware"]
    return (
        f"{result['at'][:10]}, commit {result['commit'][:10]}{result['commit'][40:]}; {hardware['cores']} cores of an "
        f"{hardware['cpu']}, Python {result['versions']['python']}. Medians of {result['configuration']['rounds']} rounds."
    )


def _streams(part: dict[str, Any]) -> str:
    cells = part["cells"]
    direct = cells[DIRECT]
    rows = [
        [
            name,
            f"{cell['kb_per_stream']:.1f}",
            f"{cell['cpu_us']:.1f}",
            f"{cell['p50_us'] / 1e3:.1f}",
            f"{cell['p99_us'] / 1e3:.1f}",
            f"{cell['per_s'] / direct['per_s']:.1%}",
        ]
        for name, cell in cells.items()
        if name != DIRECT and "cpu_us" in cell
    ]
    head = ["", "KB per stream", "CPU per chunk, us", "event delay p50, ms", "p99, ms", "chunks in time"]
    before = (
        f"{part['streams']:,} streams are open at once, each with a chunk per second, through one router on one core. "
        f"An event's delay is from the mock's write to the client's read; "
        f"without a router: {direct['p50_us'] / 1e3:.1f} and {direct['p99_us'] / 1e3:.1f} ms."
    )
    return before + "\n\n" + table(head, rows)


def _two_cores(part: dict[str, Any]) -> str:
    cells = part["cells"]
    one = cells.get("midstream, one gateway", {}).get("per_s")
    rows = [
        [
            LABELS.get(name, name),
            f"{cell['per_s']:,.0f}",
            f"{cell['per_s'] / one:.2f}" if one else "-",
            f"{cell['cpu_us']:.1f}",
            f"{cell['p99_us'] / 1e3:.1f}",
        ]
        for name, cell in cells.items()
        if name != DIRECT and "cpu_us" in cell
    ]
    head = ["", "1 KB requests per second", "x one gateway", "CPU per request, us", "latency p99, ms"]
    before = f"1 KB requests on {part['connections']} connections. Router, load generator and mocks share two cores."
    return before + "\n\n" + table(head, rows)


def _notes(result: dict[str, Any]) -> str:
    return "\n".join(f"- {name} is absent: {why.splitlines()[0]}." for name, why in result["absent"].items())


def write_table(result: dict[str, Any]) -> None:
    write_part("gateway-scale", render(result))


if __name__ == "__main__":
    write_table(json.loads((RESULTS / "gateway-scale.json").read_text()))
