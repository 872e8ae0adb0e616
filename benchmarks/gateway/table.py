"""The routers' figures as text: results/gateway.json to the marked part of docs/benchmarks.md.

Always holds: the text depends on the JSON alone (a test compares them).

    python -m gateway.table     # render again
"""

from __future__ import annotations

import json
from typing import Any

from document import table, write_part
from hardware import RESULTS

DIRECT, OURS = "direct", "midstream"
UNITS = {
    "1 KB": "1 KB request",
    "64 KB": "64 KB request",
    "16k ids": "request of 16k token ids",
    "paced": "paced chunk",
    "burst": "chunk in a burst",
}
# More is a line per request.
LOG_BYTES_MAX = 100_000
# Of the paced chunks.
KEPT_UP = 0.98
#: Load, peer, and the most that ours may be of it.
GOALS = (
    ("1 KB", "vllm-router", 0.9),
    ("64 KB", "vllm-router", 0.6),
    ("16k ids", "vllm-router", 0.1),
    ("paced", "vllm-router", 0.8),
    ("paced", "haproxy", 1.3),
)


def render(result: dict[str, Any]) -> str:
    """The marked part."""
    parts = [_heading(result), _costs(result), _ratios(result), _ceilings(result), _delays(result)]
    parts += [_rates(result), _keys(result), _notes(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(result: dict[str, Any]) -> str:
    hardware, configuration = result["hardware"], result["configuration"]
    routers = ", ".join(f"{name} {one['version']}" for name, one in result["routers"].items() if name != OURS)
    others = max(
        cell["others"]
        for placement in result["placements"]
        for cells in placement["cells"].values()
        for cell in cells.values()
        if "others" in cell
    )
    cores = " / ".join(f"core {placement['router_core']}" for placement in result["placements"])
    return (
        f"{result['at'][:10]}, commit {result['commit'][:10]}{result['commit'][40:]}; {hardware['cores']} cores of an "
        f"{hardware['cpu']}, Python {result['versions']['python']}, uvloop {result['versions']['uvloop']}; {routers}. "
        f"{_medians(configuration['rounds'])}. Other processes of the machine used at most {others:.2f} cores.\n"
        f"Two figures in a cell: the router on {cores}."
    )


def _medians(rounds: int) -> str:
    return "A single short round, not for comparison" if rounds == 1 else f"Medians of {rounds} rounds"


def _pairs(result: dict[str, Any], shape: str, name: str, key: str, text: Any) -> str:
    """A cell of a table: the figure at each placement."""
    cells = [placement["cells"].get(shape, {}).get(name) for placement in result["placements"]]
    if not all(cells):
        return "-"
    marks = [_mark(cell) for cell in cells]
    if marks[0] and len(set(marks)) == 1:
        return marks[0]
    return " / ".join(mark or text(cell[key]) for mark, cell in zip(marks, cells, strict=True))


def _mark(cell: dict[str, Any]) -> str:
    """Why the cell has no figures; empty if it has."""
    if "refused" in cell:
        return f"refused ({cell['refused']})"
    return "served nothing" if "unserved" in cell else ""


def _costs(result: dict[str, Any]) -> str:
    shapes = [shape for shape in UNITS if shape in result["placements"][0]["cells"]]
    rows = [
        [name, *(_pairs(result, shape, name, "cpu_us", _figure) for shape in shapes)]
        for name in result["routers"]
    ]
    return "CPU time of the router, us:\n\n" + table(["", *(UNITS[shape] for shape in shapes)], rows)


def ratios(result: dict[str, Any], shape: str, peer: str) -> list[float]:
    """Our CPU time over the peer's, at each placement; empty when one of them has no figure."""
    found = []
    for placement in result["placements"]:
        cells = placement["cells"].get(shape, {})
        ours, theirs = cells.get(OURS, {}).get("cpu_us"), cells.get(peer, {}).get("cpu_us")
        if ours is None or not theirs:
            return []
        found.append(ours / theirs)
    return found


def _ratios(result: dict[str, Any]) -> str:
    lines = []
    for shape, peer, most in GOALS:
        if found := ratios(result, shape, peer):
            figures = " / ".join(f"{ratio:.2f}" for ratio in found)
            verdict = "met" if max(found) <= most else "not met"
            lines.append(
                f"- {UNITS[shape]}: {figures} x {peer}'s CPU time; goal at most {most:g}: {verdict}."
            )
    return "\n".join(lines)


def _ceilings(result: dict[str, Any]) -> str:
    """How much more the bed can do than the fastest router asked of it."""
    cells = result["placements"][0]["cells"]
    lines = []
    for shape, unit in UNITS.items():
        if shape == "paced" or DIRECT not in cells.get(shape, {}):
            continue
        direct = _pairs(result, shape, DIRECT, "per_s", lambda per_s: f"{per_s:,.0f}")
        busy = {
            name: cell["busy"] for name, cell in cells[shape].items() if name != DIRECT and "busy" in cell
        }
        idlest = min(busy, key=lambda name: busy[name], default=None)
        lowest = f"; every router's core at least {busy[idlest]:.0%} busy ({idlest})" if idlest else ""
        lines.append(f"- {unit}: the load generator straight at the mocks {direct} per second{lowest}.")
    return "Ceilings, load generator and mocks on one core:\n\n" + "\n".join(lines) if lines else ""


def _delays(result: dict[str, Any]) -> str:
    """What a router adds to direct, us."""
    shapes = {"latency": "1 KB request at 1,000 per second", "paced": "paced chunk"}
    placements = result["placements"]
    shown = [shape for shape in shapes if DIRECT in placements[0]["cells"].get(shape, {})]
    if not shown:
        return ""
    rows = []
    for name in result["routers"]:
        row = [name]
        for shape in shown:
            cells = [placement["cells"][shape] for placement in placements]
            row += [" / ".join(_added(cell, name, key) for cell in cells) for key in ("p50_us", "p99_us")]
        rows.append(row)
    head = ["", *(f"{shapes[shape]}, {which}" for shape in shown for which in ("p50", "p99"))]
    return "Time that the router adds against direct, us:\n\n" + table(head, rows)


def _added(cells: dict[str, Any], name: str, key: str) -> str:
    mark = _mark(cells[name]) or _mark(cells[DIRECT])
    return mark or f"{cells[name][key] - cells[DIRECT][key]:.0f}"


def _rates(result: dict[str, Any]) -> str:
    placements = result["placements"]
    rows = []
    for name, router in result["routers"].items():
        idle = " / ".join(f"{placement['idle_ms_per_s'][name]:.1f}" for placement in placements)
        rate = _pairs(result, "1 KB", name, "per_s", lambda per_s: f"{per_s:,.0f}")
        rows.append([name, rate, f"{router['rss_mb']:.0f}", idle])
    return table(
        ["", "1 KB requests per second on its core", "resident, MB", "CPU when idle, ms per s"], rows
    )


def _keys(result: dict[str, Any]) -> str:
    rows = []
    for name, router in result["routers"].items():
        keys = router["keys"]
        if "error" in keys:
            rows.append([name, *["failed"] * 6])
            continue
        rows.append(
            [
                name,
                f"{keys['sticky']:.1%}",
                f"{keys['max_over_mean']:.2f}",
                f"{keys['of_leaver']:,} + {keys['moved_on_leave']:,}",
                f"{keys['moved_on_return']:,}",
                f"{keys['new_on_returned']:,}",
                f"{keys['moved_on_restart']:,}",
            ]
        )
    if not rows:
        return ""
    count = f"{result['configuration']['keys']:,}"
    head = [
        "",
        "same replica again",
        "most keys on a replica over the mean",
        "moved when one leaves: its own + others",
        "moved when it returns",
        f"of {count} new ones on it 3 s later",
        "moved by a restart of the router",
    ]
    return f"{count} sessions on {result['configuration']['mocks']} replicas:\n\n" + table(head, rows)


def _notes(result: dict[str, Any]) -> str:
    lines = [f"- {name} is absent: {why.splitlines()[0]}." for name, why in result["absent"].items()]
    lines += [
        f"- {name} wrote {router['log_bytes'] / 1e6:.1f} MB of log."
        for name, router in result["routers"].items()
        if router["log_bytes"] > LOG_BYTES_MAX
    ]
    for placement in result["placements"]:
        paced = placement["cells"].get("paced", {})
        for name in result["routers"]:
            if name not in paced or _mark(paced[DIRECT]):
                continue
            kept = paced[name].get("per_s", 0) / paced[DIRECT]["per_s"]
            if kept < KEPT_UP:
                where = f"core {placement['router_core']}"
                lines.append(f"- {name} on {where} passed on only {kept:.0%} of the paced chunks in time.")
    for name in [DIRECT, *result["routers"]]:
        failed = sum(
            cells[name].get("failed", 0)
            for placement in result["placements"]
            for cells in placement["cells"].values()
            if name in cells
        )
        failed += result["routers"].get(name, {}).get("keys", {}).get("failed", 0)
        if failed:
            lines.append(f"- {name} failed {failed:,} requests.")
    return "\n".join(lines)


def _figure(us: float) -> str:
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def write_table(result: dict[str, Any]) -> None:
    write_part("gateway", render(result))


if __name__ == "__main__":
    write_table(json.loads((RESULTS / "gateway.json").read_text()))
