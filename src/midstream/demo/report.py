"""Writes `report.html`, one file with styles, SVG plots and tables, which needs no network; and `summary.json`.

Always holds: in a chart every label is escaped, and a value that is not finite is left out of its line. Every number of the
summary but seed, steps and seconds is computed here, from rows alone.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from midstream.core.text import size
from midstream.demo.records import StepRow

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 40
COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626")


@dataclass(frozen=True)
class Line:
    """values: at x = 1, 2, ... errors: the half-width of a band around the line, for each value."""

    name: str
    values: Sequence[float]
    errors: Sequence[float] = ()


def line_chart(title: str, unit: str, lines: Sequence[Line], *, log: bool = False) -> str:
    """One chart over steps. log: a decimal logarithmic y axis, which leaves out values at or below 0."""
    shown = [v for line in lines for v in line.values if _shows(v, log)]
    count = max((len(line.values) for line in lines), default=0)
    low, high, ticks = (_log_axis if log else _linear_axis)(shown or [1.0])

    def x(i: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (i / max(count - 1, 1))

    def y(value: float) -> float:
        at = math.log10(value) if log else value
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (min(max(at, low), high) - low) / (high - low))

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>',
    ]
    for tick in ticks:
        value = 10.0**tick if log else tick
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
    parts.extend(
        f'<text class="tick" x="{x(i):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{i + 1}</text>'
        for i in range(0, count, max(1, math.ceil(count / 10)))
    )
    parts.append(
        f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">step, y: {escape(unit)}</text>'
    )
    for line, color in zip(lines, COLORS, strict=False):
        points = [(x(i), y(v), v, i) for i, v in enumerate(line.values) if _shows(v, log)]
        parts.append(_band(line, color, x, y))
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        parts.extend(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.4" fill="{color}">'
            f"<title>{escape(line.name)}, step {i + 1}: {v:.4g}</title></circle>"
            for px, py, v, i in points
        )
    parts.append(_legend(lines))
    return "".join(parts) + "</svg>"


def _shows(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _band(line: Line, color: str, x: object, y: object) -> str:
    if not line.errors:
        return ""
    assert callable(x)
    assert callable(y)
    upper = [(x(i), y(v + e)) for i, (v, e) in enumerate(zip(line.values, line.errors, strict=True))]
    lower = [(x(i), y(v - e)) for i, (v, e) in enumerate(zip(line.values, line.errors, strict=True))]
    outline = " ".join(f"{px:.1f},{py:.1f}" for px, py in [*upper, *reversed(lower)])
    return f'<polygon points="{outline}" fill="{color}" opacity="0.18"/>'


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    parts, at = [], float(LEFT)
    for line, color in zip(lines, COLORS, strict=False):
        parts.append(f'<rect x="{at:.0f}" y="{HEIGHT - 15}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text class="tick" x="{at + 14:.0f}" y="{HEIGHT - 6}">{escape(line.name)}</text>')
        at += 26 + 6.2 * len(line.name)
    return "".join(parts)


def _linear_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """From 0 or below to a round number above the largest value, with about five ticks."""
    low, high = min(0.0, *values), max(values)
    if high <= low:
        high = low + 1.0
    rough = (high - low) / 5
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return first * step, last * step, [i * step for i in range(first, last + 1)]


def _log_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Whole decades around the values. Ticks are exponents."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    return float(low), float(high), [float(e) for e in range(low, high + 1)]


SWAPS_WANTED = 10
STANDARD_ERRORS_WANTED = 3.0


def summarise(rows: Sequence[StepRow], *, seed: int, steps: int, seconds: float) -> dict[str, Any]:
    """The summary of a run.

    reward_stderr: standard error of `reward_last - reward_first`, the difference of the mean rewards of the last and
        the first step's rollouts: sqrt(var_first / n_first + var_last / n_last).
    swaps: snapshots that every replica served. pause_ms_*: over all swaps of all replicas.
    bytes_full, bytes_delta: medians of the bytes that such a publication wrote into the bucket; None if there was none.
    publish_s_*: medians of the time from the copy of the weights, through encoding, until every replica served them.
    affinity_share: of rollouts that one replica served alone. KLs and other shares are means over all tokens of the run.
    """
    first, last = rows[0], rows[-1]
    tokens = sum(row.tokens for row in rows)
    streams = sum(row.streams for row in rows)
    rollouts = sum(len(row.rewards) for row in rows)
    pauses = [pause for row in rows for pause in row.pause_ms]
    served = [row for row in rows if row.served]
    sizes = {kind: [row.bytes_sent for row in served if row.kind == kind] for kind in ("full", "delta")}

    def token_mean(name: str) -> float:
        return float(sum(getattr(row, name) * row.tokens for row in rows) / tokens)

    return {
        "seed": seed,
        "steps": steps,
        "seconds": seconds,
        "reward_first": first.reward,
        "reward_last": last.reward,
        "reward_stderr": difference_stderr(first.rewards, last.rewards),
        "swaps": len(served),
        "full_snapshots": len(sizes["full"]),
        "deltas": len(sizes["delta"]),
        "bytes_full": _median(sizes["full"]),
        "bytes_delta": _median(sizes["delta"]),
        "publish_s_full": _median([row.publish_s for row in served if row.kind == "full"]),
        "publish_s_delta": _median([row.publish_s for row in served if row.kind == "delta"]),
        "failed_requests": sum(row.failed_requests for row in rows),
        "rollouts": rollouts,
        "streams": streams,
        "streams_crossed_swap": sum(row.streams_crossed_swap for row in rows),
        "affinity_share": sum(row.one_replica for row in rows) / rollouts,
        "older_snapshot_share": token_mean("older_snapshot_share"),
        "kl_own_routes": token_mean("kl_own_routes"),
        "kl_replayed_routes": token_mean("kl_replayed_routes"),
        "route_diff_share": token_mean("route_diff_share"),
        "route_layer_diff_share": token_mean("route_layer_diff_share"),
        "pause_ms_p50": _median(pauses),
        "pause_ms_max": max(pauses, default=None),
        "cached_prompt_share": sum(row.cached_prompt_tokens for row in rows)
        / sum(row.prompt_tokens for row in rows),
        "generated_tokens": tokens,
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def difference_stderr(first: Sequence[float], last: Sequence[float]) -> float:
    return math.sqrt(sum(statistics.variance(x) / len(x) if len(x) > 1 else 0.0 for x in (first, last)))


def misses(summary: dict[str, Any]) -> list[str]:
    """The checks that do not hold, one line each."""
    rise = summary["reward_last"] - summary["reward_first"]
    swaps_wanted = min(SWAPS_WANTED, summary["steps"])
    checks = [
        (
            rise > 0 and rise >= STANDARD_ERRORS_WANTED * summary["reward_stderr"],
            f"reward went from {summary['reward_first']:.3f} to {summary['reward_last']:.3f}: less than "
            f"{STANDARD_ERRORS_WANTED:.0f} standard errors of {summary['reward_stderr']:.3f}",
        ),
        (summary["swaps"] >= swaps_wanted, f"{summary['swaps']} swaps, wanted {swaps_wanted}"),
        (summary["failed_requests"] == 0, f"{summary['failed_requests']} requests failed"),
        (
            summary["streams_crossed_swap"] >= 1 or summary["steps"] < 2,
            "no stream crossed a swap",
        ),
        (
            summary["affinity_share"] == 1.0,
            f"one replica served {summary['affinity_share']:.1%} of the rollouts, wanted all",
        ),
    ]
    return [message for holds, message in checks if not holds]


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
