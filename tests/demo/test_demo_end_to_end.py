"""The demo as a user runs it: a real server, real swaps, and files that say what happened."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from midstream.core.errors import ConfigError
from midstream.demo.main import ServerFailed, ServerProcess, add_arguments, run_demo

SMALL = ["--groups", "3", "--samples", "4", "--tokens", "24"]


def options(out: Path, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--out", str(out), *SMALL, *arguments])


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """(exit code, output directory, summary) of a run of three steps, its rollouts longer than it takes to publish."""
    out = tmp_path_factory.mktemp("demo") / "three"
    code = run_demo(options(out, "--steps", "3", "--tokens", "400"))
    return code, out, json.loads((out / "summary.json").read_text())


def test_a_short_run_swaps_every_step_with_streams_in_flight_and_loses_nothing(three_steps):
    _, _, summary = three_steps
    assert summary["swaps"] == 3
    assert summary["failed_requests"] == 0
    assert summary["streams"] == 3 * 3 * 4 * 2
    assert summary["streams_crossed_swap"] >= 1
    assert summary["affinity_share"] == 1.0
    assert summary["pause_ms_max"] >= summary["pause_ms_p50"] >= 0
    assert summary["cached_prompt_share"] > 0.3


def test_replaying_routes_brings_the_trainer_closer_to_the_engine(three_steps):
    _, _, summary = three_steps
    assert 0 < summary["kl_replayed_routes"] < 0.5 * summary["kl_own_routes"]
    assert 0.005 < summary["route_diff_share"] < 0.3
    assert summary["kl_own_routes"] < 0.05


def test_the_exit_code_says_whether_the_checks_held(three_steps):
    code, out, summary = three_steps
    report = (out / "report.html").read_text()
    rose = summary["reward_last"] - summary["reward_first"] >= 3 * summary["reward_stderr"]
    assert code == (0 if rose else 1)
    assert ("Every check of the run holds." in report) == rose
    assert not re.search(r"<link|<img|\bsrc=|@import|url\(", report)


@pytest.mark.variant
@pytest.mark.parametrize(("seed", "same"), [("0", True), pytest.param("1", False, marks=pytest.mark.variant)])
def test_the_same_seed_gives_the_same_first_rollouts_and_another_seed_others(
    three_steps, tmp_path, seed, same
):
    run_demo(options(tmp_path / seed, "--steps", "1", "--seed", seed, "--tokens", "400"))
    digest = json.loads((tmp_path / seed / "summary.json").read_text())["first_rollouts_sha256"]
    assert (digest == three_steps[2]["first_rollouts_sha256"]) == same


def commands_naming(path: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        # It has ended.
        except OSError:
            continue
        if str(path) in command:
            found.append(command)
    return found


@pytest.mark.variant
def test_a_demo_told_to_end_takes_its_server_with_it(tmp_path):
    command = [sys.executable, "-m", "midstream.cli", "demo", "--out", str(tmp_path / "out"), *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("sampling the first rollouts"):
                break
        assert any(" serve " in command for command in commands_naming(tmp_path))
        demo.terminate()
        rest = demo.stdout.read()
    assert demo.returncode == 130
    assert "the server is stopped" in rest
    assert commands_naming(tmp_path) == []


def test_the_server_is_gone_after_the_block(tiny_model, tmp_path):
    arguments = [
        "--model",
        str(tiny_model()),
        "--replicas",
        "1",
        "--port",
        "0",
        "--state-dir",
        str(tmp_path / "s"),
    ]
    with ServerProcess(arguments, tmp_path / "log") as server:
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        process = server._process
        assert process is not None
    assert process.returncode == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_server_that_cannot_start_says_why(tmp_path):
    with (
        pytest.raises(ServerFailed, match="no-such-model"),
        ServerProcess(
            ["--model", str(tmp_path / "no-such-model"), "--port", "0", "--state-dir", str(tmp_path / "s")],
            tmp_path / "log",
        ),
    ):
        pytest.fail("it started")


def test_an_output_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        run_demo(options(tmp_path / "file", "--steps", "1"))


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--samples", "1"], ["--groups", "x"]])
def test_sizes_that_cannot_work_are_refused_by_the_parser(tmp_path, arguments, capsys):
    with pytest.raises(SystemExit):
        options(tmp_path, *arguments)
    assert arguments[0] in capsys.readouterr().err
