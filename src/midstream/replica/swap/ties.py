"""What the swap of one policy has to do with the other policies of its replica. Pure.

Always holds: a swap without ties waits for nothing, and nothing follows from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from midstream.core.types import Desired, ResetPromptCache


async def _nothing(_desired: Desired) -> None:
    pass


@dataclass(frozen=True)
class Ties:
    """before_stage, before_switch: are waited for. waits: why before_stage waits; None: it does not. switched: the engine has
    switched, and what its cache policy comes to.

    over: of each before_switch that began, also if the engine did not switch. moved: the policy has made a step.
    """

    before_stage: Callable[[Desired], Awaitable[None]] = _nothing
    before_switch: Callable[[Desired], Awaitable[None]] = _nothing
    switched: Callable[[Desired, ResetPromptCache], None] = lambda desired, reset: None
    over: Callable[[], None] = lambda: None
    waits: Callable[[Desired], str | None] = lambda desired: None
    moved: Callable[[], None] = lambda: None


NO_TIES = Ties()
