"""Deltas over limited links as text: results/links.json and link-swap.json to their marked parts of docs/benchmarks.md.

Always holds: the text depends on the JSON alone (a test compares them).

    python links_table.py     # render both again
"""

from __future__ import annotations

import json
from typing import Any

from document import table, write_part
from hardware import RESULTS

ROUNDS = [
    "replicas",
    "fetch, s",
    "rebuild, s",
    "verify, s",
    "all, s",
    "slowest, s",
    "link + bare rebuild, s",
    "ratio",
    "CPU of one, s",
    "other cores",
]
WAY = {"apart": "cores for each in turn", "together": "cores for all at once"}


def about(result: dict[str, Any]) -> str:
    """Where a result came from."""
    hardware, versions = result["hardware"], result["versions"]
    return (
        f"{result['at'][:10]}, commit {result['commit'][:10]}{result['commit'][40:]}; {hardware['cores']} cores of an "
        f"{hardware['cpu']}, Python {versions['python']}, torch {versions['torch']}; "
        f"medians of {result['configuration']['rounds']} rounds."
    )


def render(result: dict[str, Any]) -> str:
    """The marked part of links.json."""
    body = [
        [
            f"{line['replicas']}, {WAY[line['way']]}",
            *(f"{line[key]:.2f}" for key in ("fetch_s", "rebuild_s", "verify_s", "total_s", "slowest_s")),
            f"{line['link_s']:.2f} + {line['bare_s']:.2f}",
            f"{line['ratio']:.2f}",
            f"{line['cpu_s']:.1f}",
            f"{line['others_cores']:.2f}",
        ]
        for line in result["lines"]
    ]
    peak = max(line["peak_bytes"] for line in result["lines"])
    after = (
        f"A model of {result['bytes'] / 1e9:.2f} GB, a delta of {result['delta_bytes'] / 1e6:.1f} MB. A replica's end took "
        f"{peak / 1e6:.0f} MB of memory at most."
    )
    return f"{about(result)}\n\n{table(ROUNDS, body)}\n\n{after}\n"


def render_swap(result: dict[str, Any]) -> str:
    """The marked part of link-swap.json."""
    line = result["lines"][0]
    seconds = {
        "`begin` waits": "blocked_s",
        "`begin` waits, if the copy is made beside the training": "beside_blocked_s",
        "a bare copy of the tensors": "copy_s",
        "encoding the delta": "encode_s",
        "fetch": "fetch_s",
        "rebuild": "rebuild_s",
        "verify": "verify_s",
        "stage": "stage_s",
        "check": "check_s",
        "from the signal until it serves": "served_s",
        "link + rebuild": "bound_s",
    }
    body = [[name, f"{line[key]:.2f}"] for name, key in seconds.items() if key in line]
    after = (
        f"{line['bytes'] / 1e9:.2f} GB, deltas of {line['bytes_sent'] / 1e6:.1f} MB. Whole, verified files are there after "
        f"{line['fetched_ratio']:.2f} x link + rebuild, and served after {line['ratio']:.2f} x. The engine's own memory holds "
        f"{line['models']:.2f} models at most during a swap, beside runtime and KV; with mapped files it takes "
        f"{line['engine_peak'] / 1e9:.2f} GB. The replica's process takes {line['replica_peak'] / 1e6:.0f} MB."
    )
    return f"{about(result)}\n\n{table(['', 's'], body)}\n\n{after}\n"


def write_tables() -> None:
    for name, rendered in (("links", render), ("link-swap", render_swap)):
        path = RESULTS / f"{name}.json"
        if path.exists():
            write_part(name, rendered(json.loads(path.read_text())))


if __name__ == "__main__":
    write_tables()
