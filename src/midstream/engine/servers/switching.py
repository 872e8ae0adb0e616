"""A switch of a server's weights, the way back when it fails, and what is said of a fixed prompt before and after.

Always holds: when `switch` returns, the new weights serve under the new version. When it raises Unchanged, the old weights
serve under the old version. After any other error the serving weights are unknown, and the server has to be ended. Nothing
is sampled between the first call and the last.

The proof that a server can load weights in place: its own weights, reloaded, give the same numbers as before.

In some versions, kernels or quantizations a reload may leave weights in another form than a start does. Such a server would
serve every snapshot wrongly, with finite numbers and without an error.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.base import spread_ids
from midstream.engine.servers.control import ServerControl, ServerRefused
from midstream.engine.servers.scoring import PromptScorer
from midstream.snapshots.layout import INDEX_FILE, WEIGHTS_FILE

logger = logging.getLogger(__name__)

TOKENS = 24
#: In nats. One prompt alone is computed the same way each time.
TOLERANCE = 0.02


class NotExact(Exception):
    """The server computes other numbers than it should."""


#: The log-probabilities of a fixed prompt, under one set of weights or several.
Score = Callable[[], Awaitable[list[float]]]


async def prove_reload(scores: Score, reload: Callable[[], Awaitable[None]]) -> None:
    """reload: loads the serving weights once more. Raises NotExact, and the errors of both."""
    before = await scores()
    await reload()
    after = await scores()
    off = largest_difference(before, after)
    if not off <= TOLERANCE:
        raise NotExact(
            "the server does not load weights in place correctly: the same weights, reloaded, give log-probabilities that "
            f"differ by {off:.3g}. Snapshots cannot be served with these options and this version"
        )


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """NaN if any number is."""
    off = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return math.nan if any(map(math.isnan, off)) else max(off, default=0.0)


def proof_prompt(vocab_size: int, context: int) -> tuple[int, ...]:
    return spread_ids(max(2, min(TOKENS, context - 1)), vocab_size)


async def score(scorer: PromptScorer, vocab_size: int, context: int) -> list[float]:
    """The log-probabilities of a fixed prompt, computed without the cache. Raises NotExact, CallFailed, WrongWeights."""
    prompt = proof_prompt(vocab_size, context)
    request = GenerateRequest(
        request_id=f"proof-{secrets.token_hex(8)}",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=0),
        prompt_records=len(prompt),
        urgent=True,
    )
    records = await scorer.score(request, secrets.token_hex(16))
    if isinstance(records, str):
        raise NotExact(f"the server did not score a prompt: {records}")
    return [record.logprob for record in records[1:]]


@dataclass(frozen=True)
class StagedFiles:
    """What a commit is to switch to. directory: of the verified files."""

    snapshot: str
    directory: Path


class Unchanged(Exception):
    """The switch failed, and the old weights serve again."""


async def switch(
    control: ServerControl,
    load: Callable[[], Awaitable[None]],
    back: Callable[[], Awaitable[None]],
    version: str,
    on_switch: Callable[[], None],
    *,
    resume: bool = True,
) -> None:
    """Have `load` bring new weights, between two steps.

    back: loads what served, after the server has refused the new weights.
    on_switch: called when everything that was sampled before has arrived. Nothing is sampled until it returns.
    resume: whether steps continue after the switch. Raises Unchanged. After CallFailed and ServerRefused it is in doubt.
    """
    await control.pause()
    try:
        await load()
    except ServerRefused as error:
        logger.warning("the server could not load new weights; going back to those before: %s", error)
        # The weights are half unloaded, so the next step would fail.
        await back()
        if resume:
            await control.resume()
        raise Unchanged(f"the server could not load the snapshot: {error}") from error
    await adopt(control, version, on_switch, resume=resume)


async def adopt(
    control: ServerControl, version: str, on_switch: Callable[[], None], *, resume: bool = True
) -> None:
    """As `switch`, of a server that stands still and has the new weights already."""
    await control.set_version(version)
    on_switch()
    if resume:
        await control.resume()


def weights_beside(directory: Path) -> list[str]:
    """No part of the checkpoint, but loaded by a server, which without an index loads all .safetensors files."""
    if (directory / INDEX_FILE).exists():
        return []
    return sorted({file.name for file in directory.glob("*.safetensors")} - {WEIGHTS_FILE})


def check_alone(directory: Path) -> None:
    """Raises OSError when a server would load other files, too."""
    if stray := weights_beside(directory):
        raise OSError(
            f"{', '.join(stray)}: beside {WEIGHTS_FILE}, but not part of the snapshot. The server would load it, too; remove it"
        )
