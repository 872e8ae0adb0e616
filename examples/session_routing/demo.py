"""Trajectories of several turns over the Tinker SDK: one routing key each, and the replica that every turn ran on.

Each trajectory keeps one `seq_id` for all its turns, so its routing key `<sampling_session_id>:<seq_id>` and its replica
stay. The key that this client computes is compared with the one the server says it routed by, for every dispatch.

    python demo.py [--url http://127.0.0.1:8080] [--trajectories 4] [--turns 3]

Needs the `tinker` package (0.24 to 0.38); `make setup-tinker` makes environments with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
import urllib.request
from typing import Any

import tinker
from tinker import types
from tinker.lib.api_future_impl import _APIFuture
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType


def asked(args: argparse.Namespace, path: str) -> dict[str, Any]:
    request = urllib.request.Request(f"{args.url}/api/v1/{path}", headers={"X-API-Key": args.api_key})
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


async def sample(client: Any, request: types.SampleRequest) -> tuple[str, types.SampleResponse]:
    """One dispatch with a seq_id of our own, which SamplingClient.sample does not allow."""
    holder, started = client.holder, time.time()

    async def send() -> Any:
        with holder.aclient(ClientConnectionPoolType.SAMPLE) as connection:
            return await connection.sampling.asample(request=request, max_retries=0)

    future = await holder.run_coroutine_threadsafe(send())
    print(f"client: dispatch routing-key={request.sampling_session_id}:{request.seq_id}")
    answer: Any = _APIFuture(
        types.SampleResponse, holder, future, request_start_time=started, request_type="Sample"
    )
    return future.request_id, await answer.result_async()


async def trajectory(
    args: argparse.Namespace, client: Any, number: int, prompt: list[int]
) -> list[dict[str, Any]]:
    session, turns = client._sampling_session_id, []
    for turn in range(args.turns):
        request_id, response = await sample(
            client,
            types.SampleRequest(
                sampling_session_id=session,
                seq_id=number,
                prompt=types.ModelInput.from_ints(prompt),
                sampling_params=types.SamplingParams(max_tokens=args.max_tokens, seed=100 * number + turn),
            ),
        )
        told = await asyncio.to_thread(asked, args, f"midstream/requests/{request_id}")
        assert told["session_id"] == f"{session}:{number}", told
        turns.append({**told, "turn": turn, "prompt_tokens": len(prompt)})
        prompt = [*prompt, *response.sequences[0].tokens, *random.Random(turn).choices(range(32, 127), k=16)]
    return turns


async def run(args: argparse.Namespace, client: Any) -> int:
    rng = random.Random(0)
    prompts = [[rng.randrange(32, 127) for _ in range(96)] for _ in range(args.trajectories)]
    found = await asyncio.gather(*(trajectory(args, client, n, prompt) for n, prompt in enumerate(prompts)))
    stayed = True
    for number, turns in enumerate(found):
        replicas = sorted({turn["replica"] for turn in turns})
        stayed = stayed and len(replicas) == 1
        cached = ", ".join(f"{turn['cached_prompt_tokens']}/{turn['prompt_tokens']}" for turn in turns)
        print(
            f"trajectory {number}: key {turns[0]['session_id']} on {' '.join(replicas)}; cached prompt tokens {cached}"
        )
    print(
        f"{args.trajectories * args.turns} dispatches: client and server agree on every routing key; "
        + ("every trajectory stayed on one replica" if stayed else "TRAJECTORIES MOVED")
    )
    return 0 if stayed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--api-key", default=os.environ.get("TINKER_API_KEY", "tml-local"))
    parser.add_argument("--trajectories", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args()
    model = asked(args, "get_server_capabilities")["supported_models"][0]["model_name"]
    service = tinker.ServiceClient(base_url=args.url, api_key=args.api_key)
    client: Any = service.create_sampling_client(base_model=model)
    # 0.38 makes it in the background.
    client = client.result() if hasattr(client, "result") else client
    return asyncio.run(run(args, client))


if __name__ == "__main__":
    sys.exit(main())
