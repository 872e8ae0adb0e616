"""Policies at one replica: whose message counts, and what the end of one leaves to the requests that run under it."""

import asyncio
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import httpx
from replica_fakes import FakeEngine, Running, record, running, sse
from test_replica_pins import BODY, in_a_loop, labels

from midstream.core.headers import HEADER_POLICY
from midstream.core.types import GenerateRequest, GenerationEvent, SwapTiming
from midstream.engine.base import Slot, StagingFailed

UNDER = {HEADER_POLICY: "red"}
SAMPLE = BODY | {"model": "accounts/local/models/red"}


class _OneSlot(Slot):
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


async def desire(here: Running, made: float, snapshot: str) -> None:
    body = {
        "policy": "red",
        "made": made,
        "snapshot": snapshot,
        "generation": 1,
        "url": f"file:///b/{snapshot}",
    }
    answer = await here.http.post("/replica/desired", json=body)
    assert answer.status_code == 202, answer.text


async def end(here: Running, made: float) -> bool:
    answer = await here.http.post("/replica/policy/end", json={"policy": "red", "made": made})
    return bool(answer.json()["ended"])


def reported(here: Running) -> dict[float, str]:
    return {policy.made: policy.snapshot for policy in here.replica.policies.reports()}


async def sampling(here: Running) -> asyncio.Task[httpx.Response]:
    """A stream that has given two tokens and waits for more to be allowed."""
    here.engine.allow(2)
    known = len(here.engine.requests)
    task = asyncio.create_task(here.http.post("/v1/completions", json=SAMPLE, headers=UNDER))
    await here.engine.until(
        lambda: (
            len(here.engine.requests) > known
            and here.engine.made.get(here.engine.requests[-1].request_id) == 2
        )
    )
    return task


@in_a_loop
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


@in_a_loop
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


@in_a_loop
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


@in_a_loop
async def test_a_boot_ends_without_waiting_for_an_ended_policys_requests(tmp_path: Path) -> None:
    engine = ManyPolicies()
    async with running(tmp_path, engine) as here:
        await desire(here, 1.0, "red-1")
        await here.until(lambda: reported(here) == {1.0: "red-1"})
        stream = await sampling(here)
        assert await end(here, 1.0)
        await here.replica.policies.close()
        assert here.replica.policies.everyone == []
        stream.cancel()
