"""Tables for terminals of any width, drawn with rich.

Always holds: a row is one line. Where a table is too wide, its longest names are shortened in their middle, down to
NAME_CELLS_GOOD, so that both ends of a name can be read. Then its least important columns are left out, and then names are
shortened further. Remarks that find no room beside their rows stand below the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

GAP = 2
#: Before a name is shortened below this, columns are left out.
NAME_CELLS_GOOD = 20
#: A name is never shortened below this.
NAME_CELLS_MIN = 9
#: A remark that gets fewer cells than this beside its row stands below the table.
REMARK_CELLS_MIN = 24


class Column(NamedTuple):
    """spare: 0 is never left out; of the others the highest goes first. name: may be shortened. right: holds numbers."""

    head: str
    spare: int = 0
    right: bool = False
    name: bool = False


@dataclass
class Fitted:
    """A titled table. Each row has a cell for each column, then a remark, which may be empty. The first cell names the row."""

    title: str
    columns: Sequence[Column]
    rows: list[tuple[list[Text], Text]] = field(default_factory=list)

    def add(self, *cells: str | Text, remark: Text | None = None) -> None:
        """A string would be read as markup, so each cell is made a Text."""
        row = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        self.rows.append((row, remark or Text()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = fit([self._natural(at) for at in range(len(self.columns))], self.columns, options.max_width)
        left = options.max_width - sum(width + GAP for width in widths.values())
        longest = max((cell_len(remark.plain) for _, remark in self.rows), default=0)
        beside = longest > 0 and left >= min(longest, REMARK_CELLS_MIN)
        table = Table(
            title=self.title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, GAP, 0, 0)
        )  # fmt: skip
        for at, width in widths.items():
            column = self.columns[at]
            table.add_column(
                column.head,
                justify="right" if column.right else "left",
                width=width,
                no_wrap=True,
                header_style="dim",
            )
        if beside:
            table.add_column("", overflow="fold", header_style="dim")
        for cells, remark in self.rows:
            shown = [shortened(cells[at], width) for at, width in widths.items()]
            table.add_row(*shown, *([remark] if beside else []))
        yield table
        for cells, remark in self.rows:
            if remark.plain and not beside:
                yield Text.assemble(
                    "  ", shortened(cells[0], max(NAME_CELLS_MIN, options.max_width // 3)), ": ", remark
                )

    def _natural(self, at: int) -> int:
        cells = [cell_len(cells[at].plain) for cells, _ in self.rows]
        return max([cell_len(self.columns[at].head), *cells])


def fit(natural: Sequence[int], columns: Sequence[Column], width: int) -> dict[int, int]:
    """The width of each column that is shown, by its number. natural: what each would take."""
    widths = dict(enumerate(natural))

    def over() -> int:
        return sum(widths.values()) + GAP * (len(widths) - 1) - width

    def shorten(least: int) -> None:
        names = [at for at in widths if columns[at].name]
        while over() > 0 and names:
            longest = max(names, key=lambda at: widths[at])
            if widths[longest] <= least:
                return
            widths[longest] -= 1

    shorten(NAME_CELLS_GOOD)
    for at in sorted(widths, key=lambda at: (-columns[at].spare, -at)):
        if over() <= 0 or not columns[at].spare:
            break
        del widths[at]
        # What it took may be enough for names that are longer.
        widths |= {at: natural[at] for at in widths if columns[at].name}
        shorten(NAME_CELLS_GOOD)
    shorten(NAME_CELLS_MIN)
    return widths


def shortened(text: Text, cells: int) -> Text:
    """The text, without its middle where it is too long; its end is kept longer, as numbers of steps stand there."""
    if cell_len(text.plain) <= cells:
        return text
    room = max(cells - 1, 1)
    head, tail = room // 3, room - room // 3
    plain = text.plain
    while head and cell_len(plain[:head]) > room // 3:
        head -= 1
    while tail > 1 and cell_len(plain[-tail:]) > room - room // 3:
        tail -= 1
    return Text(f"{plain[:head]}…{plain[-tail:]}", style=text.style)
