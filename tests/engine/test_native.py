"""The compiled kernels as a library and a thread pool: where they are kept, who may put them there, what fails softly."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import needs_compiler

from midstream.engine.embedded.native import library
from midstream.engine.embedded.native.library import kernels


@pytest.fixture(autouse=True)
def _compiler() -> None:
    needs_compiler("native")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache directory, and a library of one function in the kernels' place, which compiles quickly."""
    source = tmp_path / "source"
    source.mkdir()
    (source / library.MAIN).write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(library, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load_library.cache_clear()
    yield tmp_path / "cache" / "midstream"
    library.load_library.cache_clear()


def answer() -> int:
    library.load_library.cache_clear()
    value: int = library.load_library().answer()
    return value


def test_a_library_is_compiled_once_into_a_directory_only_its_owner_can_write(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = os.umask(0)
    try:
        assert answer() == 42
    finally:
        os.umask(old)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(library, "_built", lambda *_: pytest.fail("compiled again"))
    assert answer() == 42


def damaged(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty file where a second cache has its library. (A path that was loaded before is not opened again.)"""
    assert answer() == 42
    (whole,) = cache.iterdir()
    second = cache.parent.parent / "second" / "midstream"
    second.mkdir(mode=0o700, parents=True)
    (second / whole.name).write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(second.parent))
    return second / whole.name


def test_a_library_that_others_could_have_put_there_is_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted = damaged(cache, monkeypatch)
    planted.parent.chmod(0o777)
    assert answer() == 42
    assert "can be written by others" in caplog.text
    assert "is built again" not in caplog.text
    assert planted.stat().st_size == 0


def test_a_damaged_library_is_built_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = damaged(cache, monkeypatch)
    assert answer() == 42
    assert file.stat().st_size > 0


def test_without_a_place_to_keep_it_the_library_is_built_for_this_process(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file where the directory should be")
    assert answer() == 42
    assert "compiled at each start" in caplog.text

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nobody)
    assert answer() == 42


class Product:
    """x W^T, large enough for helper threads."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((64, 512), dtype=np.float32)
        weight = rng.standard_normal((512, 512), dtype=np.float32)
        self.expected = self.x @ weight.T
        self._memory = np.zeros(512 * 512 + 16, dtype=np.float32)
        self._packed = self._memory.ctypes.data + -self._memory.ctypes.data % 64
        rows = np.arange(512, dtype=np.int32)
        kernels("f32").pack(weight.ctypes.data, rows.ctypes.data, 16, 512, self._packed)

    def __call__(self, threads: int) -> np.ndarray:
        out = np.empty((64, 512), dtype=np.float32)
        kernels("f32").linear(
            self.x.ctypes.data, self._packed, None, 64, 512, 512, 0, out.ctypes.data, 512, threads
        )
        return out


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
def test_a_process_that_may_not_start_threads_computes_alone() -> None:
    script = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
from test_native import Product
product = Product()
alone = product(1)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
assert np.array_equal(product(8), alone) and np.array_equal(product(8), alone)
"""
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", script, here], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
