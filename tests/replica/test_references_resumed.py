"""A stream by reference that is broken off after any write and resumed on another replica ends with the file that it would
have had."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from replica_fakes import MODEL, FakeEngine, Running, ids, running
from test_resume_pipeline import COMPLETIONS, an_engine, by_choice, events, resume, state_of, stream, units

from midstream.client.references import read_reference
from midstream.core.resumption import HEADER_FAILOVER, HEADER_RESUMABLE, MARK
from midstream.core.types import EngineCard
from midstream.replica.record_files import RecordFiles
from midstream.replica.wire.table import GENERATING

PROMPT = list(ids("he said"))
OURS: dict[str, Any] = {
    "prompt": PROMPT, "logprobs": True, "max_tokens": 9, "include_routing_matrix": True, "return_sampling_mask": True,
    "return_record_reference": True, "return_token_ids": True,
}  # fmt: skip
SHARED = {
    "prompt": PROMPT, "logprobs": True, "max_tokens": 5, "routing_matrix_format": "parquet_v1",
    "sampling_mask": "parquet_v1", "echo": True,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "text": OURS,
    "weights": {**OURS, "return_router_weights": True, "stream_options": {"include_usage": True}},
    "choices": {**OURS, "prompt": [PROMPT, PROMPT[:3]], "n": 2, "max_tokens": 6},
    "stops": {**OURS, "n": 2, "max_tokens": 20, "stop": ["o hello h", "lo x"]},
    "in fireworks' form": SHARED,
}


@asynccontextmanager
async def pair(
    directory: Path, make: Callable[[], FakeEngine] = an_engine
) -> AsyncIterator[tuple[Running, Running, str]]:
    """Two replicas of a deployment, with one bucket."""
    url = (directory / "bucket").as_uri()
    async with AsyncExitStack() as stack:
        made = []
        for name in ("a", "b"):
            (directory / name).mkdir()
            files = RecordFiles(url, "default")
            stack.callback(files.close)
            one = await stack.enter_async_context(running(directory / name, make(), files=files))
            one.http.headers.update({"x-fireworks-r3-store-id": url, "x-midstream-records": "logprobs"})
            made.append(one)
        yield made[0], made[1], url


def named_in(found: list[Any]) -> list[str]:
    """The record files that a stream's events name, each time that they do."""
    return [part.split('"', 1)[0] for part in json.dumps(found).split('"file": "')[1:]]


def references_in(text: str) -> list[dict[str, Any]]:
    found = [event for event in events(text) if event != "[DONE]"]
    return [event["record_reference"] for event in found if "record_reference" in event]


class Taken:
    """Takes the stream of a generation that no client reads."""

    writable = True

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    async def drained(self) -> None:
        await asyncio.sleep(0)


def rows_of(directory: Path, file: str) -> dict[str, list[Any]]:
    return pq.read_table(directory / "bucket" / file).to_pydict()


@pytest.mark.parametrize("name", BODIES)
async def test_after_any_write_the_file_is_what_it_would_have_been(tmp_path: Path, name: str) -> None:
    body = BODIES[name]

    async with pair(tmp_path) as (here, there, _):
        writes = await stream(here, COMPLETIONS, body)
        found = events("".join(writes))
        expected, whole = [rows_of(tmp_path, file) for file in named_in(found)], by_choice(found)
        assert expected
        assert expected[0]["token_id"]
        for cut in range(1, len(writes)):
            answer = await resume(there, COMPLETIONS, body, writes[:cut])
            assert answer.status_code == 200, answer.text
            again = events("".join(writes[:cut]) + answer.text)
            assert [rows_of(tmp_path, file) for file in named_in(again)] == expected
            rest = by_choice(again)
            assert rest.keys() == whole.keys()
            assert [rest[key] for key in whole if key != "end"] == [
                whole[key] for key in whole if key != "end"
            ]
            assert len(rest["end"]) == len(whole["end"])


async def test_the_first_event_tells_where_it_goes_on(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there, _):
        writes = await stream(here, COMPLETIONS, OURS)
        answer = await resume(there, COMPLETIONS, OURS, writes[:5])
        found = events(answer.text)
        count = len([line for line in state_of(writes[:5]).split("\n")[1:] if '"kv"' not in line])
        assert found[0]["midstream"] == {"resumed": {"from": "replica-7", "tokens": [count], "exact": True}}
        assert (
            sum(len(event["choices"][0]["token_ids"]) for event in found[:-2] if event["choices"])
            == 9 - count
        )


async def test_a_session_gets_the_turn_with_all_its_numbers(tmp_path: Path) -> None:
    body = {**OURS, "user": "u"}
    async with pair(tmp_path) as (here, there, url):
        writes = await stream(here, COMPLETIONS, body)
        await resume(there, COMPLETIONS, body, writes[:5])
        found = there.replica.trace(("", "u"))
        assert found is not None
        (turn,) = found.turns
        assert turn.record_reference is not None
        (columns,) = read_reference(url, turn.record_reference.reference)
        assert (turn.token_ids, turn.logprobs) == (columns.token_ids.tolist(), columns.logprobs.tolist())


@pytest.mark.parametrize("exact", [True, False])
async def test_another_snapshot_is_refused_whatever_the_client_takes(tmp_path: Path, exact: bool) -> None:
    async with pair(tmp_path) as (here, there, _):
        await here.swapped("step-1")
        writes = await stream(here, COMPLETIONS, OURS)
        refused = await resume(there, COMPLETIONS, OURS, writes[:5], exact=exact)
        assert (refused.status_code, "KV is of snapshot 'step-1'" in refused.text) == (409, True)
        # Its tokens are all there, and their numbers are not.
        assert (await resume(there, COMPLETIONS, OURS, writes[:-1], exact=exact)).status_code == 409


async def test_other_tokens_than_the_clients_are_in_no_file(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there, _):
        writes = await stream(here, COMPLETIONS, OURS)
        before = {*(tmp_path / "bucket").rglob("*.parquet")}
        there.engine.reply = ids("help ")
        refused = await resume(there, COMPLETIONS, OURS, writes[:8])
        assert (refused.status_code, "comes out differently here from token 2 on" in refused.text) == (
            409,
            True,
        )
        assert {*(tmp_path / "bucket").rglob("*.parquet")} == before


async def test_a_swap_on_the_way_back_is_in_no_file(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there, _):
        writes = await stream(here, COMPLETIONS, OURS)
        before = {*(tmp_path / "bucket").rglob("*.parquet")}
        there.engine.allowed = 2
        asked = asyncio.create_task(resume(there, COMPLETIONS, OURS, writes[:8]))
        await there.engine.until(lambda: 2 in there.engine.made.values())
        await there.swapped("step-1")
        there.engine.allow(99)
        refused = await asked
        assert (refused.status_code, "comes out differently" in refused.text) == (409, True)
        assert {*(tmp_path / "bucket").rglob("*.parquet")} == before


async def test_an_answer_that_was_aborted_ends_where_it_did(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there, url):
        here.engine.allowed = 3
        asked = asyncio.create_task(stream(here, COMPLETIONS, {**OURS, "n": 2}))
        await here.engine.until(lambda: 3 in here.engine.made.values())
        assert (await here.http.post("/replica/abort", content=b"null")).json() == {"aborted": 1}
        writes = await asked
        (reference,) = references_in("".join(writes))
        assert [rows["count"] for rows in reference["choices"]] == [3, 3]
        for cut in (len(writes) - 2, len(writes) - 1):
            answer = await resume(there, COMPLETIONS, {**OURS, "n": 2}, writes[:cut])
            (again,) = references_in(answer.text)
            counts = [len(found.token_ids) for found in read_reference(url, again)]
            had = sum(
                events(answer.text)[0].get("midstream", {}).get("resumed", {"tokens": [3, 3]})["tokens"]
            )
            assert (counts[0], had) == (3, 6)
            # The other one has no end yet for the client before the last cut, and goes on.
            assert counts[1] == (9 if cut == len(writes) - 2 else 3)


async def test_a_choice_that_was_aborted_before_its_first_token_has_no_rows(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there, url):
        service, sink = here.replica.own.service, Taken()
        assert service is not None
        body = {"model": MODEL, "stream": True, **OURS, "n": 2}
        headers = {HEADER_RESUMABLE: "1"}
        async with service.admitted(
            GENERATING["completions"], json.dumps(body).encode(), headers
        ) as generation:
            generation.abort([0])
            await generation.stream(sink)
        writes = units(sink.data.decode())
        answer = await resume(there, COMPLETIONS, body, writes[:6])
        (again,) = references_in(answer.text)
        assert [len(found.token_ids) for found in read_reference(url, again)] == [0, 9]


async def test_an_abort_on_the_way_back_leaves_all_that_the_client_has(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there, url):
        writes = await stream(here, COMPLETIONS, OURS)
        there.engine.allowed = 2
        asked = asyncio.create_task(resume(there, COMPLETIONS, OURS, writes[:6]))
        await there.engine.until(lambda: 2 in there.engine.made.values())
        assert (await there.http.post("/replica/abort", content=b"null")).json() == {"aborted": 1}
        there.engine.allow(99)
        text = (await asked).text
        found = [event for event in events(text) if event != "[DONE]" and event["choices"]]
        (had,) = found[0]["midstream"]["resumed"]["tokens"]
        (columns,) = read_reference(url, references_in(text)[0])
        sent = sum(len(event["choices"][0]["token_ids"]) for event in found)
        assert (len(columns.token_ids), had > 2) == (had + sent, True)
        assert found[-1]["choices"][0]["finish_reason"] in ("abort", "length")


async def test_an_engine_that_draws_otherwise_each_time_says_that_its_streams_end_with_it(
    tmp_path: Path,
) -> None:
    def drawing() -> FakeEngine:
        engine = an_engine()
        features = tuple(name for name in EngineCard().features if name != "reproducible_sampling")
        engine.info = msgspec.structs.replace(engine.info, card=EngineCard(features=features))
        return engine

    async with pair(tmp_path, drawing) as (here, there, _):
        asked = {"model": MODEL, "stream": True, **OURS}
        answer = await here.http.post(COMPLETIONS, json=asked, headers={HEADER_RESUMABLE: "1"})
        assert (answer.headers[HEADER_FAILOVER], MARK.decode() in answer.text) == ("off", False)
        assert (await resume(there, COMPLETIONS, OURS, ["not looked at"])).status_code == 409
