"""The hot-load API on a real ledger and the real control app; replica reports are set by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fingerprints import snapshot_fingerprint
from openapi_answers import Checked
from reports import replica_report

from midstream.api import hotload
from midstream.api.app import control_app
from midstream.api.hotload import hotload_apis
from midstream.client.status import read_status
from midstream.core.errors import SnapshotError
from midstream.core.served_names import ServedNames
from midstream.core.types import Desired, FileContent, SnapshotContent, Stage, SwapTiming, Transition
from midstream.core.wires import HOT_LOAD_PATH
from midstream.fleet.loop import Reconciler
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.ledger import Death, Ledger, sqlite_url
from midstream.proxy.metrics import GatewayMetrics

MODEL = "accounts/local/models/tiny-moe"
DEPLOYMENT = "accounts/local/deployments/default"


class Server:
    """The control app with its client, ledger and replicas, within one event loop."""

    def __init__(self, path: Path, url: str | None = None) -> None:
        self.bucket = path / "bucket"
        for identity in ("a", "b", "x", "run 1/step-1"):
            self.write(identity)
        self.ledger = Ledger(url or sqlite_url(path / "ledger.sqlite"), now=lambda: 1000.0)
        self.replicas = ReplicaSet(
            DeploymentReplicas([(f"replica-{i}", f"http://127.0.0.1:{i + 1}") for i in range(3)])
        )
        self.reconciler = Reconciler(self.ledger, self.replicas, DEPLOYMENT)
        names = ServedNames(MODEL, DEPLOYMENT)
        self.deployments = Deployments(Deployment(names, self.replicas, self.reconciler))
        self.app = control_app(
            self.deployments,
            GatewayMetrics(self.deployments),
            apis=hotload_apis(self.ledger, self.deployments),
        )
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(Checked(self.app)), base_url="http://gateway"
        )

    def write(self, identity: str) -> None:
        (self.bucket / identity).mkdir(parents=True, exist_ok=True)
        (self.bucket / identity / "config.json").write_text("{}")

    def report(self, index: int, admitted: bool = True, **fields: Any) -> None:
        known = {view.name: view for view in (*self.replicas.views, *self.replicas.leaving)}
        view = known[f"replica-{index}"]
        given: dict[str, Any] = {"replica": view.name, "boot": f"boot{index}", "ready": True} | fields
        view.replica.hear(replica_report(**given))
        view.admitted = admitted

    async def signal(self, body: Any, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(HOT_LOAD_PATH, json=body, headers=named)

    async def rows(self) -> list[dict[str, Any]]:
        response = await self.http.get(HOT_LOAD_PATH)
        assert response.status_code == 200
        body = response.json()
        assert list(body) == ["replicas"]
        rows: list[dict[str, Any]] = body["replicas"]
        return rows

    async def desired(self) -> Desired | None:
        return (await self.ledger.state(DEPLOYMENT)).desired


@asynccontextmanager
async def serve(path: Path, url: str | None = None) -> AsyncIterator[Server]:
    """url: of the ledger; None: a file of its own."""

    server = Server(path, url)
    try:
        await server.ledger.ensure_deployment(DEPLOYMENT, MODEL, server.bucket.as_uri(), "ASYNC")
        yield server
    finally:
        await server.http.aclose()
        server.ledger.close()


def failed(identity: str, generation: int, why: str) -> tuple[Transition, ...]:
    moved = Transition(seq=0, at=1.0, snapshot=identity, generation=generation, stage=Stage.ERROR, detail=why)
    return (moved,)


def ready(identity: str, generation: int) -> tuple[Transition, ...]:
    return (Transition(seq=0, at=1.0, snapshot=identity, generation=generation, stage=Stage.IDLE),)


async def while_three_load(server: Server, asking: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """The answer to a call that waits until three replicas serve what it asks for."""
    asked = asyncio.create_task(asking)
    while not asked.done():
        desired = await server.desired()
        for index in range(3 if desired is not None else 0):
            assert desired is not None
            generation, snapshot = desired.generation, desired.snapshot
            moved = ready(snapshot, generation)
            server.report(index, snapshot=snapshot, generation=generation, transitions=moved)
        server.replicas._changed()
    return await asked


def stages(rows: list[dict[str, Any]]) -> list[tuple[str, str, str | None]]:
    return [
        (
            row["midstream"]["replica"],
            row["loading_state"]["stage"],
            row["loading_state"]["target_snapshot_identity"],
        )
        for row in rows
    ]


async def test_the_first_signal_waits_until_it_is_known_which_boots_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that has just begun has heard no replica: the boots that serve would be forgotten, and refused."""

    async with serve(tmp_path) as server:
        waits, wait = asyncio.Event(), server.replicas.wait

        def noted(callback: Callable[[], None], *, any_report: bool = True) -> None:
            waits.set()
            wait(callback, any_report=any_report)

        monkeypatch.setattr(server.replicas, "wait", noted)
        server.replicas.learning = True
        asked = asyncio.create_task(server.signal({"identity": "a"}))
        waiting = asyncio.create_task(waits.wait())
        await asyncio.wait({asked, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for index in range(3):
            server.report(index)
        assert (await asked).status_code == 200
        assert (await server.ledger.state(DEPLOYMENT)).first_boots == {"boot0", "boot1", "boot2"}
        server.replicas.learning = True
        assert (await server.signal({"identity": "b"})).status_code == 200, "only the first one waits"
        await server.ledger.reset_ledger(DEPLOYMENT)
        waits.clear()
        asked = asyncio.create_task(server.signal({"identity": "x"}))
        waiting = asyncio.create_task(waits.wait())
        await asyncio.wait({asked, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert not asked.done(), "after a reset there is a first one again"
        server.replicas.on_learned()
        assert (await asked).status_code == 200


async def test_a_signal_is_in_the_ledger_when_it_is_answered(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        response = await server.signal(
            {"identity": "run 1/step-1", "reset_prompt_cache": "new_session"},
            fireworks_model=MODEL,
            fireworks_deployment=DEPLOYMENT,
            authorization="Bearer x",
        )
        assert response.status_code == 200
        assert response.json() == {
            "identity": "run 1/step-1", "generation": 1, "changed": True, "reset_prompt_cache": "new_session",
            "max_cache_age": None, "kind": "full",
        }  # fmt: skip
        url = f"{server.bucket.as_uri()}/run%201/step-1"
        assert await server.desired() == Desired(
            snapshot="run 1/step-1",
            generation=1,
            signalled=1,
            url=url,
            reset_prompt_cache="new_session",
            transition="ASYNC",
            fingerprint=await snapshot_fingerprint(url),
        )


@pytest.mark.parametrize(
    ("body", "policy"),
    [
        ({}, "all"),
        ({"reset_prompt_cache": None}, "all"),
        ({"reset_prompt_cache": True}, "all"),
        ({"reset_prompt_cache": False}, "none"),
        ({"reset_prompt_cache": "all"}, "all"),
        ({"reset_prompt_cache": "none"}, "none"),
        ({"reset_prompt_cache": "new_session"}, "new_session"),
        ({"validation": {"extra_fields_ignore": []}, "incremental_snapshot_metadata": None}, "all"),
    ],
)
async def test_every_spelling_of_the_cache_policy_is_understood(
    tmp_path: Path, body: dict[str, Any], policy: str
) -> None:
    async with serve(tmp_path) as server:
        assert (await server.signal({"identity": "a", **body})).status_code == 200
        desired = await server.desired()
        assert desired is not None
        assert desired.reset_prompt_cache == policy


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"identity": "a", "colour": 1}, "Extra inputs are not permitted, field: 'colour'", "colour"),
        ({"identity": "a", "validation": {"x": 1}}, "Extra inputs are not permitted, field: 'validation.x'",
         "validation.x"),
        ({}, "Object missing required field `identity`", "identity"),
        ({"identity": 7}, "Expected `str`, got `int` - at `$.identity`", "identity"),
        ({"identity": "a", "reset_prompt_cache": "some"}, "Invalid enum value 'some' - at `$.reset_prompt_cache`",
         "reset_prompt_cache"),
        ({"identity": "a", "reset_prompt_cache": 1}, None, "reset_prompt_cache"),
        ({"identity": "../etc"}, None, "identity"),
        ({"identity": "base"}, "identity 'base' is reserved: it names the weights the server started with",
         "identity"),
        (["a"], "the body must be a JSON object", None),
    ],
)  # fmt: skip
async def test_a_signal_that_is_not_understood_is_refused_whole(
    tmp_path: Path, body: Any, message: str | None, param: str | None
) -> None:
    async with serve(tmp_path) as server:
        response = await server.signal(body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["type"], error["param"]) == (
            "invalid_request_error",
            "invalid_request_error",
            param,
        )
        assert message in (None, error["message"])
        assert await server.desired() is None
        assert await server.ledger.snapshots(DEPLOYMENT) == []


async def test_a_body_that_is_no_json_or_too_large_is_refused(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        for content in (b"", b"{", b"\xff"):
            response = await server.http.post(HOT_LOAD_PATH, content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request_error")
        response = await server.http.post(HOT_LOAD_PATH, content=b" " * (2**20 + 1))
        assert response.status_code == 413


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("fireworks-model", MODEL, 200),
        ("fireworks-model", f"{MODEL}@step-3", 200),
        ("fireworks-model", "tiny-moe", 200),
        ("fireworks-deployment", "default", 200),
        ("fireworks-model", "accounts/local/models/other", 404),
        ("fireworks-deployment", "accounts/other/deployments/default", 404),
        ("x-fireworks-hot-load-source-url", "BUCKET/a/", 200),
        ("x-fireworks-hot-load-source-url", "file:///elsewhere/a", 400),
    ],
)
async def test_headers_must_name_what_is_served_here(
    tmp_path: Path, header: str, value: str, status: int
) -> None:
    async with serve(tmp_path) as server:
        named = value.replace("BUCKET", server.bucket.as_uri())
        response = await server.http.post(HOT_LOAD_PATH, json={"identity": "a"}, headers={header: named})
        assert response.status_code == status
        if status != 200:
            assert response.json()["error"]["param"] == header
        assert (await server.desired() is not None) == (status == 200)
        if header.startswith("fireworks"):
            seen = await server.http.get(HOT_LOAD_PATH, headers={header: value})
            assert seen.status_code == status


async def test_the_same_signal_again_changes_nothing_until_a_replica_fails_on_it(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        answers = [(await server.signal({"identity": "a"})).json() for _ in range(2)]
        assert [(a["generation"], a["changed"]) for a in answers] == [(1, True), (1, False)]
        server.report(0, generation=1, target="a", stage=Stage.ERROR, transitions=failed("a", 1, "short"))
        again = (await server.signal({"identity": "a"})).json()
        assert (again["generation"], again["changed"]) == (2, True)
        row = (await server.rows())[-1]
        assert row["loading_state"]["stage"] == "pending", "the old failure must not answer for the retry"
        assert (await server.signal({"identity": "a"})).json()["changed"] is False


async def test_a_signal_for_files_that_are_not_there_is_refused_and_names_where_they_should_be(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path) as server:
        (server.bucket / "empty").mkdir()
        (server.bucket / "empty" / "optimizer.pt").write_bytes(b"no snapshot")
        for identity in ("absent", "empty"):
            response = await server.signal({"identity": identity})
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (
                400, "invalid_request_error", "identity",
            )  # fmt: skip
            assert error["message"].startswith(f"{server.bucket.as_uri()}/{identity}: ")
            assert error["message"].endswith(
                f"; write the snapshot, then signal it (the server reads {server.bucket.as_uri()})"
            )
        assert await server.desired() is None


async def test_a_bucket_that_cannot_be_read_now_is_a_reason_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(tmp_path) as server:

        async def away(url: str, bucket: str) -> str:
            raise SnapshotError(f"{url}: cannot be listed: input/output error")

        monkeypatch.setattr(hotload, "find_snapshot", away)
        response = await server.signal({"identity": "a"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "input/output error" in response.json()["error"]["message"]
        assert await server.desired() is None


async def test_overwritten_files_are_a_new_signal_and_are_not_served_before_they_are_loaded(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path) as server:
        await server.signal({"identity": "a"})
        for index in range(3):
            server.report(index, snapshot="a", generation=1, transitions=ready("a", 1))
        assert {row["loading_state"]["stage"] for row in await server.rows()} == {"done"}
        server.write("a")
        again = (await server.signal({"identity": "a"})).json()
        assert (again["generation"], again["changed"]) == (2, True)
        assert {row["loading_state"]["stage"] for row in await server.rows()} == {"pending"}
        server.report(0, snapshot="a", generation=2, transitions=ready("a", 2))
        assert stages(await server.rows())[-1] == ("replica-0", "done", "a")


async def test_the_answer_says_which_policy_holds(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:

        async def policy(body: dict[str, Any]) -> tuple[bool, str]:
            answer = (await server.signal({"identity": "a", **body})).json()
            return answer["changed"], answer["reset_prompt_cache"]

        assert await policy({"reset_prompt_cache": "new_session"}) == (True, "new_session")
        assert await policy({"reset_prompt_cache": "all"}) == (False, "new_session")
        server.report(0, generation=1, target="a", stage=Stage.ERROR, transitions=failed("a", 1, "short"))
        assert await policy({"reset_prompt_cache": "none"}) == (True, "new_session")


async def test_a_replica_whose_boots_died_of_a_snapshot_shows_it_as_its_error(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.signal({"identity": "a"})
        server.report(0, boot="boot3")
        for boot in ("boot1", "boot2"):
            assert stages(await server.rows())[-1] == ("replica-0", "pending", "a")
            death = Death("replica-0", "a", 1, "the engine died while loading it")
            await server.ledger.record_death(DEPLOYMENT, boot, death, 0)
        row = (await server.rows())[0]
        assert row["loading_state"] == {"stage": "error", "target_snapshot_identity": "a"}
        assert row["midstream"]["error"] == "the engine died while loading it"
        again = (await server.signal({"identity": "a"})).json()
        assert (again["generation"], again["changed"]) == (2, True)
        assert stages(await server.rows())[-1] == ("replica-0", "pending", "a")


async def test_the_ledger_shows_the_newest_stage_changes_and_says_when_there_are_older_ones(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path) as server:
        await server.signal({"identity": "a"})
        rows = [
            Transition(seq=seq, at=1.0, snapshot="a", generation=1, stage=Stage.FETCHING)
            for seq in range(1001)
        ]
        await server.ledger.record(DEPLOYMENT, "replica-0", "b", rows)

        async def shown(query: str) -> tuple[list[int], bool]:
            body = (await server.http.get(f"/v1/{DEPLOYMENT}/ledger{query}")).json()
            (snapshot,) = body["snapshots"]
            return [moved["seq"] for moved in snapshot["transitions"]], body["older_transitions_left_out"]

        assert await shown("") == (list(range(1, 1001)), True)
        assert await shown("?limit=2") == ([999, 1000], True)
        assert await shown("?limit=1001") == (list(range(1001)), False)
        for bad in ("0", "-1", "x", "", "1e3", "9" * 5000, "0000000001" + "9" * 40, "\u0663"):
            response = await server.http.get(f"/v1/{DEPLOYMENT}/ledger", params={"limit": bad})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")


async def test_a_new_signal_is_above_every_generation_the_replicas_have_seen(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        server.report(1, snapshot="z", generation=17)
        assert (await server.signal({"identity": "a"})).json()["generation"] == 18


async def test_before_the_first_signal_every_replica_is_idle_on_base(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        server.report(0)
        row = (await server.rows())[-1]
        assert row == {
            "current_snapshot_identity": "base",
            "readiness": True,
            "loading_state": {"stage": "idle", "target_snapshot_identity": None},
            "midstream": {
                "replica": "replica-0",
                "boot": "boot0",
                "reachable": True,
                "error": None,
                "generation": 0,
                "last_swap": None,
            },
        }


async def test_the_least_ready_replica_comes_first(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.signal({"identity": "a"})
        timing = SwapTiming(snapshot="a", pause_ms=1.5, streams_crossed=2)
        server.report(0, snapshot="a", generation=1, target="a", swaps=(timing,))
        server.report(1, generation=1, stage=Stage.FETCHING, target="a")
        rows = await server.rows()
        assert stages(rows) == [
            ("replica-2", "pending", "a"),
            ("replica-1", "downloading", "a"),
            ("replica-0", "done", "a"),
        ]
        assert rows[0]["current_snapshot_identity"] is None
        assert [row["readiness"] for row in rows] == [False, True, True]
        assert rows[0]["midstream"]["error"] == "the replica cannot be reached"
        assert rows[2]["midstream"]["last_swap"] == {
            "generation": 0, "snapshot": "a", "fetch_ms": 0.0, "rebuild_ms": 0.0, "verify_ms": 0.0, "stage_ms": 0.0,
            "pause_ms": 1.5, "check_ms": 0.0, "streams_crossed": 2, "same_weights_as": "",
        }  # fmt: skip
        server.report(2, snapshot="a", generation=1, target="a", admitted=False)
        why = failed("a", 1, "model.safetensors: truncated")
        server.report(1, generation=1, stage=Stage.ERROR, target="a", transitions=why)
        rows = await server.rows()
        assert stages(rows) == [
            ("replica-1", "error", "a"),
            ("replica-2", "done", "a"),
            ("replica-0", "done", "a"),
        ]
        assert [row["readiness"] for row in rows] == [True, False, True]
        assert rows[0]["midstream"]["error"] == "model.safetensors: truncated"
        # One that never served has the same error as the reason why it cannot start.
        error = "model.safetensors: truncated"
        server.report(
            1, generation=1, stage=Stage.ERROR, target="a", transitions=why, ready=False, error=error
        )
        assert (await server.rows())[0]["midstream"]["error"] == error


async def test_readiness_is_of_the_snapshot_that_serves_and_the_stage_of_the_desired_one(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path) as server:

        def seen(row: dict[str, Any]) -> tuple[Any, ...]:
            return row["current_snapshot_identity"], row["readiness"], row["loading_state"]["stage"]

        server.report(0)
        server.report(1)
        server.report(2)
        await server.signal({"identity": "a"})
        # No replica has taken up the signal: each goes on to serve what it has.
        assert {seen(row) for row in await server.rows()} == {("base", True, "pending")}
        server.report(0, generation=1, stage=Stage.COMMITTING, target="a")
        server.report(1, snapshot="a", generation=1, stage=Stage.CHECKING, target="a")
        server.report(2, snapshot="a", generation=1, target="a")
        rows = [seen(row) for row in await server.rows()]
        assert rows == [("base", True, "committing"), ("a", False, "checking"), ("a", True, "done")]


async def test_a_replica_that_should_be_there_and_has_no_address_yet_is_waited_for(tmp_path: Path) -> None:
    """Its process is starting, or is started again."""

    async with serve(tmp_path) as server:
        await server.signal({"identity": "a"})
        for index in range(3):
            server.report(index, snapshot="a", generation=1, target="a")
        assert read_status({"replicas": await server.rows()}).serves("a")
        server.deployments.default.wanted = 5
        server.deployments.default.problems["replica-4"] = "no room for it"
        rows = await server.rows()
        assert stages(rows)[:2] == [("replica-3", "pending", "a"), ("replica-4", "pending", "a")]
        assert [row["midstream"]["replica"] for row in rows[2:]] == ["replica-0", "replica-1", "replica-2"]
        assert [row["midstream"]["error"] for row in rows[:2]] == [
            "the replica is starting and has not reported yet",
            "no room for it",
        ]
        assert [row["readiness"] for row in rows] == [False, False, True, True, True]
        assert not read_status({"replicas": rows}).serves("a")


@pytest.mark.parametrize(
    ("stage", "wire"),
    [
        (Stage.FETCHING, "downloading"),
        (Stage.VERIFYING, "verifying"),
        (Stage.STAGING, "staging"),
        (Stage.STAGED, "staged"),
        (Stage.COMMITTING, "committing"),
        (Stage.IDLE, "pending"),
    ],
)
async def test_stages_have_their_wire_names(tmp_path: Path, stage: Stage, wire: str) -> None:
    async with serve(tmp_path) as server:
        await server.signal({"identity": "a"})
        for index in range(3):
            server.report(index, generation=1 if stage != "idle" else 0, stage=stage, target="a")
        assert {row["loading_state"]["stage"] for row in await server.rows()} == {wire}


async def test_a_load_that_waits_says_for_what(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.signal({"identity": "a"})
        for index in range(3):
            server.report(index, generation=1, stage=Stage.STAGING, target="a", error="waits for b")
        rows = await server.rows()
        assert {(row["loading_state"]["stage"], row["midstream"]["error"]) for row in rows} == {
            ("staging", "waits for b")
        }


async def test_a_failure_stays_visible_after_the_replica_fell_back(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.signal({"identity": "a"})
        why = failed("a", 1, "short")
        server.report(0, snapshot="old", generation=1, transitions=why)
        assert stages(await server.rows())[0] == ("replica-0", "error", "a")
        server.report(0, generation=1, target="old", stage=Stage.FETCHING, transitions=why)
        assert stages(await server.rows())[0] == ("replica-0", "error", "a")


async def test_a_failure_of_a_superseded_snapshot_is_not_the_new_ones(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.signal({"identity": "a"})
        await server.signal({"identity": "b"})
        server.report(0, generation=1, stage=Stage.ERROR, target="a", transitions=failed("a", 1, "short"))
        row = next(r for r in await server.rows() if r["midstream"]["replica"] == "replica-0")
        assert row["loading_state"] == {"stage": "pending", "target_snapshot_identity": "b"}


async def test_the_ledger_shows_each_snapshot_with_its_transitions(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.signal({"identity": "a", "reset_prompt_cache": "none"})
        server.report(0, transitions=failed("a", 1, "short"))
        await server.reconciler.reconcile_once()
        body = (await server.http.get(f"/v1/{DEPLOYMENT}/ledger")).json()
        assert body == {
            "desired_snapshot_identity": "a",
            "generation": 1,
            "transfers": [],
            "older_transitions_left_out": False,
            "snapshots": [
                {
                    "identity": "a",
                    "kind": "full",
                    "previous_snapshot_identity": None,
                    "compression_format": None,
                    "checksum_format": None,
                    "chain": [],
                    "url": f"{server.bucket.as_uri()}/a",
                    "reset_prompt_cache": "none",
                    "max_cache_age": None,
                    "extra_fields_ignore": [],
                    "first_signalled_at": 1000.0,
                    "signalled_at": 1000.0,
                    "generation": 1,
                    "fingerprint": await snapshot_fingerprint(f"{server.bucket.as_uri()}/a"),
                    "files": None,
                    "full_url": None,
                    "full_needed": False,
                    "ready_at": None,
                    "replicas": [
                        {
                            "replica": "replica-0",
                            "generation": 1,
                            "ready_at": None,
                            "stage": "error",
                            "at": 1.0,
                            "error": "short",
                        }
                    ],
                    "transitions": [
                        {
                            "replica": "replica-0",
                            "boot": "boot0",
                            "seq": 0,
                            "generation": 1,
                            "stage": "error",
                            "at": 1.0,
                            "error": "short",
                        }
                    ],
                }
            ],
            "disagreements": [],
        }
        await server.reconciler.settle()


async def test_an_unknown_deployment_is_not_found(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        for path in ("local/deployments/other/ledger", "other/deployments/default/ledger"):
            response = await server.http.get(f"/v1/accounts/{path}")
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "not_found_error"
        assert (await server.http.delete(HOT_LOAD_PATH)).status_code == 405


LORA = '{"peft_type": "LORA", "r": 8, "lora_alpha": 16}'


def write_adapter(server: Server, identity: str, config: str = LORA) -> None:
    (server.bucket / identity).mkdir(parents=True)
    (server.bucket / identity / "adapter_config.json").write_text(config)
    (server.bucket / identity / "adapter_model.safetensors").write_bytes(b"weights")


async def test_an_adapter_without_a_policy_is_refused_with_a_hint(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        write_adapter(server, "adapter")
        for before in (None, "a"):
            if before is not None:
                assert (await server.signal({"identity": before})).status_code == 200
                files = (FileContent("config.json", 2, "1" * 64),)
                row = (await server.ledger.snapshots(DEPLOYMENT))[0]
                found = SnapshotContent(snapshot=before, fingerprint=row.fingerprint, files=files)
                await server.ledger.learn_content(DEPLOYMENT, found)
            answer = await server.signal({"identity": "adapter"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "policy"), answer.text
            assert "name the policy" in answer.json()["error"]["message"]
        merged = server.bucket / "merged"
        write_adapter(server, "merged")
        (merged / "adapter_model.safetensors").rename(merged / "model.safetensors")
        assert (await server.signal({"identity": "merged"})).status_code == 200


async def test_an_adapters_configuration_that_no_replica_reads_is_refused_at_the_signal(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path) as server:
        write_adapter(server, "adapter", "x" * (2**20 + 1))
        answer = await server.signal({"identity": "adapter"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "identity"), answer.text
