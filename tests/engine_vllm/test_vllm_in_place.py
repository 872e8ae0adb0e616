"""Weights that a trainer writes into a vLLM server: nothing is computed until they are switched to, whatever fails."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import LOAD, FakeVllm, until, weights_of, write_adapter, write_weights
from test_vllm_adapters import both_of, ours, publish
from test_vllm_swap import labelled_right, wire_order
from vllm_helpers import Reading, asking, attached, begun

from midstream.core.errors import ConfigError
from midstream.core.server_settings import VllmSettings
from midstream.core.types import GenerateRequest
from midstream.engine.base import EngineDied, StagingFailed, Tee, TransferFailed, TransferRefused
from midstream.engine.servers import keeper
from midstream.engine.servers.boot import ServerBoot
from midstream.engine.vllm import in_place, life, swap
from midstream.engine.vllm.arguments import command_line
from midstream.engine.vllm.beside import WorkerWeights
from midstream.engine.vllm.engine import VllmEngine
from midstream.engine.vllm.in_place import HOLDS, HoldAction, HoldEvent, HoldPhase, VllmInPlace

SOON_S = 20.0
INIT = "/init_weight_transfer_engine"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"


@dataclass
class Bed:
    engine: VllmEngine
    fake: FakeVllm
    folder: Path

    @property
    def fence(self) -> VllmInPlace:
        assert isinstance(self.engine.in_place, VllmInPlace)
        return self.engine.in_place

    @property
    def files(self) -> Path:
        return self.folder / "step-1"

    async def at(self, phase: str) -> None:
        """Take the fence there, by what a trainer says."""
        write_weights(self.files, 1)
        file = self.files / "model.safetensors"
        file.write_bytes(bytes(8))
        await self.fence.join({"master_address": "h"}, SOON_S)
        if phase == "free":
            return
        await self.fence.hold(SOON_S)
        if phase == "held":
            return
        await self.fence.write({"names": ["a"], "number": 1}, Tee(file, {"a": (0, 8)}, 8), SOON_S)
        if phase == "uncertain":
            return
        await self.fence.finish(SOON_S)
        self.fence.written(file)

    async def streaming(self) -> tuple[Reading, list[int]]:
        """A stream with three tokens of the base."""
        reading, [request] = await begun(self.engine, self.fake, asking(max_tokens=6))
        request.step(3)
        await until(lambda: len(reading.records()) == 3)
        return reading, [0]


@asynccontextmanager
async def bed(folder: Path, *, checks_in_pause: bool = False) -> AsyncIterator[Bed]:
    def set_up(fake: FakeVllm) -> None:
        fake.checks_in_pause = fake.by_priority = checks_in_pause

    async with attached(folder, set_up=set_up, weight_transfer="gloo") as (engine, fake):
        yield Bed(engine, fake, folder)


async def test_what_was_written_is_switched_to_without_a_load(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        reading, _ = await here.streaming()
        await here.at("written")
        assert (here.fake.weights, here.fake.paused) == (1, True)
        await here.engine.stage("step-1", here.files)
        timing = await here.engine.commit("step-1")
        assert timing.streams_crossed == 1
        order = wire_order(here.fake)
        # What was sampled is read, and the tee opened, while vLLM starts the update.
        assert sorted(order[2:6]) == ["/collective_rpc", "/is_paused", "/is_paused", START]
        assert order[:2] + order[6:] == [
            INIT, "/pause", UPDATE, "/collective_rpc", FINISH, "/update_weight_version", "/resume",
        ]  # fmt: skip
        here.fake.requests[0].to_the_end()
        await reading.ended()
        assert reading.labels() == ["base"] * 3 + ["step-1"] * 3
        assert labelled_right([reading])
        # The next update begins like the first.
        await here.at("uncertain")


async def test_a_start_of_an_update_that_takes_long_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine core does one call after the other, so whether it is paused is answered after the start."""
    async with bed(tmp_path) as here:
        await here.at("held")
        monkeypatch.setattr(swap, "CALL_S_MAX", 0.0)
        tee = Tee(here.files / "model.safetensors", {"a": (0, 8)}, 8)
        await here.fence.write({"names": ["a"], "number": 1}, tee, SOON_S)
        assert here.fence.phase is HoldPhase.UNCERTAIN


@pytest.mark.parametrize("call", [INIT, START, UPDATE, "/collective_rpc", FINISH])
async def test_a_stopped_worker_is_not_waited_for_as_a_slow_trainer_is(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker cannot be asked: it waits in the call."""
    monkeypatch.setattr(sys.modules[__name__], "SOON_S", 600.0)
    monkeypatch.setattr("midstream.engine.servers.watch.IDLE_POLL_S", 0.1)
    worker = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "import time; time.sleep(600)")
    try:
        async with attached(tmp_path, weight_transfer="gloo", silence_s_max=1.0) as (engine, fake):
            started = keeper.started_at(worker.pid)
            assert started is not None
            engine._server._descendants = {worker.pid: started}
            fake.fault(call, "hang")
            pushed = asyncio.create_task(Bed(engine, fake, tmp_path).at("written"))
            await until(lambda: engine.silent_s() > 2.0, "longer than it may be silent")
            assert not pushed.done()
            worker.send_signal(signal.SIGSTOP)
            with pytest.raises(TransferFailed, match="had a stopped process"):
                await pushed
            fake.heal()
    finally:
        worker.kill()
        await worker.wait()


async def test_workers_stage_nothing_while_a_trainer_writes(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        here.engine._stager.workers = WorkerWeights(here.engine._control, SOON_S)
        await here.at("held")
        await here.engine.stage("step-2", write_weights(tmp_path / "step-2", 2))
        assert here.fake.beside is None
        here.fence.give_up("dropped")
        await here.engine.commit("step-2")
        assert (here.fake.weights, here.fake.switches) == (2, 0)


async def test_what_was_staged_before_a_trainer_wrote_is_loaded_from_its_files(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        here.engine._stager.workers = WorkerWeights(here.engine._control, SOON_S)
        await here.engine.stage("step-2", write_weights(tmp_path / "step-2", 2))
        assert here.fake.beside is not None
        await here.at("written")
        loads = here.fake.loads
        await here.engine.commit("step-2")
        assert (here.fake.weights, here.fake.loads, here.fake.switches) == (2, loads + 1, 0)
        assert not here.fake.paused


async def test_a_trainer_writes_when_no_worker_loads_any_more(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        here.engine._stager.workers = WorkerWeights(here.engine._control, SOON_S)
        here.fake.busy = True
        holding = asyncio.create_task(here.fence.hold(SOON_S))
        await asyncio.wait_for(here.fake.asked_busy.wait(), SOON_S)
        assert here.fence.phase is HoldPhase.PAUSING
        assert not here.fake.paused
        here.fake.busy = False
        await holding
        assert here.fence.phase is HoldPhase.HELD
        here.fence.give_up("dropped")


@pytest.mark.parametrize("refused", [False, True])
async def test_a_policys_swap_beside_what_was_written_has_nothing_computed(
    tmp_path: Path, refused: bool
) -> None:
    """It waits for the control lock as long as tensors come, and gets it before the weights have a label."""
    async with attached(tmp_path, places=3, weight_transfer="gloo") as (engine, fake):
        here = Bed(engine, fake, tmp_path)
        ours(engine)
        await publish(engine, tmp_path, "red", 1)
        base, _ = await here.streaming()
        red, [request] = await begun(engine, fake, asking("red", policy="red", max_tokens=6))
        request.step(3)
        await until(lambda: len(red.records()) == 3)
        await here.at("written")
        if refused:
            slot = engine.slot("red")
            await slot.stage("red-2", write_adapter(tmp_path / "red-2", 2))
            fake.fault(LOAD, "refuse")
            with pytest.raises(StagingFailed):
                await slot.commit("red-2")
        else:
            await publish(engine, tmp_path, "red", 2)
        assert (fake.paused, here.fence.phase) == (True, HoldPhase.WRITTEN)
        assert not engine._computing.is_set()
        await engine.stage("step-1", here.files)
        await engine.commit("step-1")
        assert (fake.paused, here.fence.phase) == (False, HoldPhase.FREE)
        for of, reading in zip(fake.requests[-2:], (base, red), strict=True):
            of.to_the_end()
            assert (await reading.ended()).errors == []
        assert base.labels() == ["base"] * 3 + ["step-1"] * 3
        assert labelled_right([base])
        assert red.labels() == ["red-1"] * 3 + [f"red-{1 if refused else 2}@step-1"] * 3
        assert [weights_of(record) for record in red.records()] == [both_of(name) for name in red.labels()]


async def test_no_adapter_is_loaded_while_tensors_come(tmp_path: Path) -> None:
    async with attached(tmp_path, places=3, weight_transfer="gloo") as (engine, fake):
        here = Bed(engine, fake, tmp_path)
        ours(engine)
        await here.at("uncertain")
        publishing = asyncio.create_task(publish(engine, tmp_path, "red", 1))
        await until(lambda: publishing.done() or engine._control_lock._waiters)
        assert (publishing.done(), fake.adapters) == (False, {})
        await here.fence.finish(SOON_S)
        here.fence.written(here.files / "model.safetensors")
        await publishing
        await engine.stage("step-1", here.files)
        await engine.commit("step-1")
        red, [request] = await begun(engine, fake, asking(policy="red"))
        request.to_the_end()
        assert (await red.ended()).labels() == ["red-1@step-1"] * 4


async def test_an_update_without_tensors_that_ends_lets_the_old_weights_go_on(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        reading, _ = await here.streaming()
        await here.at("held")
        here.fence.give_up("dropped")
        here.fence.give_up("dropped twice")
        await until(lambda: not here.fake.paused)
        await until(lambda: here.fence.phase is HoldPhase.FREE)
        here.fake.requests[0].to_the_end()
        await reading.ended()
        assert reading.labels() == ["base"] * 6
        assert START not in wire_order(here.fake)
        await here.fence.hold(SOON_S)


async def test_an_update_that_ends_while_the_server_is_paused_resumes_it_afterwards(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        gate = here.fake.gates["/pause"] = asyncio.Event()
        holding = asyncio.create_task(here.fence.hold(SOON_S))
        await until(lambda: "/pause" in wire_order(here.fake))
        here.fence.give_up("dropped")
        gate.set()
        with pytest.raises(TransferFailed, match="the update is over"):
            await holding
        await until(lambda: here.fence.phase is HoldPhase.FREE)
        assert not here.fake.paused
        assert wire_order(here.fake)[-1] == "/resume"


@pytest.mark.parametrize("phase", ["uncertain", "written"])
async def test_uncertain_weights_that_are_given_up_end_the_boot_and_give_no_token(
    tmp_path: Path, phase: str
) -> None:
    async with bed(tmp_path) as here:
        reading, _ = await here.streaming()
        await here.at(phase)
        here.fence.give_up("the trainer died")
        await reading.ended()
        assert str(reading.died) == "the trainer died"
        assert "/resume" not in wire_order(here.fake)
        with pytest.raises(EngineDied):
            await here.engine.stage("step-1", here.files)
        await here.engine.start()
        assert (here.fake.weights, here.fence.phase) == (0, HoldPhase.FREE)
        await here.fence.hold(SOON_S)


@pytest.mark.parametrize("kind", ["refuse", "close", "done-close"])
@pytest.mark.parametrize("call", ["/pause", START, UPDATE, FINISH, "/collective_rpc"])
async def test_a_call_that_fails_gives_no_token_of_uncertain_weights(
    tmp_path: Path, call: str, kind: str
) -> None:
    async with bed(tmp_path) as here:
        reading, _ = await here.streaming()
        here.fake.fault(call, kind)
        with pytest.raises(TransferFailed):
            await here.at("written")
        here.fence.give_up("a call failed")
        await reading.ended()
        assert reading.died is not None
        assert "/resume" not in wire_order(here.fake)
        here.fake.heal()
        await here.engine.start()
        assert here.fake.weights == 0


async def test_tensors_that_pass_unseen_are_not_taken(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        here.fake.unseen = ["a"]
        with pytest.raises(TransferFailed, match="in a way that cannot be seen: a"):
            await here.at("uncertain")


async def test_bytes_that_differ_between_the_ranks_of_a_server_are_not_taken(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        here.fake.ranks, here.fake.torn = 4, 2
        with pytest.raises(TransferFailed, match="rank 2 was given other bytes of a than the first one"):
            await here.at("uncertain")
        assert here.fence.phase is HoldPhase.UNCERTAIN, "its weights are given up with the update"


async def test_a_join_that_vllm_refuses_is_the_trainers_and_changes_nothing(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        do, here.fake._do = here.fake._do, lambda *_: (422, {"error": {"message": "no such field"}})  # type: ignore[method-assign]
        with pytest.raises(TransferRefused, match="no such field"):
            await here.fence.join({}, SOON_S)
        here.fake._do = do  # type: ignore[method-assign]
        here.fence.give_up("it did not join")
        assert here.fence.phase is HoldPhase.FREE
        await here.fence.leave(SOON_S)
        await here.at("held")


@pytest.mark.parametrize(("fault", "within_s"), [("refuse", SOON_S), ("hang", 0.05)])
async def test_a_join_that_fails_or_hangs_ends_the_boot_as_other_ranks_may_wait(
    tmp_path: Path, fault: str, within_s: float
) -> None:
    async with bed(tmp_path) as here:
        reading, _ = await here.streaming()
        here.fake.fault(INIT, fault)
        with pytest.raises(TransferFailed):
            await here.fence.join({}, within_s)
        here.fence.give_up("it did not join")
        await reading.ended()
        assert reading.died is not None


async def test_a_join_amid_the_switch_to_what_was_written_fails_and_leaves_it(tmp_path: Path) -> None:
    """Simulated trainers that pushed again before all replicas served were answered 500."""
    async with bed(tmp_path) as here:
        await here.at("written")
        with pytest.raises(TransferFailed, match="an update before are written in vLLM"):
            await here.fence.join({"master_address": "h"}, SOON_S)
        assert here.fence.phase is HoldPhase.WRITTEN


async def test_a_switch_and_a_pause_wait_while_ranks_join(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        gate = here.fake.gates[INIT] = asyncio.Event()
        joining = asyncio.create_task(here.fence.join({}, SOON_S))
        await until(lambda: INIT in wire_order(here.fake))
        await here.engine.stage("step-2", write_weights(tmp_path / "step-2", 2))
        others = [asyncio.create_task(here.engine.commit("step-2")), asyncio.create_task(here.engine.pause())]
        for _ in range(20):
            await asyncio.sleep(0)
        assert wire_order(here.fake) == [INIT]
        gate.set()
        await asyncio.gather(joining, *others)
        assert (here.fake.weights, here.fake.paused, here.fence.phase) == (2, True, HoldPhase.FREE)


@pytest.mark.parametrize("call", ["join", "hold"])
async def test_a_call_of_a_group_that_is_over_by_the_time_the_server_is_free_does_nothing(
    tmp_path: Path, call: str
) -> None:
    async with bed(tmp_path) as here:
        gate = here.fake.gates["/collective_rpc"] = asyncio.Event()
        await here.engine.stage("step-2", write_weights(tmp_path / "step-2", 2))
        switching = asyncio.create_task(here.engine.commit("step-2"))
        await until(lambda: "/collective_rpc" in wire_order(here.fake))
        waiting = here.fence.join({}, SOON_S) if call == "join" else here.fence.hold(SOON_S)
        task = asyncio.create_task(waiting)
        await asyncio.sleep(0)
        here.fence.give_up_unfinished("the trainer left")
        gate.set()
        await switching
        with pytest.raises(TransferFailed, match="the update is over"):
            await task
        assert INIT not in wire_order(here.fake)
        assert (here.fence.phase, here.fake.paused) == (HoldPhase.FREE, False)
        await here.at("held")


async def test_a_pause_does_not_wait_for_a_trainer_and_outlives_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "LOOK_S", 0.01)
    async with bed(tmp_path) as here:
        await here.fence.join({}, SOON_S)
        gate = here.fake.gates["/pause"] = asyncio.Event()
        holding = asyncio.create_task(here.fence.hold(SOON_S))
        await until(lambda: "/pause" in wire_order(here.fake))
        # It begins to wait for the lock before the server stands still.
        pausing = asyncio.create_task(here.engine.pause())
        await asyncio.sleep(0)
        gate.set()
        await holding
        async with asyncio.timeout(SOON_S):
            await pausing
        here.fence.give_up("dropped")
        await until(lambda: here.fence.phase is HoldPhase.FREE)
        assert here.fake.paused
        await here.engine.resume()
        assert not here.fake.paused


async def test_a_server_that_is_restarted_ends_the_part_of_its_ranks_and_no_old_timer_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bed(tmp_path) as here:
        ended: list[str] = []
        here.fence.on_end = ended.append
        await here.at("written")
        timer = here.fence._timer
        assert timer is not None
        launched: list[HoldPhase] = []

        async def launch() -> None:
            launched.append(here.fence.phase)
            here.fence.began()

        async def close() -> None:
            pass

        # As of a server of its own.
        monkeypatch.setattr(here.engine, "_attached", False)
        monkeypatch.setattr(here.engine, "_launch", launch)
        monkeypatch.setattr(here.engine._server, "close", close)
        await here.engine._renew()
        assert (launched, here.fence.phase) == ([HoldPhase.LOST], HoldPhase.FREE)
        assert ended == ["vLLM was restarted, as its weights failed their check"]
        monkeypatch.undo()
        assert timer.cancelled()


async def test_another_switch_waits_until_no_tensor_may_come(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        await here.at("uncertain")
        await here.engine.stage("step-2", write_weights(tmp_path / "step-2", 2))
        switching = asyncio.create_task(here.engine.commit("step-2"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not switching.done()
        await here.fence.finish(SOON_S)
        await switching
        assert (here.fake.weights, here.fake.paused) == (2, False)
        assert here.fence.phase is HoldPhase.FREE


async def test_a_switch_that_waits_ends_with_the_server(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        await here.at("uncertain")
        await here.engine.stage("step-2", write_weights(tmp_path / "step-2", 2))
        switching = asyncio.create_task(here.engine.commit("step-2"))
        await asyncio.sleep(0)
        here.fence.give_up("the trainer died")
        with pytest.raises((EngineDied, StagingFailed)):
            await switching


async def test_written_weights_do_not_wait_for_a_switch_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_place, "LONGER_S", -SOON_S)
    async with bed(tmp_path) as here:
        await here.at("written")
        await until(lambda: here.fence.phase is HoldPhase.LOST)


async def test_written_weights_that_cannot_be_switched_to_are_given_up(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        await here.at("held")
        here.engine.unfit("another")
        assert here.fence.phase is HoldPhase.HELD
        here.fence.give_up("dropped")
        await until(lambda: here.fence.phase is HoldPhase.FREE)
        await here.at("written")
        here.engine.unfit("step-1")
        assert here.fence.phase is HoldPhase.LOST


async def test_a_pause_of_the_trainer_outlives_the_switch(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        await here.engine.pause()
        await here.at("written")
        await here.engine.stage("step-1", here.files)
        await here.engine.commit("step-1")
        assert here.fake.paused
        await here.at("written")
        await here.engine.resume()
        assert here.fake.paused
        await here.engine.stage("step-1", here.files)
        await here.engine.commit("step-1")
        assert not here.fake.paused


async def test_the_card_says_the_backend_and_the_ranks(tmp_path: Path) -> None:
    def eight(fake: FakeVllm) -> None:
        fake.ranks = 8

    async with attached(tmp_path, set_up=eight, weight_transfer="nccl") as (engine, _):
        card = (await engine.start()).card
        assert (card.weight_transfer, card.ranks) == ("nccl", 8)


@pytest.mark.parametrize("checks_in_pause", [True, False])
@pytest.mark.parametrize("paused", [True, False])
async def test_no_check_is_computed_with_weights_that_a_trainer_has_hold_of(
    tmp_path: Path, paused: bool, checks_in_pause: bool
) -> None:
    def check(name: str) -> GenerateRequest:
        return asking(name, max_tokens=0, prompt_records=3, urgent=True)

    async with bed(tmp_path, checks_in_pause=checks_in_pause) as here:
        await here.fence.join({"master_address": "h"}, SOON_S)
        if paused:
            await here.engine.pause()
        if paused and not checks_in_pause:
            # It would be computed after the pause. The update does not wait for that.
            await here.fence.hold(SOON_S)
            return
        here.fake.hold_scores = True
        running = Reading(here.engine, check("running"))
        await until(lambda: len(here.fake.scores) == 1, "the check reaches the server")
        holding = asyncio.create_task(here.fence.hold(SOON_S))
        await until(lambda: here.fence.phase is HoldPhase.PAUSING, "the trainer is about to take hold")
        late = Reading(here.engine, check("late"))
        # A round trip to the server.
        await here.engine._control.ranks()
        assert not holding.done()
        assert len(here.fake.scores) == 1, "a check began although a trainer takes hold"
        here.fake.scores[0].gate.set()
        assert (await running.ended()).errors == []
        await holding
        assert here.fence.phase is HoldPhase.HELD
        await here.engine._control.ranks()
        assert len(here.fake.scores) == 1
        await late.stop()


async def test_a_server_without_weight_transfer_takes_none(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, _):
        assert engine.in_place is None
        card = (await engine.start()).card
        assert (card.weight_transfer, card.ranks) == ("", 1)


def test_the_server_gets_the_backend_and_the_extension_that_shows_what_comes(tmp_path: Path) -> None:
    python = str(tmp_path / "bin" / "python")
    command = command_line(python, tmp_path, "m", 1, 0, (), "nccl")
    assert command[command.index("--weight-transfer-config") + 1] == '{"backend": "nccl"}'
    assert command[command.index("--worker-extension-cls") + 1] == "midstream_vllm_transfer.TransferWorker"
    for backend, args in (
        ("sparse_nccl", ()),
        ("ipc", ()),
        ("nccl", ("--enable-lora",)),
        ("nccl", ("--worker-extension-cls", "x")),
    ):
        with pytest.raises(ConfigError):
            command_line(python, tmp_path, "m", 1, 0, args, backend)


def test_no_phase_with_uncertain_weights_computes_again_without_a_switch() -> None:
    for (phase, event), (to, action) in HOLDS.items():
        if phase in (HoldPhase.UNCERTAIN, HoldPhase.WRITTEN) and to is HoldPhase.FREE:
            assert event in (HoldEvent.SWITCHED, HoldEvent.BEGAN), (phase, event)
        if action is HoldAction.RESUME:
            assert phase in (HoldPhase.HELD, HoldPhase.PAUSED_IN_VAIN)
    assert VllmSettings().weight_transfer == ""


class Bare:
    """A fence without a server. Each call waits for its gate where there is one."""

    def __init__(self) -> None:
        self.boot = ServerBoot("vLLM")
        self.boot.begin()
        self.lock = asyncio.Lock()
        self.gates: dict[str, asyncio.Event] = {}
        self.tasks: list[asyncio.Task[None]] = []
        calls = (self.lock, lambda: self._passes("pause"), lambda: self._passes("resume"), self.kill)
        self.fence = VllmInPlace("gloo", lambda: self, self.boot, *calls)  # type: ignore[arg-type,return-value]
        self.fence.began()

    async def _passes(self, call: str) -> None:
        if call in self.gates:
            await self.gates[call].wait()

    async def transfer(self, path: str, body: object, within_s: float) -> None:
        await self._passes(path)

    async def read_all(self, within_s: float) -> None:
        await asyncio.sleep(0)

    async def ask_workers(self, method: str, arguments: object, within_s: float) -> list[dict[str, Any]]:
        return [{"first": True, "missing": [], "digests": {}, "parts": {}, "finite": True}]

    def kill(self, reason: str) -> None:
        self.boot.end(reason)
        self.fence.ended(reason)

    def restart(self) -> None:
        self.kill("restarted")
        self.boot.begin()
        self.fence.began()

    def switch(self) -> None:
        if not self.lock.locked() and self.boot.running:
            self.fence.switched()

    async def do(self, work: Coroutine[Any, Any, None], blocked: str = "") -> None:
        """Begin it; it ends unless one of its calls is blocked."""
        if blocked:
            self.gates[blocked] = asyncio.Event()
        self.tasks.append(asyncio.create_task(work))
        await self.turns()

    async def turns(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)

    async def at(self, phase: HoldPhase) -> None:
        fence = self.fence
        match phase:
            case HoldPhase.JOINING:
                await self.do(fence.join({}, SOON_S), INIT)
            case HoldPhase.PAUSING | HoldPhase.PAUSED_IN_VAIN:
                await self.do(fence.hold(SOON_S), "pause")
                if phase is HoldPhase.PAUSED_IN_VAIN:
                    fence.give_up("over")
            case HoldPhase.LOST:
                self.kill("it died")
            case HoldPhase.FREE:
                pass
            case _:
                await self.do(fence.hold(SOON_S))
                if phase is HoldPhase.RESUMING:
                    self.gates["resume"] = asyncio.Event()
                    fence.give_up("over")
                if phase in (HoldPhase.UNCERTAIN, HoldPhase.WRITTEN):
                    await self.do(fence.write({}, TEE, SOON_S))
                if phase is HoldPhase.WRITTEN:
                    await self.do(fence.finish(SOON_S))
        assert fence.phase is phase


TEE = Tee(Path("file"), {"a": (0, 8)}, 8)
#: What others do, whatever the fence does. All but `switch` and `restart` belong to some group, perhaps one that is over.
DEEDS: dict[str, Callable[[Bare], Coroutine[Any, Any, None] | None]] = {
    "join": lambda here: here.fence.join({}, SOON_S),
    "hold": lambda here: here.fence.hold(SOON_S),
    "write": lambda here: here.fence.write({}, TEE, SOON_S),
    "finish": lambda here: here.fence.finish(SOON_S),
    "leave": lambda here: here.fence.leave(SOON_S),
    "give up": lambda here: here.fence.give_up("over"),
    "give up unfinished": lambda here: here.fence.give_up_unfinished("over"),
    "give up written": lambda here: here.fence.give_up_written("over"),
    "switch": lambda here: here.switch(),
    "kill": lambda here: here.kill("it died"),
    "restart": lambda here: here.restart(),
}


@pytest.mark.parametrize("phase", list(HoldPhase))
async def test_whatever_happens_in_any_phase_is_a_move_or_a_failure_of_the_call(phase: HoldPhase) -> None:
    for first, second in itertools.product(DEEDS, repeat=2):
        here = Bare()
        await here.at(phase)
        for name in (first, second):
            done = DEEDS[name](here)
            if done is not None:
                await here.do(done)
        for gate in here.gates.values():
            gate.set()
        await here.turns()
        # The end of the group.
        here.fence.give_up("over")
        await here.turns()
        assert here.fence.phase in (HoldPhase.FREE, HoldPhase.LOST), (first, second)
        assert not here.lock.locked(), (first, second)
        assert (here.fence.phase is HoldPhase.FREE) == here.boot.running, (first, second)
        for task in here.tasks:
            assert task.done(), (first, second)
            assert isinstance(task.exception(), TransferFailed | None), (first, second)


def test_the_end_of_a_group_or_of_a_server_is_a_move_in_every_phase() -> None:
    always = (HoldEvent.GIVE_UP, HoldEvent.ENDED, HoldEvent.BEGAN)
    assert [(phase, event) for phase in HoldPhase for event in always if (phase, event) not in HOLDS] == []
