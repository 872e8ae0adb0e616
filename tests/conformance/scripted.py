"""An endpoint without a server: answers by method and path, each what a test makes of it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from midstream.core.wires import HOT_LOAD_PATH
from midstream_conformance.endpoint import Endpoint

Json = dict[str, Any]
Answering = Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]]

MODEL = "accounts/a/models/m"
DEPLOYMENT = "accounts/a/deployments/d"


class Scripted:
    """`on`: (method, path) -> who answers; nobody is a 404. Every request is kept in `asked`."""

    def __init__(self) -> None:
        self.asked: list[httpx.Request] = []
        self.on: dict[tuple[str, str], Answering] = {
            ("GET", "/v1/models"): lambda _: listed({"id": MODEL, "deployment": DEPLOYMENT}),
            ("POST", "/v1/completions"): completed,
            ("GET", HOT_LOAD_PATH): lambda _: replicas(
                ("step-400", "done", "step-400"), ("step-400", "done", None)
            ),
            ("GET", f"/v1/{DEPLOYMENT}"): lambda _: httpx.Response(
                200, json={"hotLoadTransitionType": "ASYNC"}
            ),
        }

    def endpoint(self, **options: Any) -> Endpoint:
        transport = httpx.MockTransport(self._answer)
        return Endpoint(
            "http://scripted", **{"api_key": None, "deployment": None, "transport": transport, **options}
        )

    def of(self, method: str, path: str) -> list[httpx.Request]:
        """Those that were asked of it."""
        return [request for request in self.asked if (request.method, request.url.path) == (method, path)]

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answering = self.on.get((request.method, request.url.path))
        answer = refused(404, "there is nothing") if answering is None else answering(request)
        return answer if isinstance(answer, httpx.Response) else await answer


def refused(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "code": "no"}})


def listed(*entries: Json) -> httpx.Response:
    return httpx.Response(200, json={"object": "list", "data": entries})


def replicas(*rows: tuple[str, str, str | None]) -> httpx.Response:
    """Of the hot-load status: what serves, the stage, and the target of each."""
    shown = [
        {
            "current_snapshot_identity": serves,
            "readiness": True,
            "loading_state": {"stage": stage, "target_snapshot_identity": target},
            "midstream": {
                "replica": f"replica-{number}",
                "error": "it is cut short" if stage == "error" else None,
            },
        }
        for number, (serves, stage, target) in enumerate(rows)
    ]
    return httpx.Response(200, json={"replicas": shown})


def completed(
    request: httpx.Request, *, replica: str | None = "replica-0", label: str = "step-400", logprobs: bool = True,
    most: int = 10**6,
) -> httpx.Response:  # fmt: skip
    """A completion of as many tokens as it asks for, `most` at most."""
    body = json.loads(request.content)
    count = min(body["max_tokens"], most)
    entry = {"token": "a", "token_id": 20, "logprob": -1.0, "sampling_logprob": -1.0}
    choice: Json = {"index": 0, "text": "a" * count, "finish_reason": "length"}
    if logprobs and body.get("logprobs"):
        choice["logprobs"] = {"content": [entry] * count}
    usage = {"completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 0}}
    answer = {"model": f"{MODEL}@{label}", "choices": [choice], "usage": usage}
    headers = {} if replica is None else {"x-midstream-replica": replica}
    if not body.get("stream"):
        return httpx.Response(200, json=answer, headers=headers)
    events = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"
    return httpx.Response(200, text=events, headers={**headers, "content-type": "text/event-stream"})
