"""Which bodies the processes behind a gateway read: replicas and the Tinker front. The gateway's document tells of them.

Always holds: the imports are those of a gateway alone, without tokenizer or torch, and none is made before it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from midstream.core.wires import WIRES


def request_bodies() -> Mapping[str, type[msgspec.Struct]]:
    """By the path of the POST."""
    from midstream.replica.wire import bodies
    from midstream.tinker import json_losses, types

    inference = {path: bodies.BODIES[wire.name] for path, wire in WIRES.items()}
    losses = dict.fromkeys(("forward_backward", "forward"), json_losses.LossesBody)
    tinker: Mapping[str, type[msgspec.Struct]] = {**types.BODIES, **losses}
    return inference | {f"/api/v1/{path}": body for path, body in tinker.items()}
