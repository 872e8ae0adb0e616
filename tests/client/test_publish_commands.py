"""`midstream publish`, `status` and `ledger` as a person at a terminal meets them."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.numpy
from publish_world import World, listening, weights

from midstream import cli
from midstream.client import PublishError, SnapshotPublisher
from midstream.client.status import read_status
from midstream.commands import progress, status
from midstream.core.text import table


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def url(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with listening(world) as address:
        monkeypatch.setenv("MIDSTREAM_SERVER", address)
        monkeypatch.chdir(world.root)
        yield address


def checkpoint(world: World, step: int) -> Path:
    directory = world.root / f"step-{step}"
    directory.mkdir()
    safetensors.numpy.save_file(weights(step), directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "x"}')
    return directory


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = cli.main([str(a) for a in arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def publish(capsys: Any, world: World, directory: Path, *arguments: object) -> tuple[int, str, str]:
    return run(capsys, "publish", directory, "--bucket", world.bucket.as_uri(), *arguments)


def test_publish_sends_the_first_snapshot_full_and_the_next_as_a_delta(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = publish(capsys, world, checkpoint(world, 0), "--progress")
    assert (code, len(out.splitlines())) == (0, 1)
    assert re.match(
        r"published step-0: full, 40\.\d\d kB \(there is no snapshot to make a delta against\); sent in ", out
    )
    assert out.endswith("more\n")
    assert err.splitlines() == [
        "copying the checkpoint", "writing to the bucket", "signalled; waiting for the replicas",
    ]  # fmt: skip
    code, out, _ = publish(
        capsys, world, checkpoint(world, 1), "--reset", "max_age=2", "--ignore-config", "x"
    )
    assert code == 0
    assert re.match(
        r"published step-1: a delta on step-0, \d\.\d\d kB instead of 40\.\d\d kB; .* by 1 replica ", out
    )
    assert world.signals[1]["reset_prompt_cache"] == {"max_age": 2}
    assert world.signals[1]["validation"] == {"extra_fields_ignore": ["x"]}
    assert world.served()["a"].tobytes() == weights(1)["a"].tobytes()
    code, out, _ = publish(capsys, world, checkpoint(world, 2), "--full", "--identity", "run/two")
    assert (code, world.desired) == (0, "run/two")
    assert "full, 40" in out
    assert "(asked for)" in out
    assert world.work.exists() is False
    assert (world.root / ".midstream" / "publish" / "parent.json").exists()


def test_publish_finds_the_deployments_own_bucket(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "publish", checkpoint(world, 0))
    assert (code, "published step-0" in out) == (0, True)
    assert (world.bucket / "step-0" / "config.json").exists()


def test_a_publisher_without_a_bucket_writes_into_the_one_that_its_deployment_reads(
    world: World, url: str
) -> None:
    with SnapshotPublisher(url) as publisher:
        publisher.publish("step-0", checkpoint(world, 0))
    assert (world.bucket / "step-0" / "config.json").exists()
    with pytest.raises(PublishError, match="deployment other: there is none, only d"):
        SnapshotPublisher(url, deployment="other")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/no/such/dir"], "/no/such/dir: is not a directory"),
        (["DIR", "--identity", "../x"], "identity '../x' must be made of names"),
        (["DIR", "--bucket", "ftp://x"], "ftp://x"),
        (["DIR", "--server", "localhost"], "--server 'localhost': write http://HOST:PORT"),
        (["DIR", "--server", "http://[::1"], "write http://HOST:PORT"),
        (["DIR", "--reset", "some"], "'some' is none of all, new_session, none, max_age=K"),
        (["DIR", "--reset", "max_age=-1"], "max_age=K"),
        (["DIR", "--full", "--delta"], "not allowed with argument --full"),
        (["DIR", "--full-every", "0"], "full_every must be at least 1, got 0"),
        (["DIR", "--deployment", "nobody"], "--deployment nobody: there is none, only d"),
    ],
)
def test_what_cannot_work_is_one_line_below_the_usage_at_most_and_exit_code_2(
    world: World, url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    directory = checkpoint(world, 0)
    code, out, err = run(capsys, "publish", *(str(directory) if a == "DIR" else a for a in arguments))
    assert (code, out) == (2, "")
    *usage, last = err.splitlines()
    assert says in last
    # A wrong argument shows the usage of the command, anything else is one line.
    assert usage == [] or (usage[0].startswith("usage: midstream publish "), "argument" in last) == (
        True,
        True,
    )
    assert world.signals == []


def test_what_fails_while_running_is_its_reason_and_exit_code_1(
    world: World, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoint(world, 0)
    code, _, err = publish(capsys, world, first, "--delta")
    why = "there is no snapshot to make a delta against"
    assert (code, err.splitlines()[-1]) == (
        1,
        f"midstream publish: snapshot 'step-0' cannot be a delta: {why}",
    )
    (world.root / "empty").mkdir()
    code, _, err = publish(capsys, world, world.root / "empty")
    assert (code, "would not be whole: config.json: is not there" in err) == (1, True)
    assert list(world.bucket.iterdir()) == []
    assert publish(capsys, world, first)[0] == 0
    code, _, err = publish(capsys, world, first)
    assert (code, "'step-0' is already in the bucket" in err) == (1, True)
    world.fail = "step-1"
    code, _, err = publish(capsys, world, checkpoint(world, 1))
    assert (code, "r0 could not load snapshot 'step-1': Adler-32 differs" in err) == (1, True)
    monkeypatch.setenv("MIDSTREAM_SERVER", "http://127.0.0.1:9")
    for command in (["publish", str(first), "--bucket", world.bucket.as_uri()], ["status"], ["ledger"]):
        code, out, err = run(capsys, *command)
        assert (code, out, len(err.splitlines())) == (1, "", 1)
        assert "http://127.0.0.1:9/" in err


def test_the_key_comes_from_the_environment_or_the_option_and_is_never_shown(
    world: World, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.api_key = "sesame"
    code, out, err = run(capsys, "status", "--api-key", "wrong-key")
    assert (code, out) == (1, "")
    assert "401" in err
    assert "wrong-key" not in err
    assert run(capsys, "status", "--api-key", "sesame")[0] == 0
    monkeypatch.setenv("MIDSTREAM_API_KEY", "sesame")
    assert run(capsys, "ledger")[0] == 0


def test_status_is_a_table_of_replicas_with_their_load(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(capsys, world, checkpoint(world, 0))
    code, out, _ = run(capsys, "status")
    assert code == 0
    assert out.splitlines() == [
        "replica  snapshot  stage  in flight  cached  KV cache  last swap",
        "r0       step-0    done   3          75%     -         loaded 11 ms, paused 1.5 ms, 4 streams crossed",
    ]
    code, out, _ = run(capsys, "status", "--json")
    (row,) = json.loads(out)["replicas"]
    assert (row["name"], row["snapshot"], row["ready"], row["in_flight"], row["cached_share"]) == (
        "r0", "step-0", True, 3.0, 0.75,
    )  # fmt: skip
    assert row["last_swap"]["pause_ms"] == 1.5


def test_status_says_what_is_loading_what_failed_and_what_is_away() -> None:
    rows = [
        ("b", "s1", False, "error", "s2", "truncated"),
        ("a", "s1", True, "downloading", "s2", None),
        ("c", None, False, "pending", "s2", "the replica cannot be reached"),
    ]
    replicas = [
        {
            "current_snapshot_identity": snapshot,
            "readiness": ready,
            "loading_state": {"stage": stage, "target_snapshot_identity": target},
            "midstream": {"replica": name, "error": error, "last_swap": None},
        }
        for name, snapshot, ready, stage, target, error in rows
    ]
    shown = status.render(read_status({"replicas": replicas}), {})
    assert [line.split("  ") for line in (re.sub(" {3,}", "  ", line) for line in shown.splitlines())][
        1:
    ] == [
        ["a", "s1", "downloading s2", "-", "-", "-", "-"],
        ["b", "s1", "error s2", "-", "-", "-", "-", "not ready; truncated"],
        ["c", "-", "pending s2", "-", "-", "-", "-", "not ready; the replica cannot be reached"],
    ]


def test_watching_prints_again_only_what_changed_and_survives_a_server_that_is_away(
    world: World, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(capsys, world, checkpoint(world, 0))
    seen: list[str] = []

    def sleep(_: float) -> None:
        seen.append(capsys.readouterr().out)
        if len(seen) == 2:
            world.desired = "other"
        if len(seen) == 3:
            world.away = True
        if len(seen) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr("midstream.commands.common.time.sleep", sleep)
    assert run(capsys, "status", "--watch")[0] == 130
    assert "step-0" in seen[0]
    assert seen[1] == ""
    assert "other" in seen[2]
    assert "503" in seen[3]
    assert seen[4] == ""


def test_the_ledger_is_watched_too_and_as_json_each_look_is_one_line(
    world: World, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(capsys, world, checkpoint(world, 0))
    seen: list[str] = []

    def sleep(_: float) -> None:
        seen.append(capsys.readouterr().out)
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("midstream.commands.common.time.sleep", sleep)
    assert run(capsys, "ledger", "--watch", "--json")[0] == 130
    assert json.loads(seen[0]) == world.ledger
    assert (len(seen[0].splitlines()), seen[1]) == (1, "")
    assert run(capsys, "ledger", "--watch", "--interval", "0")[0] == 2


def test_what_was_published_is_told_as_json(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = publish(capsys, world, checkpoint(world, 0), "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["identity"], told["kind"], told["previous"], told["replicas"]) == (
        "step-0",
        "full",
        None,
        ["r0"],
    )
    assert told["bytes_sent"] == told["bytes_whole"] > 0


def test_watching_on_a_terminal_draws_over_itself(
    world: World, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, looks = Terminal(), []

    def sleep(_: float) -> None:
        looks.append(1)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("midstream.commands.common.time.sleep", sleep)
    monkeypatch.setattr("sys.stdout", terminal)
    assert cli.main(["status", "--watch"]) == 130
    assert terminal.getvalue().count("\x1b[H\x1b[Jreplica") == 2


def test_a_deployment_without_replicas_says_why(
    world: World, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = world.read

    def failing(path: str, token: str | None) -> httpx.Response:
        if not path.endswith("/deployments"):
            return read(path, token)
        row = {
            "name": "accounts/a/deployments/d",
            "state": "FAILED",
            "status": {"message": "replica-0: no memory"},
        }
        return httpx.Response(200, json={"deployments": [row]})

    monkeypatch.setattr(world, "read", failing)
    monkeypatch.setattr(world, "status", lambda: {"replicas": []})
    assert run(capsys, "status") == (0, "there are no replicas: FAILED, replica-0: no memory\n", "")
    assert (
        run(capsys, "status", "--json")[1]
        == '{"replicas": [], "policies": [], "transfers": [], "rebase_problem": ""}\n'
    )


def test_the_ledger_is_a_table_of_snapshots_and_of_how_each_replica_fared(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "ledger")
    assert (code, out) == (0, "nothing was signalled yet\n")
    world.ledger = LEDGER
    code, out, _ = run(capsys, "ledger")
    assert code == 0
    lines = [re.sub(r"\d\d-\d\d \d\d:\d\d:\d\d", "WHEN", line) for line in out.splitlines()]
    assert [re.sub(" {2,}", " | ", line) for line in lines] == [
        "snapshot | kind | on | cache | signalled | ready after",
        "step-0 | full | - | all | WHEN | r0 1.5 s, r1 2 min",
        "step-1 | delta | step-0 | max_age=2 | WHEN | r0 0.5 s | desired; r1: Adler-32 differs",
        "r1 on step-1: its canary is not the others'",
    ]
    assert json.loads(run(capsys, "ledger", "--deployment", "d", "--json")[1]) == LEDGER
    code, _, err = run(capsys, "ledger", "--deployment", "e")
    assert (code, "--deployment e: there is none, only d" in err) == (2, True)


LEDGER: dict[str, Any] = {
    "desired_snapshot_identity": "step-1",
    "generation": 2,
    "older_transitions_left_out": False,
    "snapshots": [
        {
            "identity": "step-0",
            "kind": "full",
            "previous_snapshot_identity": None,
            "reset_prompt_cache": "all",
            "max_cache_age": None,
            "signalled_at": 1000.0,
            "replicas": [
                {"replica": "r0", "ready_at": 1001.5, "error": None},
                {"replica": "r1", "ready_at": 1125.0, "error": None},
            ],
        },
        {
            "identity": "step-1",
            "kind": "delta",
            "previous_snapshot_identity": "step-0",
            "reset_prompt_cache": "none",
            "max_cache_age": 2,
            "signalled_at": 2000.0,
            "replicas": [
                {"replica": "r0", "ready_at": 2000.5, "error": None},
                {"replica": "r1", "ready_at": None, "error": "Adler-32 differs"},
            ],
        },
    ],
    "disagreements": [{"replica": "r1", "identity": "step-1", "error": "its canary is not the others'"}],
}


def test_a_table_is_as_wide_as_its_cells() -> None:
    assert table(["a", "bb"], [["xxx", ""], ["y", "zzzz"]]) == "a    bb\nxxx\ny    zzzz"


def test_nothing_that_is_shown_acts_on_the_terminal(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message may quote a tensor's or a file's name, and anybody may have chosen that."""
    evil, tame = "tensor \x1b]0;owned\x07\u202e\nok", "tensor \\x1b]0;owned\\x07\\u202e\\nok"
    world.ledger = json.loads(json.dumps(LEDGER))
    world.ledger["snapshots"][1]["replicas"][1]["error"] = evil
    world.ledger["disagreements"][0]["error"] = evil
    out = run(capsys, "ledger", "--deployment", "d")[1]
    assert out.count(tame) == 2
    assert all(line.isprintable() for line in out.splitlines())
    world.desired, world.error = "step-1", evil
    out = run(capsys, "status")[1]
    assert tame in out
    assert all(line.isprintable() for line in out.splitlines())


def test_every_subcommand_is_described() -> None:
    commands = cli.build_parser([]).format_help()
    for name in ("serve", "model", "publish", "status", "ledger", "delta"):
        assert re.search(rf"^ +{name} +\w", commands, flags=re.MULTILINE)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_one_line_on_a_terminal_and_lines_now_and_then_elsewhere(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.ProgressLine(True, tick_s=3600) as line:
        line.show("begins")
        for clock[0] in (0.1, 0.25, 0.3, 5.1, 5.2, 5.6):
            line.often(f"at {clock[0]}")
    shown = ["begins", "at 0.25", "at 5.1", "at 5.6"] if terminal else ["begins", "at 5.1"]
    written = "".join(f"\r\x1b[K{text}" for text in [*shown, ""])
    assert capsys.readouterr().err == (written if terminal else "".join(f"{text}\n" for text in shown))


def test_progress_is_silent_where_there_is_no_terminal_and_counts_seconds_where_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with progress.ProgressLine() as line:
        line.show("begins")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.ProgressLine(False) as line:
        line.show("begins")
    assert capsys.readouterr().err == ""
    written = ""
    with progress.ProgressLine(tick_s=0.01) as line:
        line.show("works")
        deadline = time.monotonic() + 10
        while "works (0 s)" not in written and time.monotonic() < deadline:
            written += capsys.readouterr().err
    assert "works (0 s)" in written
    assert (written + capsys.readouterr().err).endswith("\r\x1b[K")
