"""Makes the summary and the verdict from the rows of the steps. Pure.

Always holds: every number of the summary but seed, steps and seconds is computed here, from rows alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from midstream.demo.records import StepRow

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
