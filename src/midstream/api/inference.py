"""The paths of inference, as endpoints: the data path answers them, and the document shows them. Pure.

Always holds: they are those of core/wires.py.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from midstream.core.endpoints import JSON, JSON_OR_EVENTS, Endpoint, serves
from midstream.core.errors import InvalidRequest
from midstream.core.scopes import SAMPLE_MEANT
from midstream.core.wires import INFERENCE


class InferencePaths:
    @serves(
        *(
            Endpoint(
                "POST",
                path,
                SAMPLE_MEANT,
                wire.summary,
                kinds=JSON_OR_EVENTS if wire.streams else JSON,
                prefixed=wire.prefixed,
                errors="anthropic" if wire.errors == "anthropic" else "openai",
            )
            for path, wire in INFERENCE.items()
        )
    )
    async def refuse(self, request: Request) -> Response:
        raise InvalidRequest("inference requests are served by the data path")
