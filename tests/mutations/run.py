"""Shows that the tests notice broken guarantees: applies each mutation of catalogue.py to a copy of src/ and runs its tests.

    python tests/mutations/run.py [NAME ...] [--tier fast|test] [--whole]

--whole runs the tier's own command (make test-fast, make test) instead of the tests that the mutation lists.

Always holds: the working tree is never changed, and the tests import the copy. A mutation counts as killed only when a test
ran and failed: not when the mutated code cannot be imported, nor when time ran out. Exits with 1 unless all are killed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

from catalogue import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
# Of one test; those that kill take seconds.
TEST_S_MAX = 120
# Of a mutation's own tests.
LISTED_S_MAX = 900.0
# Of a whole tier.
WHOLE_S_MAX = 3600.0
TIERS = {"fast": "test-fast", "test": "test"}

#: Failures that say nothing of a guarantee: the mutated code is no code, or time ran out.
_NO_PROOF = re.compile(
    r"(Failed: Timeout|TimeoutError|ImportError|ModuleNotFoundError|SyntaxError|NameError|UnboundLocalError)\b"
)


class Verdict(NamedTuple):
    """killed: a test failed for a reason that counts. why: which one, or what happened instead."""

    killed: bool
    why: str


class TextGone(Exception):
    """The text of a mutation is not in its file exactly once."""


def mutated(mutation: Mutation, text: str) -> str:
    """`text`, of the mutation's file, with the fault in it. Raises TextGone."""
    count = text.count(mutation.before)
    if count != 1:
        raise TextGone(f"{mutation.name}: its text is {count} times in {mutation.file}, expected once")
    return text.replace(mutation.before, mutation.after)


def judged(report: str | None) -> Verdict:
    """What a JUnit report of pytest says; None: there is none."""
    if report is None:
        return Verdict(False, "the tests ended without a report")
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    other = ""
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for failure in case.findall("failure"):
            message = (failure.get("message") or "").strip().split("\n")[0]
            if not _NO_PROOF.match(message):
                return Verdict(True, name)
            other = other or f"{name}: {message}"
        for error in case.findall("error"):
            other = other or f"{name}: {(error.get('message') or '').strip()}"
    if other:
        return Verdict(False, f"no test failed for a reason that counts: {other[:200]}")
    ran = sum(case.find("skipped") is None for case in cases)
    return Verdict(False, f"survived {ran} tests" if ran else "no test ran")


@contextmanager
def applied(mutation: Mutation, sources: Path) -> Iterator[None]:
    """The copy `sources` has the fault within. Raises TextGone."""
    path = sources / mutation.path
    text = path.read_text()
    _write(path, mutated(mutation, text))
    try:
        yield
    finally:
        _write(path, text)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    if path.suffix == ".py":
        # Bytecode is told apart by size and second, which two versions of a file can share.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def command(mutation: Mutation, tier: str, whole: bool, report: Path) -> list[str]:
    told = ["-x", f"--junitxml={report}", "-p", "no:cacheprovider"]
    if whole:
        return ["make", TIERS[tier], f"TEST_ARGS={shlex.join(told)}"]
    limits = [f"--timeout={TEST_S_MAX}", "--timeout-method=signal"]
    tests = [str(ROOT / "tests" / test) for test in mutation.tests]
    return [sys.executable, "-m", "pytest", "-q", *told, *limits, "--tier", tier, *tests]


def run_tests(argv: Sequence[str], work: Path, sources: Path, limit_s: float, log: Path) -> bool:
    """Run the command on `sources`; whether it ended in time. What it leaves running is ended."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(sources),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(work / "hypothesis"),
    }
    with log.open("wb") as out:
        tests = subprocess.Popen(
            argv, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            tests.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()
    return True


def tried(mutation: Mutation, work: Path, tier: str, whole: bool) -> Verdict:
    """work: a directory with the copy of src/ in it."""
    report, log = work / f"{mutation.name}.xml", work / f"{mutation.name}.log"
    argv = command(mutation, tier, whole, report)
    try:
        with applied(mutation, work / "src"):
            in_time = run_tests(argv, work, work / "src", WHOLE_S_MAX if whole else LISTED_S_MAX, log)
    except TextGone as gone:
        return Verdict(False, str(gone))
    if not in_time:
        return Verdict(False, "the tests took too long")
    verdict = judged(report.read_text() if report.exists() else None)
    if not verdict.killed:
        print(log.read_text(errors="replace")[-2000:])
    return verdict


def selected(names: Sequence[str], tier: str) -> list[Mutation]:
    """Those named, else all that the tier should kill. Raises KeyError."""
    if names:
        known = {mutation.name: mutation for mutation in MUTATIONS}
        return [known[name] for name in names]
    return [mutation for mutation in MUTATIONS if tier != "fast" or mutation.fast]


def table(rows: Sequence[tuple[Mutation, Verdict, float]]) -> str:
    width = max(len(mutation.name) for mutation, _, _ in rows)
    lines = [
        f"{'killed  ' if verdict.killed else 'SURVIVED'}  {mutation.name:{width}}  {seconds:6.1f} s  {verdict.why}"
        for mutation, verdict, seconds in rows
    ]
    killed = sum(verdict.killed for _, verdict, _ in rows)
    return "\n".join([*lines, f"{killed} of {len(rows)} killed"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations; default: all of the tier")
    parser.add_argument("--tier", choices=tuple(TIERS), default="test")
    parser.add_argument(
        "--whole", action="store_true", help="run the tier's own command, not the listed tests"
    )
    asked = parser.parse_args(arguments)
    try:
        mutations = selected(asked.names, asked.tier)
    except KeyError as unknown:
        parser.error(f"there is no mutation {unknown}")
    rows: list[tuple[Mutation, Verdict, float]] = []
    with tempfile.TemporaryDirectory(prefix="midstream-mutations-") as directory:
        work = Path(directory)
        shutil.copytree(
            ROOT / "src", work / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
        for number, mutation in enumerate(mutations, start=1):
            print(f"[{number}/{len(mutations)}] {mutation.name}: {mutation.breaks}", flush=True)
            began = time.monotonic()
            verdict = tried(mutation, work, asked.tier, asked.whole)
            rows.append((mutation, verdict, time.monotonic() - began))
            print(f"    {'killed by' if verdict.killed else 'SURVIVED:'} {verdict.why}", flush=True)
    print("\n" + table(rows))
    return 0 if all(verdict.killed for _, verdict, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
