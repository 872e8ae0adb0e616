"""The proof that this vLLM can load weights in place: reloaded, its own weights give the numbers that they gave before.

A version, a kernel or a quantization whose reload leaves weights in another form than its start would serve every snapshot
wrongly, with finite numbers and without an error.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from midstream.engine.vllm.scoring import Scorer
from midstream.types import GenerateRequest, SamplingParams

TOKENS = 24
TOLERANCE = 0.02  # nats; one prompt alone is computed the same way each time


class NotExact(Exception):
    """Reloaded weights are others."""


async def prove_reload(
    scorer: Scorer, vocab_size: int, context: int, reload: Callable[[], Awaitable[None]]
) -> None:
    """reload: loads the weights that serve once more. Raises NotExact, and what scorer and reload raise."""
    before = await _score(scorer, vocab_size, context)
    await reload()
    after = await _score(scorer, vocab_size, context)
    off = [abs(a - b) for a, b in zip(before, after, strict=True)]
    if not all(difference <= TOLERANCE for difference in off):  # also where one is not a number
        raise NotExact(
            "vLLM does not load weights in place rightly: reloaded, the same weights give log-probabilities that differ by "
            f"{max(off):.3g}; snapshots cannot be served with these options and this version"
        )


async def _score(scorer: Scorer, vocab_size: int, context: int) -> list[float]:
    prompt = tuple((i * 7919 + 13) % vocab_size for i in range(max(2, min(TOKENS, context - 1))))
    request = GenerateRequest(
        request_id=f"proof-{secrets.token_hex(8)}",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=0),
        prompt_records=len(prompt),
    )
    records = await scorer.score(request, secrets.token_hex(16))
    if isinstance(records, str):
        raise NotExact(f"vLLM did not score a prompt: {records}")
    return [record.logprob for record in records[1:]]
