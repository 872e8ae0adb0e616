"""The simulated network calls protocols as real loops do: what it may do to them can happen."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from simloop import SimLoop
from simnet import Network
from simprocess import Process, Processes

ADDRESS = ("127.0.0.1", 1)
HALF = b"half a li"
#: What a real loop calls when half a line arrives and the connection then breaks.
BROKEN = ["data", "woken", "lost: ConnectionResetError"]


class Noting(asyncio.Protocol):
    """Notes what it is called, and when that which its data woke runs. leaves: it closes as soon as it gets data."""

    def __init__(self, *, leaves: bool = False) -> None:
        self.calls: list[str] = []
        self.lost = asyncio.get_running_loop().create_future()
        self._leaves = leaves

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.calls.append("data")
        asyncio.get_running_loop().call_soon(self.calls.append, "woken")
        if self._leaves:
            self._transport.close()

    def eof_received(self) -> None:
        self.calls.append("end")

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls.append("lost" if exc is None else f"lost: {type(exc).__name__}")
        self.lost.set_result(None)


def simulated(
    seed: int, client: Callable[[], Coroutine[Any, Any, Any]], *, killed: bool
) -> asyncio.Task[Any]:
    """The client's task, when nothing happens any more. Its server writes half a line, and is killed or closes."""
    loop = SimLoop(random.Random(seed))
    network = loop.network = Network(loop, random.Random(seed))
    network.weather.latency_s = network.weather.cut = 0.0
    processes = loop.processes = Processes(loop, {}, ())
    server, user = Process("server", 1), Process("user", 2)

    class Serving(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.write(HALF)
            if killed:
                processes.end(server, -9)
            else:
                transport.close()

    asyncio._set_running_loop(loop)
    try:
        server.context.run(network.listen, Serving, ADDRESS, None)
        task = loop.create_task(client(), context=user.context)
        loop.run_until(lambda: False, 100.0)
    finally:
        asyncio._set_running_loop(None)
    return task


async def calls_of_a_simulated_connection(*, leaves: bool = False) -> list[str]:
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(lambda: Noting(leaves=leaves), *ADDRESS)
    await protocol.lost
    return protocol.calls


async def calls_of_a_real_connection(*, resets: bool, leaves: bool = False) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(lambda: Noting(leaves=leaves), *listener.getsockname())
        far, _ = listener.accept()
        # The loop has no turn in between, so it finds all of this at once.
        far.sendall(HALF)
        if resets:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        await protocol.lost
    return protocol.calls


async def first_line() -> str:
    """How the reading of a line ends that does not come."""
    reader, writer = await asyncio.open_connection(*ADDRESS)
    try:
        await reader.readuntil(b"\n")
    except (ConnectionResetError, asyncio.IncompleteReadError) as error:
        return type(error).__name__
    finally:
        writer.close()
    return "a line"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_real_loop_says_that_a_connection_broke_behind_what_its_data_woke(new_loop: Any) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(calls_of_a_real_connection(resets=True)) == BROKEN
        assert runner.run(calls_of_a_real_connection(resets=False, leaves=True)) == ["data", "woken", "lost"]


def test_the_simulated_network_says_it_behind_that_too() -> None:
    found = [simulated(seed, calls_of_a_simulated_connection, killed=True).result() for seed in range(40)]
    # All that was written may be lost, and a process that dies may end its connections in order.
    ended = ["data", "end", "woken", "lost"]
    assert [calls for calls in found if calls not in (BROKEN, BROKEN[2:], ended)] == []
    assert BROKEN in found


def test_a_simulated_protocol_that_closed_its_connection_hears_nothing_but_that() -> None:
    async def client() -> list[str]:
        return await calls_of_a_simulated_connection(leaves=True)

    assert simulated(1, client, killed=False).result() == ["data", "woken", "lost"]


def test_who_reads_from_a_process_that_dies_does_not_wait_for_ever() -> None:
    """A StreamReader that is given data and an error before its reader runs forgets the error."""
    tasks = [simulated(seed, first_line, killed=True) for seed in range(40)]
    assert [seed for seed, task in enumerate(tasks) if not task.done()] == []
    assert {task.result() for task in tasks} == {"ConnectionResetError", "IncompleteReadError"}


def test_calm_brings_what_a_stall_holds_up() -> None:
    """Else a process may not have heard of another for seconds of calm, and say so to its clients."""
    loop = SimLoop(random.Random(1))
    network = loop.network = Network(loop, random.Random(1))
    loop.processes = Processes(loop, {}, ())
    server, user = Process("server", 1), Process("user", 2)
    network.weather.stalled = {frozenset((server.name, user.name)): 50.0}

    class Serving(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.write(HALF)
            transport.write(b"ne\n")

    asyncio._set_running_loop(loop)
    try:
        server.context.run(network.listen, Serving, ADDRESS, None)
        task = loop.create_task(first_line(), context=user.context)
        assert not loop.run_until(task.done, 10.0)
        network.calm()
        assert loop.run_until(task.done, 11.0)
    finally:
        asyncio._set_running_loop(None)
    assert task.result() == "a line"
