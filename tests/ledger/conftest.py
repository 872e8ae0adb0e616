from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres import REQUIRED, Postgres, find_server, postgres_server

from midstream.ledger import sqlite_url


@pytest.fixture(scope="session")
def postgres_process() -> Iterator[Postgres]:
    programs = find_server()
    if programs is None:
        why = "no PostgreSQL here (Debian: apt-get install postgresql)"
        if os.environ.get(REQUIRED):
            pytest.fail(why)
        pytest.skip(why)
    with postgres_server(programs) as server:
        yield server


@pytest.fixture
def postgres_url(postgres_process: Postgres) -> Iterator[str]:
    """An empty database."""
    name = f"ledger-{secrets.token_hex(6)}"
    yield postgres_process.create(name)
    postgres_process.drop(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database of each kind."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "ledger.sqlite")
    found: str = request.getfixturevalue("postgres_url")
    return found
