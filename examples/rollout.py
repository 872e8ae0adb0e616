"""A two-turn rollout over the OpenAI SDK: affinity, logprobs, routes, and the snapshot of every token.

python examples/rollout.py [http://127.0.0.1:8080]
"""

from __future__ import annotations

import sys
from typing import Any

from openai import OpenAI

from midstream.client import snapshot_of
from midstream.client.decode import routes_of

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{url}/v1", api_key="unused")
(model,) = [m.id for m in client.models.list()]
messages: list[Any] = [{"role": "user", "content": "Write a few digits."}]

for turn in range(2):
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=16,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"include_routing_matrix": True},
        extra_headers={"x-multi-turn-session-id": "trajectory-1"},
    )
    text, snapshots, routes = "", [], []
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.logprobs is None:
                # The last chunk says why it ended.
                continue
            # [tokens of this chunk, moe_layers, top_k].
            matrices = routes_of(choice, top_k=2)
            routes.extend(matrices)
            snapshots.extend([snapshot_of(chunk.model)] * len(matrices))
        if chunk.usage and chunk.usage.prompt_tokens_details:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"turn {turn}: {chunk.usage.prompt_tokens} prompt tokens, {cached} from the cache")
    print(f"  {len(routes)} tokens, snapshots {sorted(set(map(str, snapshots)))}, text {text!r}")
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And a few more."},
    ]
