"""What each tier runs."""

from __future__ import annotations

import re
import subprocess
import sys
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
    """Each share of the variants, and each further target of `make test-all`, is in .ci/run."""
    listed = re.search(r"^shares=\((.*?)^\)", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert listed is not None
    shares = re.findall(r'"(.+)"', listed[1])
    assert [re.findall(r"SHARE=(\d+)/6$", share) for share in shares] == [
        [str(number)] for number in range(6)
    ]
    others = [re.findall(r"^(\S+) test-variants ", share) for share in shares]
    assert others == [["test-vllm"], ["test-ray-vllm"], ["test-package"], [], [], []]
    # A share that does more has fewer variants.
    assert [bool(other) for other in others] == [seconds > 0 for seconds in tiers.BESIDE]


def test_every_module_of_the_real_vllm_has_its_place_in_their_order() -> None:
    """No tier collects the folder, so nothing else would see that one is missing."""
    folder = ROOT / "tests/vllm"
    order = re.search(
        r"^ORDER = \[(.*?)^\]", (folder / "conftest.py").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert order is not None
    assert sorted(re.findall(r'"(\w+)"', order[1])) == sorted(path.stem for path in folder.glob("test_*.py"))


def test_each_variant_is_in_one_share_and_short_files_are_whole() -> None:
    files = [f"tests/e2e/short-{number % 9}" for number in range(27)] + ["tests/e2e/long"] * 60
    shares = tiers.dealt(files, 7)
    assert set(shares) == set(range(7))
    for name in set(files) - {"tests/e2e/long"}:
        assert len({share for file, share in zip(files, shares, strict=True) if file == name}) == 1


def test_shares_take_equally_long_whatever_else_they_do() -> None:
    files = ["tests/docs/long"] * 900 + ["tests/fuzz/long"] * 200 + ["tests/soak/one"]
    for count, beside in ((7, [0] * 7), (6, [*tiers.BESIDE])):
        seconds = [*map(float, beside)]
        for file, share in zip(files, tiers.dealt(files, count), strict=True):
            seconds[share] += tiers.seconds_of(file)
        assert max(seconds) - min(seconds) <= 2
