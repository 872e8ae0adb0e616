"""How two log-probabilities of a token travel where vLLM has one: the second one stands in the rank of the sampled token.

A request that wants both has MARK in its `extra_args`. In its answer, the rank of each sampled token is RANK_BASE plus the
bits of the sampling log-probability, without its sign, as a float32. An alternative with the id ITSELF says which place the
sampled token has among the best tokens.

Always holds: no true rank reaches RANK_BASE. vLLM passes ranks and ids on as they are, so nothing else in it has to know. The
workers write this (midstream_vllm_sampler.py), and protocol.py reads it. This module imports nothing.
"""

from __future__ import annotations

MARK = "midstream_sampling_logprobs"
RANK_BASE = 1 << 33
ITSELF = -1
#: The bits of infinity. Those of numbers that are not finite are no smaller.
INFINITE = 0x7F800000
