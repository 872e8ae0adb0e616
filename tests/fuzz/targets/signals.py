"""Signals and hints of trainers, names of snapshots, and URLs of buckets: api/signals.py and snapshots/identity.py.

Checked: a body is read or refused by a 4xx. No accepted name or URL leads out of its bucket, and two accepted names never
mean one directory.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from midstream.api.signals import parse_hint, parse_signal, source_url
from midstream.core.decoding import message_of
from midstream.core.errors import ConfigError
from midstream.core.responses import ResponseAsked
from midstream.core.sessions import SessionsAsked
from midstream.core.traces import RewardAsked
from midstream.core.transfer import TransferOrder
from midstream.core.types import Desired, Hint, Pause, PolicyEnd
from midstream.snapshots.identity import check_identity, file_url_path, parse_bucket, public_url, snapshot_url
from midstream.snapshots.layout import is_snapshot_file
from targets.inference_wires import replica
from targets.rollout_requests import refusable
from targets.target import Target, check, controlled, outcome

BUCKETS = ("file:///srv/bucket", "s3://rollouts/run%201", "az://c@acc.dfs.core.windows.net/p")


def run(data: bytes) -> None:
    control, body = controlled(data)
    text = body.decode("utf-8", "surrogateescape")
    (run_bodies, run_names)[control & 1](body, text)


def run_bodies(body: bytes, text: str) -> None:
    signal, _ = refusable(lambda: parse_signal(body))
    if signal is not None:
        check_place(signal.identity)
        check(signal.reset in ("all", "new_session", "none"), "another policy", signal.reset)
        check(signal.max_cache_age is None or signal.max_cache_age >= 0, "an age below 0", signal)
        check((signal.compression is None) == (signal.previous is None), "a delta of no format", signal)
        again = parse_signal(msgspec.json.encode(signal))
        check(again == signal, "another signal when it is written again", signal, again)
    hint, _ = refusable(lambda: parse_hint(body))
    if hint is not None:
        if hint.identity is not None:
            check_place(hint.identity)
        check(
            all(is_snapshot_file(name) and "/" not in name for name in hint.names),
            "files from elsewhere",
            hint,
        )


def run_names(body: bytes, text: str) -> None:
    _, refused = refusable(lambda: check_identity(text))
    if refused is None:
        check_place(text)
    found, _ = refusable(lambda: source_url(text, BUCKETS))
    if found is not None:
        url, bucket = found
        root, path = unquote(urlsplit(bucket).path), unquote(urlsplit(url).path)
        check(posixpath.normpath(path) == path, "a path that is not plain", path)
        check(path.startswith(f"{root}/"), "a directory outside its bucket", url, bucket)
        parse_bucket(url)
    place, _ = outcome(ConfigError, lambda: parse_bucket(text))
    if place is not None:
        segments = place.path.split("/")
        check(".." not in segments and "." not in segments, "a path that leads up", place)
        check("\0" not in place.path, "a path with NUL", place)
    outcome(ConfigError, lambda: file_url_path(text))
    public_url(text).encode()


def check_place(identity: str) -> None:
    """Decoded, the URL of a snapshot is the bucket's and its name, which is one path."""
    url = snapshot_url(BUCKETS[0], identity)
    path = file_url_path(url)
    check(str(path) == f"/srv/bucket/{identity}", "another directory than the name says", identity, path)
    check(posixpath.normpath(str(path)) == str(path), "a name that leads elsewhere", identity)


#: What gateways send replicas, and how a replica's messages call it.
MESSAGES: tuple[tuple[msgspec.json.Decoder[Any], str], ...] = (
    (msgspec.json.Decoder(Desired), "desired"),
    (msgspec.json.Decoder(SessionsAsked), "asked"),
    (msgspec.json.Decoder(Hint), "hint"),
    (msgspec.json.Decoder(PolicyEnd), "end"),
    (msgspec.json.Decoder(RewardAsked), "reward"),
    (msgspec.json.Decoder(ResponseAsked), "response"),
    (msgspec.json.Decoder(Pause), "pause"),
    (msgspec.json.Decoder(tuple[str, ...] | None), "ids"),
    (msgspec.json.Decoder(TransferOrder), "an order"),
)
#: Of these, what a replica answers without an engine, and what leaves nothing for the next input.
ANSWERED = (
    "sessions",
    "sessions/close",
    "trace",
    "responses",
    "reward",
    "policy/end",
    "abort",
    "reset_cache",
)


def run_internal(data: bytes) -> None:
    """Bodies that gateways send replicas."""
    for decoder, what in MESSAGES:
        read, _ = refusable(lambda d=decoder, w=what: message_of(data, d, w))  # type: ignore[misc]
        if read is not None:
            again = decoder.decode(msgspec.json.encode(read))
            check(repr(again) == repr(read), "another message when it is written again", read)
    for path in ANSWERED:
        answer = replica().ask(f"/replica/{path}", data, {})
        told = json.loads(answer.body)
        check(answer.status in (200, 400, 404), "a gateway's bytes are the replica's fault", path, answer)
        check((answer.status == 200) != ("error" in told), "a refusal of another shape", path, told)


def seeds() -> Iterator[bytes]:
    metadata = {
        "previous_snapshot_identity": "s-0",
        "compression_format": "arc_v2",
        "checksum_format": "alder32",
    }
    bodies = (
        {"identity": "run/step-1"},
        {"identity": "s", "reset_prompt_cache": {"max_age": 3}},
        {"identity": "s", "reset_prompt_cache": "new_session", "incremental_snapshot_metadata": metadata},
        {"identity": "s", "reset_prompt_cache": False, "validation": {"extra_fields_ignore": ["a"]}},
        {"identity": "s", "files": ["config.json", "model.safetensors"]},
        {"identity": "s", "file": "tokenizer.json", "incremental_snapshot_metadata": metadata},
    )
    for body in bodies:
        yield b"\x00" + json.dumps(body).encode()
    names = (
        "step-1",
        "a/b",
        "a/../b",
        "..",
        "a%2e",
        "é",
        "base",
        "file:///srv/bucket/a",
        "s3://rollouts/run%201/%2e%2e/a",
    )
    urls = (
        "s3://rollouts/run 1/a",
        "file://localhost/srv/bucket/a%2Fb",
        "abfss://c@acc.dfs.core.windows.net/p",
        "gs://b/p",
    )
    for name in (*names, *urls):
        yield b"\x01" + name.encode()


def internal_seeds() -> Iterator[bytes]:
    yield json.dumps({"snapshot": "s", "generation": 1, "chain": []}).encode()
    yield json.dumps({"tenant": "t", "key": "k", "after": "", "limit": 5}).encode()
    yield json.dumps({"snapshot": "s", "url": "file:///a", "names": ["config.json"]}).encode()
    yield json.dumps({"policy": "red", "made": 1.5}).encode()
    given = {"reward": 1, "turn": 1, "name": "n", "metadata": {"a": []}}
    yield json.dumps({"tenant": "t", "key": "k", "look": True, "given": given}).encode()
    yield json.dumps({"tenant": "t", "id": "resp_1_r0", "what": "items"}).encode()
    yield json.dumps({"serial": 3, "mode": "keep"}).encode()
    yield b'["a", "b"]'
    yield b"null"


WORDS = (
    *(
        b"../",
        b"%2e%2e",
        b"%2F",
        b"%252e",
        b"\\",
        b"@",
        b"file://",
        b"s3://rollouts/run%201/",
        b"\x7f",
        b"\xc2\x85",
    ),
    *(
        b'"identity":"',
        b'"max_age":',
        b'"files":[',
        b'"reset_prompt_cache":',
        b"[" * 32,
        b'"\\ud800"',
        b"%00",
        b"?",
        b"#",
    ),
)
TARGET = Target(run, seeds, WORDS, 2048)
INTERNAL = Target(run_internal, internal_seeds, WORDS, 2048)
