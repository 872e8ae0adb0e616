"""What a person at a terminal sees when something is wrong."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serving import built_in_model, command

from midstream import cli


def run(*arguments: str) -> tuple[int, str, str]:
    """In a process of its own, as what starts a server needs."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=150)
    return done.returncode, done.stdout, done.stderr


def run_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """In this process, which has imported all of it already."""
    try:
        code = cli.main(list(arguments))
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


#: A command line, and what its one line says.
BAD_REQUESTS = [
    (["serve", "--replicas", "0"], "replicas must be at least 1"),
    (["serve", "--port", "70000"], "port must be 0 to 65535"),
    (["serve", "--model", "/no/such/model"], "/no/such/model"),
    (["serve", "--config", "/no/such/file.toml"], "/no/such/file.toml"),
    (["serve", "--bucket", "ftp://somewhere"], "ftp://somewhere"),
    (["serve", "--kv-cache-memory", "lots"], "kv_cache_memory 'lots'"),
    (["serve", "--engine", "vllm", "--vllm-args", "'"], "--vllm-args"),
    (["serve", "--host", "203.0.113.7"], "203.0.113.7"),
    (["model", "tiny-moe", "DIR", "--layers", "0"], "layers must be at least 1"),
]
#: Runs each command line of its input in a process of its own, without importing everything again for each.
RUN_EACH = """
import json, os, sys
from midstream import cli
import midstream.commands.model, midstream.commands.serve, midstream.launch.local
for number, arguments in enumerate(json.load(sys.stdin)):
    pid = os.fork()
    if not pid:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}-{number}", os.O_CREAT | os.O_WRONLY, 0o600), stream)
        sys.argv[1:] = arguments
        sys.exit(cli.main())
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str]]:
    """Of each bad request."""
    place = tmp_path_factory.mktemp("said")
    where = ["--state-dir", str(place / "state")]
    lines = [arguments + where * (arguments[0] == "serve") for arguments, _ in BAD_REQUESTS]
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH],
        input=json.dumps(lines),
        stdout=subprocess.PIPE,
        text=True,
        cwd=place,
        # Nine processes, one after the other.
        timeout=500,
        check=True,
    )
    return [
        (int(code), (place / f"out-{number}").read_text(), (place / f"err-{number}").read_text())
        for number, code in enumerate(done.stdout.split())
    ]


@pytest.mark.parametrize("row", range(len(BAD_REQUESTS)), ids=[" ".join(row[0]) for row in BAD_REQUESTS])
def test_a_bad_request_is_one_clear_line_and_exit_code_2(row: int, said: list[tuple[int, str, str]]) -> None:
    code, out, err = said[row]
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert BAD_REQUESTS[row][1] in err


@pytest.mark.parametrize(
    ("arguments", "command_line", "says"),
    [
        (
            ["serve", "--replicsa", "3"],
            "midstream serve",
            "arguments: --replicsa 3; did you mean --replicas?",
        ),
        (["serve", "--no-tinkr"], "midstream serve", "arguments: --no-tinkr; did you mean --no-tinker?"),
        (
            ["serve", "--replicas", "many"],
            "midstream serve",
            "argument --replicas: invalid int value: 'many'",
        ),
        (["serve", "--engine", "vlm"], "midstream serve", "did you mean vllm?"),
        (["status", "--jsn"], "midstream status", "did you mean --json?"),
        (["delta", "encod"], "midstream delta", "did you mean encode?"),
        (
            ["delta", "verify", "--parent", "a", "--delta", "b", "--treads=3"],
            "midstream delta verify",
            "did you mean --threads?",
        ),
        (["conformance", "--strct"], "midstream conformance", "did you mean --strict?"),
        (["stats"], "midstream", "did you mean status?"),
    ],
)
def test_a_wrong_argument_shows_the_usage_of_its_command_and_what_was_meant(
    capsys: pytest.CaptureFixture[str], arguments: list[str], command_line: str, says: str
) -> None:
    code, out, err = run_here(capsys, *arguments)
    assert (code, out) == (2, "")
    usage, *_, last = err.splitlines()
    assert usage.startswith(f"usage: {command_line} ")
    assert last.startswith(f"{command_line}: ")
    assert says in last
    assert last.endswith(f"(see {command_line} --help)")


def test_without_a_command_there_is_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_here(capsys)
    assert (code, out) == (2, "")
    assert "start a gateway and its replicas on this machine" in err


def test_a_taken_port_is_one_clear_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run("serve", "--port", str(port), "--state-dir", str(tmp_path))
    assert code == 2
    assert err.splitlines() == [
        f"midstream serve: --port {port}: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "name another port, or 0 for any free one"
    ]


def test_an_unknown_setting_in_the_config_file_is_named(tmp_path: Path) -> None:
    config = tmp_path / "midstream.toml"
    config.write_text("[embedded]\nblock_sise = 16\n")
    code, _, err = run("serve", "--config", str(config), "--state-dir", str(tmp_path / "state"))
    assert (code, err) == (
        2,
        f"midstream serve: --config {config}: unknown field `block_sise` in [embedded]; "
        "did you mean embedded.block_size?\n",
    )


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    broken = Path(shutil.copytree(built_in_model(), tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    code, out, err = run("serve", "--model", str(broken), "--port", "0", "--state-dir", str(tmp_path / "s"))
    assert (code, out) == (1, "")
    assert "model.safetensors" in err.splitlines()[-1]


def test_the_model_command_writes_the_same_bytes_for_the_same_seed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of another process, tests/models shows the same."""
    for name in ("a", "b"):
        assert (
            run_here(capsys, "model", "tiny-moe", str(tmp_path / name), "--seed", "3", "--layers", "5")[0]
            == 0
        )
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert "model.safetensors" in files
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
