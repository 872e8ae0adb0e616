"""A line of a benchmark that became slower is named, whichever line; a machine that became slower as a whole is no news."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hardware import RESULTS, vectors
from last_result import FIGURES, NOISE, changes, last_result, machine, report

BENCHES = sorted(FIGURES)


def committed(bench: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{bench}.json").read_text())
    return found


def cells_of(bench: str, result: dict[str, Any]) -> list[tuple[dict[str, Any], str, bool]]:
    """Each figure of midstream that is compared: where it is, its name, whether more is better."""
    if bench == "gateway":
        shapes = [shape for placement in result["placements"] for shape in placement["cells"].values()]
        return [(shape["midstream"], "cpu_us", False) for shape in shapes]
    if bench == "engine":
        columns = [line["columns"] for line in result["lines"]]
        ours = [one for column in columns for name, one in column.items() if name.startswith("midstream")]
        return [
            (one, name, more)
            for one in ours
            for name, more in (("tokens_per_s", True), ("gap_ms_p99", False))
        ]
    return [(line["columns"]["midstream"], "tokens_per_s", True) for line in result["front"]["lines"]]


@pytest.mark.parametrize("bench", BENCHES)
def test_the_same_result_again_is_not_slower(bench: str) -> None:
    found = changes(bench, committed(bench), committed(bench))
    assert len(found) >= 10
    assert {change.slower for change in found} == {0}


@pytest.mark.parametrize("bench", BENCHES)
def test_each_line_that_is_slower_is_named_alone(bench: str) -> None:
    before = committed(bench)
    cells = [place for place, (cell, name, _) in enumerate(cells_of(bench, before)) if cell.get(name)]
    assert cells
    for place in cells:
        now = copy.deepcopy(before)
        cell, name, more_is_better = cells_of(bench, now)[place]
        cell[name] *= 0.5 if more_is_better else 2
        slower = [change for change in changes(bench, before, now) if change.slower > NOISE]
        assert [(round(change.slower, 6), change.name.endswith(name)) for change in slower] == [(1, True)]


def test_a_machine_that_is_slower_with_its_peers_is_not_reported() -> None:
    before, now = committed("gateway"), committed("gateway")
    for placement in now["placements"]:
        for cells in placement["cells"].values():
            for cell in cells.values():
                # A router that served nothing has no figure.
                cell["cpu_us"] = cell.get("cpu_us", 0) * 1.7
    assert all(abs(change.slower) < 1e-9 for change in changes("gateway", before, now))


def test_without_the_peer_in_one_run_the_values_are_compared() -> None:
    before, now = committed("gateway"), committed("gateway")
    for placement in now["placements"]:
        for cells in placement["cells"].values():
            del cells["vllm-router"]
            cells["midstream"]["cpu_us"] *= 1.5
    assert {round(change.slower, 6) for change in changes("gateway", before, now)} == {0.5}


def git(checkout: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *who, *words], cwd=checkout, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(checkout: Path, result: dict[str, Any]) -> str:
    path = checkout / "benchmarks/results/gateway.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "A result")
    return git(checkout, "rev-parse", "HEAD")


def result_of(cpu: str, number: int, **hardware: str) -> dict[str, Any]:
    return {"hardware": {"cpu": cpu, "cores": 2, **hardware}, "placements": [], "number": number}


def test_the_last_result_is_the_newest_of_the_same_machine(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    commit(tmp_path, result_of("one", 0))
    newest = commit(tmp_path, result_of("one", 1, vectors="avx2"))
    commit(tmp_path, result_of("one", 2, vectors="avx512f"))
    commit(tmp_path, result_of("other", 3))
    assert last_result("gateway", ("one", 2, "avx2"), tmp_path) == (
        newest,
        result_of("one", 1, vectors="avx2"),
    )
    assert last_result("gateway", ("third", 2, "avx2"), tmp_path) is None
    # What is not committed is the result of now.
    (tmp_path / "benchmarks/results/gateway.json").write_text(json.dumps(result_of("one", 4, vectors="avx2")))
    found = last_result("gateway", ("one", 2, "avx2"), tmp_path)
    assert found is not None
    assert found[0] == newest


def test_a_tag_decides_where_there_is_one(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    tagged = commit(tmp_path, result_of("one", 0))
    git(tmp_path, "tag", "v1")
    commit(tmp_path, result_of("one", 1))
    found = last_result("gateway", ("one", 2, ""), tmp_path)
    assert found is not None
    assert found[0] == tagged


def test_the_report_names_the_machine_it_knows_nothing_of() -> None:
    result = committed("gateway")
    result["hardware"]["cpu"] = "a processor of tomorrow"
    assert "a processor of tomorrow" in report("gateway", result)


def test_a_result_of_parts_has_the_hardware_of_its_parts() -> None:
    assert machine("vllm", committed("vllm"))[1] == committed("vllm")["front"]["hardware"]["cores"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2 fma", "avx2"),
        ("avx2 avx512f avx512_bf16", "avx512_bf16"),
        ("avx2 avx512f", "avx512f"),
        ("neon", ""),
    ],
)
def test_the_widest_vectors_are_named(flags: str, expected: str) -> None:
    assert vectors(flags) == expected
