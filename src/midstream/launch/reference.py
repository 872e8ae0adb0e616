"""What the processes behind a gateway read and answer, for its OpenAPI document: replicas and the Tinker front.

Always holds: the imports are those of a gateway alone, without tokenizer or torch, and none is made before it is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from midstream.core.wires import WIRES

#: Has the ENDPOINTS of the Tinker API. By name: no module of midstream imports the building.
FRONT = "midstream_tinker.app"

if TYPE_CHECKING:
    from midstream.api.openapi import Answers, Bodies
    from midstream.core.endpoints import Endpoint


def document() -> dict[str, Any]:
    """The OpenAPI document of a gateway with all that may be behind it."""
    from midstream.api import openapi

    return openapi.document(*behind())


def behind() -> tuple[Bodies, Answers, tuple[Endpoint, ...]]:
    """The arguments of openapi.document."""
    from midstream.replica.wire.answers import ANSWERS

    answers = {path: ANSWERS[wire.name] for path, wire in WIRES.items()}
    return request_bodies(), answers, importlib.import_module(FRONT).ENDPOINTS


def request_bodies() -> Bodies:
    """The request bodies of inference, by the path of the POST."""
    from midstream.replica.wire import bodies

    return {path: bodies.BODIES[wire.name] for path, wire in WIRES.items()}
