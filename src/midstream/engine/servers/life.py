"""The life of an engine's server: it is started, taken over, watched, paused, doubted and given up.

Owns: the server's process (or the URL of one to attach to), the epochs of its weights, its end. A boot is the time from a
successful `start` to the end of the server.
Always holds:
- A boot begins with the base weights and a prefix cache in which no request finds anything.
- An event that leaves the serving weights in doubt ends the boot, so that the replica starts over.
- When a boot ends, every request and call under way ends with EngineDied, and nothing more is sent to its server.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from midstream.core.server_settings import ServerSettings
from midstream.core.types import BASE_SNAPSHOT, EngineCard, ModelInfo
from midstream.engine.base import Engine, EngineDied
from midstream.engine.servers.boot import ServerBoot
from midstream.engine.servers.control import ServerControl, ServerRefused
from midstream.engine.servers.labels import Epochs
from midstream.engine.servers.model import Shape, read_shape
from midstream.engine.servers.process import ANSWER_S_MAX, ServerFailed, ServerProcess
from midstream.engine.servers.proving import Proving
from midstream.engine.servers.requests import ServerRequest
from midstream.engine.servers.salts import Salts
from midstream.engine.servers.scoring import WrongWeights
from midstream.engine.servers.switching import NotExact
from midstream.engine.servers.watch import POLL_S, PendingWork, Watch
from midstream.http.call import CallFailed

logger = logging.getLogger(__name__)

#: For an answer that says that the server lives, after a connection was lost.
HEALTH_S_MAX = 5.0
#: The most prompt tokens of one step, unless a prompt may be longer.
STEP_TOKENS = 8192
#: A server that raises one of these while it starts cannot serve.
START_ERRORS = (ServerFailed, CallFailed, ServerRefused, NotExact, WrongWeights)


class ServerLife(Engine):
    """attached: the server belongs to others."""

    #: Whether the server takes grammars.
    GRAMMARS = False

    _control: ServerControl
    _shape: Shape
    _paused = False
    _watcher: asyncio.Task[None] | None = None
    # The weight version that a running commit brings.
    _coming_version: str | None = None
    _death: Callable[[str], Awaitable[None]] | None = None

    def __init__(
        self, model_dir: Path, settings: ServerSettings, server: ServerProcess, *, attached: bool
    ) -> None:
        self._model_dir = self._serving_dir = model_dir
        self._settings = settings
        self._attached = attached
        self._server = server
        self._boot = ServerBoot(server.WHO)
        self._watch = Watch(settings.silence_s_max, lambda s: self._reach(s), self._work, server.WHO)
        # pause, resume and commit run one at a time.
        self._control_lock = asyncio.Lock()
        self._epochs = Epochs(BASE_SNAPSHOT)
        self._salts = Salts(b"")
        self._requests: dict[str, ServerRequest] = {}
        self._proving = Proving(self._requests)
        # Set while it computes.
        self._computing = asyncio.Event()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._server!r}, {self._epochs!r}, {len(self._requests)} requests)"

    @abc.abstractmethod
    def _make_control(self) -> ServerControl:
        """Of the server that has started."""

    @abc.abstractmethod
    async def _reach(self, timeout_s: float) -> None:
        """Return when the core has answered, which it does between two steps. Raises CallFailed if it does not."""

    @abc.abstractmethod
    async def _take_over(self) -> None:
        """Bring the server to the beginning of a boot, and prove what it does. Raises START_ERRORS."""

    @abc.abstractmethod
    def _card(self) -> EngineCard: ...

    @property
    def pid(self) -> int | None:
        return self._server.pid

    async def start(self) -> ModelInfo:
        await self._stop()
        self._shape = await asyncio.to_thread(read_shape, self._model_dir)
        await self._launch()
        return self._info()

    async def _launch(self) -> None:
        """Begin a boot. Raises EngineDied."""
        who = self._server.WHO
        try:
            await self._server.start()
            self._control = self._make_control()
            self._epochs, self._serving_dir = Epochs(BASE_SNAPSHOT), self._model_dir
            # An attached server may have a cache from before.
            self._salts = Salts(secrets.token_bytes(16))
            await self._take_over()
        except BaseException as error:
            await self._server.close()
            if isinstance(error, START_ERRORS):
                raise EngineDied(str(error)) from error
            raise
        self._paused = False
        self._computing.set()
        self._proving.started()
        self._boot.begin()
        self._watcher = asyncio.create_task(self._until_ended(), name=f"{who}'s end")
        self._boot.in_background(self._until_hung(), f"a hung {who}")
        if self._attached:
            self._boot.in_background(self._until_restarted(), f"a restarted {who}")

    def _info(self) -> ModelInfo:
        shape = self._shape
        return ModelInfo(
            max_model_len=self._server.max_model_len,
            vocab_size=shape.vocab_size,
            moe_layers=len(shape.moe_layers),
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            eos_token_ids=shape.eos_token_ids,
            grammars=self.GRAMMARS,
            card=self._card(),
        )

    @property
    def _sizes(self) -> tuple[int, int]:
        """Of the vocabulary and of the context."""
        return self._shape.vocab_size, self._server.max_model_len

    async def close(self) -> None:
        await self._stop()

    async def _stop(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()
        self._end_boot(f"{self._server.WHO} was stopped")
        self.drop_staged()
        self._boot.cancel_tasks()
        await self._server.close()

    async def pause(self) -> None:
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> None:
        async with self._control_lock:
            await self._call_paused(paused)

    async def _call_paused(self, paused: bool) -> None:
        """With the control lock."""
        self._boot.check()
        try:
            await self._boot.while_alive(self._control.pause() if paused else self._control.resume())
        except (CallFailed, ServerRefused) as error:
            self._end_boot(str(error))
            raise EngineDied(str(error)) from error
        self._paused = paused
        if paused:
            self._computing.clear()
        else:
            self._computing.set()

    async def until_computing(self) -> None:
        self._boot.check()
        await self._boot.while_alive(self._computing.wait())

    async def _check_alive(self, reason: str) -> None:
        """Raises EngineDied if the server is gone, or is no longer the one that was given its weights.

        Otherwise `reason` concerns one request alone.
        """
        self._boot.check()
        problem = await self._problem()
        self._boot.check()
        if problem is not None:
            self._end_boot(f"{problem}: {reason}")
            raise EngineDied(f"{problem}: {reason}")

    async def _problem(self) -> str | None:
        """What is wrong with the server, if anything is."""
        status = await self._server.health(HEALTH_S_MAX)
        if status != 200:
            who = self._server.WHO
            return (
                f"{who} is gone ({self._server.LIVES} answers {status})" if status > 0 else f"{who} is gone"
            )
        return await self._other_weights()

    async def _other_weights(self) -> str | None:
        """Why the server has other weights than ours, if it has: it was restarted, for example."""
        if not self._server.names_weights:
            # It was started here, so nobody else restarts it.
            return None
        if self._coming_version is not None:
            # The switch itself finds out whether it left the server in doubt.
            return None
        ours = self._epochs.serving_version
        try:
            version = await self._control.version(ANSWER_S_MAX)
        except (CallFailed, ServerRefused):
            # The server is healthy, but busy with a long step or with a switch.
            return None
        switched = self._epochs.serving_version != ours
        if version == ours or switched or self._coming_version is not None:
            return None
        return (
            f"{self._server.WHO} was restarted, or given weights by others: it has {version!r}, not {ours!r}"
        )

    def silent_s(self) -> float:
        return self._watch.silent_s

    def _work(self) -> PendingWork:
        choices = [c for run in self._requests.values() for c in run.choices.values() if not c.over]
        prompts = sum(choice.prompt_size for choice in choices if not choice.labels.count)
        prompts += sum(run.scoring for run in self._requests.values())
        due = self._computing.is_set() and any(choice.labels.count for choice in choices)
        waiting = min(prompts, max(self._server.max_model_len, STEP_TOKENS))
        return PendingWork(due, waiting, idle=not self._requests, stopped=self._server.is_stopped)

    def on_death(self, callback: Callable[[str], Awaitable[None]]) -> None:
        self._death = callback

    async def _until_hung(self) -> None:
        """End the boot when the server hangs."""
        self._give_up(await self._watch.run(on_cpu=self._server.on_cpu))

    async def _until_restarted(self) -> None:
        """End the boot when the server has been restarted by others."""
        problem = None
        while problem is None:
            await asyncio.sleep(POLL_S)
            problem = await self._other_weights()
        self._give_up(problem)

    def _give_up(self, reason: str) -> None:
        """End the boot. The server is killed, unless it belongs to others."""
        self._server.kill()
        self._end_boot(reason)

    async def _until_ended(self) -> None:
        """Wait for the end of the boot: the end of the server, or an event that made it useless."""
        try:
            reason = await self._boot.while_alive(self._server.wait_ended())
        except EngineDied as error:
            reason = str(error)
        logger.error("%s ended: %s", self._server.WHO, reason)
        self._end_boot(reason)
        await self._server.close()
        if self._death is not None:
            await self._death(reason)

    def _end_boot(self, reason: str) -> None:
        """End the boot: every request and every call ends with EngineDied."""
        for run in self._requests.values():
            run.fail(EngineDied(reason))
        self._boot.end(reason)
