"""LoRA adapters in a real vLLM server, each a policy: each is itself beside the others, whatever is swapped, ended or killed.

Numbers are in float32 and compared with PEFT's own model: what was measured is 5e-6, and another adapter makes a nat.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from dense_models import write_dense
from policy_helpers import HOT_LOAD, Adapters, checked, load, ready, sample, signalled
from vllm_bed import BLOCK, DEADLINE_S, VENV, Bed, until
from vllm_bed import load as load_model
from vllm_streams import Stream, client, expected_logprobs, random_prompt

from adapter_helpers import ATTENTION, MLP, adapted  # isort: skip

PLACES = 4
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def adapters(dense: Path) -> Adapters:
    return Adapters(dense)


def put(bed: Bed, adapters: Adapters, identity: str, seed: int, **config: Any) -> None:
    asked = {"target_modules": ATTENTION + MLP, "target_parameters": None, **config}
    adapters.put(bed.server, identity, seed, **asked)


@pytest.fixture
def policies(lora_bed: Bed, adapters: Adapters) -> Iterator[Callable[..., None]]:
    """policies(name=(identity, seed), ...): adapters that are served. They are ended afterwards, so that there is room."""
    made: set[str] = set()

    def make(**wanted: tuple[str, int]) -> None:
        for name, (identity, seed) in wanted.items():
            put(lora_bed, adapters, identity, seed)
            made.add(name)
            load(lora_bed.server, identity, name)

    yield make
    for name in made:
        end(lora_bed, name)


def end(bed: Bed, name: str) -> None:
    one = f"{bed.server.url}/v1/{bed.server.deployment}/policies/{name}"
    httpx.delete(one)
    until(lambda: httpx.get(one).status_code == 404, lambda: f"{name} does not end")


def assert_recomputed(
    streams: dict[str, Stream], labels: dict[str, list[str]], models: dict[str, Any]
) -> None:
    """By model: each stream is whole, crossed what it should, and every number is that of its label over the KV before."""
    for name, stream in streams.items():
        assert stream.whole, (name, stream.error, stream.finish, len(stream.tokens))
        assert stream.labels == labels[name]
        expected = expected_logprobs(stream, models)
        off = np.abs(np.subtract([logprob for _, logprob, _ in stream.tokens], expected))
        assert off.max() <= TOLERANCE, (name, off.argmax(), off.max())


def run_with(bed: Bed, streams: dict[str, Stream], happen: Callable[[], Any]) -> None:
    """streams: by model, to their ends. `happen` is called in a thread once each of them has ten tokens."""

    async def main() -> None:
        begun = asyncio.Event()

        def moved() -> None:
            if all(len(stream.tokens) >= 10 for stream in streams.values()):
                begun.set()

        async with (
            asyncio.timeout(2 * DEADLINE_S),
            client(bed.server.url) as http,
            asyncio.TaskGroup() as group,
        ):
            for model, stream in streams.items():
                group.create_task(stream.run(http, model, moved))
            await begun.wait()
            await asyncio.to_thread(happen)

    asyncio.run(main())


def test_adapters_and_the_base_are_sampled_side_by_side_and_each_is_itself(
    lora_bed: Bed, adapters: Adapters, policies: Callable[..., None]
) -> None:
    policies(red=("red-1", 1), blue=("blue-1", 2), green=("green-1", 3))
    prompt = random_prompt("side by side", 2 * BLOCK + 9)
    of = {"red": "red-1", "blue": "blue-1", "green": "green-1", lora_bed.model: "base"}
    cached = []
    # In the second round every prompt is cached, by each for itself.
    for _ in range(2):
        found: dict[str, Any] = {}

        def ask(model: str, found: dict[str, Any] = found) -> None:
            found[model] = sample(lora_bed.server, model, prompt, max_tokens=24)

        threads = [threading.Thread(target=ask, args=(model,)) for model in of]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sampled = [checked(adapters, found[model], identity, prompt) for model, identity in of.items()]
        assert len({tuple(ids) for ids in sampled}) == len(of)
        cached.append([found[model].usage.prompt_tokens_details.cached_tokens for model in of])
    assert cached == [[0] * len(of), [2 * BLOCK] * len(of)]


def test_running_streams_cross_a_swap_of_their_policy_and_cached_kv_is_never_stale(
    lora_bed: Bed, adapters: Adapters, policies: Callable[..., None]
) -> None:
    policies(moving=("run-a", 11), still=("still-a", 12))
    put(lora_bed, adapters, "run-b", 13)
    prompt = random_prompt("swapped", 2 * BLOCK + 5)
    after: list[Any] = []

    def swap() -> None:
        answer = signalled(lora_bed.server, "run-b", "moving", reset_prompt_cache="none")
        assert answer.status_code == 200, answer.text
        ready(lora_bed.server, "run-b", "moving")
        after.append(sample(lora_bed.server, "moving", prompt))

    streams = {
        model: Stream(list(prompt), 1200, f"swapped {model}", seed=5)
        for model in ("moving", "still", lora_bed.model)
    }
    run_with(lora_bed, streams, swap)
    of = {"moving": ["run-a", "run-b"], "still": ["still-a"], lora_bed.model: ["base"]}
    if "policy_crossing" not in lora_bed.card["features"]:
        assert VENV != ".venv-vllm", lora_bed.card["why"]["policy_crossing"]
        of["moving"] = ["run-a"]
    assert_recomputed(streams, of, adapters.made | {"base": adapters.module})
    # The same prompt under the new adapter, whatever the old one cached.
    checked(adapters, after[0], "run-b", prompt)
    assert after[0].usage.prompt_tokens_details.cached_tokens == 0
    again = sample(lora_bed.server, "moving", prompt)
    checked(adapters, again, "run-b", prompt)
    assert again.usage.prompt_tokens_details.cached_tokens == 2 * BLOCK


def test_prompts_are_scored_by_their_policy(
    lora_bed: Bed, adapters: Adapters, policies: Callable[..., None]
) -> None:
    policies(scored=("scored-1", 21), other=("other-1", 22))
    prompt = random_prompt("scored", 40)
    for model, identity in (("scored", "scored-1"), ("other", "other-1"), (lora_bed.model, "base")):
        answer = sample(lora_bed.server, model, prompt, max_tokens=1, echo=True)
        got = answer.choices[0].logprobs.token_logprobs[1 : len(prompt)]
        off = np.abs(np.subtract(got, adapters.logprobs(identity, prompt).numpy()))
        assert off.max() <= TOLERANCE


def test_what_vllm_does_not_apply_is_refused_by_name_and_what_served_goes_on(
    lora_bed: Bed, adapters: Adapters, policies: Callable[..., None]
) -> None:
    policies(kept=("good", 31))
    prompt = [7, 7, 7]
    bad: dict[str, tuple[dict[str, Any], str]] = {
        "rank": ({"r": 16}, "LoRA rank 16 is greater than max_lora_rank 8"),
        "head": (
            {"target_modules": ["lm_head"]},
            "lm_head: this vLLM was not seen to apply an adapter there",
        ),
    }
    for name, (config, expected) in bad.items():
        put(lora_bed, adapters, f"wrong-{name}", 32, **config)
        assert signalled(lora_bed.server, f"wrong-{name}", "kept").status_code == 200

        def rows() -> Any:
            return httpx.get(lora_bed.server.url + HOT_LOAD, params={"policy": "kept"}).json()["replicas"]

        def told(expected: str = expected, rows: Callable[[], Any] = rows) -> bool:
            return expected in str(rows())

        until(told, rows)
        checked(adapters, sample(lora_bed.server, "kept", prompt), "good", prompt)


def test_policies_beyond_vllms_places_are_refused_and_an_ended_one_makes_room(
    lora_bed: Bed, adapters: Adapters, policies: Callable[..., None]
) -> None:
    policies(**{f"place-{i}": (f"place-{i}", 40 + i) for i in range(PLACES - 1)})
    put(lora_bed, adapters, "one-more", 50)
    assert signalled(lora_bed.server, "one-more", "late").status_code == 200

    def rows() -> Any:
        return httpx.get(lora_bed.server.url + HOT_LOAD, params={"policy": "late"}).json()["replicas"]

    until(lambda: "--max-loras" in str(rows()), rows)
    end(lora_bed, "place-0")
    with pytest.raises(openai.NotFoundError):
        sample(lora_bed.server, "place-0", [1, 2, 3])
    load(lora_bed.server, "one-more", "late")
    checked(adapters, sample(lora_bed.server, "late", [1, 2, 3]), "one-more", [1, 2, 3])
    end(lora_bed, "late")


def test_a_replica_whose_vllm_was_killed_has_all_policies_again(
    lora_bed: Bed, adapters: Adapters, policies: Callable[..., None]
) -> None:
    policies(one=("one-1", 61), two=("two-1", 62))
    prompt = random_prompt("killed", 2 * BLOCK + 1)
    of = {"one": "one-1", "two": "two-1", lora_bed.model: "base"}
    for model, identity in of.items():
        checked(adapters, sample(lora_bed.server, model, prompt), identity, prompt)
    os.kill(lora_bed.process_of("replica-0", "EngineCore"), signal.SIGKILL)
    limit = time.monotonic() + DEADLINE_S
    left = set(of)
    while left:
        for model in sorted(left):
            try:
                answer = sample(lora_bed.server, model, prompt)
            except openai.InternalServerError:
                continue
            checked(adapters, answer, of[model], prompt)
            left.discard(model)
        assert time.monotonic() < limit, left
        time.sleep(0.2)


def full(bed: Bed, identity: str, seed: int) -> Any:
    """In the bucket, and as transformers computes it."""
    return load_model(write_dense(bed.server.bucket / identity, seed, tied=False))


def served(bed: Bed, identity: str) -> None:
    def rows() -> Any:
        return httpx.get(bed.server.url + HOT_LOAD).json()["replicas"]

    def done() -> bool:
        return all(row["readiness"] and row["current_snapshot_identity"] == identity for row in rows())

    until(done, rows)


def test_full_weights_and_adapters_are_swapped_under_streams_and_every_token_is_of_its_label(
    lora_bed: Bed, adapters: Adapters, policies: Callable[..., None]
) -> None:
    features, why = lora_bed.card["features"], lora_bed.card.get("why", {})
    for feature in ("full_snapshots", "short_swap", "weights_digest", "policy_crossing"):
        assert feature in features, (feature, why.get(feature))
    policies(red=("red-1", 71), blue=("blue-1", 72))
    put(lora_bed, adapters, "red-2", 73)
    bases = {"base": adapters.module, **{f"step-{n}": full(lora_bed, f"step-{n}", n) for n in (2, 3)}}
    seeds = {"red-1": 71, "blue-1": 72, "red-2": 73, "red-3": 74}
    config = {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION + MLP}
    models = dict(bases)
    for name, seed in seeds.items():
        models |= {f"{name}@{base}": adapted(bases[base], seed, **config) for base in ("step-2", "step-3")}
    models |= adapters.made
    refused = signalled(lora_bed.server, "step-2")
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "policies")
    kept = signalled(lora_bed.server, "step-2", policies="keep")
    assert kept.status_code == 400
    assert "feature policy_base" in kept.text

    def swaps() -> None:
        answer = signalled(lora_bed.server, "step-2", policies="rebase", reset_prompt_cache="none")
        assert answer.status_code == 200, answer.text
        served(lora_bed, "step-2")
        load(lora_bed.server, "red-2", "red")

    prompt = random_prompt("full", 2 * BLOCK + 5)
    streams = {
        model: Stream(list(prompt), 1600, f"full {model}", seed=5)
        for model in ("red", "blue", lora_bed.model)
    }
    run_with(lora_bed, streams, swaps)
    assert_recomputed(
        streams,
        {
            "red": ["red-1", "red-1@step-2", "red-2@step-2"],
            "blue": ["blue-1", "blue-1@step-2"],
            lora_bed.model: ["base", "step-2"],
        },
        models,
    )
    # The next ones are ended with the weights that they stand on, and see nothing of the new ones.
    last = {"red": Stream(list(prompt), 800, "ended red", seed=6)}

    def end_all() -> None:
        answer = signalled(lora_bed.server, "step-3", policies="end")
        assert answer.status_code == 200, answer.text
        served(lora_bed, "step-3")

    run_with(lora_bed, last, end_all)
    assert_recomputed(last, {"red": ["red-2@step-2"]}, models)
    one = f"{lora_bed.server.url}/v1/{lora_bed.server.deployment}/policies"
    until(lambda: not httpx.get(one).json()["policies"], lambda: httpx.get(one).json())
    put(lora_bed, adapters, "red-3", 74)
    load(lora_bed.server, "red-3", "red")
    after = {model: Stream(list(prompt), 24, f"after {model}", seed=7) for model in ("red", lora_bed.model)}
    run_with(lora_bed, after, lambda: None)
    assert_recomputed(after, {"red": ["red-3@step-3"], lora_bed.model: ["step-3"]}, models)
