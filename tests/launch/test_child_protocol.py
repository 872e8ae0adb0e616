"""What a supervisor and its children promise each other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from midstream.core import config
from midstream.core.supervision import ChildSpec, Listening
from midstream.http import channel
from midstream.launch import process, supervisor
from midstream.launch.process import Child, ChildMessages, StartFailed
from midstream.launch.specs import ReplicaSpec


class Script(msgspec.Struct):
    """The settings of a child made by a test."""

    code: str


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that reads its settings as a real child does and runs the code in them."""
    (tmp_path / "scripted_child.py").write_text(
        "import json, os, pathlib, signal, sys, time\n"
        "from midstream.http.channel import StdioChannel; from midstream.core.supervision import Listening\n"
        "def main():\n"
        "    settings = json.loads(sys.stdin.readline())\n"
        "    exec(settings['code'], {**globals(), 'spec': settings})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "scripted_child"


READY = "say = StdioChannel().send; print('noise'); os.write(1, b'x' * 300000); say(Listening(port=7)); sys.stdin.read()"


async def test_a_child_may_print_as_much_as_it_likes_before_and_after_it_answers(module: str) -> None:
    child = Child("noisy", module, Script(READY))
    await child.start()
    assert child.port == 7
    await child.stop(grace_s=10)


class Settings(msgspec.Struct):
    code: str
    port: int


BIND = """
import socket
say = StdioChannel().send
try:
    sock = socket.create_server(("127.0.0.1", spec["port"]))
except OSError as error:
    say(Listening(error=error.strerror))
else:
    say(Listening(port=sock.getsockname()[1]))
    sys.stdin.read()
"""


@pytest.mark.parametrize("movable", [True, False])
async def test_a_free_port_is_kept_until_somebody_else_has_it(module: str, movable: bool) -> None:
    child = Child("child", module, Settings(BIND, 0), movable=movable)
    await child.start()
    port = child.port
    for _ in range(2):
        child.kill()
        await child.ended()
        await child.start()
        assert child.port == port
    child.kill()
    await child.ended()
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(StartFailed, match="in use"):
            await child.start()
        child.renew()
        if movable:
            await child.start()
            assert child.port not in (0, port)
        else:
            with pytest.raises(StartFailed, match="in use"):
                await child.start()
    await child.stop(grace_s=10)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.exit(3)", "noisy ended while starting"),
        ("StdioChannel().send(Listening(error='no such model'))", "noisy: no such model"),
        ("print('hello'); sys.stdout.flush()", "noisy said b'hello"),
    ],
)
async def test_a_child_that_cannot_start_is_reported_with_its_own_reason(
    module: str, code: str, reason: str
) -> None:
    child = Child("noisy", module, Script(code))
    with pytest.raises(StartFailed, match=reason):
        await child.start()


async def test_a_child_that_is_killed_while_it_starts_is_started_again(module: str, tmp_path: Path) -> None:
    """Whoever kills it, as a machine short of memory does, does not end the whole server."""
    mark = tmp_path / "killed once"
    code = (
        f"mark = pathlib.Path({str(mark)!r})\n"
        "if not mark.exists(): mark.touch() or os.kill(os.getpid(), signal.SIGKILL)\n"
        "StdioChannel().send(Listening(port=7)); time.sleep(60)"
    )

    child = Child("killed", module, Script(code))
    await child.begin()
    assert (mark.exists(), child.running, child.port) == (True, True, 7)
    await child.stop(0.0)


async def test_a_child_that_dies_is_started_again_and_one_that_ignores_a_stop_is_killed(module: str) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY + "\ntime.sleep(60)"
    child = Child("stubborn", module, Script(stubborn))
    await child.start()
    first = child.pid
    assert first is not None
    supervised = asyncio.create_task(child.supervise())
    os.kill(first, signal.SIGKILL)
    while child.pid == first:  # noqa: ASYNC110 - the supervisor works on its own
        await asyncio.sleep(0)
    supervised.cancel()
    await asyncio.wait((supervised,))
    again = child.pid
    assert again is not None
    await child.stop(grace_s=0.2)
    assert not child.running
    with pytest.raises(ProcessLookupError):
        os.kill(again, 0)


LEAVES_ONE_BEHIND = (
    "import pathlib, signal, subprocess; signal.signal(signal.SIGTERM, {on_stop})\n"
    "left = subprocess.Popen(['sleep', '1000'], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)\n"
    "with open({note!r}, 'a') as note: note.write(str(left.pid) + ' ')\n"
) + READY


@pytest.mark.parametrize("on_stop", ["signal.SIG_IGN", "lambda *_: os._exit(0)"])
def test_what_a_child_started_ends_with_it_however_it_ends(module: str, tmp_path: Path, on_stop: str) -> None:
    """An engine that hangs would keep its memory, and the next one would find none."""
    note = tmp_path / "left"

    def runs(pid: str) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    async def main() -> None:
        again = asyncio.Event()
        child = Child("parent", module, Script(LEAVES_ONE_BEHIND.format(note=str(note), on_stop=on_stop)))
        await child.start()
        supervised = asyncio.create_task(child.supervise(lambda why: again.set()))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await again.wait()
        first, second = note.read_text().split()
        supervised.cancel()
        await asyncio.wait((supervised,))
        await child.stop(grace_s=0.2 if "IGN" in on_stop else 10)
        while runs(first) or runs(second):  # noqa: ASYNC110 - init reaps them
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 120))


def published(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


async def test_settings_never_show_in_the_process_list(module: str) -> None:
    child = Child("quiet", module, Script(READY + " # secret-token"))
    await child.start()
    assert child.pid is not None
    shown = {name: published(child.pid, name) for name in ("cmdline", "environ")}
    assert b"quiet" in shown["cmdline"]
    assert b"secret-token" not in shown["cmdline"] + shown["environ"]
    await child.stop(grace_s=10)


#: It ends before its last line is in the pipe: a process that it leaves behind writes it, once the file is there.
LEAVES_A_LINE_BEHIND = """
channel = StdioChannel()
channel.send(Listening(port=7))
gone, leaves = os.pipe()
if os.fork() == 0:
    # What is left in the group of a process that ended is killed.
    os.setsid()
    os.write(leaves, b"1")
    while not os.path.exists({go!r}):
        time.sleep(0.01)
    channel.send(Listening(port=8))
else:
    os.read(gone, 1)
os._exit(1)
"""


@pytest.mark.parametrize("in_time", [True, False])
def test_the_last_lines_of_a_child_are_heard_before_its_end_is_reported(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    """The last report of a gateway counts. A pipe that somebody holds open is not waited for without end."""
    monkeypatch.setattr(process, "LAST_LINES_S", 60.0 if in_time else 0.1)
    go = tmp_path / "go"
    events: list[str] = []

    async def main() -> None:
        script = Script(LEAVES_A_LINE_BEHIND.format(go=str(go)))
        child = Child("child", module, script, ChildMessages(lambda line: events.append("line")))
        await child.start()
        while child.running:  # noqa: ASYNC110 - the process ends by itself
            await asyncio.sleep(0.01)
        ended = asyncio.Event()
        supervised = asyncio.create_task(child.supervise(on_ended=ended.set))
        if in_time:
            await asyncio.sleep(0)
            go.touch()
        await ended.wait()
        events.append("end")
        supervised.cancel()
        await asyncio.wait((supervised,))
        go.touch()
        assert child._life is not None
        while not child._life.process._transport.is_closing():  # type: ignore[attr-defined] # noqa: ASYNC110
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 120))
    assert events == (["line", "end"] if in_time else ["end"])


class PlayedChannel(channel.StdioChannel):
    """A channel without pipes. sent: every message."""

    def __init__(self) -> None:
        self.answered = False
        self.sent: list[msgspec.Struct] = []

    def receive(self, kind: type[Any]) -> Any:
        return ChildSpec(log_level="info")

    def send(self, message: msgspec.Struct) -> None:
        self.answered = True
        self.sent.append(message)


@pytest.fixture
def played_channel(monkeypatch: pytest.MonkeyPatch) -> PlayedChannel:
    made = PlayedChannel()
    monkeypatch.setattr(channel, "StdioChannel", lambda: made)
    monkeypatch.setattr(channel, "raise_file_limit", lambda: None)
    monkeypatch.setattr(channel.logs, "configure", lambda process, how: None)
    return made


def test_what_a_child_holds_is_let_go_when_its_threads_have_ended(played_channel: PlayedChannel) -> None:
    order: list[str] = []
    may_end = threading.Event()

    @contextlib.contextmanager
    def holding(spec: ReplicaSpec) -> Iterator[None]:
        yield
        order.append("let go")

    def write() -> None:
        may_end.wait()
        order.append("written")

    async def serve(spec: ReplicaSpec, channel: channel.StdioChannel) -> None:
        asyncio.get_running_loop().run_in_executor(None, write)
        threading.Timer(0.05, may_end.set).start()

    assert channel.run_child("replica", ReplicaSpec, serve, around=holding) == 0
    assert order == ["written", "let go"]


def test_an_error_is_the_answer_of_a_child_that_has_not_answered_and_else_a_line_of_its_log(
    played_channel: PlayedChannel, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(spec: ReplicaSpec, channel: channel.StdioChannel) -> None:
        if not played_channel.sent:
            raise OSError("no such address")
        raise OSError("too many open files")

    assert channel.run_child("replica", ReplicaSpec, serve) == 1
    assert channel.run_child("replica", ReplicaSpec, serve) == 1
    assert played_channel.sent == [Listening(error="no such address")]
    assert "too many open files" in caplog.text


def test_a_signal_that_comes_while_a_supervisor_is_made_stops_it_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = []

    class Made:
        def __init__(self, *given: object) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        async def serve(self, on_ready: object) -> None:
            await asyncio.Event().wait()

        async def close(self) -> None:
            closed.append(True)

        async def restart_gateways(self) -> None: ...
        def kill(self) -> None: ...

    monkeypatch.setattr(supervisor, "Supervisor", Made)
    settings = config.Settings(state_dir=str(tmp_path))
    (tmp_path / supervisor.LOCK).touch()
    asyncio.run(asyncio.wait_for(supervisor.run(settings, "m", {}, print, cast("Any", None)), 60))
    assert closed == [True]
