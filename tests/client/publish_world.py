"""A server that takes signals and rebuilds deltas at once, its bucket, and weights that change a little each step."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import safetensors.numpy

from midstream.client import SnapshotPublisher
from midstream.core.errors import RebasePending
from midstream.snapshots.rebuild import rebuild

SWAP = {
    "fetch_ms": 4.0,
    "rebuild_ms": 3.0,
    "verify_ms": 2.0,
    "stage_ms": 2.0,
    "pause_ms": 1.5,
    "streams_crossed": 4,
}
METRICS = """\
# TYPE midstream_replica_requests_in_flight gauge
midstream_replica_requests_in_flight{replica="r0"} 3.0
# TYPE midstream_replica_prompt_tokens_total counter
midstream_replica_prompt_tokens_total{replica="r0"} 200.0
# TYPE midstream_replica_cached_prompt_tokens_total counter
midstream_replica_cached_prompt_tokens_total{replica="r0"} 150.0
"""


class World:
    """A server that loads what it is told at once, rebuilding deltas from what it serves, and its bucket."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bucket = root / "bucket"
        self.bucket.mkdir()
        self.work = root / "work"
        self.config = root / "config"
        self.config.mkdir()
        (self.config / "config.json").write_text('{"model_type": "x"}')
        self.desired: str | None = None
        self.generation = 0
        # Whole files of `desired`.
        self.serving: Path | None = None
        self.signals: list[dict[str, Any]] = []
        self.hints: list[dict[str, Any]] = []
        self.refuse_deltas = False
        # Answers to deltas of whose chains whole files are still to come.
        self.rebases_pending = 0
        # This snapshot cannot be loaded.
        self.fail: str | None = None
        self.error: str | None = None
        self.api_key: str | None = None
        self.away = False
        self.policies: list[dict[str, Any]] = []
        # The queries of status.
        self.asked: list[str] = []
        self.ledger: dict[str, Any] = {"desired_snapshot_identity": "base", "snapshots": []}
        # Status is answered.
        self.open = threading.Event()
        self.open.set()

    def publisher(self, **kwargs: Any) -> SnapshotPublisher:
        http = httpx.Client(transport=httpx.MockTransport(self.handle))
        arguments = {"work_dir": self.work, "http": http, "sleep": lambda _: None}
        return SnapshotPublisher("http://server", str(self.bucket), **(arguments | kwargs))

    def handle(self, request: httpx.Request) -> httpx.Response:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return httpx.Response(401, json={"error": {"message": "a valid API key is needed"}})
        if self.away:
            return httpx.Response(503, json={"error": {"message": "the gateway is starting"}})
        if request.method == "GET":
            self.open.wait(120)
            if request.url.path.startswith("/hot_load"):
                self.asked.append(request.url.query.decode())
            return self.read(request.url.path, request.url.params.get("pageToken"))
        body = json.loads(request.content)
        if request.url.path.endswith("/hint"):
            self.hints.append(body)
            return httpx.Response(404, json={})
        return self.signal(body)

    def read(self, path: str, token: str | None) -> httpx.Response:
        match path:
            case "/metrics":
                return httpx.Response(200, text=METRICS)
            case "/v1/accounts":
                return httpx.Response(200, json={"accounts": [{"name": "accounts/a"}]})
            case "/v1/accounts/a/deployments":
                row = {"name": "accounts/a/deployments/d", "hotLoadBucketUrl": self.bucket.as_uri()}
                return httpx.Response(200, json={"deployments": [row]})
            case "/v1/accounts/a/deployments/d/policies":
                # One on a page.
                place = int(token or 0)
                token = str(place + 1) if place + 1 < len(self.policies) else ""
                page = {"policies": self.policies[place : place + 1], "nextPageToken": token}
                return httpx.Response(200, json=page)
            case "/v1/accounts/a/deployments/d/ledger":
                return httpx.Response(200, json=self.ledger)
            case _:
                return httpx.Response(200, json=self.status())

    def signal(self, body: dict[str, Any]) -> httpx.Response:
        self.signals.append(body)
        delta = body.get("incremental_snapshot_metadata")
        if delta is not None and self.rebases_pending:
            self.rebases_pending -= 1
            error = RebasePending("at most 64 are allowed")
            return httpx.Response(error.status, json=error.body(), headers=error.headers())
        if delta is not None and (
            self.refuse_deltas or delta["previous_snapshot_identity"] != self.desired or self.error
        ):
            return httpx.Response(
                400, json={"error": {"message": "previous_snapshot_identity is not served"}}
            )
        files = self.bucket / body["identity"]
        self.desired, self.error = body["identity"], None
        self.generation += 1
        if self.fail == self.desired:
            self.error = "Adler-32 differs"
        elif delta is None:
            self.serving = files
        else:
            out = self.root / f"rebuilt-{self.generation}"
            assert self.serving is not None
            rebuild(self.serving, files, out, delta["compression_format"])
            self.serving = out
        return httpx.Response(200, json={"generation": self.generation, "changed": True})

    def status(self) -> dict[str, Any]:
        stage = "error" if self.error else "idle" if self.desired is None else "done"
        return {
            "replicas": [
                {
                    "current_snapshot_identity": "before" if self.error else self.desired or "base",
                    "readiness": True,
                    "loading_state": {"stage": stage, "target_snapshot_identity": self.desired},
                    "midstream": {
                        "replica": "r0",
                        "error": self.error,
                        "generation": self.generation,
                        "last_swap": SWAP,
                    },
                }
            ]
        }

    def reset(self) -> None:
        self.desired = self.serving = None

    def served(self) -> dict[str, Any]:
        assert self.serving is not None
        return safetensors.numpy.load_file(self.serving / "model.safetensors")


def weights(step: int) -> dict[str, Any]:
    """2 % of the values differ from one step to the next."""
    random = np.random.default_rng(0)
    result = {name: random.standard_normal(5000).astype(np.float32) for name in ("a", "b")}
    for past in range(1, step + 1):
        moved = np.random.default_rng(past)
        for values in result.values():
            values[moved.choice(5000, 100, replace=False)] += np.float32(0.01)
    return result


class Answering(Protocol):
    def handle(self, request: httpx.Request) -> httpx.Response: ...


@contextmanager
def listening(world: Answering) -> Iterator[str]:
    """`world` behind a port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(httpx.Request("GET", "http://server" + self.path, headers=dict(self.headers)))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.answer(
                httpx.Request("POST", "http://server" + self.path, content=body, headers=dict(self.headers))
            )

        def answer(self, request: httpx.Request) -> None:
            response = world.handle(request)
            self.send_response(response.status_code)
            self.send_header("content-length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
