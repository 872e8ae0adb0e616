"""Records by reference in an S3 store: written, read, referred to again; and a store that is slow, refuses or loses a file."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from replica_fakes import FakeEngine, Running, running, sse
from s3server import SECRET_KEY, S3Server
from test_record_references import ALL, REFERENCE, TEXT, columns_of, inline_of, post
from test_shared_references import FILES, INLINE, STORE, choices, reused, same, sent

from midstream.client.errors import RecordFileError
from midstream.client.references import read_reference
from midstream.client.shared_references import read_routes
from midstream.replica.record_files import RecordFiles
from midstream.snapshots.store.objects import CLOCK, files_seen

Scenario = Callable[[Running], Awaitable[None]]


@asynccontextmanager
async def play(
    directory: Path,
    url: str,
) -> AsyncIterator[Running]:
    files = RecordFiles(url, "default")
    async with running(directory, FakeEngine(), files=files) as here:
        yield here
    files.close()


class FaultyStore(ThreadingHTTPServer):
    """In front of a real one. refuses: statuses of the next writes, before they go on. holds: writes wait for it."""

    daemon_threads = True

    def __init__(self, behind: S3Server) -> None:
        super().__init__(("127.0.0.1", 0), _Through)
        self.behind = behind
        self.refuses = list[int]()
        self.holds: threading.Event | None = None
        self.came = threading.Event()


class _Through(BaseHTTPRequestHandler):
    server: FaultyStore

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        status, headers, data = 500, dict[str, str](), b""
        if self.command == "PUT":
            self.server.came.set()
            if self.server.holds is not None:
                self.server.holds.wait(60)
            if self.server.refuses:
                self._answer(self.server.refuses.pop(0), {}, b"")
                return
        given = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "content-length")}
        given = {"content-type": "application/octet-stream"} | given
        url = self.server.behind.endpoint + self.path
        asked = urllib.request.Request(url, body or None, given, method=self.command)
        try:
            with urllib.request.urlopen(asked, timeout=60) as found:
                status, headers, data = found.status, dict(found.headers), found.read()
        except urllib.error.HTTPError as error:
            status, headers, data = error.code, dict(error.headers), error.read()
        self._answer(status, headers, data)

    do_PUT = do_GET = do_HEAD = do_DELETE = do_POST = _pass

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        left = {"connection", "transfer-encoding", "server", "date"}
        if self.command != "HEAD":
            left.add("content-length")
            self.send_header("content-length", str(len(data)))
        for name, value in headers.items():
            if name.lower() not in left:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def faulty(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    s3.make_bucket("records")
    with serving(FaultyStore(s3)) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.server_port}")
        yield store


@contextmanager
def serving(store: FaultyStore) -> Iterator[FaultyStore]:
    thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield store
    finally:
        store.shutdown()
        thread.join()
        store.server_close()


def url_of(tmp_path: Path) -> str:
    """Each test's own part of the bucket."""
    return f"s3://records/{tmp_path.name}"


async def test_the_whole_circle(faulty: FaultyStore, tmp_path: Path) -> None:
    url = url_of(tmp_path)

    async with play(tmp_path, url) as here:
        inline = (await post(here, "/v1/completions", perf_metrics_in_response=True, **TEXT, **ALL)).json()
        whole = (await post(here, "/v1/completions", **TEXT, **ALL, **REFERENCE)).json()
        (found,) = read_reference(url, whole["record_reference"])
        assert columns_of(found) == inline_of(inline["choices"][0]) | {"kv_snapshots": []}
        (shown,) = await choices(here, {}, echo=True, **INLINE)
        for _ in range(2):
            (choice,) = await choices(here, {STORE: url}, echo=True, **FILES)
            same(choice, shown, url)
        assert len(choice["routing_references"]["files"]) == 2


async def test_the_age_of_files_is_by_the_clock_of_the_store(faulty: FaultyStore, tmp_path: Path) -> None:
    url = url_of(tmp_path)

    async with play(tmp_path, url) as here:
        await post(here, "/v1/completions", **TEXT, **REFERENCE)
    for keep_s, left in ((3600.0, 1), (-3600.0, 0)):
        files = RecordFiles(url, "default", keep_s=keep_s)
        files.sweep()
        seen = {one.path: one.size for one in files_seen(f"{url}/record-files/default")}
        assert seen.pop(CLOCK) == 0
        assert len(seen) == left
        assert (files.stats().held_bytes, files.stats().expired) == (sum(seen.values()), 1 - left)
        files.close()


async def test_a_slow_store_holds_up_no_other_request(faulty: FaultyStore, tmp_path: Path) -> None:
    url = url_of(tmp_path)

    async with play(tmp_path, url) as here:
        faulty.holds = threading.Event()
        waits = asyncio.create_task(sent(here, {STORE: url}, **FILES))
        await asyncio.to_thread(faulty.came.wait)
        assert (await sent(here, {})).status_code == 200
        assert not waits.done()
        faulty.holds.set()
        (choice,) = (await waits).json()["choices"]
        assert len(read_routes(choice["routing_references"]).routes) == 20


async def test_a_write_that_fails_for_a_moment_is_tried_again(faulty: FaultyStore, tmp_path: Path) -> None:
    url = url_of(tmp_path)

    async with play(tmp_path, url) as here:
        faulty.refuses = [503, 500]
        (choice,) = await choices(here, {STORE: url}, **FILES)
        assert read_routes(choice["routing_references"]).known.all()
        assert faulty.refuses == []


async def test_a_store_that_refuses_ends_the_answer_with_the_reason_and_no_secret(
    faulty: FaultyStore, tmp_path: Path
) -> None:
    url = url_of(tmp_path)

    async with play(tmp_path, url) as here:
        faulty.refuses = [403] * 2
        plain = await sent(here, {STORE: url}, **FILES)
        assert (plain.status_code, plain.json()["error"]["code"]) == (507, "records_not_stored")
        *_, last = sse((await sent(here, {STORE: url}, stream=True, **FILES)).text)
        assert last["error"]["code"] == "records_not_stored"
        for said in (plain.text, str(last)):
            assert "403" in said or "not accepted" in said
            assert SECRET_KEY not in said
        # Rows of an answer that nobody got are not referred to.
        assert await reused(here, {STORE: url}) == 0


async def test_a_file_that_the_store_lost_is_named_and_never_referred_to_again(
    s3: S3Server, faulty: FaultyStore, tmp_path: Path
) -> None:
    url = url_of(tmp_path)

    async with play(tmp_path, url) as here:
        (choice,) = await choices(here, {STORE: url}, echo=True, **FILES)
        (file,) = choice["routing_references"]["files"]
        assert await reused(here, {STORE: url}) > 0
        key = f"{tmp_path.name}/{file['file']}"
        data = s3.get("records", key)
        s3.put("records", key, data[:-1])
        with pytest.raises(RecordFileError, match=file["file"]):
            read_routes(choice["routing_references"])
        assert await reused(here, {STORE: url}) == 0
        s3.delete("records", key)
        with pytest.raises(RecordFileError, match=f"{file['file']}: is gone"):
            read_routes(choice["routing_references"])
        assert await reused(here, {STORE: url}) > 0
