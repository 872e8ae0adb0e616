"""A LoRA run's saved weights where replicas serve adapters side by side, and where they do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from training_fakes import TENANT, World, world

from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.store import SamplingSession
from midstream_tinker.trainer import protocol as m
from midstream_tinker.trainer.types import WorkFailed
from midstream_tinker.types import CreateSamplingSessionBody, SaveWeightsForSamplerBody

KEY = "tml-key"


@asynccontextmanager
async def play(root: Path, **options: Any) -> AsyncIterator[World]:
    async with world(root, **{"several": True, **options}) as at, asyncio.timeout(120):
        yield at


async def save(at: World, model: str, seq_id: int, name: str | None = None, seq: int | None = None) -> str:
    body = SaveWeightsForSamplerBody(model_id=model, seq_id=seq_id, path=name, sampling_session_seq_id=seq)
    return await at.training.submit(TENANT, KEY, body)


async def saved(at: World, model: str, seq_id: int, name: str) -> str:
    return str((await at.result(await save(at, model, seq_id, name)))["path"])


async def unnamed(at: World, model: str, seq_id: int, seq: int) -> SamplingSession:
    made = await at.result(await save(at, model, seq_id, seq=seq))
    session = at.store.sampling_session(TENANT, made["sampling_session_id"])
    assert session is not None
    return session


async def session_of(at: World, path: str, seq: int = 0) -> SamplingSession:
    body = CreateSamplingSessionBody(session_id=at.session, sampling_session_seq_id=seq, model_path=path)
    return await at.training.create_sampling_session(TENANT, KEY, body)


def exports(at: World) -> list[bool]:
    """Of each export, whether it was of an adapter."""
    return [said.adapter for said in at.trainer.said if isinstance(said, m.ExportWeights)]


async def test_a_saved_path_is_an_adapter_that_a_policy_of_its_own_serves(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        path = await saved(at, model, 1, "best")
        run = f"tinker-{at.session.removeprefix('session_')}-0"
        assert exports(at) == [True]
        assert at.publish.adapters == {f"{run}-1-best"}
        assert at.policies.loaded == {}
        session = await session_of(at, path)
        assert (session.policy, session.snapshot, session.model_path) == ("adapter", f"{run}-1-best", path)
        assert at.policies.loaded == {f"{run}-1": f"{run}-1-best"}
        assert await session_of(at, path) == session
        assert len(at.policies.said) == 1
        # The deployment's own weights have not changed.
        assert at.publish.serving == []


async def test_weights_without_a_name_serve_when_their_client_is_made(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        one, other = await at.model(0), await at.model(1)
        sessions = [
            await unnamed(at, one, 1, 4),
            await unnamed(at, other, 1, 5),
            await unnamed(at, one, 2, 6),
        ]
        assert {session.policy for session in sessions} == {"adapter"}
        assert len({session.snapshot for session in sessions}) == 3
        # Two at once; the oldest is loaded again when it is sampled.
        assert set(at.policies.loaded.values()) == {session.snapshot for session in sessions[1:]}
        assert at.publish.serving == []


@pytest.mark.parametrize(
    ("options", "rank"), [({"several": False}, 8), ({"adapters_max": 0}, 8), ({}, 0), ({}, 512)]
)
async def test_where_there_are_no_policies_or_no_adapter_of_that_rank_weights_are_whole(
    tmp_path: Path, options: dict[str, Any], rank: int
) -> None:
    async with play(tmp_path, **options) as at:
        model = await at.model(rank=rank)
        session = await unnamed(at, model, 1, 4)
        path = await saved(at, model, 2, "best")
        assert exports(at) == [False, False]
        assert session.policy == "run"
        assert (await session_of(at, path, 5)).policy == "exact"
        assert [identity for identity, _ in at.publish.serving] == [session.snapshot, f"{session.run}-2-best"]
        assert at.policies.said == []


async def test_an_adapter_saved_where_they_were_served_is_refused_in_words_where_they_are_not(
    tmp_path: Path,
) -> None:
    paths = []

    async def before(at: World) -> None:
        paths.append(await saved(at, await at.model(), 1, "best"))

    async def after(at: World) -> None:
        at.new_session()
        at.publish.adapters.add(str(at.store.checkpoints(TENANT)[0].snapshot))
        with pytest.raises(TinkerRefusal, match="adapters_max") as refused:
            await session_of(at, paths[0])
        assert refused.value.status == 400

    async with play(tmp_path) as at:
        await before(at)
    async with play(tmp_path, adapters_max=0) as at:
        await after(at)


async def test_an_adapter_that_replicas_refuse_is_its_own_runs_error(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        bad, good = await at.model(0), await at.model(1)
        path = await saved(at, bad, 1, "best")

        def refuse(what: str, policy: str) -> None:
            if what == "load" and policy.rpartition("-")[0].endswith("-0"):
                raise WorkFailed("replica-0 could not load it: q_proj has another shape", "unknown")

        at.policies.before = refuse
        message, category = await at.error(await save(at, bad, 2, seq=3))
        assert "q_proj has another shape" in message
        assert category == "unknown"
        with pytest.raises(TinkerRefusal, match="q_proj has another shape") as refused:
            await session_of(at, path, 4)
        assert (refused.value.status, refused.value.param) == (422, "model_path")
        assert at.store.sampling_sessions(TENANT, at.session) == []
        # What nobody can sample leaves the bucket; what has a name stays.
        assert [name.endswith("-1-best") for name in at.publish.bucket] == [True]
        assert (await unnamed(at, good, 1, 5)).snapshot in at.policies.loaded.values()


async def test_of_a_runs_unnamed_adapters_the_newest_stay_and_the_files_of_others_go(tmp_path: Path) -> None:
    async with play(tmp_path, unnamed_kept=2) as at:
        run, other = await at.model(0), await at.model(1)
        path = await saved(at, run, 1, "best")
        kept = await unnamed(at, other, 1, 10)
        sessions = [await unnamed(at, run, seq_id, seq_id) for seq_id in range(2, 7)]
        left = {str(at.store.checkpoint(TENANT, path).snapshot), kept.snapshot}  # type: ignore[union-attr]
        assert set(at.publish.bucket) == left | {session.snapshot for session in sessions[-2:]}
        there = [at.store.sampling_session(TENANT, session.id) is not None for session in sessions]
        assert there == [False, False, False, True, True]


async def test_one_that_a_sample_still_uses_stays_until_the_next_is_saved(tmp_path: Path) -> None:
    async with play(tmp_path, unnamed_kept=1, adapters_max=3) as at:
        model = await at.model()
        first = await unnamed(at, model, 1, 1)
        async with at.adapters.use(str(first.snapshot)):
            await unnamed(at, model, 2, 2)
            assert first.snapshot in at.publish.bucket
        await unnamed(at, model, 3, 3)
        assert first.snapshot not in at.publish.bucket


async def test_after_a_restart_unnamed_adapters_of_sessions_that_are_gone_leave_the_bucket(
    tmp_path: Path,
) -> None:
    snapshots = []

    async def before(at: World) -> None:
        snapshots.append((await unnamed(at, await at.model(), 1, 1)).snapshot)

    async def after(at: World) -> None:
        at.publish.bucket[str(snapshots[0])] = []
        at.store.drop_unnamed(str(snapshots[0]).rpartition("-")[0], 0)
        at.new_session()
        newer = await unnamed(at, await at.model(), 1, 1)
        assert set(at.publish.bucket) == {newer.snapshot}

    async with play(tmp_path) as at:
        await before(at)
    async with play(tmp_path) as at:
        await after(at)


async def test_a_run_that_loads_holds_up_no_other(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        slow, quick = await at.model(0), await at.model(1)
        gate = asyncio.Event()

        def before(what: str, policy: str) -> Awaitable[object] | None:
            return gate.wait() if policy.rpartition("-")[0].endswith("-0") else None

        at.policies.before = before
        waiting = await save(at, slow, 1, seq=1)
        assert (await unnamed(at, quick, 1, 2)).policy == "adapter"
        assert not at.future(waiting).done
        gate.set()
        await at.result(waiting)
