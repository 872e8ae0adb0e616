"""Which tests each tier runs, and how long the tests of each folder took.

Owns: the options --tier, --share and --durations-file, the markers `slow`, `fast`, `variant` and `recipe`.
Always holds: each tier runs all that the tier before it runs, and `all` runs every test. The shares of all numbers below N are
together what `all` runs and `test` does not.

    fast   what proves a promise in seconds: in process, one kernel, one event loop, SQLite, few Hypothesis examples
    test   what proves every promise with real processes and the real SDKs
    all    every variant too: older SDK versions, other codecs, whole Ray clusters, many Hypothesis examples, trainers of others
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

TIERS = ("fast", "test", "all")
#: Their tests start servers, clusters or SDKs: `slow`, where a file does not say `fast`.
SLOW_FOLDERS = frozenset({"conformance", "demo", "e2e", "fireworks", "launch_ray", "vllm"})
DURATIONS_FILE = "test-durations.json"
#: How many threads PyTorch computes with.
THREADS = "OMP_NUM_THREADS"

_tier = "all"


def slow(value: object) -> Any:
    """A parameter of a test or fixture that the fast tier leaves out."""
    return pytest.param(value, marks=pytest.mark.slow)


def few_fast(values: Iterable[str], *fast: str) -> list[Any]:
    """Parameters of a test: those of `fast` run in every tier, the others not in the fast one."""
    found = [value if value in fast else slow(value) for value in values]
    assert sum(isinstance(value, str) for value in found) == len(fast), fast
    return found


def variant(*values: object) -> Any:
    """A parameter of a test or fixture, or a row of parameters, that only the tier `all` has."""
    return pytest.param(*values, marks=pytest.mark.variant)


def of_tier(*, fast: int, test: int, all: int) -> int:
    """How much of something this tier does: examples, swaps, rounds."""
    return {"fast": fast, "test": test, "all": all}[_tier]


def examples(usual: int) -> int:
    """How many Hypothesis examples a test tries that usually tries so many."""
    return of_tier(fast=min(usual, 20), test=usual, all=5 * usual)


def explores(config: pytest.Config) -> bool:
    """True for a whole run of the tier `all`: Hypothesis draws new examples there."""
    return bool(config.getoption("--tier") == "all" and config.getoption("--share") is None)


def tier_of(item: pytest.Item) -> str:
    """The first tier that runs the test."""
    if item.get_closest_marker("variant") or item.get_closest_marker("recipe"):
        return "all"
    in_slow_folder = SLOW_FOLDERS.intersection(item.path.parts) and not item.get_closest_marker("fast")
    return "test" if in_slow_folder or item.get_closest_marker("slow") else "fast"


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=TIERS, default="all", help="which tests run (tests/tiers.py)")
    group.addoption(
        "--share", metavar="K/N", help="of what `all` runs and `test` does not, share K of N, from 0 on"
    )
    group.addoption("--durations-file", type=Path, help="write how long each test took there, as JSON")


def configure(config: pytest.Config) -> None:
    global _tier
    _tier = config.getoption("--tier")
    for line in (
        "fast: in the fast tier, although the folder's other tests are not",
        "slow: not in the fast tier",
        "variant: only in the tier `all`",
        "recipe(name): runs a trainer of others, only in the tier `all`, and only where its environment is installed",
    ):
        config.addinivalue_line("markers", line)
    # xdist's workers tell the process that started them.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config.getoption("--durations-file")), "tier-durations")


#: A file that takes longer is dealt test by test. The tests of a shorter one may share a server.
DEALT_WHOLE_S = 250
#: Of a variant in this file or folder, on average, in seconds of one of two cores. One elsewhere takes 2.
SECONDS = {
    "test_cpu_levels.py": 14,
    "test_cpu_sanitizers.py": 60,
    "test_feature_pairs.py": 60,
    "test_kv_storm.py": 1,
    "test_ray_gateways.py": 10,
    "test_ray_serving.py": 20,
    "test_simulation.py": 30,
    "test_tinker_codec.py": 1,
    "test_tinker_protocol.py": 1,
    "test_verify.py": 25,
    "benchmarks": 1,
    "client": 6,
    "demo": 25,
    "e2e": 12,
    "fuzz": 9,
    # They run where others' trainers are installed, and in `make test-package`.
    "packaging": 0,
    "recipes": 0,
    "soak": 70,
    "tinker": 12,
    "transfer": 3,
}
#: What each share of CI does beside variants (.ci/run), in such seconds: vLLM, vLLM on a Ray cluster, the wheel.
BESIDE = (900, 480, 480, 0, 0, 0)


def seconds_of(file: str, tests: int = 1) -> float:
    """How long so many variants of the file take."""
    path = Path(file)
    return tests * SECONDS.get(path.name, SECONDS.get(path.parent.name, 2))


def dealt(files: list[str], count: int) -> list[int]:
    """The share of each test, by the files that have them. Six shares are those of CI.

    What takes longest is dealt first, each time to the share with the fewest seconds.
    """
    tests_of = dict[str, list[int]]()
    for place, file in enumerate(files):
        tests_of.setdefault(file, []).append(place)
    dealt_as_one = [
        (file, each)
        for file, places in tests_of.items()
        for each in (
            [places] if seconds_of(file, len(places)) <= DEALT_WHOLE_S else [[place] for place in places]
        )
    ]
    sums: list[float] = [*BESIDE] if count == len(BESIDE) else [0] * count
    shares = [0] * len(files)
    for file, places in sorted(dealt_as_one, key=lambda one: seconds_of(one[0], len(one[1])), reverse=True):
        smallest = sums.index(min(sums))
        sums[smallest] += seconds_of(file, len(places))
        for place in places:
            shares[place] = smallest
    return shares


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, wanted = config.getoption("--share"), TIERS.index(config.getoption("--tier"))
    if share is not None:
        number, _, count = share.partition("/")
        variants = [item for item in items if tier_of(item) == "all"]
        shares = dealt([str(item.path) for item in variants], int(count))
        kept = [item for item, its in zip(variants, shares, strict=True) if its == int(number)]
    else:
        kept = [item for item in items if TIERS.index(tier_of(item)) <= wanted]
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept


class CpuTime:
    """What this process, and those of its children that have ended, computed since the last look."""

    def __init__(self) -> None:
        self._before = self._now()

    def look(self) -> float:
        """In seconds."""
        before, self._before = self._before, self._now()
        return self._before - before

    @staticmethod
    def _now() -> float:
        return sum(os.times()[:4])


class Durations:
    """Adds up what setup, call and teardown of each test took, in seconds and in seconds of a core.

    A server that several tests share counts for the test whose teardown ends it.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._seconds: Counter[str] = Counter()
        self._cpu: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        self._cpu[report.nodeid] += getattr(report, "cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        folders, cpu, tests = Counter[str](), Counter[str](), Counter[str]()
        for test, seconds in self._seconds.items():
            folder = str(Path(test.partition("::")[0]).parent)
            folders[folder] += seconds
            cpu[folder] += self._cpu[test]
            tests[folder] += 1
        if self._file is not None:
            told = {"folders": folders, "tests": self._seconds, "cpu_of_tests": self._cpu}
            self._file.write_text(json.dumps({name: rounded(of) for name, of in told.items()}, indent=1))
        if len(folders) > 1:
            terminalreporter.section("seconds by folder, then those of a core")
            for folder, seconds in folders.most_common():
                terminalreporter.write_line(
                    f"{seconds:8.1f} s  {cpu[folder]:8.1f} s  {tests[folder]:5} tests  {folder}"
                )


def rounded(seconds: Counter[str]) -> dict[str, float]:
    ordered: Iterable[tuple[str, float]] = seconds.most_common()
    return {name: round(took, 2) for name, took in ordered}
