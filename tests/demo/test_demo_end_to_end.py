"""The demo as a user runs it: a real server, real swaps, and a summary that says what happened."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import rl_loop
from rl_loop import misses, options_of, server

SMALL = ["--groups", "3", "--samples", "4", "--tokens", "24"]


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, rl_loop.__file__, "--out", str(out), *SMALL, *arguments]


def run(out: Path, *arguments: str) -> tuple[int, dict]:
    done = subprocess.run(command(out, *arguments), capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """(exit code, output directory, summary) of a run of three steps, its rollouts longer than it takes to publish."""
    out = tmp_path_factory.mktemp("demo") / "three"
    code, summary = run(out, "--steps", "3", "--tokens", "400")
    return code, out, summary


def test_a_short_run_swaps_every_step_with_answers_in_flight_and_loses_nothing(three_steps):
    _, _, summary = three_steps
    assert summary["swaps"] == 3
    assert summary["failed_requests"] == 0
    assert summary["answers"] == 3 * 3 * 4 * 2
    assert summary["answers_crossed_swap"] >= 1
    assert summary["affinity_share"] == 1.0
    assert summary["pause_ms_max"] >= summary["pause_ms_p50"] >= 0
    assert summary["cached_prompt_share"] > 0.3
    assert {kind: one["count"] for kind, one in summary["snapshots"].items()} == {"full": 1, "delta": 2}


def test_replaying_routes_and_masks_brings_the_trainer_closer_to_the_engine(three_steps):
    _, _, summary = three_steps
    assert 0 < summary["kl_routes_and_masks"] < 0.5 * summary["kl_masks"]
    assert summary["kl_routes_and_masks"] < 0.5 * summary["kl_routes"]
    assert 0.005 < summary["route_diff_share"] < 0.3
    assert summary["kl_neither"] < 0.05
    assert 1 < summary["mask_tokens_mean"] < 264


def test_its_records_are_verified_token_by_token(three_steps):
    _, out, summary = three_steps
    statement = json.loads((out / "verified.json").read_text())
    assert (summary["verified"], statement["findings"], statement["not_verified"]) == ("clean", [], {})
    assert statement["verified"]["turns"] == summary["answers"]
    assert statement["verified"]["routes"] == summary["verified_tokens"] > 0
    assert {f"step-{number}" for number in range(1, 3)} <= set(statement["snapshots"])


def test_the_exit_code_says_whether_the_checks_held_and_nothing_of_the_server_is_left(three_steps):
    code, out, summary = three_steps
    assert code == (1 if misses(summary) else 0)
    assert sorted(path.name for path in out.iterdir()) == ["serve.log", "summary.json", "verified.json"]
    assert commands_naming(out) == []


@pytest.mark.variant
@pytest.mark.parametrize(("seed", "same"), [("0", True), ("1", False)])
def test_the_same_seed_gives_the_same_first_rollouts_and_another_seed_others(
    three_steps, tmp_path, seed, same
):
    _, summary = run(tmp_path / seed, "--steps", "1", "--seed", seed, "--tokens", "400")
    assert (summary["first_rollouts_sha256"] == three_steps[2]["first_rollouts_sha256"]) == same


def commands_naming(path: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        # It has ended.
        except OSError:
            continue
        if str(path) in words:
            found.append(words)
    return found


@pytest.mark.variant
def test_a_demo_told_to_end_takes_its_server_with_it(tmp_path):
    with subprocess.Popen(command(tmp_path / "out"), stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("sampling the first rollouts"):
                break
        assert any(" serve " in words for words in commands_naming(tmp_path))
        demo.terminate()
        rest = demo.stdout.read()
    assert demo.returncode == 130
    assert "the server is stopped" in rest
    assert commands_naming(tmp_path) == []


@pytest.mark.variant
def test_the_server_is_gone_after_the_block(tiny_model, tmp_path):
    (tmp_path / "model").symlink_to(tiny_model())
    with server(tmp_path, tmp_path, 1) as (url, _, _):
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        assert any(" serve " in words for words in commands_naming(tmp_path))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=60)
    assert commands_naming(tmp_path) == []


def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(SystemExit, match=str(tmp_path / "model")), server(tmp_path, tmp_path, 1):
        pytest.fail("it started")


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--samples", "1"], ["--groups", "x"]])
def test_sizes_that_cannot_work_are_refused_by_the_parser(arguments, capsys):
    with pytest.raises(SystemExit):
        options_of(arguments)
    assert arguments[0] in capsys.readouterr().err
