"""What `make wheel` built: its files, and a server from it on a machine without a compiler.

Skipped unless dist/ has a wheel; `make test-package` builds one first and demands that nothing is skipped for want of it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from midstream import __version__
from midstream_kernels import prebuilt

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
KERNELS = "midstream_kernels"
START_S = 120.0
#: Without this checkout's own package and its compiler.
PLAIN = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CXX")}
pytestmark = pytest.mark.variant


def absent(why: str) -> None:
    if os.environ.get("MIDSTREAM_TEST_PACKAGE"):
        pytest.fail(why)
    pytest.skip(why)


def only(pattern: str) -> Path:
    found = list(DIST.glob(pattern))
    if len(found) != 1:
        absent(f"dist/ has {len(found)} files {pattern}: run make wheel")
    return found[0]


@pytest.fixture(scope="module")
def wheel() -> Path:
    return only(f"midstream-{__version__}-py3-none-manylinux_*_{platform.machine()}.whl")


@pytest.fixture(scope="module")
def sdist() -> Path:
    return only(f"midstream-{__version__}.tar.gz")


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """Files of the package, below src/, as git has them."""
    command = ["git", "ls-files", "-z", "src"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        absent("not a checkout of git")
    return {name.removeprefix("src/") for name in listed.stdout.split("\0") if name}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and, by path, the dependencies of this one."""
    place = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    python = place / "bin" / "python"
    pip = [
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run([*pip, wheel], env=PLAIN, check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return place


def test_the_sdist_has_the_package_and_what_builds_it(sdist: Path, tracked: set[str]) -> None:
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    own = {name for name in files if not name.startswith("src/")}
    expected = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    assert own == expected | {"PKG-INFO", "setup.cfg"}
    package = {name.removeprefix("src/") for name in files - own if "egg-info" not in name}
    assert package == tracked


def test_the_wheel_has_the_package_and_every_level_of_its_machine(wheel: Path, tracked: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        own = f"midstream-{__version__}.dist-info/"
        files = {name for name in archive.namelist() if not name.startswith(own) and not name.endswith("/")}
        manifest = json.loads(archive.read(f"{KERNELS}/libraries/manifest.json"))
        metadata = archive.read(f"midstream-{__version__}.dist-info/METADATA").decode()
        assert f"midstream-{__version__}.dist-info/licenses/LICENSE" in archive.namelist()
    levels = {level.name for level in prebuilt.LEVELS if level.machine == platform.machine()}
    libraries = {f"{KERNELS}/libraries/kernels-{level}.so" for level in levels}
    assert files == tracked | libraries | {f"{KERNELS}/libraries/manifest.json"}
    assert set(manifest["libraries"]) == levels
    assert manifest["source"] == prebuilt.source_digest(ROOT / "src" / KERNELS / "kernels" / "kernels.cpp")
    assert f"\nVersion: {__version__}\n" in metadata


def test_without_asking_for_kernels_a_wheel_is_pure_and_needs_no_compiler(
    sdist: Path, tmp_path: Path
) -> None:
    builder = ROOT / ".venv-package" / "bin" / "python"
    if not builder.exists():
        absent("no .venv-package: run make setup-package")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    env = {**os.environ, "PATH": "/nowhere"}
    env.pop("MIDSTREAM_KERNELS", None)
    subprocess.run(
        [builder, "-m", "build", "--wheel", "--outdir", tmp_path / "out", source], env=env, check=True
    )
    (built,) = (tmp_path / "out").iterdir()
    assert built.name == f"midstream-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(built) as archive:
        assert not [name for name in archive.namelist() if "libraries" in name or name.endswith(".so")]


@contextmanager
def server(command: list[str], env: dict[str, str], place: Path) -> Iterator[tuple[str, Path]]:
    """`command serve` with one replica of tiny-moe in an empty state directory: its URL and log."""
    place.mkdir()
    log = place / "log"
    options = ["serve", "--replicas", "1", "--port", "0", "--state-dir", str(place / "state"), "--no-tinker"]
    env = {**env, "XDG_CACHE_HOME": str(place / "cache")}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, *options], env=env, cwd=place, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], START_S)
            line = process.stdout.readline() if ready else ""
            url = re.search(r"ready on (http://\S+?)[ ,]", line)
            assert url, f"{line}\n{log.read_text()[-4000:]}"
            yield url[1], log
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()


def sampled(url: str) -> list[Any]:
    """Tokens and both numbers of each, of sampled completions of several lengths."""
    found = []
    for seed in range(8):
        body = {
            "model": "tiny-moe",
            "prompt": list(range(3, 20 + seed)),
            "max_tokens": 48,
            "temperature": 0.9,
            "seed": seed,
            "logprobs": True,
            "return_token_ids": True,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["token_ids"]
        found.append((choice["token_ids"], choice["logprobs"]))
    return found


def test_the_wheel_serves_without_a_compiler_with_the_numbers_of_kernels_compiled_here(
    installed: Path, tmp_path: Path
) -> None:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        absent("no C++ compiler to compare with")
    without = {**PLAIN, "PATH": str(installed / "bin")}
    with server([str(installed / "bin" / "midstream")], without, tmp_path / "wheel") as (url, log):
        from_wheel = sampled(url)
        # Its page and scripts came with the wheel.
        page = httpx.get(f"{url}/dashboard", timeout=60, follow_redirects=True)
        assert page.status_code == 200
        assert "<script" in page.text
    level = re.search(r"kernels: (\S+), compiled with this release", log.read_text())
    assert level, log.read_text()
    assert level[1] == prebuilt.choose(
        [one.name for one in prebuilt.LEVELS], platform.machine(), prebuilt.features()
    )
    assert "are not used" not in log.read_text()
    assert not (tmp_path / "wheel" / "cache" / "midstream").exists()

    checkout = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with server([sys.executable, "-m", "midstream.cli"], checkout, tmp_path / "checkout") as (url, log):
        from_source = sampled(url)
    assert "compiling kernels.cpp, once on this machine" in log.read_text()
    assert from_wheel == from_source


def test_the_wheel_tells_its_version(installed: Path) -> None:
    command = [installed / "bin" / "midstream", "--version"]
    said = subprocess.run(command, env=PLAIN, capture_output=True, text=True, check=True)
    assert said.stdout == f"midstream {__version__}\n"


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A directory, and for each machine the program that runs kernels and prints hashes of what they computed."""
    compilers = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}
    for tool in (*compilers.values(), "qemu-aarch64"):
        if not shutil.which(tool):
            pytest.skip(f"no {tool} (Debian: g++-aarch64-linux-gnu, qemu-user)")
    if (
        platform.machine() != "x86_64"
        or prebuilt.choose(["x86-64-v3"], "x86_64", prebuilt.features()) is None
    ):
        pytest.skip("needs an x86-64-v3 processor")
    place = tmp_path_factory.mktemp("arm")
    programs = {}
    for machine, compiler in compilers.items():
        programs[machine] = place / f"check-{machine}"
        source = Path(__file__).with_name("kernels_check.cpp")
        subprocess.run([compiler, "-std=c++17", source, "-o", programs[machine], "-ldl"], check=True)
    return place, programs


def test_arm_kernels_compute_the_bits_of_x86_ones_under_an_emulator(
    wheel: Path, arm: tuple[Path, dict[str, Path]]
) -> None:
    """Both have fused multiply-add, and every kernel adds in one order. So no bit may differ."""
    place, programs = arm
    source = ROOT / "src" / KERNELS / "kernels" / "kernels.cpp"
    prebuilt.compile_all(source, place, "aarch64", "aarch64-linux-gnu-g++")
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract(f"{KERNELS}/libraries/kernels-x86-64-v3.so", place)
    emulated = [
        "qemu-aarch64",
        "-L",
        "/usr/aarch64-linux-gnu",
        programs["aarch64"],
        place / "kernels-armv8-a.so",
    ]
    there = subprocess.run(emulated, capture_output=True, text=True, check=True).stdout.splitlines()
    here = subprocess.run([programs["x86_64"], library], capture_output=True, text=True, check=True)
    assert len(there) == 22
    assert there == here.stdout.splitlines()


def test_every_level_that_this_processor_runs_draws_the_same_tokens(
    wheel: Path, arm: tuple[Path, dict[str, Path]]
) -> None:
    place, programs = arm
    has, said = prebuilt.features(), {}
    with zipfile.ZipFile(wheel) as archive:
        for level in prebuilt.LEVELS:
            if prebuilt.choose([level.name], "x86_64", has):
                library = archive.extract(f"{KERNELS}/libraries/kernels-{level.name}.so", place)
                done = subprocess.run(
                    [programs["x86_64"], library], capture_output=True, text=True, check=True
                )
                said[level.name] = [line for line in done.stdout.splitlines() if line.startswith("tokens_")]
    assert len(said) > 1
    assert len(set(map(tuple, said.values()))) == 1, said


def test_the_wheel_is_of_this_checkout(wheel: Path, tracked: set[str]) -> None:
    """A wheel of an older checkout would test something else."""
    with zipfile.ZipFile(wheel) as archive:
        for name in tracked:
            assert archive.read(name) == (ROOT / "src" / name).read_bytes(), f"{name}: run make wheel again"
