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
from policy_helpers import HOT_LOAD, Adapters, checked, load, ready, sample, signalled
from vllm_bed import BLOCK, DEADLINE_S, Bed, until
from vllm_streams import Stream, client, random_prompt

from adapter_helpers import ATTENTION, MLP  # isort: skip

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


def assert_numbers(adapters: Adapters, identity: str, stream: Stream) -> None:
    expected = adapters.logprobs(identity, stream.ids)[len(stream.prompt) - 1 :].numpy()
    off = np.abs(np.subtract([logprob for _, logprob, _ in stream.tokens], expected))
    assert off.max() <= TOLERANCE, (identity, off.argmax(), off.max())


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


def test_a_swap_leaves_running_streams_their_adapter_and_cached_kv_is_never_stale(
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
    assert [stream.whole for stream in streams.values()] == [True] * 3
    of = {"moving": "run-a", "still": "still-a", lora_bed.model: "base"}
    for model, stream in streams.items():
        assert stream.labels == [of[model]]
        assert_numbers(adapters, of[model], stream)
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
    full = signalled(lora_bed.server, "good")
    assert full.status_code == 400
    assert "feature full_snapshots" in full.text


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
