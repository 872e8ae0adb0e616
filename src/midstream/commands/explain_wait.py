"""`midstream explain-wait KEY`: why a session's next turn has not begun."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from midstream.commands.common import add_server_arguments, add_watch_arguments, connect, guarded, show
from midstream.core.text import plain, seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=guarded(_explain_wait))
    parser.add_argument("session", metavar="KEY", help="the key of the session")
    add_server_arguments(parser)
    add_watch_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the wait alone, as JSON; null: it does not wait")


def _explain_wait(options: argparse.Namespace) -> int:
    with connect(options) as server:

        def look() -> str:
            session = server.sessions.get(options.session, retry_s=0)
            return json.dumps(session["wait"]) if options.json else render(session)

        return show(look, options)


def render(session: Mapping[str, Any]) -> str:
    wait = session["wait"]
    if wait is None:
        running = f", and {session['open_turns']} run now" if session["open_turns"] else ""
        return plain(f"{session['id']} does not wait: it has had {session['turns']} turns{running}")
    left = max(0, wait["budget_tokens"] - wait["claimed_tokens"])
    if wait["begun"]:
        why = (
            f"its context has {wait['needs_tokens']} tokens, and the sessions that began before it leave it no room; "
            "it goes on as soon as enough of them end, or are silent for too long"
        )
    else:
        why = (
            f"it is expected to need {wait['needs_tokens']} tokens, and {left} are left: {wait['sessions']} sessions claim "
            f"{wait['claimed_tokens']} of {wait['budget_tokens']}; it begins when those before it have begun and enough "
            "sessions end (DELETE, or a reward for the session)"
        )
    place = f"number {wait['position']} of those that wait at {wait['replica']}, for {seconds(wait['waited_s'])} so far"
    return plain(f"{session['id']} waits for room in the KV cache, as {place}: {why}")
