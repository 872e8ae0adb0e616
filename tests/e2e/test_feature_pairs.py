"""All pairs of features on one server of two replicas: each is refused by the name of its field, or answered rightly.

Right is an answer whose numbers the snapshots that it names bear out, whose parts fit each other and its request, that is the
same streamed and whole, and whose turn in the session's trace says what it says.

PAIRS_SEED in the environment chooses the rows of the long form; else the commit does.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from feature_pairs import PLAIN, Names, Row, all_pairs, covering, pairs_of, with_needs
from pair_asking import Asked, Asker, differences, faults_of
from pair_judging import has_numbers, prompt_faults, record_of, trace_faults
from pair_refusals import REFUSED, is_refused
from policy_helpers import Adapters, load
from recompute import Recomputer
from serving import Server, serve
from transformers import AutoTokenizer

from midstream.client import SnapshotPublisher
from midstream.core.config import EngineSettings
from midstream.core.types import BASE_SNAPSHOT
from midstream.verify.claims import gather
from midstream.verify.paged import PagedComputer
from midstream.verify.snapshots import BucketSnapshots
from midstream.verify.verifier import Verifier, used

SLICE, AT_A_TIME = 12, 6


@dataclass
class Stand:
    """A server that serves its second snapshot and its policy's second adapter, and holds those before."""

    server: Server
    names: Names
    store: str
    checkpoints: dict[str, Path]
    adapters: Adapters
    scratch: Path

    def decode(self, ids: list[int]) -> str:
        tokenizer = AutoTokenizer.from_pretrained(self.checkpoints["base"])
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    def recomputer(self) -> Recomputer:
        made = Recomputer(self.checkpoints)
        for name, model in self.adapters.made.items():
            made.add_model(name, model)
        return made

    def unverified(self, records: list[dict[str, Any]]) -> list[Any]:
        """What `midstream verify` finds wrong in them."""
        found = gather(records, [])
        bucket, base = self.server.bucket.as_uri(), self.checkpoints["base"]
        snapshots = BucketSnapshots(bucket, self.scratch, base=base, known=used(found.trees))
        settings = EngineSettings(kv_cache_tokens=16384, threads=1)
        computer = PagedComputer(snapshots.whole, BASE_SNAPSHOT, settings)
        report = Verifier(computer, snapshots.refused, snapshots.is_adapter).verify(found.trees)
        return [*found.findings, *report.findings]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Stand]:
    place = tmp_path_factory.mktemp("pairs")
    config = place / "config.toml"
    config.write_text("[embedded]\nrouter_weights = true\n")
    store, base = (place / "kept").as_uri(), tiny_model()
    options = ("--replicas", "2", "--no-tinker", "--resident-snapshots", "3", "--config", str(config))
    with serve(place / "state", "--model", str(base), "--records", store, *options) as server:
        adapters, checkpoints = Adapters(base), {"base": base}
        for number in range(2):
            adapters.put(server, f"v{number}", number)
            load(server, f"v{number}", "red")
        with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
            for number in (1, 2):
                checkpoints[f"s{number}"] = tiny_model(seed=number)
                shutil.copytree(checkpoints[f"s{number}"], server.bucket / f"s{number}")
                publisher.snapshots.signal(f"s{number}")
                publisher.snapshots.wait_until_ready(f"s{number}", timeout_s=150)
        names = Names(server.model, "red", "s1", "v0")
        yield Stand(server, names, store, checkpoints, adapters, place / "scratch")


async def at_once(work: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """A few at a time."""
    places = asyncio.Semaphore(AT_A_TIME)

    async def one(each: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with places:
            await each()

    async with asyncio.TaskGroup() as group:
        for each in work:
            group.create_task(one(each))


async def with_asker(stand: Stand, main: Callable[[Asker], Coroutine[Any, Any, None]]) -> None:
    limits = httpx.Limits(max_connections=2 * AT_A_TIME)
    async with httpx.AsyncClient(
        base_url=stand.server.url, timeout=120, limits=limits, trust_env=False
    ) as http:
        await main(Asker(http, stand.names, stand.store))


async def test_a_pair_that_cannot_go_together_is_refused_by_the_name_of_its_field(stand: Stand) -> None:
    found = dict[Any, Any]()

    async def main(asker: Asker) -> None:
        async def one(number: int, row: Row, pair: Any) -> None:
            asked = await asker.ask(row, number, f"refused-{number}")
            found[pair] = (asked.status, asked.param)

        rows = [(number, with_needs(dict(pair)), pair) for number, pair in enumerate(REFUSED)]
        await at_once([lambda args=args: one(*args) for args in rows])

    await with_asker(stand, main)
    assert found == {pair: (400, field) for pair, field in REFUSED.items()}


async def judged(stand: Stand, rows: list[Row], seed: int) -> list[str]:
    """What is wrong with the answers to these rows, each streamed and whole."""
    done, wrong = list[Asked](), list[str]()

    async def main(asker: Asker) -> None:
        async def one(number: int, row: Row) -> None:
            forms = ["whole"] if row["scores"] == "prompt_logprobs" else ["whole", "stream"]
            made = [await asker.ask(row | {"how": how}, number, f"{how}-{seed}-{number}") for how in forms]
            done.extend(made)
            faults = [fault for asked in made for fault in faults_of(asked, stand.decode)]
            wrong.extend(f"{shown(row)}: {fault}" for fault in [*faults, *differences(made[0], made[-1])])

        await at_once([lambda args=args: one(*args) for args in enumerate(rows)])
        for asked in done:
            if asked.session is not None and any(told.ids for told in asked.said.choices.values()):
                traces = await asker.traces(asked.session)
                wrong.extend(f"{shown(asked.row)}: {fault}" for fault in trace_faults(asked, traces))

    await with_asker(stand, main)
    return [*wrong, *await asyncio.to_thread(lambda: [*borne_out(stand, done)])]


def borne_out(stand: Stand, done: list[Asked]) -> Iterator[str]:
    """Recomputes all numbers."""
    recomputer, records = stand.recomputer(), list[dict[str, Any]]()
    for asked in done:
        for told in asked.said.choices.values():
            if has_numbers(told):
                records.append(record_of(asked, told, len(records) + 1))
            if asked.row["numbers"] != "legacy":
                yield from (f"{shown(asked.row)}: {fault}" for fault in prompt_faults(told, recomputer))
    assert records
    yield from map(str, stand.unverified(records))


def shown(row: Row) -> dict[str, str]:
    """Where it is not plain."""
    return {name: value for name, value in row.items() if value != PLAIN[name]}


async def test_pairs_that_go_together_are_answered_rightly(stand: Stand) -> None:
    wrong = await judged(stand, [*islice(covering(1, is_refused), SLICE)], 1)
    assert not wrong, "\n".join(wrong)


def chosen_seed() -> int:
    if given := os.environ.get("PAIRS_SEED"):
        return int(given)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return int(head.stdout[:6] or "0", 16)


@pytest.mark.variant
async def test_all_pairs_are_answered_rightly(stand: Stand) -> None:
    seed = chosen_seed()
    rows = [*covering(seed, is_refused)]
    covered = {pair for row in rows for pair in pairs_of(row)}
    assert covered >= {pair for pair in all_pairs() if not is_refused(with_needs(dict(pair)))}
    wrong = await judged(stand, rows, seed)
    assert not wrong, "\n".join([f"PAIRS_SEED={seed}", *wrong])
