"""The spare replica process: who takes it, and what becomes of it else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from midstream.launch.process import Child, ChildProcess, StartFailed, new_process
from midstream.launch.spare import SpareReplica

SOON_S = 0.001


class Settings(msgspec.Struct):
    """Of a scripted child. port: what it says that it listens on."""

    port: int


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plain` answers its settings as a real child does. `waiting` says before that it waits, `broken` says something else."""
    answer = (
        "from midstream.core.supervision import Listening, SpareWaits\n"
        "from midstream.http.channel import StdioChannel\n"
        "import json, sys\n"
        "def main():\n"
        "    channel = StdioChannel()\n"
        "    {first}\n"
        "    channel.send(Listening(port=json.loads(sys.stdin.readline())['port']))\n"
        "    sys.stdin.read()\n"
    )
    for name, first in (
        ("plain", "pass"),
        ("waiting", "channel.say_waiting()"),
        ("broken", "channel.send(Listening(port=1))"),
    ):
        (tmp_path / f"{name}_child.py").write_text(answer.format(first=first))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@contextlib.asynccontextmanager
async def kept(spare: SpareReplica) -> AsyncIterator[None]:
    assert spare.take() is None
    keeping = asyncio.create_task(spare.keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait((keeping,))
    assert keeping.cancelled(), "nothing that a process does ends it"


def spare_of(module: str, made: list[ChildProcess], after_s: float = SOON_S) -> SpareReplica:
    async def create() -> ChildProcess:
        made.append(await new_process("spare", module))
        return made[-1]

    return SpareReplica(create, after_s)


async def until(holds: Callable[[], bool]) -> None:
    """The test's timeout is the other way out."""
    while not holds():  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(0.005)


def waits(spare: SpareReplica, pid: int) -> Callable[[], bool]:
    return lambda: f"SpareReplica({pid}," in repr(spare)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))


async def test_a_replica_that_begins_takes_the_spare_and_another_one_is_made(modules: None) -> None:
    made: list[ChildProcess] = []
    spare = spare_of("waiting_child", made)
    child = Child("replica-0", "plain_child", Settings(7), spare=spare.take)
    async with kept(spare):
        await until(lambda: bool(made))
        first = made[0]
        await until(waits(spare, first.pid))
        await child.start()
        assert (child.pid, child.port) == (first.pid, 7)
        assert first.name == "replica-0", "its lines and its end are said of the replica"
        await until(lambda: len(made) >= 2)
        await until(waits(spare, made[1].pid))
        assert first.running, "it is the replica's now"
    assert not made[1].running, "one that nobody took ends with the server"
    assert first.running
    await child.stop(grace_s=10)


async def test_a_replica_begins_by_itself_where_no_spare_waits(
    modules: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def begins_alone(spare: SpareReplica, made: list[ChildProcess]) -> None:
        child = Child("replica-0", "plain_child", Settings(7), spare=spare.take)
        await child.start()
        assert child.pid not in [process.pid for process in made]
        await child.stop(grace_s=10)

    killed: list[int] = []

    async def main() -> None:
        made: list[ChildProcess] = []
        broken = spare_of("broken_child", made)
        async with kept(broken):
            await until(lambda: len(made) >= 2)
            assert not made[0].running, "one that says something else is ended"
            await begins_alone(broken, made)
        made.clear()
        spare = spare_of("waiting_child", made)
        async with kept(spare):
            await until(lambda: bool(made))
            await until(waits(spare, made[0].pid))
            killed.append(made[0].pid)
            os.kill(made[0].pid, signal.SIGKILL)
            await until(lambda: len(made) >= 2)
        await begins_alone(spare, made)

    with caplog.at_level(logging.WARNING):
        await main()
    assert "a spare replica process ended while it started" in caplog.text
    assert f"the spare replica process {killed[0]} ended with code -9" in caplog.text


def refusing(tries: list[int]) -> Callable[[], Awaitable[ChildProcess]]:
    async def create() -> ChildProcess:
        tries.append(1)
        raise StartFailed("spare cannot be started: no memory")

    return create


async def test_none_is_made_while_replicas_begin_or_where_it_is_off() -> None:
    tries: list[int] = []
    spare = SpareReplica(refusing(tries), 3600)
    async with kept(spare):
        # It would be tried in this turn of the loop.
        await asyncio.sleep(0)
    await SpareReplica(refusing(tries), 0).keep()
    assert tries == []


async def test_none_is_made_by_a_server_where_no_replica_begins() -> None:
    tries: list[int] = []
    spare = SpareReplica(refusing(tries), SOON_S)
    keeping = asyncio.create_task(spare.keep())
    # A process would be tried in this turn of the loop, or in the one behind this timer.
    await asyncio.sleep(2 * SOON_S)
    assert tries == []
    spare.take()
    await until(lambda: bool(tries))
    keeping.cancel()
    await asyncio.wait((keeping,))


async def test_a_process_that_cannot_be_made_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tries: list[int] = []
        async with kept(SpareReplica(refusing(tries), SOON_S)):
            await until(lambda: len(tries) >= 2)
    assert "there is no spare replica process: spare cannot be started: no memory" in caplog.text


def killed_first(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def of_session(pid: int) -> int | None:
    """The niceness of its session among all; None where the kernel knows none."""
    file = Path(f"/proc/{pid}/autogroup")
    return int(file.read_text().split()[-1]) if file.exists() else None


@pytest.mark.slow
def test_a_real_one_ends_with_its_engine_when_the_supervisor_is_gone() -> None:
    """It has imported everything by then, with a priority that is its own again."""
    process = subprocess.Popen(
        [sys.executable, "-m", "midstream.core.child", "midstream.launch.spare_replica", "spare"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # As the supervisor starts it.
        start_new_session=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b'{"type":"waiting"}\n'
        engines = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(engines) == 1
        assert of_session(process.pid) in (0, None)
        for pid in (process.pid, int(engines[0])):
            assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
            assert killed_first(pid) == 1000, "where memory is short, no replica has to go before it"
        process.stdin.close()
        # The engine has the same standard error, which ends with the last process that has it.
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        assert process.wait(60) == 0


@pytest.mark.slow
def test_a_real_one_ends_with_an_engine_that_hangs_when_the_supervisor_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine hangs in an import: it says nothing, and does not see that its socket is closed."""
    (tmp_path / "hanging_engine.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    begins = (
        "from midstream.engine.embedded import engine\n"
        "from midstream.http import ipc\n"
        "engine.begin = lambda beside: ipc.begin('hanging_engine')\n"
        "from midstream.launch import spare_replica\n"
        "raise SystemExit(spare_replica.main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", begins],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        while of_session(process.pid) not in (19, None):
            assert process.poll() is None
            time.sleep(0.01)
        # What they say ends with the last process that has this standard error: the engine has it, too.
        _, said = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert b"Traceback" not in said
    assert process.returncode == 0
