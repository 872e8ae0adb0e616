"""Buckets by their URL, S3 on a real server, and that nothing secret is ever shown."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from checkpoints import fetch_snapshot, files, put_directory, write_checkpoint
from clouds import Cloud, cloud_server
from fingerprints import snapshot_fingerprint
from hypothesis import given
from hypothesis import strategies as st
from obstore.exceptions import GenericError
from s3server import KEYS_PER_PAGE, S3Server, s3_server

from midstream.client.bucket import open_bucket as open_for_publishing
from midstream.client.errors import PublishError
from midstream.core.errors import ConfigError, SnapshotError, SnapshotMissing, SnapshotRefused
from midstream.snapshots.content import MANIFEST_FILE, directory_content, parse_manifest
from midstream.snapshots.identity import BucketPlace, parse_bucket, public_url, snapshot_url
from midstream.snapshots.layout import read_spec
from midstream.snapshots.store import upload
from midstream.snapshots.store.bucket import check_settings, describe, open_bucket
from midstream.snapshots.store.listing import find_snapshot, list_snapshot
from midstream.snapshots.store.upload import list_directory, upload_order

pytestmark = pytest.mark.slow

# An identity whose characters all mean something to somebody.
ODD = "run 7/100%/ünïcode#?&+~"


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("file:///a/b%20c", BucketPlace("file", "", "/a/b c")),
        ("file://localhost/a", BucketPlace("file", "", "/a")),
        ("s3://bucket", BucketPlace("s3", "bucket", "")),
        ("s3://bucket/", BucketPlace("s3", "bucket", "")),
        ("s3a://bucket/a/b%25/", BucketPlace("s3", "bucket", "a/b%")),
        ("gs://my_bucket.example/x", BucketPlace("gs", "my_bucket.example", "x")),
        ("az://container/x", BucketPlace("az", "container", "x")),
        (
            "abfss://container@account.dfs.core.windows.net/x/y",
            BucketPlace("az", "container", "x/y", "account", "account.dfs.core.windows.net"),
        ),
    ],
)
def test_what_a_bucket_url_names(url: str, place: BucketPlace) -> None:
    assert parse_bucket(url) == place
    assert public_url(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "/plain/path",
        "ftp://host/x",
        "http://host/bucket",
        "file://host/x",
        "file:relative",
        "file:///a?b",
        "file:///a#b",
        "file:///a/../b",
        "file:///a%00b",
        "s3://",
        "s3:///x",
        "s3://bucket?x=1",
        "s3://bucket:9000/x",
        "s3://buck et/x",
        "s3://bucket/a//b",
        "s3://bucket/a/%2e%2e/b",
        "s3://bucket/./b",
        "s3://bucket/a%0Ab",
        "s3://bucket/a%FFb",
        "gs://[bucket/x",
    ],
)
def test_what_is_no_bucket_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="bucket"):
        parse_bucket(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA123:hunter2secret@bucket/x",
        "s3://hunter2secret@bucket/x",
        "gs://u:hunter2secret@bucket",
        "az://container/x?sv=1&sig=hunter2secret",
        "abfss://container:hunter2secret@account.dfs.core.windows.net/x",
        "ftp://u:hunter2secret@host/x",
        "s3://bucket/x#hunter2secret",
    ],
)
def test_a_url_with_a_secret_is_refused_without_repeating_it(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_bucket(url)
    with pytest.raises(SnapshotMissing) as missing:
        asyncio.run(fetch_snapshot(url, tmp_path / "d"))
    assert "hunter2" not in str(refused.value) + str(missing.value) + public_url(url)


@given(st.text(max_size=40))
def test_no_accepted_identity_leaves_its_bucket(identity: str) -> None:
    for bucket in ("s3://bucket/pre%20fix", "s3://bucket", "az://container/p"):
        try:
            place = parse_bucket(snapshot_url(bucket, identity))
        except SnapshotRefused:
            return
        root = parse_bucket(bucket).path
        assert place.path == (f"{root}/{identity}" if root else identity)


def test_settings_that_are_missing_are_named_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"az://container/x.*[Aa]ccount"):
        check_settings("az://container/x")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not base64, but secret")
    with pytest.raises(ConfigError) as caught:
        check_settings("az://container/x")
    assert "secret" not in str(caught.value)
    check_settings("gs://bucket/x")


# --- S3, on a real server ---


def test_a_sharded_snapshot_comes_from_s3_whole_and_under_an_odd_name(s3: S3Server, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", shards=3)
    (source / "optimizer.pt").write_bytes(b"pickled")
    s3.put_directory("rollouts", f"team a/{ODD}", source)
    s3.put("rollouts", f"team a/{ODD}/deeper/model.safetensors", b"another snapshot's")
    url = snapshot_url("s3://rollouts/team%20a", ODD)
    seen: list[tuple[int, int]] = []
    asyncio.run(
        fetch_snapshot(
            url,
            tmp_path / "dest",
            lambda done, total: seen.append((done, total)),
            fingerprint=asyncio.run(snapshot_fingerprint(url)),
        )
    )
    expected = files(source)
    del expected["optimizer.pt"]
    assert files(tmp_path / "dest") == expected
    assert seen[-1] == (sum(map(len, expected.values())),) * 2
    assert len(read_spec(tmp_path / "dest").tensors) == 4


def test_what_is_not_in_s3_is_missing_and_named(s3: S3Server, tmp_path: Path) -> None:
    with pytest.raises(SnapshotMissing, match=r"^s3://rollouts/absent: holds no snapshot files"):
        asyncio.run(fetch_snapshot("s3://rollouts/absent", tmp_path / "d"))
    with pytest.raises(SnapshotError, match=r"^s3://no-such-bucket/x: cannot be listed: .*NoSuchBucket"):
        asyncio.run(fetch_snapshot("s3://no-such-bucket/x", tmp_path / "d"))


def test_a_listing_of_several_pages_is_complete(s3: S3Server) -> None:
    names = [f"model-{i:05d}.safetensors" for i in range(2 * KEYS_PER_PAGE + 3)]
    store = open_bucket("s3://rollouts/many")
    for name in names:
        store.put(name, b"x")
    listing = asyncio.run(list_snapshot("s3://rollouts/many"))
    assert sorted(f.name for f in listing.files) == names
    assert list_directory("s3://rollouts", "many") == (names, [])


async def test_a_listing_longer_than_a_page_of_s3_itself_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"model-{i:05d}.safetensors" for i in range(1003)]

    with s3_server(keys_per_page=1000) as s3:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        s3.make_bucket("rollouts")
        store, slots = open_bucket("s3://rollouts/large"), asyncio.Semaphore(16)

        async def put(name: str) -> None:
            async with slots:
                await store.put_async(name, b"x")

        await asyncio.gather(*map(put, names))
        listing = await list_snapshot("s3://rollouts/large")
    assert sorted(f.name for f in listing.files) == names


def test_a_fingerprint_follows_the_files_in_s3(s3: S3Server, tmp_path: Path) -> None:
    s3.put_directory("rollouts", "fp", write_checkpoint(tmp_path / "source"))
    first = asyncio.run(snapshot_fingerprint("s3://rollouts/fp"))
    s3.put("rollouts", "fp/notes.md", b"not a snapshot's")
    assert asyncio.run(snapshot_fingerprint("s3://rollouts/fp")) == first
    s3.put("rollouts", "fp/tokenizer.json", b"[]")
    assert asyncio.run(snapshot_fingerprint("s3://rollouts/fp")) != first


# --- putting ---


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_directory_put_into_a_bucket_is_fetched_as_it_was(
    s3: S3Server, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "UPLOAD_PART_BYTES", 5 * 2**20)
    bucket = "s3://rollouts/put%20here" if kind == "s3" else (tmp_path / "bucket dir").as_uri()
    # Several parts of an upload.
    source = write_checkpoint(tmp_path / "source", shards=2, size=100_000)
    (source / "optimizer.pt").write_bytes(b"pickled")
    told: list[str] = []
    publishing = open_for_publishing(bucket)
    assert not publishing.exists(ODD)
    publishing.put(ODD, source, overwrite=False, on_file=told.append)
    assert publishing.exists(ODD)
    asyncio.run(fetch_snapshot(snapshot_url(bucket, ODD), tmp_path / "back"))
    expected = {name: data for name, data in files(source).items() if name != "optimizer.pt"}
    assert files(tmp_path / "back") == expected
    assert told == (upload_order(expected) if kind == "s3" else [])
    content = asyncio.run(find_snapshot(snapshot_url(bucket, ODD))).content
    assert content == directory_content(source, expected)
    if kind == "s3":
        assert list_directory(bucket, "run 7/100%") == ([], ["ünïcode#?&+~"])
    else:
        put = files(tmp_path / "bucket dir" / ODD)
        assert parse_manifest(put.pop(MANIFEST_FILE)) == directory_content(source, expected)
        assert put == expected


def test_weights_are_put_first_and_the_index_last() -> None:
    names = [
        "config.json",
        "model.safetensors.index.json",
        "b.safetensors",
        "tokenizer.json",
        "a.safetensors",
    ]
    assert upload_order([*names, "x.bin"]) == [
        "a.safetensors",
        "b.safetensors",
        "tokenizer.json",
        "config.json",
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_taken_place_is_replaced_only_when_asked_and_then_wholly(
    s3: S3Server, tmp_path: Path, kind: str
) -> None:
    bucket = "s3://rollouts/taken" if kind == "s3" else (tmp_path / "bucket").as_uri()
    three = write_checkpoint(tmp_path / "three", shards=3)
    two = write_checkpoint(tmp_path / "two", shards=2, seed=1)
    put_directory(bucket, "step", three)
    with pytest.raises(PublishError, match="'step' is already in the bucket"):
        put_directory(bucket, "step", two)
    put_directory(bucket, "step", two, overwrite=True)
    asyncio.run(fetch_snapshot(f"{bucket}/step", tmp_path / "back"))
    assert files(tmp_path / "back") == files(two)


def test_nothing_is_put_from_a_directory_without_a_snapshot(s3: S3Server, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(SnapshotMissing, match="holds no snapshot files"):
        upload.put_directory("s3://rollouts", "none", tmp_path)
    with pytest.raises(SnapshotRefused):
        upload.put_directory("s3://rollouts", "../none", write_checkpoint(tmp_path / "c"))


# --- Google and Azure, on stand-ins ---


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with cloud_server() as server:
        yield server


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_snapshot_comes_from_google_and_azure(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    settings = {
        "gs": {"GOOGLE_BASE_URL": cloud.endpoint, "GOOGLE_SKIP_SIGNATURE": "true"},
        "az": {
            "AZURE_STORAGE_ENDPOINT": cloud.endpoint,
            "AZURE_SKIP_SIGNATURE": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
        },
    }
    for name, value in settings[scheme].items():
        monkeypatch.setenv(name, value)
    source = write_checkpoint(tmp_path / "source", shards=2)
    for name, data in files(source).items():
        cloud.objects[f"rollouts/runs/step 1/{name}"] = data
    url = snapshot_url(f"{scheme}://rollouts/runs", "step 1")
    asyncio.run(fetch_snapshot(url, tmp_path / "dest", fingerprint=asyncio.run(snapshot_fingerprint(url))))
    assert files(tmp_path / "dest") == files(source)
    reads = [headers for method, path, headers in cloud.requests if method == "GET" and "safetensors" in path]
    assert reads
    assert all("if-match" in headers for headers in reads)
    cloud.objects["rollouts/runs/step 1/config.json"] = b"{}"
    asyncio.run(fetch_snapshot(url, tmp_path / "dest"))
    assert (tmp_path / "dest" / "config.json").read_bytes() == b"{}"


# --- secrets ---

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAHUNTER2HUNTER2",
    "AWS_SECRET_ACCESS_KEY": "hunter2/secret+key=with odd",
    "AWS_SESSION_TOKEN": "hunter2-session-token",
}

ROLE_TOKEN = "token-of-a-role-in-no-environment"


@pytest.fixture
def echoing_server() -> Iterator[str]:
    """A server that refuses everything and repeats all it was sent, and the secrets besides: as S3, as a proxy, as text."""
    formats = itertools.cycle(
        [
            "<Error><Code>SignatureDoesNotMatch</Code><Message>{}</Message></Error>",
            "<!doctype html><p>{}",
            "{}",
        ]
    )

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            sent = "".join(f"{name}: {value}\n" for name, value in self.headers.items())
            known = " ".join(SECRETS.values())
            body = next(formats).format(f"{known} {ROLE_TOKEN} {sent}").encode()
            self.send_response(403, f"Forbidden {SECRETS['AWS_SECRET_ACCESS_KEY']}")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_PUT = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_no_credential_is_in_a_message_a_log_or_a_traceback(
    echoing_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in {**SECRETS, "AWS_ENDPOINT_URL": echoing_server, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    source = write_checkpoint(tmp_path / "source")
    attempts: list[Any] = [
        lambda: asyncio.run(fetch_snapshot("s3://rollouts/x", tmp_path / "d")),
        lambda: asyncio.run(snapshot_fingerprint("s3://rollouts/x")),
        lambda: upload.put_directory("s3://rollouts", "x", source),
    ] * 3
    said = ""
    with caplog.at_level(logging.DEBUG):
        for attempt in attempts:
            with pytest.raises(SnapshotError) as caught:
                attempt()
            said += str(caught.value) + "".join(traceback.format_exception(caught.value))
            logging.getLogger("midstream").exception("failed", exc_info=caught.value)
    said += caplog.text
    assert "s3://rollouts/x" in said
    assert "SignatureDoesNotMatch" in said
    assert "403" in said
    for value in SECRETS.values():
        assert value not in said
    assert "hunter2" not in said.lower()
    assert ROLE_TOKEN not in said
    assert "Signature=" not in said


def test_a_stores_words_lose_the_credentials_of_a_url_but_not_its_host() -> None:
    said = describe(
        GenericError("error sending request for url (http://AKIA123:hunter2@proxy.example:9000/x)"), {}
    )
    assert said == "error sending request for url (http://proxy.example:9000/x)"


def test_without_credentials_the_error_says_what_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message of a store that found none, with a profile in place that other tools would use."""
    said = describe(
        GenericError(
            "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1.2s - 403"
        ),
        {"AWS_PROFILE": "team"},
    )
    assert said.startswith(
        "no credentials in the environment (profiles in ~/.aws are not read), and none from"
    )


def test_a_server_that_is_not_there_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {**SECRETS, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SnapshotError, match=r"^s3://rollouts/x: cannot be listed: .*127\.0\.0\.1:1"):
        asyncio.run(fetch_snapshot("s3://rollouts/x", tmp_path / "d"))
    assert os.environ["AWS_SESSION_TOKEN"] == SECRETS["AWS_SESSION_TOKEN"]
