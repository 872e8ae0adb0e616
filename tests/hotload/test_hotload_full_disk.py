"""The disk under the ledger is full: signals are refused so that a retry cures it, reading and serving go on."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_hotload_api import DEPLOYMENT, Server, ready, serve

from midstream.core.wires import HOT_LOAD_PATH
from midstream.ledger import database

ROOM = 2**30
SIGNALS_MAX = 500


class Disk:
    """SQLite's own bound, which it reports as it reports a full disk. pages: at most, or as many as there are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages = ROOM
        begin = database._begin_sqlite

        def bounded(db: Any) -> None:
            db.exec_driver_sql(f"PRAGMA max_page_count = {self.pages}")
            begin(db)

        monkeypatch.setattr(database, "_begin_sqlite", bounded)


async def until_refused(server: Server) -> tuple[str, str, httpx.Response]:
    """The last identity that was taken, the one that was not, and its answer: a page has room for some rows."""
    taken = "a"
    for number in range(SIGNALS_MAX):
        server.write(identity := f"full-{number}")
        answer = await server.signal({"identity": identity})
        if answer.status_code != 200:
            return taken, identity, answer
        taken = identity
    raise AssertionError("the disk is not full")


async def test_a_signal_is_refused_while_the_disk_is_full_and_taken_when_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)

    async with serve(tmp_path) as server:
        for index in range(3):
            server.report(index)
        assert (await server.signal({"identity": "a"})).status_code == 200
        # Not below what there is.
        disk.pages = 1
        taken, refused, answer = await until_refused(server)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        error = answer.json()["error"]
        assert error["code"] == "replica_unavailable"
        assert error["message"] == "the ledger cannot be used now: database or disk is full"
        desired = await server.desired()
        assert desired is not None
        assert desired.snapshot == taken, "nothing of the refused signal is kept"
        for index in range(3):
            server.report(
                index,
                snapshot=taken,
                generation=desired.generation,
                transitions=ready(taken, desired.generation),
            )
        assert [row["current_snapshot_identity"] for row in await server.rows()] == [taken] * 3
        ledger = await server.http.get(f"/v1/{DEPLOYMENT}/ledger")
        assert ledger.json()["desired_snapshot_identity"] == taken
        assert (await server.http.get("/health")).status_code == 200
        disk.pages = ROOM
        again = await server.http.post(HOT_LOAD_PATH, json={"identity": refused})
        assert (again.status_code, again.json()["identity"]) == (200, refused)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
