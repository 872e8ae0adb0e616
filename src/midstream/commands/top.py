"""`midstream top`: a live server at a glance: replicas, swaps, policies, sessions, throughput and errors.

Always holds: on a terminal the picture is drawn over itself until it is interrupted. Elsewhere it is one frame without control
codes. A server that does not answer is asked again, and the last picture stays with the time since.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from midstream.client import PublishError
from midstream.commands.common import add_server_arguments, connect, guarded
from midstream.commands.observed import Look, Observer, summary
from midstream.core.text import plain, seconds

if TYPE_CHECKING:
    from rich.console import Console

#: Of a request. A server that takes longer counts as hanging, not as slow.
REQUEST_TIMEOUT_S = 5.0
INTERVAL_S_MIN = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=guarded(_top))
    add_server_arguments(parser)
    parser.add_argument("--once", action="store_true", help="one frame, as where there is no terminal")
    parser.add_argument("--json", action="store_true", help="one JSON document with the numbers of a frame")
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="between two looks; rates are of the time between them (default: %(default)g)",
    )


def _top(options: argparse.Namespace) -> int:
    if not options.interval >= INTERVAL_S_MIN:
        raise ValueError(f"--interval must be at least {INTERVAL_S_MIN}, got {options.interval:g}")
    with connect(options, request_timeout_s=REQUEST_TIMEOUT_S) as server:
        observer = Observer(server, options.deployment)
        if options.json:
            print(json.dumps(summary(*_two_looks(observer, options.interval))))
            return 0
        from rich.console import Console

        from midstream.commands.top_view import PLAIN_WIDTH, draw

        if options.once or not sys.stdout.isatty():
            width = Console().width if sys.stdout.isatty() else PLAIN_WIDTH
            console = Console(width=width, color_system=None, force_terminal=False)
            with console.capture() as frame:
                console.print(draw(summary(*_two_looks(observer, options.interval))))
            print("\n".join(line.rstrip() for line in frame.get().splitlines()))
            return 0
        with contextlib.suppress(KeyboardInterrupt):
            _live(observer, options.interval, Console())
    return 0


def _two_looks(observer: Observer, interval_s: float) -> tuple[Look, Look]:
    """The second one, then the first one."""
    first = observer.look()
    time.sleep(interval_s)
    return observer.look(), first


def _live(observer: Observer, interval_s: float, console: Console) -> None:
    from rich.live import Live
    from rich.text import Text

    from midstream.commands.top_view import draw

    waiting = Text(f"asking {observer.server.root} ...")
    with Live(waiting, console=console, screen=True, auto_refresh=False) as live:
        for seen, speeds, trouble in frames(observer, interval_s):
            picture = Text(trouble, style="bold red") if seen is None else draw(seen, speeds, trouble)
            live.update(picture, refresh=True)


def frames(observer: Observer, interval_s: float) -> Iterator[tuple[dict[str, Any] | None, list[float], str]]:
    """Endless: the numbers of the last look that succeeded, the tokens/s of those before, and what is wrong, if anything."""
    before: Look | None = None
    seen: dict[str, Any] | None = None
    speeds: deque[float] = deque(maxlen=60)
    lost_at = 0.0
    while True:
        trouble = ""
        try:
            look = observer.look()
        except PublishError as error:
            lost_at = lost_at or time.monotonic()
            silent = seconds(time.monotonic() - lost_at)
            trouble = f"no answer for {silent}, trying again: {plain(str(error))}"
        else:
            seen, before, lost_at = summary(look, before), look, 0.0
            speeds.append(seen["rates"]["generated_tokens"] or 0.0)
        yield seen, list(speeds), trouble
        time.sleep(interval_s)
