"""What is particular to a ledger in an SQLite file."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from ledger_helpers import DEPLOYMENT, moved, on_ledger, opened, signal

from midstream.core.errors import ConfigError
from midstream.core.types import Stage
from midstream.ledger import Ledger, LedgerUnavailable, clock, database, schema, sqlite_url


async def test_no_query_of_a_pass_reads_a_whole_table(tmp_path: Path) -> None:
    async with on_ledger(sqlite_url(tmp_path / "ledger.sqlite")) as ledger:
        statements: list[tuple[str, Any]] = []

        def note(_c: Any, _k: Any, text: str, parameters: Any, *_: Any) -> None:
            if not text.startswith("BEGIN"):
                statements.append((text, parameters))

        for identity in ("a", "b"):
            await signal(ledger, identity)
        sa.event.listen(ledger._database.engine, "before_cursor_execute", note)
        await ledger.state(DEPLOYMENT)
        await ledger.boot_history(DEPLOYMENT, "replica-0", "new")
        await ledger.record(DEPLOYMENT, "replica-0", "new", [moved(0, "b", 2, Stage.IDLE)])
        await signal(ledger, "b")
        await ledger.transitions(DEPLOYMENT, newest=5)
        assert len(statements) > 12
        db = sqlite3.connect(tmp_path / "ledger.sqlite")
        plans = [
            row[3] for text, given in statements for row in db.execute(f"EXPLAIN QUERY PLAN {text}", given)
        ]
        db.close()
        assert len(plans) > 12
        # The counter of changes is one row.
        small = ("SUBQUERY", "SCAN change_counter")
        assert [plan for plan in plans if "SCAN" in plan and not any(one in plan for one in small)] == []
        assert not [plan for plan in plans if "TEMP B-TREE FOR ORDER" in plan]


async def test_reading_waits_for_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)

    async with on_ledger(sqlite_url(tmp_path / "ledger.sqlite")) as ledger:
        await signal(ledger, "a")
        holder = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        holder.execute("UPDATE deployments SET generation = 9")
        state = await ledger.state(DEPLOYMENT)
        assert state.desired is not None
        assert state.desired.generation == 1
        assert [row.identity for row in await ledger.snapshots(DEPLOYMENT)] == ["a"]
        holder.execute("ROLLBACK")
        holder.close()


async def test_a_locked_database_is_a_retryable_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)

    async with on_ledger(sqlite_url(tmp_path / "ledger.sqlite")) as ledger:
        holder = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerUnavailable, match="database is locked") as caught:
            await signal(ledger, "a")
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        holder.execute("ROLLBACK")
        holder.close()
        assert (await signal(ledger, "a")).changed


def test_a_ledger_of_another_schema_version_is_refused(tmp_path: Path) -> None:
    with opened(sqlite_url(tmp_path / "ledger.sqlite")):
        pass
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("UPDATE midstream_schema SET version = 99")
    db.close()
    with pytest.raises(
        ConfigError, match=r"ledger\.sqlite: has schema version 99, this midstream reads version 9"
    ):
        Ledger(sqlite_url(tmp_path / "ledger.sqlite"))


def test_what_is_no_ledger_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_text("not a database, but long enough to have a header" * 20)
    for url in (
        sqlite_url(tmp_path / "ledger.sqlite"),
        sqlite_url(tmp_path / "absent" / "l.sqlite"),
        "nonsense",
    ):
        with pytest.raises(ConfigError, match="ledger"):
            Ledger(url)


def test_a_commit_is_on_the_disk_when_it_returns(tmp_path: Path) -> None:
    # In SQLite's words: every commit waits for the disk.
    full = 2
    with opened(sqlite_url(tmp_path / "ledger.sqlite")) as ledger, ledger._database.write() as db:
        assert db.execute(sa.text("PRAGMA synchronous")).scalar_one() == full


def test_the_file_is_in_wal_mode_with_foreign_keys_on(tmp_path: Path) -> None:
    with opened(sqlite_url(tmp_path / "ledger.sqlite")) as ledger, ledger._database.engine.begin() as db:
        assert db.execute(sa.text("PRAGMA journal_mode")).scalar_one() == "wal"
        assert db.execute(sa.text("PRAGMA foreign_keys")).scalar_one() == 1
        with pytest.raises(sa.exc.IntegrityError):
            db.execute(schema.transitions.insert().values(
                deployment_id=77, replica="r", boot="b", seq=0, identity="a",
                generation=1, stage="idle", at=0.0, detail="",
            ))  # fmt: skip


def test_a_clock_that_is_set_moves_no_deadline_in_any_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = sqlite_url(tmp_path / "ledger.sqlite")
    real = time.time
    first = Ledger(url)
    before = first.clock()
    assert abs(before - real()) < 60.0
    monkeypatch.setattr(time, "time", lambda: real() - 5847.0)
    second = Ledger(url)
    assert before <= first.clock() <= second.clock() < before + 60.0
    monkeypatch.setattr(clock, "boot_id", lambda: "the next start")
    third = Ledger(url)
    assert abs(third.clock() - time.time()) < 60.0
    for ledger in (first, second, third):
        ledger.close()
