from __future__ import annotations

import pytest

from midstream.ledger import database


@pytest.fixture(autouse=True)
def _no_disk_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests survive no power cut; the ledger's own tests keep its real setting."""
    monkeypatch.setattr(database, "SYNCHRONOUS", "OFF")
