"""`midstream conformance` against a real server with two embedded replicas, as a person at a terminal starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import Server, command

from midstream import cli
from midstream.client import ServerClient
from midstream_conformance.runner import all_rows

#: Rows that may be skipped against the embedded engine, and why.
SKIPPED: dict[str, str] = {}


def conformance(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(command("conformance", *arguments), capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.timeout(700)
def test_the_embedded_engine_passes_every_row(server: Server, options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    code, table, errors = conformance(server.url, *options, "--json", str(out))
    found: dict[str, Any] = json.loads(out.read_text())
    results = {row["id"]: row for row in found["rows"]}
    failed = [
        (name, row["why"], row["evidence"]) for name, row in results.items() if row["verdict"] == "fail"
    ]
    assert failed == []
    skipped = {name: row["why"] for name, row in results.items() if row["verdict"] == "skip"}
    assert skipped.keys() == set(SKIPPED), skipped
    assert (code, errors) == (0, "")
    assert [*results] == [row.id for row in all_rows()], "a row did not run, or ran in another order"
    for name in results:
        assert f"  {name} " in table, "a row is not in the table"
    _check_form(found, len(results))
    left_on = found["left_on_snapshot"]
    assert left_on in table
    with_key = ServerClient(server.url, api_key=options[1])
    try:
        assert with_key.snapshots.status().serves(left_on)
    finally:
        with_key.close()


def _check_form(found: dict[str, Any], rows: int) -> None:
    assert found["replicas"] == 2
    assert found["engine"].startswith("embedded")
    assert found["exit_code"] == 0
    assert found["counts"] == {"pass": rows - len(SKIPPED), "fail": 0, "skip": len(SKIPPED)}
    for row in found["rows"]:
        assert row["group"] == row["id"].partition(".")[0]
        assert row["statement"]
        assert row["source"]
        assert row["seconds"] >= 0
        assert row["why"] or row["verdict"] != "skip"
        assert row["evidence"] or row["verdict"] != "pass", "a row passed without having seen anything"


def test_without_a_bucket_nothing_is_switched_and_strict_makes_that_a_failure(
    server: Server, options: list[str]
) -> None:
    rows = ["--only", "openai.models", "policies.none", "hotload.status", "transitions.sync_425"]
    before = _serving(server, options)
    code, output, table = conformance(server.url, *options[:2], "--json", "-", *rows)
    verdicts = {row["id"]: (row["verdict"], row["why"]) for row in json.loads(output)["rows"]}
    assert code == 0
    assert [verdicts[name][0] for name in ("openai.models", "hotload.status")] == ["pass", "pass"]
    for name in ("policies.none", "transitions.sync_425"):
        verdict, why = verdicts[name]
        assert verdict == "skip"
        assert "--bucket" in why
    assert "2 passed, 0 failed, 2 skipped" in table
    code, table, _ = conformance(server.url, *options[:2], "--strict", *rows)
    assert code == 1
    assert _serving(server, options) == before


def _serving(server: Server, options: list[str]) -> list[str | None]:
    asked = ServerClient(server.url, api_key=options[1])
    try:
        return [replica.snapshot for replica in asked.snapshots.status().replicas]
    finally:
        asked.close()


def here(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """In this process, which has imported all of it already."""
    try:
        code = cli.main(["conformance", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_an_endpoint_or_options_that_cannot_be_used_are_one_line_and_exit_code_2(
    server: Server, options: list[str], tmp_path: Path, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = f"http://127.0.0.1:{free_port}"
    cases: list[tuple[list[str], str]] = [
        ([nobody], "cannot be reached"),
        ([server.url], "401"),
        ([], "name the endpoint"),
        (["ftp://somewhere"], "write http://HOST:PORT"),
        ([server.url, *options, "--only", "no.such_row"], "--only no.such_row"),
        ([server.url, *options[:4]], "--checkpoint"),
        ([server.url, *options[:5], str(tmp_path)], "config.json"),
        ([server.url, *options, "--tolerance", "0"], "--tolerance"),
        ([server.url, *options, "--json", str(tmp_path / "no" / "file")], "--json"),
        ([server.url, *options[:2], "--model", "another-model"], "another-model"),
    ]
    for arguments, says in cases:
        code, table, errors = here(capsys, *arguments)
        assert (code, table) == (2, ""), (arguments, table, errors)
        assert len(errors.splitlines()) == 1
        assert says in errors


def test_the_document_lists_the_rows_as_they_are_registered() -> None:
    document = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    table = document.partition("## The rows")[2]
    told = [line for line in table.splitlines() if line.startswith("| `")]
    rows = [
        f"| `{row.id}` | {row.statement} | {row.source} | {', '.join(row.needs)} |".replace("  |", " |")
        for row in all_rows()
    ]
    assert told == rows, "put this into docs/conformance.md:\n" + "\n".join(rows)


@pytest.mark.parametrize("arguments", [["--list"], ["--list", "--only", "policies"]])
def test_the_rows_can_be_listed_without_an_endpoint(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, table, errors = here(capsys, *arguments)
    wanted = [row.id for row in all_rows() if len(arguments) == 1 or row.group == "policies"]
    assert (code, errors) == (0, "")
    assert [line.partition(":")[0] for line in table.splitlines()] == wanted


def without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`midstream conformance` where `module` is not installed."""
    run = "import sys; sys.modules[sys.argv[1]] = None; from midstream.cli import main; sys.exit(main(sys.argv[2:]))"
    command = [sys.executable, "-c", run, module, "conformance", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [["--help"], ["--list"], ["http://127.0.0.1:1"]])
def test_where_the_rows_are_not_installed_one_line_says_how_to_install_them(arguments: list[str]) -> None:
    done = without("midstream_conformance", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("midstream conformance: ")
    assert "pip install ./conformance" in done.stderr


def test_rows_that_are_installed_and_broken_are_not_said_to_be_missing() -> None:
    done = without("midstream_conformance.endpoint", "--list")
    assert done.returncode == 1
    assert "pip install" not in done.stderr
    assert "midstream_conformance.endpoint" in done.stderr.splitlines()[-1]


def test_the_rows_need_no_torch_and_nothing_of_the_server() -> None:
    run = (
        "import sys; from midstream_conformance import command, runner; runner.all_rows(); "
        "print(*sorted({'.'.join(name.split('.')[:2]) for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    assert {"torch", "transformers", "starlette", "uvicorn", "sqlalchemy"}.isdisjoint(loaded)
    ours = {name for name in loaded if name.startswith("midstream.")}
    server = {
        f"midstream.{name}"
        for name in ("gateway", "replica", "engine", "launch", "ledger", "tinker", "config")
    }
    assert ours.isdisjoint(server)
