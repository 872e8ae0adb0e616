"""Notices that the engine core or a worker of a server hangs. `/health` reads a flag, and stays 200 then.

Owns: how long the core has been silent, how long it may be, and the call that it is asked by.
Always holds:
- A sampled token and an answer from the workers end the silence. Time in which our own event loop stood still is no silence.
- A core that has nothing to do is asked seldom, since each question keeps a core of every worker busy for a second: vLLM's
  look for the next one without a pause. Its silence begins when a question is due.
- The core gets more time only for what is known to hold it up: calls in `held_up`, and prompts where they are computed in one
  piece, which are slow on CPUs. Prompts that came after the silence began give it no more time.
- Nothing gives more time to a server that has a stopped process, as it computes nothing. One that is slow, or waits for
  others, has none.
- A verdict comes at most POLL_S after its time, and once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from math import inf

from midstream.engine.silence import SilenceTimer
from midstream.http.call import CallFailed

logger = logging.getLogger(__name__)

#: The core is asked when it has been silent for so long; one that has nothing to do, so long after its last answer.
POLL_S = 1.0
IDLE_POLL_S = 10.0
#: A call that got no answer by then is made again.
PROBE_S_MAX = 30.0
#: A core that answers, and gives no token that is due, is given up after so many times `silence_s_max`.
STALLED = 6.0
#: The least speed of prompts on a CPU, where a prompt is one step.
CPU_PROMPT_TOKENS_PER_S = 200.0


@dataclass(frozen=True)
class PendingWork:
    """What the core has to do. due: a request that has tokens already waits for its next one.

    prompt_tokens: of the prompts that no token has come for. idle: it has no request. stopped: a process of it is.
    """

    due: bool
    prompt_tokens: int
    idle: bool = False
    stopped: bool = False


class Silence:
    """Judges silence. Pure: `update` is given the time. who: the engine."""

    def __init__(
        self, silence_s_max: float, now: float, prompt_tokens_per_s: float = inf, who: str = "vLLM"
    ) -> None:
        self._who = who
        self._silence_s_max = silence_s_max
        self._prompt_tokens_per_s = prompt_tokens_per_s
        self._silence, self._tokens, self._stopped = SilenceTimer(now), SilenceTimer(now), SilenceTimer(now)
        # Since the last sign of life, and how long that may be until the next question.
        self._unasked, self._ask_after_s = SilenceTimer(now), POLL_S / 2
        self._held_up_s = 0.0
        self._prompt_s = 0.0

    def __repr__(self) -> str:
        return f"Silence({self.silent_s:.1f} s of {self.allowed_s:.1f} s)"

    @property
    def silent_s(self) -> float:
        return self._silence.silent_s

    @property
    def allowed_s(self) -> float:
        return self._silence_s_max + self._held_up_s + self._prompt_s

    @property
    def held_up(self) -> bool:
        return self._held_up_s > 0

    @property
    def to_be_asked(self) -> bool:
        """By the last update. A core that talks, or is held up, is not asked."""
        return self._question_due and not self.held_up

    @property
    def _question_due(self) -> bool:
        return self._unasked.silent_s >= self._ask_after_s

    def heard(self) -> None:
        """The workers have answered."""
        self._silence.heard()
        self._unasked.heard()

    def token(self, now: float) -> None:
        """What passed before `now` was no silence. Each read of a stream passes here, so it calls nothing."""
        self._silence.silent_s = self._tokens.silent_s = self._unasked.silent_s = 0.0
        self._silence.updated_at = self._tokens.updated_at = self._unasked.updated_at = now

    def hold_up(self, seconds: float) -> None:
        """Allow so much more; a negative number takes it back."""
        self._held_up_s += seconds
        self._tokens.heard()

    def update(self, now: float, work: PendingWork) -> str | None:
        """What is wrong, if anything is."""
        if not work.due:
            self._tokens.heard()
        self._unasked.update(now)
        self._ask_after_s = IDLE_POLL_S if work.idle else POLL_S / 2
        silent_s, stalled_s = self._silence.update(now), self._tokens.update(now)
        stopped_s = self._stopped.update(now)
        if not work.stopped:
            self._stopped.heard()
        if work.idle and not self._question_due:
            silent_s = self._silence.silent_s = 0.0
        if silent_s <= 1.5 * POLL_S:
            self._prompt_s = work.prompt_tokens / self._prompt_tokens_per_s
        if work.stopped and stopped_s >= self._silence_s_max:
            return f"{self._who} has had a stopped process for {stopped_s:.0f} s ({self._who.lower()}.silence_s_max)"
        if silent_s >= self.allowed_s:
            return f"{self._who}'s engine has been silent for {silent_s:.0f} s ({self._who.lower()}.silence_s_max)"
        if stalled_s >= STALLED * self.allowed_s:
            return f"{self._who}'s engine answers, and has sampled no token for {stalled_s:.0f} s"
        return None


class Watch:
    """probe: makes a call that the workers answer, within the time given. Any answer will do. Raises CallFailed without one.

    work: what there is to do now.
    """

    def __init__(
        self,
        silence_s_max: float,
        probe: Callable[[float], Awaitable[None]],
        work: Callable[[], PendingWork],
        who: str = "vLLM",
    ) -> None:
        self._who = who
        self._silence_s_max = silence_s_max
        self._probe = probe
        self._work = work
        self._silence = Silence(silence_s_max, 0.0, who=who)
        self._now: Callable[[], float] = float
        self._running = False

    @property
    def silent_s(self) -> float:
        return self._silence.silent_s if self._running else 0.0

    def token(self) -> None:
        """A sampled token has arrived."""
        self._silence.token(self._now())

    @contextlib.contextmanager
    def held_up(self, seconds: float) -> Iterator[None]:
        """A call is made that the core needs up to so many seconds for, and does nothing else meanwhile."""
        silence = self._silence
        silence.hold_up(seconds)
        try:
            yield
            silence.heard()
        finally:
            silence.hold_up(-seconds)

    async def run(self, *, on_cpu: bool) -> str:
        """Return what is wrong as soon as something is."""
        loop = asyncio.get_running_loop()
        speed = CPU_PROMPT_TOKENS_PER_S if on_cpu else inf
        self._now = loop.time
        silence = self._silence = Silence(self._silence_s_max, loop.time(), speed, self._who)
        asking: asyncio.Task[None] | None = None
        self._running = True
        try:
            while (problem := silence.update(loop.time(), self._work())) is None:
                if asking is None and silence.to_be_asked:
                    asking = asyncio.create_task(self._ask(silence), name="a question to the workers")
                pause_s = min(POLL_S, max(silence.allowed_s - silence.silent_s, 0.01))
                if asking is None:
                    await asyncio.sleep(pause_s)
                else:
                    await asyncio.wait((asking,), timeout=pause_s)
                    asking = None if asking.done() else asking
            return problem
        finally:
            self._running = False
            if asking is not None:
                asking.cancel()

    async def _ask(self, silence: Silence) -> None:
        try:
            await self._probe(PROBE_S_MAX)
        except CallFailed as error:
            logger.debug("the workers did not answer: %s", error)
            # Whatever refused the connection is not asked again at once.
            await asyncio.sleep(POLL_S / 2)
        else:
            silence.heard()
