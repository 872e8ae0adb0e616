"""Writes `report.html`, one file with its styles, charts and tables, which needs no network; and `summary.json`.

Always holds: a value that is not finite is left out of its line, and no text of the run is markup. Every number of the summary
but seed, steps and seconds is computed here, from rows alone. uPlot draws the charts, as it draws the dashboard's.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from midstream.core.text import size
from midstream.demo.records import StepRow


@dataclass(frozen=True)
class Line:
    """values: at x = 1, 2, ... errors: the half-width of a band around the line, for each value."""

    name: str
    values: Sequence[float]
    errors: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """One chart over steps. log: a decimal logarithmic y axis, which leaves out values at or below 0."""

    title: str
    unit: str
    lines: Sequence[Line]
    log: bool = False

    def data(self) -> dict[str, Any]:
        """What report.js draws: null where nothing is."""

        def shown(value: float) -> float | None:
            return value if math.isfinite(value) and (value > 0 or not self.log) else None

        return {
            "title": self.title,
            "unit": self.unit,
            "log": self.log,
            "lines": [
                {
                    "name": line.name,
                    "values": [shown(value) for value in line.values],
                    "low": [shown(v - e) for v, e in zip(line.values, line.errors, strict=False)],
                    "high": [shown(v + e) for v, e in zip(line.values, line.errors, strict=False)],
                }
                for line in self.lines
            ],
        }


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
:root { --text: #1b2430; --soft: #5b6675; --back: #fff; --panel: #f6f8fa; --line: #d5dbe1; --good: #e4f4ec; --bad: #fbe9e7;
  --c0: #0072b2; --c1: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6eaef; --soft: #9aa6b4; --back: #12161b; --panel: #1b2129;
  --line: #343d48; --good: #143527; --bad: #43201d; --c0: #56b4e9; --c1: #ff8c42; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; padding: 0 1rem; }
body { color: var(--text); background: var(--back); }
h1 { margin-bottom: .2rem; } h2 { margin-top: 2rem; }
.verdict { padding: .6rem .9rem; border-radius: 6px; background: var(--good); } .verdict.missed { background: var(--bad); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .6rem; border: 1px solid var(--line); border-radius: 6px; background: var(--panel); min-width: 0; }
figcaption { font-weight: 600; font-size: 13px; } .u-legend { font-size: .8rem; text-align: left; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13px; }
.wide th, .wide td { padding: .25rem .5rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: baseline; }
.wide td { white-space: nowrap; } .wide th { background: var(--panel); }
.wide th:first-child, .wide td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; }
@media (max-width: 70rem) {
  table { font-size: 12px; } .wide th, .wide td { padding: .25rem .3rem; white-space: normal; }
  .wide th:first-child, .wide td:first-child { min-width: 4.5rem; }
}
@media (max-width: 46rem) {
  .wide table, .wide tbody, .wide td { display: block; } .wide thead { display: none; }
  .wide tr { display: flex; flex-wrap: wrap; gap: 0 .9rem; border-bottom: 1px solid var(--line); padding: .3rem 0; }
  .wide td, .wide td:first-child { min-width: 0; border: 0; padding: .05rem 0; text-align: left; overflow-wrap: anywhere; }
  .wide td:first-child { flex-basis: 100%; font-weight: 600; }
  .wide td::before { content: attr(data-head) ": "; color: var(--soft); }
}
"""


def write(out: Path, rows: Sequence[StepRow], summary: dict[str, Any], misses: Sequence[str]) -> None:
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (out / "report.html").write_text(render(rows, summary, misses), encoding="utf-8")


def render(rows: Sequence[StepRow], summary: dict[str, Any], misses: Sequence[str]) -> str:
    if misses:
        verdict = '<p class="verdict missed">Missed: ' + "; ".join(map(escape, misses)) + "</p>"
    else:
        verdict = '<p class="verdict">Every check of the run holds.</p>'
    charts = json.dumps([chart.data() for chart in _charts(rows)]).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>midstream demo</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<style>{_packed('dashboard', 'uPlot.css')}{STYLE}</style></head><body><h1>midstream demo</h1>"
        f"<p>{len(rows)} steps of GRPO on a tiny MoE, seed {escape(str(summary['seed']))}: rollouts sampled through live "
        "weight swaps, one per step, published as deltas between full snapshots.</p>"
        f"{verdict}<h2>Over the steps</h2><div class='plots'></div>"
        f"<h2>Steps</h2>{_steps(rows)}<h2>Summary</h2>{_summary(summary)}"
        f'<script type="application/json" id="charts">{charts}</script>'
        f"<script>{_packed('dashboard', 'uPlot.js')}</script><script>{_packed('demo', 'report.js')}</script></body></html>\n"
    )


def _packed(package: str, name: str) -> str:
    return (files(f"midstream.{package}") / name).read_text(encoding="utf-8")


def _charts(rows: Sequence[StepRow]) -> list[Chart]:
    errors = [
        statistics.stdev(row.rewards) / math.sqrt(len(row.rewards)) if len(row.rewards) > 1 else 0.0
        for row in rows
    ]
    return [
        Chart(
            "Reward (band: 1 standard error)", "reward", [Line("reward", [r.reward for r in rows], errors)]
        ),
        Chart(
            "Rollout-to-trainer KL (k3, mean over tokens)",
            "nats",
            [
                Line("own routes", [r.kl_own_routes for r in rows]),
                Line("replayed routes", [r.kl_replayed_routes for r in rows]),
            ],
            log=True,
        ),
        Chart(
            "Pause of a swap",
            "ms",
            [
                Line("mean", [statistics.fmean(r.pause_ms) if r.pause_ms else math.nan for r in rows]),
                Line("max", [max(r.pause_ms, default=math.nan) for r in rows]),
            ],
        ),
        Chart(
            "What a publication sent (peaks: full snapshots)",
            "share of the whole checkpoint",
            [Line("sent", [r.bytes_sent / r.bytes_whole if r.bytes_whole else math.nan for r in rows])],
        ),
        Chart(
            "Time to publish, from the copy until it serves",
            "seconds",
            [Line("publish", [r.publish_s if r.served else math.nan for r in rows])],
        ),
        Chart(
            "Routes that bfloat16 and float32 choose differently",
            "share",
            [
                Line("tokens, any layer", [r.route_diff_share for r in rows]),
                Line("tokens x layers", [r.route_layer_diff_share for r in rows]),
            ],
        ),
        Chart(
            "Prompt tokens from the prefix cache",
            "share",
            [Line("cached", [r.cached_prompt_share for r in rows])],
        ),
        Chart(
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


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


#: What a quantity of the summary is called, and how its value is written.
_WORDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "seconds": ("time", _seconds),
    "reward_first": ("mean reward, first step", "{:.3f}".format),
    "reward_last": ("mean reward, last step", "{:.3f}".format),
    "reward_stderr": ("standard error of their difference", "{:.3f}".format),
    "full_snapshots": ("full snapshots", "{:,}".format),
    "bytes_full": ("size of a full snapshot (median)", size),
    "bytes_delta": ("size of a delta (median)", size),
    "publish_s_full": ("time to publish a full snapshot (median)", _seconds),
    "publish_s_delta": ("time to publish a delta (median)", _seconds),
    "failed_requests": ("failed requests", "{:,}".format),
    "streams_crossed_swap": ("streams that crossed a swap", "{:,}".format),
    "affinity_share": ("rollouts that one replica served alone", "{:.1%}".format),
    "older_snapshot_share": ("tokens of older weights than the trainer's", "{:.1%}".format),
    "kl_own_routes": ("KL of rollout to trainer, own routes", "{:.2e} nats".format),
    "kl_replayed_routes": ("KL of rollout to trainer, replayed routes", "{:.2e} nats".format),
    "route_diff_share": ("tokens whose routes differ in a layer", "{:.2%}".format),
    "route_layer_diff_share": ("routes that differ, of all tokens and layers", "{:.2%}".format),
    "pause_ms_p50": ("pause of a swap, median", "{:.1f} ms".format),
    "pause_ms_max": ("pause of a swap, worst", "{:.1f} ms".format),
    "cached_prompt_share": ("prompt tokens from the cache", "{:.1%}".format),
    "generated_tokens": ("generated tokens", "{:,}".format),
}


def _summary(summary: dict[str, Any]) -> str:
    def line(name: str, value: Any) -> tuple[str, str]:
        words, write = _WORDS.get(name, (name, str))
        if isinstance(value, dict):
            return words, ", ".join(f"{part} {version}" for part, version in value.items())
        return words, "none" if value is None else write(value)

    return _table(("quantity", "value"), [line(name, value) for name, value in summary.items()])


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)

    def cells(line: Sequence[str]) -> str:
        return "".join(
            f'<td data-head="{escape(name)}">{escape(cell)}</td>'
            for name, cell in zip(heads, line, strict=True)
        )

    body = "".join(f"<tr>{cells(line)}</tr>" for line in lines)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
