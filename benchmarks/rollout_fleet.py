"""Four replicas of tiny-moe, midstream's gateway and vllm-router in front of them, started and read.

The replicas and the gateway are the processes that `midstream serve` starts, by the same code (launch/process.py); their
supervisor is this, since the replicas of `serve` answer nobody but its own gateway, and here others ask them too.
Always holds: what was started is gone when its `async with` block is left.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import httpx
import msgspec
from gateway.routers import DEPLOYMENT, RouterFailed, VllmRouter, folder_for
from gateway.tools import tree, tree_cpu_s
from rollout_filter import Filter
from rollout_load import BLOCK

from midstream.core.config import EngineSettings, GatewaySettings
from midstream.core.measures import Trajectories
from midstream.core.reports import ReplicaReport
from midstream.fleet.desired_state import Running, RunningReplica
from midstream.http.channel import STOP_GRACE_S
from midstream.launch.process import Child, ChildMessages
from midstream.launch.specs import GatewaySpec, ReplicaSpec
from midstream.models.tiny_moe import write_tiny_moe

REPLICAS = 4
MODEL = "accounts/local/models/m"
CAUGHT_UP_S_MAX = 30.0


@dataclass(frozen=True)
class Work:
    """What one replica did: turns, tokens, and the time its turns took, summed."""

    turns: int = 0
    prompt: int = 0
    cached: int = 0
    answer: int = 0
    busy_s: float = 0.0

    def __sub__(self, before: Work) -> Work:
        return Work(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(Work)))

    @property
    def computed(self) -> int:
        """Prompt tokens computed and tokens drawn."""
        return self.prompt - self.cached + self.answer


class _Kind(msgspec.Struct):
    # A report has none.
    kind: str | None = None


def read_work(lines: Iterable[bytes]) -> Work | None:
    """What a replica has done since it began, from its event stream; None when these lines do not say all of it."""
    engine = measures = None
    for line in lines:
        kind = msgspec.json.decode(line, type=_Kind).kind
        if kind is None:
            engine = msgspec.json.decode(line, type=ReplicaReport).engine
        elif kind == "trajectories":
            measures = msgspec.json.decode(line, type=Trajectories).measures
    if engine is None:
        return None
    # Not told before the first turn.
    if measures is None:
        return None if engine.generated_tokens else Work()
    generation = measures["generation_seconds"]
    return Work(
        turns=sum(generation.counts),
        prompt=engine.prompt_tokens,
        cached=engine.cached_prompt_tokens,
        answer=engine.generated_tokens,
        busy_s=measures["time_to_first_token_seconds"].sum + generation.sum,
    )


class Fleet:
    """Running replicas with our gateway, and vllm-router unless it is absent (`absent` says why)."""

    def __init__(self, folder: Path, kv_cache_tokens: int) -> None:
        self._folder = folder
        self._engine = EngineSettings(threads=1, block_size=BLOCK, kv_cache_tokens=kv_cache_tokens)
        self._children: list[Child] = []
        self._router: VllmRouter | None = None
        self._filters: list[Filter] = []
        self._http = httpx.AsyncClient(timeout=30.0, trust_env=False)
        self.absent: str | None = None
        # Of our gateway.
        self.port = 0
        self.replica_ports: list[int] = []
        self._work = [Work()] * REPLICAS

    async def __aenter__(self) -> Fleet:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _start(self) -> None:
        model = self._folder / "m"
        await asyncio.to_thread(write_tiny_moe, model)
        replicas = [
            Child(name, "midstream.launch.replica", self._replica(name, model)) for name in self._names()
        ]
        self._children += replicas
        await asyncio.gather(*(replica.start() for replica in replicas))
        self.replica_ports = [replica.port for replica in replicas]
        gateway = Child(
            "gateway", "midstream.launch.gateway", self._gateway(), ChildMessages(greeting=self._running)
        )
        self._children.append(gateway)
        await gateway.start()
        self.port = gateway.port
        deadline = time.monotonic() + CAUGHT_UP_S_MAX
        while await self._usable() < REPLICAS:
            if time.monotonic() > deadline:
                raise RuntimeError("the gateway does not hear of its replicas")
            await asyncio.sleep(0.1)
        self._filters = [Filter(port) for port in self.replica_ports]
        for one in self._filters:
            await one.start()
        await asyncio.to_thread(self._start_router)
        # Its probes ask for one token each.
        await self._caught_up(lambda turns, answer: turns == answer)

    async def _stop(self) -> None:
        if self._router is not None:
            await asyncio.to_thread(self._router.stop)
        for one in self._filters:
            await one.stop()
        for child in reversed(self._children):
            await child.stop(STOP_GRACE_S)
        await self._http.aclose()

    def _names(self) -> list[str]:
        return [f"replica-{i}" for i in range(REPLICAS)]

    def _replica(self, name: str, model: Path) -> ReplicaSpec:
        return ReplicaSpec(
            name=name,
            host="127.0.0.1",
            port=0,
            model_dir=str(model),
            model=MODEL,
            deployment=DEPLOYMENT,
            cache_dir=str(self._folder / name),
            token="",
            engine=self._engine,
            log_level="warning",
        )

    def _gateway(self) -> GatewaySpec:
        (self._folder / "bucket").mkdir()
        return GatewaySpec(
            host="127.0.0.1",
            port=0,
            model=MODEL,
            deployment=DEPLOYMENT,
            replicas=REPLICAS,
            models=("m",),
            bucket=(self._folder / "bucket").as_uri(),
            transition="async",
            ledger=f"sqlite:///{self._folder / 'ledger.db'}",
            token="bench-rollout",
            settings=GatewaySettings(),
            log_level="warning",
        )

    def _running(self) -> Running:
        names = zip(self._names(), self.replica_urls, strict=True)
        return Running(
            tuple(RunningReplica(name=name, deployment=DEPLOYMENT, url=url) for name, url in names)
        )

    @property
    def replica_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.replica_ports]

    def _start_router(self) -> None:
        if (why := VllmRouter.missing()) is not None:
            self.absent = why
            return
        cores = os.sched_getaffinity(0)
        urls = [f"http://127.0.0.1:{one.port}" for one in self._filters]
        router = VllmRouter(folder_for("vllm-router", self._folder), urls, min(cores))
        body = b'{"model":"m","prompt":[1],"max_tokens":1}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\nx-session-id: probe\r\n"
        try:
            router.start(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        except RouterFailed as error:
            self.absent = str(error)
            return
        # Here nothing has a core of its own.
        _unpin(router.pid, cores)
        self._router = router

    @property
    def router_port(self) -> int | None:
        return None if self._router is None else self._router.port

    def router_about(self) -> dict[str, str]:
        """Version and command line; nothing when it is absent."""
        if self._router is None:
            return {}
        return {"version": self._router.version(), "command": self._router.configuration()["command"]}

    def cpu_s(self) -> float:
        """CPU time of this process and all under it so far."""
        return tree_cpu_s(os.getpid())

    async def _usable(self) -> int:
        """How many replicas our gateway may use."""
        answer = await self._http.get(f"http://127.0.0.1:{self.port}/metrics")
        lines = answer.raise_for_status().text.splitlines()
        return sum(
            line.startswith("midstream_gateway_replica_usable{") and line.endswith(" 1.0") for line in lines
        )

    async def after(self, turns: int, answer: int) -> list[Work]:
        """What each replica did since the last such call, once so many turns and new tokens are told. Raises RuntimeError."""
        before = self._work
        turns += sum(one.turns for one in before)
        answer += sum(one.answer for one in before)
        await self._caught_up(lambda *told: told == (turns, answer))
        return [now - then for now, then in zip(self._work, before, strict=True)]

    async def _caught_up(self, wanted: Callable[[int, int], bool]) -> None:
        """Ask replicas until their turns and new tokens in all are as wanted. Raises RuntimeError."""
        deadline = time.monotonic() + CAUGHT_UP_S_MAX
        while True:
            async with asyncio.timeout(CAUGHT_UP_S_MAX):
                self._work = await asyncio.gather(*map(self._asked, self.replica_urls))
            told = sum(one.turns for one in self._work), sum(one.answer for one in self._work)
            if wanted(*told):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"replicas tell of other turns and tokens than they were asked for: {told}"
                )
            await asyncio.sleep(0.05)

    async def _asked(self, url: str) -> Work:
        """What a replica has done so far: a new event stream begins with all of it."""
        lines = []
        async with self._http.stream("GET", f"{url}/replica/events") as answer:
            async for line in answer.aiter_lines():
                lines.append(line.encode())
                if (work := read_work(lines)) is not None:
                    return work
        raise RuntimeError(f"the event stream of {url} ended early")

    async def close_sessions(self, keys: Iterable[str]) -> None:
        for key in keys:
            answer = await self._http.delete(f"http://127.0.0.1:{self.port}/v1/sessions/{key}")
            answer.raise_for_status()


def _unpin(pid: int, cores: set[int]) -> None:
    for thread in _threads(pid):
        os.sched_setaffinity(thread, cores)


def _threads(pid: int) -> Iterator[int]:
    for one in tree(pid):
        yield from (int(entry.name) for entry in Path(f"/proc/{one}/task").iterdir())
