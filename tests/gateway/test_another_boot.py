"""A replica that began anew says so, and its gateway places the request anew: on the next boot, or on another replica."""

from collections.abc import Callable

from gateway_harness import Handler, Message, Peer, Stage, post, respond_ok, staged
from reports import replica_report
from test_resume import SESSION, WHOLE, WRITES, answer, go_on, losing, resumes

from midstream.core.errors import AnotherBoot
from midstream.proxy.request_facts import PLACED_AGAIN_MAX


def refuse(peer: Peer) -> None:
    error = AnotherBoot("began anew")
    headers = "".join(f"{name}: {value}\r\n" for name, value in error.headers().items())
    peer.respond(b'{"error":{"message":"began anew"}}', "503 Service Unavailable", headers)


async def refuse_all(request: Message, peer: Peer) -> None:
    refuse(peer)


def of_boot(boot: Callable[[], str], then: Handler = respond_ok) -> Handler:
    """A replica that serves what is meant for its boot."""

    async def handler(request: Message, peer: Peer) -> None:
        if request.headers["x-midstream-boot"] == boot():
            await then(request, peer)
        else:
            refuse(peer)

    return handler


def report(stage: Stage, index: int, boot: str) -> None:
    view = stage.views[index]
    view.replica.hear(replica_report(replica=view.name, boot=boot, ready=True))
    view.admitted = True


async def test_a_session_whose_boot_is_gone_is_served_by_another_replica() -> None:
    async with staged(respond_ok, respond_ok) as stage:
        assert (await stage.ask(post(headers=SESSION))).status == 200
        home = next(index for index, mock in enumerate(stage.mocks) if mock.requests)
        stage.mocks[home].handler = refuse_all
        moved = await stage.ask(post(headers=SESSION))
        assert (moved.status, moved.headers["x-midstream-replica"]) == (200, f"replica-{1 - home}")
        assert not any("boot" in name for name in moved.headers)
        assert stage.views[home].report is None, "its report was of the boot that is gone"
        assert stage.views[home].replica.failures == 0


async def test_a_later_boot_that_is_known_by_then_is_asked_itself() -> None:
    async with staged(respond_ok) as stage:

        async def begins_anew(request: Message, peer: Peer) -> None:
            report(stage, 0, "b2")
            await of_boot(lambda: "b2")(request, peer)

        stage.mocks[0].handler = begins_anew
        for headers in ("", SESSION):
            report(stage, 0, "b1")
            assert (await stage.ask(post(headers=headers))).status == 200
        asked = [request.headers["x-midstream-boot"] for request in stage.mocks[0].requests]
        assert asked == ["b1", "b2"] * 2
        assert stage.metrics.retries["other_boot"] == 2


async def test_replicas_that_began_anew_are_not_lost_with_the_request() -> None:
    async with staged(refuse_all, refuse_all, refuse_all) as stage:
        assert (await stage.ask(post())).status == 503
        assert [len(mock.requests) for mock in stage.mocks] == [1, 1, 1]
        assert repr(stage.gateway.proxy.suspects) == "Suspects(0 requests, 0 refused)"


async def test_a_stream_goes_on_at_a_later_boot() -> None:
    async def loses(request: Message, peer: Peer) -> None:
        stage.views[1].admitted = True
        await losing(WRITES[0] + WRITES[1])(request, peer)

    async def goes_on(request: Message, peer: Peer) -> None:
        go_on(request, peer)

    async def began_anew(request: Message, peer: Peer) -> None:
        report(stage, 1, "b2")
        await of_boot(lambda: "b2", goes_on)(request, peer)

    async with staged(loses, began_anew) as stage:
        stage.views[1].admitted = False
        assert await answer(stage, SESSION) == WHOLE
        assert len(resumes(stage)) == 2


async def test_a_replica_that_begins_anew_again_and_again_is_not_asked_for_ever() -> None:
    async def begins_anew(request: Message, peer: Peer) -> None:
        report(stage, 0, f"b{len(stage.mocks[0].requests)}")
        refuse(peer)

    async with staged(begins_anew) as stage:
        answer = await stage.ask(post())
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert len(stage.mocks[0].requests) == PLACED_AGAIN_MAX + 1
