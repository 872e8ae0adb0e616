"""One gateway process beside the first: its own data path and its own ears, on the same port. No ledger, no control, no API.

Run as `python -m midstream.launch.worker` by the first one, which it passes control requests to, and whose end is its own.
Always holds: it listens once it can use every replica that the first one can, or has tried for CATCH_UP_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

import msgspec

from midstream.errors import ConfigError
from midstream.fleet.replicas import ReplicaSet
from midstream.gateway.handover import Offer, take_over
from midstream.gateway.metrics import GatewayMetrics
from midstream.gateway.registry import Deployment, Deployments
from midstream.gateway.server import Gateway
from midstream.gateway.sessions import SessionTable
from midstream.gateway.wire import data_path, new_event_loop
from midstream.gateway.workers import DeploymentState, Follower, State
from midstream.launch.child import (
    CATCH_UP_S,
    STOP_GRACE_S,
    Announcer,
    Listening,
    WorkerSpec,
    configure_logging,
    raise_file_limit,
    read_spec,
    return_memory,
    stop_requested,
)
from midstream.launch.gateway import LEARN_S
from midstream.names import ServedNames
from midstream.private import UMASK

logger = logging.getLogger(__name__)

REPORT_S = 0.5


class Worker:
    """Made in the event loop it runs in."""

    def __init__(self, spec: WorkerSpec, announce: Announcer) -> None:
        self._spec = spec
        self._announce = announce
        self._hearing: dict[str, asyncio.Task[None]] = {}
        first = DeploymentState(name=spec.deployment, model=spec.model, deleting=False, replicas=())
        self._deployments = Deployments(self._make(first), spec.models)
        self._metrics = GatewayMetrics(self._deployments)
        self._follower = Follower(self._deployments, self._make, self._begin, self._end)
        self._gateway = Gateway(
            spec.settings,
            self._deployments,
            self._metrics,
            control_path=spec.control_path,
            front_path=spec.tinker_path,
            replica_token=spec.token,
        )
        self._listening = False
        self._news = asyncio.Event()

    async def serve(self) -> None:
        """Until it is asked to stop."""
        stop = asyncio.create_task(stop_requested(self._hear))
        offer = Offer(lambda: self._gateway.sockets)
        self._announce(
            Listening(port=self._spec.port, offer=offer.path)
        )  # from now on it is told what is wanted
        work = asyncio.create_task(self._work())
        taken = asyncio.create_task(offer.taken())
        try:
            await asyncio.wait((stop, taken, work), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            if taken.done():
                self._listening = False
                drain_s = self._spec.settings.restart_drain_s
                rest = asyncio.create_task(self._gateway.retire(drain_s))
                await asyncio.wait((stop, rest), return_when=asyncio.FIRST_COMPLETED)
                rest.cancel()
            if stop.done():
                await self._gateway.drain(STOP_GRACE_S)
        finally:
            offer.close()
            await self._gateway.close()
            tasks = [stop, work, taken, *self._hearing.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                await self._caught_up()
        await self._listen()
        self._listening = True
        while True:
            self._report()
            await asyncio.sleep(REPORT_S)

    async def _listen(self) -> None:
        """On the sockets of the process that this one replaces; if it is gone, beside the others on the port."""
        spec = self._spec
        if spec.takes_over is not None:
            try:
                taken = await take_over(spec.takes_over)
            except OSError as error:
                logger.warning("nothing to take over: %s", error)
            else:
                await self._gateway.start(spec.host, spec.port, taken.sockets)
                taken.confirm()
                return
        await self._gateway.start(spec.host, spec.port)

    async def _caught_up(self) -> None:
        while not self._follower.caught_up:
            self._news.clear()
            for deployment in self._deployments:
                deployment.replicas.wait(self._news.set)
            await self._news.wait()

    def _hear(self, line: bytes) -> None:
        self._follower.take(msgspec.json.decode(line, type=State))
        self._news.set()
        self._report()

    def _report(self) -> None:
        self._announce(self._follower.report(self._metrics.tally(), listening=self._listening))

    def _make(self, state: DeploymentState) -> Deployment:
        return Deployment(
            ServedNames(state.model, state.name),
            ReplicaSet(
                token=self._spec.token, learn_s=LEARN_S, silence_s=self._spec.settings.replica_silence_s
            ),
            None,
            SessionTable(self._spec.settings.max_sessions),
        )

    def _begin(self, deployment: Deployment) -> None:
        self._hearing[deployment.name] = asyncio.get_running_loop().create_task(deployment.run())

    def _end(self, deployment: Deployment) -> None:
        self._hearing.pop(deployment.name).cancel()


def main() -> int:
    announce = Announcer()
    spec = read_spec(WorkerSpec)
    configure_logging("gateway", spec.log_level)
    raise_file_limit()
    return_memory()
    os.umask(UMASK)

    async def serve() -> None:
        await Worker(spec, announce).serve()

    try:
        with asyncio.Runner(loop_factory=lambda: new_event_loop(data_path(spec.settings))) as runner:
            runner.run(serve())
    except (ConfigError, OSError) as error:
        announce(Listening(error=str(error)))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
