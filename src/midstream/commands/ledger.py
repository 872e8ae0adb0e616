"""`midstream ledger`: every snapshot that was signalled, and when each replica was ready with it, or why it failed.

Below are the newest group of a trainer that pushes, and its last updates.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import Any

from midstream.commands.common import (
    add_server_arguments,
    add_watch_arguments,
    connect,
    full_deployment_name,
    guarded,
    show,
)
from midstream.commands.pushes_view import pushes_text
from midstream.core.text import plain, seconds, table

HEADS = ("snapshot", "kind", "on", "cache", "signalled", "ready after", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=guarded(_ledger))
    add_server_arguments(parser)
    add_watch_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the server's own answer, per look")


def _ledger(options: argparse.Namespace) -> int:
    with connect(options) as server:

        def look() -> str:
            answer = server.deployments.ledger(full_deployment_name(server, options.deployment), retry_s=0)
            if not options.json:
                return render(answer)
            # One line for each look of --watch, so that a program can separate them.
            return json.dumps(answer, indent=None if options.watch else 2)

        return show(look, options)


def render(ledger: dict[str, Any]) -> str:
    """The table. Times of day are local. `ready after` counts from the signal, for each replica."""
    rows = [_row(snapshot, ledger) for snapshot in ledger["snapshots"]]
    lines = [table(HEADS, rows)] if rows else ["nothing was signalled yet"]
    lines += [
        plain(f"{d['replica']} on {d['identity']}: {d['error']}") for d in ledger.get("disagreements", ())
    ]
    if ledger.get("older_transitions_left_out"):
        lines.append("(stage changes of older snapshots are left out; ?limit= of the API has them)")
    if pushes := pushes_text(ledger.get("transfers", ())):
        lines += ["", pushes]
    return "\n".join(lines)


def _row(snapshot: dict[str, Any], ledger: dict[str, Any]) -> tuple[str, ...]:
    replicas = snapshot.get("replicas", [])
    ready = [
        f"{r['replica']} {seconds(max(0.0, r['ready_at'] - snapshot['signalled_at']))}"
        for r in replicas
        if r["ready_at"] is not None
    ]
    notes = [f"{r['replica']}: {r['error']}" for r in replicas if r["error"]]
    if snapshot["identity"] == ledger["desired_snapshot_identity"]:
        notes.insert(0, "desired")
    # Servers of before do not say it.
    if snapshot.get("full_url") and not snapshot.get("full_needed", True):
        notes.append(f"{snapshot['full_url']} may be removed")
    age = snapshot.get("max_cache_age")
    return (
        snapshot["identity"],
        snapshot["kind"],
        snapshot.get("previous_snapshot_identity") or "-",
        snapshot["reset_prompt_cache"] if age is None else f"max_age={age}",
        datetime.fromtimestamp(snapshot["signalled_at"]).strftime("%m-%d %H:%M:%S"),
        ", ".join(ready) or "-",
        "; ".join(notes),
    )
