"""The digest of the weights in a vLLM server: its workers read them between steps, piece by piece, as they are asked to.

Always holds: a digest is of one load of weights, or there is none.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

import msgspec

from midstream.engine.servers.control import STEP_S_MAX, ServerRefused
from midstream.engine.vllm.swap import Control
from midstream.http.call import CallFailed

#: Of the worker extension.
METHOD = "midstream_digest"
#: How long the workers read at a time while there is something to compute, how long they compute in between, and how long they
#: read at a time otherwise. A request that comes waits for that.
READ_S, COMPUTE_S, IDLE_S = 0.01, 0.04, 0.05


class OtherWeights(Exception):
    """The weights were replaced while they were read."""


class _OfRank(msgspec.Struct, frozen=True):
    """kind: of everything beside the files that decides how weights lie in memory. bytes: that were read."""

    kind: str
    digest: str
    bytes: int


async def read_weights(
    control: Control, stand: Callable[[], bool], busy: Callable[[], bool] = lambda: False
) -> str:
    """KIND:DIGEST of the weights of all ranks.

    stand: whether the weights are still those of the call. busy: whether there are steps to compute.
    Raises OtherWeights, CallFailed, ServerRefused.
    """
    begin, answers = True, [None]
    while None in answers and stand():
        computing = busy()
        seconds = READ_S if computing else IDLE_S
        asked = {"begin": begin, "seconds": seconds}
        answers = await control.ask_workers(METHOD, asked, STEP_S_MAX, holds_up=False)
        begin = False
        await asyncio.sleep(COMPUTE_S if computing else 0)
    if not stand():
        raise OtherWeights("the weights were replaced while they were read")
    try:
        ranks = msgspec.convert(answers, list[_OfRank])
    except msgspec.ValidationError as error:
        raise CallFailed(f"{METHOD}: {error}") from error
    if len(ranks) == 1:
        return f"{ranks[0].kind}:{ranks[0].digest}"
    kinds, digests = (hashlib.blake2b(digest_size=16) for _ in range(2))
    for rank in ranks:
        kinds.update(f"{rank.kind}\n".encode())
        digests.update(f"{rank.digest}\n".encode())
    return f"vllm-{kinds.hexdigest()}:{digests.hexdigest()}"


async def prove_digest(control: Control, lacks: str, reload: Callable[[], Awaitable[None]]) -> str:
    """Why there is no digest; empty if there is one. lacks: why none is asked for; empty if it is.

    reload: loads the serving weights once more, and is called in any case. Where something that is not of the weights is among
    what is read, two loads may differ. Raises the errors of reload.
    """
    digests: list[str] = []

    async def read() -> None:
        nonlocal lacks
        if lacks:
            return
        try:
            digests.append(await read_weights(control, lambda: True))
        except (ServerRefused, CallFailed) as error:
            lacks = f"its workers give no digest: {error}"

    await read()
    await reload()
    await read()
    return lacks or ("" if len(set(digests)) == 1 else "the same weights, loaded again, have another digest")
