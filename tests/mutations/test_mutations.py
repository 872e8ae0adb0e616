"""The list of seeded faults is kept true, and what the script calls killed is."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import run
from catalogue import MUTATIONS, Mutation

TESTS = run.ROOT / "tests"
FAULT = Mutation("fault", "file.py", "limit = 1", "limit = 2", "The limit is one.", ("test_file.py",))


def test_a_mutations_text_is_there_once_and_the_mutated_file_compiles() -> None:
    gone = []
    for mutation in MUTATIONS:
        try:
            text = run.mutated(mutation, (run.SOURCE / mutation.path).read_text())
        except run.TextGone as error:
            gone.append(str(error))
            continue
        if mutation.file.endswith(".py"):
            compile(text, mutation.file, "exec")
    assert not gone, "\n".join(gone)


def test_the_tests_that_kill_a_mutation_are_there() -> None:
    for mutation in MUTATIONS:
        assert mutation.tests
        for test in mutation.tests:
            path, _, name = test.partition("::")
            assert (TESTS / path).is_file(), mutation.name
            assert not name or f"def {name.partition('[')[0]}(" in (TESTS / path).read_text(), mutation.name


def test_the_list_is_as_long_as_promised_and_no_name_or_guarantee_comes_twice() -> None:
    assert len(MUTATIONS) >= 40
    assert sum(mutation.fast for mutation in MUTATIONS) >= 30
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    assert len({mutation.breaks for mutation in MUTATIONS}) == len(MUTATIONS)


def _invariants() -> dict[str, list[str]]:
    """Each row of the table of invariants, with the tests that it names, paths below tests/."""
    text = (run.ROOT / "docs" / "architecture.md").read_text()
    _, heading, section = text.partition("\n## Invariants")
    assert heading
    rows = [
        line.strip("| ").split(" | ")
        for line in section.split("\n## ")[0].splitlines()
        if line.startswith("| ") and "tests/" in line
    ]
    return {row[0]: re.findall(r"`(?:tests/)?([\w./]+)`", row[-1]) for row in rows}


@pytest.mark.parametrize("invariant", _invariants())
def test_every_invariant_has_a_mutation_that_its_own_tests_kill(invariant: str) -> None:
    named = _invariants()[invariant]
    killers = {test.partition("::")[0] for mutation in MUTATIONS for test in mutation.tests}
    assert any(_covers(name, killer) for name in named for killer in killers)


def _covers(named: str, killer: str) -> bool:
    if named.endswith("/"):
        return killer.startswith(named)
    return killer == named or killer.endswith(f"/{named}")


@pytest.mark.parametrize("text", ["", "limit = 1\nlimit = 1\n"])
def test_a_text_that_is_gone_or_comes_twice_is_an_error(text: str) -> None:
    with pytest.raises(run.TextGone, match=r"fault: its text is \d times in file\.py"):
        run.mutated(FAULT, text)


def test_the_fault_is_in_the_copy_only_while_it_is_tried(tmp_path: Path) -> None:
    file = tmp_path / FAULT.path
    file.parent.mkdir()
    file.write_text("limit = 1\n")
    with run.applied(FAULT, tmp_path):
        assert file.read_text() == "limit = 2\n"
    assert file.read_text() == "limit = 1\n"


@pytest.mark.parametrize(
    ("outcome", "killed", "why"),
    [
        ('<failure message="AssertionError: assert 2 == 1"/>', True, "tests.test_file::test_limit"),
        ('<failure message="ValueError: no"/>', True, "tests.test_file::test_limit"),
        ("", False, "survived 1 tests"),
        ("<skipped/>", False, "no test ran"),
        ('<failure message="Failed: Timeout (&gt;120.0s) from pytest-timeout."/>', False, "Timeout"),
        ('<failure message="TimeoutError"/>', False, "TimeoutError"),
        ('<failure message="ImportError: cannot import name"/>', False, "cannot import"),
        ("<failure message=\"NameError: name 'x' is not defined\"/>", False, "not defined"),
        ('<error message="collection failure"/>', False, "collection failure"),
        ('<error message="failed on setup with &quot;OSError&quot;"/>', False, "failed on setup"),
    ],
)
def test_a_mutation_is_killed_by_a_test_that_ran_and_failed(outcome: str, killed: bool, why: str) -> None:
    case = f'<testcase classname="tests.test_file" name="test_limit">{outcome}</testcase>'
    verdict = run.judged(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    assert verdict.killed is killed
    assert why in verdict.why


def test_tests_that_end_without_a_report_prove_nothing() -> None:
    assert run.judged(None) == run.Verdict(False, "the tests ended without a report")


def test_a_tier_runs_the_tests_it_has(tmp_path: Path) -> None:
    assert run.selected((), "test") == list(MUTATIONS)
    assert run.selected((), "fast") == [mutation for mutation in MUTATIONS if mutation.fast]
    assert run.command(FAULT, "fast", False, tmp_path / "report")[-1] == str(TESTS / "test_file.py")
    assert run.command(FAULT, "fast", True, tmp_path / "report")[:2] == ["make", "test-fast"]
    assert run.command(FAULT, "test", True, tmp_path / "report")[:2] == ["make", "test"]


def test_tests_run_on_the_copy_and_are_ended_when_they_take_too_long(tmp_path: Path) -> None:
    show = [sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"]
    assert run.run_tests(show, tmp_path, tmp_path / "src", 60.0, tmp_path / "log")
    assert (tmp_path / "log").read_text() == f"{tmp_path / 'src'}\n"
    hang = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert not run.run_tests(hang, tmp_path, tmp_path / "src", 0.5, tmp_path / "log")


@pytest.mark.variant
def test_the_script_tells_a_fault_that_is_noticed_from_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real tests of a small module, in a process of their own, on a copy with each fault."""
    noticed = next(mutation for mutation in MUTATIONS if mutation.name == "two_switch_at_once")
    quick = replace(noticed, tests=("control/test_order.py::test_whose_turn_it_is",))
    harmless = replace(
        quick, name="harmless", before="Which replica may switch now", after="Which replica may switch"
    )
    monkeypatch.setattr(run, "MUTATIONS", (quick, harmless))
    assert run.main([]) == 1
    *_, first, second, summary = capsys.readouterr().out.splitlines()
    assert first.startswith("killed    two_switch_at_once ")
    assert first.endswith(".test_order::test_whose_turn_it_is[reports4-staged4-None-False-1]")
    assert re.fullmatch(r"SURVIVED  harmless +[\d.]+ s  survived \d+ tests", second)
    assert summary == "1 of 2 killed"
