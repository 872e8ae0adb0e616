"""A client of the base weights, before and after others are loaded."""

from __future__ import annotations

import httpx
from sdk_common import answer, arguments, as_json, close, made, prompt_of, refusal, service
from tinker import types

given = arguments()
client = service(given)
sampler = made(client.create_sampling_client(base_model=given.base_model))
params = types.SamplingParams(max_tokens=4)


def sample() -> object:
    return as_json(sampler.sample(prompt_of(given.prompt), 1, params).result())


before = sample()
status = f"{given.url}/hot_load/v1/models/hot_load"
headers = {"x-api-key": given.api_key}
httpx.post(status, json={"identity": given.identity}, headers=headers, timeout=60).raise_for_status()
while True:
    replicas = httpx.get(status, headers=headers, timeout=60).json()["replicas"]
    if all(r["readiness"] and r["current_snapshot_identity"] == given.identity for r in replicas):
        break
answer({"before": before, "after": refusal(sample)})
close(client)
