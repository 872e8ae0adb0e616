"""Orders to replicas by HTTP: how long their answers are waited for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.core.errors import ReplicaUnavailable
from midstream.core.transfer import Alive
from midstream.fleet import push_orders
from midstream.fleet.push_orders import OrderFailed, ReplicaOrders

ORDER = Alive(group="g", boot="b", within_s=600.0)
#: Whether the replica is heard, at each look.
Looks = list[bool]


class Replicas:
    """One replica, which answers when `answer` is set. It is heard as `looks` say, and then answers."""

    def __init__(self, looks: Looks, answer: bytes | Exception = b"done") -> None:
        self.answered = asyncio.Event()
        self.cancelled = False
        self._looks, self._answer = looks, answer

    def named(self, name: str) -> Any:
        return object() if name == "r1" else None

    def heard(self, name: str) -> Any:
        heard = self._looks.pop(0)
        if not self._looks:
            self.answered.set()
        return object() if heard else None

    async def post(self, *_: object) -> bytes:
        try:
            await self.answered.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_orders, "HEARD_LOOK_S", 0.001)
    monkeypatch.setattr(push_orders, "SILENT_S", 0.003)


def sent(replicas: Replicas) -> bytes:
    return asyncio.run(ReplicaOrders(SimpleNamespace(replicas=replicas)).send("r1", ORDER))  # type: ignore[arg-type]


def test_a_replica_that_falls_silent_fails_its_order_before_the_deadline() -> None:
    replicas = Replicas([True, *[False] * 4])
    with pytest.raises(OrderFailed, match=r"r1 has not been heard for 0\.003 s"):
        sent(replicas)
    assert replicas.cancelled


def test_a_replica_that_is_heard_again_is_waited_for() -> None:
    assert sent(Replicas([False, False, True] * 5)) == b"done"


def test_what_a_replica_answers_in_its_silence_counts() -> None:
    assert sent(Replicas([False, False])) == b"done"
    with pytest.raises(OrderFailed, match="r1 broke the connection"):
        sent(Replicas([True], ReplicaUnavailable("r1 broke the connection")))
