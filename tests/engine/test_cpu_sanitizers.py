"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer: the only native code of this project.

The tests of the kernels run again in a process in which every access of the kernels is checked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = (
    "test_cpu_kernels.py",
    "test_cpu_decoder.py",
    "test_adapter_kernels.py",
    "test_range_digests.py",
    "test_sampler.py",
)
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"
pytestmark = [pytest.mark.variant, pytest.mark.timeout(1800)]

BEYOND = """
import numpy as np
from midstream_kernels.build import kernels

x = np.zeros((4, 32), np.float32)
out = np.empty({rows} * 32, np.float32)
weight = np.ones(32, np.float32)
kernels("f32").rms_norm(x.ctypes.data, None, weight.ctypes.data, 4, 32, 1e-6, out.ctypes.data, 1)
print("returned")
"""


def runtime(compiler: str, name: str) -> str:
    said = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(said.stdout.strip())
    if not path.is_absolute() or not path.exists():
        pytest.skip(f"{compiler} has no {name}")
    return str(path.resolve())


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that builds and loads checked kernels."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    place = tmp_path_factory.mktemp("sanitizers")
    wrapper = place / "checked-g++"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" {FLAGS}\n')
    wrapper.chmod(0o755)
    preloaded = [runtime(compiler, name) for name in ("libasan.so", "libubsan.so")]
    return {
        **os.environ,
        "CXX": str(wrapper),
        "XDG_CACHE_HOME": str(place / "cache"),
        "LD_PRELOAD": " ".join(preloaded),
        # Python and torch keep memory to their end, and torch's own libraries are not ours to check.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }


@pytest.mark.parametrize("file", TESTS)
def test_the_kernels_tests_pass_with_every_access_checked(checked: dict[str, str], file: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--tier=fast",
        str(HERE / file),
    ]
    done = subprocess.run(command, env=checked, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert "ERROR: AddressSanitizer" not in said
    assert "runtime error:" not in said
    assert " passed" in said
    assert " skipped" not in said


@pytest.mark.parametrize(("rows", "seen"), [(4, False), (3, True)])
def test_a_write_beyond_an_array_is_seen(checked: dict[str, str], rows: int, seen: bool) -> None:
    script = BEYOND.format(rows=rows)
    done = subprocess.run(
        [sys.executable, "-c", script], env=checked, capture_output=True, text=True, check=False
    )
    assert ("heap-buffer-overflow" in done.stderr) is seen, done.stderr[-4000:]
    assert ("returned" in done.stdout) is not seen
