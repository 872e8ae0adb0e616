"""`midstream serve` with four embedded replicas, and the routers that are put before the very same replicas.

Owns: starting and reading them, and the filters that stand in each way once, so that each way costs the same there: before
midstream's gateway, or between another router and each replica.
Always holds: what was started is gone when its `async with` block is left. A router starts for one run and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from gateway.routers import (
    HAProxy,
    Router,
    RouterFailed,
    SglangRouter,
    Smg,
    VllmRouter,
    VllmRouterByCache,
    folder_for,
)
from gateway.tools import listens_on, pin, tree, tree_cpu_s
from rollout_filter import Filter
from rollout_load import Connections
from servers import TOKEN, Midstream, Model

from agentic.load import answered, asked
from midstream.models.tiny_moe import write_tiny_moe

REPLICAS = 4
CONTEXT = 8192
CAUGHT_UP_S_MAX = 30.0
SPARE_S_MAX = 300.0
FOLLOW_S = 2.0
#: Ways through a gateway: with the KV budget, and without it.
OURS, UNBUDGETED = "midstream", "midstream, kv_budget 0"
THROUGH_GATEWAY = (OURS, UNBUDGETED)
ROUTERS: dict[str, type[Router]] = {
    "vllm-router, hash": VllmRouter,
    "vllm-router, cache": VllmRouterByCache,
    "sglang-router": SglangRouter,
    "smg": Smg,
    "HAProxy, hash": HAProxy,
}
WAYS = (*THROUGH_GATEWAY, *ROUTERS)
# A session's key, as the client sends it twice. smg and sglang-router do not pass on both.
PASSED = ("x-session-id", "x-smg-routing-key")
SAMPLE = re.compile(r"^(midstream_replica_\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
OWN_PROCESS = re.compile(rb"midstream\.launch\.(spare_)?replica\0")
#: A spare process that did no work for so long has imported everything.
STILL_S = 2.0
PROBE = b'{"model":"m","prompt":"\xc4\x80","max_tokens":1}'
PROBE_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\nx-session-id: probe\r\n"
    b"x-smg-routing-key: probe\r\ncontent-length: %d\r\n\r\n" % len(PROBE)
)


class Serving(Midstream):
    """The server. Its replicas answer whoever has their token. has_budget: sessions wait for room in the KV cache."""

    kv_cache_tokens = 65536
    has_budget = True
    #: The setting of that name; 0: there is no spare replica process.
    spare_after_s = 0

    def spare_setting(self) -> str:
        return f"spare_after_s = {self.spare_after_s}\n"

    def command(self) -> list[str]:
        given = super().command()
        config = Path(given[given.index("--config") + 1])
        text = config.read_text() + f"kv_cache_tokens = {self.kv_cache_tokens}\n"
        if not self.has_budget:
            text = text.replace("[replica]\n", "[replica]\nkv_budget = 0\n")
            assert "kv_budget" in text, text
        config.write_text(text)
        given[given.index("--replicas") + 1] = str(REPLICAS)
        at = given.index("--kv-cache-memory")
        return given[:at] + given[at + 2 :]

    def replicas(self) -> dict[str, dict[str, float]]:
        """The newest sample of each metric of each replica; "port" is one of them."""
        found: dict[str, dict[str, float]] = {}
        for name, labels, value in SAMPLE.findall(self._metrics()):
            named = dict(LABEL.findall(labels))
            one = found.setdefault(named["replica"], {})
            one[name.removeprefix("midstream_replica_")] = float(value)
            if "url" in named:
                one["port"] = float(named["url"].rpartition(":")[2])
        return found

    def replica_pids(self) -> list[int]:
        """Of the replicas' own processes, without those under them, in the order in which they were started.

        One that waits to become a replica is the last.
        """
        found = (
            pid for pid in tree(self.pid) if OWN_PROCESS.search(Path(f"/proc/{pid}/cmdline").read_bytes())
        )
        return sorted(found)


class Fleet:
    """A running server, and filters before its gateway and its replicas.

    has_budget: False: no session waits for room, and who asks the replicas themselves has no sessions there, as with engines
    that know none.
    """

    def __init__(
        self, folder: Path, kv_cache_tokens: int, *, has_budget: bool, spare_after_s: int = 0
    ) -> None:
        self._folder = folder
        model = Model("agents", folder / "m", vocabulary=256, threads=1, vllm_cores="", kv_gib=0)
        write_tiny_moe(model.directory, max_positions=CONTEXT)
        self.server = Serving(model, folder)
        self.server.kv_cache_tokens = kv_cache_tokens
        self.server.has_budget = has_budget
        self.server.spare_after_s = spare_after_s
        self._front: Filter | None = None
        self._filters: dict[str, Filter] = {}

    async def __aenter__(self) -> Fleet:
        try:
            await asyncio.to_thread(self.server.__enter__)
            await self._start_filters()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        for one in (self._front, *self._filters.values()):
            if one is not None:
                await one.stop()
        await asyncio.to_thread(self.server.stop)

    async def _start_filters(self) -> None:
        deadline = time.monotonic() + CAUGHT_UP_S_MAX
        while True:
            replicas = await asyncio.to_thread(self.server.replicas)
            if sum(one.get("ready", 0) for one in replicas.values()) == REPLICAS:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all replicas are ready: {replicas}")
            await asyncio.sleep(0.2)
        self._front = Filter(self.server.port, asked=asked, answered=answered, passed=PASSED)
        for name, one in sorted(replicas.items()):
            self._filters[name] = Filter(
                int(one["port"]),
                asked=asked,
                answered=functools.partial(answered, replica=name),
                headers={"x-midstream-token": TOKEN},
                passed=PASSED if self.server.has_budget else (),
            )
        for one in (self._front, *self._filters.values()):
            await one.start()

    @property
    def urls(self) -> list[str]:
        """Of the filters before the replicas, which stay when a replica's process is another one."""
        return [f"http://127.0.0.1:{one.port}" for one in self._filters.values()]

    @contextlib.asynccontextmanager
    async def way(self, name: str) -> AsyncIterator[tuple[int, Router | None]]:
        """The port to send to, and the router that runs for it. Raises RouterFailed."""
        if name in THROUGH_GATEWAY:
            assert self._front is not None
            yield self._front.port, None
            return
        kind = ROUTERS[name]
        if (why := kind.missing()) is not None:
            raise RouterFailed(f"{name}: {why}")
        router = kind(folder_for(kind.__name__, self._folder), self.urls, min(os.sched_getaffinity(0)))
        await asyncio.to_thread(router.start, PROBE_HEAD + PROBE)
        try:
            # Here nothing has a core of its own.
            pin(router.pid, *os.sched_getaffinity(0))
            yield router.port, router
        finally:
            await asyncio.to_thread(router.stop)

    async def counts(self, generated: float | None = None) -> dict[str, dict[str, float]]:
        """Each replica's metrics, once they say that so many tokens were drawn in all. None: once they do not change."""
        deadline = time.monotonic() + CAUGHT_UP_S_MAX
        before = -1.0
        while True:
            found = await asyncio.to_thread(self.server.replicas)
            drawn = sum(one.get("generated_tokens_total", 0.0) for one in found.values())
            if drawn == (before if generated is None else generated):
                return found
            if time.monotonic() > deadline:
                raise RuntimeError(f"replicas say that they drew {drawn} tokens, expected {generated}")
            before = drawn
            await asyncio.sleep(0.5)

    async def close_session(self, key: str) -> None:
        """As a trainer ends a trajectory."""
        connections = Connections()
        try:
            await connections.exchange("DELETE", self.server.port, f"/v1/sessions/{key}", {}, b"")
        finally:
            await connections.close()

    async def close_sessions(self, keys: Iterable[str]) -> None:
        for key in keys:
            await self.close_session(key)

    async def spare_waits(self) -> None:
        """Returns once a spare replica process waits, as in a server that has run for a minute."""
        deadline = time.monotonic() + SPARE_S_MAX
        worked = -1.0
        while True:
            pids = self.server.replica_pids()
            now = tree_cpu_s(pids[-1]) if len(pids) > REPLICAS else -1.0
            if now == worked > 0:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"no spare replica process waits: {pids}")
            worked = now
            await asyncio.sleep(STILL_S)

    def kill_one(self) -> str:
        """Kills the process of the replica that was started first. Returns its name."""
        pid = self.server.replica_pids()[0]
        ports = listens_on(pid)
        os.kill(pid, signal.SIGKILL)
        return next(name for name, one in self._filters.items() if one.replica_port in ports)

    async def follow(self) -> None:
        """Keep the filters at their replicas' ports. Hardly ever is one free for somebody else when its replica begins again.

        Each look costs the gateway milliseconds that would be in the wall time."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            for name, one in (await asyncio.to_thread(self.server.replicas)).items():
                if port := int(one.get("port", 0)):
                    self._filters[name].replica_port = port
