"""The README: its length, and what it promises. test_pasted_blocks.py runs its blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_fits_on_two_screens_and_has_three_first_uses() -> None:
    assert len(README.splitlines()) <= 120
    assert len(SNIPPETS) == 3


def test_the_readme_says_that_nothing_has_run_on_a_gpu_as_long_as_there_is_no_result_of_one() -> None:
    results = ROOT / "benchmarks" / "results" / "gpu.json"
    assert ("Nothing has run on a GPU yet" in README) == (not results.exists())
    assert "make gpu-check" in README


@pytest.mark.parametrize(
    ("page", "count", "link"), [("README.md", 5, "](docs/"), ("docs/index.md", 10, "](")]
)
def test_every_guarantee_leads_to_the_page_that_shows_it(page: str, count: int, link: str) -> None:
    section = (ROOT / page).read_text().split("## What you can rely on\n")[1].split("\n## ")[0]
    guarantees = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(guarantees) == count
    assert [guarantee for guarantee in guarantees if link not in guarantee] == []
