"""vLLM's and prime-rl's calls for LoRA adapters on a real server, in the order in which their clients send them."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from policy_helpers import Adapters, checked, sample
from serving import Server

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = list(range(5, 25))


@pytest.fixture
def server(adapter_server: Server) -> Server:
    return adapter_server


def call(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=120)


def load(server: Server, name: str, directory: Path | str, **more: Any) -> httpx.Response:
    return call(server, LOAD, lora_name=name, lora_path=str(directory), **more)


def models(server: Server) -> dict[str, Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        return {model.id: model for model in client.models.list()}


def test_an_adapter_is_loaded_listed_sampled_replaced_and_unloaded(
    server: Server, adapters: Adapters
) -> None:
    adapters.put(server, "sql-1", 1)
    adapters.put(server, "sql-2", 2)
    answer = load(server, "sql", server.bucket / "sql-1")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    # Every replica serves it by now.
    listed = models(server)["sql"]
    assert (listed.parent, listed.root) == (server.model, server.model.rpartition("/")[0] + "/sql")
    assert listed.max_model_len == models(server)[server.model].max_model_len
    (identity,) = set(listed.snapshots.values())
    adapters.made[identity] = adapters.made["sql-1"]
    checked(adapters, sample(server, "sql", PROMPT), identity, PROMPT)

    again = load(server, "sql", server.bucket / "sql-2")
    assert again.status_code == 400
    assert "The lora adapter 'sql' has already been loaded" in again.json()["error"]["message"]
    checked(adapters, sample(server, "sql", PROMPT), identity, PROMPT)

    assert load(server, "sql", (server.bucket / "sql-2").as_uri(), load_inplace=True).status_code == 200
    (newer,) = set(models(server)["sql"].snapshots.values())
    assert newer != identity
    adapters.made[newer] = adapters.made["sql-2"]
    # The prompt's KV of the weights before is not reused.
    checked(adapters, sample(server, "sql", PROMPT), newer, PROMPT)

    answer = call(server, UNLOAD, lora_name="sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert "sql" not in models(server)
    with pytest.raises(openai.NotFoundError):
        sample(server, "sql", PROMPT)
    # The name is free at once, and has nothing of the adapter before.
    assert load(server, "sql", server.bucket / "sql-1").status_code == 200
    (anew,) = set(models(server)["sql"].snapshots.values())
    adapters.made[anew] = adapters.made["sql-1"]
    checked(adapters, sample(server, "sql", PROMPT), anew, PROMPT)
    assert call(server, UNLOAD, lora_name="sql").status_code == 200


def test_prime_rl_loads_each_step_under_one_name(server: Server, adapters: Adapters) -> None:
    """It rewrites one directory, and the answer to its call is all that it waits for."""
    directory = server.bucket / "broadcast" / "adapter"
    for step in range(3):
        adapters.make(f"prime-{step}", 10 + step)
        shutil.rmtree(directory, ignore_errors=True)
        adapters.write(f"prime-{step}", directory)
        answer = call(server, "/load_lora_adapter", lora_name="prime", lora_path=str(directory))
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        (identity,) = set(models(server)["prime"].snapshots.values())
        adapters.made[identity] = adapters.made[f"prime-{step}"]
        checked(adapters, sample(server, "prime", PROMPT), identity, PROMPT)


def test_many_are_loaded_at_once(server: Server, adapters: Adapters) -> None:
    names = [f"many-{n}" for n in range(6)]
    for n, name in enumerate(names):
        adapters.put(server, name, 20 + n)

    async def main() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            bodies = [{"lora_name": name, "lora_path": str(server.bucket / name)} for name in names]
            return [a.status_code for a in await asyncio.gather(*(client.post(LOAD, json=b) for b in bodies))]

    assert asyncio.run(main()) == [200] * len(names)
    for name in names:
        (identity,) = set(models(server)[name].snapshots.values())
        adapters.made[identity] = adapters.made[name]
        checked(adapters, sample(server, name, PROMPT), identity, PROMPT)
        assert call(server, UNLOAD, lora_name=name).status_code == 200


def test_an_adapter_is_unloaded_under_its_streams(server: Server, adapters: Adapters) -> None:
    adapters.put(server, "busy-1", 30)
    assert load(server, "busy", server.bucket / "busy-1").status_code == 200
    asked = {"model": "busy", "prompt": PROMPT, "max_tokens": 300, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as stream:
        assert stream.status_code == 200, stream.read()
        lines = stream.iter_lines()
        first = next(lines)
        assert call(server, UNLOAD, lora_name="busy").status_code == 200
        events = [line.removeprefix("data: ") for line in (first, *lines) if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert len(chunks) >= 300
    assert len({chunk["model"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_path": "BUCKET/bad-1"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x", "lora_path": "BUCKET/nowhere"}, 404, "lora_path: no adapter is there"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "write the adapter into the deployment's bucket"),
        ({"lora_name": "x", "lora_path": "BUCKET/../x"}, 400, "lora_path"),
        ({"lora_name": "a/b", "lora_path": "BUCKET/bad-1"}, 400, "a name has at most 128 letters"),
        ({"lora_name": "tiny", "lora_path": "BUCKET/bad-1", "rank": 3}, 400, "field: 'rank'"),
        ({"lora_name": "x", "lora_path": "BUCKET/bad-1"}, 400, "use_dora is True, which is not served"),
    ],
)
def test_a_load_that_cannot_be_says_why_and_leaves_nothing(
    server: Server, adapters: Adapters, body: dict[str, Any], status: int, says: str
) -> None:
    if not (server.bucket / "bad-1").exists():
        adapters.put(server, "bad-1", 40)
        config = server.bucket / "bad-1" / "adapter_config.json"
        config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    before = httpx.get(f"{server.url}/v1/{server.deployment}/policies").json()
    asked = {name: str(value).replace("BUCKET", str(server.bucket)) for name, value in body.items()}
    answer = call(server, LOAD, **asked)
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]
    assert httpx.get(f"{server.url}/v1/{server.deployment}/policies").json() == before
    if "lora_name" in body and "/" not in body["lora_name"]:
        gone = call(server, UNLOAD, lora_name=body["lora_name"])
        assert (gone.status_code, "cannot be found" in gone.text) == (404, True)
