"""Weights that vLLM's workers stage: what serves when staging or the switch fails, and what a server must show at its start."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeVllm, until, weights_of, write_weights
from vllm_helpers import asking, attached, begun

from midstream.engine.base import StagingFailed
from midstream.engine.servers.control import ServerRefused
from midstream.engine.servers.switching import NotExact
from midstream.engine.vllm import server_proofs
from midstream.engine.vllm.arguments import WORKER
from midstream.engine.vllm.beside import CannotStage, WorkerWeights, prove_staging
from midstream.engine.vllm.engine import VllmEngine
from midstream.engine.vllm.staging import Staging


@asynccontextmanager
async def proved(folder: Path, **settings: Any) -> AsyncIterator[tuple[VllmEngine, FakeVllm]]:
    """An engine on a server that has passed the proof."""
    async with attached(folder, **settings) as (engine, fake):
        engine._stager.workers = WorkerWeights(engine._control, 20.0)
        yield engine, fake


def rpcs(fake: FakeVllm) -> list[str]:
    return [call for call in fake.calls if call == "/collective_rpc"]


async def test_a_switch_to_staged_weights_loads_nothing_and_labels_every_token(tmp_path: Path) -> None:
    async with proved(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(max_tokens=6))
        request.step(2)
        await until(lambda: len(reading.records()) == 2)
        loads = fake.loads
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        assert (fake.weights, fake.loads, fake.paused) == (0, loads, False)
        request.step(1)
        await until(lambda: len(reading.records()) == 3)
        await engine.commit("step-1")
        assert (fake.weights, fake.loads, fake.switches) == (1, loads, 1)
        request.to_the_end()
        assert (await reading.ended()).labels() == ["base"] * 3 + ["step-1"] * 3
        assert [weights_of(record) for record in reading.records()] == [0] * 3 + [1] * 3
        await until(lambda: fake.drops == 1, "what was replaced is freed")


async def test_weights_that_vllm_cannot_load_fail_without_a_pause(tmp_path: Path) -> None:
    async with proved(tmp_path) as (engine, fake):
        with pytest.raises(StagingFailed, match="could not load the snapshot: a tensor is missing"):
            await engine.stage("bad", write_weights(tmp_path / "bad", -1))
        await until(lambda: fake.drops == 1, "the memory is given back")
        assert not [call for call in fake.calls if call.startswith("/pause")]
        assert fake.weights == 0
        with pytest.raises(StagingFailed, match="is not staged"):
            await engine.commit("bad")


@pytest.mark.parametrize("where", ["at once", "in the thread"])
async def test_without_memory_the_files_are_loaded_in_place(tmp_path: Path, where: str) -> None:
    async with proved(tmp_path) as (engine, fake):
        if where == "at once":
            fake.no_staging = "it takes 9 MiB of memory, and 1 MiB are free"
        else:
            fake.look = ("refused", "it takes 9 MiB of memory, and 1 MiB are free")
        loads = fake.loads
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        await engine.commit("step-1")
        assert (fake.weights, fake.loads, fake.switches) == (1, loads + 1, 0)
        await until(lambda: fake.drops == 1)


@pytest.mark.parametrize("how", ["refused", "without workers"])
async def test_files_are_loaded_in_place_when_no_worker_loads_any_more(tmp_path: Path, how: str) -> None:
    """The end of a load in a worker sets what is one for all threads of vLLM."""

    async with proved(tmp_path) as (engine, fake):
        fake.busy, fake.look = True, ("refused", "it takes longer")
        workers, directory = engine._stager.workers, write_weights(tmp_path / "step-1", 1)
        if how == "without workers":
            engine._stager.workers = None
            await engine.stage("step-1", directory)
            engine._stager.workers = workers

        async def swapping() -> None:
            if how == "refused":
                await engine.stage("step-1", directory)
            await engine.commit("step-1")

        swap = asyncio.create_task(swapping())
        asked = asyncio.create_task(fake.asked_busy.wait())
        await asyncio.wait((swap, asked), return_when=asyncio.FIRST_COMPLETED)
        assert fake.asked_busy.is_set()
        assert not [call for call in fake.calls if call.startswith("/pause")]
        fake.busy = False
        await swap
        assert (fake.weights, fake.switches) == (1, 0)


async def test_workers_that_load_for_too_long_fail_the_snapshot_alone(tmp_path: Path) -> None:
    async with proved(tmp_path) as (engine, fake):
        engine._stager.workers = WorkerWeights(engine._control, 0.2)
        fake.busy, fake.look = True, ("staging", "")
        with pytest.raises(StagingFailed, match=r"vllm\.load_s_max"):
            await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        assert (fake.weights, fake.paused) == (0, False)


async def test_workers_of_several_engines_stage_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def proved_before(*_: object) -> None:
        """It may reload. The fake server does that in a pause alone, and scores nothing there."""

    monkeypatch.setattr(server_proofs, "prove_reload", proved_before)

    async with attached(tmp_path) as (engine, fake):
        # As of a server that midstream started.
        engine._attached, engine._server.extension, engine._server.data_parallel = False, WORKER, True
        assert "--data-parallel-size" in await engine._prove_loads()
        assert engine._stager.workers is None
        assert fake.beside is None
        engine._attached = True


async def test_a_call_that_fails_leaves_the_load_in_place(tmp_path: Path) -> None:
    async with proved(tmp_path) as (engine, fake):
        fake.fault("/collective_rpc", "refuse")
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        await engine.commit("step-1")
        assert (fake.weights, fake.switches) == (1, 0)


async def test_a_newer_snapshot_takes_the_place_of_one_that_is_staged(tmp_path: Path) -> None:
    async with proved(tmp_path) as (engine, fake):
        fake.look = ("staging", "")
        first = asyncio.create_task(
            engine.stage("step-1", write_weights(tmp_path / "step-1", 1)), name="first"
        )
        await until(lambda: fake.beside is not None and len(rpcs(fake)) > 1)
        first.cancel()
        await asyncio.wait((first,))
        fake.look = ("staged", "")
        await engine.stage("step-2", write_weights(tmp_path / "step-2", 2))
        # What gives the first one back may come late, and is not for the second one.
        await until(lambda: not engine._boot._tasks or fake.drops == 1)
        assert fake.beside is not None
        assert fake.beside[1] == 2
        await engine.commit("step-2")
        assert (fake.weights, fake.version) == (2, "1:step-2")


async def test_a_snapshot_that_is_given_up_gives_its_memory_back(tmp_path: Path) -> None:
    async with proved(tmp_path) as (engine, fake):
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        engine.drop_staged()
        await until(lambda: fake.drops == 1)
        assert fake.beside is None
        with pytest.raises(StagingFailed, match="is not staged"):
            await engine.commit("step-1")


async def test_a_switch_that_fails_halfway_is_followed_by_the_old_files(tmp_path: Path) -> None:
    async with proved(tmp_path) as (engine, fake):
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        fake.torn_switch = True
        with pytest.raises(StagingFailed, match="half of the switch"):
            await engine.commit("step-1")
        assert (fake.weights, fake.version, fake.paused) == (0, "0:base", False)


async def test_weights_of_a_server_that_has_gone_are_loaded_from_their_files(tmp_path: Path) -> None:
    async with proved(tmp_path) as (engine, fake):
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        # As a restart between staging and commit does.
        engine._stager.workers = WorkerWeights(engine._control, 20.0)
        await engine.commit("step-1")
        assert (fake.weights, fake.switches) == (1, 0)


async def test_files_beside_a_snapshot_are_refused_before_the_workers_read_any(tmp_path: Path) -> None:
    async with proved(tmp_path) as (engine, fake):
        directory = write_weights(tmp_path / "step-1", 1)
        (directory / "stray.safetensors").write_bytes(b"")
        with pytest.raises(StagingFailed, match=r"stray\.safetensors"):
            await engine.stage("step-1", directory)
        assert rpcs(fake) == []


async def test_staged_weights_are_not_copied_to_memory_as_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proved(tmp_path) as (engine, _):
        copied: list[Path] = []

        async def put(self: Staging, directory: Path) -> Path:
            copied.append(directory)
            return directory

        monkeypatch.setattr(Staging, "put", put)
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        assert copied == []


async def test_an_attached_server_says_why_its_swaps_are_long(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, _):
        card = engine._info().card
        assert not card.has("short_swap")
        assert "midstream starts itself" in card.why["short_swap"]


class Workers:
    """As WorkerWeights, of a server with two kinds of modules, and what they stage. A fault has a name."""

    KINDS = ("norm", "proj")

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.serving = dict.fromkeys(self.KINDS, 1.0)
        self.staged: dict[str, float] | None = None
        self.calls: list[str] = []

    def next(self) -> Workers:
        return self

    async def load(self, own: Path, *, moved: bool = False) -> list[str]:
        self.calls.append("stage")
        if self.fault.startswith("refuses"):
            raise CannotStage("no memory")
        if self.fault == "cannot load its own" and not moved:
            raise StagingFailed("a tensor is missing")
        self.staged = dict.fromkeys(self.KINDS, 2.0 if moved or self.fault == "inexact" else 1.0)
        if self.fault == "touches what serves":
            self.serving["norm"] = 2.0
        return list(self.KINDS)

    async def switch(self, kinds: Sequence[str] | None = None) -> None:
        assert self.staged is not None
        self.calls.append("switch")
        if self.fault == "switch fails":
            raise ServerRefused("half of it")
        stays = {"proj"} if self.fault == "leaves a kind" else set()
        self.serving |= {k: self.staged[k] for k in (kinds or self.KINDS) if k not in stays}

    async def drop(self) -> None:
        self.staged = None

    async def rest(self) -> None:
        self.calls.append("rest")
        if self.fault == "refuses and is busy":
            raise StagingFailed("they still load")

    async def digest(self) -> str:
        odd = self.fault == "other bytes" and self.calls.count("switch") > 2
        return f"{self.serving} {odd}"

    async def reload(self) -> None:
        self.calls.append("reload")
        if self.fault == "never back":
            return
        self.serving = dict.fromkeys(self.KINDS, 1.0)

    async def score(self) -> list[float]:
        if self.fault == "not finite" and self.serving["norm"] == 2.0:
            raise NotExact("vLLM did not score a prompt")
        return [-self.serving["norm"], -self.serving["norm"] - self.serving["proj"] / 10]


def prove(workers: Any) -> str:
    return asyncio.run(prove_staging(workers, workers.score, Path("/own"), workers.reload, workers.digest))


def test_a_server_that_stages_and_switches_by_every_kind_is_proved() -> None:
    workers = Workers()
    assert prove(workers) == ""
    assert workers.calls == ["stage", "switch", "switch", "stage", "switch"]
    assert workers.serving == {"norm": 1.0, "proj": 1.0}
    assert workers.staged is None


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("refuses", "no memory"),
        ("touches what serves", "computes other numbers"),
        ("leaves a kind", "other weights in proj change nothing"),
        ("switch fails", "half of it"),
        ("cannot load its own", "a tensor is missing"),
        ("inexact", "differ by 1.1"),
        ("other bytes", "have another digest"),
        ("not finite", "did not score"),
    ],
)
def test_a_server_that_fails_says_why_and_has_its_own_weights_again(fault: str, why: str) -> None:
    workers = Workers(fault)
    assert why in prove(workers)
    assert workers.calls[-2:] == ["rest", "reload"]
    assert workers.serving == {"norm": 1.0, "proj": 1.0}


def test_a_server_that_does_not_get_its_own_weights_back_is_not_used() -> None:
    workers = Workers("touches what serves")

    async def nothing() -> None:
        workers.calls.append("reload")

    with pytest.raises(NotExact, match="own weights back"):
        asyncio.run(prove_staging(workers, workers.score, Path("/own"), nothing, workers.digest))  # type: ignore[arg-type]


def test_a_server_whose_workers_do_not_end_is_not_used_and_says_what_to_do() -> None:
    with pytest.raises(NotExact, match=r"they still load.*vllm\.stage_weights"):
        prove(Workers("refuses and is busy"))


def test_numbers_that_are_not_finite_prove_nothing() -> None:
    workers = Workers()
    scores = iter([[-1.0], [math.nan]])

    async def score() -> list[float]:
        return next(scores, [-1.0])

    why = asyncio.run(prove_staging(workers, score, Path("/own"), workers.reload, workers.digest))  # type: ignore[arg-type]
    assert "computes other numbers" in why
