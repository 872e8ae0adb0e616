"""`midstream top`, `midstream chat` and the log in JSON, against one real server that loads snapshots."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import Server, command, descendants, serve, words_of


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("terminal") / "state"
    with serve(state, "--replicas", "1", "--no-tinker", "--log-format", "json") as running:
        yield running


def run(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), input=typed, capture_output=True, text=True, timeout=120)


def publish(server: Server, tmp_path: Path, identity: str) -> None:
    model = str(server.state_dir / "models" / "tiny-moe")
    work = str(tmp_path / "work")
    done = run("publish", model, "--server", server.url, "--identity", identity, "--work-dir", work, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["identity"] == identity


def chat(server: Server, typed: str, *options: str) -> list[dict[str, object]]:
    done = run("chat", server.url, "--json", "--max-tokens", "6", *options, typed=typed)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_chat_is_one_session_whose_turns_build_on_each_other(server: Server) -> None:
    one, two, three = chat(server, "first\n\nsecond\n/reset\nthird\n/exit\nnever\n")
    assert [one["prompt"], two["prompt"], three["prompt"]] == ["first", "second", "third"]
    assert one["session"] == two["session"] != three["session"]
    assert isinstance(one["prompt_tokens"], int)
    assert isinstance(two["prompt_tokens"], int)
    assert two["prompt_tokens"] > one["prompt_tokens"] + 6
    assert isinstance(two["cached_tokens"], int)
    assert two["cached_tokens"] >= one["prompt_tokens"] // 16 * 16 > 0
    listed = httpx.get(f"{server.url}/v1/sessions").json()["data"]
    turns = {row["id"]: row["turns"] for row in listed}
    assert (turns[one["session"]], turns[three["session"]]) == (2, 1)


def test_a_chat_tells_the_snapshot_and_keeps_answers_apart_from_numbers(
    server: Server, tmp_path: Path
) -> None:
    publish(server, tmp_path, "chat-1")
    options = ("--max-tokens", "6", "--temperature", "0", "--system", "short")
    done = run("chat", server.url, *options, typed="hello\nhello\n")
    assert done.returncode == 0
    number = r"served by chat-1; \d+ prompt tokens, \d+ of them cached; 6 tokens, \d+ tokens/s; the first after \d+ ms; "
    assert re.fullmatch(f"(?:{number}ended by length\n){{2}}", done.stderr)
    told = chat(server, "hello\n", "--temperature", "0", "--system", "short")[0]
    assert done.stdout.startswith(f"{told['answer']}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--model", "nobody"], 1, "midstream chat: 404 model 'nobody' is not served here"),
        (["--max-tokens", "0"], 2, "--max-tokens must be at least 1"),
        (["--temperature", "-1"], 2, "--temperature must be at least 0"),
        (["--deployment", "nobody"], 2, "serves no model of deployment nobody"),
    ],
)
def test_a_chat_that_cannot_be_is_one_line(
    server: Server, arguments: list[str], code: int, says: str
) -> None:
    done = run("chat", server.url, *arguments, typed="hello\n")
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr


def test_top_tells_what_the_api_tells(server: Server, tmp_path: Path) -> None:
    publish(server, tmp_path, "top-1")
    session = chat(server, "a turn\n")[0]["session"]
    done = run("top", server.url, "--json", "--interval", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(done.stdout)
    status = httpx.get(f"{server.url}/hot_load/v1/models/hot_load").json()["replicas"][0]
    (replica,) = seen["replicas"]
    assert (replica["replica"], replica["snapshot"], replica["ready"]) == ("replica-0", "top-1", True)
    assert replica["last_swap"] == status["midstream"]["last_swap"]
    assert (replica["in_flight"], replica["error"]) == (0, None)
    assert replica["kv_share"] == 0
    assert seen["snapshots"][0]["snapshot"] == "top-1"
    assert seen["snapshots"][0]["desired"]
    assert list(seen["snapshots"][0]["ready_after_s"]) == ["replica-0"]
    last = seen["sessions"]["recent"][0]
    assert (last["id"], last["replica"], last["turns"]) == (session, "replica-0", 1)
    assert seen["totals"]["requests"] >= seen["totals"]["failed_requests"] >= 0
    assert seen["rates"]["generated_tokens"] == 0


def test_top_is_one_frame_without_control_codes_where_there_is_no_terminal(server: Server) -> None:
    done = run("top", server.url, "--interval", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout.startswith(f"midstream {server.url}  accounts/local/deployments/default  ")
    assert re.search(r"^replica-0 +\S+ +\S+ +0 +0 +0% ", done.stdout, flags=re.MULTILINE)


def test_top_on_a_terminal_draws_over_itself_until_it_is_interrupted(server: Server) -> None:
    terminal, its_end = pty.openpty()
    size = {"TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    arguments = command("top", server.url, "--interval", "0.1")
    process = subprocess.Popen(arguments, stdin=its_end, stdout=its_end, env=os.environ | size)
    os.close(its_end)
    drawn = b""
    try:
        deadline = time.monotonic() + 150
        while drawn.count(b"Replicas") < 3 and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.5)[0]:
                drawn += os.read(terminal, 65536)
        process.send_signal(signal.SIGINT)
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    drawn += os.read(terminal, 65536)
        assert process.poll() == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert drawn.startswith(b"\x1b[?1049h"), "it draws on the other screen, and leaves this one as it was"
    assert drawn.count(b"Replicas") >= 3


@pytest.mark.variant
def test_every_line_of_the_log_is_an_object_through_hot_loads_and_the_end_of_an_engine(
    server: Server, tmp_path: Path
) -> None:
    publish(server, tmp_path, "log-1")
    session = chat(server, "a turn\n")[0]["session"]
    engine = next(
        pid for pid in descendants(server.process.pid) if "midstream.engine.embedded.loop" in words_of(pid)
    )
    os.kill(engine, signal.SIGKILL)

    def lines() -> list[dict[str, object]]:
        *whole, _ = server.log.read_text().split("\n")
        return [json.loads(line) for line in whole]

    deadline = time.monotonic() + 150
    while not [line for line in lines() if "died" in str(line["message"])] and time.monotonic() < deadline:
        time.sleep(0.1)
    said = lines()
    assert all({"time", "level", "process", "pid", "logger", "message"} <= line.keys() for line in said)
    assert {line["process"] for line in said} >= {"serve", "gateway", "replica-0", "engine"}
    assert {line["replica"] for line in said if line["process"] == "engine"} == {"replica-0"}
    served = [line for line in said if line.get("snapshot") == "log-1" and "serves" in str(line["message"])]
    assert [(line["replica"], line["level"]) for line in served] == [("replica-0", "info")]
    assert [line["replica"] for line in said if line.get("session") == session] == ["replica-0"]
    dead = next(line for line in said if "the engine died" in str(line["message"]))
    assert (dead["level"], dead["replica"]) == ("error", "replica-0")
