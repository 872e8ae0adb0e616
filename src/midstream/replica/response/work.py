"""What a generation is given: the replica that it runs on, and its own work.

Always holds: nothing of `Surroundings` belongs to one request, and nothing of `Work` changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from midstream.core.errors import AnotherBoot
from midstream.core.served_names import ServedNames
from midstream.core.types import GenerateRequest, ModelInfo
from midstream.engine.base import Engine
from midstream.replica.gate import Gate
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.text.chat import TextModel
from midstream.replica.text.toolformat import ToolFormat
from midstream.replica.wire.base import Wire


@dataclass(kw_only=True, eq=False, repr=False)
class Surroundings:
    """What a generation needs of the replica that it runs on. Nothing here belongs to one request."""

    engine: Engine
    info: ModelInfo
    text: TextModel
    names: ServedNames
    gate: Gate
    serving: Callable[[], str]
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    on_engine_death: Callable[[str], None]
    boot: str
    #: The boot that serves now.
    boot_now: Callable[[], str]
    #: What the engine calls the policy whose weights the requests take; "" is the deployment's own.
    policy: str = ""
    #: What the files of a snapshot are, comparable between replicas; "": not known.
    files_of: Callable[[str], str] = lambda snapshot: ""
    #: Held while a resumed stream replays its log: one stream at a time.
    replays: asyncio.Lock = field(default_factory=asyncio.Lock)

    def check_boot(self, meant: str | None = None) -> None:
        """Raises AnotherBoot when the engine of this boot is gone, or the request was meant for another boot."""
        now = self.boot_now()
        if not self.boot == now == (meant or now):
            raise AnotherBoot("the replica restarted after this request was sent to it; retry this request")


class Timings(msgspec.Struct):
    started: float
    #: The gate let the request in.
    admitted: float = 0.0
    first_token: float | None = None
    #: In the engine, of the choice that waited longest.
    queued_s: float | None = None


def echoed_tokens(checked: Checked, prompt: Prompt) -> int:
    size = len(prompt.token_ids)
    return size if checked.echo is None else min(checked.echo, size)


def scored_tokens(checked: Checked, prompt: Prompt) -> int:
    """Of how many of the last prompt tokens records are needed."""
    if checked.prompt_from is not None:
        # A request that generates nothing has at least one record to tell.
        return max(len(prompt.token_ids) - checked.prompt_from, int(checked.max_tokens == 0))
    # Without log-probabilities an echo shows nothing that the prompt itself does not say.
    return echoed_tokens(checked, prompt) if checked.logprobs else 0


@dataclass(frozen=True)
class Work:
    """A checked request and what the engine is to do for it: one engine request per prompt."""

    wire: Wire
    #: What the wire keeps of the request for its responses.
    details: Any
    checked: Checked
    prompts: list[Prompt]
    requests: list[GenerateRequest]
    seed: int
    tool_format: ToolFormat | None = None
    ignored: Sequence[str] = ()
    #: The body alone gives the prompts.
    whole: bool = True
