"""The client library against the real control app: both sides must agree on the wire."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from reports import replica_report

from midstream.api.app import control_app
from midstream.api.hotload import hotload_apis
from midstream.client import SnapshotFailed, SnapshotPublisher
from midstream.client.errors import SignalRefused
from midstream.client.status import Status
from midstream.core.served_names import ServedNames
from midstream.core.types import Stage, Transition
from midstream.fleet.loop import Reconciler
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.ledger import Ledger, sqlite_url
from midstream.proxy.metrics import GatewayMetrics
from midstream.snapshots.identity import file_url_path

MODEL = "accounts/local/models/tiny-moe"
DEPLOYMENT = "accounts/local/deployments/default"


class InLoop(httpx.BaseTransport):
    """Requests of a synchronous client to an ASGI app, answered in `runner`'s loop."""

    def __init__(self, runner: asyncio.Runner, app: object) -> None:
        self._runner = runner
        self._app = httpx.ASGITransport(app)  # type: ignore[arg-type]

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def answer() -> httpx.Response:
            headers, content = request.headers, request.content
            sent = httpx.Request(request.method, request.url, headers=headers, content=content)
            response = await self._app.handle_async_request(sent)
            body = b"".join([part async for part in response.stream])  # type: ignore[union-attr]
            return httpx.Response(response.status_code, headers=response.headers, content=body)

        return self._runner.run(answer())


def test_a_published_snapshot_is_loaded_reported_and_a_failure_reaches_the_trainer(tmp_path: Path) -> None:
    bucket = tmp_path / "buck et"
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    replicas = ReplicaSet(
        DeploymentReplicas([("replica-0", "http://127.0.0.1:1"), ("replica-1", "http://127.0.0.1:2")])
    )
    ledger = Ledger(sqlite_url(tmp_path / "ledger.sqlite"))
    with asyncio.Runner() as runner:
        runner.run(ledger.ensure_deployment(DEPLOYMENT, MODEL, bucket.as_uri(), "ASYNC"))
        reconciler = Reconciler(ledger, replicas, DEPLOYMENT)
        names = ServedNames(MODEL, DEPLOYMENT)
        deployments = Deployments(Deployment(names, replicas, reconciler))
        apis = hotload_apis(ledger, deployments)
        app = control_app(deployments, GatewayMetrics(deployments), apis=apis)
        served: list[str] = []

        def work(status: Status) -> None:
            """One replica per poll takes up what is desired; `broken` fails."""
            desired = runner.run(ledger.state(DEPLOYMENT)).desired
            assert desired is not None
            assert desired.url is not None
            view = replicas.views[len(served) % 2]
            fails = desired.snapshot == "broken"
            moved = Transition(
                seq=desired.generation,
                at=0.0,
                snapshot=desired.snapshot,
                generation=desired.generation,
                stage=Stage.ERROR if fails else Stage.IDLE,
                detail="model.safetensors: truncated" if fails else "",
            )
            assert (file_url_path(desired.url) / "model.safetensors").exists()
            report = replica_report(
                replica=view.name,
                boot="b",
                ready=True,
                snapshot="base" if fails else desired.snapshot,
                generation=desired.generation,
                transitions=(moved,),
            )

            async def hear() -> None:
                view.replica.hear(report)

            served.append(view.name)
            runner.run(hear())
            runner.run(reconciler.reconcile_once())

        http = httpx.Client(transport=InLoop(runner, app))
        with SnapshotPublisher(
            "http://gateway/v1",
            bucket.as_uri(),
            model=MODEL,
            deployment=DEPLOYMENT,
            http=http,
            sleep=lambda _: None,
        ) as publisher:
            weights = {"w": np.ones(3, dtype=np.float32)}
            status = publisher.publish("run/1", weights, config_dir=tmp_path / "config", on_status=work)
            assert [r.snapshot for r in status.replicas] == ["run/1", "run/1"]
            assert served == ["replica-0", "replica-1", "replica-0"]
            assert publisher.snapshots.signal("run/1", True).body["changed"] is False
            with pytest.raises(
                SnapshotFailed, match=r"could not load snapshot 'broken': model\.safetensors: trun"
            ):
                publisher.publish("broken", weights, config_dir=tmp_path / "config", on_status=work)
            assert publisher.snapshots.signal("broken").body["changed"] is True
            with pytest.raises(SignalRefused, match="400 Expected"):
                publisher.snapshots.signal("x", 3)  # type: ignore[arg-type]
        runner.run(reconciler.settle())
        ledger.close()
