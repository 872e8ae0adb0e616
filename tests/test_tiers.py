"""What each tier runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiers

ROOT = Path(__file__).parents[1]


def collected(tier: str, folder: str) -> set[str]:
    """The files of which the tier runs a test."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--tier={tier}",
        folder,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return {Path(line.partition("::")[0]).name for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.slow
def test_a_trainer_of_others_runs_in_no_tier_but_all() -> None:
    """Whatever is installed: a recipe takes minutes."""
    fast, everything = (collected(tier, "tests/recipes") for tier in ("fast", "all"))
    assert {"test_trl.py", "test_art.py"} <= everything
    assert not {"test_trl.py", "test_art.py"} & fast
    # What needs no trainer runs at once.
    assert "test_trl_server.py" in fast


def test_six_runs_of_ci_run_all_that_make_test_leaves_out() -> None:
    """Each part of the variants, and each further target of `make test-all`, is in one share of .ci/run."""
    listed = re.search(r"^shares=\((.*?)^\)", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert listed is not None
    shares = re.findall(r'"(.+)"', listed[1])
    targets = Counter(word for share in shares for word in share.split() if "=" not in word)
    parts = Counter[int]()
    counts = set()
    for numbers, count in re.findall(r"SHARE=([\d,]+)/(\d+)", listed[1]):
        parts.update(map(int, numbers.split(",")))
        counts.add(int(count))
    assert len(shares) == 6
    assert {target for target in targets if target != "test-variants"} == {
        "test-vllm",
        "test-ray-vllm",
        "test-package",
    }
    assert targets["test-variants"] == len(re.findall("SHARE=", listed[1]))
    [count] = counts
    assert parts == Counter(range(count))


def test_every_module_of_the_real_vllm_has_its_place_in_their_order() -> None:
    """No tier collects the folder, so nothing else would see that one is missing."""
    folder = ROOT / "tests/vllm"
    order = re.search(
        r"^ORDER = \[(.*?)^\]", (folder / "conftest.py").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert order is not None
    assert sorted(re.findall(r'"(\w+)"', order[1])) == sorted(path.stem for path in folder.glob("test_*.py"))


def test_each_variant_is_in_one_part_and_short_files_are_whole() -> None:
    files = [f"tests/e2e/short-{number % 9}" for number in range(27)] + ["tests/docs/long"] * 60
    parts = tiers.dealt(files, 7)
    assert set(parts) == set(range(7))
    for name in set(files) - {"tests/docs/long"}:
        assert len({part for file, part in zip(files, parts, strict=True) if file == name}) == 1


def test_parts_take_equally_long_though_their_tests_do_not() -> None:
    files = ["tests/docs/long"] * 100 + ["tests/fuzz/long"] * 20 + ["tests/soak/one"]
    parts = tiers.dealt(files, 7)
    seconds = [0] * 7
    for file, part in zip(files, parts, strict=True):
        seconds[part] += {"docs": 2, "fuzz": tiers.SECONDS["fuzz"], "soak": tiers.SECONDS["soak"]}[
            file.split("/")[1]
        ]
    assert max(seconds) - min(seconds) <= 2
