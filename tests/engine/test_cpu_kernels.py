"""The compiled kernels: packed rows, loops at once, and processes that may not start threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import needs_compiler

from midstream_kernels.build import kernels
from midstream_kernels.packing import PANEL


@pytest.fixture(autouse=True)
def _compiler() -> None:
    needs_compiler("native")


class Product:
    """x W^T, large enough for helper threads."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((64, 512), dtype=np.float32)
        weight = rng.standard_normal((512, 512), dtype=np.float32)
        self.expected = self.x @ weight.T
        self._memory = np.zeros(512 * 512 + 16, dtype=np.float32)
        self._packed = self._memory.ctypes.data + -self._memory.ctypes.data % 64
        rows = np.arange(512) * weight.strides[0]
        kernels("f32").pack(weight.ctypes.data, rows.ctypes.data, 16, 512, self._packed)

    def __call__(self, threads: int) -> np.ndarray:
        out = np.empty((64, 512), dtype=np.float32)
        kernels("f32").linear(
            self.x.ctypes.data, self._packed, None, 64, 512, 512, 0, out.ctypes.data, 512, threads
        )
        return out


@pytest.mark.parametrize("aside", [0, 4])
@pytest.mark.parametrize("units", [3, 16, 40, 448])
@pytest.mark.parametrize("suffix", ["f32", "bf16"])
def test_packed_rows_lie_side_by_side_in_the_asked_order(suffix: str, units: int, aside: int) -> None:
    """Whole squares of units and what is left of a row, and memory of every alignment. Nothing beside it is written."""
    rng = np.random.default_rng(units)
    weight = rng.integers(0, 2**32, (100, units), dtype=np.uint32)
    chosen = rng.integers(-1, len(weight), 3 * PANEL)
    rows = np.where(chosen < 0, -1, chosen * weight.strides[0])
    memory = np.full(len(rows) * units + 64, 7, np.uint32)
    begin = (-memory.ctypes.data % 64 + aside) // 4
    k = units * (1 if suffix == "f32" else 2)
    at = memory.ctypes.data + 4 * begin
    kernels(suffix).pack(weight.ctypes.data, rows.ctypes.data, len(rows) // PANEL, k, at)
    wanted = np.where(chosen[:, None] < 0, np.uint32(0), weight[chosen])
    packed = memory[begin : begin + wanted.size].reshape(-1, units, PANEL)
    assert np.array_equal(packed.transpose(0, 2, 1).reshape(wanted.shape), wanted)
    assert (memory[:begin] == 7).all()
    assert (memory[begin + wanted.size :] == 7).all()


def test_loops_that_run_at_once_on_several_threads_give_the_bits_of_one() -> None:
    """A snapshot is probed on its own thread beside the steps."""
    product = Product()
    alone = product(1)
    assert np.allclose(alone, product.expected, atol=1e-3)
    wrong: list[int] = []

    def many(number: int) -> None:
        wrong.extend(number for _ in range(100) if not np.array_equal(product(4), alone))

    callers = [threading.Thread(target=many, args=(i,)) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.skipif(sys.platform != "linux", reason="limits its address space")
@pytest.mark.slow
@pytest.mark.variant
def test_a_process_that_may_not_start_threads_computes_alone() -> None:
    script = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
from midstream.core.child import importing
with importing():
    from test_cpu_kernels import Product
product = Product()
alone = product(1)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
assert np.array_equal(product(8), alone) and np.array_equal(product(8), alone)
"""
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", script, here], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
