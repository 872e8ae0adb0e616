"""Records by reference: the file has what the response would have had inline, and a reference is of a file that is there."""

from __future__ import annotations

import asyncio
import base64
import os
import struct
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pytest
from replica_fakes import MODEL, FakeEngine, Running, ascending, ids, running, sse
from s3server import S3Server

from midstream.client.decode import router_weights_of, routes_of, sampling_masks_of
from midstream.client.references import ChoiceColumns, read_reference
from midstream.core import extras
from midstream.core.errors import RecordsNotStored, SnapshotError
from midstream.core.record_files import GROUP_TOKENS, ChoiceAbout, groups_of
from midstream.core.references import RecordReference
from midstream.replica import record_files
from midstream.replica.record_files import Encoded, RecordFiles
from midstream.replica.response import referenced
from midstream.snapshots.store import objects
from midstream.snapshots.store.objects import FileSeen

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
TEXT: dict[str, Any] = {"prompt": "hi", "logprobs": True}
ALL: dict[str, Any] = {"include_routing_matrix": True, "return_sampling_mask": True}
REFERENCE = {"return_record_reference": True}


@asynccontextmanager
async def play(
    directory: Path,
    engine: FakeEngine | None = None,
    **bounds: Any,
) -> AsyncIterator[tuple[Running, str]]:
    """With a bucket of its own, unless bucket=False."""
    url = (directory / "bucket").as_uri()

    files = RecordFiles(url, "default", **bounds) if bounds.pop("bucket", True) else None
    async with running(directory, engine or FakeEngine(), files=files) as here:
        yield here, url
    if files is not None:
        files.close()


async def post(here: Running, path: str, **fields: Any) -> Any:
    asked = {"model": MODEL, "max_tokens": 20, "seed": 1, **fields}
    answer = await here.http.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    return answer


def inline_of(choice: dict[str, Any]) -> dict[str, Any]:
    """The columns of a choice that has its records inline. Without router weights the order of experts says nothing."""
    entries = choice["logprobs"]["content"]
    in_order = any("router_weights" in entry for entry in entries)
    routes = [
        base64.b64decode(entry.get("routing_matrix", "")) if in_order else ascending(entry)
        for entry in entries
    ]
    return {
        "token_ids": [entry["token_id"] for entry in entries],
        "logprobs": [entry["logprob"] for entry in entries],
        "sampling_logprobs": [entry["sampling_logprob"] for entry in entries],
        "near_ties": [set(entry.get("near_tie", ())) for entry in entries],
        "constrained": ["logprob_of" in entry for entry in entries],
        "routes": b"".join(routes),
        "snapshots": [(span["snapshot"], span["start"], span["end"]) for span in choice["snapshots"]],
        "kv_snapshots": choice.get("kv_snapshots", []),
    }


def columns_of(found: ChoiceColumns) -> dict[str, Any]:
    names = found.near_tie_names
    return {
        "token_ids": found.token_ids.tolist(),
        "logprobs": found.logprobs.tolist(),
        "sampling_logprobs": found.sampling_logprobs.tolist(),
        "near_ties": [{n for bit, n in enumerate(names) if ties >> bit & 1} for ties in found.near_ties],
        "constrained": found.constrained.tolist(),
        "routes": b"" if found.routes is None else found.routes.tobytes(),
        "snapshots": [(span.snapshot, span.start, span.end) for span in found.snapshots],
        "kv_snapshots": [
            {"snapshot": span.snapshot, "start": span.start, "end": span.end} for span in found.kv_snapshots
        ],
    }


@pytest.mark.parametrize("experts", [8, 300])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | ALL),
        ("/v1/chat/completions", CHAT | ALL | {"n": 3, "return_router_weights": True}),
        ("/v1/completions", TEXT | ALL | {"prompt": ["hi", "there"], "n": 2}),
        ("/v1/completions", TEXT | {"stop": ["o h"]}),
        ("/v1/chat/completions", CHAT | {"prompt_cache_key": "s"} | ALL),
    ],
)
async def test_a_file_has_what_the_answer_would_have_had(
    path: str, body: dict[str, Any], experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top_k = 1 if experts > 256 else 2
    monkeypatch.setattr(
        "replica_fakes.router_weights_at", lambda at: struct.pack(f"<{top_k}f", *[at, 0.5][:top_k])
    )

    async def scenario(here: Running, url: str) -> None:
        here.engine.tells_kv = True
        here.engine.replies = {1: ids("another")}
        inline = (await post(here, path, perf_metrics_in_response=True, **body)).json()
        answer = await post(here, path, return_token_ids=True, **body, **REFERENCE)
        whole = answer.json()
        streamed = sse((await post(here, path, stream=True, **body, **REFERENCE)).text)
        assert b"routing_matrix" not in answer.content
        assert all(choice["logprobs"] is None for choice in whole["choices"])
        *chunks, last, done = streamed
        assert (last["choices"], done) == ([], "[DONE]")
        assert not any("record_reference" in chunk for chunk in chunks)
        for reference in (whole["record_reference"], last["record_reference"]):
            found = read_reference(url, reference)
            assert [one.index for one in found] == [choice["index"] for choice in inline["choices"]]
            for one, choice in zip(found, inline["choices"], strict=True):
                assert columns_of(one) == inline_of(choice)
                if "return_router_weights" in body:
                    assert one.router_weights is not None
                    weights = router_weights_of(choice, routes_of(choice, top_k=top_k))
                    assert one.router_weights.tolist() == weights.tolist()
                else:
                    assert one.router_weights is None
                if "return_sampling_mask" in body:
                    masks, expected = one.sampling_masks(), sampling_masks_of(choice)
                    assert masks.ids.tolist() == expected.ids.tolist()
                    assert masks.offsets.tolist() == expected.offsets.tolist()
        assert [choice["token_ids"] for choice in whole["choices"]] == [
            one.token_ids.tolist() for one in read_reference(url, whole["record_reference"])
        ]

    engine = FakeEngine(experts=experts)
    # Its routes are two bytes.
    engine.info = msgspec.structs.replace(engine.info, top_k=top_k)
    async with play(tmp_path, engine) as (here, url):
        await scenario(here, url)


async def test_no_call_holds_the_interpreter_for_all_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, make = list[int](), pyarrow.array

    def counted(given: Any, *rest: Any, **more: Any) -> Any:
        taken.append(len(given) if isinstance(given, list) else 0)
        return make(given, *rest, **more)

    async with play(tmp_path) as (here, url):
        inline = (await post(here, "/v1/completions", n=3, **TEXT, **ALL)).json()
        monkeypatch.setattr(pyarrow, "array", counted)
        monkeypatch.setattr(referenced, "RECORDS_AT_A_TIME", 8)
        whole = (await post(here, "/v1/completions", n=3, **TEXT, **ALL, **REFERENCE)).json()
        found = read_reference(url, whole["record_reference"])
        for one, choice in zip(found, inline["choices"], strict=True):
            assert columns_of(one)["routes"] == inline_of(choice)["routes"]
            assert one.sampling_masks().ids.tolist() == sampling_masks_of(choice).ids.tolist()
    assert max(taken) == 8


async def test_a_swap_in_the_middle_is_in_the_labels_and_in_the_provenance(tmp_path: Path) -> None:
    async with play(tmp_path) as (here, url):
        here.engine.tells_kv = True
        here.engine.kv_with = {4: (("base", 0, 5), ("s-1", 5, 6))}
        here.engine.allow(4)
        asked = asyncio.create_task(post(here, "/v1/completions", **TEXT, **ALL, **REFERENCE))
        await here.engine.started_streams.wait()
        await here.swapped("s-1")
        here.engine.allow(1000)
        (found,) = read_reference(url, (await asked).json()["record_reference"])
        assert [span.snapshot for span in found.snapshots][-1] == "s-1"
        assert sum(span.end - span.start for span in found.snapshots) == 20 == len(found.token_ids)
        assert [span.snapshot for span in found.kv_snapshots] == ["base", "s-1"]


async def test_a_choice_without_tokens_has_no_rows(tmp_path: Path) -> None:
    async with play(tmp_path) as (here, url):
        fields = {"max_tokens": 0, "prompt_logprobs": 0}
        whole = (await post(here, "/v1/completions", **TEXT, **ALL, **REFERENCE, **fields)).json()
        (found,) = read_reference(url, whole["record_reference"])
        assert (len(found.token_ids), found.snapshots) == (0, [])


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"logprobs": False}, "requires logprobs: true"),
        ({"logprobs": 1}, "requires logprobs: true"),
        ({"top_logprobs": 2}, "leave out top_logprobs"),
        ({"echo": True}, "leave out echo"),
        ({"echo_last": 1}, "leave out echo"),
    ],
)
async def test_what_a_file_does_not_have_is_refused_by_name(body: Any, word: str, tmp_path: Path) -> None:
    async with play(tmp_path) as (here, _url):
        answer = await here.http.post("/v1/completions", json={"model": MODEL, **TEXT, **REFERENCE, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "return_record_reference")
        assert word in error["message"]
        assert here.engine.requests == []


async def refused(here: Running, status: int = 400) -> str:
    answer = await here.http.post("/v1/completions", json={"model": MODEL, **TEXT, **REFERENCE})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, "return_record_reference")
    message: str = error["message"]
    return message


async def test_a_server_without_a_bucket_refuses_by_name(tmp_path: Path) -> None:
    async with play(tmp_path, bucket=False) as (here, _url):
        assert "start it with --records URL" in await refused(here)
        assert here.engine.requests == []


async def test_without_pyarrow_the_refusal_has_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "missing", list)

    async with play(tmp_path) as (here, _url):
        assert "pip install 'midstream[parquet]'" in await refused(here)
    with pytest.raises(RuntimeError, match=r"pip install 'midstream\[parquet\]'"):
        read_reference("file:///nowhere", {})


async def test_more_rows_than_a_file_may_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.replica.response.referenced.COLUMNS_BYTES_MAX", 100)

    async with play(tmp_path) as (here, _url):
        assert "lower n or max_tokens" in await refused(here)


@pytest.mark.parametrize(
    ("bound", "word"),
    [("MASKS_BYTES_MAX", "sampling masks of"), ("COLUMNS_BYTES_MAX", "records of")],
)
async def test_records_that_no_reader_would_take_are_not_written(
    bound: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with play(tmp_path) as (here, _url):
        fields = {"model": MODEL, "max_tokens": 16, **TEXT, **ALL, **REFERENCE}
        here.engine.allow(8)
        asked = asyncio.create_task(here.http.post("/v1/completions", json=fields))
        await here.engine.started_streams.wait()
        monkeypatch.setattr(f"midstream.replica.response.referenced.{bound}", 10)
        here.engine.allow(100)
        answer = await asked
        assert answer.status_code == 507
        assert word in answer.json()["error"]["message"]
        assert not (tmp_path / "bucket").exists()


async def test_a_bucket_that_does_not_take_the_file_fails_the_request(tmp_path: Path) -> None:
    (tmp_path / "bucket").write_text("a file where a directory should be")

    async with play(tmp_path) as (here, _url):
        assert "cannot be stored" in await refused(here, 507)
        fields = {"model": MODEL, **TEXT, **REFERENCE, "stream": True}
        *_, last = sse((await here.http.post("/v1/completions", json=fields)).text)
        assert last["error"]["code"] == "records_not_stored"
        stats = here.replica.report().record_files
        assert stats is not None
        assert (stats.failed, stats.written) == (2, 0)


def test_a_bucket_that_does_not_answer_fails_those_that_wait_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, tried = 0.0, list[str]()

    def silent(url: str, name: str, data: bytes) -> None:
        nonlocal now
        now += 20.0
        tried.append(name)
        raise SnapshotError("the bucket does not answer")

    async def waiting(files: RecordFiles, count: int) -> list[Any]:
        puts = [files.put(lambda: Encoded(b"rows", 0, [])) for _ in range(count)]
        return await asyncio.gather(*puts, return_exceptions=True)

    monkeypatch.setattr(record_files, "WRITERS", 1)
    monkeypatch.setattr(record_files, "put_bytes", silent)
    files = RecordFiles(tmp_path.as_uri(), "default", monotonic=lambda: now)
    ended = asyncio.run(waiting(files, 50))
    assert {type(one) for one in ended} == {RecordsNotStored}
    assert all("the bucket does not answer" in str(one) for one in ended)
    assert (len(tried), files.stats().failed) == (1, 50)
    # Those that come later are tried.
    now += 1.0
    monkeypatch.setattr(record_files, "put_bytes", lambda *_: None)
    assert [type(one) for one in asyncio.run(waiting(files, 2))] == [RecordReference] * 2
    files.close()


def test_files_that_are_wanted_together_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(8)

    async def wanted(files: RecordFiles) -> list[RecordReference]:
        return await asyncio.gather(*(files.put(lambda: Encoded(b"rows", 0, [])) for _ in range(8)))

    # Each waits for all others.
    monkeypatch.setattr(record_files, "put_bytes", lambda *_: together.wait(60))
    files = RecordFiles(tmp_path.as_uri(), "default")
    assert len(asyncio.run(wanted(files))) == files.stats().written == 8
    files.close()


def test_tokens_go_before_files(tmp_path: Path) -> None:
    seen = list[int]()

    def encode() -> Encoded:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return Encoded(b"rows", 0, [])

    files = RecordFiles(tmp_path.as_uri(), "default")
    asyncio.run(files.put(encode))
    files.close()
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert seen == [min(here + record_files.NICENESS, 19)]


async def test_a_full_bucket_refuses_before_anything_is_generated(tmp_path: Path) -> None:
    async with play(tmp_path, bytes_max=10) as (here, _url):
        await post(here, "/v1/completions", **TEXT, **REFERENCE)
        assert "records.files_max is 10" in await refused(here, 507)
        assert len(here.engine.requests) == 1


def test_only_old_record_files_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = tmp_path / "record-files" / "default"
    own.mkdir(parents=True)
    ages = {f"{0:064x}.parquet": 130, f"{1:064x}.parquet": 40, "writing-x": 3630, "notes.parquet": 5000}
    for name, age in ages.items():
        (own / name).write_bytes(b"12345678")
        os.utime(own / name, (time.time() - age, time.time() - age))
    files = RecordFiles(tmp_path.as_uri(), "default", keep_s=100, bytes_max=8)
    files.sweep()
    assert names_in(own) == [f"{1:064x}.parquet", "notes.parquet"]
    stats = files.stats()
    assert (stats.expired, stats.held_bytes) == (2, 8)
    os.utime(own / f"{1:064x}.parquet", (0, 0))
    always = RecordFiles(tmp_path.as_uri(), "default")
    always.sweep()
    assert (always.stats().expired, always.stats().held_bytes) == (0, 8)
    always.close()
    assert "no more record files are written" in caplog.text
    files.close()


def names_in(directory: Path) -> list[str]:
    """Of all but the file that tells the bucket's time."""
    return sorted(path.name for path in directory.iterdir() if path.name != objects.CLOCK)


@pytest.mark.parametrize("set_by", [7200.0, -7200.0])
def test_the_age_of_a_file_is_by_the_clock_of_its_bucket(
    set_by: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket's clock is another one than ours, and is set amid the life of the process."""
    seen = [FileSeen(f"{0:064x}.parquet", 1, 0.0), FileSeen(f"{1:064x}.parquet", 1, 0.0)]
    there, ours, removed = 1e6, 0.0, list[str]()
    monkeypatch.setattr(record_files, "time_there", lambda _: there)
    monkeypatch.setattr(record_files, "files_seen", lambda _: iter(seen))
    monkeypatch.setattr(record_files, "remove_files", lambda _, paths: removed.extend(paths))
    files = RecordFiles(tmp_path.as_uri(), "default", keep_s=100, monotonic=lambda: ours)
    seen[:] = [one._replace(modified=there - age) for one, age in zip(seen, (101, 99), strict=True)]
    files.sweep()
    assert removed == [f"{0:064x}.parquet"]
    del seen[0]
    ours, there = ours + 1.5, there + 1.5 + set_by
    seen[0] = seen[0]._replace(modified=there - 50)
    files.sweep()
    assert removed == [f"{0:064x}.parquet"]
    ours, there = ours + 7300, there + 7300
    files.sweep()
    assert removed == [f"{0:064x}.parquet", f"{1:064x}.parquet"]
    files.close()


@pytest.mark.parametrize("denied", ["remove_files", "time_there"])
def test_files_that_cannot_be_removed_count(
    denied: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bucket may keep what it has, or refuse the file that would tell its time."""
    asked = 0

    def refused(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise SnapshotError("access denied")

    monkeypatch.setattr(record_files, denied, refused)
    own = tmp_path / "record-files" / "default"
    own.mkdir(parents=True)
    for number in range(2):
        (own / f"{number:064x}.parquet").write_bytes(b"12345678")
        os.utime(own / f"{number:064x}.parquet", (1e6, 1e6))
    files = RecordFiles(tmp_path.as_uri(), "default", keep_s=100, bytes_max=16)
    with pytest.raises(SnapshotError, match="access denied"):
        files.sweep()
    assert (files.stats().held_bytes, asked) == (16, 1)
    assert "no more record files are written" in caplog.text
    with pytest.raises(RecordsNotStored, match="raise it"):
        files.check()
    files.close()


def test_a_look_holds_no_list_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = 0, 0

    class Seen(FileSeen):
        def __init__(self, *_: object) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    monkeypatch.setattr(objects, "FileSeen", Seen)
    own = tmp_path / "record-files" / "default"
    own.mkdir(parents=True)
    for number in range(300):
        (own / f"{number:064x}.parquet").write_bytes(b"1")
    files = RecordFiles(tmp_path.as_uri(), "default")
    files.sweep()
    assert (files.stats().held_bytes, alive) == (300, 0)
    assert most < 100
    files.close()


def test_a_look_at_a_bucket_without_files_finds_none(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path.as_uri(), "default")
    files.sweep()
    assert files.stats().held_bytes == 0
    files.close()


def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(file: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(objects.os, "fsync", fails)
    with pytest.raises(objects.SnapshotError, match="no space left"):
        objects.put_bytes(tmp_path.as_uri(), "a.parquet", b"1")
    assert list(tmp_path.iterdir()) == []


def test_a_file_goes_into_an_object_store_in_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    class Store(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            asked.append((self.command, self.path))
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200 if self.command == "PUT" else 400)
            self.send_header("etag", '"1"')
            self.send_header("content-length", "0")
            self.end_headers()

        do_POST = do_PUT

    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    access = S3Server(f"http://127.0.0.1:{server.server_port}")
    for name, value in access.environment().items():
        monkeypatch.setenv(name, value)
    try:
        objects.put_bytes("s3://records/here", "a.parquet", bytes(12_000_000))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert asked == [("PUT", "/records/here/a.parquet")]


def test_directories_that_a_file_brings_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(objects, "sync_directory", synced.append)
    url = (tmp_path / "bucket" / "record-files" / "default").as_uri()
    objects.put_bytes(url, "a.parquet", b"1")
    bucket = tmp_path / "bucket"
    assert {*synced} == {tmp_path, bucket, bucket / "record-files", bucket / "record-files" / "default"}


@pytest.mark.parametrize("prompt", [0, 1, GROUP_TOKENS - 1, GROUP_TOKENS, 5000])
@pytest.mark.parametrize("count", [0, 1, GROUP_TOKENS, 3 * GROUP_TOKENS + 7])
def test_row_groups_follow_kv_blocks(prompt: int, count: int) -> None:
    about = ChoiceAbout(
        index=0, start=11, count=count, prompt_tokens=prompt, kv_snapshots=[], earlier_kv_snapshots=[]
    )
    groups = groups_of(about, GROUP_TOKENS)
    rows = [row for start, end in groups for row in range(start, end)]
    assert rows == list(range(11, 11 + count))
    blocks = [{(prompt + row - 11) // 16 for row in range(start, end)} for start, end in groups]
    assert all(one.isdisjoint(other) for one, other in pairwise(blocks))
