"""C++ that is built on this machine: where libraries are kept, who may put them there, what fails softly."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_helpers import request, run

from midstream.core.config import EngineSettings
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.modules import ModuleDecoder
from midstream_kernels import build, prebuilt
from midstream_kernels.build import kernels


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A library of one function."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")
    (tmp_path / "source").mkdir()
    file = tmp_path / "source" / "one.cpp"
    file.write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    file.with_name("answer.h").write_text("#define ANSWER 42\n")
    yield file
    build.load.cache_clear()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "midstream"


def answer(source: Path) -> int:
    build.load.cache_clear()
    value: int = build.load(source).answer()
    return value


def test_a_library_is_compiled_once_into_a_directory_only_its_owner_can_write(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = os.umask(0)
    try:
        assert answer(source) == 42
    finally:
        os.umask(old)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(build, "_built", lambda *_: pytest.fail("compiled again"))
    assert answer(source) == 42


#: Counts itself, and compiles when it may.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec {compiler} --version
echo compiled >> {counted}
until [ -e {go} ]; do sleep 0.01; done
exec {compiler} "$@"
"""


def test_of_those_that_start_together_one_compiles(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads wait for the lock of a file as processes do."""
    counted, go = tmp_path / "counted", tmp_path / "go"
    script = tmp_path / "c++"
    script.write_text(COMPILER.format(compiler=build._compiler(), counted=counted, go=go))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with ThreadPoolExecutor(3) as pool:
        started = [pool.submit(build._compiled, source, build.FLAGS) for _ in range(3)]
        try:
            while not counted.exists() or waiting_for_a_lock() < 2:
                assert not counted.exists() or counted.read_text() == "compiled\n"
                time.sleep(0.01)
        finally:
            go.touch()
        assert [one.result().answer() for one in started] == [42] * 3
    assert counted.read_text() == "compiled\n"


def waiting_for_a_lock() -> int:
    """How many threads of this process wait for the lock of a file."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines() if " -> " in line]
    return sum(int(line[5]) == os.getpid() for line in lines)


def damaged(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty file where a second cache has its library. (A path that was loaded before is not opened again.)"""
    assert answer(source) == 42
    (whole,) = cache.iterdir()
    second = cache.parent.parent / "second" / "midstream"
    second.mkdir(mode=0o700, parents=True)
    (second / whole.name).write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(second.parent))
    return second / whole.name


def test_a_library_that_others_could_have_put_there_is_not_loaded(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted = damaged(cache, source, monkeypatch)
    planted.parent.chmod(0o777)
    assert answer(source) == 42
    assert "other users can write to" in caplog.text
    assert "is built again" not in caplog.text
    assert planted.stat().st_size == 0


def test_a_damaged_library_is_built_again(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = damaged(cache, source, monkeypatch)
    assert answer(source) == 42
    assert file.stat().st_size > 0


def test_without_a_place_to_keep_it_the_library_is_built_for_this_process(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file where the directory should be")
    assert answer(source) == 42
    assert "compiled at each start" in caplog.text

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nobody)
    assert answer(source) == 42


def test_an_edited_header_makes_another_library(cache: Path, source: Path) -> None:
    assert answer(source) == 42
    source.with_name("answer.h").write_text("#define ANSWER 43\n")
    assert answer(source) == 43
    assert len(list(cache.iterdir())) == 2


LEVEL = """#if defined(__AVX512F__)
#define ANSWER 512
#elif defined(__AVX2__)
#define ANSWER 2
#else
#define ANSWER 1
#endif
"""


def test_the_level_that_the_environment_names_is_compiled_and_said(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    levels = [level.name for level in prebuilt.LEVELS]
    if prebuilt.choose(["x86-64-v3"], platform.machine(), prebuilt.features()) is None:
        pytest.skip("not an x86-64-v3 processor")
    caplog.set_level(logging.INFO)
    source.with_name("answer.h").write_text(LEVEL)
    fastest = prebuilt.choose(levels, platform.machine(), prebuilt.features())
    assert answer(source) == (2 if fastest == "x86-64-v3" else 512)
    assert f"kernels: {fastest}, compiled on this machine" in caplog.text
    for level, expected in (("x86-64-v3", 2), ("x86-64-v2", 1)):
        monkeypatch.setenv(prebuilt.ASKED, level)
        assert answer(source) == expected
        assert f"kernels: {level}, compiled on this machine" in caplog.text
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("x86-64-v9", "the levels of this machine are x86-64-v4-bf16, x86-64-v4, x86-64-v3, x86-64-v2"),
        ("x86-64-v3", "this processor lacks its instructions"),
    ],
)
def test_a_level_that_cannot_run_is_refused(
    cache: Path, source: Path, level: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(prebuilt, "features", lambda: frozenset())
    monkeypatch.setenv(prebuilt.ASKED, level)
    with pytest.raises(build.KernelsUnavailable, match=f"MIDSTREAM_KERNELS_LEVEL={level}: {said}"):
        answer(source)


def test_no_compiler_is_told_apart_from_a_source_that_does_not_compile(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setattr(build.shutil, "which", lambda name: None)
        with pytest.raises(build.KernelsUnavailable, match="no C\\+\\+ compiler was found"):
            answer(source)
    monkeypatch.setattr(build, "FLAGS", ("-DVOID", "-no-such-flag"))
    with pytest.raises(build.KernelsUnavailable, match="no-such-flag"):
        answer(source)
    assert not list(cache.iterdir())


def test_without_a_compiler_the_embedded_engine_computes_with_pytorch(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, asked = tiny_model(), request("r", [1, 2, 3], max_tokens=8, temperature=0.0)
    with monkeypatch.context() as without:
        without.setattr(build.shutil, "which", lambda name: None)
        build.load.cache_clear()
        kernels.cache_clear()
        core = EngineCore(model, EngineSettings())
        got = run(core, [asked])["r", 0]
    assert isinstance(core.runner.model.decoder, ModuleDecoder)
    assert "the native kernels are not used, steps will be slower: no C++ compiler was found" in caplog.text
    expected = run(EngineCore(model, EngineSettings(kernels="torch")), [asked])["r", 0]
    assert [record.token_id for record in got.tokens] == [record.token_id for record in expected.tokens]
    assert len(got.tokens) == 8


@pytest.mark.parametrize(
    "level", [level for level in prebuilt.LEVELS if level.machine == platform.machine()], ids=lambda x: x.name
)
def test_clang_takes_the_kernels(level: prebuilt.Level) -> None:
    clang = shutil.which("clang++")
    if clang is None:
        pytest.skip("no clang++")
    command = [clang, *prebuilt.FLAGS, *level.flags, "-fsyntax-only", str(build.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
