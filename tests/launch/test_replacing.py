"""A supervised process that is replaced by another one of its kind: who is started, told, waited for, and ended."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from midstream.launch import process
from midstream.launch.process import Child, ChildMessages, StartFailed


class Script(msgspec.Struct):
    code: str
    log: str
    port: int = 0
    takes_over: str | None = None


class Message(msgspec.Struct):
    what: str


MODULE = """
import json, os, sys
from midstream.http.channel import StdioChannel
from midstream.core.supervision import Accepting, Listening
def main():
    spec = json.loads(sys.stdin.readline())
    def note(text):
        with open(spec["log"], "a") as log: log.write(text + "\\n")
    exec(spec["code"], {**globals(), "spec": spec, "note": note, "say": StdioChannel().send})
"""
#: The first one offers; what takes over says so; each notes what it hears, and one that is told "done" ends by itself.
PLAYS = """
number = int(spec["takes_over"] or 0) + 1
note(f"{number} starts at {spec['port']}")
say(Listening(port=7, offer=str(number)))
if number > 1:
    {TAKES}
for line in sys.stdin:
    what = json.loads(line)["what"]
    note(f"{number} hears {what}")
    if what == f"{number} is done":
        break
note(f"{number} ends")
"""

#: Each says something before it takes over, and ends when it is told to.
SPEAKS = """
import msgspec
class Message(msgspec.Struct):
    what: str
number = int(spec["takes_over"] or 0) + 1
say(Listening(port=7, offer=str(number)))
say(Message(f"of {number}"))
if number > 1:
    {TAKES}
for line in sys.stdin:
    if json.loads(line)["what"] == f"{number} is done":
        break
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Child]:
    (tmp_path / "scripted_successor.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def child(takes: str = "say(Accepting())") -> Child:
        spec = Script(PLAYS.replace("{TAKES}", takes), str(tmp_path / "log"))
        return Child("child", "scripted_successor", spec, ChildMessages(greeting=lambda: Message("hello")))

    return child


def play(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - a child process makes it so
        await asyncio.sleep(0.01)


async def noted(tmp_path: Path, line: str) -> list[str]:
    """All that was noted, once `line` was."""
    while line not in (lines := (tmp_path / "log").read_text().splitlines()):  # noqa: ASYNC110 - a child process writes it
        await asyncio.sleep(0.01)
    return lines


async def test_a_replaced_process_ends_by_itself_and_is_not_started_again(
    make: Callable[..., Child], tmp_path: Path
) -> None:
    child = make()
    await child.start()
    restarts: list[str | None] = []
    supervising = asyncio.create_task(child.supervise(restarts.append))
    await child.replace(60.0)
    assert child.offer == "2"
    child.tell(Message("more"))
    await noted(tmp_path, "1 hears more")
    await noted(tmp_path, "2 hears more")
    await child.replace(60.0)
    child.tell(Message("1 is done"))
    await noted(tmp_path, "1 ends")
    child.tell(Message("2 is done"))
    lines = await noted(tmp_path, "2 ends")
    assert [line for line in lines if "starts" in line] == [
        "1 starts at 0",
        "2 starts at 7",
        "3 starts at 7",
    ]
    assert restarts == []
    assert child.running
    child.tell(Message("3 is done"))
    await noted(tmp_path, "3 ends")
    lines = await noted(tmp_path, "1 starts at 7")
    assert lines.count("1 starts at 7") == 1, "who ends and was not replaced is started again"
    supervising.cancel()
    await child.stop(10)


@pytest.mark.parametrize(
    ("takes", "why"),
    [
        ("sys.exit(1)", "ended before it took over"),
        ("sys.stdin.read()", "did not take over in 0.5 s"),
    ],
)
async def test_who_cannot_take_over_leaves_the_old_one_in_place(
    make: Callable[..., Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: str, why: str
) -> None:
    # An interpreter that ends on a busy machine may take longer than half a second.
    if takes != "sys.exit(1)":
        monkeypatch.setattr(process, "TAKE_OVER_S", 0.5)

    child = make(takes)
    await child.start()
    supervising = asyncio.create_task(child.supervise())
    with pytest.raises(StartFailed, match=why):
        await child.replace(60.0)
    assert (child.offer, child.running) == ("1", True)
    child.tell(Message("more"))
    await noted(tmp_path, "1 hears more")
    assert not supervising.done()
    supervising.cancel()
    await child.stop(10)


@pytest.mark.parametrize("takes", ["say(Accepting())", "sys.exit(1)"])
async def test_what_a_replaced_process_said_counts_until_it_has_ended(
    make: Callable[..., Child], takes: str
) -> None:
    heard: list[tuple[int, str | None]] = []

    def hear(pid: int, line: bytes | None) -> None:
        heard.append((pid, None if line is None else msgspec.json.decode(line, type=Message).what))

    spec = msgspec.structs.replace(cast(Script, make()._spec), code=SPEAKS.replace("{TAKES}", takes))
    child = Child("child", "scripted_successor", spec, ChildMessages(functools.partial(hear, 0)))
    child.on_retiring = hear
    await child.start()
    assert child.pid is not None
    first = child.pid
    await until(lambda: bool(heard))
    if takes == "sys.exit(1)":
        with pytest.raises(StartFailed):
            await child.replace(60.0)
        assert heard == [(0, "of 1")], "nobody took over: what the old one said stands"
    else:
        await child.replace(60.0)
        assert heard == [(0, "of 1"), (first, "of 1"), (0, "of 2")]
        child.tell(Message("1 is done"))
        await until(lambda: len(heard) > 3)
        assert heard[3:] == [(first, None)]
    await child.stop(10)


async def test_stopping_ends_the_replaced_ones_too(make: Callable[..., Child], tmp_path: Path) -> None:
    child = make()
    await child.start()
    await child.replace(3600.0)
    await child.stop(10)
    assert not child.running
    assert (tmp_path / "log").read_text().count("starts") == 2
    with pytest.raises(StartFailed, match="is not running"):
        await child.replace(1.0)


async def test_one_that_does_not_finish_in_time_is_ended(
    make: Callable[..., Child], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "RETIRE_GRACE_S", 0.0)

    child = make()
    await child.start()
    await child.replace(0.1)
    while "replaced, did not end within" not in caplog.text:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert child.running
    await child.stop(10)


async def test_a_successor_is_ended_with_the_rest_when_the_server_stops_while_it_starts(
    make: Callable[..., Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = 'if spec["takes_over"]: note(f"pid {os.getpid()}"); import time; time.sleep(3600)\n'

    child = make()
    child._spec = msgspec.structs.replace(child._spec, code=slow + cast(Script, child._spec).code)
    await child.start()
    replacing = asyncio.create_task(child.replace(60.0))
    while "pid " not in (tmp_path / "log").read_text():  # noqa: ASYNC110 - a child process writes it
        await asyncio.sleep(0.01)
    [pid] = [int(line[4:]) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("pid ")]
    replacing.cancel()
    await asyncio.wait((replacing,))
    await child.stop(10)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
