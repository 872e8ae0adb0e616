"""Policies at one replica: whose message counts, and what the end of one leaves to the requests that run under it."""

import asyncio
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import httpx
from replica_fakes import FakeEngine, Running, record, running, sse
from test_replica_pins import BODY, labels

from midstream.core.errors import HEADER_ANOTHER_BOOT, HEADER_NOT_LOADED
from midstream.core.headers import HEADER_POLICY
from midstream.core.types import GenerateRequest, GenerationEvent, Stage, SwapTiming
from midstream.engine.base import Slot, StagingFailed
from midstream.replica.policy import UNUSED_S

UNDER = {HEADER_POLICY: "red"}
SAMPLE = BODY | {"model": "accounts/local/models/red"}


class _OneSlot(Slot):
    proves_staged = True

    def __init__(self, name: str, engine: "ManyPolicies") -> None:
        self._name = name
        self._engine = engine
        self._staged: str | None = None

    async def stage(self, snapshot: str, directory: Path) -> None:
        self._staged = snapshot

    def drop_staged(self) -> None:
        self._staged = None

    async def commit(self, snapshot: str) -> SwapTiming:
        if self._staged != snapshot:
            raise StagingFailed(f"{snapshot} is not staged")
        self._engine.served[self._name] = snapshot
        return SwapTiming(snapshot=snapshot, pause_ms=0.0, streams_crossed=0)

    def retain(self, snapshots: Collection[str]) -> None:
        pass

    async def weights_digest(self) -> str | None:
        return f"digest of {self._engine.served[self._name]}"


class ManyPolicies(FakeEngine):
    """served: by the engine's name of a policy, its snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.served: dict[str, str] = {}
        self.ended_policies: list[str] = []

    def slot(self, policy: str) -> Slot:
        return _OneSlot(policy, self)

    def end_policy(self, policy: str) -> None:
        self.ended_policies.append(policy)
        self.served.pop(policy, None)

    async def _events(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        """Each token is of what the policy serves when it is made, as an engine has it."""
        async for event in super()._events(request):
            if not event.tokens:
                yield event
                continue
            if request.policy not in self.served:
                yield GenerationEvent(error=f"{request.policy} is not loaded")
                return
            at = len(request.prompt) + self.made_of[request.request_id, event.index] - 1
            token = record(event.tokens[0].token_id, at, request, self.served[request.policy], prompt=False)
            yield GenerationEvent(index=event.index, tokens=(token,), finish=event.finish)


async def desire(
    here: Running, made: float, snapshot: str, policy: str = "red", *, taken: bool = True
) -> None:
    body = {
        "policy": policy,
        "made": made,
        "snapshot": snapshot,
        "generation": 1,
        "url": f"file:///b/{snapshot}",
    }
    answer = await here.http.post("/replica/desired", json=body)
    assert answer.status_code == (202 if taken else 429), answer.text


async def end(here: Running, made: float) -> bool:
    answer = await here.http.post("/replica/policy/end", json={"policy": "red", "made": made})
    return bool(answer.json()["ended"])


def reported(here: Running) -> dict[float, str]:
    return {policy.made: policy.snapshot for policy in here.replica.report().others}


async def sampling(here: Running, **fields: Any) -> asyncio.Task[httpx.Response]:
    """A stream that has given two tokens and waits for more to be allowed."""
    here.engine.allow(2)
    known = len(here.engine.requests)
    body = SAMPLE | fields
    task = asyncio.create_task(here.http.post("/v1/completions", json=body, headers=UNDER))
    await here.engine.until(
        lambda: (
            len(here.engine.requests) > known
            and here.engine.made.get(here.engine.requests[-1].request_id) == 2
        )
    )
    return task


async def test_an_ended_policys_requests_go_on_to_their_end_and_the_engine_has_it_until_then(
    tmp_path: Path,
) -> None:
    engine = ManyPolicies()
    async with running(tmp_path, engine) as here:
        await desire(here, 1.0, "red-1")
        await here.until(lambda: reported(here) == {1.0: "red-1"})
        stream = await sampling(here)
        assert await end(here, 1.0)
        assert reported(here) == {}
        refused = await here.http.post("/v1/completions", json=SAMPLE, headers=UNDER)
        assert refused.status_code == 503
        assert here.replica.report().in_flight == 1, "a drain has to see it"
        # One of the same name comes while the request runs.
        await desire(here, 2.0, "red-2")
        await here.until(lambda: reported(here) == {2.0: "red-2"})
        assert engine.ended_policies == []
        engine.allow(10)
        assert labels((await stream).text) == ["red-1"] * 6
        assert sse((await stream).text)[-1] == "[DONE]"
        await here.until(lambda: here.replica.report().in_flight == 0)
        newer = await here.http.post("/v1/completions", json=SAMPLE, headers=UNDER)
        assert labels(newer.text) == ["red-2"] * 6
        assert engine.ended_policies == ["red#1"]


async def test_messages_of_an_older_policy_of_the_name_change_nothing_for_the_newer(tmp_path: Path) -> None:
    engine = ManyPolicies()
    async with running(tmp_path, engine) as here:
        await desire(here, 2.0, "new")
        await here.until(lambda: reported(here) == {2.0: "new"})
        await desire(here, 1.0, "old")
        assert not await end(here, 1.0)
        assert reported(here) == {2.0: "new"}
        assert engine.ended_policies == []
        assert await end(here, 2.0)
        for made in (1.0, 2.0):
            await desire(here, made, "late")
        assert reported(here) == {}
        await desire(here, 3.0, "newest")
        await here.until(lambda: reported(here) == {3.0: "newest"})


async def test_a_drain_waits_for_the_requests_of_a_policy_that_was_just_ended(tmp_path: Path) -> None:
    async with running(tmp_path, ManyPolicies()) as here:
        await desire(here, 1.0, "red-1")
        await here.until(lambda: reported(here) == {1.0: "red-1"})
        stream = await sampling(here)
        # Nothing runs between the two.
        here.replica.policies.end("red", 1.0)
        drained = asyncio.create_task(here.replica.drained())
        here.engine.allow(5)
        await here.engine.until(lambda: here.engine.made[here.engine.requests[-1].request_id] == 5)
        assert not drained.done()
        here.engine.allow(6)
        assert labels((await stream).text) == ["red-1"] * 6
        await drained


async def test_a_replica_that_takes_no_more_requests_takes_none_of_a_new_policy_either(
    tmp_path: Path,
) -> None:
    """Two gateways may differ for a second on whether it is to go. The new policy's gate was open, so its requests were cut."""
    async with running(tmp_path, ManyPolicies()) as here:
        await here.replica.drained()
        body = {"policy": "red", "made": 1.0, "snapshot": "red-1", "generation": 1, "url": "file:///b/red-1"}
        answer = await here.http.post("/replica/desired", json=body)
        assert (answer.status_code, HEADER_ANOTHER_BOOT in answer.headers) == (503, True)
        assert list(here.replica.policies) == [here.replica.own]


async def test_a_boot_ends_without_waiting_for_an_ended_policys_requests(tmp_path: Path) -> None:
    engine = ManyPolicies()
    async with running(tmp_path, engine) as here:
        await desire(here, 1.0, "red-1")
        await here.until(lambda: reported(here) == {1.0: "red-1"})
        stream = await sampling(here)
        assert await end(here, 1.0)
        here.replica.policies.shut()
        await here.replica.policies.close()
        assert here.replica.policies.everyone == [here.replica.own]
        stream.cancel()


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def names(here: Running) -> set[str]:
    return {policy.policy for policy in here.replica.report().others}


async def loaded(here: Running, *policies: str) -> None:
    for policy in policies:
        await desire(here, 1.0, f"{policy}-1", policy)
        await here.until(lambda policy=policy: served_here(here, policy))  # type: ignore[misc]
        await at_rest(here)


async def at_rest(here: Running) -> None:
    """Old files are released after a load, which no report tells."""
    while not all(policy.driver.resting for policy in here.replica.policies):  # noqa: ASYNC110
        await asyncio.sleep(0)


def served_here(here: Running, policy: str) -> bool:
    return any(
        (one.policy, one.snapshot, one.stage) == (policy, f"{policy}-1", Stage.IDLE)
        for one in here.replica.report().others
    )


async def asked(here: Running, policy: str) -> httpx.Response:
    body = BODY | {"model": f"accounts/local/models/{policy}"}
    return await here.http.post("/v1/completions", json=body, headers={HEADER_POLICY: policy})


async def test_the_least_recently_used_policy_makes_way_and_comes_back_with_its_stage_changes_going_on(
    tmp_path: Path,
) -> None:
    engine = ManyPolicies()
    async with running(tmp_path, engine, policies_max=2) as here:
        assert here.replica.report().policies_max == 2
        await loaded(here, "red", "blue")
        for policy in ("blue", "red"):
            assert labels((await asked(here, policy)).text) == [f"{policy}-1"] * 6
        before = {one.policy: one.transitions[-1].seq for one in here.replica.report().others}
        await loaded(here, "green")
        assert names(here) == {"red", "green"}, "blue was used before red"
        gone = await asked(here, "blue")
        assert (gone.status_code, HEADER_NOT_LOADED in gone.headers) == (503, True)
        await here.until(lambda: engine.ended_policies == ["blue#2"])
        assert (await asked(here, "green")).status_code == 200
        await loaded(here, "blue")
        assert names(here) == {"green", "blue"}
        assert labels((await asked(here, "blue")).text) == ["blue-1"] * 6
        again = next(one for one in here.replica.report().others if one.policy == "blue")
        assert again.transitions[0].seq == before["blue"] + 1
        assert await end(here, 1.0) is False, "red is not here; its end is remembered"
        await desire(here, 1.0, "red-1", "red")
        assert "red" not in names(here)


async def test_a_policy_in_use_never_makes_way_and_the_newcomer_is_told_so(tmp_path: Path) -> None:
    engine = ManyPolicies()
    async with running(tmp_path, engine, policies_max=2) as here:
        await loaded(here, "red", "blue")
        assert (await asked(here, "blue")).status_code == 200
        stream = await sampling(here)
        # A request that has not passed the gate yet uses its policy, too.
        with here.replica.policies.serves("blue"):
            await desire(here, 1.0, "green-1", "green", taken=False)
            assert names(here) == {"red", "blue"}
        await loaded(here, "green")
        assert names(here) == {"red", "green"}
        engine.allow(10)
        assert labels((await stream).text) == ["red-1"] * 6


async def test_an_ended_policy_that_has_requests_left_counts_as_held(tmp_path: Path) -> None:
    engine = ManyPolicies()
    async with running(tmp_path, engine, policies_max=1) as here:
        await loaded(here, "red")
        stream = await sampling(here)
        assert await end(here, 1.0)
        await desire(here, 1.0, "green-1", "green", taken=False)
        engine.allow(10)
        assert labels((await stream).text) == ["red-1"] * 6
        await here.until(lambda: here.replica.policies.everyone == [here.replica.own])
        await loaded(here, "green")


async def test_a_policy_that_has_just_loaded_waits_for_its_first_request(tmp_path: Path) -> None:
    clock, engine = Clock(), ManyPolicies()
    async with running(tmp_path, engine, policies_max=1, monotonic=clock) as here:
        await loaded(here, "red")
        clock.now += UNUSED_S - 0.1
        await desire(here, 1.0, "green-1", "green", taken=False)
        clock.now += 0.2
        await loaded(here, "green")
        assert (await asked(here, "green")).status_code == 200
        await loaded(here, "red")


async def test_files_are_fetched_early_for_a_policy_that_is_here(tmp_path: Path) -> None:
    async with running(tmp_path, ManyPolicies()) as here:
        await loaded(here, "red")
        for policy in ("blue", "red"):
            hint = {"snapshot": f"{policy}-2", "url": "file:///b", "files": ["f"], "policy": policy}
            assert (await here.http.post("/replica/hint", json=hint)).status_code == 202
        while not (early := [c for c in here.source.calls if c.startswith("prefetch")]):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert early == ["prefetch red-2 f"]


async def test_what_loads_or_fails_to_load(tmp_path: Path) -> None:
    """A policy that loads keeps its place. One that failed and serves nothing gives it up."""
    async with running(tmp_path, ManyPolicies(), policies_max=1) as here:
        here.source.blocked.add("red-1")
        here.source.corrupt.add("red-1")
        await desire(here, 1.0, "red-1", "red")
        await here.source.fetching.wait()
        await desire(here, 1.0, "green-1", "green", taken=False)
        here.source.blocked.clear()
        await desire(here, 1.0, "red-1", "red")
        here.source.corrupt.add("red-2")
        await desire(here, 1.0, "red-2", "red")
        await here.until(lambda: here.replica.report().others[0].stage is Stage.ERROR)
        await at_rest(here)
        await loaded(here, "green")
        assert names(here) == {"green"}


async def test_the_files_of_an_ended_policy_go_after_its_last_request_and_those_of_a_newer_one_stay(
    tmp_path: Path,
) -> None:
    engine = ManyPolicies()
    async with running(tmp_path, engine, policies_max=2) as here:

        def removed() -> list[str]:
            return [call for call in here.source.calls if call.startswith("remove")]

        await desire(here, 1.0, "red-1")
        await here.until(lambda: reported(here) == {1.0: "red-1"})
        stream = await sampling(here)
        assert await end(here, 1.0)
        # One of its name takes its place, and its directory.
        await desire(here, 2.0, "red-2")
        await here.until(lambda: reported(here) == {2.0: "red-2"})
        engine.allow(100)
        await stream
        await here.until(lambda: engine.ended_policies == ["red#1"])
        assert removed() == []
        assert await end(here, 2.0)
        await here.until(lambda: removed() == ["remove the files of red"])


async def test_the_files_of_a_policy_that_made_way_stay_until_it_is_ended(tmp_path: Path) -> None:
    engine = ManyPolicies()
    async with running(tmp_path, engine, policies_max=1) as here:
        await loaded(here, "red")
        assert (await asked(here, "red")).status_code == 200
        await loaded(here, "blue")
        await here.until(lambda: engine.ended_policies == ["red#1"])
        assert not [call for call in here.source.calls if call.startswith("remove")]
        assert await end(here, 1.0) is False
        while "remove the files of red" not in here.source.calls:  # noqa: ASYNC110
            await asyncio.sleep(0)
