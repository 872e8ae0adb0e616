"""Pushes through vLLM as text: results/vllm-push.json to its marked part of docs/benchmarks.md.

Always holds: the text depends on the JSON alone (a test compares them).

    python vllm_push_table.py     # render again
"""

from __future__ import annotations

import json
from typing import Any

from document import table, write_part
from hardware import RESULTS
from links_table import about

PHASES = ("init", "start", "update", "finish", "shutdown")
HEAD = ["phase", "vLLM alone, ms", "through midstream, ms", "more, ms"]


def render(result: dict[str, Any]) -> str:
    """The marked part."""
    parts = [about(result)]
    for line in result["lines"]:
        body = [
            [
                phase,
                *(f"{line[side][f'{phase}_ms']:.0f}" for side in ("bare", "midstream")),
                f"{line['more_ms'][phase]:.0f}",
            ]
            for phase in PHASES
        ]
        ours = line["midstream"]
        if "finish_control_ms" in ours:
            control = [
                f"{value:.0f}" for value in (ours["finish_control_ms"], line["more_ms"]["finish_control"])
            ]
            body.insert(PHASES.index("finish") + 1, ["finish, without its proof", "", *control])
        parts += [
            f"{line['bytes'] / 1e6:.0f} MB:",
            table(HEAD, body),
            f"Of finish, the swap takes {ours['finish_swap_ms']:.0f} ms by the replica's own report: verifying "
            f"{ours['finish_verify_ms']:.0f}, staging {ours['finish_stage_ms']:.0f}, and the check that weights compute "
            f"{ours['finish_check_ms']:.0f}.",
        ]
    return "\n\n".join(parts) + "\n"


def write_table(result: dict[str, Any]) -> None:
    write_part("vllm-push", render(result))


if __name__ == "__main__":
    write_table(json.loads((RESULTS / "vllm-push.json").read_text()))
