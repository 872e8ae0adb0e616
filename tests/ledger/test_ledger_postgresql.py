"""What is particular to a ledger in PostgreSQL: its URL and password, lost connections, writers in other processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from ledger_helpers import DEPLOYMENT, MODEL, on_ledger, opened, signal
from pgbouncer import find_pgbouncer, pooled
from postgres import PASSWORD, Postgres, Wire

from midstream.core.errors import ConfigError
from midstream.ledger import Event, Ledger, LedgerUnavailable, SignalResult, TransferMember
from midstream.ledger.database import Database

pytestmark = pytest.mark.slow


def test_the_password_is_in_no_message(
    postgres_process: Postgres, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with opened(postgres_url) as ledger:
        assert PASSWORD not in repr(ledger)
        assert "127.0.0.1" in repr(ledger)
        shown = [repr(ledger)]
    for wrong in (
        postgres_url.replace("tester:", "somebody:"),
        postgres_url.replace(f":{postgres_process.port}/", ":1/"),
        postgres_url.replace("ledger-", "absent-"),
        postgres_url.replace("postgresql://", "postgresql+nonsense://"),
        postgres_url.replace("postgresql://", "mysql://"),
        postgres_url.replace(f":{postgres_process.port}/", ":port/"),
    ):
        with pytest.raises(ConfigError) as refused:
            Ledger(wrong)
        shown.append(str(refused.value))
    assert not [text for text in (*shown, caplog.text) if PASSWORD in text]
    assert "password authentication failed" in shown[1]


def test_behind_a_pgbouncer_in_transaction_mode_each_call_does_what_it_says(
    postgres_process: Postgres, postgres_url: str
) -> None:
    """Two connections serve all, so each transaction may find what another ledger's left on its connection."""
    if (program := find_pgbouncer()) is None:
        pytest.skip("no PgBouncer here (Debian: apt-get install pgbouncer)")

    async def run(url: str) -> None:
        with opened(url) as one, opened(url) as two, opened(url) as three:
            ledgers = (one, two, three)
            await one.ensure_deployment(DEPLOYMENT, MODEL, "file:///bucket", "ASYNC")
            results = await asyncio.gather(
                *(signal(ledger, f"{at}-{n}") for n in range(20) for at, ledger in enumerate(ledgers)),
                *(ledger.changes() for _ in range(20) for ledger in ledgers),
            )
            signals = {
                one.desired.generation: one.desired for one in results if isinstance(one, SignalResult)
            }
            assert sorted(signals) == list(range(1, 61))
            for ledger in ledgers:
                assert (await ledger.state(DEPLOYMENT)).desired == signals[60]
                assert len(await ledger.snapshots(DEPLOYMENT)) == 60

    with pooled(postgres_process, program) as pool:
        asyncio.run(run(pool.url(postgres_url.rpartition("/")[2])))


async def test_gateways_whose_clocks_differ_judge_a_deadline_alike(postgres_url: str) -> None:
    members = (TransferMember("replica-0", "boot", 1),)

    async with on_ledger(postgres_url) as ledger:
        behind, ahead = 0.0, 4e9
        ledger.now = lambda: behind
        group = await ledger.open_transfer(DEPLOYMENT, "g", members, "127.0.0.1:29500", 60.0)
        with opened(postgres_url) as other:
            other.now = lambda: ahead
            seen = await other.transfer(DEPLOYMENT)
            assert seen == group
            assert not seen.late(other.clock())
            assert seen.late(other.clock() + 61.0)
            joined = await other.move_transfer(seen, Event.JOINED)
            started = await other.move_transfer(joined, Event.START, within_s=60.0)
            assert not started.late(ledger.clock())
            assert started.late(ledger.clock() + 61.0)


async def test_a_lost_connection_is_a_retryable_error_or_none(
    postgres_process: Postgres, postgres_url: str
) -> None:
    async with on_ledger(postgres_url) as ledger:
        await signal(ledger, "a")
        with psycopg.connect(postgres_process.url("postgres"), autocommit=True) as db:
            db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'ledger-%'")
        assert (await signal(ledger, "b")).desired.generation == 2
        assert [row.identity for row in await ledger.snapshots(DEPLOYMENT)] == ["a", "b"]


async def test_after_a_failover_no_connection_stays_with_the_server_that_takes_no_writes_any_more(
    postgres_process: Postgres, postgres_url: str
) -> None:
    """A primary that became a standby answers reads, and refuses writes on the connections that it has.

    Seen elsewhere as gpustack#6105, where one refused every write for three days.
    """
    name = postgres_url.rpartition("/")[2]

    async with on_ledger(postgres_url) as ledger:
        await signal(ledger, "a")
        with psycopg.connect(postgres_process.url("postgres"), autocommit=True) as db:
            db.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'.encode())
            db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
            for call in (signal(ledger, "b"), ledger.state(DEPLOYMENT)):
                with pytest.raises(LedgerUnavailable, match="read-only"):
                    await call
            db.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only'.encode())
        assert (await signal(ledger, "b")).desired.generation == 2


async def test_of_several_hosts_the_one_that_takes_writes_is_used(
    postgres_process: Postgres, postgres_url: str
) -> None:
    at = f"127.0.0.1:{postgres_process.port}"
    start, name = postgres_url.split(f"{at}/")

    async with on_ledger(f"{start}/{name}?host=127.0.0.1:1&host={at}") as ledger:
        assert (await signal(ledger, "a")).desired.generation == 1


def test_a_connection_that_begins_to_refuse_writes_is_given_up(postgres_url: str) -> None:
    """As through a pooler that was moved to a standby."""
    database = Database(postgres_url)
    with database.write() as db:
        db.exec_driver_sql("SET default_transaction_read_only = on")
    with pytest.raises(LedgerUnavailable, match="read-only"), database.write() as db:
        db.exec_driver_sql("CREATE TABLE refused (id int)")
    with database.write() as db:
        db.exec_driver_sql("CREATE TABLE taken (id int)")
    database.close()


async def test_a_writer_that_waits_too_long_is_told_to_retry_and_readers_do_not_wait(
    postgres_url: str,
) -> None:
    """Only waiting for a lock is made short: any statement can take long on a busy machine."""

    async with on_ledger(f"{postgres_url}?options=-clock_timeout%3D200") as ledger:
        await signal(ledger, "a")
        with psycopg.connect(postgres_url) as holder:
            holder.execute("UPDATE deployments SET generation = 9")
            with pytest.raises(LedgerUnavailable, match="timeout") as caught:
                await signal(ledger, "b")
            assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
            state = await ledger.state(DEPLOYMENT)
            assert state.desired is not None
            assert (state.desired.snapshot, state.desired.generation) == ("a", 1)
            holder.rollback()
        assert (await signal(ledger, "b")).changed


def test_processes_that_come_at_once_make_one_ledger_and_number_their_signals_together(
    postgres_url: str, tmp_path: Path
) -> None:
    script = f"""
import asyncio, sys
from midstream.ledger import Ledger, Signal
async def main():
    ledger = Ledger({postgres_url!r})
    await ledger.ensure_deployment({DEPLOYMENT!r}, {MODEL!r}, "file:///bucket")
    for i in range(10):
        name = f"{{sys.argv[1]}}-{{i}}"
        print((await ledger.signal({DEPLOYMENT!r}, Signal(identity=name, url="file:///b"))).desired.generation)
    ledger.close()
asyncio.run(main())
"""
    children = [
        subprocess.Popen([sys.executable, "-c", script, str(i)], stdout=subprocess.PIPE) for i in range(3)
    ]
    generations = [int(line) for child in children for line in child.communicate(timeout=300)[0].split()]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert sorted(generations) == list(range(1, 31))


def test_a_ledger_of_another_schema_version_is_refused(postgres_url: str) -> None:
    with opened(postgres_url):
        pass
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute("UPDATE midstream_schema SET version = 99")
    with pytest.raises(ConfigError, match=r"@127\.0\.0\.1.*has schema version 99") as refused:
        Ledger(postgres_url)
    assert PASSWORD not in str(refused.value)


def test_what_a_url_asks_for_holds_and_its_secrets_are_shown_nowhere(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    user, _, rest = postgres_url.partition(f":{PASSWORD}")
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute("CREATE SCHEMA apart")
    url = f"{user}{rest}?password={PASSWORD}&options=-csearch_path%3Dapart%20-cstatement_timeout%3D43210"
    with opened(url) as ledger:
        assert PASSWORD not in repr(ledger)
        with ledger._database.read() as db:
            assert db.exec_driver_sql("SHOW statement_timeout").scalar() == "43210ms"
            assert db.exec_driver_sql("SHOW lock_timeout").scalar() == "10s"
    with psycopg.connect(postgres_url) as db:
        tables = "SELECT schemaname FROM pg_tables WHERE tablename = 'snapshots'"
        assert db.execute(tables).fetchall() == [("apart",)]
    with pytest.raises(ConfigError) as refused:
        Ledger(url.replace("ledger-", "absent-"))
    assert PASSWORD not in str(refused.value) + caplog.text


async def test_a_database_that_says_nothing_any_more_holds_up_nobody(
    postgres_process: Postgres, postgres_url: str, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres_url.replace(f":{postgres_process.port}/", f":{wire.port}/")

    async with on_ledger(url) as ledger:
        await signal(ledger, "a")
        wire.silent()
        with monkeypatch.context() as patch:
            patch.setattr("midstream.ledger.ledger.ANSWER_S", 1.0)
            asked = [asyncio.create_task(ledger.state(DEPLOYMENT)) for _ in range(3)]
            await asyncio.wait(asked)
        for task in asked:
            assert isinstance(task.exception(), LedgerUnavailable), "a 503, and the next look tries again"
        wire.heard_again()
        while True:
            with contextlib.suppress(LedgerUnavailable):
                assert (await ledger.state(DEPLOYMENT)).snapshot == "a"
                break
        assert (await signal(ledger, "b")).changed
        wire.silent()
        monkeypatch.setattr("midstream.ledger.ledger.ANSWER_S", 1.0)
        with pytest.raises(LedgerUnavailable):
            await ledger.state(DEPLOYMENT)

    # And closes it while the database is silent.


async def test_one_reading_sees_one_moment(postgres_url: str) -> None:
    """A signal committed between two statements of a reader is seen by none of them."""

    async with on_ledger(postgres_url) as ledger:
        await signal(ledger, "a")
        with ledger._database.read() as db:
            from midstream.ledger import deployments

            before = deployments.find(db, DEPLOYMENT)
            with opened(postgres_url) as other:
                await signal(other, "b")
            assert deployments.find(db, DEPLOYMENT).desired_snapshot == before.desired_snapshot == "a"
        assert (await ledger.state(DEPLOYMENT)).snapshot == "b"
