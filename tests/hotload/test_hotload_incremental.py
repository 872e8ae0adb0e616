"""Incremental snapshots, hints, sources and resets through the hot-load API, on a real ledger and the real control app."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fingerprints import snapshot_fingerprint
from listening import stop_listening
from test_hotload_api import DEPLOYMENT, MODEL, failed, ready, serve

from midstream.api.app import control_app
from midstream.api.hotload import hotload_apis
from midstream.core.types import FileContent, SnapshotFiles, Stage
from midstream.core.wires import HOT_LOAD_PATH
from midstream.ledger import Disagreement
from midstream.proxy.metrics import GatewayMetrics

HINT_PATH = f"{HOT_LOAD_PATH}/hint"
LEDGER_PATH = f"/v1/{DEPLOYMENT}/ledger"
SOURCE = "x-fireworks-hot-load-source-url"


def on(previous: str, **fields: Any) -> dict[str, Any]:
    metadata = {
        "previous_snapshot_identity": previous,
        "compression_format": "arc_v2",
        "checksum_format": "alder32",
    }
    return {"incremental_snapshot_metadata": metadata | fields}


def refusal(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["param"]


async def test_a_delta_is_desired_with_the_chain_it_stands_on(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        assert (await server.signal({"identity": "a"})).json()["kind"] == "full"
        answer = (
            await server.signal({"identity": "b", "reset_prompt_cache": {"max_age": 2}, **on("a")})
        ).json()
        assert answer == {
            "identity": "b", "generation": 2, "changed": True, "reset_prompt_cache": "none", "max_cache_age": 2,
            "kind": "delta",
        }  # fmt: skip
        again = (
            await server.signal({"identity": "b", "reset_prompt_cache": {"max_age": 2}, **on("a")})
        ).json()
        assert again == answer | {"changed": False}
        desired = await server.desired()
        assert desired is not None
        url = f"{server.bucket.as_uri()}/a"
        parent = SnapshotFiles(snapshot="a", url=url, fingerprint=await snapshot_fingerprint(url))
        assert (desired.parents, desired.compression, desired.max_cache_age) == ((parent,), "arc_v2", 2)
        row = (await server.http.get(LEDGER_PATH)).json()["snapshots"][1]
        assert {key: row[key] for key in ("kind", "previous_snapshot_identity", "compression_format", "chain")} == {
            "kind": "delta", "previous_snapshot_identity": "a", "compression_format": "arc_v2", "chain": ["a"],
        }  # fmt: skip
        assert (row["checksum_format"], row["max_cache_age"]) == ("adler32", 2)


async def test_the_chain_rules_are_applied_to_what_the_replicas_report(tmp_path: Path) -> None:
    previous = "incremental_snapshot_metadata.previous_snapshot_identity"

    async with serve(tmp_path) as server:
        assert refusal(await server.signal({"identity": "b", **on("a")})) == (400, previous)
        await server.signal({"identity": "a"})
        for i in range(3):
            server.report(i, snapshot="a", transitions=ready("a", 1), generation=1)
        await server.signal({"identity": "b", **on("a")})
        server.report(0, snapshot="a", generation=2, transitions=ready("a", 1) + failed("b", 2, "checksum"))
        response = await server.signal({"identity": "x", **on("b")})
        assert refusal(response) == (400, previous)
        assert "every ready replica serves 'a'" in response.json()["error"]["message"]
        assert (await server.desired()).snapshot == "b"  # type: ignore[union-attr]
        server.report(1, snapshot="base", ready=False)
        assert (await server.signal({"identity": "x", **on("a")})).status_code == 200
        assert refusal(await server.signal({"identity": "a", **on("x")})) == (400, previous)


async def test_the_limit_of_a_chain_is_a_setting(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        apis = hotload_apis(server.ledger, server.deployments, chain_max=1)
        app = control_app(server.deployments, GatewayMetrics(server.deployments), apis=apis)
        server.http._transport.app = app  # type: ignore[attr-defined]
        await server.signal({"identity": "a"})
        await server.signal({"identity": "b", **on("a")})
        response = await server.signal({"identity": "x", **on("b")})
        assert response.status_code == 400
        assert "at most 1 are allowed; publish a full snapshot" in response.json()["error"]["message"]


async def test_a_signal_on_a_full_chain_may_come_again_once_whole_files_are_there(tmp_path: Path) -> None:
    """The trainer was faster than its replicas. Nothing of the signal is wrong, so a client that heeds statuses repeats it."""

    async with serve(tmp_path) as server:
        apis = hotload_apis(server.ledger, server.deployments, chain_max=1, rebase_after=1)
        app = control_app(server.deployments, GatewayMetrics(server.deployments), apis=apis)
        server.http._transport.app = app  # type: ignore[attr-defined]
        await server.signal({"identity": "a"})
        await server.signal({"identity": "b", **on("a")})
        response = await server.signal({"identity": "x", **on("b")})
        assert refusal(response) == (503, "incremental_snapshot_metadata.previous_snapshot_identity")
        assert response.json()["error"]["code"] == "rebase_pending"
        assert int(response.headers["retry-after"]) > 0
        [wanted] = await server.ledger.unkept_updates()
        content = (FileContent("config.json", 2, "0" * 64),)
        await server.ledger.settle_rebase(replace(wanted, content=content), "kept", 0.0, 1, "")
        assert (await server.signal({"identity": "x", **on("b")})).status_code == 200
        desired = await server.desired()
        assert desired is not None
        assert [link.url.rpartition("/")[2] for link in desired.files] == ["b.full", "x"]


async def test_fields_to_ignore_reach_the_replicas(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.signal({"identity": "a", "validation": {"extra_fields_ignore": ["rope_scaling", "x"]}})
        desired = await server.desired()
        assert desired is not None
        assert desired.ignore_config == ("rope_scaling", "x")
        row = (await server.http.get(LEDGER_PATH)).json()["snapshots"][0]
        assert row["extra_fields_ignore"] == ["rope_scaling", "x"]


async def test_a_source_url_is_taken_inside_the_allowed_buckets_only(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        elsewhere = tmp_path / "else where"
        (elsewhere / "job 1" / "s").mkdir(parents=True)
        (elsewhere / "job 1" / "s" / "config.json").write_text("{}")
        source = (elsewhere / "job 1" / "s").as_uri() + "/"
        response = await server.http.post(HOT_LOAD_PATH, json={"identity": "mine"}, headers={SOURCE: source})
        assert refusal(response) == (400, SOURCE)
        assert server.bucket.as_uri() in response.json()["error"]["message"]
        apis = hotload_apis(server.ledger, server.deployments, allowed_buckets=[elsewhere.as_uri()])
        app = control_app(server.deployments, GatewayMetrics(server.deployments), apis=apis)
        server.http._transport.app = app  # type: ignore[attr-defined]
        response = await server.http.post(HOT_LOAD_PATH, json={"identity": "mine"}, headers={SOURCE: source})
        assert response.status_code == 200
        desired = await server.desired()
        assert desired is not None
        assert (desired.snapshot, desired.url) == ("mine", source.rstrip("/"))
        up = f"{elsewhere.as_uri()}/..%2f..%2fetc"
        response = await server.http.post(HOT_LOAD_PATH, json={"identity": "mine"}, headers={SOURCE: up})
        assert refusal(response) == (400, SOURCE)


class FakeReplica:
    """A listening port that takes note of hints."""

    def __init__(self, status: str = "202 Accepted") -> None:
        self.status, self.heard = status, []  # type: ignore[var-annotated]

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split()[0])
        self.heard.append((head.split("\r\n")[0], json.loads(await reader.readexactly(length))))
        writer.write(f"HTTP/1.1 {self.status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()


async def test_a_hint_reaches_every_replica_and_changes_nothing_that_is_desired(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        replicas = [FakeReplica(), FakeReplica("503 Busy")]
        members = [(f"r{i}", await replica.start()) for i, replica in enumerate(replicas)]
        server.replicas.facts.set_members([*members, ("gone", "http://127.0.0.1:9")])
        body = {"identity": "a", "files": ["config.json"], **on("p")}
        for _ in range(2):
            response = await server.http.post(HINT_PATH, json=body, headers={"fireworks-model": MODEL})
            assert response.status_code == 202
            assert response.json() == {"identity": "a", "files": ["config.json"], "replicas": ["r0"]}
        hint = {"snapshot": "a", "url": f"{server.bucket.as_uri()}/a", "files": ["config.json"]}
        for replica in replicas:
            assert replica.heard == [("post /replica/hint http/1.1", hint)] * 2
            stop_listening(replica.server)
        assert await server.desired() is None
        assert await server.ledger.snapshots(DEPLOYMENT) == []


@pytest.mark.parametrize(
    ("body", "headers", "status", "param", "words"),
    [
        ({"identity": "a", "files": ["config.json", "model.safetensors"]}, {}, 400, "files", "model.safetensors"),
        ({"identity": "new", "file": "config.json"}, {}, 400, "files", "config.json"),
        ({"identity": "a", "file": "../config.json"}, {}, 400, "file", "not a file of a snapshot"),
        ({"identity": "a", "file": "config.json", "colour": 1}, {}, 400, "colour", "Extra inputs"),
        ({"identity": "..", "file": "config.json"}, {}, 400, "identity", "identity"),
        ({"identity": "a", "file": "config.json"}, {"fireworks-model": "other"}, 404, "fireworks-model", "other"),
    ],
)  # fmt: skip
async def test_a_hint_that_cannot_be_followed_is_refused(
    tmp_path: Path, body: Any, headers: dict[str, str], status: int, param: str, words: str
) -> None:
    async with serve(tmp_path) as server:
        response = await server.http.post(HINT_PATH, json=body, headers=headers)
        assert refusal(response) == (status, param)
        assert words in response.json()["error"]["message"]


async def test_a_reset_forgets_everything_and_the_next_signal_must_be_full(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        assert (await server.http.delete(LEDGER_PATH)).json() == {
            "desired_snapshot_identity": "base",
            "generation": 0,
        }
        await server.signal({"identity": "a"})
        server.report(0, snapshot="a", generation=5, transitions=ready("a", 1))
        await server.reconciler.reconcile_once()
        for _ in range(2):
            response = await server.http.delete(LEDGER_PATH)
            assert response.status_code == 200
            assert response.json() == {"desired_snapshot_identity": "base", "generation": 6}
        body = (await server.http.get(LEDGER_PATH)).json()
        assert (body["desired_snapshot_identity"], body["generation"], body["snapshots"]) == ("base", 6, [])
        rows = await server.rows()
        row = next(row for row in rows if row["midstream"]["replica"] == "replica-0")
        assert row["loading_state"] == {"stage": "pending", "target_snapshot_identity": "base"}
        response = await server.signal({"identity": "b", **on("a")})
        assert "the first snapshot must be full" in response.json()["error"]["message"]
        assert (await server.signal({"identity": "a"})).json()["generation"] == 7
        assert (await server.http.delete(f"/v1/{DEPLOYMENT}x/ledger")).status_code == 404
        await server.reconciler.settle()


async def test_who_names_the_desired_snapshot_is_ready_only_when_that_is_proved(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.signal({"identity": "a"})
        server.report(0, snapshot="a", generation=1, stage=Stage.CHECKING, target="a")
        server.report(1, snapshot="a", generation=1, transitions=ready("a", 1))
        server.report(2, snapshot="base")
        rows = {row["midstream"]["replica"]: row for row in await server.rows()}
        assert rows["replica-0"]["loading_state"]["stage"] == "checking"
        assert [rows[f"replica-{i}"]["readiness"] for i in range(3)] == [False, True, True]
        server.write("a")
        (server.bucket / "a" / "tokenizer.json").write_text("{}")
        await server.signal({"identity": "a"})
        assert not [
            row for row in await server.rows() if row["current_snapshot_identity"] == "a" and row["readiness"]
        ]


async def test_a_replica_that_is_out_shows_why(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.signal({"identity": "a"})
        for i in range(3):
            server.report(i, snapshot="a", generation=2, transitions=ready("a", 1))
        found = await server.ledger.disagree(
            DEPLOYMENT, Disagreement("replica-1", "boot1", "a", 1, 0, "it differs")
        )
        out = replace(found, verdict="out", detail="it differs still")
        await server.ledger.settle_disagreement(DEPLOYMENT, out)
        await server.reconciler.reconcile_once()
        first = (await server.rows())[0]
        assert (first["midstream"]["replica"], first["readiness"]) == ("replica-1", False)
        assert first["loading_state"] == {"stage": "error", "target_snapshot_identity": "a"}
        assert first["midstream"]["error"] == "it differs still"
        (shown,) = (await server.http.get(LEDGER_PATH)).json()["disagreements"]
        assert (shown["replica"], shown["verdict"], shown["error"]) == (
            "replica-1",
            "out",
            "it differs still",
        )
        await server.reconciler.settle()
