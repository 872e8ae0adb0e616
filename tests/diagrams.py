"""State machines as docs/state-machines.md shows them."""

from __future__ import annotations

from typing import Any

from midstream.core.table import Table
from midstream.proxy.request_state import RULINGS


def mermaid(table: Table[Any, Any, Any]) -> str:
    lines = ["stateDiagram-v2", f"    [*] --> {table.first}"]
    for (at, event), (to, action) in table.items():
        lines.append(f"    {at} --> {to}: {event}" + ("" if action is None else f" / {action}"))
    return "\n".join(lines) + "\n"


def rulings_table() -> str:
    lines = ["| the replica refuses because | a request | the rest of a stream |", "|---|---|---|"]
    lines += [f"| {reason} | {first or 'never'} | {again} |" for reason, (first, again) in RULINGS.items()]
    return "\n".join(lines) + "\n"
