"""`midstream ledger` and `midstream status` show the group of a trainer, and why an update is no snapshot."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from midstream.client import ServerClient
from midstream.client.status import read_status
from midstream.commands import ledger
from midstream.commands.pushes_view import pushes_text
from midstream.commands.status import _look, as_json, render

NAME = "accounts/a/deployments/d"
ROW = {
    "current_snapshot_identity": "step-1",
    "readiness": True,
    "loading_state": {"stage": "done", "target_snapshot_identity": "step-1"},
    "midstream": {"replica": "r0", "reachable": True},
}


def update(number: int, identity: str | None = None, kept: str = "") -> dict[str, Any]:
    return {
        "number": number,
        "started_at": 1000.0 + number,
        "committed_at": 1001.0 if identity else None,
        "identity": identity,
        "generation": 7 if identity else None,
        "replicas": ["r0", "r1"] if identity else [],
        "kept": kept,
    }


def group(phase: str, *updates: dict[str, Any], **other: Any) -> dict[str, Any]:
    members = [
        {"replica": "r0", "boot": "b", "rank": 1, "fenced": None},
        {"replica": "r1", "boot": "b", "rank": 2, "fenced": other.pop("fenced", None)},
    ]
    made: dict[str, Any] = {"group": "g", "phase": phase, "trainer": "host:29500", "members": members}
    made |= {"deadline": None, "opened_at": 1000.0, "ended_at": None, "reason": None}
    return made | {"updates": list(updates)} | other


def test_an_open_group_is_shown_with_its_members_its_age_and_its_deadline() -> None:
    shown = pushes_text([group("receiving", update(3), deadline=1090.0, fenced="no answer")], lambda: 1060.0)
    first, members, _, row = shown.splitlines()
    assert first == (
        "trainer's group of host:29500: receiving, update 3, opened 60 s ago, ends in 30 s unless it moves on"
    )
    assert members == "members: r0 rank 1, r1 rank 2 (left out: no answer)"
    assert row.endswith("receiving")
    late = pushes_text([group("receiving", deadline=1090.0)], lambda: 1100.0)
    assert "past its deadline by 10 s" in late
    waiting = pushes_text([group("joined")], lambda: 900.0)
    assert waiting.splitlines()[0] == "trainer's group of host:29500: joined, opened 0.0 s ago"


def test_each_update_says_what_became_of_it() -> None:
    groups = [
        group("joined", update(3), update(2, "v2", "wanted"), update(1, "v1", "kept")),
        group("ended", update(1), ended_at=1050.0, reason="r0 died\x1b[2J"),
        group("ended", update(1, "v0", "given up"), ended_at=1050.0, reason="the trainer shut it down"),
    ]
    rows = [line.split() for line in pushes_text(groups, lambda: 1100.0).splitlines()[3:]]
    assert [(row[0], " ".join(row[3:])) for row in rows] == [
        ("3", "- - - dropped"),
        ("2", "v2 r0, r1 not yet"),
        ("1", "v1 r0, r1 yes"),
        ("1", "- - - ended: r0 died\\x1b[2J"),
        ("1", "v0 r0, r1 no, given up"),
    ]


def test_a_status_says_where_the_files_of_each_update_are() -> None:
    updates = (update(4), update(3, "v3", "off"), update(2, "v2", "wanted"), update(1, "v1", "kept"))
    serving = {"v3": 2, "v1": 1}
    shown = pushes_text(
        [group("joined", *updates)], lambda: 1100.0, lambda identity: serving.get(identity, 0)
    )
    heads, *rows = shown.splitlines()[2:]
    assert heads.split() == ["update", "started", "snapshot", "replicas", "where"]
    assert [row.split(maxsplit=6)[-1] for row in rows[1:]] == [
        "on 2 replicas",
        "nowhere: waits for the next update",
        "in the bucket",
    ]
    one = pushes_text([group("joined", update(1, "v1", "wanted"))], lambda: 1.0, lambda identity: 1)
    assert one.endswith("on 1 replica")


def test_the_end_of_the_last_group_is_shown_with_its_reason() -> None:
    shown = pushes_text([group("ended", ended_at=1050.0, reason="r0 restarted")], lambda: 1060.0)
    assert shown == "no trainer's group is open; the last one ended 10 s ago: r0 restarted"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"full_needed": False}, True),
        ({"full_needed": True}, False),
        ({}, False),
        ({"full_url": None}, False),
    ],
)
def test_a_ledger_says_which_full_files_of_a_chain_may_go(more: dict[str, Any], says: bool) -> None:
    """An older server does not say whether they are needed."""
    row = {
        "identity": "4",
        "kind": "delta",
        "reset_prompt_cache": "all",
        "signalled_at": 1000.0,
        "full_url": "s3://b/4.full",
        **more,
    }
    shown = ledger.render({"snapshots": [row], "desired_snapshot_identity": "9"})
    assert ("s3://b/4.full may be removed" in shown) == says


def test_a_ledger_shows_them_below_its_snapshots() -> None:
    answer = {"snapshots": [], "desired_snapshot_identity": None, "transfers": [group("started", update(1))]}
    assert "host:29500: started, update 1" in ledger.render(answer)
    assert ledger.render(answer | {"transfers": []}) == "nothing was signalled yet"


@pytest.mark.parametrize(
    ("metric", "asks"),
    [
        ('midstream_push_groups{deployment="d",phase="started"} 1.0', True),
        ('midstream_push_updates_total{outcome="committed"} 2.0', True),
        ('midstream_push_updates_total{outcome="committed"} 0.0', False),
        ("", False),
    ],
)
def test_a_status_asks_the_ledger_only_where_a_trainer_pushes(metric: str, asks: bool) -> None:
    asked: list[str] = []

    def get(path: str, **_: Any) -> dict[str, Any]:
        asked.append(path)
        return {"transfers": [group("started", update(1))]}

    made = SimpleNamespace(
        snapshots=SimpleNamespace(status=lambda **_: read_status({"replicas": [ROW]})),
        metrics=lambda **_: f"{metric}\n",
        deployments=SimpleNamespace(all=lambda **_: [{"name": NAME}], policies=lambda *_, **__: []),
        get=get,
    )
    server = cast(ServerClient, made)
    assert ("host:29500: started, update 1" in _look(server, render, None)) is asks
    assert len(json.loads(_look(server, as_json, None))["transfers"]) == asks
    assert asked == [f"/v1/{NAME}/ledger?limit=1"] * (2 * asks)
