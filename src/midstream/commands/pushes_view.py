"""Trainers' groups and their updates, as `midstream ledger` and `midstream status` show them.

Always holds: an update that is no snapshot has the reason. Ages are by this machine's clock and never negative.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from midstream.core.text import plain, seconds, table

HEADS = ("update", "started", "snapshot", "replicas", "in the bucket", "")
UPDATES_SHOWN = 5
_KEPT = {"": "-", "wanted": "not yet", "kept": "yes", "off": "never (push.keep)", "given up": "no, given up"}
#: As GET .../ledger lists them, the newest first.
Groups = Sequence[Mapping[str, Any]]


def pushes_text(
    groups: Groups,
    now: Callable[[], float] = time.time,
    serving: Callable[[str], int] | None = None,
) -> str:
    """The newest group and the last updates. Times of day are local.

    now: seconds since the epoch. serving: how many replicas serve a snapshot; with it, each update says where its files are.
    """
    if not groups:
        return ""
    lines = _group(groups[0], now())
    updates = [(group, update) for group in groups for update in group["updates"]][:UPDATES_SHOWN]
    if updates:
        heads = HEADS if serving is None else (*HEADS[:4], "where", "")
        lines.append(table(heads, [_row(group, update, serving) for group, update in updates]))
    return "\n".join(lines)


def _group(group: Mapping[str, Any], now: float) -> list[str]:
    if group["ended_at"] is not None:
        ago = seconds(max(0.0, now - group["ended_at"]))
        return [plain(f"no trainer's group is open; the last one ended {ago} ago: {group['reason']}")]
    facts = [f"trainer's group of {group['trainer']}: {group['phase']}"]
    if group["updates"]:
        facts.append(f"update {group['updates'][0]['number']}")
    facts.append(f"opened {seconds(max(0.0, now - group['opened_at']))} ago")
    if group["deadline"] is not None:
        left = group["deadline"] - now
        facts.append(
            f"ends in {seconds(left)} unless it moves on"
            if left >= 0
            else f"past its deadline by {seconds(-left)}"
        )
    members = [
        f"{member['replica']} rank {member['rank']}"
        + (f" (left out: {member['fenced']})" if member["fenced"] else "")
        for member in group["members"]
    ]
    return [plain(", ".join(facts)), plain(f"members: {', '.join(members)}")]


def _row(
    group: Mapping[str, Any], update: Mapping[str, Any], serving: Callable[[str], int] | None
) -> tuple[str, ...]:
    kept = _KEPT.get(update["kept"], update["kept"])
    return (
        str(update["number"]),
        datetime.fromtimestamp(update["started_at"]).strftime("%m-%d %H:%M:%S"),
        update["identity"] or "-",
        ", ".join(update["replicas"]) or "-",
        kept if serving is None else where(update, serving),
        "" if update["committed_at"] is not None else _why_not(group, update),
    )


def where(update: Mapping[str, Any], serving: Callable[[str], int]) -> str:
    """Where a replica that lacks the files of an update gets them from."""
    if update["committed_at"] is None:
        return "-"
    if update["kept"] == "kept":
        return "in the bucket"
    count = serving(update["identity"])
    if not count:
        return "nowhere: waits for the next update"
    return f"on {count} replica{'' if count == 1 else 's'}"


def _why_not(group: Mapping[str, Any], update: Mapping[str, Any]) -> str:
    if update["number"] != group["updates"][0]["number"] or group["phase"] == "joined":
        return "dropped"
    return f"ended: {group['reason']}" if group["ended_at"] is not None else str(group["phase"])
