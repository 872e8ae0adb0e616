"""Which pairs of features a server refuses, and the field that it names.

Owns: that table. Every pair that is not in it is served.
"""

from __future__ import annotations

from feature_pairs import Pair, Row, pairs_of

#: By the field: pairs as `feature=value feature=value`; of one line, the first with each of the others.
_NAMED: dict[str, tuple[str, ...]] = {
    "allowed_token_ids": ("wire=messages, wire=responses | limit=allowed",),
    "bad_words": ("wire=messages, wire=responses | limit=bad_words",),
    "echo": (
        "wire=messages | scores=echo",
        "wire=responses | scores=echo, scores=only",
    ),
    "echo_last": ("wire=messages, wire=responses | scores=echo_last",),
    "frequency_penalty": ("wire=messages, wire=responses | penalty=frequency",),
    "ignore_eos": ("wire=messages, wire=responses | limit=ignore_eos",),
    "include_routing_matrix": (
        "numbers=legacy, numbers=none | records=reference, records=routes, records=weights",
    ),
    "include_stop_str_in_output": ("wire=messages | stop=included",),
    "logit_bias": ("wire=messages, wire=responses | limit=bias",),
    "logprobs": (
        "form=auto, form=forced, form=no call, form=strict, wire=chat, wire=messages, wire=responses | numbers=legacy",
    ),
    "max_tokens": ("wire=messages | scores=only",),
    "min_p": (
        "wire=messages | filter=all, filter=min_p",
        "wire=responses | filter=min_p",
    ),
    "min_tokens": (
        "form=choice, form=json, form=regex, wire=messages, wire=responses | limit=min_tokens",
        "limit=min_tokens | scores=only",
    ),
    "n": ("wire=messages, wire=responses | n=3",),
    "presence_penalty": ("wire=messages, wire=responses | penalty=presence",),
    "priority": ("wire=messages, wire=responses | priority=3",),
    "prompt": (
        "form=auto, form=forced, form=no call, form=strict, wire=chat, wire=messages, wire=responses | prompts=2",
    ),
    "prompt_cache_max_len": ("wire=messages, wire=responses | cache=off",),
    "prompt_logprobs": ("how=stream, wire=messages, wire=responses | scores=prompt_logprobs",),
    "raw_output": ("wire=messages, wire=responses | records=raw",),
    "repetition_penalty": ("wire=messages, wire=responses | penalty=repetition",),
    "return_record_reference": (
        "numbers=top, wire=messages, wire=responses | records=reference",
        "records=reference | scores=echo, scores=echo_last, scores=only",
    ),
    "return_sampling_mask": ("numbers=legacy, numbers=none | records=masks",),
    "routing_matrix_format": ("wire=messages, wire=responses | records=files",),
    "sampling_params.allowed_token_ids": ("wire=sglang | limit=allowed",),
    "sampling_params.bad_words": ("wire=sglang | limit=bad_words",),
    "sampling_params.echo": ("wire=sglang, wire=vllm, wire=vllm text | scores=echo, scores=only",),
    "sampling_params.echo_last": ("wire=sglang, wire=vllm, wire=vllm text | scores=echo_last",),
    "sampling_params.prompt": ("wire=vllm, wire=vllm text | prompts=2",),
    "sampling_params.prompt_cache_max_len": ("wire=sglang, wire=vllm, wire=vllm text | cache=off",),
    "sampling_params.raw_output": ("wire=sglang, wire=vllm, wire=vllm text | records=raw",),
    "sampling_params.return_record_reference": (
        "wire=sglang, wire=vllm, wire=vllm text | records=reference",
    ),
    "sampling_params.return_router_weights": ("wire=sglang, wire=vllm, wire=vllm text | records=weights",),
    "sampling_params.routing_matrix_format": ("wire=sglang, wire=vllm, wire=vllm text | records=files",),
    "sampling_params.structured_outputs": ("wire=sglang | form=choice",),
    "sampling_params.tools": (
        "wire=sglang, wire=vllm, wire=vllm text | form=auto, form=forced, form=no call, form=strict",
    ),
    "stop": ("wire=responses | stop=included, stop=string",),
    "stop_token_ids": (
        "form=choice, form=forced, form=json, form=regex, form=strict, wire=messages, wire=responses | stop=ids",
    ),
    "structured_outputs": ("wire=messages, wire=responses | form=choice, form=regex",),
    "tools": ("wire=completions, wire=text | form=auto, form=forced, form=no call, form=strict",),
    "top_k": ("wire=responses | filter=all, filter=top_k",),
}


def refusals() -> dict[Pair, str]:
    """The field that is named, of each pair that is refused."""
    found = dict[Pair, str]()
    for name, groups in _NAMED.items():
        for group in groups:
            ones, others = (part.split(", ") for part in group.split(" | "))
            found |= {_pair(one, other): name for one in ones for other in others}
    return found


def _pair(one: str, other: str) -> Pair:
    first, second = sorted(tuple(text.split("=")) for text in (one, other))
    return (first[0], first[1]), (second[0], second[1])


REFUSED = refusals()


def is_refused(row: Row) -> bool:
    return any(pair in REFUSED for pair in pairs_of(row))
