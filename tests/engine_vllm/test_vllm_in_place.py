"""Weights that a trainer writes into a vLLM server: nothing is computed until they are switched to, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_vllm import FakeVllm, until, write_weights
from test_vllm_swap import labelled_right, wire_order
from vllm_helpers import Reading, asking, attached, begun, in_a_loop

from midstream.core.config import VllmSettings
from midstream.core.errors import ConfigError
from midstream.engine.base import EngineDied, StagingFailed, Tee, TransferFailed, TransferRefused
from midstream.engine.vllm import in_place
from midstream.engine.vllm.arguments import command_line
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
        await self.fence.write({"names": ["a"], "number": 1}, Tee(file, {"a": (0, 8)}), SOON_S)
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
async def bed(folder: Path) -> AsyncIterator[Bed]:
    async with attached(folder, weight_transfer="gloo") as (engine, fake):
        yield Bed(engine, fake, folder)


@in_a_loop
async def test_what_was_written_is_switched_to_without_a_load(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        reading, _ = await here.streaming()
        await here.at("written")
        assert (here.fake.weights, here.fake.paused) == (1, True)
        await here.engine.stage("step-1", here.files)
        timing = await here.engine.commit("step-1")
        assert timing.streams_crossed == 1
        assert wire_order(here.fake) == [
            INIT, "/pause", "/is_paused", "/is_paused", START, "/collective_rpc", UPDATE, "/collective_rpc",
            FINISH, "/update_weight_version", "/resume",
        ]  # fmt: skip
        here.fake.requests[0].to_the_end()
        await reading.ended()
        assert reading.labels() == ["base"] * 3 + ["step-1"] * 3
        assert labelled_right([reading])
        # The next update begins like the first.
        await here.at("uncertain")


@in_a_loop
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


@in_a_loop
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
@in_a_loop
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
@in_a_loop
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


@in_a_loop
async def test_tensors_that_pass_unseen_are_not_taken(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        here.fake.unseen = ["a"]
        with pytest.raises(TransferFailed, match="in a way that cannot be seen: a"):
            await here.at("uncertain")


@in_a_loop
async def test_a_join_that_is_answered_changes_nothing_and_one_that_hangs_ends_the_boot(
    tmp_path: Path,
) -> None:
    async with bed(tmp_path) as here:
        reading, _ = await here.streaming()
        here.fake.fault(INIT, "refuse")
        with pytest.raises(TransferFailed, match="made up by the test"):
            await here.fence.join({}, SOON_S)
        here.fence.give_up("it did not join")
        assert here.fence.phase is HoldPhase.FREE
        await here.fence.leave(SOON_S)
        here.fake.fault(INIT, "hang")
        with pytest.raises(TransferFailed):
            await here.fence.join({}, 0.05)
        here.fence.give_up("it did not join")
        await reading.ended()
        assert reading.died is not None


@in_a_loop
async def test_a_join_amid_the_switch_to_what_was_written_fails_and_leaves_it(tmp_path: Path) -> None:
    """Simulated trainers that pushed again before all replicas served were answered 500."""
    async with bed(tmp_path) as here:
        await here.at("written")
        with pytest.raises(TransferFailed, match="an update before are written in vLLM"):
            await here.fence.join({"master_address": "h"}, SOON_S)
        assert here.fence.phase is HoldPhase.WRITTEN


@in_a_loop
async def test_a_refusal_by_vllm_is_the_trainers(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        here.fake._do = lambda *_: (422, {"error": {"message": "no such field"}})  # type: ignore[method-assign]
        with pytest.raises(TransferRefused, match="no such field"):
            await here.fence.join({}, SOON_S)


@in_a_loop
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


@in_a_loop
async def test_a_switch_that_waits_ends_with_the_server(tmp_path: Path) -> None:
    async with bed(tmp_path) as here:
        await here.at("uncertain")
        await here.engine.stage("step-2", write_weights(tmp_path / "step-2", 2))
        switching = asyncio.create_task(here.engine.commit("step-2"))
        await asyncio.sleep(0)
        here.fence.give_up("the trainer died")
        with pytest.raises((EngineDied, StagingFailed)):
            await switching


@in_a_loop
async def test_written_weights_do_not_wait_for_a_switch_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_place, "LONGER_S", -SOON_S)
    async with bed(tmp_path) as here:
        await here.at("written")
        await until(lambda: here.fence.phase is HoldPhase.LOST)


@in_a_loop
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


@in_a_loop
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


@in_a_loop
async def test_the_card_says_the_backend_and_the_ranks(tmp_path: Path) -> None:
    def eight(fake: FakeVllm) -> None:
        fake.ranks = 8

    async with attached(tmp_path, set_up=eight, weight_transfer="nccl") as (engine, _):
        card = (await engine.start()).card
        assert (card.weight_transfer, card.ranks) == ("nccl", 8)


@in_a_loop
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
