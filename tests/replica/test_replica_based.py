"""Policies on an engine without a base of their own: what they wait for, and what full weights under them leave to requests."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from replica_fakes import Running, running
from test_replica_pins import labels
from test_replica_policies import SAMPLE, UNDER, ManyPolicies, sampling

from midstream.core.types import BASE_SNAPSHOT, ENGINE_FEATURES, Stage


class OneBaseEngine(ManyPolicies):
    """stands_still: it has what a trainer wrote, and computes nothing until it is switched to."""

    stands_still = False

    @property
    def awaits_commit(self) -> bool:
        return self.stands_still


def one_base() -> OneBaseEngine:
    engine = OneBaseEngine()
    features = tuple(name for name in ENGINE_FEATURES if name != "policy_base")
    card = msgspec.structs.replace(engine.info.card, features=features)
    engine.info = msgspec.structs.replace(engine.info, card=card)
    return engine


async def desire(here: Running, snapshot: str, generation: int, **more: int | str | float) -> None:
    body = {"snapshot": snapshot, "generation": generation, "signalled": generation, **more}
    answer = await here.http.post("/replica/desired", json={"url": f"file:///b/{snapshot}", **body})
    assert answer.status_code == 202, answer.text


async def desire_red(here: Running, snapshot: str, stands_on: int, made: float = 1.0) -> None:
    await desire(here, snapshot, 1, policy="red", made=made, stands_on=stands_on)


def serving(here: Running) -> str:
    return here.replica.own.driver.machine.serving


WAITS = "waits for the full weights that it stands on, or newer ones"


def said(here: Running) -> str | None:
    return here.replica.report().others[0].error if here.replica.report().others else None


def reds(here: Running) -> Sequence[str]:
    return [policy.snapshot for policy in here.replica.report().others]


async def test_an_adapter_is_loaded_once_the_weights_serve_that_it_stands_on(tmp_path: Path) -> None:
    engine = one_base()
    async with running(tmp_path, engine) as here:
        await desire_red(here, "red-1", stands_on=2)
        red = here.replica.policies._others["red"].driver
        await here.until(lambda: red.machine.stage is Stage.STAGING)
        await desire(here, "step-1", 1)
        await here.until(lambda: serving(here) == "step-1")
        assert (engine.served, red.machine.stage) == ({}, Stage.STAGING)
        await desire(here, "step-2", 2)
        await here.until(lambda: reds(here) == ["red-1"])
        assert serving(here) == "step-2"
        # The signal asked for what served already.
        await desire(here, "step-2", 5)
        await desire_red(here, "red-2", stands_on=5, made=2.0)
        await here.until(lambda: reds(here) == ["red-2"])


async def test_an_adapter_says_in_its_report_what_it_waits_for(tmp_path: Path) -> None:
    """Full weights that fail everywhere make it wait for the next ones, which may never come."""
    async with running(tmp_path, one_base()) as here:
        await desire_red(here, "red-1", stands_on=1)
        await here.until(lambda: said(here) == WAITS)
        here.source.corrupt.add("step-1")
        await desire(here, "step-1", 1)
        await here.until(lambda: "step-1 could not be loaded: " in (said(here) or ""))
        assert (said(here) or "").startswith(WAITS)
        await desire(here, "step-0", 0)
        await here.until(lambda: serving(here) == "step-0")
        assert "step-1 could not be loaded: " in (said(here) or "")
        await desire(here, "step-2", 2)
        await here.until(lambda: reds(here) == ["red-1"])
        assert said(here) is None


async def test_with_a_base_of_its_own_an_adapter_waits_for_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, ManyPolicies()) as here:
        await desire_red(here, "red-1", stands_on=2)
        await here.until(lambda: reds(here) == ["red-1"])
        assert serving(here) == BASE_SNAPSHOT


async def test_weights_that_end_policies_wait_for_their_requests(tmp_path: Path) -> None:
    engine = one_base()
    async with running(tmp_path, engine) as here:
        await desire_red(here, "red-1", stands_on=0)
        await here.until(lambda: reds(here) == ["red-1"])
        stream = await sampling(here)
        # The gateway's word that it was ended is late.
        await desire(here, "step-1", 1, ends_before=1)
        await here.until(lambda: here.replica.own.driver.machine.stage is Stage.STAGED)
        assert reds(here) == []
        refused = await here.http.post("/v1/completions", json=SAMPLE, headers=UNDER)
        assert refused.status_code == 503
        assert (serving(here), engine.switches) == (BASE_SNAPSHOT, [])
        engine.allow(10)
        assert labels((await stream).text) == ["red-1"] * 6
        await here.until(lambda: serving(here) == "step-1")
        # Nor does a late message bring it back.
        await desire_red(here, "red-1", stands_on=0)
        assert reds(here) == []
        await desire_red(here, "red-2", stands_on=1, made=2.0)
        await here.until(lambda: reds(here) == ["red-2"])
        # Nor one that this replica did not have when they were ended.
        await desire(here, "blue-1", 1, policy="blue", made=3.0)
        blue = here.replica.policies._others["blue"].driver.machine
        await here.until(lambda: blue.stage is Stage.ERROR)
        assert "were ended with the weights before step-1" in (blue.error or "")


async def test_a_late_policy_is_not_loaded_while_weights_that_end_it_wait(tmp_path: Path) -> None:
    engine = one_base()
    async with running(tmp_path, engine) as here:
        await desire_red(here, "red-1", stands_on=0)
        await here.until(lambda: reds(here) == ["red-1"])
        stream = await sampling(here)
        await desire(here, "step-1", 1, ends_before=1)
        await here.until(lambda: here.replica.own.driver.machine.stage is Stage.STAGED)
        await desire(here, "blue-1", 1, policy="blue", made=3.0)
        blue = here.replica.policies._others["blue"].driver.machine
        await here.until(lambda: blue.stage is Stage.ERROR or blue.serving == "blue-1")
        assert blue.serving == BASE_SNAPSHOT
        engine.allow(10)
        assert labels((await stream).text) == ["red-1"] * 6
        await here.until(lambda: serving(here) == "step-1")


async def test_requests_of_ended_policies_that_take_too_long_end_with_what_they_have(tmp_path: Path) -> None:
    engine = one_base()
    async with running(tmp_path, engine, pin_drain_s=0.0) as here:
        await desire_red(here, "red-1", stands_on=0)
        await here.until(lambda: reds(here) == ["red-1"])
        stream = await sampling(here)
        await desire(here, "step-1", 1, ends_before=1)
        await here.until(lambda: serving(here) == "step-1")
        assert labels((await stream).text) == ["red-1"] * 2


@pytest.mark.parametrize("ends", [True, False])
async def test_full_weights_do_not_wait_for_requests_of_policies_that_stand_still_until_them(
    tmp_path: Path, ends: bool
) -> None:
    """The engine has what a trainer wrote: all of its requests wait for the switch."""
    engine = one_base()
    async with running(tmp_path, engine, pin_drain_s=3600.0) as here:
        await desire_red(here, "red-1", stands_on=0)
        await here.until(lambda: reds(here) == ["red-1"])
        stream = await sampling(here, **({} if ends else {"midstream": {"snapshot": "red-1"}}))
        engine.stands_still = True
        await desire(here, "step-1", 1, **({"ends_before": 1} if ends else {}))
        await here.until(lambda: serving(here) == "step-1")
        if ends:
            assert labels((await stream).text) == ["red-1"] * 2
        else:
            assert "it had 0 s to end" in (await stream).text


async def test_an_adapter_ends_no_pinned_requests_of_its_policy_while_these_cannot_end(
    tmp_path: Path,
) -> None:
    """The engine has what a trainer wrote. Whether it will ever serve is open."""
    engine = one_base()
    async with running(tmp_path, engine, pin_drain_s=0.0) as here:
        await desire_red(here, "red-1", stands_on=0)
        await here.until(lambda: reds(here) == ["red-1"])
        stream = await sampling(here, midstream={"snapshot": "red-1"})
        engine.stands_still = True
        await desire(here, "red-2", 2, policy="red", made=1.0)
        red = here.replica.policies._others["red"].driver
        await here.until(lambda: red.machine.stage is Stage.STAGED)
        engine.allow(10)
        assert labels((await stream).text) == ["red-1"] * 6
        await desire(here, "step-1", 1)
        await here.until(lambda: (reds(here), serving(here)) == (["red-2"], "step-1"))


@pytest.mark.parametrize(("reset", "kept"), [("all", False), ("none", True)])
async def test_policies_that_cross_keep_as_much_cached_kv_as_the_signal_says(
    tmp_path: Path, reset: str, kept: bool
) -> None:
    engine = one_base()
    async with running(tmp_path, engine) as here:
        await desire(here, "red-1", 1, policy="red", made=1.0, max_cache_age=1)
        await here.until(lambda: reds(here) == ["red-1"])
        salts = []
        for snapshot in ("", "step-1"):
            if snapshot:
                await desire(here, snapshot, 1, reset_prompt_cache=reset)
                await here.until(lambda: serving(here) == "step-1")
            stream = await asyncio.wait_for(here.http.post("/v1/completions", json=SAMPLE, headers=UNDER), 60)
            assert labels(stream.text) == ["red-1"] * 6
            salts.append(engine.requests[-1].salt)
            # The bound of the policy's own signal holds on.
            assert engine.requests[-1].kv_age_max == 1
        assert (salts[0] == salts[1]) is kept


async def test_full_weights_wait_for_the_requests_that_are_pinned_to_a_policys_snapshot(
    tmp_path: Path,
) -> None:
    engine = one_base()
    async with running(tmp_path, engine) as here:
        await desire_red(here, "red-1", stands_on=0)
        await here.until(lambda: reds(here) == ["red-1"])
        pinned = {"midstream": {"snapshot": "red-1"}}
        stream = await sampling(here, **pinned)
        await desire(here, "step-1", 1)
        await here.until(lambda: not here.replica.report().others[0].pinnable)
        assert (serving(here), engine.switches) == (BASE_SNAPSHOT, [])
        refused = await here.http.post("/v1/completions", json=SAMPLE | pinned, headers=UNDER)
        assert refused.status_code == 409
        engine.allow(6)
        await here.until(lambda: serving(here) == "step-1")
        assert labels((await stream).text) == ["red-1"] * 6
        # They may be pinned again, also if the switch fails.
        await here.until(lambda: here.replica.report().others[0].pinnable)


async def test_full_weights_that_are_given_up_while_they_wait_let_requests_be_pinned_again(
    tmp_path: Path,
) -> None:
    engine = one_base()
    async with running(tmp_path, engine) as here:
        await desire_red(here, "red-1", stands_on=0)
        await here.until(lambda: reds(here) == ["red-1"])
        stream = await sampling(here, midstream={"snapshot": "red-1"})
        await desire(here, "step-1", 1)
        await here.until(lambda: not here.replica.report().others[0].pinnable)
        await desire(here, BASE_SNAPSHOT, 2)
        await here.until(lambda: here.replica.report().others[0].pinnable)
        engine.allow(6)
        assert labels((await stream).text) == ["red-1"] * 6
        assert engine.switches == []
