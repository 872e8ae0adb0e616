"""What the tests of this folder found with one version of vLLM, as benchmarks/results/vllm_versions.json keeps it.

Always holds: a row is written by a run, and by nothing else. docs/vllm.md shows the file.
"""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "results" / "vllm_versions.json"
#: The columns of the table: the module of tests, and what it shows.
SHOWN = {
    "test_vllm_openai": "APIs, log-probabilities",
    "test_vllm_sampling_numbers": "both log-probabilities",
    "test_vllm_tinker": "Tinker",
    "test_vllm_conformance": "conformance",
    "test_vllm_hotload": "hot loads under streams",
    "test_vllm_policies": "policies",
    "test_vllm_push": "vLLM's classes push",
    "test_vllm_transfer_in_place": "weights in place",
    "test_vllm_kills": "processes killed",
}
BEGIN, END = "<!-- begin: vLLM versions -->\n", "<!-- end: vLLM versions -->\n"
#: The tests that compute each record again, and what they put it through.
RECOMPUTED = {
    "test_vllm_sampling_numbers": "filters, penalties, grammars, masks; a swap, resumes",
    "test_real_routes": "routes with the tokens; filters, penalties, grammars, masks; a swap, resumes, scored prompts",
    "test_real_provenance": "swaps of all cache policies, shared prompts, resumes",
    "test_real_policy_provenance": "two adapters and the base, swapped in turn",
    "test_real_policy_numbers": "two adapters and the base, swapped in turn, under filters, penalties, grammars",
}
#: What else a run counts there.
EXTRA = (
    "over_several_snapshots",
    "snapshots",
    "labels",
    "masks",
    "choices_of_experts",
    "passes_with_router_weights",
    "preemptions",
)
BEGIN_NUMBERS, END_NUMBERS = "<!-- begin: numbers -->\n", "<!-- end: numbers -->\n"


@dataclass
class VersionRun:
    """The outcomes of the tests of this run, by module, and the engine's card as a server reported it.

    numbers: of RECOMPUTED, by module and family.
    """

    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def computed_again(self, module: str, family: str, tokens: int, worst: float, **found: int) -> None:
        """worst: the largest difference of a log-probability, in nats."""
        row = {"commit": commit(), "tokens": tokens, "worst": float(f"{worst:.1e}"), **found}
        self.numbers.setdefault(module, {})[family] = row

    def took(self, module: str, test: str, report: pytest.TestReport) -> None:
        outcome = str(report.outcome)
        if report.skipped and isinstance(report.longrepr, tuple):
            outcome = report.longrepr[2].removeprefix("Skipped: ")
        tests = self.outcomes.setdefault(module, {})
        # Of the variants of a test, the one that failed.
        if tests.get(test) != "failed":
            tests[test] = outcome


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def write(version: str, run: VersionRun, replicas: int) -> None:
    """replicas: of the server that most tests share. What the file has of other modules of this version stays."""
    results = read()
    before = results.get(version, {})
    numbers = before.get("numbers", {})
    results[version] = {
        "commit": commit(),
        "python": platform.python_version(),
        "replicas": min(replicas, before.get("replicas", replicas)),
        # Of the server that most tests share: a run without it says nothing of features.
        "card": {"commit": commit(), **without_paths(run.card)} if run.card else before.get("card", {}),
        "tests": {**before.get("tests", {}), **run.outcomes},
        "numbers": numbers | {name: numbers.get(name, {}) | rows for name, rows in run.numbers.items()},
    }
    ordered = dict(sorted(results.items(), key=lambda row: number(row[0]), reverse=True))
    FILE.write_text(json.dumps(ordered, indent=1) + "\n")


def without_paths(card: dict[str, Any]) -> dict[str, Any]:
    """Reasons name directories of the machine."""
    found: dict[str, Any] = json.loads(json.dumps(card).replace(str(ROOT), "..."))
    return found


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip()


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def cell(tests: dict[str, str]) -> str:
    if not tests:
        return "not run"
    failed = sorted(name for name, outcome in tests.items() if outcome == "failed")
    if failed:
        return f"no: {', '.join(f'`{name}`' for name in failed)}"
    passed = sum(outcome == "passed" for outcome in tests.values())
    if reasons := sorted({outcome for outcome in tests.values() if outcome != "passed"}):
        return "; ".join(([f"yes ({passed})"] if passed else []) + [f"no: {reason}" for reason in reasons])
    return f"yes ({passed})"


def table() -> str:
    if not read():
        return "No run is recorded yet.\n"
    lines = [f"| vLLM | {' | '.join(SHOWN.values())} |", "|---" * (len(SHOWN) + 1) + "|"]
    for version, row in read().items():
        lines.append(f"| {version} | {' | '.join(cell(row['tests'].get(name, {})) for name in SHOWN)} |")
    return "\n".join(lines) + "\n"


def numbers_table() -> str:
    lines = [
        "| vLLM | model | over | tokens | largest difference | wrong | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for version, row in read().items():
        for name, what in RECOMPUTED.items():
            for family, found in row.get("numbers", {}).get(name, {}).items():
                more = [f"{found[field]:,} {field.replace('_', ' ')}" for field in EXTRA if field in found]
                cells = (f"{found['tokens']:,}", f"{found['worst']:.1e}", found["wrong"], found["commit"][:8])
                lines.append(
                    f"| {version} | {family} | {'; '.join([what, *more])} | {' | '.join(map(str, cells))} |"
                )
    return "\n".join(lines) + "\n" if len(lines) > 2 else "No run is recorded yet.\n"


def written(document: str) -> str:
    for begin, end, what in ((BEGIN, END, table()), (BEGIN_NUMBERS, END_NUMBERS, numbers_table())):
        before, rest = document.split(begin)
        document = before + begin + what + end + rest.split(end)[1]
    return document


if __name__ == "__main__":
    page = ROOT / "docs" / "vllm.md"
    page.write_text(written(page.read_text()))
