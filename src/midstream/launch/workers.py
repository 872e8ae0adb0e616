"""The gateway processes beside the first one: started, told what is wanted, heard, and started again by it.

Always holds: a worker that ends takes its connections with it and nothing else; it is started again, and hears the whole of
what is wanted before it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping

import msgspec

from midstream.gateway.metrics import GatewayMetrics
from midstream.gateway.registry import Deployments
from midstream.gateway.workers import Leader, State, WorkerReport
from midstream.launch.child import STOP_GRACE_S, GatewaySpec, WorkerSpec
from midstream.launch.process import Child

PUSH_S = 0.1  # between two looks at what workers have to know
KILL_AFTER_S = 2.0


class Workers:
    """`spec.settings.workers` - 1 of them. Made in the event loop it runs in."""

    def __init__(self, spec: GatewaySpec, deployments: Deployments, metrics: GatewayMetrics) -> None:
        self._spec = spec
        self._children: list[Child] = []
        self._keeping: list[asyncio.Task[None]] = []
        self._running: asyncio.Task[None] | None = None
        self.leader = Leader(deployments, self._tell)
        metrics.others = self.leader.tallies
        metrics.workers = lambda: 1 + self.leader.listening
        metrics.workers_ready = lambda: 1 + self.leader.ready

    def start(self, control_path: str, port: int, theirs: Mapping[str, str]) -> asyncio.Task[None]:
        """What starts them and keeps them running; it ends by itself only when it fails.

        theirs: where processes of another gateway offer their sockets, by the name of who takes them over.
        """
        self._running = asyncio.create_task(self._run(control_path, port, theirs), name="workers")
        return self._running

    def offers(self) -> dict[str, str]:
        """Where each offers its sockets to a successor."""
        return {child.name: child.offer for child in self._children if child.offer is not None}

    def retire(self) -> None:
        """Each ends by itself once it is replaced and has finished; none is started again."""
        for keeping in self._keeping:
            keeping.cancel()

    async def left(self) -> None:
        """Until all have ended."""
        while any(child.running for child in self._children):  # noqa: ASYNC110 - they are looked at that often anyway
            await asyncio.sleep(PUSH_S)

    async def _run(self, control_path: str, port: int, theirs: Mapping[str, str]) -> None:
        spec = self._spec
        worker = WorkerSpec(
            host=spec.host,
            port=port,
            model=spec.model,
            deployment=spec.deployment,
            models=spec.models,
            control_path=control_path,
            token=spec.token,
            settings=spec.settings,
            log_level=spec.log_level,
            tinker_path=spec.tinker_path,
        )
        async with asyncio.TaskGroup() as tasks:
            for number in range(1, spec.settings.workers):
                name = f"gateway-{number}"
                child = Child(
                    name,
                    "midstream.launch.worker",
                    msgspec.structs.replace(worker, takes_over=theirs.get(name)),
                    on_line=functools.partial(self._hear, name),
                    greeting=lambda: self.leader.state,
                )
                self._children.append(child)
                self._keeping.append(tasks.create_task(self._keep(child), name=name))
            while True:
                for child in self._children:
                    if not child.running:
                        self.leader.gone(child.name)
                self.leader.push()
                await asyncio.sleep(PUSH_S)

    async def stop(self) -> None:
        """Let them finish what they have; end them when they do not. Idempotent."""
        if self._running is not None:
            self._running.cancel()  # nobody is to be started again
            await asyncio.wait((self._running,))
        await asyncio.gather(*(child.stop(STOP_GRACE_S + KILL_AFTER_S) for child in self._children))

    async def _keep(self, child: Child) -> None:
        await child.start()
        await child.supervise()

    def _tell(self, state: State) -> None:
        for child in self._children:
            child.tell(state)

    def _hear(self, name: str, line: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):  # cut short by its end
            self.leader.heard(name, msgspec.json.decode(line, type=WorkerReport))
