"""The data path with several deployments, and with replicas that come and go."""

import asyncio
import json

import pytest
from gateway_harness import Message, MockReplica, Peer, Stage, get, post, reconciler, respond_ok, staged
from reports import replica_report

from midstream.core.served_names import ServedNames
from midstream.fleet.registry import Deployment
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.fleet.view import ReplicaView

A = "accounts/local"


def answering(name: str):  # type: ignore[no-untyped-def]
    async def handler(request: Message, peer: Peer) -> None:
        peer.respond(name.encode())

    return handler


def usable(view: ReplicaView, **report: int) -> None:
    view.replica.hear(replica_report(replica=view.name, boot="b1", ready=True, **report))
    view.admitted = True


async def add(stage: Stage, name: str, model: str) -> MockReplica:
    """One more deployment with one replica, which answers with the deployment's name."""
    mock = MockReplica(answering(name))
    await mock.start()
    replicas = ReplicaSet(DeploymentReplicas([(f"{name}-replica-0", f"http://127.0.0.1:{mock.port}")]))
    usable(replicas.views[0])
    names = ServedNames(f"{A}/models/{model}", f"{A}/deployments/{name}")
    stage.gateway.proxy.deployments.add(Deployment(names, replicas, reconciler(replicas)))
    return mock


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


# The replica says that it has another model.
CASES = [
    (b'{"model":"other"}', "", "b"),
    (b'{"x":{"model":"tiny-moe"},"model":"accounts/local/models/other@s1"}', "", "b"),
    (b'{"mod\\u0065l":"accounts/local/deployments/b"}', "", "b"),
    (b'{"messages":[{"content":"\\"model\\": \\"other\\""}],"model":"tiny-moe"}', "", "default"),
    (b'{"messages":[{"model":"other"}]}', "", "default"),
    # A parser takes the last one.
    (b'{"model":"other","model":"tiny-moe"}', "", "default"),
    # The replica says what is wrong with it.
    (b"not json", "", "default"),
    (b'{"model":7}', "", "default"),
    (
        b'{"model":"tiny-moe"}',
        "fireworks-deployment: b\r\n",
        "b",
    ),
    (b'{"model":"nobody"}', "fireworks-model: other\r\n", "b"),
]


@pytest.mark.parametrize(("sent", "headers", "to"), CASES)
async def test_a_request_reaches_the_deployment_it_names_with_its_own_bytes(
    sent: bytes, headers: str, to: str
) -> None:
    async with staged(answering("default")) as stage:
        mock = await add(stage, "b", "other")
        answer = await stage.ask(post(sent, headers=headers))
        assert (answer.status, answer.body.decode()) == (200, to)
        got = mock if to == "b" else stage.mocks[0]
        assert [request.body for request in got.requests] == [sent]
        mock.stop()


async def test_a_name_nobody_has_is_not_found_and_a_shared_one_must_be_made_clear() -> None:
    async with staged(respond_ok) as stage:
        mocks = [await add(stage, "b", "other"), await add(stage, "c", "other")]
        answer = await stage.ask(post(body(model="nobody")))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (
            404,
            "not_found_error",
            "model",
        )
        answer = await stage.ask(post(body(model="other")))
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert f"name one of {A}/deployments/b, {A}/deployments/c" in answer.error["message"]
        assert all(mock.requests == [] for mock in (*stage.mocks, *mocks))
        for mock in mocks:
            mock.stop()


async def test_with_one_deployment_the_body_says_nothing_to_the_gateway() -> None:
    async with staged(answering("default")) as stage:
        assert (await stage.ask(post(body(model="nobody")))).body == b"default"


async def test_sessions_of_two_deployments_are_strangers() -> None:
    async with staged(answering("default")) as stage:
        mock = await add(stage, "b", "other")
        reasons = []
        for model in ("tiny-moe", "other", "tiny-moe", "other"):
            answer = await stage.ask(post(body(model=model), headers="X-Session-ID: s\r\n"))
            reasons.append((answer.body.decode(), answer.headers["x-midstream-route-reason"]))
        assert reasons == [("default", "new"), ("b", "new"), ("default", "sticky"), ("b", "sticky")]
        mock.stop()


async def test_a_replica_that_takes_nothing_new_gets_only_the_sessions_it_has() -> None:
    async with staged(respond_ok, respond_ok) as stage:
        first = await stage.ask(post(headers="X-Session-ID: s\r\n"))
        closed = first.headers["x-midstream-replica"]
        usable(stage.views[int(closed[-1])], admitting=False)
        for n in range(4):
            fresh = await stage.ask(post(headers=f"X-Session-ID: new-{n}\r\n"))
            bare = await stage.ask(post())
            assert fresh.headers["x-midstream-replica"] != closed
            assert bare.headers["x-midstream-replica"] != closed
        again = await stage.ask(post(headers="X-Session-ID: s\r\n"))
        assert again.headers["x-midstream-replica"] == closed
        for view in stage.views:
            usable(view, admitting=False)
        assert (await stage.ask(post())).status == 200, "when none takes any, the replica answers 425 itself"


async def test_a_session_that_a_swap_kept_out_begins_where_the_door_is_open() -> None:
    async def closed(request: Message, peer: Peer) -> None:
        peer.respond(b"{}", "425 Too Early", "retry-after: 1\r\n")

    async with staged(closed, closed) as stage:
        first = await stage.ask(post(headers="X-Session-ID: s\r\n"))
        assert (first.status, first.headers["retry-after"]) == (425, "1")
        home = int(first.headers["x-midstream-replica"][-1])
        # Its report comes after the refusal.
        usable(stage.views[home], admitting=False)
        stage.mocks[1 - home].handler = respond_ok
        for reason in ("new", "sticky"):
            again = await stage.ask(post(headers="X-Session-ID: s\r\n"))
            assert (again.status, again.headers["x-midstream-route-reason"]) == (200, reason)
            assert again.headers["x-midstream-replica"] == f"replica-{1 - home}"
        stage.mocks[1 - home].handler = closed
        refused = await stage.ask(post(headers="X-Session-ID: s\r\n"))
        usable(stage.views[home])
        usable(stage.views[1 - home], admitting=False)
        stays = await stage.ask(post(headers="X-Session-ID: s\r\n"))
        assert refused.headers["x-midstream-replica"] == stays.headers["x-midstream-replica"]
        assert stays.headers["x-midstream-replica"] == f"replica-{1 - home}", "its cache is there"


async def test_a_deployment_without_replicas_is_unavailable_for_now() -> None:
    async with staged(respond_ok) as stage:
        replicas = ReplicaSet(DeploymentReplicas())
        names = ServedNames(f"{A}/models/other", f"{A}/deployments/b")
        stage.gateway.proxy.deployments.add(Deployment(names, replicas, reconciler(replicas)))
        answer = await stage.ask(post(body(model="other")))
        assert (answer.status, answer.error["code"]) == (503, "replica_unavailable")
        assert answer.headers["retry-after"] == "1"


async def test_a_replica_that_leaves_finishes_its_streams_and_only_its_sessions_move() -> None:
    go_on = asyncio.Event()

    async def stream(request: Message, peer: Peer) -> None:
        if "slow" not in request.headers:
            peer.respond(b"{}")
            return
        peer.start_stream()
        peer.chunk(b"data: 1\n\n")
        await go_on.wait()
        peer.chunk(b"data: [DONE]\n\n")
        peer.end_stream()

    async with staged(stream, stream) as stage:
        replicas = stage.gateway.proxy.deployments.default.replicas
        homes = {}
        for n in range(8):
            answer = await stage.ask(post(headers=f"X-Session-ID: {n}\r\n"))
            homes[n] = answer.headers["x-midstream-replica"]
        assert set(homes.values()) == {"replica-0", "replica-1"}
        on_leaver = next(n for n, home in homes.items() if home == "replica-1")
        client = await stage.connect()
        client.send(post(headers=f"X-Session-ID: {on_leaver}\r\nslow: 1\r\n"))
        assert b"200 OK" in await client.reader.readuntil(b"data: 1\n\n\r\n")
        members = [(view.name, view.url) for view in stage.views]
        leaver = stage.views[1]
        replicas.facts.set_members(members, {"replica-1"})
        assert ([v.name for v in replicas.views], replicas.leaving) == (["replica-0"], (leaver,))
        for n, home in homes.items():
            answer = await stage.ask(post(headers=f"X-Session-ID: {n}\r\n"))
            assert answer.headers["x-midstream-replica"] == "replica-0"
            reason = "sticky" if home == "replica-0" else "moved"
            assert answer.headers["x-midstream-route-reason"] == reason
        go_on.set()
        assert b"[DONE]" in await client.reader.readuntil(b"0\r\n\r\n")
        assert leaver.replica.in_flight == 0
        replicas.facts.set_members(members[:1])
        stage.gateway.proxy.check_replicas(0.0)
        assert leaver.replica not in stage.gateway.proxy.upstreams, "nothing of it is kept"


async def test_a_replica_that_joins_is_used_and_one_at_another_address_is_another() -> None:
    async with staged(answering("one")) as stage:
        replicas = stage.gateway.proxy.deployments.default.replicas
        first = stage.views[0]
        mock = MockReplica(answering("two"))
        await mock.start()
        replicas.facts.set_members([(first.name, first.url), ("replica-1", f"http://127.0.0.1:{mock.port}/")])
        assert (await stage.ask(post())).body == b"one", "nothing is known of the new one yet"
        usable(replicas.views[1])
        assert {(await stage.ask(post())).body for _ in range(4)} == {b"one", b"two"}
        replicas.facts.set_members([(first.name, f"http://127.0.0.1:{mock.port}")])
        assert replicas.views[0] is not first
        assert (first.replica.standing, replicas.views[0].usable) == ("gone", False)
        assert (await stage.ask(post())).status == 503
        mock.stop()


async def test_each_model_says_how_long_its_context_is_where_trainers_look_for_it() -> None:
    async with staged(answering("default"), answering("default")) as stage:
        mock = await add(stage, "b", "other")

        async def told() -> dict[str, int | None]:
            listed = json.loads((await stage.ask(get("/v1/models"))).body)["data"]
            for model in listed:
                assert json.loads((await stage.ask(get(f"/v1/models/{model['id']}"))).body) == model
            return {model["id"]: model.get("max_model_len") for model in listed}

        first, other = f"{A}/models/tiny-moe", f"{A}/models/other"
        assert await told() == {first: None, other: None}, "no engine is known"
        usable(stage.views[0], max_model_len=4096)
        assert await told() == {first: 4096, other: None}
        usable(
            stage.gateway.proxy.deployments.find("other", param="model").replicas.views[0],
            max_model_len=8,
        )
        usable(stage.views[1], max_model_len=1024)
        assert await told() == {first: 1024, other: 8}, "what every replica of it takes"
        stage.views[1].replica.hear(None)
        assert await told() == {first: 4096, other: 8}
        mock.stop()
