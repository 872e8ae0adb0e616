"""A call of the client ends by its deadline, whatever the server does with the connection. One that does not hangs here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from publish_world import World, weights

from midstream.client.deployment_calls import DeploymentCalls
from midstream.client.errors import NotReadyInTime, Unanswered
from midstream.client.publish import SnapshotPublisher
from midstream.client.rollouts import RolloutClient
from midstream.client.server import ServerClient
from midstream.client.session_calls import SessionCalls
from midstream.client.snapshot_calls import SnapshotCalls

pytestmark = pytest.mark.timeout(120)

#: Of one request, in seconds. Longer than the test may take.
REQUEST_S = 3600.0


class Server:
    """Accepts connections, reads one request from each, and goes on by `behave`, which gets the connection."""

    def __init__(self, behave: Callable[[socket.socket, threading.Event], None]) -> None:
        self._behave = behave
        self._ended = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            if self._ended.is_set():
                connection.close()
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.recv(65536)
            try:
                self._behave(connection, self._ended)
            except OSError:
                # The client left.
                return

    def close(self) -> None:
        self._ended.set()
        socket.create_connection(self._listening.getsockname()).close()
        for thread in self._threads:
            thread.join()
        self._listening.close()


def says_nothing(connection: socket.socket, ended: threading.Event) -> None:
    ended.wait()


def says_a_letter_at_a_time(connection: socket.socket, ended: threading.Event) -> None:
    connection.sendall(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
    )
    while not ended.wait(0.01):
        connection.sendall(b" ")


def is_unwell(connection: socket.socket, ended: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 503 Unavailable\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")


@pytest.fixture(params=[says_nothing, says_a_letter_at_a_time, is_unwell])
def server(request: pytest.FixtureRequest) -> Iterator[ServerClient]:
    behind = Server(request.param)
    made = ServerClient(behind.url, request_timeout_s=REQUEST_S)
    yield made
    made.close()
    behind.close()


CALLS: dict[str, Callable[[ServerClient], Any]] = {
    "signal": lambda server: server.snapshots.signal("a", retry_s=0.2),
    "status": lambda server: server.snapshots.status(retry_s=0.2),
    "all": lambda server: server.deployments.all(retry_s=0.2),
    "own_bucket": lambda server: server.deployments.own_bucket(retry_s=0.2),
    "policies": lambda server: server.deployments.policies("accounts/a/deployments/d", retry_s=0.2),
    "ledger": lambda server: server.deployments.ledger("accounts/a/deployments/d", retry_s=0.2),
    "keys": lambda server: list(server.sessions.keys(retry_s=0.2)),
    "trace": lambda server: server.sessions.trace("s", retry_s=0.2),
    "reward": lambda server: server.sessions.reward("s", 1.0, retry_s=0.2),
    "get": lambda server: server.get("/health", retry_s=0.2),
    "metrics": lambda server: server.metrics(retry_s=0.2),
}


def test_the_table_has_every_call_with_a_deadline() -> None:
    classes = (ServerClient, SnapshotCalls, SessionCalls, DeploymentCalls)
    public = {name for one in classes for name in vars(one) if not name.startswith("_")}
    # close and policy send nothing, wait_until_ready and hint have tests of their own, and health has the connection's
    # timeouts alone.
    assert public - {"close", "policy", "wait_until_ready", "hint", "health"} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_by_its_deadline(server: ServerClient, name: str) -> None:
    with pytest.raises(Unanswered, match=r"gave up after 0\.2 s"):
        CALLS[name](server)


def test_waiting_ends_by_its_deadline(server: ServerClient) -> None:
    with pytest.raises(NotReadyInTime, match=r"after 0\.3 s: nothing was heard of the replicas"):
        server.snapshots.wait_until_ready("a", 0.3)


def test_a_publication_asks_no_longer_than_its_deadline(server: ServerClient, tmp_path: Path) -> None:
    world = World(tmp_path)
    url = server.root
    made = SnapshotPublisher(url, world.bucket.as_uri(), request_timeout_s=REQUEST_S, hints=False)
    with made as publisher, pytest.raises(Unanswered):
        publisher.publish("a", weights(0), config_dir=world.config, timeout_s=0.3)


def test_the_questions_of_a_publication_have_one_deadline_together(tmp_path: Path) -> None:
    """The server takes 4 s for each answer: a status, a delta's signal that it refuses, a full snapshot's signal."""
    world, time = World(tmp_path), [0.0]

    def slowly(request: httpx.Request) -> httpx.Response:
        time[0] += 4
        answer = world.handle(request)
        # The signal of the full snapshot finds the server away.
        world.away = len(world.signals) == 2
        return answer

    def sleep(seconds: float) -> None:
        time[0] += seconds

    http = httpx.Client(transport=httpx.MockTransport(slowly))
    with world.publisher(http=http, sleep=sleep, monotonic=lambda: time[0], hints=False) as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        world.refuse_deltas, began = True, time[0]
        with pytest.raises(Unanswered):
            publisher.publish("1", weights(1), config_dir=world.config, timeout_s=10)
    # The last question began within the deadline. This clock cannot cut it.
    assert time[0] - began <= 12


def test_what_is_sampled_may_take_longer_than_the_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of a request for rollouts ends retries alone: a long answer is not cut."""
    monkeypatch.setattr("midstream.client.rollouts.RETRY_S", 0.01)
    begun = threading.Event()
    answer = b'{"choices": []}'

    def slow(connection: socket.socket, ended: threading.Event) -> None:
        begun.set()
        ended.wait(0.1)
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\nconnection: close\r\n\r\n"
        connection.sendall(head.encode() + answer)

    behind = Server(slow)
    with RolloutClient(behind.url) as client:
        assert client.sample([[1]], max_tokens=1) == [[]]
    assert begun.is_set()
    behind.close()
