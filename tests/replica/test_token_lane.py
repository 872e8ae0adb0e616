"""The short way of a token: what a client gets is the same, byte for byte, as by the long way."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from replica_fakes import MODEL, FakeEngine, Running, ids, running

from midstream.core.resumption import HEADER_RESUMABLE
from midstream.core.types import GenerateRequest, GenerationEvent
from midstream.engine.base import AtOnce
from midstream.replica.response.token_lane import TokenLane

CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
TEXT = {"prompt": "hi", "logprobs": True}
BODIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "chat": ("/v1/chat/completions", CHAT, True),
    "chat of two choices": ("/v1/chat/completions", CHAT | {"n": 2}, True),
    "chat with routes": ("/v1/chat/completions", CHAT | {"include_routing_matrix": True}, True),
    "chat with routes and masks": (
        "/v1/chat/completions",
        CHAT | {"include_routing_matrix": True, "return_sampling_mask": True},
        True,
    ),
    "chat with routes and their weights": (
        "/v1/chat/completions",
        CHAT | {"include_routing_matrix": True, "return_router_weights": True},
        True,
    ),
    "chat of a session": ("/v1/chat/completions", CHAT | {"prompt_cache_key": "s"}, True),
    "chat without logprobs": ("/v1/chat/completions", CHAT | {"logprobs": False}, True),
    "completion without logprobs": (
        "/v1/completions",
        {"prompt": "hi", "n": 2, "return_token_ids": True, "prompt_cache_key": "s"},
        True,
    ),
    "chat with alternatives": ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, False),
    "chat with token ids": ("/v1/chat/completions", CHAT | {"return_token_ids": True}, True),
    "completion with token ids": ("/v1/completions", TEXT | {"return_token_ids": True}, True),
    "chat that repeats itself": ("/v1/chat/completions", CHAT | {"raw_output": True}, False),
    "completion": ("/v1/completions", TEXT, True),
    "completion with a stop string": ("/v1/completions", TEXT | {"stop": ["zz"]}, False),
    "completion with an echo": ("/v1/completions", TEXT | {"echo": True}, False),
    "completion in the legacy form": ("/v1/completions", TEXT | {"logprobs": 1}, False),
}


class Offering(FakeEngine):
    """Offers each event that ends nothing."""

    async def generate(
        self, request: GenerateRequest, at_once: AtOnce | None = None
    ) -> AsyncIterator[GenerationEvent]:
        async for event in super().generate(request):
            ends = event.finish is not None or event.error is not None
            if at_once is None or ends or not at_once(event):
                yield event


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("experts", [8, 300])
async def test_the_short_way_gives_the_bytes_of_the_long_way(
    name: str, experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body, short = BODIES[name]
    taken = 0
    data_of = TokenLane.data

    def counted(lane: TokenLane, event: GenerationEvent) -> bytes | None:
        nonlocal taken
        data = data_of(lane, event)
        taken += data is not None
        return data

    monkeypatch.setattr(TokenLane, "data", counted)
    said = []

    async def scenario(here: Running) -> None:
        # Half characters, characters at which clients split lines, and quotes.
        here.engine.reply = ids('h\u00e9llo "\u2028\u0085\U0001f642\\\n')
        asked = {"model": MODEL, "stream": True, "max_tokens": 40, "seed": 1, **body}
        answer = await here.http.post(path, json=asked, headers={HEADER_RESUMABLE: "1"})
        assert answer.status_code == 200, answer.text
        text = re.sub(r'"created":\d+', '"created":0', answer.text)
        said.append(re.sub(r'"id":"(chat)?cmpl-[0-9a-f]+"', '"id":""', text))

    for number, engine in enumerate((FakeEngine(experts=experts), Offering(experts=experts))):
        (directory := tmp_path / str(number)).mkdir()
        async with running(directory, engine) as here:
            await scenario(here)
    assert said[0] == said[1]
    assert (taken > 0) == short, taken
