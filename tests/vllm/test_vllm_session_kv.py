"""KV of sessions on a real vLLM server whose cache is too small for all of them: what it holds, what it evicts and says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_vllm_sampling_numbers import engine_of
from test_vllm_sampling_numbers import snapshots as snapshots
from tiers import variant
from vllm_bed import BLOCK, VENV
from vllm_streams import random_prompt

from midstream.core.kv import KvStats
from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.vllm.engine import VllmEngine

#: vLLM gives one of them to nobody.
BLOCKS = 24
SESSIONS, TURNS = 7, 5


async def turn(engine: VllmEngine, session: str, salt: str, tokens: int, **more: Any) -> int:
    """One turn of a session, whose next one is expected when all others had theirs. How much of its prompt was computed."""
    request = GenerateRequest(
        request_id=f"{salt} {session} {tokens}",
        prompt=tuple(random_prompt(f"{salt} {session}", tokens)),
        sampling=SamplingParams(max_tokens=2, temperature=0.0),
        salt=salt.encode(),
        **{"session": session, "returns_s": 1.0, "kept_s": 600.0, **more},
    )
    cached = None
    async for event in engine.generate(request):
        assert event.error is None
        cached = event.cached_tokens if cached is None else cached
    assert cached is not None
    return tokens - cached


async def said(engine: VllmEngine, holds: Callable[[KvStats], bool]) -> KvStats:
    """What the replica reports, as soon as it is that."""
    deadline = time.monotonic() + 60
    while not holds(kv := engine.stats().kv):
        assert time.monotonic() < deadline, kv
        await asyncio.sleep(0.05)
    assert kv.used + kv.held + kv.loose + kv.free == kv.total == BLOCKS - 1
    return kv


async def computed(engine: VllmEngine, salt: str, claimed: bool) -> int:
    """By sessions that take turns one after the other, and whose last turns do not fit together."""
    total = 0
    for number in range(TURNS):
        for i in range(SESSIONS):
            name = f"{salt} s{i}" if claimed else ""
            total += await turn(engine, name, f"{salt} {i}", (2 + number) * BLOCK + 1)
    for i in range(SESSIONS):
        engine.end_session(f"{salt} s{i}")
    return total


@pytest.mark.parametrize("family", ["qwen3", variant("llama")])
def test_vllm_holds_what_sessions_come_back_for(
    family: str,
    vllm_python: Path,
    snapshots: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def main() -> tuple[int, int, KvStats]:
        place = snapshots(family)["base"]
        async with engine_of(place, tmp_path / "cache", f"--num-gpu-blocks-override={BLOCKS}") as served:
            engine = served.engine
            if (why := engine._info().card.why.get("session_kv")) is not None:
                assert VENV != ".venv-vllm", why
                pytest.skip(why)
            # What the proof had is over, and was evicted by nobody.
            begun = await said(engine, lambda kv: True)
            assert (begun.used, begun.held, begun.evicted_tokens) == (0, 0, 0)
            await turn(engine, "\0one", "a", 3 * BLOCK + 1)
            kv = await said(engine, lambda kv: kv.held > 0)
            assert (kv.used, kv.held, kv.missing) == (0, 3, 0)
            # Its next turn finds all of it, and holds a block more.
            assert await turn(engine, "\0one", "a", 4 * BLOCK + 1) == BLOCK + 1
            kv = await said(engine, lambda kv: kv.held == 4)
            # A session that is over: its KV is there, and goes before that of nobody, which is older.
            assert await turn(engine, "", "b", 3 * BLOCK + 1) == 3 * BLOCK + 1
            await turn(engine, "\0over", "c", 3 * BLOCK + 1)
            await said(engine, lambda kv: kv.held == 7)
            engine.end_session("\0over")
            kv = await said(engine, lambda kv: kv.held == 4)
            # Of the blocks without content a few are left, and three more are needed.
            await turn(engine, "", "d", (kv.free + 2) * BLOCK + 1)
            assert await turn(engine, "", "b", 3 * BLOCK + 1) == 1
            assert await turn(engine, "\0over", "c", 3 * BLOCK + 1, kept_s=0.0) == 3 * BLOCK + 1
            assert await turn(engine, "\0one", "a", 4 * BLOCK + 1) == 1
            engine.end_session("\0one")
            await said(engine, lambda kv: kv.held == 0)
            lru = await computed(engine, "lru", claimed=False)
            quiet = await said(engine, lambda kv: kv.used == 0)
            assert (quiet.evicted_tokens, quiet.again_tokens) == (0, 0)
            ours = await computed(engine, "ours", claimed=True)
            return lru, ours, await said(engine, lambda kv: kv.held == 0 and kv.evicted_tokens > 0)

    lru, ours, kv = asyncio.run(main())
    ideal = SESSIONS * ((1 + TURNS) * BLOCK + 1) + SESSIONS * (TURNS - 1)
    with capsys.disabled():
        print(f"\n{family}: prompt tokens computed: ideal {ideal}, vLLM's order {lru}, ours {ours}; {kv}")
    assert ideal < ours < 0.75 * lru
    # What was evicted while its session lived, and had to be computed again, is all that is more than the ideal.
    assert kv.again_tokens == ours - ideal
    assert kv.missing == 0
