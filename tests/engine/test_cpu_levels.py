"""The kernels of every processor level that this machine runs: one order of sums, whatever the tiles are."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engine_helpers import needs_compiler
from tiers import variant

from midstream_kernels import build, prebuilt

HERE = Path(__file__).parent
TESTS = ("test_cpu_kernels.py", "test_cpu_decoder.py", "test_adapter_kernels.py", "test_sampler.py")
#: Those with fused multiply-add and without products of bfloat16 have the same bits.
FUSED = ("x86-64-v4", "x86-64-v3")
STORE, ADD, SILU_MUL = 0, 1, 2

Load = Callable[[str, str], SimpleNamespace]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """The kernels of a level ("": the fastest) for an element type."""
    needs_compiler("native")

    def loaded(level: str, suffix: str) -> SimpleNamespace:
        if level and not prebuilt.choose([level], platform.machine(), prebuilt.features()):
            pytest.skip(f"not an {level} processor")
        monkeypatch.setenv(prebuilt.ASKED, level)
        build.load.cache_clear()
        build.kernels.cache_clear()
        return build.kernels(suffix)

    yield loaded
    build.load.cache_clear()
    build.kernels.cache_clear()


def numbers(rng: np.random.Generator, count: int, suffix: str) -> np.ndarray:
    """Aligned to a cache line, with room behind the last."""
    size = 4 if suffix == "f32" else 2
    memory = np.zeros(count * size + 128, np.uint8)
    start = -memory.ctypes.data % 64
    values = rng.standard_normal(count, dtype=np.float32)
    if suffix == "bf16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    view = memory[start : start + count * size].view(values.dtype)
    view[:] = values
    return view


class Linear:
    """A map of n outputs and k inputs, with its weights packed."""

    def __init__(self, kernels: SimpleNamespace, suffix: str, n: int, k: int) -> None:
        rng = np.random.default_rng(n * 1000 + k)
        self._call, self._n, self._k = kernels.linear, n, k
        panels = -(-n // 32)
        weight = numbers(rng, n * k, suffix)
        rows = np.full(panels * 32, -1)
        rows[:n] = np.arange(n) * k * weight.itemsize
        self._packed = numbers(rng, panels * 32 * k, suffix)
        kernels.pack(weight.ctypes.data, rows.ctypes.data, panels, k, self._packed.ctypes.data)
        self.x = numbers(rng, 30 * k, suffix).reshape(30, k)
        self._start = numbers(rng, 30 * n, suffix).reshape(30, n)

    def __call__(self, first: int, last: int, mode: int) -> np.ndarray:
        """The outputs of some rows of x."""
        width = self._n // 2 if mode == SILU_MUL else self._n
        out = self._start[first:last, :width].copy()
        self._call(
            *(self.x[first:].ctypes.data, self._packed.ctypes.data, None, last - first, self._n, self._k),
            *(mode, out.ctypes.data, width, 1),
        )
        return out


#: Less than a block of units and several, panels that are not full, and one panel to five.
SHAPES = ((32, 16, STORE), (33, 130, ADD), (96, 48, SILU_MUL), (160, 1100, STORE), (70, 514, ADD))


@pytest.mark.parametrize("level", ["", *(variant(level.name) for level in prebuilt.LEVELS)])
@pytest.mark.parametrize("suffix", ["bf16", "f32"])
def test_a_row_has_the_bits_that_it_has_alone_in_a_batch_of_any_size(
    load: Load, level: str, suffix: str
) -> None:
    kernels = load(level, suffix)
    for n, k, mode in SHAPES:
        linear = Linear(kernels, suffix, n, k)
        alone = np.concatenate([linear(row, row + 1, mode) for row in range(30)])
        for rows in range(2, 31):
            assert np.array_equal(linear(0, rows, mode), alone[:rows]), (n, k, rows)


@pytest.mark.variant
@pytest.mark.parametrize("suffix", ["bf16", "f32"])
def test_levels_with_fused_multiply_add_have_the_same_bits(load: Load, suffix: str) -> None:
    first, second = (load(level, suffix) for level in FUSED)
    for n, k, mode in SHAPES:
        one, other = Linear(first, suffix, n, k), Linear(second, suffix, n, k)
        for rows in (1, 2, 3, 6, 7, 12, 30):
            assert np.array_equal(one(0, rows, mode), other(0, rows, mode)), (n, k, rows)


@pytest.mark.variant
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v2"])
def test_the_kernels_tests_pass_on_a_slower_level(load: Load, level: str) -> None:
    load(level, "bf16")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tier=fast"]
    done = subprocess.run(
        [*command, *(str(HERE / file) for file in TESTS)],
        env={**os.environ, prebuilt.ASKED: level},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
