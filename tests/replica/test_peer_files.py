"""One replica gives another the files of a pushed snapshot, through its port."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from replica_fakes import FakeEngine, running

from midstream.core.headers import HEADER_TOKEN
from midstream.core.types import FileContent, SnapshotFiles
from midstream.replica import peer_files
from midstream.replica.peer_files import PeerFileExchange
from midstream.snapshots.content import content_fingerprint, directory_content
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.local import note_contents, write_own_listing
from midstream.snapshots.store.peers import Peers

NAMES = ["config.json", "model.safetensors"]
READ = peer_files._read
KNOWN = {HEADER_TOKEN: "secret"}


@pytest.fixture
def held(tmp_path: Path) -> tuple[ChainFetcher, SnapshotFiles]:
    """A cache with a pushed snapshot, and how it is known."""
    cache = SnapshotCache(tmp_path / "theirs")
    whole = cache.root / "v1"
    whole.mkdir()
    (whole / "config.json").write_text("{}")
    (whole / "model.safetensors").write_bytes(bytes(range(250)) * 9000)
    content = directory_content(whole, NAMES)
    note_contents(whole, [content])
    write_own_listing(whole)
    fingerprint = content_fingerprint(content)
    url = (tmp_path / "bucket" / "v1").as_uri()
    link = SnapshotFiles(snapshot="v1", url=url, fingerprint=fingerprint, content=content)
    return ChainFetcher(cache), link


async def test_another_replica_gets_the_files_through_the_port(
    tmp_path: Path, held: tuple[ChainFetcher, SnapshotFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, link = held
    ours = ChainFetcher(SnapshotCache(tmp_path / "ours"), threads=1, peers=Peers("secret"))

    (tmp_path / "model").mkdir()
    async with running(tmp_path / "model", FakeEngine(), token="secret") as here:
        monkeypatch.setattr(here.source.chains, "open_held", theirs.open_held)
        ours.meet(["http://127.0.0.1:9", here.url])
        path = await ours.fetch([link])
        assert path is not None
        assert directory_content(path, NAMES) == link.content


async def test_a_range_is_given_as_asked_and_nothing_else_is_there(
    tmp_path: Path, held: tuple[ChainFetcher, SnapshotFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, link = held
    content = link.content
    assert content is not None
    weights = bytes(range(250)) * 9000
    monkeypatch.setattr(peer_files, "PIECE_BYTES", 1000)

    (tmp_path / "model").mkdir()
    async with (
        running(tmp_path / "model", FakeEngine(), token="secret") as here,
        httpx.AsyncClient(base_url=here.url, headers=KNOWN) as http,
    ):
        monkeypatch.setattr(here.source.chains, "open_held", theirs.open_held)
        at = f"/replica/files/{link.fingerprint}/model.safetensors"
        head = await http.head(at)
        assert (head.status_code, int(head.headers["content-length"])) == (200, len(weights))
        assert head.headers["etag"] == f'"{content[1].digest}"'
        assert (await http.get(at)).content == weights
        some = await http.get(at, headers={"range": "bytes=10-2509"})
        assert (some.status_code, some.content) == (206, weights[10:2510])
        assert some.headers["content-range"] == f"bytes 10-2509/{len(weights)}"
        for wrong in (
            "bytes=5-4",
            f"bytes={len(weights)}-{len(weights)}",
            "bytes=-5",
            "bytes=0-1,4-5",
            "x",
        ):
            assert (await http.get(at, headers={"range": wrong})).status_code == 400
        for other in ("content:0/model.safetensors", f"{link.fingerprint}/..%2f..%2fmodel", "", "x"):
            assert (await http.get(f"/replica/files/{other}")).status_code == 404
        assert (await http.post(at)).status_code == 404
        assert (await http.get(at, headers={HEADER_TOKEN: "other"})).status_code == 401
        # The connection is of use after each of them.
        assert (await http.get("/health")).status_code == 200


def ends(opened: int, *_: object) -> bytes:
    return READ(opened, 10**9, 10**9 + 1)


def fails(*_: object) -> bytes:
    raise ValueError("a bug")


@pytest.mark.parametrize("later", [ends, fails])
async def test_a_file_that_fails_after_its_beginning_is_broken_off(
    tmp_path: Path,
    held: tuple[ChainFetcher, SnapshotFiles],
    monkeypatch: pytest.MonkeyPatch,
    later: Callable[..., bytes],
) -> None:
    """Whatever is written then would be taken for bytes of the file."""
    theirs, link = held

    (tmp_path / "model").mkdir()
    async with (
        running(tmp_path / "model", FakeEngine(), token="secret") as here,
        httpx.AsyncClient(base_url=here.url, headers=KNOWN) as http,
    ):
        monkeypatch.setattr(here.source.chains, "open_held", theirs.open_held)
        monkeypatch.setattr(
            peer_files,
            "_read",
            lambda *asked: READ(*asked) if asked[1] == 0 else later(*asked),
        )
        with pytest.raises(httpx.NetworkError):
            await http.get(f"/replica/files/{link.fingerprint}/model.safetensors")
        assert (await http.get("/health")).status_code == 200


async def test_a_file_is_closed_when_its_client_left_while_it_was_opened() -> None:
    entered, go = threading.Event(), threading.Event()
    opened, other_end = os.pipe()

    def open_held(_: str, name: str) -> tuple[int, FileContent]:
        entered.set()
        assert go.wait(60)
        return opened, FileContent(name, 1, "")

    request: Any = SimpleNamespace(target=b"/replica/files/content:0/x", method=b"GET", first={})
    client: Any = SimpleNamespace(writable=True)
    chains: Any = SimpleNamespace(open_held=open_held)
    exchange = PeerFileExchange(request, client, chains)
    exchange.start()
    assert await asyncio.to_thread(entered.wait, 60)
    exchange.client_gone()
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait([exchange._task])
    with pytest.raises(BrokenPipeError):
        os.write(other_end, b"x")
    os.close(other_end)
