"""What the server keeps for itself: modes whatever the umask, and directories that others had."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.core import private
from midstream.core.errors import ConfigError
from midstream.core.private import private_directory, private_file
from midstream.launch.restart import locked
from midstream.ledger import Ledger, sqlite_url


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True, params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_what_is_made_is_for_its_user_only_whatever_the_umask(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with locked(tmp_path / "state"):
        Ledger(sqlite_url(tmp_path / "state" / "ledger.db")).close()
    assert mode(private_directory(tmp_path / "a" / "b")) == 0o700
    assert mode(private_file(tmp_path / "a" / "f")) == 0o600
    assert mode(tmp_path / "state") == 0o700
    made = {path.name: mode(path) for path in (tmp_path / "state").iterdir()}
    assert made.keys() >= {"ledger.db", "lock"}
    assert set(made.values()) == {0o600}
    assert caplog.records == []


def test_a_ledger_in_use_has_no_part_that_others_can_read(tmp_path: Path) -> None:
    ledger = Ledger(sqlite_url(tmp_path / "ledger.db"))
    modes = {path.name: mode(path) for path in tmp_path.iterdir()}
    ledger.close()
    assert modes == dict.fromkeys(["ledger.db", "ledger.db-wal", "ledger.db-shm"], 0o600)


def test_what_others_could_read_is_tightened_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o755)
    for name in ("ledger.db", "ledger.db-wal"):
        (state / name).touch()
        (state / name).chmod(0o644)
    with caplog.at_level(logging.WARNING):
        private_directory(state)
        private_file(state / "ledger.db")
        private_directory(state)
        private_file(state / "ledger.db")
    assert [mode(state), mode(state / "ledger.db"), mode(state / "ledger.db-wal")] == [0o700, 0o600, 0o600]
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "its mode was 0755; it is 0700 now, so that no other user can read it",
        *["its mode was 0644; it is 0600 now, so that no other user can read it"] * 2,
    ]


@pytest.mark.parametrize("others", [0o040, 0o020, 0o010, 0o004, 0o002, 0o001], ids=oct)
def test_no_single_right_of_others_stays(tmp_path: Path, others: int) -> None:
    directory, file = tmp_path / "state", tmp_path / "ledger.db"
    directory.mkdir()
    file.touch()
    directory.chmod(0o700 | others)
    file.chmod(0o600 | others)
    assert mode(private_directory(directory)) == 0o700
    assert mode(private_file(file)) == 0o600


def test_what_is_somebody_elses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = private_directory(tmp_path / "mine")
    monkeypatch.setattr(private.os, "getuid", lambda: 4711)
    monkeypatch.setattr(private, "_ROOT", 4712)
    with pytest.raises(
        ConfigError, match=rf"/mine: belongs to user {mine.stat().st_uid}, .* runs as user 4711"
    ):
        private_directory(mine)
