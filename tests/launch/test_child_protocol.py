"""What a supervisor and its children promise each other."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from midstream.launch.process import Child, StartFailed


class Script(msgspec.Struct):
    """The settings of a child made by a test."""

    code: str


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that reads its settings as a real child does and runs the code in them."""
    (tmp_path / "scripted_child.py").write_text(
        "import json, sys, os, time\n"
        "from midstream.launch.child import Announcer, Listening\n"
        "spec = json.loads(sys.stdin.readline())\n"
        "exec(spec['code'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "scripted_child"


READY = (
    "say = Announcer(); print('noise'); os.write(1, b'x' * 300000); say(Listening(port=7)); sys.stdin.read()"
)


def test_a_child_may_print_as_much_as_it_likes_before_and_after_it_answers(module: str) -> None:
    async def main() -> None:
        child = Child("noisy", module, Script(READY))
        await child.start()
        assert child.port == 7
        await child.stop(grace_s=10)

    asyncio.run(main())


class Settings(msgspec.Struct):
    code: str
    port: int


BIND = """
import socket
say = Announcer()
try:
    sock = socket.create_server(("127.0.0.1", spec["port"]))
except OSError as error:
    say(Listening(error=error.strerror))
else:
    say(Listening(port=sock.getsockname()[1]))
    sys.stdin.read()
"""


@pytest.mark.parametrize("movable", [True, False])
def test_a_free_port_is_kept_until_somebody_else_has_it(module: str, movable: bool) -> None:
    async def main() -> None:
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

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.exit(3)", "noisy ended while starting"),
        ("Announcer()(Listening(error='no such model'))", "noisy: no such model"),
        ("print('hello'); sys.stdout.flush()", "noisy said b'hello"),
    ],
)
def test_a_child_that_cannot_start_is_reported_with_its_own_reason(
    module: str, code: str, reason: str
) -> None:
    async def main() -> None:
        child = Child("noisy", module, Script(code))
        with pytest.raises(StartFailed, match=reason):
            await child.start()

    asyncio.run(main())


def test_a_child_that_dies_is_started_again_and_one_that_ignores_a_stop_is_killed(module: str) -> None:
    async def main() -> None:
        stubborn = (
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY + "\ntime.sleep(60)"
        )
        child = Child("stubborn", module, Script(stubborn))
        await child.start()
        process = child._process
        assert process is not None
        supervised = asyncio.create_task(child.supervise())
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        while child._process is process:  # noqa: ASYNC110 - the supervisor works on its own
            await asyncio.sleep(0)
        assert child._process.pid != process.pid
        supervised.cancel()
        await asyncio.wait((supervised,))
        again = child._process
        await child.stop(grace_s=0.2)
        assert again.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(again.pid, 0)

    asyncio.run(main())


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
        assert child._process is not None
        os.kill(child._process.pid, signal.SIGKILL)
        await again.wait()
        first, second = note.read_text().split()
        supervised.cancel()
        await asyncio.wait((supervised,))
        await child.stop(grace_s=0.2 if "IGN" in on_stop else 10)
        while runs(first) or runs(second):  # noqa: ASYNC110 - init reaps them
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 30))


def published(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def test_settings_never_show_in_the_process_list(module: str) -> None:
    async def main() -> None:
        child = Child("quiet", module, Script(READY + " # secret-token"))
        await child.start()
        assert child._process is not None
        shown = {name: published(child._process.pid, name) for name in ("cmdline", "environ")}
        assert b"quiet" in shown["cmdline"]
        assert b"secret-token" not in shown["cmdline"] + shown["environ"]
        await child.stop(grace_s=10)

    asyncio.run(main())
