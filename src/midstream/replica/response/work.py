"""A checked request, as a generation gets it. Pure.

Always holds: nothing of it changes while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from midstream.core.types import GenerateRequest
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.text.toolformat import ToolFormat
from midstream.replica.wire.base import Wire


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
    #: How many seconds its file has to stay, at least.
    stay_s: float = 0.0
