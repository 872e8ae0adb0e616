"""Pushed snapshots that come from other replicas: whole, compared byte for byte, and from the next one when one fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from checkpoints import weights, write_checkpoint

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from midstream.core.headers import HEADER_TOKEN
from midstream.core.types import Content, SnapshotFiles
from midstream.snapshots import content as contents
from midstream.snapshots.content import content_fingerprint, directory_content
from midstream.snapshots.store import fetch, kept
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.local import note_contents, write_own_listing
from midstream.snapshots.store.peers import Peers, etag, open_held

NAMES = ["config.json", "model.safetensors", "tokenizer.json"]
TOKEN = "secret"
PART = 64


class Peer:
    """Another replica's port. fault: of what it gives of the weights. gave: the parts of the weights that it gave."""

    def __init__(self, source: Path, content: Content) -> None:
        self.source, self.content = source, content
        self.fault = ""
        self.gave: list[int] = []
        self.gives: Callable[[], None] = lambda: None
        self.asked = 0
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                peer.answer(self, head=True)

            def do_GET(self) -> None:
                peer.answer(self, head=False)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        # The other side may have left.
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.server.shutdown()
            self._thread.join()
            self.server.server_close()

    def answer(self, to: BaseHTTPRequestHandler, *, head: bool) -> None:
        self.asked += 1
        fingerprint, _, name = to.path.removeprefix("/replica/files/").partition("/")
        known = {file.name: file for file in self.content}
        wrong_key = to.headers[HEADER_TOKEN] != TOKEN
        evicted = self.fault == "evicts" and len(self.gave) > 2
        if wrong_key or evicted or self.fault == "lacks" or fingerprint != content_fingerprint(self.content):
            to.send_response(401 if wrong_key else 404)
            to.send_header("content-length", "0")
            to.end_headers()
            return
        data = (self.source / name).read_bytes()
        begin, end = 0, len(data)
        if not head:
            begin, last = map(int, to.headers["range"].removeprefix("bytes=").split("-"))
            end = last + 1
        to.send_response(200 if head else 206)
        to.send_header("etag", etag(known[name]))
        to.send_header("content-length", str(end - begin))
        to.send_header("content-range", f"bytes {begin}-{end - 1}/{len(data)}")
        to.end_headers()
        if head:
            return
        piece = bytearray(data[begin:end])
        if name.endswith(".safetensors"):
            self.gave.append(begin // PART)
            self.gives()
            if "dies" in self.fault and len(self.gave) > 2:
                piece = piece[: len(piece) // 2]
                to.close_connection = True
            if "wrong" in self.fault and len(self.gave) % 2 == 0:
                piece[0] ^= 1
        to.wfile.write(piece)


class World:
    """A replica that lacks a pushed snapshot, and others that may have it. slept: looks into the bucket, but the first."""

    def __init__(self, root: Path) -> None:
        self.source = write_checkpoint(root / "trained")
        self.content = directory_content(self.source, NAMES)
        self.link = SnapshotFiles(
            snapshot="v1",
            url=(root / "bucket" / "v1").as_uri(),
            fingerprint=content_fingerprint(self.content),
            content=self.content,
        )
        self.slept = 0
        #: Is called between two looks.
        self.waits: Callable[[], None] = lambda: None
        self.cache = SnapshotCache(root / "cache")
        self.fetcher = ChainFetcher(self.cache, threads=1, sleep=self._sleep, peers=Peers(TOKEN))
        self.peers = [Peer(self.source, self.content) for _ in range(3)]

    async def _sleep(self, _: float) -> None:
        self.slept += 1
        self.waits()

    def fetch(self, *peers: Peer) -> Path | None:
        self.fetcher.meet([peer.url for peer in peers])
        return asyncio.run(self.fetcher.fetch([self.link]))

    def check(self, path: Path | None) -> None:
        assert path is not None
        assert weights(path) == weights(self.source)
        assert directory_content(path, NAMES) == self.content
        # It is here now, for this replica and for others.
        for peer in self.peers:
            peer.stop()
        assert self.fetch() == path


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(contents, "PART_BYTES", PART)
    monkeypatch.setattr(fetch, "PARTS_IN_FLIGHT", 1)
    monkeypatch.setattr(kept, "KEPT_WAIT_S", 3.0)
    made = World(tmp_path)
    try:
        yield made
    finally:
        for peer in made.peers:
            peer.stop()


def test_what_the_bucket_lacks_comes_from_the_first_replica_that_has_it(world: World) -> None:
    lacks, has, other = world.peers
    lacks.fault = "lacks"
    path = world.fetch(lacks, has, other)
    assert (world.slept, other.asked) == (0, 0)
    assert len(has.gave) == len(set(has.gave)) > 4
    world.check(path)


def test_a_fetch_that_waits_asks_replicas_of_which_it_is_told_meanwhile(world: World) -> None:
    lacks, has, _ = world.peers
    lacks.fault = "lacks"
    world.waits = lambda: world.fetcher.meet([has.url])
    path = world.fetch(lacks)
    assert world.slept == 1
    world.check(path)


def test_a_fetch_that_loses_its_replica_asks_one_of_which_it_was_told_meanwhile(world: World) -> None:
    dies, has, _ = world.peers
    dies.fault = "dies"
    # It gives two parts, and is not alone by then.
    dies.gives = lambda: world.fetcher.meet([dies.url, has.url])
    path = world.fetch(dies)
    assert has.gave == [*range(2, len(has.gave) + 2)]
    world.check(path)


def test_a_replica_that_dies_is_continued_by_the_next_one(world: World) -> None:
    dies, gone, has = world.peers
    dies.fault = "dies"
    gone.stop()
    path = world.fetch(dies, gone, has)
    # Of the first replica, two parts came whole.
    assert has.gave == [*range(2, len(has.gave) + 2)]
    world.check(path)


def test_a_replica_that_evicts_what_it_gives_has_not_refuted_the_snapshot(world: World) -> None:
    evicts, has, _ = world.peers
    evicts.fault = "evicts"
    with pytest.raises(SnapshotError, match="cannot be read") as error:
        world.fetch(evicts)
    assert not isinstance(error.value, SnapshotCorrupt)
    path = world.fetch(has)
    # What came is kept.
    assert has.gave == [*range(3, len(has.gave) + 3)]
    world.check(path)


def test_no_proxy_of_the_environment_gets_the_token(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, has, _ = world.peers
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    path = world.fetch(has)
    assert proxy.asked == 0
    world.check(path)


def test_bytes_that_are_not_the_expected_ones_are_never_used(world: World) -> None:
    wrong, dies, has = world.peers
    wrong.fault, dies.fault = "wrong", "dies"
    path = world.fetch(wrong, dies, has)
    # Of the first one, nothing is used; of the second one, two parts.
    assert dies.gave[:3] == [0, 1, 2]
    assert has.gave == [*range(2, len(has.gave) + 2)]
    world.check(path)


def test_where_several_gave_wrong_bytes_the_last_one_gives_all(world: World) -> None:
    wrong, has, _ = world.peers
    wrong.fault = "wrong and dies"
    path = world.fetch(wrong, has)
    # All but the first two, and then all.
    assert sorted(has.gave) == sorted([*range(2, max(has.gave) + 1), *range(max(has.gave) + 1)])
    world.check(path)


def test_what_no_replica_gives_is_an_error_and_nothing_is_here(world: World) -> None:
    wrong, dies, lacks = world.peers
    wrong.fault, dies.fault, lacks.fault = "wrong", "dies", "lacks"
    with pytest.raises(SnapshotError):
        world.fetch(dies, lacks)
    with pytest.raises(SnapshotCorrupt, match="not those that this name means"):
        world.fetch(wrong)
    assert world.cache.find_full(world.content) is None
    world.slept = 0
    with pytest.raises(SnapshotMissing):
        world.fetch(lacks)
    # It was awaited in the bucket, and asked for each time.
    assert world.slept == 3
    assert lacks.asked > 3


def test_only_files_of_a_whole_snapshot_with_this_content_are_given(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    source = write_checkpoint(root / "v1")
    (tmp_path / "outside").write_text("secret")
    content = directory_content(source, NAMES)
    fingerprint = content_fingerprint(content)
    assert open_held(root, fingerprint, "config.json") is None
    note_contents(source, [content])
    write_own_listing(source)
    found = open_held(root, fingerprint, "config.json")
    assert found is not None
    with open(found[0], "rb") as file:
        assert (file.read(), found[1]) == ((source / "config.json").read_bytes(), content[0])
    for name in ("../../outside", "/etc/hostname", ".listing.json", "", "config.json/"):
        assert open_held(root, fingerprint, name) is None
    assert open_held(root, "content:0", "config.json") is None
    # One byte more: it is not the file that was noted.
    with (source / "config.json").open("a") as changed:
        changed.write(" ")
    assert open_held(root, fingerprint, "config.json") is None
