"""Requests that ask for certain snapshots: which replica takes them, how they wait, what they are answered in vain."""

import asyncio
import gc
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from gateway_harness import NAMES, Message, Peer, Stage, post, run, staged
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reports import changed, replica_report
from session_holders import until

from midstream.core.errors import InvalidRequest, UnknownField
from midstream.core.types import BASE_SNAPSHOT
from midstream.core.types import Stage as SwapStage
from midstream.core.versions import (
    HEADER_ADMITTED,
    HEADER_REFUSED,
    NOTHING,
    Admitted,
    Refusal,
    VersionConstraint,
    as_header,
    as_version,
    constraint_of_body,
    constraint_of_headers,
    constraint_of_version,
    from_header,
)
from midstream.fleet.known_replica import OWN, KnownReplica
from midstream.fleet.signal_order import KEPT, SignalOrder
from midstream.fleet.view import ReplicaView
from midstream.ledger import Signalled
from midstream.proxy import versions
from midstream.proxy.request import ProxiedRequest
from midstream.proxy.versions import VersionJudge, VersionVerdict


def order_of(*snapshots: str, ready: Iterable[str] = ()) -> SignalOrder:
    """Signalled one after another, under the generations 1, 2, ..."""
    order = SignalOrder()
    order.learn(Signalled(name, number, name in ready) for number, name in enumerate(snapshots, 1))
    return order


def view(snapshot: str, *, index: int = 0, usable: bool = True, **report: Any) -> ReplicaView:
    name = f"replica-{index}"
    replica = KnownReplica(name, f"http://127.0.0.1:{index + 1}")
    replica.hear(replica_report(replica=name, boot="b", ready=True, snapshot=snapshot, **report))
    made = ReplicaView(replica, OWN)
    made.admitted = usable
    return made


def who(
    constraint: VersionConstraint,
    order: SignalOrder,
    *serving: str,
    home: int | None = None,
    now: float = 0.0,
) -> list[str] | VersionVerdict:
    """The snapshots of the replicas that may take the request, or what else is to be done with it."""
    views = [view(snapshot, index=index) for index, snapshot in enumerate(serving)]
    admission = VersionJudge(constraint, order, 0.0)
    verdict = admission.judge(views, (), None if home is None else views[home], now)
    if verdict.action != "send":
        return verdict
    return [snapshot for snapshot, one in zip(serving, views, strict=True) if admission.fits(one)]


ORDER = order_of("v1", "v2", "v3", "v4", ready=["v1", "v2", "v3"])


# Signalled by nobody, and it serves.
# It serves somewhere: newer than what was ready.
@pytest.mark.parametrize(
    ("constraint", "serving", "taken_by"),
    [
        (VersionConstraint(snapshot="v2"), "base v1 v2 v3", "v2"),
        (VersionConstraint(snapshot="base"), "base v1", "base"),
        (
            VersionConstraint(snapshot="elsewhere"),
            "v1 elsewhere",
            "elsewhere",
        ),
        (VersionConstraint(min_snapshot="v2"), "base v1 v2 v3 elsewhere", "v2 v3"),
        (VersionConstraint(min_snapshot="base"), "base v1 elsewhere", "base v1"),
        (VersionConstraint(min_snapshot="elsewhere"), "v1 elsewhere", "elsewhere"),
        (VersionConstraint(max_staleness=0), "base v1 v2 v3", "v3"),
        (
            VersionConstraint(max_staleness=0),
            "v2 v3 v4",
            "v4",
        ),
        (VersionConstraint(max_staleness=1), "base v1 v2 v3 elsewhere", "v2 v3"),
        (VersionConstraint(max_staleness=3), "base v1 v2 v3", "base v1 v2 v3"),
        (VersionConstraint(min_snapshot="v2", max_staleness=1), "v1 v2 v3", "v2 v3"),
        (VersionConstraint(min_snapshot="v3", max_staleness=2), "v1 v2 v3", "v3"),
        (VersionConstraint(snapshot="v2", max_staleness=1), "v1 v2 v3", "v2"),
        (VersionConstraint(snapshot="v2", min_snapshot="v1"), "v1 v2 v3", "v2"),
    ],
)
def test_a_replica_may_take_a_request_when_all_it_asks_for_holds(
    constraint: VersionConstraint, serving: str, taken_by: str
) -> None:
    assert who(constraint, ORDER, *serving.split()) == taken_by.split()


# v3 was ready on a replica that is gone.
# But it may be waited for.
@pytest.mark.parametrize(
    ("constraint", "serving", "verdict"),
    [
        # What is desired will come.
        (VersionConstraint(min_snapshot="v4"), "v3", VersionVerdict("wait", 10.0)),
        (VersionConstraint(snapshot="v4"), "v3", VersionVerdict("wait", 10.0)),
        (
            VersionConstraint(max_staleness=0),
            "v1",
            VersionVerdict("wait", 10.0),
        ),
        # Its signal may be on the way.
        (VersionConstraint(min_snapshot="v9"), "v3", VersionVerdict("wait", 10.0)),
        # It takes a signal for that.
        (VersionConstraint(snapshot="v2"), "v1 v3", VersionVerdict("refuse")),
        (
            VersionConstraint(snapshot="v2", wait_s=30),
            "v1 v3",
            VersionVerdict("wait", 30.0),
        ),
        (VersionConstraint(snapshot="v2", min_snapshot="v3"), "v2 v3", VersionVerdict("refuse")),
        (VersionConstraint(snapshot="v1", max_staleness=0), "v1 v3", VersionVerdict("refuse")),
        (VersionConstraint(min_snapshot="v4", wait_s=0), "v3", VersionVerdict("refuse")),
    ],
)
def test_what_does_not_serve_is_waited_for_if_it_may_come(
    constraint: VersionConstraint, serving: str, verdict: VersionVerdict
) -> None:
    assert who(constraint, ORDER, *serving.split()) == verdict
    assert who(constraint, ORDER, *serving.split(), now=100.0) == VersionVerdict("refuse")


def test_what_a_replica_is_loading_may_come_and_what_it_failed_on_may_not() -> None:
    def verdict(constraint: VersionConstraint, **report: Any) -> VersionVerdict:
        return VersionJudge(constraint, ORDER, 0.0).judge([view("v3", **report)], (), None, 0.0)

    assert verdict(VersionConstraint("v2"), stage=SwapStage.STAGING, target="v2") == VersionVerdict(
        "wait", 10.0
    )
    assert verdict(VersionConstraint("v4"), stage=SwapStage.ERROR, target="v4") == VersionVerdict("refuse")
    assert verdict(
        VersionConstraint("v3"), stage=SwapStage.STAGED, target="v4", pinnable=False
    ) == VersionVerdict("refuse")
    other_files = {"stage": SwapStage.STAGED, "target": "v3", "pinnable": False}
    assert verdict(VersionConstraint("v3"), **other_files) == VersionVerdict("wait", 10.0)


def test_a_session_waits_a_while_for_its_home_and_no_longer() -> None:
    constraint = VersionConstraint(min_snapshot="v4")
    assert who(constraint, ORDER, "v3", "v4", home=0) == VersionVerdict("wait", versions.HOME_WAIT_S)
    assert who(constraint, ORDER, "v3", "v4", home=0, now=versions.HOME_WAIT_S) == ["v4"]
    assert who(constraint, ORDER, "v3", "v4", home=1) == ["v4"]
    assert who(VersionConstraint(min_snapshot="v4", wait_s=0.5), ORDER, "v3", "v4", home=0) == VersionVerdict(
        "wait", 0.5
    )
    assert who(VersionConstraint(min_snapshot="v4", wait_s=0), ORDER, "v3", "v4", home=0) == ["v4"]
    assert who(VersionConstraint("v3"), ORDER, "v4", "v3", home=0) == ["v3"], "its home goes to v4 or stays"


def test_nobody_who_is_usable_or_untried_is_no_matter_of_snapshots() -> None:
    admission = VersionJudge(VersionConstraint(min_snapshot="v4"), ORDER, 0.0)
    assert admission.judge([view("v4", usable=False)], (), None, 0.0) == VersionVerdict("send")
    assert admission.judge([view("v4")], ("replica-0",), None, 0.0) == VersionVerdict("send")


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        (VersionConstraint("v1"), ["replica-0"]),
        (VersionConstraint("v3"), ["replica-0", "replica-1"]),
        (VersionConstraint("v1", max_staleness=2), ["replica-0"]),
        (VersionConstraint("v1", min_snapshot="base"), ["replica-0"]),
        # All that is given holds for the snapshot that would serve the request.
        (VersionConstraint("v1", max_staleness=1), []),
        (VersionConstraint("v1", min_snapshot="v2"), []),
        # What serves decides, where no snapshot is named.
        (VersionConstraint(max_staleness=0), ["replica-0", "replica-1"]),
        (VersionConstraint(min_snapshot="v2"), ["replica-0", "replica-1"]),
    ],
)
def test_an_exact_snapshot_may_be_one_that_stays_beside_the_newest(
    constraint: VersionConstraint, fits: list[str]
) -> None:
    views = [view("v3", index=0, resident=("v1",)), view("v3", index=1, resident=("v2",))]
    admission = VersionJudge(constraint, ORDER, 0.0)
    assert admission.judge(views, (), None, 0.0).action == ("send" if fits else "refuse")
    assert [one.name for one in views if admission.fits(one)] == fits


def test_while_a_swap_waits_for_pinned_requests_none_goes_to_what_stays_there() -> None:
    views = [view("v3", resident=("v1",), pinnable=False, stage=SwapStage.STAGED, target="v4")]
    assert VersionJudge(VersionConstraint("v1"), ORDER, 0.0).judge(views, (), None, 0.0) == VersionVerdict(
        "refuse"
    )


def test_the_last_signal_of_a_snapshot_gives_it_its_place() -> None:
    order = order_of("v1", "v2", "v3", ready=["v1", "v2"])
    assert (order.desired, who(VersionConstraint(min_snapshot="v2"), order, "v1", "v2")) == ("v3", ["v2"])
    # Rolled back.
    order.learn([Signalled("v1", 4, False)])
    assert (order.desired, who(VersionConstraint(min_snapshot="v2"), order, "v1", "v2")) == (
        "v1",
        ["v1", "v2"],
    )
    assert who(VersionConstraint(max_staleness=0), order, "v2", "v3") == ["v3"], (
        "it serves nowhere since it was signalled"
    )
    order.ready("v1", 1)
    assert who(VersionConstraint(max_staleness=0), order, "v2") == ["v2"], "what was ready before the signal"
    order.ready("v1", 4)
    assert who(VersionConstraint(max_staleness=2), order, "v2", "v3") == ["v2", "v3"]
    assert who(VersionConstraint(max_staleness=1), order, "v2", "v3") == ["v3"]
    assert order.between(0, 4) == 3


def test_the_newest_is_named_also_when_what_was_ready_was_signalled_again() -> None:
    order = order_of("v1", "v2", ready=["v1", "v2"])
    order.learn([Signalled("v2", 3, False)])
    admission = VersionJudge(VersionConstraint("v9", wait_s=0), order, 0.0)
    views = [view("base")]
    assert admission.judge(views, (), None, 0.0) == VersionVerdict("refuse")
    assert admission.refusal(views).body()["newest"] == "v1"


def test_a_snapshot_that_was_never_signalled_is_refused_with_those_that_were() -> None:
    """A mistyped name is seen beside the right one."""
    order = order_of(*(f"run/{number}" for number in range(8)))
    for constraint in (VersionConstraint("ran/7"), VersionConstraint(min_snapshot="ran/7")):
        told = str(VersionJudge(constraint, order, 0.0).refusal([view("run/7")]))
        newest = "'run/7', 'run/6', 'run/5', 'run/4', 'run/3'"
        assert f"(which was not signalled; the newest signals: {newest})" in told
    assert "not signalled" not in str(VersionJudge(VersionConstraint("run/0"), order, 0.0).refusal([]))
    assert "the newest signals: none yet" in str(
        VersionJudge(VersionConstraint("a"), order_of(), 0.0).refusal([])
    )


def test_a_reset_forgets_all_signals_and_the_base_weights_come_first_again() -> None:
    order = order_of("v1", "v2", ready=["v1", "v2"])
    order.learn([Signalled("v9", 7, False)], reset=6)
    assert [order.position(name) for name in (BASE_SNAPSHOT, "v1", "v2", "v9")] == [0, None, None, 7]
    assert who(VersionConstraint(max_staleness=0), order, "base", "v2") == ["base"]
    order.learn([Signalled("v10", 8, True)], reset=6)
    assert (order.desired, order.between(0, 8)) == ("v10", 2)


@given(st.lists(st.sampled_from([f"v{i}" for i in range(6)]), max_size=20), st.data())
def test_the_order_is_that_of_last_signals_however_it_was_learnt(
    signals: list[str], data: st.DataObject
) -> None:
    numbered = [Signalled(name, number, False) for number, name in enumerate(signals, 1)]
    order, learnt = SignalOrder(), SignalOrder()
    order.learn(data.draw(st.permutations(numbered)))
    learnt.learn(order.signals())
    last = sorted(set(signals), key=lambda name: len(signals) - signals[::-1].index(name))
    names = [BASE_SNAPSHOT, *last]
    for one in (order, learnt):
        positions = [one.position(name) for name in names]
        assert None not in positions
        assert positions == sorted(positions, key=lambda position: position or 0)
        assert one.desired == names[-1]
        for older, name in enumerate(names):
            assert one.between(one.position(name) or 0, one.position(names[-1]) or 0) == len(last) - older


def test_only_so_many_signals_are_kept_and_the_base_weights_always() -> None:
    order = order_of(*(f"v{number}" for number in range(KEPT + 5)))
    assert [order.position(name) for name in ("base", "v4", "v5")] == [0, None, 6]


# -- constraints as they are written


def test_a_version_constraint_means_the_same_in_headers_and_in_a_body() -> None:
    headers = {
        b"x-midstream-snapshot": b"a/b",
        b"x-midstream-min-snapshot": "h\u00e9".encode(),
        b"x-midstream-max-staleness": b"3",
        b"x-midstream-snapshot-wait": b"1.5",
    }
    constraint = VersionConstraint("a/b", "h\u00e9", 3, 1.5)
    assert constraint_of_headers(headers) == constraint
    body = {"snapshot": "a/b", "min_snapshot": "h\u00e9", "max_staleness": 3, "wait": 1.5}
    assert constraint_of_body(body) == constraint
    assert (
        constraint_of_headers({b"x-session-id": b"k"}),
        constraint_of_body(None),
        constraint_of_body({}),
    ) == (
        None,
        NOTHING,
        NOTHING,
    )
    for told in (Admitted("h\u00e9\n", pinned=True), Admitted("x", body=True)):
        assert from_header(as_header(told), Admitted) == told
        assert as_header(told).isascii()
    refusal = Refusal("v1", False, constraint)
    assert from_header(as_header(refusal), Refusal) == refusal


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("snapshot", b""),
        ("snapshot", b"x" * 513),
        ("min-snapshot", b" "),
        ("max-staleness", b"-1"),
        ("max-staleness", b"1.0"),
        ("max-staleness", b"one"),
        ("max-staleness", b"1_0"),
        ("max-staleness", "\u0663".encode()),
        ("snapshot-wait", b"-0.1"),
        ("snapshot-wait", b"nan"),
        ("snapshot-wait", b"inf"),
        ("snapshot-wait", b"86401"),
        ("snapshot-wait", b"soon"),
    ],
)
def test_a_header_that_says_nothing_sensible_is_refused_by_its_name(name: str, value: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint_of_headers({f"x-midstream-{name}".encode(): value})
    assert caught.value.param == f"x-midstream-{name}"


def test_a_trainers_version_is_the_snapshot_of_that_number() -> None:
    demands = {
        (): NOTHING,
        (("min_version", None), ("exact_version", None)): NOTHING,
        (("min_version", 0),): NOTHING,
        (("min_version", 7),): VersionConstraint(min_snapshot="7"),
        (("exact_version", 0),): VersionConstraint("0"),
        (("min_version", 3), ("exact_version", 4)): VersionConstraint("4", "3"),
    }
    for demanded, expected in demands.items():
        assert constraint_of_version(dict(demanded)) == expected
    assert constraint_of_version(None) == NOTHING
    for name, value in (("min_version", -1), ("exact_version", "7"), ("exact_version", True), ("latest", 1)):
        with pytest.raises(InvalidRequest) as refused:
            constraint_of_version({name: value})
        assert refused.value.param == f"weight_version.{name}"
    assert [as_version(name) for name in ("7", "07", "step-7", "", "-7")] == [7, "07", "step-7", "", "-7"]


def test_headers_and_body_may_complete_but_not_contradict_each_other() -> None:
    both = VersionConstraint(min_snapshot="v1").with_(VersionConstraint(max_staleness=2, min_snapshot="v1"))
    assert both == VersionConstraint(min_snapshot="v1", max_staleness=2)
    with pytest.raises(InvalidRequest, match="x-midstream-max-staleness: the request asks for 1 and for 2"):
        VersionConstraint(max_staleness=1).with_(both)
    with pytest.raises(UnknownField, match=r"field: 'midstream\.minimum'"):
        constraint_of_body({"minimum": "v1"})


# -- through the gateway


class Versioned:
    """A replica's side of it: serves `snapshot`, refuses what its gateway judged by another, as replica/pins.py does."""

    def __init__(self, snapshot: str, *resident: str) -> None:
        self.snapshot, self.resident = snapshot, resident
        # What bodies ask for.
        self.constraint = NOTHING
        self.admitted: list[Admitted | None] = []

    async def __call__(self, request: Message, peer: Peer) -> None:
        given = request.headers.get(HEADER_ADMITTED)
        admitted = None if given is None else from_header(given, Admitted)
        self.admitted.append(admitted)
        expected = {self.constraint.snapshot, admitted.snapshot if admitted else None} - {None}
        judged = not self.constraint.relative or (admitted is not None and admitted.body)
        wanted = {self.snapshot} if len(expected) != 1 else expected & {self.snapshot, *self.resident}
        if judged and not expected - wanted:
            peer.respond(json.dumps({"snapshot": (wanted or {self.snapshot}).pop()}).encode())
            return
        here = self.constraint.snapshot in self.resident
        refusal = Refusal(self.snapshot, constraint=self.constraint, here=here)
        peer.respond(b"{}", "409 Conflict", f"{HEADER_REFUSED}: {as_header(refusal)}\r\nretry-after: 1\r\n")


def tell(stage: Stage, *signalled: str, ready: Sequence[str] = ()) -> None:
    order = stage.gateway.proxy.deployments.default.order
    order.learn(order_of(*signalled, ready=ready).signals())


def serve(stage: Stage, replica: int, snapshot: str, /, **more: Any) -> None:
    """The replica reports that it serves this."""
    one = stage.views[replica]
    assert one.replica.heard is not None
    one.replica.hear(changed(one.replica.heard, snapshot=snapshot, **more))
    stage.gateway.proxy.deployments.default.replicas.look_again()


def asking(**headers: Any) -> bytes:
    """E.g. min_snapshot="v1"; `session`: its key."""
    lines = {
        ("x-session-id" if name == "session" else f"x-midstream-{name.replace('_', '-')}"): value
        for name, value in headers.items()
    }
    return post(headers="".join(f"{name}: {value}\r\n" for name, value in lines.items()))


async def served(stage: Stage, request: bytes) -> tuple[str, str]:
    """(replica, snapshot)"""
    answer = await stage.ask(request)
    assert answer.status == 200, answer.body
    return answer.headers["x-midstream-replica"], json.loads(answer.body)["snapshot"]


async def waiting(stage: Stage, count: int = 1) -> None:
    replicas = stage.gateway.proxy.deployments.default.replicas
    await until(lambda: replicas.waiting == count)


async def test_requests_go_where_what_they_ask_for_serves_and_the_replica_is_told() -> None:
    mocks = [Versioned("v1"), Versioned("v2")]
    async with staged(*mocks) as stage:
        tell(stage, "v1", "v2", ready=["v1", "v2"])
        serve(stage, 0, "v1")
        serve(stage, 1, "v2")
        for _ in range(3):
            assert await served(stage, asking(snapshot="v1")) == ("replica-0", "v1")
            assert await served(stage, asking(min_snapshot="v2")) == ("replica-1", "v2")
            assert await served(stage, asking(max_staleness=0)) == ("replica-1", "v2")
        assert mocks[0].admitted == [Admitted("v1", pinned=True)] * 3
        assert mocks[1].admitted == [Admitted("v2")] * 6
        assert {(await served(stage, asking(max_staleness=1)))[1] for _ in range(4)} == {"v1", "v2"}
        assert {(await served(stage, post()))[1] for _ in range(4)} == {"v1", "v2"}


async def test_internal_headers_of_a_client_do_not_count() -> None:
    mock = Versioned("v1")
    async with staged(mock) as stage:
        serve(stage, 0, "v1")
        await served(stage, post(headers=f'{HEADER_ADMITTED}: {{"snapshot":"v7"}}\r\n'))
        assert mock.admitted == [None]


async def test_a_request_waits_until_a_replica_reports_what_it_asks_for() -> None:
    mocks = [Versioned("v1"), Versioned("v1")]
    async with staged(*mocks) as stage:
        serve(stage, 0, "v1")
        serve(stage, 1, "v1")
        tell(stage, "v1", "v2", ready=["v1"])
        asked = asyncio.create_task(served(stage, asking(min_snapshot="v2", snapshot_wait=60)))
        await waiting(stage)
        serve(stage, 1, "v1", in_flight=7)
        await waiting(stage)
        assert not stage.mocks[0].requests + stage.mocks[1].requests
        mocks[1].snapshot = "v2"
        serve(stage, 1, "v2")
        assert await asked == ("replica-1", "v2")


async def test_a_request_may_come_before_the_signal_it_asks_for() -> None:
    mock = Versioned("v1")
    async with staged(mock) as stage:
        serve(stage, 0, "v1")
        asked = asyncio.create_task(served(stage, asking(min_snapshot="v1", snapshot_wait=60)))
        assert await asked == ("replica-0", "v1")
        asked = asyncio.create_task(served(stage, asking(min_snapshot="v0", snapshot_wait=60)))
        await waiting(stage)
        tell(stage, "v0", "v1")
        stage.gateway.proxy.deployments.default.replicas.look_again()
        assert await asked == ("replica-0", "v1")


async def test_what_is_not_served_in_time_is_a_409_that_says_what_is() -> None:
    async with staged(Versioned("v1"), Versioned("v1")) as stage:
        serve(stage, 0, "v1", stage=SwapStage.FETCHING, target="v2", resident=("base",))
        stage.views[1].replica.hear(None)
        tell(stage, "v1", "v2", ready=["v1"])
        for wait in ("0", "0.01"):
            answer = await stage.ask(asking(snapshot="v2", snapshot_wait=wait))
            assert (answer.status, answer.headers["retry-after"]) == (409, "1")
            body = json.loads(answer.body)
            assert body["error"]["code"] == "snapshot_not_served"
            assert "snapshot 'v2'" in body["error"]["message"]
            assert body["serving"] == [
                {"replica": "replica-0", "snapshot": "v1", "stage": "fetching", "resident": ["base"]},
                {"replica": "replica-1", "snapshot": None, "stage": None, "resident": []},
            ]
            assert body["newest"] == "v1"
        assert stage.metrics.requests["completions", 409] == 2
        assert not stage.mocks[0].requests


async def test_the_end_of_a_wait_that_was_not_in_vain_changes_nothing() -> None:
    over = asyncio.Event()

    async def slow(request: Message, peer: Peer) -> None:
        await over.wait()
        peer.respond(b'{"snapshot":"v2"}')

    async with staged(slow) as stage:
        tell(stage, "v1", "v2", ready=["v1"])
        serve(stage, 0, "v1")
        asked = asyncio.create_task(served(stage, asking(min_snapshot="v2", snapshot_wait=1)))
        await waiting(stage)
        # After the request's own deadline.
        asyncio.get_running_loop().call_later(1.01, over.set)
        serve(stage, 0, "v2")
        assert await asked == ("replica-0", "v2")
        assert len(stage.mocks[0].requests) == 1


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    async with staged(Versioned("v1")) as stage:
        tell(stage, "v1", "v2", ready=["v1"])
        serve(stage, 0, "v1")
        peer = await stage.connect()
        peer.send(asking(min_snapshot="v2", snapshot_wait=600))
        await waiting(stage)
        peer.abort()
        await waiting(stage, 0)
        assert stage.metrics.requests["completions", 499] == 1
        serve(stage, 0, "v2")
        # Nothing is sent for who left.
        assert await stage.ask(asking(snapshot="v1"))
        assert not stage.mocks[0].requests


async def test_a_session_stays_at_home_which_is_waited_for_and_moves_only_for_one_request() -> None:
    mocks = [Versioned("v1"), Versioned("v1")]
    async with staged(*mocks) as stage:
        tell(stage, "v1", "v2", ready=["v1"])
        for index in (0, 1):
            serve(stage, index, "v1")
        home, _ = await served(stage, asking(session="s"))
        here = int(home[-1])
        away = 1 - here
        mocks[away].snapshot = "v2"
        serve(stage, away, "v2")
        asked = asyncio.create_task(served(stage, asking(session="s", min_snapshot="v2")))
        await waiting(stage)
        assert len(stage.mocks[away].requests) == 0
        mocks[here].snapshot = "v2"
        serve(stage, here, "v2")
        assert await asked == (home, "v2")
        serve(stage, here, "v1")
        mocks[here].snapshot = "v1"
        hurried = asking(session="s", min_snapshot="v2", snapshot_wait=0)
        assert await served(stage, hurried) == (f"replica-{away}", "v2")
        assert await served(stage, asking(session="s")) == (home, "v1")
        serve(stage, here, "v3", stage=SwapStage.ERROR, target="v2")
        mocks[here].snapshot = "v3"
        # Which does not come to its home any more.
        unhurried = asking(session="s", snapshot="v2")
        assert await served(stage, unhurried) == (f"replica-{away}", "v2")


async def test_a_replica_that_serves_something_else_by_now_is_judged_by_what_it_says() -> None:
    mock = Versioned("v2")
    async with staged(mock) as stage:
        tell(stage, "v1", "v2", ready=["v1"])
        # Its report is late.
        serve(stage, 0, "v1")
        assert await served(stage, asking(min_snapshot="v1")) == ("replica-0", "v2")
        assert mock.admitted == [Admitted("v1"), Admitted("v2", body=True)]
        assert stage.metrics.retries == {"other_snapshot": 1}
        answer = await stage.ask(asking(snapshot="v1"))
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (409, "snapshot_not_served")
        assert len(stage.mocks[0].requests) == 3


def test_what_a_body_asks_for_is_told_by_the_replica_that_reads_it() -> None:
    async def main() -> None:
        mocks = [Versioned("v1"), Versioned("v2")]
        async with staged(*mocks) as stage:
            tell(stage, "v1", "v2", ready=["v1", "v2"])
            serve(stage, 0, "v1")
            serve(stage, 1, "v2")
            for mock in mocks:
                mock.constraint = VersionConstraint(min_snapshot="v2")
            assert {await served(stage, post()) for _ in range(4)} == {("replica-1", "v2")}
            assert await served(stage, asking(max_staleness=0)) == ("replica-1", "v2")
            for mock in mocks:
                mock.constraint = VersionConstraint(snapshot="v1")
            assert {await served(stage, post()) for _ in range(4)} == {("replica-0", "v1")}
            homes = {key: await home_of(stage, mocks, key) for key in map(str, range(50))}
            key = next(key for key, home in homes.items() if home == "replica-1")
            assert await served(stage, asking(session=key)) == ("replica-0", "v1")
            refused = await stage.ask(asking(snapshot="v2"))
            assert (refused.status, refused.error["param"]) == (400, "x-midstream-snapshot")
            refused = await stage.ask(asking(max_staleness=0, snapshot_wait=0))
            assert (refused.status, json.loads(refused.body)["newest"]) == (409, "v2")

    async def home_of(stage: Stage, mocks: list[Versioned], key: str) -> str:
        """Where the session lives from now on."""
        constraints = [mock.constraint for mock in mocks]
        for mock in mocks:
            mock.constraint = NOTHING
        replica, _ = await served(stage, asking(session=key))
        for mock, constraint in zip(mocks, constraints, strict=True):
            mock.constraint = constraint
        return replica

    run(main)


@pytest.mark.parametrize(
    ("header", "body", "status", "param"),
    [
        ("snapshot: v2", {"model": f"{NAMES.model}@v1"}, 400, "x-midstream-snapshot"),
        ("snapshot: v2", {"midstream": {"snapshot": "v1"}}, 400, "x-midstream-snapshot"),
        ("min-snapshot: v2", {"midstream": {"min_snapshot": "v3"}}, 400, "x-midstream-min-snapshot"),
        ("max-staleness: 0", {"midstream": {"max_staleness": 1}}, 400, "x-midstream-max-staleness"),
        ("snapshot: v2", {"midstream": {"snapshots": "v2"}}, 400, "midstream.snapshots"),
        ("snapshot: v2", {"model": "other"}, 404, "model"),
        ("snapshot: v2", {"model": f"{NAMES.model}@"}, 400, "model"),
    ],
)
async def test_a_body_that_contradicts_the_headers_is_refused_before_it_waits(
    header: str, body: dict[str, Any], status: int, param: str
) -> None:
    async with staged(Versioned("v0"), Versioned("v0")) as stage:
        for replica in (0, 1):
            serve(stage, replica, "v0", stage=SwapStage.FETCHING, target="v2")
        tell(stage, "v0", "v1", "v2", ready=["v0", "v1"])
        asked = json.dumps({"model": NAMES.model, "prompt": "a", **body}).encode()
        gc.collect()
        gc.disable()
        try:
            answer = await stage.ask(post(asked, headers=f"x-midstream-{header}\r\n"))
            kept = [one for one in gc.get_objects() if isinstance(one, ProxiedRequest)]
            assert not kept, "a request with its body waits for a collection"
        finally:
            gc.enable()
        assert (answer.status, answer.error["param"]) == (status, param)
        assert not any(mock.requests for mock in stage.mocks), "and no replica is asked"


async def test_what_a_body_asks_for_counts_while_its_request_waits() -> None:
    mocks = [Versioned("v1"), Versioned("v1")]
    async with staged(*mocks) as stage:
        serve(stage, 0, "v1")
        serve(stage, 1, "v1")
        tell(stage, "v1", "v2", "v3", ready=["v1"])
        body = json.dumps({"model": f"{NAMES.model}@v3", "prompt": "a"}).encode()
        headers = "x-midstream-min-snapshot: v2\r\nx-midstream-snapshot-wait: 60\r\n"
        asked = asyncio.create_task(served(stage, post(body, headers=headers)))
        await waiting(stage)
        for replica, snapshot in ((0, "v2"), (1, "v3")):
            mocks[replica].snapshot = snapshot
            serve(stage, replica, snapshot)
        assert await asked == ("replica-1", "v3")
        assert (mocks[0].admitted, mocks[1].admitted) == (
            [],
            [Admitted("v3", pinned=True, body=True)],
        )


async def test_a_report_that_overtakes_a_refusal_is_believed() -> None:
    mock = Versioned("v1")
    mock.constraint = VersionConstraint(snapshot="v2")

    async def swaps_meanwhile(request: Message, peer: Peer) -> None:
        if mock.snapshot == "v1":
            serve(stage, 0, "v2")
        await mock(request, peer)
        mock.snapshot = "v2"

    async with staged(swaps_meanwhile) as stage:
        tell(stage, "v1", "v2", ready=["v1", "v2"])
        serve(stage, 0, "v1")
        mock.snapshot = "v1"
        assert await served(stage, post()) == ("replica-0", "v2")
        assert len(stage.mocks[0].requests) == 2


async def test_a_session_whose_first_request_did_not_fit_begins_where_it_fits() -> None:
    mocks = [Versioned("v1"), Versioned("v2")]
    async with staged(*mocks) as stage:
        serve(stage, 0, "v1")
        serve(stage, 1, "v2")
        for mock in mocks:
            mock.constraint = VersionConstraint(snapshot="v1")
        for number in range(8):
            assert await served(stage, asking(session=f"s{number}")) == ("replica-0", "v1")
        for mock in mocks:
            mock.constraint = NOTHING
        for number in range(8):
            assert await served(stage, asking(session=f"s{number}")) == ("replica-0", "v1"), "its home"


async def test_a_replica_that_refuses_what_it_serves_is_not_asked_again_before_it_reports() -> None:
    async def refuse(request: Message, peer: Peer) -> None:
        refusal = as_header(Refusal("v1", pinnable=False))
        peer.respond(b"{}", "409 Conflict", f"{HEADER_REFUSED}: {refusal}\r\n")

    async with staged(refuse) as stage:
        tell(stage, "v1", "v2", ready=["v1"])
        serve(stage, 0, "v1")
        answer = await stage.ask(asking(snapshot="v1"))
        assert answer.status == 409
        assert len(stage.mocks[0].requests) == 1
        asked = asyncio.create_task(stage.ask(asking(min_snapshot="v1", snapshot_wait=60)))
        for count in range(2, 2 + versions.REFUSALS_MAX + 1):
            await stage.mocks[0].asked(count)
            if count <= 1 + versions.REFUSALS_MAX:
                await waiting(stage)
                assert len(stage.mocks[0].requests) == count
            serve(stage, 0, "v1", in_flight=count)
        assert (await asked).status == 409
        assert len(stage.mocks[0].requests) == 2 + versions.REFUSALS_MAX


async def test_a_conflict_that_is_not_about_snapshots_passes_through() -> None:
    async def conflict(request: Message, peer: Peer) -> None:
        peer.respond(b'{"own":1}', "409 Conflict")

    async with staged(conflict) as stage:
        answer = await stage.ask(asking(snapshot="base"))
        assert (answer.status, answer.body) == (409, b'{"own":1}')


async def test_the_only_replica_that_serves_it_keeps_its_429() -> None:
    async def busy(request: Message, peer: Peer) -> None:
        peer.respond(b'{"busy":1}', "429 X", "retry-after: 7\r\n")

    async with staged(busy, Versioned("v2")) as stage:
        tell(stage, "v1", "v2", ready=["v1", "v2"])
        serve(stage, 0, "v1")
        serve(stage, 1, "v2")
        answer = await stage.ask(asking(snapshot="v1"))
        assert (answer.status, answer.body, answer.headers["retry-after"]) == (429, b'{"busy":1}', "7")
        assert not stage.mocks[1].requests


async def test_a_request_goes_to_where_the_snapshot_it_names_stays_and_the_replica_is_told() -> None:
    mocks = [Versioned("v2"), Versioned("v2", "v1")]
    async with staged(*mocks) as stage:
        tell(stage, "v1", "v2", ready=["v1", "v2"])
        serve(stage, 0, "v2")
        serve(stage, 1, "v2", resident=("v1",))
        for _ in range(3):
            assert await served(stage, asking(snapshot="v1")) == ("replica-1", "v1")
        assert mocks[1].admitted == [Admitted("v1", pinned=True)] * 3
        # What only the body says, a replica tells.
        for mock in mocks:
            mock.constraint = VersionConstraint("v1")
        for _ in range(3):
            assert await served(stage, post()) == ("replica-1", "v1")
        assert await served(stage, asking(min_snapshot="v1")) == ("replica-1", "v1")
        assert mocks[1].admitted[-1] == Admitted("v1", pinned=True, body=True)


async def test_what_stayed_and_is_gone_before_its_replica_says_so_is_a_409() -> None:
    mock = Versioned("v2")
    async with staged(mock) as stage:
        tell(stage, "v1", "v2", ready=["v1", "v2"])
        serve(stage, 0, "v2", resident=("v1",))
        answer = await stage.ask(asking(snapshot="v1", snapshot_wait=0))
        assert (answer.status, answer.error["code"]) == (409, "snapshot_not_served")
        assert mock.admitted == [Admitted("v1", pinned=True)]
        # It waits for the next report, and is sent there by it.
        asked = asyncio.create_task(served(stage, asking(snapshot="v1", snapshot_wait=60)))
        await waiting(stage)
        mock.resident = ("v0", "v1")
        serve(stage, 0, "v2", resident=("v0", "v1"))
        assert await asked == ("replica-0", "v1")


async def test_the_replica_that_serves_it_is_lost_and_nobody_else_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def die(request: Message, peer: Peer) -> None:
        peer.abort()

    caplog.set_level(logging.CRITICAL)
    async with staged(die, Versioned("v2")) as stage:
        tell(stage, "v1", "v2", ready=["v1", "v2"])
        serve(stage, 0, "v1")
        serve(stage, 1, "v2")
        answer = await stage.ask(asking(snapshot="v1"))
        assert (answer.status, answer.error["code"]) == (503, "replica_unavailable")
        assert not stage.mocks[1].requests


async def served_when(stage: Stage, request: bytes, comes: Callable[[], None]) -> tuple[str, str]:
    """As `served`; `comes` is called while a connection to the first replica is being opened."""
    connecting, go_on = asyncio.Event(), asyncio.Event()
    pool = stage.pool(stage.views[0])
    real = pool.open

    async def slow(**given: Any) -> Any:
        connecting.set()
        await go_on.wait()
        return await real(**given)

    pool.open = slow  # type: ignore[method-assign]
    asked = asyncio.create_task(served(stage, request))
    await connecting.wait()
    comes()
    go_on.set()
    return await asked


async def test_a_replica_whose_report_is_lost_while_a_connection_is_opened_is_still_asked() -> None:
    mock = Versioned("v1")
    async with staged(mock) as stage:
        serve(stage, 0, "v1")

        def lost() -> None:
            stage.views[0].replica.hear(None)

        assert await served_when(stage, asking(snapshot="v1"), lost) == ("replica-0", "v1")
        assert mock.admitted == [Admitted("v1", pinned=True)]


@pytest.mark.parametrize("asked", [{"snapshot": "v1"}, {"max_staleness": 0}], ids=str)
async def test_a_snapshot_that_comes_while_a_connection_is_opened_was_not_judged(
    asked: dict[str, Any],
) -> None:
    mocks = [Versioned("v1"), Versioned("v1")]
    async with staged(*mocks) as stage:
        tell(stage, "v2", "v1", ready=["v2", "v1"])
        serve(stage, 0, "v1")
        serve(stage, 1, "v2")

        def another_comes() -> None:
            mocks[0].snapshot = "v2"
            serve(stage, 0, "v2")
            serve(stage, 1, "v1")

        assert await served_when(stage, asking(**asked), another_comes) == ("replica-1", "v1")
        admitted = Admitted("v1", pinned="snapshot" in asked)
        assert [mock.admitted for mock in mocks] == [[admitted], [replace(admitted, body=True)]]


@pytest.mark.parametrize(
    "body",
    [
        {"input": "a"},
        {"token_ids": [1], "sampling_params": {}},
        {"text": "a"},
        {"prompt": "a", "model": None},
        {"prompt": "a", "model": NAMES.model},
    ],
)
def test_a_body_that_names_no_model_has_its_constraint(body: dict[str, Any]) -> None:
    """Several APIs leave the model out. The gateway took their requests for such as ask for nothing."""
    asked = {"min_snapshot": "s", "wait": 3}
    given = json.dumps(body | {"midstream": asked}).encode()
    assert versions.constraint_of_request(NAMES, {}, given) == constraint_of_body(asked)
