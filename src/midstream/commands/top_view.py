"""How `midstream top` draws the numbers of a look, with rich. Pure.

Always holds: what colour says, a word says too. Nothing that a client or a file named is read as markup or acts on a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

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


def _head(seen: Mapping[str, Any], speeds: Sequence[float]) -> Text:
    rates, totals, sessions = seen["rates"], seen["totals"], seen["sessions"]
    cached = _share(totals["cached_prompt_tokens"], totals["prompt_tokens"])
    clock = time.strftime("%H:%M:%S", time.localtime(seen["time"]))
    name = seen["deployment"] or f"{len(seen['deployments'])} deployments"
    head = Text.assemble((f"midstream {seen['server']}", "bold"), f"  {plain(name)}  {clock}\n")
    head.append(
        f"{_number(rates['generated_tokens'])} tokens/s  {_number(rates['requests'], 1)} requests/s  "
        f"{_number(sessions['count'])} sessions  {_number(sessions['open_turns'])} turns open  "
        f"prompt cache {_percent(cached)}"
    )
    if len(speeds) > 1:
        head.append(f"  {spark(speeds)}", style=_GOOD)
    return head


def spark(values: Sequence[float]) -> str:
    """A line of bars, the highest value the tallest."""
    top = max(values) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] for value in values)


def _table(title: str, *columns: str) -> Table:
    """A column whose head begins with `>` is of numbers."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.lstrip(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
            header_style=_DIM,
        )
    return table


def _add(table: Table, *cells: str | Text) -> None:
    """A row. A string would be read as markup, so each cell is a Text."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _replicas(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    if not rows:
        return Text("there are no replicas", style=_BAD)
    table = _table(
        "\nReplicas",
        "replica",
        "stage",
        "snapshot",
        ">in flight",
        ">waiting",
        ">KV",
        ">cached",
        ">tokens/s",
        "last swap",
        "",
    )
    for row in rows:
        _add(
            table,
            plain(row["replica"]),
            _stage(row),
            plain(row["snapshot"] or "-"),
            _number(row["in_flight"]),
            _number(row["waiting"]),
            _percent(row["kv_share"]),
            _percent(row["cached_share"]),
            _number(row["tokens_per_s"]),
            Text(_swap(row["last_swap"]), style=_DIM),
            Text(
                plain(row["error"] or ("" if row["usable"] is not False else "takes no requests")), style=_BAD
            ),
        )
    return table


def _stage(row: Mapping[str, Any]) -> Text:
    stage = "not reachable" if row["snapshot"] is None else row["stage"]
    said = f"{stage} {row['target']}" if row["target"] else stage
    style = (
        _BAD
        if stage in ("error", "not reachable")
        else _GOOD
        if row["ready"] and not row["target"]
        else _BUSY
    )
    return Text(plain(said if row["ready"] else f"{said}, not ready"), style=style)


def _swap(swap: Mapping[str, Any] | None) -> str:
    if swap is None:
        return "-"
    loading = sum(float(swap.get(f"{part}_ms", 0.0)) for part in ("fetch", "rebuild", "verify", "stage"))
    return (
        f"paused {swap.get('pause_ms', 0.0):.2f} ms, loaded in {loading:.0f} ms, "
        f"{swap.get('streams_crossed', 0)} streams crossed"
    )


def _snapshots(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "\nSnapshots, the newest first", "snapshot", "kind", "signalled", ">bytes", "ready after", ""
    )
    for row in rows:
        ready = ", ".join(f"{name} {seconds(value)}" for name, value in row["ready_after_s"].items())
        notes = [f"{name}: {error}" for name, error in row["errors"].items()]
        _add(
            table,
            Text(plain(row["snapshot"]), style="bold" if row["desired"] else ""),
            f"delta on {plain(row['previous'] or '-')}" if row["kind"] != "full" else "full",
            time.strftime("%H:%M:%S", time.localtime(row["signalled_at"])),
            "-" if row["bytes"] is None else size(row["bytes"]),
            plain(ready) or "-",
            Text(
                plain("; ".join([*(["desired"] if row["desired"] else []), *notes])),
                style=_BAD if notes else _DIM,
            ),
        )
    return table


def _policies(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("\nPolicies", "policy", "snapshot", ">serving", "")
    for row in rows:
        notes = "; ".join([*(["frozen"] if row["frozen"] else []), *row["errors"]])
        _add(
            table,
            plain(row["policy"]),
            plain(row["snapshot"]),
            f"{row['serving']} of {row['replicas']}",
            Text(plain(notes), style=_BAD if row["errors"] else _DIM),
        )
    return table


def _sessions(sessions: Mapping[str, Any], now: float) -> Table:
    table = _table(
        "\nSessions, the last used first",
        "session",
        "replica",
        ">turns",
        ">tokens",
        ">cached",
        ">TTFT",
        ">idle",
        "",
    )
    for row in sessions["recent"]:
        first = row["last_time_to_first_token_s"]
        _add(
            table,
            plain(row["id"]),
            plain(row["replica"]),
            _number(row["turns"]),
            _number(row["generated_tokens"]),
            _percent(row["cached_share"]),
            "-" if first is None else f"{first * 1000:.0f} ms",
            seconds(max(0.0, now - row["used_at"])),
            Text("generating" if row["open_turns"] else "", style=_BUSY),
        )
    return table


def _errors(seen: Mapping[str, Any]) -> Text:
    totals, errors = seen["totals"], seen["errors"]
    if totals["requests"] is None:
        return Text("\nno metrics: the key does not have the scope observe", style=_DIM)
    said = ", ".join(f"{count} of status {status}" for status, count in errors.items()) or "none"
    cut = totals["cut_responses"]
    text = f"\nFailed requests: {said} in {_number(totals['requests'])}; responses cut short: {_number(cut)}"
    return Text(text, style=_BAD if errors or cut else _DIM)


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
