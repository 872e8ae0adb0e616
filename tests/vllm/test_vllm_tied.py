"""A model whose output layer is that of the embeddings: a swap brings both, staged in the workers and in place.

On a CPU vLLM packs the two by themselves, and its own reload leaves the output layer as it was.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import numpy as np
from vllm_bed import Bed, load, logprobs_of, needs_staging
from vllm_streams import Stream, random_prompt, under_way

from midstream.client import SnapshotPublisher
from midstream.engine.servers.switching import switch
from midstream.engine.vllm.swap import Control

# Nats, in float32.
TOLERANCE = 1e-4


def check(bed: Bed, checkpoint: Path, session: str) -> None:
    """What a stream is given now is of these weights."""
    stream = Stream(random_prompt(session, 30), 40, session)
    asyncio.run(under_way(bed.server.url, bed.model, [stream], 1, lambda: None))
    assert stream.whole, stream.error
    expected = logprobs_of(load(checkpoint), stream.ids)[len(stream.prompt) - 1 :]
    off = np.abs(np.subtract([logprob for _, logprob, _ in stream.tokens], expected))
    assert off.max() <= TOLERANCE, (session, off.max())


def test_both_ways_of_a_swap_bring_the_output_layer_that_is_tied(
    tied_bed: Bed, tied: dict[str, Path]
) -> None:
    needs_staging(tied_bed)
    check(tied_bed, tied["served"], "before")
    with SnapshotPublisher(tied_bed.server.url, tied_bed.server.bucket.as_uri()) as publisher:
        for name in ("other", "served"):
            publisher.publish(name, tied[name])
            check(tied_bed, tied[name], f"published {name}")
    # Behind the replica's back, as it loads where memory lacks.
    control = Control(tied_bed.server_url("replica-0"), "", 120.0)
    # The proofs of its start count as switches, too.
    version = asyncio.run(control.version(30.0))
    assert version is not None
    for name in ("other", "served"):
        loading = switch(control, partial(control.reload, tied[name]), tied["served"], version, lambda: None)
        asyncio.run(loading)
        check(tied_bed, tied[name], f"reloaded {name}")
