"""A key that may not publish and one that may not sample: what the client's user sees, and how often the client asked."""

from __future__ import annotations

from typing import Any

import fireworks
import httpx
from sdk import answer, arguments, manager, samples

given = arguments()
asked: list[str] = []
send = httpx.Client.send


def counted(self: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
    asked.append(f"{request.method} {request.url.path}")
    return send(self, request, **options)


httpx.Client.send = counted  # type: ignore[method-assign]


def refusal() -> dict[str, Any] | None:
    try:
        manager(given).hotload_and_wait(
            deployment_id=given.deployment,
            base_model=given.model,
            snapshot_identity=given.identity,
            timeout_seconds=60,
        )
    except httpx.HTTPStatusError as error:
        return {"status": error.response.status_code, **error.response.json()["error"]}
    return None


def completion() -> str | None:
    client = fireworks.Fireworks(api_key=given.api_key, base_url=given.url)
    try:
        client.completions.create(model=given.model, prompt="x", max_tokens=2)
    except fireworks.PermissionDeniedError as error:
        return str(error)
    return None


signalled = refusal()
signals, asked[:] = [line for line in asked if line.startswith("POST")], []
completed = completion()
result = {"signalled": signalled, "signals": signals, "completed": completed, "completions": list(asked)}
answer(result | {"samples": samples(given, [65, 66], n=1, max_tokens=2) if completed is None else []})
