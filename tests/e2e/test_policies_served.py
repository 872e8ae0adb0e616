"""Many policies on one server: adapters published, sampled side by side, switched under streams, forked, ended, lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from policy_helpers import DEADLINE_S, HOT_LOAD, Adapters, checked, load, ready, sample, signalled
from serving import Server, words_of


@pytest.fixture
def server(adapter_server: Server) -> Server:
    return adapter_server


def test_adapters_are_sampled_side_by_side_and_each_is_itself(server: Server, adapters: Adapters) -> None:
    for seed in range(3):
        adapters.put(server, f"side-{seed}", seed)
        load(server, f"side-{seed}", f"team-{seed}")
    prompt = list(range(5, 25))
    found: dict[str, Any] = {}

    def ask(model: str) -> None:
        found[model] = sample(server, model, prompt)

    full = server.model.rpartition("/")[0] + "/team-0"
    models = ["team-0", "team-1", "team-2", server.model, full]
    threads = [threading.Thread(target=ask, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    of = {model: f"side-{model[-1]}" for model in models if model != server.model}
    sampled = {m: checked(adapters, found[m], of.get(m, "base"), prompt) for m in models}
    assert sampled["team-0"] == sampled[full]
    assert len({tuple(ids) for ids in sampled.values()}) == 4
    assert found["team-0"].model == f"{full}@side-0"
    # SGLang's clients name an adapter by a field of their own.
    options = {"temperature": 1.0, "max_new_tokens": 12, "sampling_seed": 3}
    for adapter in ("team-0", ["team-0"], "team-0@side-0"):
        body = {"input_ids": prompt, "lora_path": adapter, "sampling_params": options}
        generated = httpx.post(f"{server.url}/generate", json=body, timeout=DEADLINE_S).json()
        assert generated["output_ids"] == sampled["team-0"]
    body["lora_path"] = "nobody"
    assert httpx.post(f"{server.url}/generate", json=body).status_code == 404


def test_a_switch_of_one_policy_crosses_its_own_streams_only(server: Server, adapters: Adapters) -> None:
    for identity, seed in (("run-a", 11), ("run-b", 12)):
        adapters.put(server, identity, seed)
    load(server, "run-a", "moving")
    load(server, "run-a", "still")
    labels: dict[str, list[str]] = {}
    begun = {policy: threading.Event() for policy in ("moving", "still")}

    def stream(policy: str) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            chunks = client.completions.create(
                model=policy, prompt=list(range(9)), max_tokens=400, temperature=1.0, seed=1, stream=True
            )
            labels[policy] = []
            for chunk in chunks:
                labels[policy].append(chunk.model.partition("@")[2])
                begun[policy].set()

    threads = [threading.Thread(target=stream, args=(policy,)) for policy in begun]
    for thread in threads:
        thread.start()
    for event in begun.values():
        assert event.wait(DEADLINE_S)
    load(server, "run-b", "moving")
    for thread in threads:
        thread.join()
    assert set(labels["still"]) == {"run-a"}
    assert labels["moving"][0] == "run-a"
    assert labels["moving"] == sorted(labels["moving"])
    answer = sample(server, "moving", [1, 2, 3])
    checked(adapters, answer, "run-b", [1, 2, 3])


def test_a_policy_is_forked_frozen_and_ended(server: Server, adapters: Adapters) -> None:
    adapters.put(server, "parent-1", 21)
    adapters.put(server, "parent-2", 22)
    load(server, "parent-1", "learner")
    policies = f"{server.url}/v1/{server.deployment}/policies"
    made = httpx.post(policies, json={"policy": "opponent", "from": "learner", "frozen": True})
    assert made.status_code == 200, made.text
    ready(server, "parent-1", "opponent")
    load(server, "parent-2", "learner")
    prompt = [4, 5, 6, 7]
    checked(adapters, sample(server, "opponent", prompt), "parent-1", prompt)
    checked(adapters, sample(server, "learner", prompt), "parent-2", prompt)
    refused = signalled(server, "parent-2", "opponent")
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "policy")
    by_header = {"fireworks-deployment": "opponent"}
    body = {"identity": "parent-2"}
    refused = httpx.post(server.url + HOT_LOAD, json=body, headers=by_header, timeout=120)
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "policy")
    for call in ("/pause", "/abort_request", "/reset_prefix_cache"):
        told = httpx.post(server.url + call, json={}, headers=by_header, timeout=120)
        assert (told.status_code, "is a policy" in told.text) == (400, True), (call, told.text)
    names = [one["policy"] for one in httpx.get(policies).json()["policies"]]
    assert {"learner", "opponent"} <= set(names)
    assert httpx.delete(f"{policies}/opponent").status_code == 200
    until = time.monotonic() + DEADLINE_S
    while httpx.get(f"{policies}/opponent").status_code != 404:
        assert time.monotonic() < until
        time.sleep(0.02)
    with pytest.raises(openai.NotFoundError):
        sample(server, "opponent", prompt)
    # Made again with other weights, it has none of the old KV.
    load(server, "parent-2", "opponent")
    checked(adapters, sample(server, "opponent", prompt), "parent-2", prompt)


def test_a_replica_that_dies_has_all_policies_again(server: Server, adapters: Adapters) -> None:
    adapters.put(server, "lives", 31)
    load(server, "lives", "survivor")
    engines = [pid for pid in server.children() if "midstream.engine.embedded.loop" in words_of(pid)]
    os.kill(engines[0], signal.SIGKILL)
    prompt = [3, 1, 4, 1, 5]
    until = time.monotonic() + DEADLINE_S
    served = set()
    while len(served) < 2:
        with contextlib.suppress(openai.InternalServerError):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
                raw = client.completions.with_raw_response.create(
                    model="survivor",
                    prompt=prompt,
                    max_tokens=4,
                    logprobs=0,
                    extra_body={"return_token_ids": True},
                )
            checked(adapters, raw.parse(), "lives", prompt)
            served.add(raw.headers["x-midstream-replica"])
        assert time.monotonic() < until
    ready(server, "lives", "survivor")


@pytest.mark.parametrize("case", ["shape", "module", "dora", "escape", "unknown"])
def test_a_bad_adapter_is_named_and_what_served_goes_on(
    server: Server, adapters: Adapters, tmp_path: Path, case: str
) -> None:
    policy = f"bad-{case}"
    adapters.put(server, f"good-{case}", 41)
    load(server, f"good-{case}", policy)
    directory = server.bucket / f"wrong-{case}"
    shutil.copytree(server.bucket / f"good-{case}", directory)
    config = directory / "adapter_config.json"
    text = config.read_text()
    expected = ""
    if case == "shape":
        config.write_text(text.replace('"r": 8', '"r": 4'))
        expected = "has rank 8, adapter_config.json says 4"
    elif case == "module":
        config.write_text(text.replace('"q_proj"', '"q_proj", "lm_head"'))
        expected = "the adapter has nothing for lm_head"
    elif case == "dora":
        config.write_text(text.replace('"use_dora": false', '"use_dora": true'))
        answer = signalled(server, f"wrong-{case}", policy)
        assert (answer.status_code, "use_dora is True, which is not served" in answer.text) == (400, True)
    elif case == "escape":
        answer = signalled(server, "../outside", policy)
        assert answer.status_code == 400
        expected = ""
    else:
        assert signalled(server, "not-there", policy).status_code == 400
        assert signalled(server, "not-there", "never-made").status_code == 400
        made = httpx.get(f"{server.url}/v1/{server.deployment}/policies").json()["policies"]
        assert "never-made" not in [one["policy"] for one in made]
    if expected:
        assert signalled(server, f"wrong-{case}", policy).status_code == 200
        until = time.monotonic() + DEADLINE_S
        while True:
            rows = httpx.get(server.url + HOT_LOAD, params={"policy": policy}).json()["replicas"]
            told = [str(row) for row in rows]
            if all(expected in one for one in told):
                break
            assert time.monotonic() < until, told
            time.sleep(0.02)
    prompt = [7, 7, 7]
    checked(adapters, sample(server, policy, prompt), f"good-{case}", prompt)
