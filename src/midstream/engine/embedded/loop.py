"""The engine process: it takes commands, steps and reports; nothing else runs in it.

Owns: the loop of one EngineCore. engine.py starts the process with one end of a socket pair.
Always holds: weights change only between two steps, in this loop. The process ends when the socket closes, so it never
outlives its replica.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path

import msgspec
import torch
import transformers

from midstream.core.logs import configure
from midstream.core.types import GenerateRequest
from midstream.engine.embedded import protocol as m
from midstream.engine.embedded import weights_digest
from midstream.engine.embedded.background import Background, Job
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.grammar_queue import GrammarQueue
from midstream.engine.embedded.kv_copies import kind_of
from midstream.engine.embedded.kv_files import mapped
from midstream.engine.embedded.model_runner import dispose
from midstream.engine.embedded.stager import Staged, Stager
from midstream.engine.embedded.weights import Unservable
from midstream.engine.kv_copies import KvPlace, KvRefused
from midstream.http.ipc import Channel, Disconnected
from midstream.snapshots.adapter import is_adapter

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
#: After a switch, so many steps have the machine for themselves. Then the replaced model is freed and digests are computed.
CALM_STEPS = 3
#: How often memory is looked for that a replaced model left.
TIDY_S = 30.0


class EngineLoop:
    """threads: how many compute a digest."""

    def __init__(self, channel: Channel[m.Command], core: EngineCore, threads: int = 1) -> None:
        self._threads = threads
        self._channel = channel
        self._core = core
        # By policy.
        self._staged: dict[str, str] = {}
        self._background = Background()
        # Jobs that wait, and the number of steps to run before they begin.
        self._jobs: list[Job] = []
        self._calm = 0
        self._stager = Stager(core.stage, self._jobs.append, core.store.drop, core.stage_ahead)
        # Calls for a digest without a reply yet, and the replies that background jobs made.
        self._digest_calls = 0
        self._digests: queue.SimpleQueue[m.CallDone] = queue.SimpleQueue()
        self._grammars = GrammarQueue(core.prepare_grammar)
        # Pieces of KV for and from other engines: one is copied between two steps.
        self._copies: deque[m.GiveKv | m.TakeKv] = deque()
        # The reply to a commit, which is sent after the events of the next step.
        self._committed: m.CallDone | None = None
        self._reported_at = 0.0
        self._tidied_at = time.monotonic()

    def run(self) -> None:
        while True:
            for command in self._channel.receive(self._wait_s()):
                self._handle(command)
            if self._grammars.waiting:
                self._add_compiled()
            if self._stager.busy:
                self._answer(self._stager.take())
            while not self._digests.empty():
                self._digest_calls -= 1
                self._channel.send(self._digests.get())
            self._begin_jobs()
            if self._copies:
                self._channel.send(self._copy(self._copies.popleft()))
            self._step()

    def _step(self) -> None:
        """Run a step, if there is work, and send its events. Then send the reply to a commit, if there was one.

        The replica has much to do after that reply, and the first tokens of the new weights should not wait for it.
        """
        outputs = self._core.step()
        self._calm -= 1
        now = time.monotonic()
        if outputs or now - self._reported_at >= STATS_INTERVAL_S:
            self._reported_at = now
            self._channel.send(m.Events(outputs, self._core.stats()))
        if now - self._tidied_at >= TIDY_S:
            self._tidied_at = now
            self._jobs.append(self._core.store.serving.model.tidy)
        self._send_committed()

    def _send_committed(self) -> None:
        if self._committed is not None:
            self._channel.send(self._committed)
            self._committed = None

    def _retire(self) -> None:
        """The jobs before these may read the weights."""
        for retired in self._core.take_retired():
            self._jobs.append(partial(dispose, [retired]))

    def _begin_jobs(self) -> None:
        """Begin the waiting jobs, once the steps after a switch are done or there is no step to do."""
        if self._calm > 0 and self._core.busy:
            return
        if self._core.store.retired:
            self._retire()
        for job in self._jobs:
            self._background.submit(job)
        self._jobs.clear()

    def _wait_s(self) -> float:
        if self._core.busy or self._copies:
            return 0.0
        busy = self._stager.awaited or self._digest_calls or self._grammars.waiting
        return 0.001 if busy else STATS_INTERVAL_S

    def _handle(self, command: m.Command) -> None:
        match command:
            case m.Generate(request):
                if request.grammar is None or self._core.knows_grammar(request.grammar):
                    self._add(request)
                else:
                    self._grammars.put(request)
            case m.Abort(request_id, index):
                if request_id in self._grammars.waiting:
                    self._grammars.abort(request_id, index)
                else:
                    self._core.abort(request_id, index)
            case m.StageSnapshot() | m.StageAhead() | m.TensorsMade() | m.DropStaged():
                self._stage(command)
            case m.Commit():
                self._commit(command)
            case m.Retain(policy, snapshots):
                self._core.retain(policy, snapshots)
            case m.EndPolicy(policy):
                self._drop_staged(policy)
                self._answer(self._stager.drop(policy))
                self._core.end_policy(policy)
            case m.EndSession(session):
                self._core.scheduler.end_session(session)
                # A piece that is taken behind this claims nothing for it.
                self._ended_meanwhile(session)
            case m.AbandonKv(policy):
                self._core.abandon_kv(policy)
            case m.DigestWeights(call, policy):
                self._digest(call, policy)
            case m.GiveKv() | m.TakeKv():
                self._copies.append(command)
            case m.PauseSteps(call):
                self._core.scheduler.frozen = True
                self._channel.send(m.CallDone(call))
            case m.ResumeSteps(call):
                self._core.scheduler.frozen = False
                self._channel.send(m.CallDone(call))

    def _ended_meanwhile(self, session: str) -> None:
        for at, copy in enumerate(self._copies):
            if isinstance(copy, m.TakeKv) and copy.session == session:
                self._copies[at] = msgspec.structs.replace(copy, session="")

    def _copy(self, command: m.GiveKv | m.TakeKv) -> m.CallDone:
        try:
            tokens, content = mapped(command.file)
            place, copies = KvPlace(command.salt, command.policy, tokens), self._core.copies
            if isinstance(command, m.TakeKv):
                blocks = copies.take(place, command.part, content, command.session, command.kept_s)
                return m.CallDone(command.call, kv_blocks=blocks)
            part = copies.give(place, command.first, command.most, command.kv_age_max, content)
            return m.CallDone(command.call, kv=part)
        except KvRefused as error:
            return m.CallDone(command.call, error=str(error))

    def _stage(self, command: m.StageSnapshot | m.StageAhead | m.TensorsMade | m.DropStaged) -> None:
        match command:
            case m.StageSnapshot():
                # A policy never has more than one snapshot beside those that serve or are resident.
                self._drop_staged(command.policy)
                if is_adapter(Path(command.directory)):
                    self._core.store.expect_adapter(command.call)
                self._answer(self._stager.submit(command))
            case m.StageAhead():
                self._drop_staged(command.policy)
                if not is_adapter(Path(command.directory)):
                    self._stager.begin(command)
            case m.TensorsMade(policy, tensors):
                self._stager.made(policy, tensors)
            case m.DropStaged(policy):
                self._drop_staged(policy)
                self._answer(self._stager.drop(policy))

    def _add(self, request: GenerateRequest) -> None:
        refused = self._core.add(request)
        if refused:
            self._channel.send(m.Events(refused, self._core.stats()))

    def _add_compiled(self) -> None:
        for request, ended in self._grammars.take():
            self._add(request)
            for index in ended:
                self._core.abort(request.request_id, index)

    def _digest(self, call: int, policy: str) -> None:
        weights = self._core.weights(policy)
        if not weights:
            self._channel.send(m.CallDone(call, error=f"policy {policy!r} serves nothing"))
            return
        self._digest_calls += 1
        self._jobs.append(lambda: self._digests.put(weights_digest.reply(call, weights, self._threads)))

    def _drop_staged(self, policy: str) -> None:
        self._staged.pop(policy, None)
        self._core.set_staged(None, policy)
        self._retire()

    def _answer(self, staged: list[Staged]) -> None:
        for request, result in staged:
            if not isinstance(result, str) and (why := result.unfit()) is not None:
                self._core.store.drop(result)
                result = why
            if isinstance(result, str):
                self._core.store.adapter_came(request.call)
                refused = isinstance(result, Unservable)
                self._channel.send(m.CallDone(request.call, error=str(result), refused=refused))
                continue
            self._core.set_staged(result, request.policy)
            self._core.store.adapter_came(request.call)
            self._staged[request.policy] = request.snapshot
            self._channel.send(m.CallDone(request.call))

    def _commit(self, command: m.Commit) -> None:
        call, snapshot = command.call, command.snapshot
        staged = self._staged.get(command.policy)
        if staged != snapshot:
            self._channel.send(m.CallDone(call, error=f"{snapshot} is not the staged snapshot ({staged})"))
            return
        del self._staged[command.policy]
        timing = self._core.commit(snapshot, command.policy, command.files, command.overwritten)
        # The reply to a commit in the step before, of another policy, goes out first.
        self._send_committed()
        self._committed = m.CallDone(call, timing=timing)
        self._calm = CALM_STEPS


def main() -> int:
    channel = Channel.of_child(m.command_decoder)
    transformers.utils.logging.disable_progress_bar()
    # A thread that stages weights must not hold the interpreter lock for a whole default interval between two kernels.
    sys.setswitchinterval(0.0005)
    with contextlib.suppress(Disconnected):
        channel.send(m.Imported())
        start = next(iter(channel.receive(None)))
        assert isinstance(start, m.Start)
        configure("engine", start.log)
        torch.set_num_threads(max(1, start.settings.threads))
        try:
            began = time.monotonic()
            core = EngineCore(
                Path(start.model_dir), start.settings, None if start.folder is None else Path(start.folder)
            )
            logger.info("%s is loaded, in %.1f s", start.model_dir, time.monotonic() - began)
        except Exception as error:
            # Report any error of the loader to the replica, on one line. Then this process ends.
            logger.debug("the engine cannot start", exc_info=True)
            reason = " ".join(str(error).split())
            channel.send(m.Failed(f"{type(error).__name__}: {reason}"))
            return 1
        gc.freeze()
        kind = kind_of(core.weights(), core.runner.model.decoder, Path(start.model_dir))
        channel.send(m.Ready(core.info(), core.copies.form(kind)))
        EngineLoop(channel, core, start.settings.threads).run()
    # Staging and disposal threads may be inside PyTorch. There is nothing left to save.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
