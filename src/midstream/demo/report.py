"""Writes `report.html`, one file with styles, SVG plots and tables, which needs no network; and `summary.json`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from midstream.core.text import size
from midstream.demo.records import StepRow
from midstream.demo.svg import Line, line_chart

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 980px; padding: 0 1rem; }
body { color: #1f2937; background: #fff; }
h1 { margin-bottom: .2rem; } h2 { margin-top: 2rem; }
.verdict { padding: .6rem .9rem; border-radius: 6px; background: #ecfdf5; } .verdict.missed { background: #fef2f2; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem; }
svg { width: 100%; border: 1px solid #e5e7eb; border-radius: 6px; }
svg .title { font-weight: 600; font-size: 13px; fill: #1f2937; } svg .tick { font-size: 11px; fill: #6b7280; }
svg .grid { stroke: #e5e7eb; stroke-width: 1; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #e5e7eb; text-align: right; } th { background: #f9fafb; }
th:first-child, td:first-child { text-align: left; }
"""


def write(out: Path, rows: Sequence[StepRow], summary: dict[str, Any], misses: Sequence[str]) -> None:
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (out / "report.html").write_text(render(rows, summary, misses), encoding="utf-8")


def render(rows: Sequence[StepRow], summary: dict[str, Any], misses: Sequence[str]) -> str:
    if misses:
        verdict = '<p class="verdict missed">Missed: ' + "; ".join(map(escape, misses)) + "</p>"
    else:
        verdict = '<p class="verdict">Every check of the run holds.</p>'
    plots = "".join(f"<div>{plot}</div>" for plot in _plots(rows))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>midstream demo</title>'
        f"<style>{STYLE}</style></head><body><h1>midstream demo</h1>"
        f"<p>{len(rows)} steps of GRPO on a tiny MoE, seed {escape(str(summary['seed']))}: rollouts sampled through live "
        "weight swaps, one per step, published as deltas between full snapshots.</p>"
        f"{verdict}<h2>Over the steps</h2><div class='plots'>{plots}</div>"
        f"<h2>Steps</h2>{_steps(rows)}<h2>Summary</h2>{_summary(summary)}</body></html>\n"
    )


def _plots(rows: Sequence[StepRow]) -> list[str]:
    errors = [
        statistics.stdev(row.rewards) / math.sqrt(len(row.rewards)) if len(row.rewards) > 1 else 0.0
        for row in rows
    ]
    return [
        line_chart(
            "Reward (band: 1 standard error)", "reward", [Line("reward", [r.reward for r in rows], errors)]
        ),
        line_chart(
            "Rollout-to-trainer KL (k3, mean over tokens)",
            "nats",
            [
                Line("own routes", [r.kl_own_routes for r in rows]),
                Line("replayed routes", [r.kl_replayed_routes for r in rows]),
            ],
            log=True,
        ),
        line_chart(
            "Pause of a swap",
            "ms",
            [
                Line("mean", [statistics.fmean(r.pause_ms) if r.pause_ms else math.nan for r in rows]),
                Line("max", [max(r.pause_ms, default=math.nan) for r in rows]),
            ],
        ),
        line_chart(
            "What a publication sent (peaks: full snapshots)",
            "share of the whole checkpoint",
            [Line("sent", [r.bytes_sent / r.bytes_whole if r.bytes_whole else math.nan for r in rows])],
        ),
        line_chart(
            "Routes that bfloat16 and float32 choose differently",
            "share",
            [
                Line("tokens, any layer", [r.route_diff_share for r in rows]),
                Line("tokens x layers", [r.route_layer_diff_share for r in rows]),
            ],
        ),
        line_chart(
            "Prompt tokens from the prefix cache",
            "share",
            [Line("cached", [r.cached_prompt_share for r in rows])],
        ),
        line_chart(
            "Across swaps",
            "share",
            [
                Line("older tokens", [r.older_snapshot_share for r in rows]),
                Line("streams crossing", [r.streams_crossed_swap / r.streams for r in rows]),
            ],
        ),
    ]


def _steps(rows: Sequence[StepRow]) -> str:
    heads = (
        "snapshot", "reward", "sent", "publish s", "pause ms", "cached prompt", "older tokens", "streams crossed",
        "KL own routes", "KL replayed", "routes differ", "failed", "seconds",
    )  # fmt: skip
    lines = [
        (
            row.snapshot,
            f"{row.reward:.3f}",
            f"{row.kind} {size(row.bytes_sent)}" if row.served else "-",
            f"{row.publish_s:.1f}",
            ", ".join(f"{pause:.1f}" for pause in row.pause_ms) or "-",
            f"{row.cached_prompt_share:.1%}",
            f"{row.older_snapshot_share:.1%}",
            f"{row.streams_crossed_swap} of {row.streams}",
            f"{row.kl_own_routes:.2e}",
            f"{row.kl_replayed_routes:.2e}",
            f"{row.route_diff_share:.2%}",
            str(row.failed_requests),
            f"{row.seconds:.2f}",
        )
        for row in rows
    ]
    return _table(heads, lines)


def _summary(summary: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {version}" for name, version in value.items())
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    return _table(("quantity", "value"), [(name, text(value)) for name, value in summary.items()])


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
