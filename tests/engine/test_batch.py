"""A step's work as arrays: a decode is packed alike alone, among others, and beside a prefill."""

from __future__ import annotations

import random

import numpy as np
import pytest
from engine_helpers import request

from midstream.engine.embedded.batch import pack
from midstream.engine.embedded.blocks import SCRATCH_SLOT
from midstream.engine.embedded.scheduler import Sequence, StepWork

BLOCK = 16


def work(rng: random.Random, length: int, first: int, last: int, write_from: int) -> StepWork:
    seq = Sequence(request("r", [rng.randrange(256) for _ in range(length)]), 0)
    seq.blocks = rng.sample(range(1, 500), -(-length // BLOCK))
    return StepWork(seq, first, last, write_from, 0)


@pytest.mark.parametrize("seed", range(20))
def test_decodes_are_packed_as_they_are_beside_a_prefill(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 100) for _ in range(rng.randrange(1, 9))]
    # A position whose KV is there writes to scratch.
    decodes = [work(rng, n, n - 1, n, n - 1 + (rng.random() < 0.3)) for n in lengths]
    prefill = work(rng, 40, 3, 40, 5)
    alone, beside = pack(decodes, BLOCK), pack([*decodes, prefill], BLOCK)
    count = len(decodes)
    for name in ("ids", "positions", "slots", "spans"):
        one, both = getattr(alone, name), getattr(beside, name)
        assert one.dtype == both.dtype
        assert one.flags.c_contiguous
        assert np.array_equal(one, both[:count])
    assert np.array_equal(alone.blocks, beside.blocks[: len(alone.blocks)])
    assert alone.blocks.dtype == beside.blocks.dtype
    for row, decode in enumerate(decodes):
        table, at = decode.seq.blocks, decode.first
        own = table[at // BLOCK] * BLOCK + at % BLOCK
        assert alone.ids[row] == decode.seq.tokens[at]
        assert alone.slots[row] == (own if at >= decode.write_from else SCRATCH_SLOT)
