"""How what vLLM has no place for travels with a token: in the rank of the sampled token.

A request that wants the sampling log-probability has MARK in its `extra_args`. In its answer, the rank of each sampled token is
RANK_BASE plus the bits of the sampling log-probability, without its sign, as a float32. An alternative with the id ITSELF says
which place the sampled token has among the best tokens.

With NEAR, too, its near ties are TIE_PLACE times what they are. Its value are the two thresholds of midstream_vllm_ties.py.

KV asks the scheduler for spans of KV (midstream_vllm_provenance.py), and bounds the age of cached KV. They come in the place of
a sampling mask, as a list of numbers: how many tokens came before, then the epoch and the first position of each span.

MASK asks for sampling masks, beside MARK. Then each token has one there, too: IDS and the ids that limits and filters left, or
WORDS and 32 bits each, one for each id, lowest bit first. Spans begin with no negative number.

ROUTES asks for the experts that computed each token. Its value is the first position of the prompt whose pass is wanted, or the
last one, and whether the weights of routers are (0 or 1). Each token has them in that place, too: ROWS, the position of the
first pass, how many there are, and their bytes in words of 32 bits. These are [passes, layers, experts per token], of one byte
each up to 256 experts, else of two. The weights follow in the same form, as float32. What a choice of one token has of its
prompt takes the place of vLLM's own routes instead, without ROWS, as an array of such words.

SESSION tells the scheduler whose KV a request is (midstream_vllm_kv.py): the session, when its next turn is likely, and how
long its KV is kept for that, in seconds. LOOK is the call of /collective_rpc that the engine core answers with what is held.

Always holds: no true rank reaches RANK_BASE. vLLM passes ranks and ids on as they are, so nothing else in it has to know. The
workers write this (midstream_vllm_sampler.py), and protocol.py reads it. This module imports nothing of vLLM.
"""

from __future__ import annotations

from typing import Any

MARK = "midstream_sampling_logprobs"
NEAR = "midstream_near_ties"
#: Its value: whether spans are to be told (0 or 1), and the most switches that may lie behind cached KV (-1: any number).
KV, ANY_AGE = "midstream_kv", -1
SESSION, LOOK = "midstream_session", "midstream_look"
MASK, IDS, WORDS = "midstream_masks", -1, -2
ROUTES, ROWS = "midstream_routes", -3
RANK_BASE = 1 << 40
ITSELF = -1
#: The bits of infinity. Those of numbers that are not finite are no smaller.
INFINITE = 0x7F800000
TIE_PLACE = 1 << 31
#: As in midstream.core.types.
NEAR_TOP_K, NEAR_TOP_P, NEAR_MIN_P, NEAR_GREEDY = 2, 4, 8, 16


def said(params: Any, name: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a request says under this name in its `extra_args`, in the types of `default`.

    Whatever else is there counts as not said: clients of the server may put it there, and an error would end the server.
    """
    given = ((params and params.extra_args) or {}).get(name)
    if not isinstance(given, list | tuple) or len(given) != len(default):
        return default
    try:
        return tuple(type(one)(value) for one, value in zip(default, given, strict=True))
    except (TypeError, ValueError, OverflowError):
        return default
