"""The rollout's figures as text: results/rollout.json to the marked part of docs/benchmarks.md.

Always holds: the text depends on the JSON alone (a test compares them).

    python rollout_table.py     # render again
"""

from __future__ import annotations

import json
from typing import Any

from document import write_part
from hardware import RESULTS

OURS = "affinity"
PREFILL_GOAL, LOAD_GOAL = 1.05, 1.25
LOADS = {"load_turns": "turns", "load_tokens": "tokens computed", "load_in_flight": "requests in flight"}


def render(result: dict[str, Any]) -> str:
    """The marked part."""
    return "\n\n".join(part for part in (_heading(result), _figures(result), _notes(result)) if part) + "\n"


def _heading(result: dict[str, Any]) -> str:
    hardware, versions, configuration = result["hardware"], result["versions"], result["configuration"]
    others = max(one["range"]["others"][1] for one in result["ways"].values())
    rounds = configuration["rounds"]
    peer = f", vllm-router {result['vllm_router']['version']}" if result["vllm_router"] else ""
    medians = (
        "A single round, not for comparison" if rounds == 1 else f"Medians of {rounds} rounds (least - most)"
    )
    return (
        f"{result['at'][:10]}, commit {result['commit'][:10]}{result['commit'][40:]}; {hardware['cores']} cores of an "
        f"{hardware['cpu']}, Python {versions['python']}, torch {versions['torch']}{peer}; {configuration['trajectories']} "
        f"trajectories of {configuration['turns']} turns on {configuration['replicas']} replicas. {medians}. "
        f"Other processes of the machine used at most {others:.2f} cores."
    )


def _figures(result: dict[str, Any]) -> str:
    single = result["configuration"]["rounds"] == 1

    def cell(one: dict[str, Any], name: str, form: str) -> str:
        least, most = (format(value, form) for value in one["range"][name])
        median = format(one[name], form)
        return median if single or least == most else f"{median} ({least} - {most})"

    rows = [
        [
            way,
            cell(one, "over_ideal", ".3f"),
            cell(one, "turn_ms_p50", ",.0f"),
            cell(one, "turn_ms_p99", ",.0f"),
            *(cell(one, name, ".2f") for name in LOADS),
            cell(one, "wall_s", ".1f"),
            cell(one, "cpu_s", ".1f"),
        ]
        for way, one in result["ways"].items()
    ]
    loads = [f"max/mean {what}" for what in LOADS.values()]
    head = ["", "prefill / ideal", "turn p50, ms", "turn p99, ms", *loads, "wall, s", "CPU of all, s"]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _notes(result: dict[str, Any]) -> str:
    lines = [f"- {name} is absent: {why.splitlines()[0]}." for name, why in result["absent"].items()]
    ideal, blocks = result["ideal_prefill_tokens"], result["ideal_prefill_tokens_in_blocks"]
    lines.append(
        f"- The ideal is {ideal:,} prompt tokens; {blocks / ideal:.3f} of it is the least there can be with blocks of "
        f"{result['configuration']['block']} tokens."
    )
    if (ours := result["ways"].get(OURS)) is not None:
        worst = {name: ours["range"][name][1] for name in ("over_ideal", *LOADS)}
        lines.append(
            f"- {OURS}, worst round: prefill {worst['over_ideal']:.3f} x the ideal; goal at most {PREFILL_GOAL:g}: "
            f"{_verdict(worst['over_ideal'], PREFILL_GOAL)}."
        )
        lines += [
            f"- {OURS}, worst round: max/mean of {what} {worst[name]:.2f}; goal at most {LOAD_GOAL:g}: "
            f"{_verdict(worst[name], LOAD_GOAL)}."
            for name, what in LOADS.items()
        ]
    return "\n".join(lines)


def _verdict(figure: float, most: float) -> str:
    return "met" if figure <= most else "not met"


def write_table(result: dict[str, Any]) -> None:
    write_part("rollout", render(result))


if __name__ == "__main__":
    write_table(json.loads((RESULTS / "rollout.json").read_text()))
