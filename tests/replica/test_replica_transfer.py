"""A replica's part in the groups of trainers: every order in every phase, and who owns the files when."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest
from receiver_fakes import CONTENT, RENDEZVOUS, SENT, UNFIT, FakeReceiver
from replica_fakes import FakeEngine, FakeSource, Running, running

from midstream.core.errors import (
    AnotherBoot,
    Conflict,
    InvalidRequest,
    ReplicaUnavailable,
    SnapshotMissing,
)
from midstream.core.transfer import (
    TRANSFER_PATH,
    Alive,
    Begin,
    CarriedOut,
    Check,
    Distrust,
    Drop,
    Finish,
    InitInfo,
    Join,
    JoinInPlace,
    Keep,
    LeaveGroup,
    Receive,
    Received,
    TrainerSeen,
    TrainerState,
    TransferOrder,
)
from midstream.core.types import SnapshotFiles
from midstream.replica.transfer import LOOK_S, PartPhase, Transfers

BOOT = "boot-1"


def orders(group: str = "g", boot: str = BOOT, update: int = 1) -> dict[str, TransferOrder]:
    """One of each kind."""
    return {
        "join": Join(group=group, boot=boot, within_s=60, rendezvous=RENDEZVOUS),
        "begin": Begin(group=group, boot=boot, within_s=60, update=update, live_s=600),
        "check": Check(group=group, boot=boot, within_s=60, update=update, sent=SENT),
        "receive": Receive(group=group, boot=boot, within_s=60, update=update, sent=SENT),
        "finish": Finish(group=group, boot=boot, within_s=60, update=update),
        "drop": Drop(group=group, boot=boot, within_s=60, update=update),
        "alive": Alive(group=group, boot=boot, within_s=60),
        "leave": LeaveGroup(group=group, boot=boot, within_s=60),
    }


async def soon(holds: Callable[[], bool]) -> None:
    """Turns of the loop until it holds. The test's own deadline bounds them."""
    while not holds():  # noqa: ASYNC110 - nothing tells of these states
        await asyncio.sleep(0)


class Here:
    """The orders of one replica, with receivers that are none."""

    def __init__(self) -> None:
        self.source = FakeSource()
        self.boot: str | None = BOOT
        self.blocked: set[str] = set()
        self.receivers: list[FakeReceiver] = []
        self.slept: list[float] = []
        self._waking = asyncio.Event()
        # Of those that look for a trainer.
        self._looking = asyncio.Event()
        self.transfers = Transfers(self.source, lambda: self.boot, self._sleep)
        self.transfers.receivers = self._receiver

    def _receiver(self) -> FakeReceiver:
        number = len(self.receivers)
        self.receivers.append(FakeReceiver(Path(f"/cache/.moving-{number}"), self.blocked))
        return self.receivers[-1]

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await (self._looking if seconds == LOOK_S else self._waking).wait()

    async def pass_time(self) -> None:
        """All that sleep wake."""
        self._waking.set()
        self._waking = asyncio.Event()
        await self.pass_looks()

    async def pass_looks(self) -> None:
        self._looking.set()
        self._looking = asyncio.Event()
        for _ in range(4):
            await asyncio.sleep(0)

    @property
    def phase(self) -> str:
        part = self.transfers._part
        return "none" if part is None else part.phase.value

    async def do(self, *names: str) -> None:
        for name in names:
            await self.transfers.answer(orders()[name])

    async def at(self, phase: str) -> None:
        """Take the group `g` to this phase."""
        before = {
            "joined": ["join"],
            "open": ["join", "begin"],
            "left": ["join", "leave"],
            "lost": ["join", "begin"],
        }
        working = {
            "joining": ([], "join"),
            "opening": (["join"], "begin"),
            "receiving": (["join", "begin"], "receive"),
            "finishing": (["join", "begin", "receive"], "finish"),
        }
        await self.do(*before.get(phase, []))
        if phase == "lost":
            self.receivers[0].fails = {"receive"}
            with pytest.raises(ReplicaUnavailable, match="lost the trainer"):
                await self.do("receive")
        if phase in working:
            done, step = working[phase]
            await self.do(*done)
            self.blocked.add(step)
            self.under_way = asyncio.create_task(self.transfers.answer(orders()[step]))
            # It ends by an error, which the test may look at.
            self.under_way.add_done_callback(lambda task: task.cancelled() or task.exception())
            await soon(lambda: bool(self.receivers))
            await self.receivers[0].at(step)
            self.blocked.clear()
        assert self.phase == {"left": "ended", "lost": "ended"}.get(phase, phase)


#: By phase: what becomes of each order, and the phase behind it. No phase: a Conflict, which changes nothing.
ALWAYS = {"leave": "ended", "join": "joined"}
WORKING = {"drop": "ended", **ALWAYS}
EXPECTED: dict[str, dict[str, str]] = {
    "none": {"leave": "none", "join": "joined"},
    "joining": {"alive": "joining", **ALWAYS},
    "joined": {"begin": "open", "drop": "joined", "alive": "joined", **ALWAYS},
    "opening": {"alive": "opening", **WORKING},
    "open": {
        "begin": "open",
        "check": "open",
        "receive": "open",
        "finish": "joined",
        "drop": "joined",
        "alive": "open",
        **ALWAYS,
    },
    "receiving": {"alive": "receiving", **WORKING},
    "finishing": {"alive": "finishing", **WORKING},
    "left": ALWAYS,
    "lost": ALWAYS,
}


def test_the_phases_are_all_there() -> None:
    assert EXPECTED.keys() - {"none", "left", "lost"} == {phase.value for phase in PartPhase} - {"ended"}


@pytest.mark.parametrize(("phase", "order"), list(itertools.product(EXPECTED, orders())))
async def test_every_order_has_its_phases(phase: str, order: str) -> None:
    here = Here()
    await here.at(phase)
    before = here.phase
    expected = EXPECTED[phase].get(order)
    if expected is None:
        # A gateway that looks for members hears of every end alike.
        kind = ReplicaUnavailable if phase == "lost" and order != "alive" else Conflict
        with pytest.raises(kind, match="group g") as refused:
            await here.do(order)
        assert ("lost the trainer" in refused.value.message) == (phase == "lost")
        assert here.phase == before
    else:
        await here.do(order)
        assert here.phase == expected
    if phase in ("joining", "opening", "receiving", "finishing") and order in WORKING and expected:
        with pytest.raises(ReplicaUnavailable):
            await here.under_way
        assert here.receivers[0].calls[-1] == "end"
    await here.transfers.close()
    assert all(receiver.calls[-1] == "end" for receiver in here.receivers)


@pytest.mark.parametrize("order", sorted(orders()))
@pytest.mark.parametrize("boot", ["another", None])
async def test_an_order_for_another_boot_does_nothing(order: str, boot: str | None) -> None:
    here = Here()
    await here.at("open")
    here.boot = boot
    with pytest.raises(AnotherBoot):
        await here.do(order)
    assert here.phase == "open"
    await here.transfers.close()


async def test_a_conflict_names_both_groups_or_both_updates() -> None:
    here = Here()
    await here.at("open")
    for name in ("begin", "check", "receive", "finish", "drop", "alive"):
        with pytest.raises(Conflict, match=r"group other: this replica takes part in group g, which is open"):
            await here.transfers.answer(orders(group="other")[name])
    for name in ("check", "receive", "finish", "drop"):
        with pytest.raises(Conflict, match=r"the open update of group g is 1, not 2"):
            await here.transfers.answer(orders(update=2)[name])
    # To leave another group is to be done already.
    assert await here.transfers.answer(orders(group="other")["leave"]) == CarriedOut()
    assert here.phase == "open"
    await here.transfers.close()


async def test_what_is_refused_by_name_changes_nothing() -> None:
    here = Here()
    await here.at("open")
    for kind in (Check, Receive):
        with pytest.raises(InvalidRequest, match="no such tensor"):
            await here.transfers.answer(kind(group="g", boot=BOOT, within_s=1, update=1, sent=UNFIT))
    here.receivers[0].complete = False
    with pytest.raises(InvalidRequest, match="was not sent"):
        await here.do("finish")
    assert here.phase == "open"
    here.receivers[0].complete = True
    await here.do("receive", "finish")
    await here.transfers.close()


async def test_finished_files_are_the_sources_until_they_are_dropped() -> None:
    here = Here()
    await here.at("open")
    await here.do("receive")
    assert await here.transfers.answer(orders()["finish"]) == Received(content=CONTENT, received_bytes=8)
    assert here.source.calls == ["received /cache/.moving-0"]
    # Neither time, nor a newer update, nor the group's end takes them away.
    await here.pass_time()
    await here.transfers.answer(orders(update=2)["begin"])
    await here.transfers.answer(orders(update=2)["drop"])
    assert here.source.calls == ["received /cache/.moving-0"]
    await here.do("drop", "drop")
    assert here.source.calls == ["received /cache/.moving-0", "forget /cache/.moving-0"]
    assert here.receivers[0].calls.count("retract") == 1
    await here.do("leave")
    await here.transfers.close()


@pytest.mark.parametrize("then", ["nothing", "its trainer is gone"])
async def test_a_finish_that_comes_again_gets_the_same_answer(then: str) -> None:
    """The name that the trainer gave was refused, and it gives another one."""
    here = Here()
    await here.at("open")
    await here.do("receive", "finish")
    if then != "nothing":
        here.receivers[0].ends(then)
        await soon(lambda: here.phase == "ended")
    answer = await here.transfers.answer(orders()["finish"])
    assert answer == Received(content=CONTENT, received_bytes=8)
    assert here.source.calls == ["received /cache/.moving-0"]
    await here.do("drop")
    with pytest.raises(Conflict if then == "nothing" else ReplicaUnavailable):
        await here.do("finish")
    await here.transfers.close()


async def test_finished_files_are_dropped_also_when_the_receiver_has_ended() -> None:
    here = Here()
    await here.at("open")
    await here.do("receive", "finish", "leave", "drop")
    assert here.source.calls == ["received /cache/.moving-0", "forget /cache/.moving-0"]
    assert here.receivers[0].calls[-1] == "retract"
    await here.transfers.close()


async def test_a_replica_takes_part_in_the_way_that_it_has() -> None:
    here = Here()
    init = InitInfo(backend="nccl", fields={})
    with pytest.raises(InvalidRequest, match="for vLLM's backend nccl, and this replica has a receiver"):
        await here.transfers.answer(JoinInPlace(group="g", boot=BOOT, within_s=60, init=init))
    await here.do("join")
    assert here.phase == "joined"
    await here.transfers.close()


async def test_an_open_update_that_lives_too_long_is_dropped() -> None:
    here = Here()
    await here.at("open")
    assert here.slept == [LOOK_S, 600]
    await here.pass_time()
    assert here.phase == "joined"
    assert here.receivers[0].calls[-1] == "drop"
    with pytest.raises(Conflict, match=r"joined here \(update 1: it was not finished within 600 s\)"):
        await here.do("receive")
    await here.do("begin")
    await here.transfers.close()


@pytest.mark.parametrize("phase", ["opening", "receiving", "finishing"])
async def test_work_on_an_update_that_lives_too_long_ends_the_group(phase: str) -> None:
    here = Here()
    await here.at(phase)
    await here.pass_time()
    assert here.phase == "ended"
    with pytest.raises(ReplicaUnavailable, match="was not finished within 600 s"):
        await here.under_way
    await here.transfers.close()


@pytest.mark.parametrize("phase", ["joining", "joined", "opening", "open", "receiving", "finishing"])
async def test_a_receiver_that_ends_by_itself_ends_the_group(phase: str) -> None:
    here = Here()
    await here.at(phase)
    here.receivers[0].ends("the receiver process ended by SIGKILL")
    for _ in range(4):
        await asyncio.sleep(0)
    assert here.phase == "ended"
    with pytest.raises(ReplicaUnavailable, match=r"group g ended here: .* ended by SIGKILL"):
        await here.do("begin")
    assert here.source.calls == []
    await here.transfers.close()


async def test_a_caller_that_leaves_does_not_end_what_it_asked_for() -> None:
    here = Here()
    await here.at("open")
    asked = asyncio.create_task(here.transfers.answer(orders()["receive"]))
    await here.receivers[0].at("receive")
    asked.cancel()
    await soon(lambda: here.phase == "open")
    await here.do("finish")
    await here.transfers.close()


async def test_an_order_that_fails_after_its_caller_left_is_no_error_in_the_log() -> None:
    here = Here()
    await here.at("open")
    here.blocked.add("receive")
    asked = asyncio.create_task(here.transfers.answer(orders()["receive"]))
    await here.receivers[0].at("receive")
    [order] = here.transfers._tasks
    asked.cancel()
    await here.do("leave")
    await soon(lambda: not here.transfers._tasks)
    # What asyncio logs, once the task is collected, is an error that none has read.
    assert not order._log_traceback  # type: ignore[attr-defined]
    await here.transfers.close()


async def test_whether_the_trainer_lives_is_the_answer() -> None:
    here = Here()
    await here.at("joined")
    for state in TrainerState:
        here.receivers[0].trainer = state
        assert await here.transfers.answer(orders()["alive"]) == TrainerSeen(state)
    assert here.phase == "joined"
    await here.transfers.close()


@pytest.mark.parametrize("phase", ["joined", "open", "receiving"])
@pytest.mark.parametrize(
    ("state", "why"),
    [(TrainerState.GONE, "its trainer is gone"), (TrainerState.UNKNOWN, "its trainer does not answer")],
)
async def test_a_receiver_does_not_outlive_its_trainer_for_long(
    phase: str, state: TrainerState, why: str
) -> None:
    here = Here()
    await here.at(phase)
    receiver = here.receivers[0]
    for receiver.trainer in (state, state, TrainerState.ALIVE, TrainerState.GONE, TrainerState.UNKNOWN):
        await here.pass_looks()
        assert here.phase == phase, "one answer is enough"
    receiver.trainer = state
    await here.pass_looks()
    assert here.phase == "ended"
    assert receiver.calls[-1] == "end"
    with pytest.raises(Conflict, match=f"group g ended here: {why}"):
        await here.do("begin")
    await here.do("join")
    assert here.phase == "joined"
    await here.transfers.close()


def keep(boot: str = "", within_s: float = 60) -> Keep:
    return Keep(group="g", boot=boot, within_s=within_s, snapshot="s", bucket="file:///b", content=CONTENT)


async def test_files_are_kept_whatever_became_of_the_group() -> None:
    here = Here()
    here.boot = None
    await here.transfers.answer(keep())
    with pytest.raises(AnotherBoot):
        await here.transfers.answer(keep(boot="another"))
    assert here.source.calls == ["keep s in file:///b"]
    here.source.keeping = SnapshotMissing("s: not here")
    with pytest.raises(ReplicaUnavailable, match="s: not here"):
        await here.transfers.answer(keep())
    here.source.blocked = {"s"}
    with pytest.raises(ReplicaUnavailable, match=r"s: was not put into its bucket within 0\.01 s"):
        await here.transfers.answer(keep(within_s=0.01))
    asked = asyncio.create_task(here.transfers.answer(keep()))
    await asyncio.sleep(0)
    await here.transfers.close()
    with pytest.raises(asyncio.CancelledError):
        await asked


async def test_files_that_other_replicas_do_not_have_are_used_no_more_whatever_the_boot() -> None:
    here = Here()
    here.boot = None
    chain = tuple(SnapshotFiles(snapshot=name, url=f"file:///b/{name}") for name in ("s0", "s1"))
    await here.transfers.answer(Distrust(group="", boot="", within_s=30, chain=chain))
    assert here.source.calls == ["distrust ['s0', 's1']"]


async def ordered(here: Running, order: TransferOrder) -> httpx.Response:
    return await here.http.post(TRANSFER_PATH, content=msgspec.json.encode(order))


def with_receivers(here: Running, blocked: set[str]) -> list[FakeReceiver]:
    made: list[FakeReceiver] = []

    def make() -> FakeReceiver:
        made.append(FakeReceiver(Path("/cache/.moving-0"), blocked))
        return made[-1]

    here.replica.transfers.receivers = make
    return made


async def test_orders_come_over_http_and_errors_have_their_shape(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        of_boot = orders(boot=here.replica.boot)
        refused = await ordered(here, of_boot["join"])
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "init_info"
        with_receivers(here, set())
        for name in ("join", "begin", "check", "receive"):
            answer = await ordered(here, of_boot[name])
            assert (answer.status_code, answer.json()) == (200, {})
        answer = await ordered(here, of_boot["alive"])
        assert answer.json() == {"state": "alive"}
        finished = await ordered(here, of_boot["finish"])
        assert msgspec.json.decode(finished.content, type=Received).content == CONTENT
        conflict = await ordered(here, of_boot["receive"])
        assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "conflict_error")
        other = await ordered(here, orders()["leave"])
        assert (other.status_code, other.headers["x-midstream-another-boot"]) == (503, "1")
        bad = await here.http.post(TRANSFER_PATH, content=b'{"order": "fly"}')
        assert bad.status_code == 400


async def test_a_gateway_that_closes_its_connection_ends_no_order(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        blocked: set[str] = set()
        made = with_receivers(here, blocked)
        of_boot = orders(boot=here.replica.boot)
        for name in ("join", "begin"):
            await ordered(here, of_boot[name])
        blocked.add("receive")
        async with httpx.AsyncClient(base_url=here.url) as gateway:
            content = msgspec.json.encode(of_boot["receive"])
            asked = asyncio.create_task(gateway.post(TRANSFER_PATH, content=content))
            await made[0].at("receive")
            asked.cancel()
        await soon(lambda: len(here.server._app.clients) == 1)
        conflict = await ordered(here, of_boot["finish"])
        assert "group g is receiving" in conflict.json()["error"]["message"]


async def test_the_receiver_ends_with_the_boot_and_with_the_replica(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        made = with_receivers(here, set())
        boot = here.replica.boot
        await ordered(here, orders(boot=boot)["join"])
        await here.engine.die()
        await here.until(lambda: here.replica.ready and here.replica.boot != boot)
        assert made[0].calls[-1] == "end"
        assert (await ordered(here, orders(boot=boot)["begin"])).status_code == 503
        await ordered(here, orders(boot=here.replica.boot)["join"])
    assert made[1].calls[-1] == "end"
