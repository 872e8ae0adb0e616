"""The engine process: take commands, step, report; nothing else runs here.

Owns: the loop of one EngineCore. Started by process.py with one end of a socket pair.
Always holds: weights change only between two steps, in this loop; the process ends when the socket closes, so it never
outlives its replica.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import transformers

from midstream.engine.embedded import messages as m
from midstream.engine.embedded.background import Background, Job
from midstream.engine.embedded.compiling import GrammarQueue
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.digest import Digester
from midstream.engine.embedded.loading import LoadedModel
from midstream.engine.embedded.runner import dispose
from midstream.engine.embedded.staging import Staged, Stager
from midstream.ipc import Channel, Disconnected
from midstream.types import GenerateRequest, SwapTiming

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
#: After a switch the first steps have the machine for themselves; then what was replaced goes, and digests are computed.
CALM_STEPS = 3


class Worker:
    def __init__(self, channel: Channel[m.Command], core: EngineCore) -> None:
        self._channel = channel
        self._core = core
        self._paused = False
        self._staged: str | None = None
        self._background = Background()
        self._stager = Stager(core.stage, self._after_calm, self._retire)
        self._digester = Digester(self._after_calm)
        self._grammars = GrammarQueue(core.prepare_grammar)
        self._committed: m.Done | None = None  # to be sent after what the next step gave
        self._calm = 0  # steps to come before jobs begin
        self._jobs: list[Job] = []  # that wait for them
        self._reported_at = 0.0

    def run(self) -> None:
        while True:
            for command in self._channel.receive(self._wait_s()):
                self._handle(command)
            self._add_compiled()
            self._answer(self._stager.take())
            for done in self._digester.take():
                self._channel.send(done)
            self._begin_jobs()
            self._step()

    def _step(self) -> None:
        """A step, if there is one to do, and what it gave; then a commit is answered. The replica has much to do when it hears
        of it, and the first tokens of the new weights would have to wait for that."""
        outputs = [] if self._paused else self._core.step()
        self._calm -= 1
        now = time.monotonic()
        if outputs or now - self._reported_at >= STATS_INTERVAL_S:
            self._reported_at = now
            self._channel.send(m.Events(outputs, self._core.stats()))
        if self._committed is not None:
            self._channel.send(self._committed)
            self._committed = None

    def _after_calm(self, job: Job) -> None:
        self._jobs.append(job)

    def _retire(self, model: LoadedModel) -> None:
        self._after_calm(lambda: dispose([model]))

    def _begin_jobs(self) -> None:
        """Those that wait, once the steps after a switch are done or there are none to do."""
        if self._calm > 0 and not self._core.idle and not self._paused:
            return
        for model in self._core.take_retired():
            self._retire(model)
        for job in self._jobs:
            self._background.submit(job)
        self._jobs = []

    def _wait_s(self) -> float:
        if not self._paused and not self._core.idle:
            return 0.0
        busy = self._stager.busy or self._digester.pending or self._grammars.busy
        return 0.001 if busy else STATS_INTERVAL_S

    def _handle(self, command: m.Command) -> None:
        match command:
            case m.Generate(request):
                if self._core.knows_grammar(request):
                    self._add(request)
                else:
                    self._grammars.put(request)
            case m.Abort(request_id, index):
                if self._grammars.holds(request_id):
                    self._grammars.abort(request_id, index)
                else:
                    self._core.abort(request_id, index)
            case m.StageSnapshot():
                self._drop_staged()  # one snapshot beside the serving one, never two
                self._answer(self._stager.submit(command))
            case m.DropStaged():
                self._drop_staged()
                self._answer(self._stager.drop())
            case m.Commit(call, snapshot):
                self._commit(call, snapshot)
            case m.DigestWeights(call):
                self._digester.submit(call, self._core.weights())
            case m.Pause(call):
                self._paused = True
                self._channel.send(m.Done(call))
            case m.Resume(call):
                self._paused = False
                self._channel.send(m.Done(call))

    def _add(self, request: GenerateRequest) -> None:
        refused = self._core.add(request)
        if refused:
            self._channel.send(m.Events(refused, self._core.stats()))

    def _add_compiled(self) -> None:
        for request, ended in self._grammars.take():
            self._add(request)
            for index in ended:
                self._core.abort(request.request_id, index)

    def _drop_staged(self) -> None:
        self._staged = None
        self._core.set_staged(None)
        for model in self._core.take_retired():
            self._retire(model)

    def _answer(self, staged: list[Staged]) -> None:
        for request, result in staged:
            if isinstance(result, str):
                self._channel.send(m.Done(request.call, error=result))
                continue
            self._core.set_staged(result)
            self._staged = request.snapshot
            self._channel.send(m.Done(request.call))

    def _commit(self, call: int, snapshot: str) -> None:
        if self._staged != snapshot:
            self._channel.send(m.Done(call, error=f"{snapshot} is not the staged snapshot ({self._staged})"))
            return
        self._staged = None
        timing: SwapTiming = self._core.commit(snapshot)
        self._calm = CALM_STEPS
        self._committed = m.Done(call, timing=timing)


def main(fd: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the replica decides when the engine ends
    transformers.utils.logging.disable_progress_bar()
    # A thread that stages weights must not hold the interpreter for a whole default slice between two kernels.
    sys.setswitchinterval(0.0005)
    channel = Channel(socket.socket(fileno=fd), m.command_decoder)
    with contextlib.suppress(Disconnected):
        start = next(iter(channel.receive(None)))
        assert isinstance(start, m.Start)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
        torch.set_num_threads(max(1, start.settings.threads))
        try:
            core = EngineCore(Path(start.model_dir), start.settings)
        except Exception as error:
            # Whatever the loader raises is told to the replica; then this process ends.
            logging.getLogger(__name__).debug("the engine cannot start", exc_info=True)
            reason = " ".join(str(error).split())  # one line, whatever the library wrote
            channel.send(m.Failed(f"{type(error).__name__}: {reason}"))
            return 1
        gc.freeze()
        channel.send(m.Ready(core.info()))
        Worker(channel, core).run()
    # Staging and disposal threads may be inside torch; there is nothing left to save.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
