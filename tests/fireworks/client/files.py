"""DeploymentSampler with a trainer that takes routes and masks as files: references, and what the client makes of them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fireworks.training.sdk.routing import RoutingReferences, concat_routing, mask_routing, routing_to_wire
from fireworks.training.sdk.sampling import SampledCompletion, SamplingRequestError
from fireworks.training.sdk.types._pydantic_types.model_input import ModelInput
from sdk import answer, arguments, sampler

given = arguments()
rollout = sampler(given)
PROMPT = list(b"Count in words: one, two, three, four, five, ")


async def sample(prompt: list[int], **options: Any) -> list[SampledCompletion]:
    options = {"max_tokens": 24, "logprobs": True, "seed": 5, "include_routing_matrix": True, **options}
    found: list[SampledCompletion] = await rollout.sample_with_prompt_tokens(prompt, **options)
    return found


def shown(one: SampledCompletion) -> dict[str, Any]:
    return {
        "full_tokens": one.full_tokens,
        "prompt_len": one.prompt_len,
        "logprobs": one.inference_logprobs,
        "routes": routing_to_wire(one.routing_matrices),
        "masks": routing_to_wire(one.sampling_mask_references),
    }


def model_input(one: SampledCompletion) -> dict[str, Any]:
    """As a trainer has it: every position but the last, with a mask for those that predict sampled tokens."""
    before, positions = one.prompt_len - 1, len(one.full_tokens) - 1
    masks = one.sampling_mask_references
    made = ModelInput.from_ints(
        one.full_tokens[:-1],
        routing_matrices=one.routing_matrices,
        sampling_mask_references=concat_routing([""] * before, masks),
    )
    assert made.length == positions
    result: dict[str, Any] = made.model_dump(exclude_none=True)
    return result


async def refusal(**options: Any) -> dict[str, Any]:
    try:
        await sample(PROMPT, **options)
    except httpx.HTTPStatusError as error:
        return {"status": error.response.status_code, **error.response.json()["error"]}
    except SamplingRequestError as error:
        return {"sampling_error": str(error)}
    return {}


async def main() -> dict[str, Any]:
    drawn = {"top_p": 0.9, "temperature": 0.8}
    inline = {"echo": (await sample(PROMPT, echo=True, **drawn))[0]}
    inline["plain"] = (await sample(PROMPT, **drawn))[0]
    rollout.negotiate_routing_matrix_format("parquet_v1", given.store)
    drawn |= {"sampling_mask": "parquet_v1", "r3_ttl_seconds": 3600, "prompt_cache_key": "a rollout"}
    first = (await sample(PROMPT, echo=True, **drawn))[0]
    plain = (await sample(PROMPT, **drawn))[0]
    last = (await sample(PROMPT, echo=True, echo_last=7, **drawn))[0]
    second_prompt = first.full_tokens + list(b" and then: ")
    second = (await sample(second_prompt, echo=True, **drawn))[0]
    several = await sample(PROMPT, n=3, echo=True, **drawn)
    # A trajectory of two turns as a trainer joins it: the first turn's rows, a gap for what it does not train on, the second's.
    references = first.routing_matrices
    assert isinstance(references, RoutingReferences)
    more = len(second.full_tokens) - len(first.full_tokens)
    joined = concat_routing(references[: first.prompt_len], [""] * 3, second.routing_matrices[-more:])
    kept = [at % 5 != 2 for at in range(len(references))]
    done = {
        "agreed": rollout.routing_matrix_format,
        "inline": {name: shown(one) for name, one in inline.items()},
        "first": shown(first),
        "plain": shown(plain),
        "last": shown(last),
        "second": shown(second),
        "several": [shown(one) for one in several],
        "input": model_input(first),
        "joined": joined.to_dict(),
        "cut": [first.prompt_len, more],
        "masked": mask_routing(references, kept).to_dict(),
        "kept": kept,
        "too_long": await refusal(r3_ttl_seconds=10**11),
    }
    rollout.negotiate_routing_matrix_format("parquet_v1", "a trainer's own store")
    other = (await sample(PROMPT, echo=True))[0]
    done["other_store"] = {"agreed": rollout.routing_matrix_format, **shown(other)}
    done["other_masks"] = await refusal(sampling_mask="parquet_v1")
    return done


answer(asyncio.run(main()))
