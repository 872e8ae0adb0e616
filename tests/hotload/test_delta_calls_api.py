"""The calls by which Miles and SkyRL ask for their disk deltas, on a real ledger; replica reports are set by the test."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from test_hotload_api import DEPLOYMENT, Server, failed, ready, serve, while_three_load

from midstream.api.app import control_app
from midstream.api.hotload import hotload_apis
from midstream.proxy.metrics import GatewayMetrics

MILES, SKYRL = "updates/weight_v{:06d}", "sync/delta-{:08d}"


def published(server: Server, place: str, *versions: int) -> None:
    """Deltas in the place of each version, as far as a gateway reads them."""
    for version in versions:
        directory = server.bucket / place.format(version)
        directory.mkdir(parents=True, exist_ok=True)
        if place == SKYRL:
            (directory / "manifest.json").write_text("{}")
        else:
            index = {"metadata": {"delta_encoding": "xor"}, "weight_map": {}}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def checkpoint(server: Server, place: str, index: bool) -> None:
    """A whole checkpoint, as slime writes one into a version's directory now and then."""
    server.write(place)
    if not index:
        (server.bucket / place / "model.safetensors").write_bytes(b"weights")
    else:
        said = {"metadata": {"total_size": 4}, "weight_map": {}}
        (server.bucket / place / "model.safetensors.index.json").write_text(json.dumps(said))


async def began(server: Server) -> None:
    """What the trainer begins with is published as version 0."""
    for index in range(3):
        server.report(index)
    server.write("0")
    assert (await server.signal({"identity": "0"})).status_code == 200


async def rows(server: Server) -> list[tuple[str, str | None, str | None]]:
    found = await server.ledger.snapshots(DEPLOYMENT)
    return [(row.identity, row.previous, row.compression) for row in found]


async def ask(server: Server, path: str, body: dict[str, Any]) -> Any:
    return await while_three_load(server, server.http.post(path, json=body))


async def test_miles_order_of_calls_brings_version_after_version_and_one_that_was_missed(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path) as server:
        await began(server)
        source, local = str(server.bucket / "updates"), "/local-nvme/miles-rollout-checkpoint"

        async def pull(version: int) -> Any:
            body = {"local_checkpoint_dir": local, "source_dir": source, "target_version": version}
            return await ask(server, "/pull_weights", body)

        assert (await pull(0)).json()["success"] is True
        for version in (1, 3):
            published(server, MILES, version - 1, version)
            answer = await pull(version)
            assert answer.json() == {
                "success": True,
                "message": f"every replica serves {version}",
                "weight_version": str(version),
            }
            told = await ask(
                server, "/update_weights_from_disk", {"model_path": local, "weight_version": str(version)}
            )
            assert (told.status_code, told.json()["weight_version"]) == (200, str(version))
        # A retry changes nothing, and there is no way back.
        before = await server.desired()
        assert (await pull(3)).status_code == 200
        assert await server.desired() == before
        for version in (2, 0):
            refused = await pull(version)
            assert (refused.status_code, refused.json()["success"]) == (400, False)
            assert "cannot be reached from '3'" in refused.json()["message"]
        assert await rows(server) == [
            ("0", None, None), ("1", "0", "miles_delta"), ("2", "1", "miles_delta"), ("3", "2", "miles_delta")
        ]  # fmt: skip
        other = await ask(server, "/update_weights_from_disk", {"model_path": local, "weight_version": "2"})
        assert (other.status_code, other.json()["error"]["param"]) == (400, "model_path")


async def test_skyrls_order_of_calls_needs_no_group(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await began(server)
        sync_dir = (server.bucket / "sync").as_uri()
        init = {
            "base_model_path": "/models/base",
            "local_checkpoint_dir": "/tmp/x",
            "cloud_download_workers": 4,
        }
        opened = await server.http.post("/init_weight_transfer_engine", json={"init_info": init})
        assert (opened.status_code, opened.json()["ranks"]) == (200, {})
        for version in (1, 2):
            published(server, SKYRL, version)
            uri = f"{sync_dir}/delta-{version:08d}"
            info = {"target_version": version, "version": version, "sync_dir": sync_dir, "uri": uri}
            fetched = {name: info[name] for name in ("target_version", "sync_dir", "uri")}
            calls: list[tuple[str, Any]] = [
                ("/fetch_weights", fetched),
                ("/start_weight_update", None),
                ("/update_weights", {"update_info": info}),
                ("/finish_weight_update", None),
            ]
            for path, body in calls:
                answer = await ask(server, path, body)
                assert answer.status_code == 200, (path, answer.text)
            assert answer.json()["weight_version"] == str(version)
        # A trainer that pushes, whose group has ended, does not take another version for its own.
        answer = await ask(server, "/finish_weight_update", {"weight_version": "pushed"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (409, "weight_version")
        assert await rows(server) == [
            ("0", None, None), ("1", "0", "skyrl_delta"), ("2", "1", "skyrl_delta")
        ]  # fmt: skip


DELTA_CALLS = ["/update_weights", "/fetch_weights", "/pull_weights"]


def delta_call(server: Server, path: str) -> Any:
    """Asks for version 1."""
    if path == "/pull_weights":
        body: dict[str, Any] = {"source_dir": str(server.bucket / "updates"), "target_version": 1}
    else:
        body = {"target_version": 1, "sync_dir": (server.bucket / "sync").as_uri()}
    return server.http.post(path, json={"update_info": body} if path == "/update_weights" else body)


@pytest.mark.parametrize("path", DELTA_CALLS)
async def test_a_version_that_a_replica_has_no_room_for_may_be_asked_for_again(
    tmp_path: Path, path: str
) -> None:
    async with serve(tmp_path) as server:
        await began(server)
        published(server, MILES, 1)
        published(server, SKYRL, 1)
        asked = asyncio.create_task(delta_call(server, path))
        while (desired := await server.desired()) is None or desired.snapshot != "1":
            assert not asked.done()
        server.report(1, generation=2, transitions=failed("1", 2, "the disk is full"))
        server.replicas._changed()
        answer = await asked
        assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1")
        assert (
            answer.json()["error"]["message"] == "replica-1 could not load '1': the disk is full; ask again"
        )
        again = asyncio.create_task(delta_call(server, path))
        while (desired := await server.desired()) is None or desired.generation != 3:
            assert not again.done(), "the replicas try once more"
        for index in range(3):
            server.report(index, snapshot="1", generation=3, transitions=ready("1", 3))
        server.replicas._changed()
        assert (await again).status_code == 200


@pytest.mark.parametrize("path", DELTA_CALLS)
async def test_a_snapshot_that_does_not_load_is_no_fault_of_a_field(tmp_path: Path, path: str) -> None:
    async with serve(tmp_path) as server:
        await began(server)
        published(server, MILES, 1)
        published(server, SKYRL, 1)
        asked = asyncio.create_task(delta_call(server, path))
        while (desired := await server.desired()) is None or desired.snapshot != "1":
            assert not asked.done()
        server.report(1, generation=2, refused=2, transitions=failed("1", 2, "a checksum differs"))
        server.replicas._changed()
        answer = await asked
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["message"]) == (
            400,
            None,
            "replica-1 could not load '1': a checksum differs",
        )


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("place", [MILES, SKYRL])
async def test_a_whole_checkpoint_begins_a_new_chain(tmp_path: Path, place: str, index: bool) -> None:
    async with serve(tmp_path) as server:
        await began(server)

        async def bring(version: int) -> Any:
            if place == SKYRL:
                fetch = {"target_version": version, "sync_dir": (server.bucket / "sync").as_uri()}
                return await ask(server, "/fetch_weights", fetch)
            pull = {"target_version": version, "source_dir": str(server.bucket / "updates")}
            return await ask(server, "/pull_weights", pull)

        kind = "skyrl_delta" if place == SKYRL else "miles_delta"
        published(server, place, 1)
        assert (await bring(1)).status_code == 200
        # The deltas before it are not needed: a trainer may have removed them.
        checkpoint(server, place.format(4), index)
        published(server, place, 5)
        assert (await bring(5)).status_code == 200
        assert await rows(server) == [
            ("0", None, None), ("1", "0", kind), ("4", None, None), ("5", "4", kind)
        ]  # fmt: skip
        desired = await server.desired()
        assert desired is not None
        assert [link.snapshot for link in desired.files] == ["4", "5"]
        checkpoint(server, place.format(6), index)
        for _ in range(2):
            # Also when the call is repeated.
            assert (await bring(6)).status_code == 200
        assert (await rows(server))[-1] == ("6", None, None)
        if place == MILES:
            update = {"model_path": "/local-nvme/checkpoint", "weight_version": "6"}
            told = await ask(server, "/update_weights_from_disk", update)
            assert (told.status_code, told.json()["weight_version"]) == (200, "6")


async def test_a_delta_whose_index_is_not_there_begins_no_chain(tmp_path: Path) -> None:
    """It is still being written, or has lost it. What is wrong with it is said when it is signalled."""

    async with serve(tmp_path) as server:
        await began(server)
        published(server, MILES, 1, 2)
        for number in (1, 2):
            shard = f"model-{number:05d}-of-00002.safetensors"
            (server.bucket / MILES.format(2) / shard).write_bytes(b"blobs")
        (server.bucket / MILES.format(2) / "model.safetensors.index.json").unlink()
        body = {"source_dir": str(server.bucket / "updates"), "target_version": 2}
        assert (await ask(server, "/pull_weights", body)).status_code == 200
        assert await rows(server) == [
            ("0", None, None), ("1", "0", "miles_delta"), ("2", "1", "miles_delta")
        ]  # fmt: skip


async def test_a_run_may_begin_with_a_whole_checkpoint(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        for index in range(3):
            server.report(index)
        checkpoint(server, MILES.format(1), True)
        body = {"source_dir": str(server.bucket / "updates"), "target_version": 1}
        assert (await ask(server, "/pull_weights", body)).status_code == 200
        assert await rows(server) == [("1", None, None)]


async def test_a_version_that_leads_out_of_the_bucket_is_not_looked_into(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await began(server)
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "config.json").write_text("{}")
        (server.bucket / "updates").mkdir()
        (server.bucket / MILES.format(1)).symlink_to(outside)
        body = {"source_dir": str(server.bucket / "updates"), "target_version": 1}
        answer = await server.http.post("/pull_weights", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "source_dir")
        assert "leads out of the bucket" in answer.json()["message"]


async def test_a_catch_up_over_the_bound_signals_no_version(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await began(server)
        body = {"source_dir": str(server.bucket / "updates"), "target_version": 65}
        answer = await server.http.post("/pull_weights", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "target_version")
        assert "gateway.chain_max" in answer.json()["message"]
        assert [row[0] for row in await rows(server)] == ["0"]


async def test_a_catch_up_that_waits_for_whole_files_may_come_again(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        apis = hotload_apis(server.ledger, server.deployments, chain_max=2, rebase_after=1)
        app = control_app(server.deployments, GatewayMetrics(server.deployments), apis=apis)
        server.http._transport.app = app  # type: ignore[attr-defined]
        await began(server)
        published(server, MILES, 1, 2, 3, 4)
        body = {"source_dir": str(server.bucket / "updates"), "target_version": 1}
        assert (await ask(server, "/pull_weights", body)).status_code == 200
        late = await server.http.post("/pull_weights", json=body | {"target_version": 3})
        assert (late.status_code, late.json()["success"]) == (503, False)
        assert late.json()["error"]["code"] == "rebase_pending"
        assert int(late.headers["retry-after"]) > 0
        # Three would be too many on any full snapshot.
        never = await server.http.post("/pull_weights", json=body | {"target_version": 4})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "target_version")
        assert [row[0] for row in await rows(server)] == ["0", "1"]


async def test_without_a_version_0_the_answer_says_what_to_publish(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        published(server, MILES, 1)
        body = {"source_dir": str(server.bucket / "updates"), "target_version": 1}
        for index in range(3):
            server.report(index)
        answer = await server.http.post("/pull_weights", json=body)
        assert answer.status_code == 400
        assert "midstream publish DIR --identity 0" in answer.json()["message"]
        assert await rows(server) == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pull_weights", {"source_dir": "/elsewhere", "target_version": 1}, "source_dir"),
        ("/pull_weights", {"source_dir": "{bucket}/../x", "target_version": 1}, "source_dir"),
        ("/pull_weights", {"source_dir": "{bucket}/none", "target_version": 1}, "source_dir"),
        ("/pull_weights", {"source_dir": "{bucket}", "target_version": -1}, "target_version"),
        ("/pull_weights", {"source_dir": "{bucket}"}, "target_version"),
        ("/fetch_weights", {"target_version": 1}, "sync_dir"),
        ("/fetch_weights", {"target_version": 1, "sync_dir": "s3://another/run"}, "sync_dir"),
        ("/fetch_weights", {"target_version": 1, "uri": "{bucket}/delta-00000002"}, "uri"),
        ("/fetch_weights", {"target_version": 1, "version": 2, "sync_dir": "{bucket}"}, "version"),
        ("/update_weights", {"update_info": {"target_version": 1}}, "update_info.sync_dir"),
        ("/update_weights", {"update_info": {"target_version": 1, "names": []}}, "update_info.names"),
    ],
)
async def test_a_refusal_names_the_field_and_signals_nothing(
    tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    async with serve(tmp_path) as server:
        await began(server)
        text = {
            name: value.format(bucket=server.bucket) if isinstance(value, str) else value
            for name, value in body.items()
        }
        answer = await server.http.post(path, json=text)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert [row[0] for row in await rows(server)] == ["0"]
