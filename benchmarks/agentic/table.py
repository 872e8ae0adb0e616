"""The agents' figures as text and as a picture: results/agents.json to docs/benchmarks.md and docs/images/agents.svg.

Always holds: both depend on the JSON alone (a test compares them). Bars are long for long runs.

    python -m agentic.table     # render again
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from document import DOCUMENT, table, write_part
from hardware import RESULTS

PICTURE = DOCUMENT.parent / "images" / "agents.svg"
OURS = "midstream"
DISTURBED = "disturbed"
#: Goals for midstream: wall time and p90 of trajectories over the best other router's, prefill over the ideal.
WALL_GOALS = {"0.6": 0.85, "1": 0.85, "2": 1.0}
P90_GOAL, PREFILL_GOAL, DISTURBED_GOAL = 0.8, 1.1, 1.15
STYLE = """
    svg { --page: #fff; --line: #76818d; --text: #1b2430; --soft: #55606e; --one: #0072b2; --two: #76818d; }
    @media (prefers-color-scheme: dark) {
      svg { --page: #12161b; --line: #7d8997; --text: #e6eaef; --soft: #a4afbc; --one: #56b4e9; --two: #7d8997; }
    }
    text { font: 14px system-ui, sans-serif; fill: var(--text); } .bold { font-weight: 600; } .soft { fill: var(--soft); }
    .end { text-anchor: end; } .page { fill: var(--page); stroke: var(--line); } .ours { fill: var(--one); }
    .other { fill: var(--two); }
  """
LEFT, BAR, ROW, HEAD, WIDTH = 150, 210, 22, 34, 480


def render(result: dict[str, Any]) -> str:
    """The marked part."""
    parts = [_heading(result)]
    for name, part in result["parts"].items():
        parts += [f"**{title(name, part)}**:", _figures(part)]
    return "\n\n".join([*parts, _notes(result)]) + "\n"


def title(name: str, part: dict[str, Any]) -> str:
    held = f"KV for {part['share']:.0%} of the live tokens, {part['kv_cache_tokens']:,} per replica"
    return f"{held}; three swaps and a replica killed" if name == DISTURBED else held


def _heading(result: dict[str, Any]) -> str:
    hardware, versions, how = result["hardware"], result["versions"], result["configuration"]
    ways = [way for part in result["parts"].values() for way in part["ways"].values()]
    others = max(way["range"].get("others", (0, 0))[1] for way in ways)
    rounds = how["rounds"]
    medians = (
        "A single round, not for comparison" if rounds == 1 else f"Medians of {rounds} rounds (least - most)"
    )
    versions_of = {way.partition(",")[0]: about["version"] for way, about in result["routers"].items()}
    routers = ", ".join(f"{name} {version}" for name, version in versions_of.items())
    machine = f"{hardware['cores']} cores of an {hardware['cpu']}, Python {versions['python']}, torch {versions['torch']}"
    return (
        f"{result['at'][:10]}, commit {result['commit'][:10]}{result['commit'][40:]}; {machine}; {routers}; "
        f"trace {how['trace']}, {how['groups']} groups of {how['streams']}, {how['turns']:,} turns, lengths x "
        f"{how['tokens_scale']:.3f}, waits x {how['seconds_scale']:g}; {result['live_tokens']:,} live tokens, ideal prefill "
        f"{result['ideal_prefill_tokens']:,}. "
        f"{medians}. Other processes of the machine used at most {others:.2f} cores."
    )


def _figures(part: dict[str, Any]) -> str:
    def cell(one: dict[str, Any], name: str, form: str) -> str:
        if name not in one:
            return "not counted"
        least, most = (format(value, form) for value in one["range"][name])
        median = format(one[name], form)
        return median if least == most else f"{median} ({least} - {most})"

    columns = {
        "wall, s": ("wall_s", ".1f"),
        "found": ("cached_share", ".0%"),
        "prefill / ideal": ("over_ideal", ".2f"),
        "evicted and needed": ("evicted_tokens", ",.0f"),
        "known elsewhere": ("again_tokens", ",.0f"),
        "preemptions": ("preemptions", ",.0f"),
        "trajectory p50, s": ("trajectory_s_p50", ".1f"),
        "p90, s": ("trajectory_s_p90", ".1f"),
        "longest, s": ("trajectory_s_max", ".1f"),
        "max/mean tokens": ("load_tokens", ".2f"),
        "idle, core s": ("idle_core_s", ".1f"),
        "sent again": ("sent_again", ",.0f"),
    }
    body = [[way, *(cell(one, *column) for column in columns.values())] for way, one in part["ways"].items()]
    return table(["", *columns], body)


def _notes(result: dict[str, Any]) -> str:
    lines = [f"- {name} is absent: {why.splitlines()[0]}." for name, why in result["absent"].items()]
    parts = result["parts"]
    for name, part in parts.items():
        ours, peers = (
            part["ways"].get(OURS),
            [one for way, one in part["ways"].items() if not way.startswith(OURS)],
        )
        if ours is None or name not in WALL_GOALS or not peers:
            continue
        about = f"At {part['share']:.0%}"
        for what, key, goal in (
            ("wall time", "wall_s", WALL_GOALS[name]),
            ("p90", "trajectory_s_p90", P90_GOAL),
        ):
            ratio = ours[key] / min(one[key] for one in peers)
            lines.append(f"- {about}, {what} over the best other router's: {_judged(ratio, goal)}.")
        if part["share"] <= 1:
            lines.append(f"- {about}, prefill over the ideal: {_judged(ours['over_ideal'], PREFILL_GOAL)}.")
    disturbed, quiet = (parts.get(name, {}).get("ways", {}).get(OURS) for name in (DISTURBED, "1"))
    if disturbed and quiet:
        ratio = disturbed["wall_s"] / quiet["wall_s"]
        lines.append(
            f"- Swaps and a killed replica, wall time over the same without: {_judged(ratio, DISTURBED_GOAL)}."
        )
    return "\n".join(lines)


def _judged(figure: float, most: float) -> str:
    return f"{figure:.2f}; goal at most {most:g}: {'met' if figure <= most else 'not met'}"


def picture(result: dict[str, Any]) -> str:
    """Wall time of each way, a block of bars for each part; all bars have one scale."""
    parts = result["parts"]
    longest = max(one["wall_s"] for part in parts.values() for one in part["ways"].values())
    body, told, y = [], [], 12
    for name, part in parts.items():
        heading = f"{part['share']:.0%} of the live tokens fit" + (
            ", three swaps, one killed" if name == DISTURBED else ""
        )
        y += HEAD
        body.append(f'<text class="bold" x="16" y="{y - 10}">{escape(heading)}</text>')
        for way, one in part["ways"].items():
            kind, width = "ours" if way == OURS else "other", one["wall_s"] / longest * BAR
            figures = f"{one['wall_s']:.1f} s, {one['over_ideal']:.1f} x"
            body += [
                f'<text class="end" x="{LEFT - 8}" y="{y + 14}">{escape(way)}</text>',
                f'<rect class="{kind}" x="{LEFT}" y="{y + 3}" width="{width:.1f}" height="{ROW - 8}" rx="2"/>',
                f'<text class="soft" x="{LEFT + width + 6:.1f}" y="{y + 14}">{figures}</text>',
            ]
            told.append(f"{way} {figures}")
            y += ROW
    height = y + 20
    words = (
        "Seconds from the first request to the last answer, and prompt tokens computed over the ideal: "
        + "; ".join(told)
    )
    inner = "\n  ".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="540" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="title desc">\n  <title id="title">Agents through each router: wall time</title>\n'
        f'  <desc id="desc">{escape(words)}.</desc>\n  <style>{STYLE}</style>\n'
        f'  <rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>\n  {inner}\n</svg>\n'
    )


def write_documents(result: dict[str, Any]) -> None:
    write_part("agents", render(result))
    PICTURE.write_text(picture(result))


if __name__ == "__main__":
    write_documents(json.loads((RESULTS / "agents.json").read_text()))
