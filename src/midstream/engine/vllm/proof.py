"""The proof that a vLLM server can load weights in place: its own weights, reloaded, give the same numbers as before.

In some versions, kernels or quantizations a reload may leave weights in another form than a start does. Such a server would
serve every snapshot wrongly, with finite numbers and without an error.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.vllm.scoring import Scorer

TOKENS = 24
#: In nats. One prompt alone is computed the same way each time.
TOLERANCE = 0.02


class NotExact(Exception):
    """Reloaded weights give other numbers."""


async def prove_reload(
    scorer: Scorer, vocab_size: int, context: int, reload: Callable[[], Awaitable[None]]
) -> None:
    """reload: loads the serving weights once more. Raises NotExact, and the errors of scorer and reload."""
    before = await _score(scorer, vocab_size, context)
    await reload()
    after = await _score(scorer, vocab_size, context)
    off = [abs(a - b) for a, b in zip(before, after, strict=True)]
    # A number that is not finite fails, too.
    if not all(difference <= TOLERANCE for difference in off):
        raise NotExact(
            "vLLM does not load weights in place correctly: the same weights, reloaded, give log-probabilities that differ by "
            f"{max(off):.3g}. Snapshots cannot be served with these options and this version"
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
