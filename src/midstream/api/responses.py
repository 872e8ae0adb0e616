"""Stored responses of OpenAI's Responses API: one as it was answered, its items, its end.

    GET /v1/responses/ID    DELETE /v1/responses/ID    GET /v1/responses/ID/input_items?limit=20&order=desc&after=ITEM

Always holds:
- A tenant sees and deletes its own responses only; those of others are a 404. They are those of the deployment that the
  headers name, else of the default one.
- The replica that the id names is asked first, then all others: a stream may have ended on another one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from midstream.api.answers import ResponseDeleted, ResponseItems
from midstream.api.trajectories import ask_replicas, views_of
from midstream.core.endpoints import Endpoint, choice, number, text
from midstream.core.errors import InvalidRequest, ReplicaUnavailable
from midstream.core.headers import HEADER_TENANT
from midstream.core.responses import ResponseAsked, ResponseFound, holder_of
from midstream.core.scopes import SAMPLE_MEANT
from midstream.fleet.registry import Deployments
from midstream.http.bodies import whole_number
from midstream.proxy.responses_route import view_named

PAGE_SIZE = 20
PAGE_SIZE_MAX = 100
_ONE = "/v1/responses/{id}"
_NOTHING = (b"null", b"false")

_found = msgspec.json.Decoder(ResponseFound)


class ResponsesApi:
    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments

    @Endpoint(
        "GET",
        _ONE,
        SAMPLE_MEANT,
        "Shows a stored response.",
        (choice("stream", "A stored one is not streamed again.", ("false",)),),
        answer_of="/v1/responses",
        prefixed=True,
    )
    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise InvalidRequest("stream: a stored response is not streamed again", param="stream")
        return Response(await self._ask(request, "response"), media_type="application/json")

    @Endpoint("DELETE", _ONE, SAMPLE_MEANT, "Deletes a stored response.", prefixed=True)
    async def delete(self, request: Request) -> ResponseDeleted:
        await self._ask(request, "delete")
        return ResponseDeleted(request.path_params["id"], "response", True)

    @Endpoint(
        "GET",
        _ONE + "/input_items",
        SAMPLE_MEANT,
        "Lists the input items of a stored response.",
        (
            number("limit", "How many items.", 1, PAGE_SIZE_MAX, PAGE_SIZE),
            choice("order", "The order of the items.", ("asc", "desc"), "desc"),
            text("after", "The id of the last item of the page before."),
        ),
        prefixed=True,
    )
    async def items(self, request: Request) -> ResponseItems:
        limit = whole_number(request, "limit", PAGE_SIZE, 1, PAGE_SIZE_MAX)
        order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order: must be asc or desc, got {order!r}", param="order")
        found: list[dict[str, Any]] = msgspec.json.decode(await self._ask(request, "items"))
        if order == "desc":
            found.reverse()
        if after is not None:
            at = next((i for i, item in enumerate(found) if item["id"] == after), None)
            if at is None:
                raise InvalidRequest(f"after: there is no item {after!r}", param="after")
            found = found[at + 1 :]
        page = found[:limit]
        return ResponseItems(
            object="list",
            data=page,
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=len(found) > limit,
        )

    async def _ask(self, request: Request, what: Literal["response", "items", "delete"]) -> bytes:
        """What a replica has of the response, as JSON. Raises NotFound, and ReplicaUnavailable where that is not known."""
        deployment, id = self._deployments.named(request.headers), str(request.path_params["id"])
        asked = msgspec.json.encode(ResponseAsked(request.headers.get(HEADER_TENANT, ""), id, what))
        views = views_of(deployment)
        first = view_named(views, holder_of(id))
        unknown: list[str] = []
        for some in ([first] if first else [], [view for view in views if view is not first]):
            answers, silent = await ask_replicas(deployment, "/replica/responses", asked, some)
            unknown += silent
            for _, answer in answers:
                found = bytes(_found.decode(answer).found)
                if found not in _NOTHING:
                    return found
        if unknown:
            raise ReplicaUnavailable(
                f"not known whether there is such a response: no answer of {', '.join(unknown)}"
            )
        raise self._deployments.missing(
            f"there is no response {id!r}; it was not stored, or was deleted, dropped or lost"
        )
