"""The digest of a real vLLM server's weights: equal for equal files, and another one for any other number in any tensor."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiers import variant
from vllm_bed import PYTHON
from vllm_streams import random_prompt

from midstream.core.server_settings import VllmSettings
from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.vllm.engine import VllmEngine


def engine_of(model: Path, cache: Path, dtype: str) -> VllmEngine:
    flags = ["--enforce-eager", "--max-model-len", "1024", "--dtype", dtype]
    settings = VllmSettings(python=str(PYTHON), args=flags, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    return VllmEngine(model, settings, cache)


def copy(model: Path, to: Path) -> Path:
    to.mkdir()
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def changed(model: Path, to: Path) -> Iterator[tuple[str, Path]]:
    """The model again and again, with one bit of one tensor changed: the lowest of the last number."""
    file = copy(model, to) / "model.safetensors"
    good = file.read_bytes()
    size = struct.unpack("<Q", good[:8])[0]
    for name, tensor in json.loads(good[8 : 8 + size]).items():
        if name != "__metadata__":
            width = {"F32": 4, "BF16": 2}[tensor["dtype"]]
            bad = bytearray(good)
            bad[8 + size + tensor["data_offsets"][1] - width] ^= 1
            file.write_bytes(bad)
            yield name, to


@pytest.mark.parametrize("served", ["moe float32", variant("moe bfloat16"), variant("dense float32")])
def test_any_other_number_in_any_tensor_gives_another_digest(
    served: str,
    vllm_python: Path,
    tiny_model: Callable[..., Path],
    dense: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind, dtype = served.split()
    model = tiny_model(dtype=dtype) if kind == "moe" else dense

    async def load(engine: VllmEngine, directory: Path, name: str) -> str:
        await engine.stage(name, directory)
        await engine.commit(name)
        engine.settle(name, sound=True)
        digest = await engine.weights_digest()
        assert digest is not None
        return digest

    async def main() -> int:
        first, second = (engine_of(model, tmp_path / name, dtype) for name in ("a", "b"))
        count = 0
        try:
            assert (await first.start()).card.has("weights_digest")
            expected = await first.weights_digest()
            assert await load(first, copy(model, tmp_path / "again"), "again") == expected
            for name, directory in changed(model, tmp_path / "changed"):
                assert await load(first, directory, f"other {count}") != expected, name
                count += 1
            assert await load(first, tmp_path / "again", "at last") == expected
            await first.close()
            # Another process, that came to these weights in another way, while it generates.
            await second.start()
            sampling = SamplingParams(max_tokens=800)
            stream = second.generate(
                GenerateRequest(request_id="r", prompt=tuple(random_prompt("r", 20)), sampling=sampling)
            )
            await anext(stream)
            assert await second.weights_digest() == expected
            await stream.aclose()
        finally:
            await first.close()
            await second.close()
        return count

    started = time.monotonic()
    count = asyncio.run(main())
    with capsys.disabled():
        print(f"\n{served}: {count} tensors, {time.monotonic() - started:.0f} s")
