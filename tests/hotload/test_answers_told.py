"""Answers of control calls that no other test here gets: the client holds each against the OpenAPI document."""

from __future__ import annotations

from pathlib import Path

from openapi_answers import HELD
from test_hotload_api import Server, while_three_load
from test_hotload_api import serve as serve_plain
from test_policy_calls_api import ADDONS, POLICIES, PolicyServer, serve


async def test_policies_and_add_ons_are_as_they_are_told(tmp_path: Path) -> None:
    async def work(server: PolicyServer) -> None:
        assert (await server.http.post(POLICIES, json={"policy": "red"})).status_code == 200
        assert (await server.signal({"identity": "a", "policy": "red"})).status_code == 200
        assert (await server.http.get(f"{POLICIES}/red")).json()["snapshot"] == "a"
        for method, more in (("GET", None), ("PATCH", {"displayName": "Red"})):
            answer = await server.http.request(method, f"{ADDONS}/red", json=more)
            assert answer.status_code == 200, answer.text
        assert (await server.http.get(ADDONS)).json()["deployedModels"][0]["displayName"] == "Red"
        assert (await server.http.delete(f"{POLICIES}/red")).status_code == 200

    before = HELD.copy()
    async with serve(tmp_path) as server:
        await work(server)
    held = HELD - before
    assert held.total() == 7
    assert len(held) == 7


async def test_pauses_aborts_and_updates_of_sglang_are_as_they_are_told(tmp_path: Path) -> None:
    async def work(server: Server) -> None:
        for path, body in (
            ("/pause_generation", {"mode": "abort"}),
            ("/continue_generation", {}),
            ("/abort_request", {"abort_all": True}),
            ("/abort_requests", {}),
        ):
            answer = await server.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
        for index in range(3):
            server.report(index)
        body = {"model_path": str(server.bucket / "a")}
        answer = await while_three_load(server, server.http.post("/update_weights_from_disk", json=body))
        assert answer.json()["success"]

    before = HELD.copy()
    async with serve_plain(tmp_path) as server:
        await work(server)
    held = HELD - before
    assert held.total() == 5
    assert len(held) == 5
