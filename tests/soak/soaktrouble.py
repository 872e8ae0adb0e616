"""What befalls the processes of a real server: kills, stops, a replaced gateway, a full disk, a slow bucket. One at a time.

Owns: the windows of time in which requests may meet with it.
Always holds: a window opens before anything is done, and closes when the whole server is usable again and a little time is
over. What is stopped is continued, and what is filled is emptied, whatever happens in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from serving import Server, command, descendants
from simclient import Broken, exchange
from test_full_disk import fill

#: What is left of a lost connection or a moved session after all is usable.
AFTER_S = 3.0
#: A server that is not whole again by then has a fault.
RECOVERS_S = 180.0
KILLED = ("replica", "engine", "gateway", "front", "trainer")
STOPPED = ("replica", "engine", "gateway", "front", "supervisor", "trainer")
KINDS = (
    *(f"kill {role}" for role in KILLED),
    *(f"stop {role}" for role in STOPPED),
    "restart",
    "disk",
    "bucket",
)

_MODULES = {
    b"midstream.launch.gateway": "gateway",
    b"midstream.launch.replica": "replica",
    b"midstream_tinker.front": "front",
    b"midstream.engine.embedded.loop": "engine",
    b"midstream_tinker.trainer.loop": "trainer",
}


def processes(server: Server) -> dict[int, str]:
    """The role of each process that runs. One that nobody foresaw is `other`."""
    found = {server.process.pid: "supervisor"}
    for pid in descendants(server.process.pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            found[pid] = next((role for module, role in _MODULES.items() if module in words), "other")
    return found


class SlowBucket:
    """Between the server and the bucket's own server; while `slow`, what is read there comes in small pieces."""

    def __init__(self, port: int) -> None:
        self._behind = port
        self.slow = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._behind)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, back, slow=False))
                group.create_task(self._pass(there, writer, slow=True))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**14):
                if slow and self.slow:
                    await asyncio.sleep(0.15)
                writer.write(data)
                await writer.drain()
        writer.close()

    def close(self) -> None:
        self._server.close()


class Trouble:
    """disk: the state directory's file system as this process reaches it; None: it cannot be filled here."""

    def __init__(
        self,
        server: Server,
        port: int,
        replicas: int,
        workers: int,
        rng: random.Random,
        bucket: SlowBucket,
        disk: Path | None,
        found: list[str],
        counts: Counter[str],
        say: Callable[[str], None],
    ) -> None:
        self._server, self._port, self._replicas, self._workers = server, port, replicas, workers
        self._rng, self._slow_bucket, self._small_disk = rng, bucket, disk
        self._found, self._counts, self._say = found, counts, say
        #: Begin and end of each; the end of one that is open is not known.
        self.windows: list[tuple[float, float | None]] = []
        #: Of the trainer's kills. Only who trains may notice them, and a trainer that is stopped nobody.
        self.of_trainer: list[tuple[float, float | None]] = []

    def trainer_lives_since(self, at: float) -> bool:
        return all(end is not None and end < at for _, end in (*self.windows, *self.of_trainer))

    def calm_since(self, at: float) -> bool:
        return all(end is not None and end < at for _, end in self.windows)

    async def run(self, seconds: float, every_s: float) -> None:
        """One after another, every kind about equally often, for so long."""
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        kinds: list[str] = []
        while clock() < until:
            if not kinds:
                kinds = [kind for kind in KINDS if kind != "disk" or self._small_disk is not None]
                self._rng.shuffle(kinds)
            await self.befall(kinds.pop())
            await asyncio.sleep(self._rng.uniform(0.3, 1.0) * every_s)

    async def befall(self, kind: str) -> None:
        clock = asyncio.get_running_loop().time
        what, _, role = kind.partition(" ")
        windows = self.windows
        if role == "trainer":
            windows = self.of_trainer if what == "kill" else []
            await self._there(role)
        begun, front = clock(), self._some("front")
        windows.append((begun, None))
        self._say(f"trouble: {kind}")
        await getattr(self, f"_{what}")(role)
        if role == "trainer":
            await self._there(role)
            if self._some("front") != front:
                self._found.append(f"{kind}: the front has another process than before")
        await self._recovered(kind)
        await asyncio.sleep(AFTER_S)
        windows[-1] = (begun, clock())
        self._counts[f"trouble: {kind}"] += 1
        self._say(f"trouble: {kind} is over after {clock() - begun:.1f} s")

    async def _there(self, role: str) -> None:
        """Until a process of this role runs."""
        try:
            async with asyncio.timeout(RECOVERS_S):
                while self._some(role) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
        except TimeoutError:
            self._found.append(f"no {role} runs for {RECOVERS_S:g} s")

    def _some(self, role: str) -> int | None:
        there = [pid for pid, own in processes(self._server).items() if own == role]
        return self._rng.choice(there) if there else None

    async def _kill(self, role: str) -> None:
        if (pid := self._some(role)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(1.0)

    async def _stop(self, role: str) -> None:
        if (pid := self._some(role)) is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(self._rng.uniform(1.0, 14.0))
            finally:
                os.kill(pid, signal.SIGCONT)

    async def _restart(self, _: str) -> None:
        # As this process reaches it, also where it is a file system of the server's own.
        there = Path(f"/proc/{self._server.process.pid}/root{self._server.state_dir}")
        words = command("restart", "gateway", "--state-dir", str(there))
        done = await asyncio.create_subprocess_exec(
            *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await done.communicate()
        if done.returncode:
            self._found.append(f"midstream restart gateway: {said.decode()[-500:]}")

    async def _disk(self, _: str) -> None:
        assert self._small_disk is not None
        file = self._small_disk / "fill"
        try:
            await asyncio.to_thread(fill, file)
            await asyncio.sleep(self._rng.uniform(4.0, 10.0))
        finally:
            file.unlink(missing_ok=True)

    async def _bucket(self, _: str) -> None:
        self._slow_bucket.slow = True
        try:
            await asyncio.sleep(self._rng.uniform(8.0, 20.0))
        finally:
            self._slow_bucket.slow = False

    async def _recovered(self, kind: str) -> None:
        try:
            async with asyncio.timeout(RECOVERS_S):
                while not await self.whole():  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
        except TimeoutError:
            self._found.append(f"{kind}: the server is not whole again after {RECOVERS_S:g} s")

    async def whole(self) -> bool:
        """Every replica is usable, every gateway uses all of them, and the front answers."""
        try:
            health = (await exchange(self._port, "GET", "/health")).json()
            front = await exchange(self._port, "GET", "/api/v1/healthz")
        except Broken:
            return False
        rows = health.get("replicas", ())
        ready = health.get("gateway_workers_ready") == self._workers
        return (
            ready
            and front.status == 200
            and len(rows) == self._replicas
            and all(row["usable"] for row in rows)
        )
