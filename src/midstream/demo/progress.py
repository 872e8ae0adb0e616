"""What the demo prints: live progress, the table of steps, the summary. Prints plain lines if there is no terminal."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from midstream.core.text import size
from midstream.demo.records import StepRow

PLAIN_WIDTH = 150
#: Without a terminal, what takes longer is said again, with the seconds.
QUIET_S = 10.0


class Display:
    """A context manager around the run. monotonic: seconds, only differences count."""

    def __init__(
        self,
        console: Console,
        steps: int,
        *,
        quiet_s: float = QUIET_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self._quiet_s, self._monotonic = quiet_s, monotonic
        self._said, self._said_at = "starting", monotonic()
        self._ended = threading.Event()
        self._teller: threading.Thread | None = None
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
            )
            self._task = self._progress.add_task("starting", total=steps)

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
        else:
            self._teller = threading.Thread(target=self._tell, name="progress", daemon=True)
            self._teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._ended.set()
        if self._teller is not None:
            self._teller.join()

    def _tell(self) -> None:
        """Until the end: that what was said last still goes on."""
        while not self._ended.wait(self._quiet_s):
            since = self._monotonic() - self._said_at
            if since >= self._quiet_s:
                self.console.print(f"  {since:.0f} s since: {self._said}", highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self._said, self._said_at = text, self._monotonic()
        if self._progress is not None:
            self._progress.update(self._task, description=text)
        else:
            self.console.print(text, highlight=False, soft_wrap=True)

    def row(self, row: StepRow) -> None:
        if not row.served:
            if self._progress is not None:
                self._progress.update(self._task, completed=row.step + 1)
            self.say(f"step {row.step + 1}: reward {row.reward:.3f} ({row.seconds:.1f} s)")
        elif self._progress is None:
            self.say(
                f"{row.snapshot} serves on every replica: {row.kind}, {size(row.bytes_sent)}, {row.publish_s:.1f} s, "
                f"paused for {_pause(row)} ms"
            )


def steps_table(rows: Sequence[StepRow]) -> Table:
    table = Table(title="Steps", title_justify="left")
    for name in (
        "step", "reward", "snapshot", "sent", "publish s", "pause ms",
        "cached", "older", "crossed", "routes differ", "KL own", "KL replay", "s",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "snapshot" else "right")
    for row in rows:
        table.add_row(
            str(row.step + 1),
            f"{row.reward:.3f}",
            row.snapshot,
            f"{row.kind} {size(row.bytes_sent)}" if row.served else "-",
            f"{row.publish_s:.1f}",
            _pause(row),
            f"{row.cached_prompt_share:.0%}",
            f"{row.older_snapshot_share:.0%}",
            f"{row.streams_crossed_swap}/{row.streams}",
            f"{row.route_diff_share:.1%}",
            f"{row.kl_own_routes:.1e}",
            f"{row.kl_replayed_routes:.1e}",
            f"{row.seconds:.1f}",
        )
    return table


def summary_lines(summary: dict[str, Any], misses: Sequence[str], out: Path) -> list[str]:
    s = summary
    pauses = "no swap"
    if s["pause_ms_p50"] is not None:
        pauses = f"pause p50 {s['pause_ms_p50']:.1f} ms, max {s['pause_ms_max']:.1f} ms"
    lines = [
        f"reward            {s['reward_first']:.3f} -> {s['reward_last']:.3f} "
        f"(standard error of the rise {s['reward_stderr']:.3f})",
        f"swaps             {s['swaps']} ({pauses})",
        f"published         {_published(s)}",
        f"streams           {s['streams']}, of which {s['streams_crossed_swap']} crossed a swap",
        f"failed requests   {s['failed_requests']}",
        f"same replica      {s['affinity_share']:.1%} of {s['rollouts']} sessions",
        f"cached prompt     {s['cached_prompt_share']:.1%} of prompt tokens",
        f"router replay     KL {s['kl_own_routes']:.2e} on own routes, {s['kl_replayed_routes']:.2e} replayed; "
        f"routes differ on {s['route_diff_share']:.1%} of tokens",
        f"time              {s['seconds']:.0f} s",
        f"written           {out / 'report.html'}, {out / 'summary.json'}",
    ]
    return lines + [f"MISSED: {miss}" for miss in misses]


def _published(s: dict[str, Any]) -> str:
    parts = [
        f"{s[count]} {name} of {size(int(s[f'bytes_{kind}']))} in {s[f'publish_s_{kind}']:.1f} s"
        for kind, name, count in (("full", "full", "full_snapshots"), ("delta", "deltas", "deltas"))
        if s[count]
    ]
    return ", ".join(parts) + " (medians)" if parts else "nothing"


def _pause(row: StepRow) -> str:
    return f"{statistics.fmean(row.pause_ms):.1f}" if row.pause_ms else "-"
