"""CPU time of the gateway process per proxied request and per streamed chunk.

Three processes on loopback: a load client, the gateway (real data path, uvloop, its own process), and one mock replica
that answers from memory. Counted: the gateway process's own CPU time (user + system, /proc/PID/schedstat) over a run,
less nothing. Excluded: the client's and the replica's CPU. Prints one JSON object.

    python benchmarks/gateway_cpu.py [--requests N] [--streams N] [--write] [--profile FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import uvloop
from hardware import provenance, write_result

from midstream.config import GatewaySettings
from midstream.control.loop import Reconciler
from midstream.gateway.app import control_app
from midstream.gateway.metrics import GatewayMetrics
from midstream.gateway.registry import Deployment, Deployments
from midstream.gateway.replicas import ReplicaSet
from midstream.gateway.server import Gateway
from midstream.ledger import Ledger
from midstream.names import ServedNames
from midstream.types import ReplicaReport

BODY = (
    b'{"model":"m","prompt":['
    + b",".join(b"%d" % i for i in range(200))
    + b'],"max_tokens":16,"stream":true}'
)
CHUNK = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
FRAMED = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)
SDK_HEADERS = b"".join(
    b"%b: %b\r\n" % pair
    for pair in [
        (b"Host", b"127.0.0.1:8080"),
        (b"Accept-Encoding", b"gzip, deflate"),
        (b"Connection", b"keep-alive"),
        (b"Accept", b"application/json"),
        (b"Content-Type", b"application/json"),
        (b"User-Agent", b"OpenAI/Python 3.52.0"),
        (b"X-Stainless-Lang", b"python"),
        (b"X-Stainless-Package-Version", b"3.52.0"),
        (b"X-Stainless-OS", b"Linux"),
        (b"X-Stainless-Arch", b"x64"),
        (b"X-Stainless-Runtime", b"CPython"),
        (b"Authorization", b"Bearer none"),
        (b"x-stainless-retry-count", b"0"),
        (b"x-multi-turn-session-id", b"trajectory-%06d"),
    ]
)


class Replica(asyncio.Protocol):
    """Answers each request whole or, on /v1/chat/completions, with a stream of `chunks` writes."""

    def __init__(self, chunks: int, interval_s: float) -> None:
        self.chunks, self.interval_s, self.buffer = chunks, interval_s, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found or len(body) < len(BODY):
            return
        self.buffer = b""
        if b"/chat/" in head[:40]:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            asyncio.get_running_loop().call_later(self.interval_s, self.step, self.chunks)
        else:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ndate: now\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
                b"x-request-id: abc\r\ncontent-length: 300\r\n\r\n" + b"x" * 300
            )

    def step(self, left: int) -> None:
        self.transport.write(FRAMED if left else b"0\r\n\r\n")
        if left:
            asyncio.get_running_loop().call_later(self.interval_s, self.step, left - 1)


class Client(asyncio.Protocol):
    """Sends `count` requests one after the other; a response ends when `expected` bytes or the last chunk came."""

    def __init__(self, number: int, count: int, path: bytes, done: Callable[[int], None]) -> None:
        head = (
            b"POST %b HTTP/1.1\r\n" % path + SDK_HEADERS % number + b"Content-Length: %d\r\n\r\n" % len(BODY)
        )
        self.request, self.left, self.done, self.reads = head + BODY, count, done, 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        if data.endswith((b"x" * 300, b"0\r\n\r\n")):
            self.left -= 1
            if self.left:
                self.transport.write(self.request)
            else:
                self.done(self.reads)
                self.transport.close()


def replica_process(pipe: Connection, chunks: int, interval_s: float) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Replica(chunks, interval_s), "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    uvloop.run(main())


def gateway_process(pipe: Connection, replica_port: int, profile: str | None) -> None:
    async def main() -> None:
        replicas = ReplicaSet([("replica-0", f"http://127.0.0.1:{replica_port}")])
        replicas.views[0].report = ReplicaReport(replica="replica-0", boot="b", ready=True)
        replicas.views[0].admitted = True
        names = ServedNames("accounts/local/models/m", "accounts/local/deployments/d")
        never_run = Reconciler(cast(Ledger, None), replicas, names.deployment)
        deployments = Deployments(Deployment(names, replicas, never_run))
        metrics = GatewayMetrics(deployments)
        gateway = Gateway(GatewaySettings(), deployments, metrics, control_app(deployments, metrics))
        pipe.send(await gateway.start("127.0.0.1", 0))
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await gateway.close()

    if profile is None:
        uvloop.run(main())
        return
    import cProfile

    profiler = cProfile.Profile()
    profiler.runcall(uvloop.run, main())
    profiler.dump_stats(profile)


async def load(port: int, clients: int, count: int, path: bytes) -> int:
    """Run the load to its end; how many reads the clients needed."""
    loop = asyncio.get_running_loop()
    finished: asyncio.Queue[int] = asyncio.Queue()
    for number in range(clients):
        await loop.create_connection(
            lambda n=number: Client(n, count, path, finished.put_nowait), "127.0.0.1", port
        )
    return sum([await finished.get() for _ in range(clients)])


def cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=500)
    parser.add_argument("--interval-ms", type=float, default=10.0, help="between two chunks of a stream")
    parser.add_argument("--profile", help="write a cProfile of the gateway here (slows it down)")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/gateway_cpu.json")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    interval_s = args.interval_ms / 1000
    replica = context.Process(target=replica_process, args=(theirs, args.chunks, interval_s), daemon=True)
    replica.start()
    gateway = context.Process(target=gateway_process, args=(theirs, ours.recv(), args.profile), daemon=True)
    gateway.start()
    port = ours.recv()
    assert gateway.pid is not None
    uvloop.run(load(port, 16, 50, b"/v1/completions"))  # warm up

    start = cpu_s(gateway.pid)
    uvloop.run(load(port, 16, args.requests // 16, b"/v1/completions"))
    request_us = (cpu_s(gateway.pid) - start) / (args.requests // 16 * 16) * 1e6

    start = cpu_s(gateway.pid)
    reads = uvloop.run(load(port, args.streams, 1, b"/v1/chat/completions"))
    spent_us = (cpu_s(gateway.pid) - start) * 1e6
    chunks = args.streams * args.chunks
    result = provenance(
        requests=args.requests,
        streams=args.streams,
        chunks_per_stream=args.chunks,
        chunk_interval_ms=args.interval_ms,
    )
    result |= {
        "cpu_us_per_request": round(request_us, 1),
        "cpu_us_per_chunk": round((spent_us - args.streams * request_us) / chunks, 2),
        "client_reads_per_chunk": round(reads / chunks, 3),
    }
    print(json.dumps(result))
    if args.write:
        write_result("gateway_cpu", result)
    ours.send("stop")
    gateway.join(10)
    replica.terminate()


if __name__ == "__main__":
    main()
