"""A request that costs replicas their life is refused, and those that only were beside it are not."""

import asyncio

import pytest
from gateway_harness import Message, Peer, Stage, post, respond_ok, staged

from midstream.proxy.poison import (
    ALL_MAX,
    KEPT_S,
    LARGE_BYTES,
    PER_TENANT_MAX,
    Key,
    ReplicaBoot,
    Suspects,
    key_of,
)

PATH = b"/v1/completions"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lives(*names: str) -> set[ReplicaBoot]:
    return {ReplicaBoot(name, "boot") for name in names}


def known(suspects: Suspects, body: bytes, tenant: str = "a", path: bytes = PATH) -> bool:
    return suspects.find(tenant, path, body) is not None


def refused(suspects: Suspects, body: bytes, tenant: str = "a") -> bool:
    key = suspects.find(tenant, PATH, body)
    return key is not None and suspects.refuses(key)


def key(body: bytes, tenant: str = "a") -> Key:
    return key_of(tenant, PATH, body)


# What is remembered


def test_one_loss_is_nobodys_fault_and_the_second_one_is_if_nothing_else_was_lost_with_both() -> None:
    suspects = Suspects()
    assert not suspects.lost(key(b"x"), lives("r0"), company=False)
    assert (known(suspects, b"x"), refused(suspects, b"x")) == (True, False)
    # The same life of the same replica.
    assert not suspects.lost(key(b"x"), lives("r0"), company=False)
    assert suspects.lost(key(b"x"), lives("r1"), company=False)
    assert refused(suspects, b"x")
    assert refused(suspects, b"x", tenant="b") is False
    assert [known(suspects, body) for body in (b"y", b"xx")] == [False, False]
    assert not known(suspects, b"x", path=b"/v1/chat/completions")
    assert known(suspects, b"x", path=PATH + b"?a=1")


def test_requests_that_are_lost_together_are_refused_at_the_third_loss_only() -> None:
    suspects = Suspects()
    for body in (b"x", b"y"):
        assert not suspects.lost(key(body), lives("r0"), company=False)
    # Y is still on r1.
    assert not suspects.lost(key(b"x"), lives("r1"), company=True)
    # X was.
    assert not suspects.lost(key(b"y"), lives("r1"), company=False)
    # It was answered: it was not the cause.
    suspects.forget(key(b"y"))
    assert suspects.lost(key(b"x"), lives("r2"), company=True)
    assert refused(suspects, b"x")


def test_what_was_refused_is_tried_again_after_a_while_and_what_was_answered_at_once() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    suspects.lost(key(b"x"), lives("r0", "r1"), company=False)
    suspects.lost(key(b"y"), lives("r0"), company=False)
    suspects.forget(key(b"y"))
    assert (refused(suspects, b"x"), known(suspects, b"y")) == (True, False)
    clock.now = KEPT_S + 1
    assert not known(suspects, b"x")
    assert repr(suspects) == "Suspects(0 requests, 0 refused)"


def test_the_memory_is_bounded_per_tenant_and_in_all() -> None:
    suspects = Suspects()
    for number in range(PER_TENANT_MAX + 1):
        suspects.lost(key(b"%d" % number), lives("r0"), company=False)
    suspects.lost(key(b"of b", "b"), lives("r0"), company=False)
    assert [known(suspects, b"0"), known(suspects, b"1")] == [False, True]
    for number in range(ALL_MAX):
        suspects.lost(key(b"z", f"tenant {number}"), lives("r0"), company=False)
    assert not known(suspects, b"of b", "b")
    assert repr(suspects) == f"Suspects({ALL_MAX} requests, 0 refused)"


# Through the gateway


class Held:
    """Mock replicas that hold their requests until the test answers them or lets them die."""

    def __init__(self) -> None:
        self.peers: dict[bytes, Peer] = {}
        self._moved = asyncio.Event()

    async def __call__(self, request: Message, peer: Peer) -> None:
        self.peers[request.body] = peer
        self._moved.set()
        await peer.closed()

    async def until(self, *bodies: bytes) -> None:
        while not all(body in self.peers for body in bodies):
            self._moved.clear()
            await self._moved.wait()

    def die(self) -> None:
        peers, self.peers = self.peers, {}
        for peer in peers.values():
            peer.abort()


def only(stage: Stage, *numbers: int) -> None:
    for number, view in enumerate(stage.views):
        view.admitted = number in numbers
        view.replica.failures = 0


async def test_requests_that_die_together_may_be_sent_again_and_the_one_that_kills_alone_is_found() -> None:
    held = [Held() for _ in range(3)]
    async with staged(*held) as stage:
        only(stage, 0)
        asked = [asyncio.create_task(stage.ask(post(body))) for body in (b"poison", b"innocent")]
        await held[0].until(b"poison", b"innocent")
        only(stage, 1)
        held[0].die()
        await held[1].until(b"poison", b"innocent")
        held[1].die()
        answers = [await task for task in asked]
        assert [(a.status, a.headers["retry-after"]) for a in answers] == [(503, "1")] * 2
        only(stage, 2)
        again = [asyncio.create_task(stage.ask(post(body))) for body in (b"poison", b"innocent")]
        await held[2].until(b"poison", b"innocent")
        held[2].peers.pop(b"innocent").respond(b"fine")
        assert (await again[1]).body == b"fine"
        held[2].die()
        assert (await again[0]).error["code"] == "request_lost_replicas"
        assert (await stage.ask(post(b"poison"))).status == 422


async def test_a_large_request_that_silences_a_replica_is_not_shown_to_another_and_small_ones_are() -> None:
    silent, large = Held(), b"x" * LARGE_BYTES
    async with staged(silent, respond_ok, unreachable_s=0.0) as stage:
        only(stage, 0)
        asked = [asyncio.create_task(stage.ask(post(body))) for body in (large, b"small")]
        await silent.until(large, b"small")
        only(stage, 1)
        stage.views[0].replica.hear(None)
        stage.gateway.proxy.check_replicas(asyncio.get_running_loop().time())
        answers = [await task for task in asked]
        assert [answer.status for answer in answers] == [422, 200]
        assert [request.body for request in stage.mocks[1].requests] == [b"small"]
        assert (await stage.ask(post(large))).status == 422
        assert len(stage.mocks[1].requests) == 1


@pytest.mark.parametrize(("header", "status"), [("x-midstream-lost: 1\r\n", 422), ("", 503)])
async def test_a_replica_whose_engine_was_lost_with_the_request_says_so(header: str, status: int) -> None:
    async def lost(request: Message, peer: Peer) -> None:
        peer.respond(b'{"error": {}}', "503 Service Unavailable", header)

    async with staged(lost, lost, lost) as stage:
        answer = await stage.ask(post(b"poison"))
        assert answer.status == status
        assert not any(name.startswith("x-midstream-lost") for name in answer.headers)
        assert sum(len(mock.requests) for mock in stage.mocks) == 2
        assert (await stage.ask(post(b"poison"))).status == status


async def test_a_request_that_is_answered_elsewhere_is_no_suspect_any_more() -> None:
    async def die(request: Message, peer: Peer) -> None:
        peer.abort()

    async with staged(die, respond_ok) as stage:
        only(stage, 0, 1)
        for _ in range(4):
            assert (await stage.ask(post(b"innocent"))).status == 200
        assert repr(stage.gateway.proxy.suspects) == "Suspects(0 requests, 0 refused)"


@pytest.mark.parametrize("sizes", [(1, 2, 3), (3, 2, 1), (2, 2, 2)])
async def test_of_several_large_requests_on_a_replica_that_fell_silent_the_largest_alone_is_refused(
    sizes: tuple[int, ...],
) -> None:
    silent = Held()
    bodies = [bytes([65 + n]) * (LARGE_BYTES + size) for n, size in enumerate(sizes)]
    async with staged(silent, respond_ok, unreachable_s=0.0) as stage:
        only(stage, 0)
        asked = [asyncio.create_task(stage.ask(post(body))) for body in bodies]
        await silent.until(*bodies)
        only(stage, 1)
        stage.views[0].replica.hear(None)
        stage.gateway.proxy.check_replicas(asyncio.get_running_loop().time())
        largest = max(sizes) if sizes.count(max(sizes)) == 1 else None
        wanted = [422 if size == largest else 200 for size in sizes]
        assert [(await task).status for task in asked] == wanted


async def test_of_requests_that_were_each_lost_before_none_is_refused_for_being_told_last() -> None:
    held = [Held() for _ in range(3)]
    async with staged(*held) as stage:
        asked = []
        for number, body in enumerate((b"one", b"two")):
            only(stage, number)
            asked.append(asyncio.create_task(stage.ask(post(body))))
            await held[number].until(body)
        only(stage, 2)
        held[0].die()
        held[1].die()
        await held[2].until(b"one", b"two")
        held[2].die()
        assert [(await task).status for task in asked] == [503, 503]
