"""`fireworks.Fireworks` and `AsyncFireworks`: completions and chat, plain and streamed, and what is said of accounts."""

from __future__ import annotations

import asyncio
from typing import Any

import fireworks
from fireworks import AsyncFireworks, Fireworks
from sdk import answer, arguments

given = arguments()
MESSAGES = [{"role": "user", "content": "Say something."}]
ROUTES = {"include_routing_matrix": True}


def made(api_key: str | None = None) -> Fireworks:
    return Fireworks(api_key=api_key or given.api_key, account_id="acme", base_url=given.url, max_retries=0)


def refusal(call: Any) -> dict[str, Any]:
    try:
        call()
    except fireworks.APIStatusError as error:
        return {"kind": type(error).__name__, "status": error.status_code, **error.body["error"]}
    return {"kind": "none"}


def plain(client: Fireworks) -> dict[str, Any]:
    completion = client.completions.create(
        model=given.model,
        prompt="Once",
        max_tokens=5,
        seed=1,
        logprobs=True,
        top_logprobs=2,
        return_token_ids=True,
        raw_output=True,
        perf_metrics_in_response=True,
        extra_body=ROUTES,
    )
    legacy = client.completions.create(model=given.model, prompt="Once", max_tokens=5, seed=1, logprobs=2)
    several = client.completions.create(model=given.model, prompt=[[1, 2, 3], [4, 5]], max_tokens=2, n=2)
    chat = client.chat.completions.create(
        model=f"accounts/acme/deployments/{given.deployment}",
        messages=MESSAGES,
        max_tokens=5,
        seed=1,
        logprobs=True,
        top_logprobs=2,
        return_token_ids=True,
        raw_output=True,
    )
    return {
        "completion": completion.to_dict(),
        "legacy": legacy.to_dict(),
        "several": several.to_dict(),
        "chat": chat.to_dict(),
    }


def streamed(client: Fireworks) -> dict[str, Any]:
    common = {"max_tokens": 5, "seed": 1, "logprobs": True, "return_token_ids": True, "stream": True}
    completion = client.completions.create(model=given.model, prompt="Once", extra_body=ROUTES, **common)
    chat = client.chat.completions.create(model=given.model, messages=MESSAGES, **common)
    return {
        "completion_chunks": [chunk.to_dict() for chunk in completion],
        "chat_chunks": [chunk.to_dict() for chunk in chat],
    }


async def concurrently() -> list[str]:
    async with AsyncFireworks(api_key=given.api_key, account_id="acme", base_url=given.url) as client:
        calls = [
            client.chat.completions.create(model=given.model, messages=MESSAGES, max_tokens=5, seed=1)
            for _ in range(8)
        ]
        return [answer.choices[0].message.content or "" for answer in await asyncio.gather(*calls)]


def headers(client: Fireworks) -> dict[str, str]:
    raw = client.completions.with_raw_response.create(
        model=given.model,
        prompt="Once",
        max_tokens=1,
        extra_headers={"x-multi-turn-session-id": "s-1", "x-request-id": "mine", "x-fireworks-anything": "1"},
    )
    return dict(raw.headers)


with made() as client:
    answer(
        {
            **plain(client),
            **streamed(client),
            "concurrent": asyncio.run(concurrently()),
            "headers": headers(client),
            "accounts": [account.to_dict() for account in client.accounts.list()],
            "account": client.accounts.get().to_dict(),
            "models": [model.to_dict() for model in client.models.list()],
            "model": client.models.get(given.model.rpartition("/")[2]).to_dict(),
            "wrong_key": refusal(lambda: made("guess").completions.create(model=given.model, prompt="x")),
            "wrong_model": refusal(
                lambda: client.completions.create(model="accounts/acme/models/x", prompt="x")
            ),
            "wrong_snapshot": refusal(
                lambda: client.completions.create(model=f"{given.model}@no", prompt="x")
            ),
            "unknown_field": refusal(
                lambda: client.completions.create(model=given.model, prompt="x", extra_body={"zap": 1})
            ),
        }
    )
