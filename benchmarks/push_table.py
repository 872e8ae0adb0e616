"""The pushes' figures as text: results/push.json to the marked part of docs/benchmarks.md.

Always holds: the text depends on the JSON alone (a test compares them).

    python push_table.py     # render again
"""

from __future__ import annotations

import json
from typing import Any

from document import table, write_part
from hardware import RESULTS

HEAD = [
    "replicas",
    "bare broadcast, s",
    "push until sent, s",
    "ratio",
    "push until served, s",
    "`begin` waits, s",
]


def render(result: dict[str, Any]) -> str:
    """The marked part."""
    hardware, versions = result["hardware"], result["versions"]
    heading = (
        f"{result['at'][:10]}, commit {result['commit'][:10]}{result['commit'][40:]}; {hardware['cores']} cores of an "
        f"{hardware['cpu']}, Python {versions['python']}, torch {versions['torch']}; "
        f"{result['lines'][0]['bytes'] / 1e9:.2f} GB, medians of {result['configuration']['rounds']} rounds."
    )
    body = [
        [
            str(line["replicas"]),
            f"{line['bare_s']:.2f}",
            f"{line['sent_s']:.2f}",
            f"{line['ratio']:.2f}",
            f"{line['served_s']:.2f}",
            f"{line['blocked_s']:.2f}",
        ]
        for line in result["lines"]
    ]
    return f"{heading}\n\n{table(HEAD, body)}\n"


def write_table(result: dict[str, Any]) -> None:
    write_part("push", render(result))


if __name__ == "__main__":
    write_table(json.loads((RESULTS / "push.json").read_text()))
