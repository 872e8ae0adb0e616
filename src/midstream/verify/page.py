"""The report of `midstream explain` as one HTML file: a table, a plot of the KL by cause, and each token's gap. Pure.

Owns: its looks, which are those of the dashboard.
Always holds: the file loads nothing and runs nothing. What records and trainers wrote is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

from midstream.verify.gaps import REMEDIES, CauseShare, GapCause, Split, shares, whole

#: Tokens in the plot, turns in the list, and tokens of each turn there: those with the largest gaps.
DOTS_MAX, TURNS_MAX, TOKENS_MAX = 4000, 20, 12
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 260, 60, 24
#: Okabe and Ito's colours, which colour-blind readers tell apart.
_COLOURS = dict(
    zip(
        GapCause,
        ("#d55e00", "#aa4499", "#b3261e", "#0072b2", "#6b4c9a", "#009e73", "#b58900", "#777777"),
        strict=True,
    )
)
_STYLE = """
:root { --text: #1b2430; --soft: #5b6675; --back: #fff; --panel: #f6f8fa; --line: #d5dbe1; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6eaef; --soft: #9aa6b4; --back: #12161b; --panel: #1b2129; --line: #343d48; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1100px; font: 15px/1.45 system-ui, sans-serif;
  color: var(--text); background: var(--back); }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .5rem; } .note { color: var(--soft); }
table { border-collapse: collapse; min-width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: baseline; }
th { color: var(--soft); font-weight: 600; } .number { text-align: right; white-space: nowrap; }
figure { margin: 0; padding: .6rem; border: 1px solid var(--line); border-radius: 6px; background: var(--panel); }
figure svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--text); }
.wide { overflow-x: auto; } i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
"""


def page(splits: Sequence[Split], facts: Sequence[str]) -> str:
    """facts: what was read and computed, a sentence each."""
    by_cause = shares(splits)
    body = [
        "<h1>Whose is the mismatch?</h1>",
        *(f'<p class="note">{escape(fact)}</p>' for fact in facts),
        "<h2>KL divergence by cause</h2>",
        _figure(_bars(by_cause), "k3 of each cause alone, in nats per token"),
        _table(by_cause, whole(splits)),
        "<h2>Token by token</h2>",
        _figure(_dots(splits), "trainer minus rollout, in nats; colours are causes with the largest part"),
        "<h2>The turns with the largest gaps</h2>",
        *_turns(splits),
    ]
    head = f'<meta charset="utf-8"><title>midstream explain</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption class='note'>{escape(caption)}</figcaption></figure>"


def _swatch(cause: GapCause) -> str:
    return f'<i style="background:{_COLOURS[cause]}"></i>{escape(cause)}'


def _table(by_cause: dict[GapCause, CauseShare], every: CauseShare) -> str:
    names = ("cause", "turns", "tokens", "KL k1", "KL k3", "mean, nats", "largest, nats", "what to do")
    rows = [_row(_swatch(cause), one, REMEDIES[cause]) for cause, one in by_cause.items()]
    rows.append(_row("all", every, "the parts of k1 sum to this; those of k3 do not"))
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _row(name: str, one: CauseShare, remedy: str) -> str:
    numbers = (
        f"{one.turns}",
        f"{one.tokens}",
        *(f"{n:.3g}" for n in (one.k1, one.k3, one.mean, one.largest)),
    )
    cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
    return f"<tr><td>{name}</td>{cells}<td>{escape(remedy)}</td></tr>"


def _bars(by_cause: dict[GapCause, CauseShare]) -> str:
    most = max((one.k3 for one in by_cause.values()), default=0.0) or 1.0
    height = 22 * len(by_cause)
    rows = []
    for number, (cause, one) in enumerate(by_cause.items()):
        size = max(0.0, one.k3) / most * (_WIDTH - 320)
        y = 22 * number
        rows.append(
            f'<text x="200" y="{y + 15}" text-anchor="end">{escape(cause)}</text>'
            f'<rect x="210" y="{y + 3}" width="{size:.1f}" height="15" fill="{_COLOURS[cause]}"/>'
            f'<text x="{size + 216:.1f}" y="{y + 15}">{one.k3:.3g}</text>'
        )
    return _svg(height, rows, "a bar for each cause")


def _dots(splits: Sequence[Split]) -> str:
    found = [
        (at, float(gap), cause)
        for split in splits
        for at, (gap, cause) in enumerate(zip(split.gap, split.causes_of_tokens(), strict=True))
    ]
    # Of many tokens those with the largest gaps are shown, and every so many of the others.
    found.sort(key=lambda one: -abs(one[1]))
    half = DOTS_MAX // 2
    rest = found[half:]
    shown = found[:half] + rest[:: max(1, -(-len(rest) // half))]
    last = max((at for at, _, _ in shown), default=0) or 1
    most = max((abs(gap) for _, gap, _ in shown), default=0.0) or 1.0
    middle = (_HEIGHT - _BOTTOM) / 2
    dots = [
        f'<circle cx="{_LEFT + at / last * (_WIDTH - _LEFT - 10):.1f}" '
        f'cy="{middle - gap / most * (middle - 8):.1f}" r="2.5" fill="{_COLOURS[cause]}"/>'
        for at, gap, cause in reversed(shown)
    ]
    labels = [
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{middle}" y2="{middle}" stroke="var(--line)"/>',
        *(
            f'<text x="{_LEFT - 6}" y="{middle - side * (middle - 8) + 4:.1f}" text-anchor="end">{side * most:.3g}</text>'
            for side in (1, 0, -1)
        ),
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">token 0 of its turn</text>',
        f'<text x="{_WIDTH - 4}" y="{_HEIGHT - 6}" text-anchor="end">token {last}</text>',
    ]
    return _svg(_HEIGHT, [*labels, *dots], "a dot for each token")


def _svg(height: int, parts: Iterable[str], label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _turns(splits: Sequence[Split]) -> Iterator[str]:
    largest = sorted(splits, key=lambda split: -float(np.abs(split.gap).sum()))
    for split in largest[:TURNS_MAX]:
        place = escape(str(split.claim.place))
        yield f"<details><summary>{_swatch(split.cause)}: {place}, {np.abs(split.gap).mean():.3g} nats a token</summary>"
        for cause, detail in split.details.items():
            yield f"<p>{escape(cause)}: {escape(detail)}</p>"
        yield _tokens(split) + "</details>"


def _tokens(split: Split) -> str:
    causes = [cause for cause in GapCause if np.any(split.parts[cause])]
    names = ("token", "id", "rollout", "trainer", "gap", *causes)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows: list[str] = []
    worst: list[Any] = sorted(np.argsort(-np.abs(split.gap), kind="stable")[:TOKENS_MAX].tolist())
    for at in worst:
        numbers = [split.rollout[at], split.trainer[at], split.gap[at]]
        numbers += [split.parts[cause][at] for cause in causes]
        cells = [f"{at}", f"{split.tokens[at]}", *(f"{number:.5f}" for number in numbers)]
        rows.append("<tr>" + "".join(f'<td class="number">{cell}</td>' for cell in cells) + "</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
