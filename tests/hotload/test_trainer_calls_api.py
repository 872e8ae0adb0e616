"""Trainers' control calls on a real ledger and the real control app; replica reports are set by the test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from test_hotload_api import DEPLOYMENT, failed, serve, while_three_load

from midstream.core.types import EngineCard, Pause, Stage
from midstream.engine.vllm.arguments import vllm_card


def bad(answer: Any) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["param"]


async def test_keep_is_refused_where_requests_cannot_stand_still_and_nothing_is_paused(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path) as server:
        lacking = tuple(feature for feature in EngineCard().features if feature != "freeze")
        server.report(0, card=EngineCard(features=lacking))
        server.report(1, card=EngineCard())
        answer = await server.http.post("/pause?mode=keep")
        assert bad(answer) == (400, "mode")
        assert "(feature freeze)" in answer.json()["error"]["message"]
        server.report(0)
        await server.ledger.update_deployment(DEPLOYMENT, transition="SYNC")
        answer = await server.http.post("/pause_generation", json={"mode": "in_place"})
        assert bad(answer) == (400, "mode")
        for path in ("/pause?mode=sleep", "/pause?mode=wait&clear_cache=perhaps"):
            assert (await server.http.post(path)).status_code == 400
        assert bad(await server.http.post("/pause_generation", json={"mode": "retract"})) == (400, "mode")
        for path, body, field in (
            ("/pause", {"mode": "sleep"}, "mode"),
            ("/pause", {"level": 1}, "level"),
            ("/pause?mode=abort", {"mode": "wait"}, "mode"),
            ("/pause?clear_cache=1", {"clear_cache": False}, "clear_cache"),
        ):
            assert bad(await server.http.post(path, json=body)) == (400, field)
        assert (await server.ledger.state(DEPLOYMENT)).pause == Pause()


@pytest.mark.parametrize(
    ("sent", "mode"),
    [
        ({"mode": "keep"}, "keep"),
        ({"mode": "wait", "clear_cache": False}, "wait"),
        ({"wait_for_inflight_requests": True, "clear_cache": False}, "wait"),
        ({}, "abort"),
    ],
)
async def test_a_pause_means_in_a_body_what_it_means_in_the_query(
    tmp_path: Path, sent: dict[str, Any], mode: str
) -> None:
    """A trainer that asked to keep its requests would lose them all to the default, which ends them."""
    async with serve(tmp_path) as server:
        server.report(0)
        server.report(1)
        asked = asyncio.create_task(server.http.post("/pause", json=sent))
        while (paused := (await server.ledger.state(DEPLOYMENT)).pause) == Pause():
            assert not asked.done()
        assert paused.mode == mode
        asked.cancel()


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_pause_is_answered_once_every_replica_that_is_heard_has_ended_its_requests(
    tmp_path: Path, leaves: bool
) -> None:
    async with serve(tmp_path) as server:
        wanted = Pause(1, "wait")
        server.report(0)
        server.report(1, pause=Pause(), in_flight=1)
        if leaves:
            members = [(view.name, view.url) for view in server.replicas.views]
            server.replicas.facts.set_members(members, leaving=["replica-1"])
        asked = asyncio.create_task(server.http.post("/pause?mode=wait&clear_cache=false"))
        while (await server.ledger.state(DEPLOYMENT)).pause != wanted:
            assert not asked.done()
        server.report(0, pause=wanted)
        server.report(1, pause=wanted, in_flight=1)
        server.replicas._changed()
        await asyncio.sleep(0)
        assert not asked.done()
        for _ in range(4):
            # The ledger answers one call after another: the pause had its turns, too.
            assert (await server.http.get("/is_paused")).status_code == 200
        assert not asked.done()
        server.report(1, pause=wanted)
        server.replicas._changed()
        assert (await asked).json() == {"status": "paused"}
        assert (await server.http.get("/is_paused")).json() == {"is_paused": True, "mode": "wait"}


@pytest.mark.parametrize(
    ("then", "said"), [("/resume", "resumed"), ("/pause?mode=abort", "paused with abort")]
)
async def test_a_pause_that_another_call_ended_is_a_conflict_and_resets_nothing(
    tmp_path: Path, then: str, said: str
) -> None:
    async with serve(tmp_path) as server:
        posted: list[str] = []

        async def post(view: object, path: str, body: bytes, expected: int) -> bytes:
            posted.append(path)
            return b"{}"

        server.replicas.post = post  # type: ignore[method-assign]
        server.report(0, pause=Pause(), in_flight=1)
        asked = asyncio.create_task(server.http.post("/pause?mode=wait"))
        while (await server.ledger.state(DEPLOYMENT)).pause != Pause(1, "wait"):
            assert not asked.done()
        other = asyncio.create_task(server.http.post(f"{then}{'&' if '?' in then else '?'}clear_cache=false"))
        while (now := (await server.ledger.state(DEPLOYMENT)).pause).serial != 2:
            assert not other.done()
        server.report(0, pause=now)
        server.replicas._changed()
        answer = await asked
        assert answer.status_code == 409, answer.text
        assert f"another call {said}" in answer.json()["error"]["message"]
        assert posted == []
        assert (await other).status_code == 200


async def test_a_pause_that_is_asked_for_again_is_answered_with_the_last_one(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        server.report(0, pause=Pause(), in_flight=1)
        calls = []
        for serial in (1, 2):
            calls.append(asyncio.create_task(server.http.post("/pause?mode=wait&clear_cache=false")))
            while (await server.ledger.state(DEPLOYMENT)).pause != Pause(serial, "wait"):
                assert not calls[-1].done()
        server.report(0, pause=Pause(2, "wait"))
        server.replicas._changed()
        assert [(await call).status_code for call in calls] == [200, 200]


async def test_updates_without_a_name_get_growing_ones_and_the_same_files_keep_theirs(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        for index in range(3):
            server.report(index)

        async def update(directory: str, body: dict[str, Any] | None = None) -> str:
            told = {"weight_dir": str(server.bucket / directory), **(body or {})}
            answer = await while_three_load(server, server.http.post("/update_weights", json=told))
            assert answer.status_code == 200, answer.text
            return str(answer.json()["weight_version"])

        assert await update("a") == "update-000001-a"
        assert await update("a") == "update-000001-a"
        assert await update("run 1/step-1", {"skip_prefix_cache_reset": True}) == "update-000002-step-1"
        # prime-rl always names the version of a transfer, which is none here.
        assert await update("a", {"version_uid": None}) == "update-000003-a"
        state = await server.ledger.state(DEPLOYMENT)
        assert state.desired is not None
        assert state.desired.reset_prompt_cache == "all"
        rows = {row.identity: row.reset_prompt_cache for row in await server.ledger.snapshots(DEPLOYMENT)}
        assert rows["update-000002-step-1"] == "none"


async def test_an_update_in_a_pause_that_holds_up_the_proof_is_answered_before_it(tmp_path: Path) -> None:
    """prime-rl resumes only once its update was answered. Engines that can prove the weights in the pause do."""

    async with serve(tmp_path) as server:
        card, keep = vllm_card("1", no_routes={}), Pause(1, "keep")
        for index in range(3):
            server.report(index, card=card)
        paused = asyncio.create_task(server.http.post("/pause?mode=keep&clear_cache=false"))
        while (await server.ledger.state(DEPLOYMENT)).pause != keep:
            assert not paused.done()
        for index in range(3):
            server.report(index, card=card, pause=keep)
        server.replicas._changed()
        assert (await paused).status_code == 200
        asked = asyncio.create_task(
            server.http.post("/update_weights", json={"weight_dir": str(server.bucket / "x")})
        )
        while (desired := await server.desired()) is None:
            assert not asked.done()
        checking = {"snapshot": desired.snapshot, "target": desired.snapshot, "stage": Stage.CHECKING}
        at = {"generation": desired.generation, "signalled": desired.generation, "pause": keep, **checking}
        server.report(0, card=card, **at)
        server.report(1, card=card, **at)
        # One that proves its weights in the pause has not done so yet.
        server.report(2, card=EngineCard(), **at)
        for _ in range(3):
            server.replicas._changed()
            await asyncio.sleep(0.01)
        assert not asked.done()
        server.report(2, card=card, **at)
        server.replicas._changed()
        answer = await asked
        assert answer.status_code == 200, answer.text
        assert answer.json()["weight_version"] == desired.snapshot


@pytest.mark.parametrize(("refused", "status"), [(1, 400), (0, 503)])
async def test_an_update_that_a_replica_fails_on_is_told_in_sglangs_shape(
    tmp_path: Path, refused: int, status: int
) -> None:
    """It is the trainer's fault only where every replica would fail on these files."""

    async with serve(tmp_path) as server:
        for index in range(3):
            server.report(index)
        body = {"model_path": str(server.bucket / "x"), "weight_version": "7"}
        asked = asyncio.create_task(server.http.post("/update_weights_from_disk", json=body))
        while (desired := await server.desired()) is None:
            assert not asked.done()
        assert desired.snapshot == "7"
        why = "too short" if refused else "the disk is full"
        server.report(1, generation=1, refused=refused, transitions=failed("7", 1, why))
        server.replicas._changed()
        answer = await asked
        assert (answer.status_code, "retry-after" in answer.headers) == (status, status == 503)
        assert answer.json()["success"] is False
        more = "" if refused else "; ask again"
        assert answer.json()["message"] == f"replica-1 could not load '7': {why}{more}"


@pytest.mark.parametrize(
    "directory", ["{bucket}", "{bucket}/../outside", "relative", "s3://other/a", "{bucket}/a%2F..", ""]
)
async def test_a_directory_outside_the_bucket_is_refused_and_signals_nothing(
    tmp_path: Path, directory: str
) -> None:
    async with serve(tmp_path) as server:
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "config.json").write_text("{}")
        asked = directory.format(bucket=server.bucket)
        answer = await server.http.post("/update_weights", json={"weight_dir": asked})
        assert answer.status_code == 400
        assert await server.desired() is None


async def test_unknown_fields_are_refused_by_name(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        body = {"model_path": str(server.bucket / "a"), "lora": "x"}
        assert bad(await server.http.post("/update_weights_from_disk", json=body)) == (400, "lora")
        assert bad(await server.http.post("/abort_request", json={})) == (400, "rid")
        transfer = {"weight_dir": str(server.bucket / "a"), "version_uid": "v1"}
        answer = await server.http.post("/update_weights", json=transfer)
        assert (answer.status_code, "version_uid" in answer.text) == (400, True)
        assert await server.desired() is None


async def test_calls_that_this_server_does_not_have_say_what_to_do(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        for path, instead in {
            "/sleep": "devices of their own",
            "/wake_up": "devices of their own",
            "/release_memory_occupation": "call /pause and then /resume",
            "/resume_memory_occupation": "scale the deployment down",
            "/start_profile": "read /metrics",
            "/open_session": "the first request that names it",
            "/get_weights_by_name": "the snapshot's files",
            "/init_broadcaster": str(server.bucket),
        }.items():
            answer = await server.http.post(path, json={"level": 1})
            message = answer.json()["error"]["message"]
            assert (answer.status_code, message.startswith(f"{path} "), instead in message) == (
                400,
                True,
                True,
            )
