"""Rollouts by verifiers' client of texts, read with the server's record, as JSON. Runs in .venv-recipes/verifiers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

import verifiers.v1 as vf
from train import ENVIRONMENT, SAMPLING

from midstream.client.server import HotLoadServer
from midstream.integrations.verifiers import request_headers, sample_groups


async def main(url: str) -> None:
    env = vf.load_environment(vf.resolve_env_config(ENVIRONMENT))
    client = vf.EvalClientConfig(
        base_url=f"{url}/v1", api_key_var="MIDSTREAM_API_KEY", headers=request_headers()
    )
    with contextlib.closing(HotLoadServer(url)) as server:
        groups = await sample_groups(env, vf.ModelContext("tiny-moe", client, SAMPLING), server, 2)
    told = [
        {
            "prompt": bytes(i for i in one.token_ids[: one.prompt_length] if i < 256).decode(),
            "sampled": sum(one.loss_mask),
            "turns": len(one.turns),
            "labels": sorted({name for name in one.snapshots if name}),
            "logprobs": sum(logprob < 0 for logprob in one.logprobs),
            "reward": one.reward,
        }
        for group in groups
        for one in group
    ]
    print(json.dumps(told))


asyncio.run(main(*sys.argv[1:]))
