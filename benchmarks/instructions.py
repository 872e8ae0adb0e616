"""How many instructions the gateway's process runs for one request, and for one chunk of a stream.

    python benchmarks/instructions.py [--before DIR] [--keep DIR]

The number is nearly the same in every run, also on a busy machine. A gateway runs here under valgrind's callgrind, which has to
be installed, in front of one mock replica. That sends the answers of the gateway's benchmark over sockets, and a client the
requests of it, of SESSIONS sessions. Instructions of the kernel are not counted. Prints JSON. --before: another checkout,
measured after this one. --keep: where callgrind's profiles stay, for callgrind_annotate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop
from calls import gateway_before, read_message
from gateway import loads
from hardware import provenance, source_of

#: Of the client. Both take turns.
CONNECTIONS, SESSIONS = 16, 1024
#: Requests before those that count.
WARM = 1100
COUNTED = 500
#: Events of a stream, in a read of their own or so many in one.
CHUNKS, BURST = 800, 8
PACED = "paced chunk"
KINDS = {"1 KB": "1k", "64 KB": "64k", "16k ids": "ids", PACED: "stream", "burst chunk": "stream"}
_ANSWER_HEAD = "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 20:00:00 GMT\r\nserver: uvicorn\r\n"
_REQUEST_ID = "x-request-id: 0123456789abcdef\r\n"
_ANSWER = (
    _ANSWER_HEAD + f"content-type: application/json\r\n{_REQUEST_ID}content-length: 1024\r\n\r\n" + "w" * 1024
).encode()
_STREAM = (
    _ANSWER_HEAD + "content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    f"{_REQUEST_ID}transfer-encoding: chunked\r\nx-midstream-resumable: 1\r\n\r\n"
).encode()
_EVENT = b': m 0:%d\n\ndata: {"id":"chatcmpl-0","object":"chat.completion.chunk","choices":[{"delta":{"content":"word"}}]}\n\n'
_LAST = b": m end\n\ndata: [DONE]\n\n"


class Replica:
    """Answers at once. A stream goes on when the client has what was sent of it."""

    def __init__(self) -> None:
        self.together, self.chunks = 1, 0
        self.wanted = threading.Semaphore(0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        file = connection.makefile("rb")
        while (message := read_message(file))[0]:
            if b'"stream":true' in message[1]:
                self._stream(connection)
            else:
                connection.sendall(_ANSWER)

    def _stream(self, connection: socket.socket) -> None:
        begun = _STREAM
        for first in range(0, self.chunks, self.together):
            events = [_EVENT % number for number in range(first, first + self.together)]
            connection.sendall(begun + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events))
            begun = b""
            self.wanted.acquire()
        connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(_LAST), _LAST))


class Client:
    """CONNECTIONS connections, which take turns."""

    def __init__(self, port: int, replica: Replica) -> None:
        self._replica = replica
        self._connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        for connection in self._connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._files = [connection.makefile("rb") for connection in self._connections]
        self._asked = 0

    def ask(self, request: bytes) -> None:
        """Returns when the answer is whole."""
        self._asked += 1
        at = self._asked % CONNECTIONS
        file = self._files[at]
        self._connections[at].sendall(request.replace(b"KKKKKKKK", b"%08d" % (self._asked % SESSIONS)))
        head, _ = read_message(file)
        assert head.startswith(b"HTTP/1.1 200"), head
        if b"chunked" not in head:
            return
        read = 0
        while size := int(file.readline(), 16):
            file.read(size + 2)
            read += 1
            # Nothing waits for the last one.
            if read <= self._replica.chunks and read % self._replica.together == 0:
                self._replica.wanted.release()
        file.readline()


class CountedGateway:
    """A gateway in a process of its own under callgrind."""

    def __init__(self, checkout: Path | None, replica_port: int, folder: Path) -> None:
        self._out = folder / "callgrind.out"
        options = ["--dump-before=getsid", "--dump-before=getpgid", f"--callgrind-out-file={self._out}"]
        self._dumps = 0
        self._process = subprocess.Popen(
            [
                "valgrind",
                "--tool=callgrind",
                "-q",
                *options,
                sys.executable,
                __file__,
                "--gateway",
                str(replica_port),
            ],
            env={**os.environ, "PYTHONHASHSEED": "0", **({} if checkout is None else source_of(checkout))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._reply())

    def _reply(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        self._reply()

    @contextmanager
    def counts(self, found: list[Path]) -> Iterator[None]:
        """Adds the profile of what ran meanwhile."""
        self._tell("zero")
        yield
        self._tell("dump")
        # Each of the two writes one.
        self._dumps += 2
        found.append(self._out.with_name(f"{self._out.name}.{self._dumps}"))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def instructions_in(profile: Path) -> int:
    found = re.search(r"^(?:summary|totals): (\d+)", profile.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def count(checkout: Path | None, kinds: Sequence[str], keep: Path | None = None) -> dict[str, Any]:
    """Instructions of each kind, of a gateway of this checkout; None: of this one."""
    result: dict[str, Any] = {}
    replica = Replica()
    requests = {
        name: loads.HEAD.format(path=path, length=len(body)).encode() + body
        for name, (path, body) in loads.bodies().items()
    }
    with tempfile.TemporaryDirectory() as made:
        folder = keep or Path(made)
        gateway = CountedGateway(checkout, replica.port, folder)
        client = Client(gateway.port, replica)
        for _ in range(WARM):
            client.ask(requests["1k"])
        profiles: list[Path] = []
        for kind in kinds:
            request = requests[KINDS[kind]]
            streams = KINDS[kind] == "stream"
            replica.together, replica.chunks = (1 if kind == PACED else BURST), 64
            times = 1 if streams else COUNTED if kind == "1 KB" else COUNTED // 5
            for _ in range(3):
                client.ask(request)
            replica.chunks = CHUNKS
            with gateway.counts(profiles):
                for _ in range(times):
                    client.ask(request)
            per = CHUNKS if streams else times
            result[kind] = round(instructions_in(profiles[-1]) / per)
        gateway.close()
    return result


async def serve(replica_port: int) -> None:
    """The gateway, until standard input ends. Its commands: `zero` and `dump` call what callgrind looks for."""
    gateway = gateway_before(replica_port)
    print(await gateway.start("127.0.0.1", 0), flush=True)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def commanded() -> None:
        command = os.read(0, 100).decode().strip()
        if not command:
            loop.remove_reader(0)
            ended.set()
            return
        if command == "zero":
            os.getsid(0)
        else:
            os.getpgid(0)
        print(command, flush=True)

    loop.add_reader(0, commanded)
    await ended.wait()
    await gateway.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", metavar="DIR", type=Path, help="a checkout of another commit")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="these alone")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep callgrind's profiles there")
    parser.add_argument("--gateway", metavar="PORT", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gateway is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(options.gateway))
        return
    found = {"now": count(None, options.kinds, options.keep)}
    if options.before is not None:
        found["before"] = count(options.before.resolve(), options.kinds)
    print(json.dumps({**provenance(sessions=SESSIONS, chunks=CHUNKS, burst=BURST), **found}, indent=1))


if __name__ == "__main__":
    main()
