"""How `midstream top` draws the numbers of a look, with rich. Pure.

Always holds: what colour says, a word says too. No name is broken over two lines, however narrow the terminal is (fitted).
Nothing that a client or a file named is read as markup or acts on a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from midstream.commands.fitted import Column, Fitted, shortened
from midstream.commands.observed import loading_ms, share
from midstream.core.text import plain, seconds, size

#: Where there is no terminal to ask.
PLAIN_WIDTH = 140
BARS = "▁▂▃▄▅▆▇█"
_GOOD, _BUSY, _BAD, _DIM = "green", "yellow", "bold red", "dim"


def draw(seen: Mapping[str, Any], speeds: Sequence[float] = (), trouble: str = "") -> RenderableType:
    """seen: as observed.summary gives it. speeds: tokens/s of the last looks. trouble: why it is old."""
    parts: list[RenderableType] = [_head(seen, speeds)]
    if trouble:
        parts.append(Text(plain(trouble), style=_BAD))
    parts.append(_replicas(seen["replicas"]))
    if seen["snapshots"]:
        parts.append(_snapshots(seen["snapshots"]))
    if seen["policies"]:
        parts.append(_policies(seen["policies"]))
    if seen["sessions"]["recent"]:
        parts.append(_sessions(seen["sessions"], seen["time"]))
    parts.append(_errors(seen))
    return Group(*parts)


def _head(seen: Mapping[str, Any], speeds: Sequence[float]) -> RenderableType:
    rates, totals, sessions = seen["rates"], seen["totals"], seen["sessions"]
    cached = share(totals["cached_prompt_tokens"], totals["prompt_tokens"])
    clock = time.strftime("%H:%M:%S", time.localtime(seen["time"]))
    name = plain(seen["deployment"] or f"{len(seen['deployments'])} deployments")
    numbers = (
        f"{_number(rates['generated_tokens'])} tokens/s  {_number(rates['requests'], 1)} requests/s  "
        f"{_number(sessions['count'])} sessions  {_number(sessions['open_turns'])} turns open  "
        f"prompt cache {_percent(cached)}"
    )
    return _Head(f"midstream {plain(seen['server'])}", name, clock, numbers, speeds)


class _Head(NamedTuple):
    """The lines above the tables. What does not fit beside the server's address has a line of its own."""

    server: str
    name: str
    clock: str
    numbers: str
    speeds: Sequence[float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        one_line = cell_len(f"{self.server}  {self.name}  {self.clock}") <= width
        yield (
            shortened(Text(self.server, style="bold"), width)
            if not one_line
            else Text.assemble((self.server, "bold"), f"  {self.name}  {self.clock}")
        )
        if not one_line:
            yield Text(f"{shortened(Text(self.name), width - len(self.clock) - 2)}  {self.clock}")
        room = width - cell_len(self.numbers) - 2
        bars = spark(self.speeds[-room:]) if len(self.speeds) > 1 and room > 1 else ""
        yield Text.assemble(self.numbers, (f"  {bars}" if bars else "", _GOOD))


def spark(values: Sequence[float]) -> str:
    """A line of bars, the highest value the tallest."""
    top = max(values) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] for value in values)


def _replicas(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    if not rows:
        return Text("there are no replicas", style=_BAD)
    table = Fitted(
        "\nReplicas",
        [
            Column("replica", name=True),
            Column("stage", name=True),
            Column("snapshot", name=True),
            Column("in flight", right=True),
            Column("waiting", 2, right=True),
            Column("KV", 1, right=True),
            Column("cached", 3, right=True),
            Column("tokens/s", 4, right=True),
            Column("pause", 5, right=True),
            Column("last swap", 6),
        ],
    )
    for row in rows:
        remark = row["error"] or ("" if row["usable"] is not False else "takes no requests")
        table.add(
            plain(row["replica"]),
            _stage(row),
            plain(row["snapshot"] or "-"),
            _number(row["in_flight"]),
            _number(row["waiting"]),
            _percent(row["kv_share"]),
            _percent(row["cached_share"]),
            _number(row["tokens_per_s"]),
            *(Text(part, style=_DIM) for part in _swap(row["last_swap"])),
            remark=Text(plain(remark), style=_BAD),
        )
    return table


def _stage(row: Mapping[str, Any]) -> Text:
    stage = "not reachable" if row["snapshot"] is None else row["stage"]
    text = f"{stage} {row['target']}" if row["target"] else stage
    style = (
        _BAD
        if stage in ("error", "not reachable")
        else _GOOD
        if row["ready"] and not row["target"]
        else _BUSY
    )
    return Text(plain(text if row["ready"] else f"{text}, not ready"), style=style)


def _swap(swap: Mapping[str, Any] | None) -> tuple[str, str]:
    """The pause, and the other numbers of the swap."""
    if swap is None:
        return "-", "-"
    details = f"loaded in {loading_ms(swap):.0f} ms, {swap.get('streams_crossed', 0)} streams crossed"
    return f"{swap.get('pause_ms', 0.0):.2f} ms", details


def _snapshots(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Fitted(
        "\nSnapshots, the newest first",
        [
            Column("snapshot", name=True),
            Column("kind"),
            Column("on", 3, name=True),
            Column("signalled", 2),
            Column("bytes", 1, right=True),
            Column("replicas", right=True),
            Column("ready after", right=True),
        ],
    )
    for row in rows:
        ready = row["ready_after_s"].values()
        notes = [f"{name}: {error}" for name, error in row["errors"].items()]
        table.add(
            Text(plain(row["snapshot"]), style="bold" if row["desired"] else ""),
            "full" if row["kind"] == "full" else "delta",
            "-" if row["kind"] == "full" else plain(row["previous"] or "-"),
            time.strftime("%H:%M:%S", time.localtime(row["signalled_at"])),
            "-" if row["bytes"] is None else size(row["bytes"]),
            str(len(ready)),
            seconds(max(ready)) if ready else "-",
            remark=Text(
                plain("; ".join([*(["desired"] if row["desired"] else []), *notes])),
                style=_BAD if notes else _DIM,
            ),
        )
    return table


def _policies(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Fitted(
        "\nPolicies",
        [Column("policy", name=True), Column("adapter", name=True), Column("serving", right=True)],
    )
    for row in rows:
        notes = "; ".join([*(["frozen"] if row["frozen"] else []), *row["errors"]])
        table.add(
            plain(row["policy"]),
            plain(row["snapshot"]),
            f"{row['serving']} of {row['replicas']}",
            remark=Text(plain(notes), style=_BAD if row["errors"] else _DIM),
        )
    return table


def _sessions(sessions: Mapping[str, Any], now: float) -> RenderableType:
    table = Fitted(
        "\nSessions, the last used first",
        [
            Column("session", name=True),
            Column("replica", name=True),
            Column("turns", right=True),
            Column("tokens", 2, right=True),
            Column("cached", right=True),
            Column("first token", 1, right=True),
            Column("idle", 3, right=True),
            Column("reward", right=True),
            Column("now", 4),
        ],
    )
    for row in sessions["recent"]:
        first, reward = row["last_time_to_first_token_s"], row["last_reward"]
        table.add(
            plain(row["id"]),
            plain(row["replica"]),
            _number(row["turns"]),
            _number(row["generated_tokens"]),
            _percent(row["cached_share"]),
            "-" if first is None else f"{first * 1000:.0f} ms",
            seconds(max(0.0, now - row["used_at"])),
            "-" if reward is None else f"{reward:.3g}",
            Text("generating" if row["open_turns"] else "", style=_BUSY),
        )
    return table


def _errors(seen: Mapping[str, Any]) -> Text:
    totals, errors = seen["totals"], seen["errors"]
    if totals["requests"] is None:
        return Text("\nno metrics: the key does not have the scope observe", style=_DIM)
    by_status = ", ".join(f"{count} of status {status}" for status, count in errors.items()) or "none"
    cut = totals["cut_responses"]
    text = f"\nFailed requests: {by_status} in {_number(totals['requests'])}; responses cut short: {_number(cut)}"
    return Text(text, style=_BAD if errors or cut else _DIM)


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
