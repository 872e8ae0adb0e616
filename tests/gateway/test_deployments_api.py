"""The Deployments API over a real ledger, with a supervisor that does as it is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from gateway_harness import reconciler
from openapi_answers import Checked
from reports import replica_report

from midstream.api.app import control_app
from midstream.api.deployments import DeploymentsApi, lies_in
from midstream.api.hotload import hotload_apis
from midstream.core.served_names import ServedNames
from midstream.core.wires import HOT_LOAD_PATH
from midstream.fleet.desired_state import DesiredState, Running, RunningReplica, Wanted, replica_count
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.ledger import DeploymentRow, Ledger, sqlite_url
from midstream.proxy.metrics import GatewayMetrics

A = "accounts/local"
MODEL, OTHER = f"{A}/models/tiny-moe", f"{A}/models/other"
DEFAULT = f"{A}/deployments/default"
COLLECTION = f"/v1/{A}/deployments"


def run_time(row: DeploymentRow) -> Deployment:
    replicas = ReplicaSet(DeploymentReplicas())
    names = ServedNames(row.model, row.name)
    return Deployment(names, replicas, reconciler(replicas), wanted=replica_count(row))


class Server:
    """One gateway's control side; `told` is what the supervisor was told last."""

    def __init__(self, path: Path, ledger: Ledger, row: DeploymentRow) -> None:
        self.bucket = path / "bucket"
        self.ledger = ledger
        self.told = Wanted()
        self.failing: dict[str, str] = {}
        self.deployments = Deployments(run_time(row), ("other",))
        self.now = 0.0
        self.desired_state = DesiredState(
            ledger, self.deployments, run_time, self._tell, monotonic=lambda: self.now
        )
        apis = [
            DeploymentsApi(
                ledger,
                self.deployments,
                bucket=self.bucket.as_uri(),
                allowed_buckets=("s3://allowed/here",),
                changed=self.desired_state.look_once,
            ),
            *hotload_apis(ledger, self.deployments),
        ]
        app = control_app(self.deployments, GatewayMetrics(self.deployments), apis=apis)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(Checked(app)), base_url="http://gateway")

    def _tell(self, wanted: Wanted) -> None:
        self.told = wanted

    @property
    def names(self) -> list[str]:
        return [replica.name for replica in self.told.replicas]

    async def supervise(self) -> None:
        """Every replica wanted runs and is ready, unless it fails."""
        for _ in range(2):
            running = [
                RunningReplica(
                    name=r.name,
                    deployment=r.deployment,
                    url=None if r.name in self.failing else f"http://{r.name}",
                    error=self.failing.get(r.name),
                )
                for r in self.told.replicas
            ]
            self.desired_state.running(Running(tuple(running)))
            await self.desired_state.look_once()
        for deployment in self.deployments:
            for view in deployment.replicas.views:
                view.replica.hear(view.replica.heard or replica_report(view.name))
                view.admitted = True

    async def create(self, name: str, **body: Any) -> httpx.Response:
        return await self.http.post(
            COLLECTION, params={"deploymentId": name}, json={"baseModel": "other"} | body
        )

    async def got(self, name: str) -> dict[str, Any]:
        answer = await self.http.get(f"{COLLECTION}/{name}")
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    async def patch(self, name: str, mask: str | None = None, **body: Any) -> httpx.Response:
        return await self.http.patch(
            f"{COLLECTION}/{name}", params={} if mask is None else {"updateMask": mask}, json=body
        )


@asynccontextmanager
async def serve(
    path: Path,
) -> AsyncIterator[Server]:
    ledger = Ledger(sqlite_url(path / "ledger.sqlite"), now=lambda: 1000.0)
    row = await ledger.ensure_deployment(DEFAULT, MODEL, (path / "bucket").as_uri(), "ASYNC", 2)
    server = Server(path, ledger, row)
    await server.desired_state.look_once()
    await server.supervise()
    async with server.http:
        yield server
    ledger.close()


async def test_a_deployment_is_created_served_scaled_and_deleted(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        made = await server.create(
            "b", minReplicaCount=2, maxReplicaCount=4, displayName="B", acceleratorType="X"
        )
        assert made.status_code == 200
        assert (made.json()["state"], made.json()["name"]) == ("CREATING", f"{A}/deployments/b")
        assert server.names == ["replica-0", "replica-1", "b-replica-0", "b-replica-1"]
        assert {r.model for r in server.told.replicas if r.name.startswith("b-")} == {OTHER}
        assert (server.bucket / "b").is_dir()
        await server.supervise()
        assert await server.got("b") == {
            "name": f"{A}/deployments/b",
            "baseModel": OTHER,
            "displayName": "B",
            "description": "",
            "acceleratorType": "X",
            "state": "READY",
            "status": {"code": "OK", "message": ""},
            "enableHotLoad": True,
            "hotLoadBucketType": "FW_HOSTED",
            "hotLoadBucketUrl": f"{server.bucket.as_uri()}/b",
            "hotLoadTransitionType": "ASYNC",
            "minReplicaCount": 2,
            "maxReplicaCount": 4,
            "desiredReplicaCount": 2,
            "replicaCount": 2,
            "replicaStats": {
                "pendingSchedulingReplicaCount": 0,
                "downloadingModelReplicaCount": 0,
                "initializingReplicaCount": 0,
                "readyReplicaCount": 2,
            },
            "createTime": "1970-01-01T00:16:40.000Z",
            "updateTime": "1970-01-01T00:16:40.000Z",
        }
        scaled = await server.patch("b", "min_replica_count", minReplicaCount=3)
        assert (scaled.json()["state"], scaled.json()["desiredReplicaCount"]) == ("UPDATING", 3)
        await server.supervise()
        assert (await server.got("b"))["replicaStats"]["readyReplicaCount"] == 3
        assert (await server.http.delete(f"{COLLECTION}/b")).json() == {}
        assert (await server.got("b"))["state"] == "DELETING"
        assert (await server.create("b")).status_code == 409, "until it is gone"
        await server.supervise()
        assert (await server.http.get(f"{COLLECTION}/b")).status_code == 404
        assert server.names == ["replica-0", "replica-1"]
        assert (await server.create("b")).status_code == 200, "its name is free again"


@pytest.mark.parametrize("hard", [False, True])
async def test_a_deployment_with_requests_goes_when_they_have_ended_or_at_once(
    tmp_path: Path, hard: bool
) -> None:
    async with serve(tmp_path) as server:
        await server.create("b")
        await server.supervise()
        found = server.deployments.known(f"{A}/deployments/b")
        assert found is not None
        [view] = found.replicas.views
        view.replica.in_flight = 1
        options = {"hard": "true"} if hard else {}
        assert (await server.http.delete(f"{COLLECTION}/b", params=options)).json() == {}
        assert ("b-replica-0" in server.names) is not hard
        view.replica.in_flight = 0
        await server.supervise()
        assert (await server.http.get(f"{COLLECTION}/b")).status_code == 404


async def test_what_cannot_be_is_refused_by_the_fields_name(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"baseModel": "nobody"}, "baseModel"),
        ({"baseModel": None}, "baseModel"),
        ({"minReplicaCount": -1}, "minReplicaCount"),
        ({"minReplicaCount": "two"}, "minReplicaCount"),
        ({"minReplicaCount": 3, "maxReplicaCount": 2}, "minReplicaCount"),
        ({"maxReplicaCount": 10**6}, "maxReplicaCount"),
        ({"hotLoadTransitionType": "LATER"}, "hotLoadTransitionType"),
        ({"hotLoadBucketType": "FLOPPY"}, "hotLoadBucketType"),
        ({"hotLoadBucketType": "S3"}, "hotLoadBucketUrl"),
        ({"hotLoadBucketUrl": "file:///etc"}, "hotLoadBucketUrl"),
        ({"hotLoadBucketUrl": "s3://allowed/hereafter"}, "hotLoadBucketUrl"),
        ({"hotLoadBucketUrl": "s3://user:secret@allowed/here"}, "hotLoadBucketUrl"),
        ({"enableHotLoad": "yes"}, "enableHotLoad"),
        ({"unknownFields": "MAYBE"}, "unknownFields"),
        ({"displayName": "x" * 64}, "displayName"),
        ({"colour": "red"}, "colour"),
        ({"directRouteApiKeys": ["k"]}, "directRouteApiKeys"),
    ]

    async with serve(tmp_path) as server:
        for body, field in cases:
            answer = await server.create("b", **body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field), body
            assert field in error["message"]
            assert "secret" not in answer.text
        unknown = (await server.create("b", colour="red")).json()["error"]["message"]
        assert unknown == "Extra inputs are not permitted, field: 'colour'"
        known = (await server.create("b", baseModel="nobody")).json()["error"]["message"]
        assert f"known are {OTHER}, {MODEL}" in known
        for name in ("", "../x", "a/b", "x" * 64, "-a"):
            answer = await server.create(name) if name else await server.create(" ")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "deploymentId"), name
        assert (await server.create("default")).status_code == 409
        other = await server.http.post("/v1/accounts/other/deployments", json={"baseModel": "other"})
        assert other.status_code == 404
        for body in (b'{"displayName":' + b"[" * 200_000, b'{"displayName":"\xff"}', b"[]"):
            said = await server.http.post(COLLECTION, params={"deploymentId": "b"}, content=body)
            assert (said.status_code, said.json()["error"]["message"][:8]) == (400, "the body")
            said = await server.http.post(f"{COLLECTION}/default:scale", content=body)
            assert (said.status_code, said.json()["error"]["message"][:8]) == (400, "the body")
        assert (await server.http.get(f"{COLLECTION}/a%00b")).status_code == 404
        assert [d.name for d in server.deployments] == [DEFAULT]


async def test_a_deployment_says_what_becomes_of_unknown_fields(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        answer = await server.create("b", unknownFields="IGNORE")
        assert (answer.status_code, answer.json()["unknownFields"]) == (200, "IGNORE")
        assert server.deployments.get(answer.json()["name"]).ignores_fields is True
        for given, expected in (("REFUSE", False), (None, None)):
            params = {"updateMask": "unknownFields"}
            said = await server.http.patch(f"{COLLECTION}/b", params=params, json={"unknownFields": given})
            assert said.status_code == 200
            assert server.deployments.get(answer.json()["name"]).ignores_fields is expected


async def test_what_the_real_client_sends_is_taken_and_given_back(tmp_path: Path) -> None:
    given = {
        "baseModel": OTHER,
        "description": "Fireworks training deployment",
        "minReplicaCount": 0,
        "maxReplicaCount": 1,
        "enableHotLoad": True,
        "forTraining": True,
        "hotLoadBucketType": "FW_HOSTED",
        "acceleratorType": "NVIDIA_H200_141GB",
        "placement": {"region": "US"},
        "hotLoadTrainerJob": "accounts/local/rlorTrainerJobs/t",
        "extraArgs": ["--x"],
        "extraValues": {"a": "b"},
        "annotations": {"c": "d"},
        "hotLoadTransitionType": "HOT_LOAD_TRANSITION_TYPE_UNSPECIFIED",
    }

    async with serve(tmp_path) as server:
        dry = await server.http.post(
            COLLECTION, params={"deploymentId": "b", "validateOnly": "true"}, json=given
        )
        assert (dry.status_code, dry.json()["state"]) == (200, "CREATING")
        assert (await server.http.get(f"{COLLECTION}/b")).status_code == 404
        query = {"deploymentId": "b", "skipShapeValidation": "true", "acceptShapelessRisk": "true"}
        assert (await server.http.post(COLLECTION, params=query, json=given)).status_code == 200
        await server.supervise()
        got = await server.got("b")
        shown = {name: got[name] for name in given}
        assert shown == given | {"hotLoadTransitionType": "ASYNC"}
        assert (got["desiredReplicaCount"], got["state"]) == (1, "READY"), (
            "one that may have a replica has one"
        )
        back = await server.http.patch(f"{COLLECTION}/b", json=got)
        assert back.status_code == 200, "what was got can be sent back"
        assert back.json() == got
        unnamed = await server.http.post(COLLECTION, json={"baseModel": "other"})
        assert unnamed.json()["name"].startswith(f"{A}/deployments/d-")


@pytest.mark.parametrize(
    "mask", ["hot_load_transition_type,hot_load_trainer_job", "hotLoadTransitionType,hotLoadTrainerJob"]
)
async def test_a_patch_changes_the_masked_fields_alone(tmp_path: Path, mask: str) -> None:
    async with serve(tmp_path) as server:
        await server.create("b", description="kept", hotLoadTrainerJob="t1", minReplicaCount=1)
        await server.supervise()
        before = await server.got("b")
        change = {"hotLoadTransitionType": "SYNC", "hotLoadTrainerJob": "t2", "description": "not masked"}
        answer = await server.patch("b", mask, minReplicaCount=9, **change)
        assert answer.status_code == 200
        assert answer.json() == before | {"hotLoadTransitionType": "SYNC", "hotLoadTrainerJob": "t2"}
        gone = await server.patch("b", "hotLoadTrainerJob,description")
        assert "hotLoadTrainerJob" not in gone.json(), (
            "a masked field that is not given goes back to its default"
        )
        assert gone.json()["description"] == ""
        for bad in ("state", "colour", "hot_load"):
            refused = await server.patch("b", bad)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "updateMask")
        refused = await server.patch("b", baseModel="tiny-moe")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "baseModel")
        assert (await server.patch("b", baseModel=OTHER, description="d")).json()["description"] == "d"
        assert (await server.patch("nobody", description="d")).status_code == 404


async def test_replica_counts_follow_each_other_and_none_means_none(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:

        async def counts(**body: Any) -> tuple[int, int, int]:
            got = (await server.patch("default", **body)).json()
            return got["minReplicaCount"], got["maxReplicaCount"], got["desiredReplicaCount"]

        assert await counts(minReplicaCount=3) == (3, 3, 3)
        assert await counts(maxReplicaCount=1) == (1, 1, 1)
        assert await counts(minReplicaCount=0) == (0, 1, 1)
        assert await counts(minReplicaCount=0, maxReplicaCount=0) == (0, 0, 0)
        await server.supervise()
        got = await server.got("default")
        assert (got["state"], got["status"]["message"]) == ("READY", "it has no replicas: none are asked for")
        assert (await server.http.patch(f"{COLLECTION}/default:scale", json={"replicaCount": 2})).json() == {}
        assert (await server.got("default"))["desiredReplicaCount"] == 2
        bad = await server.http.patch(f"{COLLECTION}/default:scale", json={"replicas": 2})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "replicaCount")


async def test_a_list_comes_in_pages(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        for name in ("c", "a", "b"):
            await server.create(name)
        names, token, pages = [], "", 0
        while True:
            query = {"pageSize": "3", "pageToken": token, "filter": "x", "orderBy": "name"}
            page = (await server.http.get(COLLECTION, params=query)).json()
            names += [d["name"].rpartition("/")[2] for d in page["deployments"]]
            token, pages = page["nextPageToken"], pages + 1
            assert page["totalSize"] == 4
            if not token:
                break
        assert (names, pages) == (["a", "b", "c", "default"], 2)
        assert (await server.http.get(COLLECTION, params={"pageSize": "x"})).status_code == 400


async def test_a_replica_that_cannot_be_started_fails_its_own_deployment_alone(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        server.failing["b-replica-0"] = "b-replica-0: model.safetensors is truncated"
        await server.create("b")
        await server.supervise()
        got = await server.got("b")
        assert (got["state"], got["status"]["code"]) == ("FAILED", "INTERNAL")
        assert got["status"]["message"] == "b-replica-0: model.safetensors is truncated"
        assert (await server.got("default"))["state"] == "READY"
        health = (await server.http.get("/health")).json()
        assert [(d["wanted"], d["usable"], d["failed"]) for d in health["deployments"]] == [
            (2, 2, []),
            (1, 0, ["b-replica-0"]),
        ]
        server.failing.clear()
        await server.supervise()
        assert (await server.got("b"))["state"] == "READY"


async def test_a_replica_that_was_there_and_cannot_be_started_again_says_why_everywhere(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path) as server:
        await server.create("b")
        await server.supervise()
        (view,) = next(d for d in server.deployments if d.name.endswith("/b")).replicas.views
        view.report, view.admitted = None, False
        lost = RunningReplica(
            name=view.name, deployment=f"{A}/deployments/b", url=view.url, error="no memory"
        )
        server.desired_state.running(Running((lost,)))
        await server.desired_state.look_once()
        got = await server.got("b")
        assert (got["state"], got["status"]["message"]) == ("FAILED", "b-replica-0: no memory")
        (row,) = (await server.http.get(HOT_LOAD_PATH, headers={"fireworks-deployment": "b"})).json()[
            "replicas"
        ]
        assert row["midstream"]["error"] == "the replica cannot be reached: no memory"
        server.desired_state.running(Running((msgspec.structs.replace(lost, error=None),)))
        await server.desired_state.look_once()
        down = "the engine cannot be started again: no device"
        view.replica.hear(replica_report(replica=view.name, boot="c", ready=False, error=down))
        got = await server.got("b")
        assert (got["state"], got["status"]["message"]) == ("FAILED", f"b-replica-0: {down}")
        (row,) = (await server.http.get(HOT_LOAD_PATH, headers={"fireworks-deployment": "b"})).json()[
            "replicas"
        ]
        assert (row["readiness"], row["midstream"]["error"]) == (False, down)
        health = (await server.http.get("/health")).json()
        assert health["deployments"][1]["failed"] == ["b-replica-0"]
        view.replica.hear(replica_report(replica=view.name, boot="c", ready=True))
        view.admitted = True
        assert (await server.got("b"))["state"] == "READY"


async def test_the_deployment_of_the_command_line_cannot_be_deleted(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        answer = await server.http.delete(f"{COLLECTION}/default")
        assert (answer.status_code, "scale it to 0" in answer.text) == (400, True)
        assert (await server.http.delete(f"{COLLECTION}/nobody")).status_code == 404
        assert (await server.http.post(f"{COLLECTION}/default:undelete")).status_code == 400


async def test_each_deployment_has_its_own_snapshots_and_one_may_refuse_them(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.create("b")
        await server.create("c", enableHotLoad=False)
        for name in ("", "b/", "c/"):
            directory = server.bucket / f"{name}step-1"
            directory.mkdir(parents=True)
            (directory / "config.json").write_text("{}")

        async def signal(**headers: str) -> httpx.Response:
            named = {"fireworks-deployment": f"{A}/deployments/{headers['to']}"} if headers else {}
            return await server.http.post(HOT_LOAD_PATH, json={"identity": "step-1"}, headers=named)

        assert (await signal(to="b")).status_code == 200
        assert (await server.ledger.state(f"{A}/deployments/b")).desired is not None
        assert (await server.ledger.state(DEFAULT)).desired is None
        refused = await signal(to="c")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "enableHotLoad")
        assert (await signal(to="nobody")).status_code == 404
        assert (await signal()).status_code == 200
        desired = (await server.ledger.state(DEFAULT)).desired
        assert desired is not None
        assert desired.url == f"{server.bucket.as_uri()}/step-1"


async def test_models_that_can_be_deployed_are_listed(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.create("b")
        listed = (await server.http.get(f"/v1/{A}/models")).json()["models"]
        assert [model["name"] for model in listed] == [OTHER, MODEL]
        assert (await server.http.get(f"/v1/{OTHER}")).json() == listed[0]
        assert (await server.http.get(f"/v1/{A}/models/nobody")).status_code == 404


@pytest.mark.parametrize(
    ("url", "bucket", "inside"),
    [
        ("file:///b/x", "file:///b", True),
        ("file:///b", "file:///b/", True),
        ("file:///bc", "file:///b", False),
        ("file:///", "file:///b", False),
        ("s3://bkt/p/x", "s3://bkt/p", True),
        ("s3://bkt/p%2Fx", "s3://bkt/p", True),
        ("s3://bkt/px", "s3://bkt/p", False),
        ("s3://other/p/x", "s3://bkt/p", False),
        ("gs://bkt/p/x", "s3://bkt/p", False),
        ("s3://bkt/anything", "s3://bkt", True),
    ],
)
def test_a_place_lies_in_a_bucket_or_not(url: str, bucket: str, inside: bool) -> None:
    assert lies_in(url, bucket) is inside


async def test_a_name_that_is_taken_is_refused_by_its_parameter_and_leaves_no_directory(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path) as server:
        for name in ("b", "default"):
            await server.create("b")
            place = f"{server.bucket.as_uri()}/new"
            answer = await server.create(name, hotLoadBucketUrl=place)
            assert (answer.status_code, answer.json()["error"]["param"]) == (409, "deploymentId")
            assert not (server.bucket / "new").exists()


async def test_a_field_that_a_later_version_stored_hides_no_deployment(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        await server.ledger.update_deployment(DEFAULT, fields={"ofALaterVersion": 1, "region": "here"})
        got = await server.got("default")
        assert got["region"] == "here"
        assert "ofALaterVersion" not in got
        listed = (await server.http.get(COLLECTION)).json()["deployments"]
        assert [one["name"] for one in listed] == [DEFAULT]


@pytest.mark.parametrize("turned", [False, True])
async def test_two_calls_that_scale_at_once_count_both(tmp_path: Path, turned: bool) -> None:
    async with serve(tmp_path) as server:
        assert (await server.create("wide", minReplicaCount=1)).status_code == 200
        calls = [
            server.http.patch(f"{COLLECTION}/wide:scale", json={"replicaCount": 2}),
            server.patch("wide", maxReplicaCount=5),
        ]
        answers = await asyncio.gather(*(reversed(calls) if turned else calls))
        assert [answer.status_code for answer in answers] == [200, 200]
        shown = await server.got("wide")
        assert (shown["minReplicaCount"], shown["maxReplicaCount"]) == (2, 5)
