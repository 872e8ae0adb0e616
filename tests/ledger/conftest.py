from __future__ import annotations

from pathlib import Path

import pytest
from tiers import slow

from midstream.ledger import sqlite_url


@pytest.fixture(params=["sqlite", slow("postgresql")])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database of each kind."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "ledger.sqlite")
    found: str = request.getfixturevalue("postgres_url")
    return found
