"""A server that answers the calls of a push, with real receivers in processes of their own, and what they received."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from midstream.client import SnapshotPublisher

PEER = Path(__file__).with_name("trainer_push_peer.py")


class Lost(Exception):
    """A receiver has ended, or could not do what it was asked for."""


class Peer:
    """A receiver. An order waits for the answer to the one before, which a test may have given up."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(PEER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, **order: Any) -> None:
        """Raises Lost."""
        with self._asking:
            if self._errors.closed:
                raise Lost("it was ended")
            assert self.process.stdin is not None
            try:
                self.process.stdin.write(json.dumps(order) + "\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                raise self._ended() from None
            self.answer()

    def answer(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._ended()
        if problem := json.loads(line).get("error"):
            raise Lost(problem)

    def end(self) -> None:
        """Nothing to do if it was ended."""
        if not self._errors.closed:
            self.process.kill()
            self.process.communicate()
            self._errors.close()

    def _ended(self) -> Lost:
        """With the last that it said."""
        if self._errors.closed:
            return Lost("it was ended")
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        return Lost(f"it has ended ({self.process.wait()}): {said[-500:]}")


class Peers:
    """Receivers that are kept from one test to the next, as each takes seconds to start."""

    def __init__(self) -> None:
        self._idle: list[Peer] = []

    def take(self, count: int) -> list[Peer]:
        for peer in [peer for peer in self._idle if peer.process.poll() is not None]:
            self._idle.remove(peer)
            peer.end()
        missing = [Peer() for _ in range(count - len(self._idle))]
        for peer in missing:
            peer.answer()
        self._idle += missing
        taken, self._idle = self._idle[:count], self._idle[count:]
        return taken

    def give_back(self, peers: list[Peer]) -> None:
        """Those that end their group. Gloo may abort a process that does so behind a lost trainer: not in a later test."""
        for peer in peers:
            try:
                peer.ask(order="leave")
            except Lost:
                peer.end()
            else:
                self._idle.append(peer)

    def close(self) -> None:
        for peer in self._idle:
            peer.end()


class PushWorld:
    """A server whose replicas are `peers`. Each update that was finished is in `served`: its name and its bytes by receiver."""

    def __init__(self, directory: Path, peers: list[Peer]) -> None:
        self.directory = directory
        self.peers = peers
        self.calls: list[str] = []
        self.bodies: list[Any] = []
        self.rendezvous: dict[str, Any] = {}
        self.sent: dict[str, Any] = {}
        self.received: list[bytes] = []
        self.served: list[tuple[str, list[bytes]]] = []
        self.serving = "base"
        self.failed: str | None = None
        #: Called with the name of a call before it is worked on. Its answer, if any, is the call's.
        self.before: Callable[[str], httpx.Response | None] = lambda _: None
        self._lock = threading.Lock()

    def publisher(self, **kwargs: Any) -> SnapshotPublisher:
        http = httpx.Client(transport=httpx.MockTransport(self.handle))
        return SnapshotPublisher(
            "http://server", **({"to": "push", "http": http, "sleep": lambda _: None} | kwargs)
        )

    def handle(self, request: httpx.Request) -> httpx.Response:
        name = request.url.raw_path.decode().removeprefix("/")
        if name == "hot_load/v1/models/hot_load":
            return httpx.Response(200, json=self.status())
        body = json.loads(request.content) if request.content else None
        with self._lock:
            self.calls.append(name)
            self.bodies.append(body)
        answer = self.before(name)
        return answer if answer is not None else self.work(name, body)

    def work(self, name: str, body: Any) -> httpx.Response:
        match name.partition("?")[0]:
            case "get_world_size":
                return httpx.Response(200, json={"world_size": len(self.peers)})
            case "init_weight_transfer_engine":
                self.rendezvous = body["init_info"]
                return self.each(
                    lambda rank, peer: peer.ask(
                        order="join", rendezvous=self.rendezvous, rank=self.rendezvous["rank_offset"] + rank
                    )
                )
            case "start_weight_update":
                self.received = []
            case "update_weights":
                self.sent = body["update_info"]
                return self.receive(body["update_info"])
            case "finish_weight_update":
                self.serving = (body or {}).get("weight_version") or "update-000001-push"
                self.served.append((self.serving, self.received))
            case "shutdown_weight_transfer_engine":
                return self.each(lambda _, peer: peer.ask(order="leave"))
            case _:
                return refused(404, f"there is no {name}")
        return httpx.Response(200, json={"message": "done"})

    def receive(self, sent: dict[str, Any]) -> httpx.Response:
        files = [self.directory / f"{len(self.calls)}-{rank}" for rank in range(len(self.peers))]
        answer = self.each(lambda rank, peer: peer.ask(order="receive", sent=sent, file=str(files[rank])))
        if answer.status_code == 200:
            self.received = [file.read_bytes() for file in files]
        return answer

    def each(self, ask: Callable[[int, Peer], None]) -> httpx.Response:
        with ThreadPoolExecutor(len(self.peers)) as pool:
            done = [pool.submit(ask, rank, peer) for rank, peer in enumerate(self.peers)]
        for rank, one in enumerate(done):
            if (error := one.exception()) is not None:
                return refused(503, f"replica-{rank} was lost: {error}")
        return httpx.Response(200, json={"message": "done"})

    def status(self) -> dict[str, Any]:
        stage = "done" if self.failed is None else "error"
        return {
            "replicas": [
                {
                    "current_snapshot_identity": self.serving,
                    "readiness": True,
                    "loading_state": {
                        "stage": stage,
                        "target_snapshot_identity": self.failed or self.serving,
                    },
                    "midstream": {"replica": f"r{rank}", "error": self.failed and "it has NaN"},
                }
                for rank in range(len(self.peers))
            ]
        }


def refused(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}})


def tensors_of(sent: dict[str, Any], data: bytes) -> dict[str, torch.Tensor]:
    """What a receiver makes of the bytes of an update."""
    found, at = {}, 0
    for name, dtype, shape in zip(sent["names"], sent["dtype_names"], sent["shapes"], strict=True):
        kind = getattr(torch, dtype)
        size = math.prod(shape) * torch.empty(0, dtype=kind).element_size()
        piece = (
            torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8) if size else torch.empty(0)
        )
        found[name] = piece.view(kind).view(shape) if size else torch.empty(shape, dtype=kind)
        at += size
    assert at == len(data)
    return found


@contextmanager
def push_world(peers: Peers, count: int) -> Iterator[PushWorld]:
    """A server with `count` receivers."""
    taken = peers.take(count)
    with tempfile.TemporaryDirectory() as directory:
        world = PushWorld(Path(directory), taken)
        yield world
    peers.give_back(taken)
