"""Parsers of bytes from outside: what fuzzing found once passes for ever, it finds planted faults, and nothing else now."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import fuzz
import pytest
from planted_faults import FAULTS
from targets import TARGETS, control_side, inference_wires, rollout_requests
from tiers import variant

from midstream.ledger import database

SCRIPT = Path(fuzz.__file__)
SECONDS = 6
#: Of the planted faults, those that `make test` looks for.
FOUND_FAST = ("frames_unchecked",)
needs_atheris = pytest.mark.skipif(
    find_spec("atheris") is None, reason="atheris has no wheel for this Python"
)


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests of this process count the children that stay, and want ledgers on the disk and logs that are heard."""
    # Targets change both, for a process of their own.
    monkeypatch.setattr(database, "SYNCHRONOUS", database.SYNCHRONOUS)
    yield
    while rollout_requests._checks:
        rollout_requests._checks.pop().close()
    inference_wires.close()
    control_side.close_all()


def fuzzed(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--work", str(work), "--jobs", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_of_a_corpus_passes(name: str) -> None:
    inputs = sorted((fuzz.CORPORA / name).iterdir())
    assert len(inputs) >= 2
    for file in inputs:
        try:
            TARGETS[name].run(file.read_bytes())
        except Exception as error:
            raise AssertionError(f"python {SCRIPT} --replay {file}") from error


@pytest.mark.parametrize("name", TARGETS)
def test_what_the_encoders_write_passes(name: str) -> None:
    seeds = [*TARGETS[name].seeds()]
    assert seeds
    for seed in seeds:
        TARGETS[name].run(seed)


def test_every_target_is_run_and_has_a_corpus() -> None:
    assert fuzz.names_of_targets() == [*TARGETS]
    assert {folder.name for folder in fuzz.CORPORA.iterdir()} == {*TARGETS}
    assert sum(file.stat().st_size for file in fuzz.CORPORA.rglob("*") if file.is_file()) < 2**20


def test_a_process_imports_its_own_target_alone() -> None:
    """What it imports it instruments, which takes longer than fuzzing for a while."""
    named = "from targets import TARGETS; TARGETS['http_requests'], TARGETS['safetensors']"
    shown = "print(sorted(name for name in sys.modules if name.startswith('targets.')))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; import fuzz; fuzz.find_targets(); {named}; {shown}"],
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['targets.http_server', 'targets.snapshot_files', 'targets.target']\n"


@needs_atheris
@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in FOUND_FAST else variant(name) for name in FAULTS])
def test_a_planted_fault_is_found_and_its_input_passes_without_it(name: str, tmp_path: Path) -> None:
    target, runs = FAULTS[name].target, FAULTS[name].runs
    limits = ("--runs", str(runs), "--seconds", "300", "--seed", "1")
    found = fuzzed(tmp_path, "--targets", target, "--plant", name, *limits)
    assert found.returncode == 1, found.stdout + found.stderr
    (finding,) = (tmp_path / target / "findings").iterdir()
    assert str(finding) in found.stdout
    again = fuzzed(tmp_path, "--targets", target, "--replay", str(finding))
    assert again.returncode == 0, again.stdout + again.stderr


@needs_atheris
@pytest.mark.variant
@pytest.mark.parametrize("name", TARGETS)
def test_fuzzing_for_a_while_finds_nothing(name: str, tmp_path: Path) -> None:
    """By the same mutations each time: a change fails for what it did. `make fuzz` looks for what nobody has seen."""
    done = fuzzed(tmp_path, "--targets", name, "--seconds", str(SECONDS), "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
