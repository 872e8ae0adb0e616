"""What the processes behind a gateway read and answer: replicas and the Tinker front. The gateway's document tells of it.

Always holds: the imports are those of a gateway alone, without tokenizer or torch, and none is made before it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from midstream.core.wires import WIRES

if TYPE_CHECKING:
    from midstream.api.openapi import Answers, Bodies


def behind() -> tuple[Bodies, Answers]:
    """By the path of the POST: request bodies, and successful answers where their types are known."""
    from midstream.replica.wire.answers import ANSWERS

    return request_bodies(), {path: ANSWERS[wire.name] for path, wire in WIRES.items()}


def request_bodies() -> Bodies:
    """By the path of the POST."""
    from midstream.replica.wire import bodies
    from midstream.tinker import json_losses, types

    inference = {path: bodies.BODIES[wire.name] for path, wire in WIRES.items()}
    losses = dict.fromkeys(("forward_backward", "forward"), json_losses.LossesBody)
    tinker: Mapping[str, type[msgspec.Struct]] = {**types.BODIES, **losses}
    return inference | {f"/api/v1/{path}": body for path, body in tinker.items()}
