"""How many Python functions the gateway's process calls for one request, and for one chunk of a stream.

    python benchmarks/calls.py [--functions]

The number is the same on every machine. A gateway runs here in front of one mock replica, which a thread plays, as another
plays the client. Each read of a stream is sent once the client has the one before it: one event, or BURST of them. Counted are
all Python functions, and of these midstream's own. Prints JSON. --functions: also how often each of midstream's functions was
called per request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import uvloop
from hardware import provenance

import midstream
from midstream.core.config import GatewaySettings
from midstream.core.reports import PolicyReport, ReplicaReport
from midstream.core.served_names import ServedNames
from midstream.fleet.loop import Reconciler
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.http.upstream import MAX_RESPONSE_HEAD_BYTES
from midstream.ledger import Ledger
from midstream.proxy.metrics import GatewayMetrics
from midstream.proxy.server import Gateway

PACKAGE = str(Path(midstream.__file__).parent) + os.sep
NAMES = ServedNames("accounts/local/models/mock", "accounts/local/deployments/default")
#: Events of a stream, each in a read of its own.
EVENTS = 16
#: Events in a read of a burst, and events of the streams whose chunks are counted.
BURST, MANY_EVENTS = 8, 512
#: Requests before those that count: connections, homes of sessions and caches are there then.
WARM = 8
COUNTED = 20
MESSAGES = [{"role": "user", "content": "Name a prime number between ten and twenty."}]
REQUESTS: dict[str, dict[str, Any]] = {
    "turn": {"model": "mock", "messages": MESSAGES, "max_tokens": 16, "prompt_cache_key": "trajectory-1"},
    "turn, session in a header": {"model": "mock", "messages": MESSAGES, "max_tokens": 16},
    "without a session": {"model": "mock", "messages": MESSAGES, "max_tokens": 16},
    "streamed chat": {"model": "mock", "messages": MESSAGES, "max_tokens": 16, "stream": True},
}
#: How many events are in a read.
STREAMS = {"paced": 1, "burst": BURST}
HEADERS = {"turn, session in a header": "x-session-affinity: trajectory-1\r\n"}
_LABELS = "x-midstream-session-seen: 1\r\nserver: mock\r\n"


class Calls:
    """Counts the calls of this thread while `counting`."""

    def __init__(self) -> None:
        self.counting = False
        self.by_code = Counter[CodeType]()

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.counting and event == "call":
            self.by_code[frame.f_code] += 1

    def result(self, requests: int, *, functions: bool) -> dict[str, Any]:
        """Per request."""
        ours = {code: count for code, count in self.by_code.items() if code.co_filename.startswith(PACKAGE)}
        told: dict[str, Any] = {
            "calls": round(self.by_code.total() / requests, 2),
            "of midstream": round(sum(ours.values()) / requests, 2),
        }
        if functions:
            found = Counter[str]()
            for code, count in ours.items():
                found[f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"] += count
            told["functions"] = {name: round(count / requests, 2) for name, count in found.most_common()}
        return told


def read_message(file: Any) -> tuple[bytes, bytes]:
    """The head, and the body where the head says its length. An empty head: the other side has closed."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = file.readline(MAX_RESPONSE_HEAD_BYTES)
        if not line:
            return b"", b""
        head += line
    lengths = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.startswith(b"content-length")]
    return head, file.read(int(lengths[0])) if lengths else b""


class Replica:
    """Answers every request at once; a stream event by event, as the client asks for it."""

    def __init__(self) -> None:
        self.wanted = threading.Semaphore(0)
        # Of each stream, and how many of them are sent together.
        self.events, self.together = EVENTS, 1
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        file = connection.makefile("rb")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            head, body = read_message(file)
            if not head:
                return
            if b'"stream"' in body:
                self._stream(connection, self.events, self.together)
            else:
                answer = b'{"choices":[{"message":{"role":"assistant","content":"13"}}]}'
                length = f"content-length: {len(answer)}\r\n"
                connection.sendall(
                    f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{_LABELS}{length}\r\n".encode()
                    + answer
                )

    def _stream(self, connection: socket.socket, events: int, together: int) -> None:
        head = "content-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-midstream-resumable: 1\r\n"
        before = f"HTTP/1.1 200 OK\r\n{_LABELS}{head}\r\n".encode()
        for first in range(0, events, together):
            made = [
                b': m 0:%d\n\ndata: {"choices":[{"delta":{"content":"1"}}]}\n\n' % number
                for number in range(first, first + together)
            ]
            connection.sendall(before + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in made))
            before = b""
            for _ in made:
                self.wanted.acquire()
        last = b": m end\n\ndata: [DONE]\n\n"
        connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))


class Client:
    """One connection, which asks one request after the other."""

    def __init__(self, port: int, replica: Replica) -> None:
        self._replica = replica
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._file = self._connection.makefile("rb")

    def ask(self, name: str) -> None:
        """Returns when the answer is whole."""
        body = json.dumps(REQUESTS[name]).encode()
        head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        line = "POST /v1/chat/completions HTTP/1.1\r\n"
        self._connection.sendall(f"{line}{head}{HEADERS.get(name, '')}\r\n".encode() + body)
        answer, _ = read_message(self._file)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        if b"chunked" in answer:
            while size := int(self._file.readline(), 16):
                self._file.read(size + 2)
                self._replica.wanted.release()
            self._file.readline()
            # Of the last event, which nothing waits for.
            self._replica.wanted.acquire()


@contextmanager
def profiled(calls: Calls) -> Iterator[None]:
    sys.setprofile(calls.note)
    try:
        yield
    finally:
        sys.setprofile(None)


def gateway_before(port: int) -> Gateway:
    """A gateway with one replica, which is at this port and serves. Call it in the event loop that it runs in."""
    replicas = ReplicaSet(DeploymentReplicas([("replica-0", f"http://127.0.0.1:{port}")]))
    for view in replicas.views:
        view.replica.hear(ReplicaReport(replica=view.name, boot="b", alive=True, policies=(PolicyReport(),)))
        view.admitted = True
    reconciler = Reconciler(cast(Ledger, None), replicas, NAMES.deployment)
    deployments = Deployments(Deployment(NAMES, replicas, reconciler))
    return Gateway(GatewaySettings(), deployments, GatewayMetrics(deployments), None)


async def count(name: str, *, functions: bool, events: int = EVENTS, together: int = 1) -> dict[str, Any]:
    """Per request, with a gateway of its own. events, together: of a stream, and in each read of it."""
    replica, calls = Replica(), Calls()
    replica.events, replica.together = events, together
    gateway = gateway_before(replica.port)
    client = Client(await gateway.start("127.0.0.1", 0), replica)

    def ask(times: int) -> None:
        for _ in range(times):
            client.ask(name)

    with profiled(calls):
        await asyncio.to_thread(ask, WARM)
        calls.counting = True
        await asyncio.to_thread(ask, COUNTED)
        calls.counting = False
    await gateway.close()
    return calls.result(COUNTED, functions=functions)


def run(name: str, *, functions: bool = False, events: int = EVENTS, together: int = 1) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(count(name, functions=functions, events=events, together=together))


def per_chunk(together: int) -> dict[str, float]:
    """Of a long stream, with its part of what the request costs."""
    found = run("streamed chat", events=MANY_EVENTS, together=together)
    return {name: round(calls / MANY_EVENTS, 2) for name, calls in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", action="store_true", help="also each function of midstream")
    options = parser.parse_args()
    found = {
        "per request": {name: run(name, functions=options.functions) for name in REQUESTS},
        "per chunk": {name: per_chunk(together) for name, together in STREAMS.items()},
    }
    print(json.dumps({**provenance(events=EVENTS, many_events=MANY_EVENTS, burst=BURST), **found}, indent=1))


if __name__ == "__main__":
    main()
