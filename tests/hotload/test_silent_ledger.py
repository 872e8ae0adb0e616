"""A signal while PostgreSQL hangs: one call's limit, then a 503 that may be sent again, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from postgres import Postgres, Wire
from test_hotload_api import Server, serve

from midstream.ledger import Ledger, LedgerUnavailable

pytestmark = pytest.mark.slow


async def test_a_signal_is_refused_after_one_limit_and_taken_when_the_database_is_heard_again(
    tmp_path: Path,
    postgres_process: Postgres,
    postgres_url: str,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals: list[LedgerUnavailable] = []
    real = Ledger._run

    async def counted(self: Ledger, *arguments: object) -> object:
        try:
            return await real(self, *arguments)  # type: ignore[arg-type]
        except LedgerUnavailable as error:
            refusals.append(error)
            raise

    async def work(server: Server) -> None:
        for index in range(3):
            server.report(index)
        assert (await server.signal({"identity": "a"})).status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr("midstream.ledger.ledger.ANSWER_S", 1.0)
            patch.setattr(Ledger, "_run", counted)
            wire.silent()
            answers = [
                await server.signal({"identity": "b"}),
                await server.http.get("/hot_load/v1/models/hot_load"),
            ]
            wire.heard_again()
        assert [answer.status_code for answer in answers] == [503, 503]
        for answer in answers:
            assert answer.json()["error"]["message"] == "the ledger did not answer within 1 s"
            assert int(answer.headers["retry-after"]) > 0
        assert len(refusals) == 2, "each call waits for one transaction, not for one after another"
        while (taken := await server.signal({"identity": "b"})).status_code == 503:
            pass
        assert (taken.status_code, taken.json()["changed"]) == (200, True)
        desired = await server.desired()
        assert desired is not None
        assert (desired.snapshot, desired.generation) == ("b", 2)

    url = postgres_url.replace(f":{postgres_process.port}/", f":{wire.port}/")
    async with serve(tmp_path, url) as server:
        await work(server)
