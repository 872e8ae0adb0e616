"""Columns in files as Fireworks' clients ask for them: each position has the row that it would have had inline."""

from __future__ import annotations

import base64
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from replica_fakes import MODEL, FakeEngine, Running, ascending, ids, sse
from test_record_references import play

from midstream.client.decode import sampling_masks_of
from midstream.client.errors import RecordFileError
from midstream.client.shared_references import read_masks, read_routes
from midstream.core.references import FORMAT, SharedFile
from midstream.replica.shared_rows import BLOCKS_MAX, FILES_MAX, ROWS, WrittenRows, keys_of

#: Long enough for blocks of rows.
PROMPT = "a prompt of some more tokens than two blocks of rows have"
FILES: dict[str, Any] = {"routing_matrix_format": "parquet_v1", "sampling_mask": "parquet_v1"}
INLINE: dict[str, Any] = {"include_routing_matrix": True, "return_sampling_mask": True}
STORE, STAY = "x-fireworks-r3-store-id", "x-fireworks-r3-ttl-seconds"
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "seed": 1, "logprobs": True}
Headers = dict[str, str]


async def sent(
    here: Running, headers: Headers, path: str = "/v1/completions", **fields: Any
) -> httpx.Response:
    given = {"prompt": PROMPT} if path == "/v1/completions" else {}
    return await here.http.post(path, json=ASKED | given | fields, headers=headers)


async def choices(here: Running, headers: Headers, *path: str, **fields: Any) -> list[dict[str, Any]]:
    answer = await sent(here, headers, *path, **fields)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        found: list[dict[str, Any]] = answer.json()["choices"]
        return found
    made: dict[int, dict[str, Any]] = {}
    for event in sse(answer.text)[:-1]:
        for choice in event["choices"]:
            one = made.setdefault(choice["index"], {"content": []})
            one["content"] += (choice.pop("logprobs") or {"content": []})["content"]
            one |= {name: value for name, value in choice.items() if value is not None}
    return [one | {"logprobs": {"content": one["content"]}} for _, one in sorted(made.items())]


def inline_of(choice: dict[str, Any]) -> list[bytes]:
    return [ascending(entry) for entry in choice["logprobs"]["content"]]


def same(choice: dict[str, Any], inline: dict[str, Any], url: str) -> None:
    entries = choice["logprobs"]["content"]
    expected = inline_of(inline)
    left = ("routing_matrix", "routing_matrix_dtype", "sampling_mask")
    bare = [{k: v for k, v in entry.items() if k not in left} for entry in inline["logprobs"]["content"]]
    assert entries == bare
    assert (choice["routing_matrix_format"], choice["sampling_mask_format"]) == ("parquet_v1",) * 2
    assert choice["r3_store_id"] == url
    found = read_routes(choice["routing_references"])
    assert [route.tobytes() if known else b"" for route, known in zip(*found, strict=True)] == expected
    drawn = [entry for entry in inline["logprobs"]["content"] if "sampling_mask" in entry]
    masks, known = read_masks(choice["sampling_mask_references"])
    own = sampling_masks_of({"logprobs": {"content": drawn}})
    assert known.all()
    assert (masks.ids.tolist(), masks.offsets.tolist()) == (own.ids.tolist(), own.offsets.tolist())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("experts", [8, 300])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {}),
        ("/v1/completions", {"echo": True}),
        ("/v1/completions", {"echo": True, "n": 3}),
        ("/v1/completions", {"echo": True, "prompt": ["hi", PROMPT], "n": 2}),
        ("/v1/completions", {"echo": True, "prompt": ids("x")}),
        ("/v1/completions", {"echo_last": 5, "top_logprobs": 2}),
        ("/v1/completions", {"echo": True, "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "echo": True}),
    ],
)
async def test_each_position_has_the_row_that_it_has_inline(
    path: str, fields: dict[str, Any], experts: int, *, stream: bool, tmp_path: Path
) -> None:
    async def scenario(here: Running, url: str) -> None:
        inline = await choices(here, {}, path, stream=stream, **INLINE, **fields)
        # The second one finds the rows of the first one's prompt.
        for _ in range(2):
            found = await choices(here, {STORE: url}, path, stream=stream, **FILES, **fields)
            assert len(found) == len(inline)
            for choice, expected in zip(found, inline, strict=True):
                same(choice, expected, url)

    engine = FakeEngine(experts=experts)
    engine.info = msgspec.structs.replace(engine.info, top_k=1 if experts > 256 else 2)
    async with play(tmp_path, engine) as (here, url):
        await scenario(here, url)


async def test_router_weights_beside_a_file_are_in_the_order_of_its_routes(tmp_path: Path) -> None:
    async with play(tmp_path) as (here, url):
        weighed = {"return_router_weights": True, "echo": True}
        (inline,) = await choices(here, {}, **INLINE, **weighed)
        # The rows of this one are without an order, so the next one must not refer to them.
        await choices(here, {STORE: url}, **FILES, echo=True)
        for _ in range(2):
            (choice,) = await choices(here, {STORE: url}, **FILES, **weighed)
            found = read_routes(choice["routing_references"])
            entries = inline["logprobs"]["content"]
            told = [base64.b64decode(entry.get("routing_matrix", "")) for entry in entries]
            assert [r.tobytes() if known else b"" for r, known in zip(*found, strict=True)] == told
            weights = [entry.get("router_weights") for entry in choice["logprobs"]["content"]]
            assert weights == [entry.get("router_weights") for entry in entries]
        assert told != [ascending(entry) for entry in entries]
        # Those of the second one are those of the first.
        assert (
            choice["routing_references"]["files"][0]["file"]
            != choice["routing_references"]["files"][-1]["file"]
        )


async def test_one_column_may_be_inline_and_the_other_in_a_file(tmp_path: Path) -> None:
    async with play(tmp_path) as (here, url):
        (inline,) = await choices(here, {}, **INLINE)
        (masks,) = await choices(
            here, {STORE: url}, include_routing_matrix=True, sampling_mask="parquet_v1", logprobs=True
        )
        assert inline_of(masks) == inline_of(inline)
        assert "routing_references" not in masks
        assert len(read_masks(masks["sampling_mask_references"]).known) == 20
        answer = await sent(here, {STORE: url}, logprobs=None, routing_matrix_format="parquet_v1", echo=True)
        (bare,) = answer.json()["choices"]
        assert bare["logprobs"] is None
        assert len(read_routes(bare["routing_references"]).routes) == len(ids(PROMPT)) + 20


Reused = Callable[[Running, str], Awaitable[int]]


async def reused(here: Running, headers: Headers, prompt: str = PROMPT) -> int:
    """How many rows of an answer are of a file that was there before."""
    (choice,) = await choices(here, headers, prompt=prompt, echo=True, **FILES)
    found = choice["routing_references"]
    newest = found["files"][-1]
    return sum(
        span["count"]
        for span in found["spans"]
        if "file_index" in span and found["files"][span["file_index"]] != newest
    )


async def test_a_prompts_rows_are_written_once_for_each_owner(tmp_path: Path) -> None:
    async with play(tmp_path) as (here, url):
        headers = {STORE: url}
        whole = (len(ids(PROMPT)) - 1) // ROWS * ROWS
        assert await reused(here, headers) == 0
        assert await reused(here, headers) == whole
        # A prefix alone is the same, and what follows it is not.
        assert await reused(here, headers, PROMPT[: 2 * ROWS + 3] + "another end of it") == 2 * ROWS
        assert await reused(here, headers, "b" + PROMPT[1:]) == 0
        assert await reused(here, headers | {"x-midstream-tenant": "another"}) == 0
        assert await reused(here, headers | {"x-prompt-cache-isolation-key": "another"}) == 0


async def test_a_long_session_does_not_end_in_ever_more_files(tmp_path: Path) -> None:
    async def scenario(here: Running, url: str) -> None:
        counts = list[int]()
        for turn in range(1, FILES_MAX + 4):
            prompt = "".join(f"what turn {at} adds to this." for at in range(turn))
            (inline,) = await choices(here, {}, prompt=prompt, echo=True, **INLINE)
            (choice,) = await choices(here, {STORE: url}, prompt=prompt, echo=True, **FILES)
            counts.append(len(choice["routing_references"]["files"]))
            same(choice, inline, url)
        # Then all rows are written again, and the count begins from there.
        assert counts == [*range(1, FILES_MAX + 2), 1, 2]

    engine = FakeEngine()
    engine.info = msgspec.structs.replace(engine.info, max_model_len=4096)
    async with play(tmp_path, engine) as (here, url):
        await scenario(here, url)


async def test_rows_of_a_file_that_goes_too_early_are_written_again(tmp_path: Path) -> None:
    now = [1000.0]

    async with play(tmp_path, keep_s=600.0, monotonic=lambda: now[0]) as (here, url):
        headers = {STORE: url, STAY: "400"}
        assert await reused(here, headers) == 0
        now[0] = 1199.0
        assert await reused(here, headers) > 0
        now[0] = 1201.0
        assert await reused(here, headers) == 0
        assert await reused(here, {STORE: url, STAY: "600"}) > 0
        # Without a lifetime it is six hours, or as long as any file stays.
        now[0] = 1202.0
        assert await reused(here, {STORE: url}) == 0


@pytest.mark.parametrize(
    ("headers", "fields", "message", "param"),
    [
        ({}, {"sampling_mask": "parquet_v1"}, "the URL of the bucket of --records", STORE),
        ({}, {"routing_matrix_format": "parquet_v1"}, "the URL of the bucket of --records", STORE),
        ({STORE: "other"}, {"sampling_mask": "parquet_v1"}, "own store alone", STORE),
        (
            {STORE: "other"},
            FILES,
            "Extra inputs are not permitted, field: 'routing_matrix_format'",
            "routing_matrix_format",
        ),
        ({STAY: "0"}, FILES, "1 to 600, got '0'", STAY),
        ({STAY: "1.5"}, FILES, "1 to 600, got '1.5'", STAY),
        ({STAY: "601"}, FILES, "records.files_keep_s is the longest", STAY),
        ({}, FILES | {"return_record_reference": True}, "cannot go with", "return_record_reference"),
        ({}, {"routing_matrix_format": "csv"}, "routing_matrix_format: ", "routing_matrix_format"),
        ({}, {"sampling_mask": True}, "sampling_mask: ", "sampling_mask"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    headers: Headers, fields: dict[str, Any], message: str, param: str, tmp_path: Path
) -> None:
    async with play(tmp_path, keep_s=600.0) as (here, url):
        given = {STORE: url} | headers if STAY in headers or "return_record_reference" in fields else headers
        answer = await sent(here, given, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert message in error["message"]


async def test_a_server_without_a_bucket_gives_the_answer_at_which_clients_take_routes_inline(
    tmp_path: Path,
) -> None:
    async with play(tmp_path, bucket=False) as (here, url):
        answer = await sent(here, {STORE: url}, **FILES)
        expected = "Extra inputs are not permitted, field: 'routing_matrix_format'"
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, expected)
        masks = (await sent(here, {STORE: url}, sampling_mask="parquet_v1")).json()["error"]
        assert masks["message"].startswith("Extra inputs are not permitted, field: 'sampling_mask'")
        assert "--records URL" in masks["message"]


async def test_references_that_cannot_be_are_refused(tmp_path: Path) -> None:
    good: list[dict[str, Any]] = []

    async with play(tmp_path) as (here, url):
        (choice,) = await choices(here, {STORE: url}, echo=True, **FILES)
        good.append(choice["routing_references"])
    (given,) = good
    first, *rest = given["spans"]
    changed: list[tuple[dict[str, Any], str]] = [
        ({"length": given["length"] + 1}, "positions"),
        ({"length": 2**50}, "fit bytes_max"),
        ({"length": -1}, "no references"),
        ({"spans": rest}, "begins at"),
        ({"spans": [first, *({**span, "file_index": 7} for span in rest)]}, "no row of a file"),
        ({"spans": [first, *({**span, "file_row_start": 1} for span in rest)]}, "rows, and a span ends"),
        ({"files": [{**file, "sha256": "0" * 64} for file in given["files"]]}, "another sha256"),
        ({"files": [{**file, "file": "../../etc/passwd"} for file in given["files"]]}, "no name"),
        ({"files": [{**file, "row_count": 10**6} for file in given["files"]]}, "declares|other rows"),
        ({"files": [{**file, "format": "csv"} for file in given["files"]]}, "no references"),
    ]
    for change, message in changed:
        with pytest.raises(RecordFileError, match=message):
            read_routes(given | change)
    with pytest.raises(RecordFileError, match="sampling mask"):
        # Tokens of a prompt were drawn from nothing.
        read_masks(given)
    for path in (tmp_path / "bucket").rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RecordFileError, match="bytes, and the reference says"):
        read_routes(given)


def test_a_key_stands_for_all_rows_before_it() -> None:
    draw = np.random.default_rng(3)
    tokens = draw.integers(0, 1000, 5 * ROWS + 3).tolist()
    routes = [bytes(row) for row in draw.integers(0, 8, (5 * ROWS + 3, 4)).tolist()]
    keys = list(keys_of((b"salt", False), [5], tokens, routes))
    assert len(set(keys)) == 5
    for at in range(5 * ROWS):
        for change in ("token", "route"):
            others = [*tokens], [*routes]
            if change == "token":
                others[0][at] += 1
            else:
                others[1][at] = b"\xff" * 4
            found = list(keys_of((b"salt", False), [5], *others))
            assert [one == other for one, other in zip(keys, found, strict=True)] == [
                block < at // ROWS for block in range(5)
            ]
    for rows, first in (((b"another", False), 5), ((b"salt", False), 6), ((b"salt", True), 5)):
        assert not set(keys) & set(keys_of(rows, [first], tokens, routes))


def test_the_index_is_bounded_and_keeps_what_was_used_last() -> None:
    written = WrittenRows()
    file = SharedFile(store_id="s", file="f", sha256="0" * 64, bytes=1, row_count=1, schema=FORMAT)
    written.add({b"first": 0}, file, math.inf)
    written.add({str(at).encode(): at for at in range(BLOCKS_MAX - 1)}, file, math.inf)
    assert written.leading([b"first"], {}, 0.0)[0].row == 0
    written.add({b"one more": 7}, file, 5.0)
    assert [place.row for place in written.leading([b"first", b"0"], {}, 0.0)] == [0]
    assert written.leading([b"one more"], {}, 6.0) == []
    assert written.leading([b"one more"], {b"one more": 9}, 6.0)[0].row == 9
