"""The dashboard before a stand-in of a server: the real page, board and event stream, fed with reports that a test makes.

What it stands for: 3 replicas, 64 sessions whose turns go on, swaps of a training run, and rewards.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

sys.path.append(str(Path(__file__).parents[1] / "gateway"))

from gateway_harness import reconciler
from reports import replica_report

from midstream.api.board import Board
from midstream.api.dashboard import DashboardApi
from midstream.core.kv import KvStats
from midstream.core.measures import Distribution, Rewarded, Trajectories
from midstream.core.served_names import ServedNames
from midstream.core.types import EngineStats, Stage, SwapTiming, Transition
from midstream.fleet.access import guarded
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.ledger import Signalled
from midstream.proxy.metrics import GatewayMetrics

NAME = "accounts/local/deployments/default"
#: As TrainingRun calls a run.
RUN = "run-20261127-101500-3fa9"
SESSIONS = 64
REPLICAS = ("replica-0", "replica-1", "midstream-default-replica-12")
BEGUN = 1_790_000_000.0
_STAGES = (
    Stage.FETCHING,
    Stage.VERIFYING,
    Stage.STAGING,
    Stage.STAGED,
    Stage.COMMITTING,
    Stage.CHECKING,
    Stage.IDLE,
)


class Stand:
    """What the page is told. Its clock is the test's."""

    def __init__(self) -> None:
        self.now = BEGUN
        self.replicas = ReplicaSet(DeploymentReplicas([(name, f"http://{name}") for name in REPLICAS]))
        names = ServedNames("accounts/local/models/tiny-moe", NAME)
        # Its reconciler hears no report: that takes a loop.
        idle = reconciler(ReplicaSet(DeploymentReplicas()))
        self.deployment = Deployment(names, self.replicas, idle)
        self.deployments = Deployments(self.deployment)
        self.metrics = GatewayMetrics(self.deployments)
        #: Once it is served, only the server's thread looks at the board.
        self.listening = False
        self.board = Board(self.deployments, self.metrics, now=lambda: self.now, monotonic=lambda: self.now)
        self.steps = 0
        self.turns = 0
        self.first_tokens = 0
        self.generated = 0
        self.error: str | None = None
        self._transitions: dict[str, list[Transition]] = {name: [] for name in REPLICAS}
        self._seq = itertools.count()
        self.sessions: list[dict[str, Any]] = [self._session(number) for number in range(SESSIONS)]
        self.report()

    def _session(self, number: int) -> dict[str, Any]:
        return {
            "id": f"verifiers-math-group-0042-rollout-{number:03}", "replica": REPLICAS[number % 3], "turns": 3,
            "open_turns": 0, "prompt_tokens": 1200, "cached_share": 0.75, "generated_tokens": 96,
            "mean_time_to_first_token_s": 0.0832, "mean_inter_token_s": 0.0123, "used_at": BEGUN + number,
            "last_reward": number / 100,
        }  # fmt: skip

    def report(self) -> None:
        """Has every replica report."""
        snapshot = f"{RUN}/{self.steps - 1}" if self.steps else "base"
        buckets = [0] * 18
        buckets[5] = self.first_tokens
        told = Trajectories(
            measures={"time_to_first_token_seconds": Distribution(buckets, 0.02 * self.first_tokens)},
            rewards=[
                Rewarded(
                    policy="", snapshot=f"{RUN}/{step}", name="reward", first_at=step, count=4, sum=step / 10
                )
                for step in range(self.steps)
            ],
        )
        for view in self.replicas.views:
            moved = self._transitions[view.name]
            engine = EngineStats(
                generated_tokens=self.generated, prompt_tokens=10 * self.generated, cached_prompt_tokens=8 * self.generated,
                running=2 if self.generated else 0, kv=KvStats(used=self.generated % 90, total=100),
            )  # fmt: skip
            timings = [
                SwapTiming(
                    snapshot=one.snapshot, generation=one.generation, pause_ms=0.52, streams_crossed=31
                )
                for one in moved
                if one.stage is Stage.IDLE
            ]
            view.replica.hear(replica_report(
                replica=view.name, boot="b", ready=True, snapshot=snapshot, engine=engine, error=self.error,
                transitions=tuple(moved), swaps=tuple(timings),
            ))  # fmt: skip
            view.admitted, view.replica.trajectories = True, told
        if not self.listening:
            self.board.look()

    def step(self) -> None:
        """One more snapshot of the run, which every replica loads within 12 s."""
        snapshot = f"{RUN}/{self.steps}"
        self.steps += 1
        self.deployment.order.learn([Signalled(snapshot, self.steps, True)])
        for view in self.replicas.views:
            for at, stage in enumerate(_STAGES):
                moved = Transition(
                    seq=next(self._seq), at=self.now + 2 * at, snapshot=snapshot, generation=self.steps, stage=stage
                )  # fmt: skip
                self._transitions[view.name].append(moved)
        self.now += 20
        self.report()

    def traffic(self) -> None:
        """Turns end: each session is another one in the order of use."""
        self.turns += 1
        self.generated += 640
        self.first_tokens += 8
        for number, session in enumerate(self.sessions):
            session["turns"] += 1
            session["used_at"] = BEGUN + 1000 * self.turns + (7 * number + 13 * self.turns) % SESSIONS
        self.now += 2
        self.report()

    # -- what the page asks for

    async def list_sessions(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": self.sessions, "has_more": False, "unreachable": []})

    async def trace(self, request: Request) -> Response:
        turns = [
            {
                "turn": number, "parent": number - 1, "model": "m", "added": list(range(40)), "token_ids": list(range(120)),
                "finish_reason": "stop", "created": BEGUN, "logprobs": [-0.5] * 120, "sampling_logprobs": None,
                "routing_matrix": None, "branch": None,
                "snapshots": [
                    {"snapshot": f"{RUN}/{number + half}", "start": 60 * half, "end": 60 * (half + 1)} for half in (0, 1)
                ],
            }
            for number in range(1, 9)
        ]  # fmt: skip
        trace = {"replica": "replica-0", "turns": turns, "rewards": [], "forgotten": False}
        return JSONResponse({"id": request.path_params["key"], "traces": [trace], "unreachable": []})

    async def detokenize(self, request: Request) -> Response:
        tokens = (await request.json())["tokens"]
        return JSONResponse({"token_texts": [f" word{token}" for token in tokens]})

    async def ledger(self, _: Request) -> Response:
        rows = [
            {
                "identity": f"{RUN}/{step}", "kind": "delta" if step else "full", "files": [{"size": 12_345_678}],
                "previous_snapshot_identity": f"{RUN}/{step - 1}" if step else None, "signalled_at": BEGUN + 20 * step,
                "first_signalled_at": BEGUN + 20 * step, "ready_at": BEGUN + 20 * step + 12,
                "reset_prompt_cache": "new_session",
                "replicas": [{"replica": name, "error": None, "stage": "idle"} for name in REPLICAS],
            }
            for step in range(self.steps)
        ]  # fmt: skip
        desired = f"{RUN}/{self.steps - 1}" if self.steps else None
        return JSONResponse({"snapshots": rows, "desired_snapshot_identity": desired, "disagreements": []})

    async def policies(self, _: Request) -> Response:
        return JSONResponse({"policies": []})

    def app(self) -> Starlette:
        routes = [
            *guarded([DashboardApi(self.board, lambda: self.listening)], self.deployments, keyed=False),
            Route("/v1/sessions", self.list_sessions),
            Route("/v1/sessions/{key:path}/trace", self.trace),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route(f"/v1/{NAME}/ledger", self.ledger),
            Route(f"/v1/{NAME}/policies", self.policies),
        ]
        return Starlette(routes=routes)


@contextlib.contextmanager
def served(stand: Stand) -> Iterator[str]:
    """The address of the page."""
    config = uvicorn.Config(stand.app(), port=0, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    stand.listening = True
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/dashboard"
    finally:
        stand.listening = False
        server.should_exit = True
        thread.join()
