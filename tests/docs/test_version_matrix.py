"""docs/vllm.md shows what was run with each version of vLLM, and nothing else."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = runpy.run_path(str(ROOT / "tests" / "vllm" / "version_results.py"))


def test_the_table_of_versions_is_that_of_the_results() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert RESULTS["written"](page) == page, "run tests/vllm/version_results.py"


def test_a_cell_never_says_more_than_what_ran() -> None:
    cell = RESULTS["cell"]
    assert cell({}) == "not run"
    assert cell({"a": "passed", "b": "passed"}) == "yes (2)"
    assert cell({"a": "passed", "b": "failed"}) == "no: `b`"
    assert cell({"a": "passed", "b": "it has no names"}) == "yes (1); no: it has no names"


def test_every_module_that_is_shown_or_has_results_is_there() -> None:
    """One was renamed, and what it recorded stood in no table any more."""
    modules = {path.stem for path in (ROOT / "tests" / "vllm").glob("test_*.py")}
    named = {*RESULTS["SHOWN"], *RESULTS["RECOMPUTED"]}
    kept = {name for row in RESULTS["read"]().values() for part in ("tests", "numbers") for name in row[part]}
    assert (named | kept) - modules == set()
