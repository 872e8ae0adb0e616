"""The digest of the serving weights: equal for equal weights, another one for any change, while steps go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_helpers import needs_compiler, request, run

from midstream.core.config import EngineSettings
from midstream.core.types import ModelInfo, SnapshotCheck
from midstream.engine.base import EngineDied
from midstream.engine.embedded import weights_digest
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.engine import EmbeddedEngine
from midstream.engine.embedded.weights_digest import CHUNK_BYTES, PIECE_BYTES, digest
from midstream.replica.swap.checker import Checker


def core_of(model: Path, kernels: str) -> EngineCore:
    needs_compiler(kernels)
    return EngineCore(model, EngineSettings(kernels=kernels))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_snapshot_has_one_digest_however_it_came_to_serve(
    tiny_model: Callable[..., Path], kernels: str, dtype: str
) -> None:
    first, second = tiny_model(dtype=dtype), tiny_model(seed=1, dtype=dtype)
    started, swapped = core_of(first, kernels), core_of(second, kernels)
    other = digest(swapped.weights())
    swapped.set_staged(swapped.stage(first))
    swapped.commit("first")
    assert digest(started.weights()) == digest(swapped.weights()) != other


def test_the_digest_does_not_depend_on_the_number_of_threads() -> None:
    weights = [("a", torch.arange(5 * PIECE_BYTES // 8, dtype=torch.int32)), ("b", torch.ones(3))]
    assert digest(weights, 1) == digest(weights, 3)
    data = weights[0][1].numpy().view(np.uint8)
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    each = b"".join(weights_digest._checksum(chunk).to_bytes(4, "little") for chunk in chunks)
    pieces = range(0, len(data), PIECE_BYTES)
    assert each == b"".join(
        weights_digest._checksums(weights[0][1].view(torch.uint8)[at:][:PIECE_BYTES]) for at in pieces
    )


def test_weights_leave_a_device_in_few_copies_and_have_the_digest_of_their_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [("a", torch.arange(9 * CHUNK_BYTES // 4 + 1, dtype=torch.int32)), ("b", torch.ones(3))]
    copies: list[int] = []
    cpu = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(len(tensor))
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    monkeypatch.setattr(weights_digest, "PIECE_BYTES", 4 * CHUNK_BYTES, raising=False)
    whole = digest(weights)
    assert copies == [4 * CHUNK_BYTES, 4 * CHUNK_BYTES, CHUNK_BYTES + 4, 12]
    monkeypatch.setattr(weights_digest, "PIECE_BYTES", CHUNK_BYTES)
    assert digest(weights) == whole


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_one_changed_bit_of_any_tensor_changes_the_digest(
    tiny_model: Callable[..., Path], kernels: str
) -> None:
    core = core_of(tiny_model(), kernels)
    weights = core.weights()
    good = digest(weights)
    assert len({name for name, _ in weights}) == len(weights)
    for name, tensor in weights:
        with torch.inference_mode():
            words = tensor.reshape(-1).view(torch.uint8)
            assert words.data_ptr() == tensor.data_ptr()
            at = len(words) // 3
            words[at] ^= 4
            assert digest(core.weights()) != good, name
            words[at] ^= 4
    assert digest(core.weights()) == good


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_corrupted_tensor_of_the_serving_model_changes_the_digest_and_the_canary(
    tiny_model: Callable[..., Path], kernels: str
) -> None:
    core = core_of(tiny_model(), kernels)

    def canary(name: str) -> list[float]:
        scored = run(core, [request(name, range(32), max_tokens=0, salt=name.encode())])
        return [record.logprob for record in scored[name, 0].prompt]

    good = digest(core.weights()), canary("a")
    assert (digest(core.weights()), canary("b")) == good
    _, largest = max(core.weights(), key=lambda pair: pair[1].numel())
    with torch.inference_mode():
        largest.view(torch.uint8).reshape(-1)[1::4] ^= 1
    bad = digest(core.weights()), canary("c")
    assert bad[0] != good[0]
    assert bad[1] != good[1]
    with torch.inference_mode():
        # Not a number, in any format.
        largest.view(torch.uint8).fill_(255)
    scored = run(core, [request("d", range(32), max_tokens=0, salt=b"d")])["d", 0]
    assert scored.error == "snapshot base gave a logit that is not finite"


def test_places_count_and_so_do_names_shapes_and_odd_bytes() -> None:
    words = torch.arange(CHUNK_BYTES // 2, dtype=torch.int32)
    swapped = words.clone()
    swapped[0], swapped[1] = 1, 0
    far = words.clone()
    far[[0, CHUNK_BYTES // 4]] = far[[CHUNK_BYTES // 4, 0]]
    odd = [torch.tensor([1, 2, 3, 4, n], dtype=torch.uint8) for n in (5, 6)]
    whole = [("a", words)]
    different = [whole, [("a", swapped)], [("a", far)], [("b", words)], [("a", words.view(2, -1))]]
    different += [[("a", odd[0])], [("a", odd[1])], [("a", words[0])], []]
    assert len({digest(weights) for weights in different}) == len(different)
    assert digest([("a", words.view(-1, 4).T)]) == digest([("a", words.view(-1, 4).T.contiguous())])


@pytest.mark.slow
@pytest.mark.variant
async def test_the_engine_process_tells_the_digest_while_a_stream_runs(
    tiny_model: Callable[..., Path],
) -> None:
    first, second = tiny_model(), tiny_model(seed=1)

    engine = EmbeddedEngine(first, EngineSettings(kv_cache_tokens=8192))
    await engine.start()
    try:
        stream = engine.generate(request("r", [1, 2, 3], max_tokens=1500, echo=0))
        await anext(stream)
        digests = await asyncio.gather(engine.weights_digest(), engine.weights_digest())
        await engine.stage("second", second)
        await engine.commit("second")
        digests.append(await engine.weights_digest())
        assert digests[0] == digests[1] != digests[2]
        assert [event.finish async for event in stream][-1] == "length"
    finally:
        await engine.close()
    with pytest.raises(EngineDied):
        await engine.weights_digest()


@pytest.mark.slow
@pytest.mark.variant
async def test_engines_that_serve_the_same_files_pass_the_same_check_beside_running_streams(
    tiny_model: Callable[..., Path],
) -> None:
    """One started with them, one switched to them while it generates, one of them a second time."""
    first, second = tiny_model(dtype="bfloat16"), tiny_model(seed=1, dtype="bfloat16")

    settings = EngineSettings(kv_cache_tokens=8192)
    started, swapped = EmbeddedEngine(first, settings), EmbeddedEngine(second, settings)
    ids = iter(range(100))

    async def check(engine: EmbeddedEngine, info: ModelInfo) -> SnapshotCheck:
        return await Checker(engine, lambda: f"{next(ids)}").check(info, "first", 1)

    try:
        infos = await asyncio.gather(started.start(), swapped.start())
        expected, other = await check(started, infos[0]), await check(swapped, infos[1])
        assert expected.weights != other.weights
        assert expected.canary != other.canary
        assert len(expected.canary) == 31
        stream = swapped.generate(request("r", [1, 2, 3], max_tokens=3000, echo=0))
        await anext(stream)
        for _ in range(2):
            await swapped.stage("first", first)
            await swapped.commit("first")
            assert await check(swapped, infos[1]) == expected
        assert [event.finish async for event in stream][-1] == "length"
    finally:
        await asyncio.gather(started.close(), swapped.close())
