"""Kernels that came compiled: which of them a processor gets, and what is not used."""

from __future__ import annotations

import json
import logging
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream_kernels import build, prebuilt

X86 = [level.name for level in prebuilt.LEVELS if level.machine == "x86_64"]
#: As Linux lists them, of an EPYC 9004 (Zen 4), an EPYC 7003 (Zen 3), a Xeon of 2010 (Westmere) and a Graviton 3.
CPUINFO = {
    "zen4": "fpu pni ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt xsave avx f16c lahf_lm abm bmi1 avx2 bmi2 avx512f avx512dq "
    "avx512cd avx512bw avx512vl avx512_bf16 avx512_vnni",
    "westmere": "fpu pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm",
    "graviton": "fp asimd aes sha2 fphp asimdhp sve bf16",
}
ZEN4, WESTMERE, GRAVITON = (frozenset(line.split()) for line in CPUINFO.values())
ZEN3 = frozenset(name for name in ZEN4 if not name.startswith("avx512"))


@pytest.mark.parametrize(
    ("machine", "has", "expected"),
    [
        ("x86_64", ZEN4, "x86-64-v4-bf16"),
        ("x86_64", ZEN4 - {"avx512_bf16"}, "x86-64-v4"),
        ("x86_64", ZEN4 - {"avx512vl"}, "x86-64-v3"),
        ("x86_64", ZEN3, "x86-64-v3"),
        ("x86_64", ZEN3 - {"fma"}, "x86-64-v2"),
        ("x86_64", WESTMERE, "x86-64-v2"),
        ("x86_64", WESTMERE - {"sse4_2"}, None),
        ("aarch64", GRAVITON, None),
        ("aarch64", frozenset(), None),
    ],
)
def test_a_processor_gets_the_fastest_level_that_it_runs(
    machine: str, has: frozenset[str], expected: str | None
) -> None:
    assert prebuilt.choose(X86, machine, has) == expected


def test_a_level_that_the_wheel_lacks_is_passed_over() -> None:
    assert prebuilt.choose(X86[1:], "x86_64", ZEN4) == "x86-64-v4"
    assert prebuilt.choose(["armv8-a"], "aarch64", GRAVITON) == "armv8-a"


def test_flags_are_those_of_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores of one machine may differ, and threads move between them."""
    text = "flags\t\t: sse4_2 avx2 fma\nmodel name : x\nflags\t\t: sse4_2 avx2\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert prebuilt.features() == {"sse4_2", "avx2"}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The source of a function that answers 42, and a library of it that came with the wheel."""
    if not shutil.which("g++") or prebuilt.choose(X86, platform.machine(), prebuilt.features()) is None:
        pytest.skip("no g++, or not an x86-64 processor")
    (tmp_path / "source").mkdir()
    file = tmp_path / "source" / "one.cpp"
    file.write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    file.with_name("answer.h").write_text("#define ANSWER 42\n")
    prebuilt.compile_all(file, tmp_path / build.LIBRARIES, platform.machine(), "g++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.load.cache_clear()
    yield file
    build.load.cache_clear()


def test_a_wheel_needs_no_compiler_and_no_cache(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: pytest.fail("looked for a compiler"))
    assert build.load(source).answer() == 42
    assert not (source.parents[1] / "cache").exists()


def test_a_wheel_runs_the_level_that_the_environment_names(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(prebuilt.ASKED, "x86-64-v2")
    assert build.load(source).answer() == 42
    assert "kernels: x86-64-v2, compiled with this release by" in caplog.text


def chosen_file(source: Path) -> Path:
    name = prebuilt.choose(X86, platform.machine(), prebuilt.features())
    return source.parents[1] / build.LIBRARIES / f"one-{name}.so"


def break_header(source: Path) -> None:
    source.with_name("answer.h").write_text("#define ANSWER 43\n")


def break_library(source: Path) -> None:
    file = chosen_file(source)
    file.write_bytes(file.read_bytes()[:-1])


def break_manifest(source: Path) -> None:
    (source.parents[1] / build.LIBRARIES / prebuilt.MANIFEST).write_text("{")


def remove_library(source: Path) -> None:
    chosen_file(source).unlink()


@pytest.mark.parametrize(
    ("broken", "said", "answer"),
    [
        (break_header, "was changed after its libraries were compiled", 43),
        (break_library, "its bytes are not those of the release", 42),
        (remove_library, "cannot be used", 42),
        (break_manifest, "cannot be read", 42),
    ],
)
def test_what_is_not_of_this_source_and_whole_is_compiled_here(
    source: Path, caplog: pytest.LogCaptureFixture, broken: object, said: str, answer: int
) -> None:
    assert callable(broken)
    broken(source)
    assert build.load(source).answer() == answer
    assert said in caplog.text
    assert list((source.parents[1] / "cache" / "midstream").iterdir())


def test_the_manifest_names_what_was_compiled_and_how(source: Path) -> None:
    manifest = json.loads((source.parents[1] / build.LIBRARIES / prebuilt.MANIFEST).read_text())
    assert list(manifest["libraries"]) == X86
    assert manifest["flags"] == prebuilt.FLAGS
    assert manifest["source"] == prebuilt.source_digest(source)
    assert "g++" in manifest["compiler"].lower() or "gcc" in manifest["compiler"].lower()


def test_libraries_of_an_unknown_machine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compiled for aarch64, x86_64"):
        prebuilt.compile_all(Path(prebuilt.__file__), tmp_path, "riscv64", "g++")
