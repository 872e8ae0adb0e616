"""The audit log: every control call has one line that no client can forge, and no secret is in it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import Stage, post, respond_ok, run, staged
from test_access import CASES, DEPLOYMENTS, ONE, OTHER, TO_OTHER, A, world
from test_scopes import routes_of, whole_front, whole_gateway

from midstream.core.key_settings import KeySettings
from midstream.core.wires import CHANGES_BY_GET, HOT_LOAD_PATH, WIRES
from midstream.http.appserver import AppServer
from midstream.http.auth import Authenticator, Caller
from midstream.proxy import audit

LINE_MAX = 40_000


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """lines() -> what the audit log says, as objects."""

    def read() -> list[dict[str, Any]]:
        records = [record for record in caplog.records if record.name == "midstream.audit"]
        return [json.loads(record.getMessage()) for record in records]

    # The other loggers are quiet.
    caplog.set_level(logging.ERROR)
    caplog.handler.setLevel(logging.NOTSET)
    yield read
    audit.write_to("log")


def test_every_route_that_changes_something_has_a_line_whoever_calls_it(lines: Any) -> None:
    """A new route needs a case in test_access.py, and gets its line here."""
    changing = {
        (method, path)
        for method, path in routes_of(whole_gateway())
        if (method != "GET" or path in CHANGES_BY_GET) and path not in WIRES
    }
    cases = [case for case in CASES if (case[1], case[0]) in changing]
    assert {(case[1], case[0]) for case in cases} == changing
    told: list[tuple[str, str, int]] = []

    async def main() -> None:
        async with world() as here:
            for _, method, path, body, headers, _ in cases:
                for kind in (None, "unknown", "observe", "operate"):
                    answer = await here.ask(kind, method, path, body, headers)
                    told.append((method, path.partition("?")[0], answer.status))

    run(main)
    assert [(line["method"], line["path"], line["status"]) for line in lines()] == told
    assert {200, 401, 403} <= {status for *_, status in told}


async def test_a_key_is_looked_up_once_for_all_that_a_request_needs_it_for(
    lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, caller = [], Authenticator.caller

    def counting(self: Authenticator, headers: Mapping[bytes, bytes]) -> Caller:
        looked_up.append(headers)
        return caller(self, headers)

    monkeypatch.setattr(Authenticator, "caller", counting)

    calls = (
        post(b'{"minReplicaCount": 1}', ONE, "x-api-key: k\r\n").replace(b"POST", b"PATCH", 1),
        post(b"x" * 101, ONE, "x-api-key: k\r\n"),
        post(b"{}", "/v1/completions", "x-api-key: k\r\n"),
    )
    statuses = []

    async with staged(respond_ok, max_body_bytes=100, api_keys=("k",)) as stage:
        for call in calls:
            before = len(looked_up)
            statuses.append((await stage.ask(call)).status)
            assert len(looked_up) == before + 1, call
    assert statuses == [404, 413, 200]
    assert {line["key"] for line in lines()} == {hashlib.sha256(b"k").hexdigest()[:12]}


async def test_each_request_of_a_connection_has_the_caller_of_its_own_head(lines: Any) -> None:
    keys = tuple(KeySettings(key=key, scopes=("operate",), tenant=f"team-{key}") for key in "ab")
    offer = "upgrade: h2c\r\nconnection: upgrade\r\n"
    heads = (
        "x-api-key: a\r\n",
        "",
        f"{offer}authorization: Bearer b\r\n",
        offer,
        "x-api-key: a\r\nauthorization: Bearer b\r\n",
        "x-api-key: c\r\n",
    )
    pipelined = b"".join(post(b"", "/health", head) for head in heads)
    # Only a request with a body needs a key there.
    pipelined += b"".join(post(b"{}", "/health", head) for head in (heads[2], heads[0], heads[5]))

    async with staged(respond_ok, api_keys=keys) as stage:
        peer = await stage.connect()
        peer.send(pipelined)
        for _ in range(len(heads) + 3):
            await peer.message()
    tenants = [line["tenant"] for line in lines()]
    assert tenants == ["team-a", "-", "team-b", "-", "team-b", "-", "team-b", "team-a", "-"]


@asynccontextmanager
async def before_the_front(**settings: Any) -> AsyncIterator[Stage]:
    """A gateway before the front's own app, behind which nothing trains."""
    with tempfile.TemporaryDirectory() as directory:
        front = AppServer(whole_front(), f"{directory}/front.sock")
        await front.start()
        try:
            async with staged(respond_ok, front_path=front.path, **settings) as stage:
                yield stage
        finally:
            await front.stop()


def test_every_tinker_call_that_changes_something_and_is_no_step_has_a_line(lines: Any) -> None:
    changing = sorted((method, path) for method, path in routes_of(whole_front()) if method != "GET")
    assert {path for _, path in changing} > audit.UNAUDITED, "an exception of a route that is not there"
    told = []

    async def main() -> None:
        async with before_the_front(api_keys=("k",)) as stage:
            for method, path in changing:
                for header in ("x-api-key: k\r\n", ""):
                    filled = re.sub(r"\{.*?\}", "x", path)
                    answer = await stage.ask(post(b"{}", filled, header).replace(b"POST", method.encode(), 1))
                    if path not in audit.UNAUDITED:
                        told.append((method, filled, answer.status))

    run(main)
    assert [(line["method"], line["path"], line["status"]) for line in lines()] == told
    audited = {path.removeprefix("/api/v1/").partition("/")[0] for _, path, _ in told}
    assert audited == {
        *("create_session", "sessions", "create_sampling_session", "create_model", "load_weights"),
        *("save_weights", "save_weights_for_sampler", "training_runs"),
    }


async def test_a_line_says_when_who_from_where_what_and_how_it_ended(lines: Any) -> None:
    named: list[str] = []
    async with world(keys=(KeySettings(key="key-op", scopes=("operate",), tenant="team-a"),)) as here:
        name = "x-request-id: r-1\r\n" + TO_OTHER
        await here.ask("op", "POST", HOT_LOAD_PATH, {"identity": "s1"}, name)
        await here.ask("op", "POST", HOT_LOAD_PATH, {"identity": "gone"}, "x-midstream-overwrite: 1\r\n")
        hint = {"identity": "s1", "files": ["config.json"]}
        await here.ask("op", "POST", f"{HOT_LOAD_PATH}/hint", hint)
        await here.ask("op", "PATCH", f"{OTHER}/replicas/other-replica-0", {"drain": True, "weight": 0.5})
        await here.ask("op", "DELETE", "/v1/sessions/a%20b")
        await here.ask("op", "POST", f"{ONE}:scale", {"replicaCount": 2})
        addons = f"/v1/{A}/deployedModels?replaceMergedAddon=true"
        await here.ask("op", "POST", addons, {"model": "no/name", "deployment": "other"})
        await here.ask("op", "PATCH", ONE, {"deployment": "other", "model": "x"})
        adapter = {"lora_name": "x", "lora_path": "s3://me:secret@b/x?token=secret", "rank": 1}
        await here.ask("op", "POST", "/v1/load_lora_adapter", adapter, TO_OTHER)
        await here.ask("op", "DELETE", f"{OTHER}?hard=true")
        made = await here.ask("op", "POST", DEPLOYMENTS, {"baseModel": "third-model"})
        named[:] = [json.loads(made.body)["name"].rpartition("/")[2]]
        assert not [header for header in made.headers if header.startswith("x-midstream-")]
    found = lines()
    (first, *_) = found
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    assert first == {
        "request": "r-1",
        "key": hashlib.sha256(b"key-op").hexdigest()[:12],
        "tenant": "team-a",
        "client": "127.0.0.1",
        "method": "POST",
        "path": HOT_LOAD_PATH,
        "deployment": "other",
        "what": {"identity": "s1"},
        "status": 200,
    }
    assert [(line["deployment"], line["what"], line["status"]) for line in found[1:]] == [
        ("default", {"overwrite": "1", "identity": "gone"}, 400),
        ("default", {"identity": "s1"}, 202),
        ("other", {"replica": "other-replica-0", "weight": 0.5, "drain": True}, 200),
        ("default", {"session": "a b"}, 200),
        ("default", {"replicaCount": 2}, 200),
        ("other", {"replaceMergedAddon": True, "model": "no/name"}, 400),
        # A body speaks over no path.
        ("default", {}, 400),
        ("other", {"lora_name": "x", "lora_path": "b/x"}, 400),
        ("other", {"hard": True}, 200),
        (named[0], {"baseModel": "third-model"}, 200),
    ]


async def test_without_keys_nobody_is_named(lines: Any) -> None:
    async with world(keys=()) as here:
        await here.ask("presented", "DELETE", f"{ONE}/ledger")
    (line,) = lines()
    assert (line["key"], line["tenant"], line["status"]) == ("-", "-", 200)


SECRET = "s3cret-of-nobody"
SECRET_CALLS = [
    post(b"{}", f"{ONE}/ledger?api_key={SECRET}", f"authorization: Bearer {SECRET}\r\n"),
    post(b"{}", HOT_LOAD_PATH, f"x-api-key: {SECRET}\r\nx-fireworks-hot-load-source-url: s3://a:{SECRET}@b/c\r\n"),
    post(b"{}", HOT_LOAD_PATH, f"authorization: Basic {SECRET}\r\ncookie: {SECRET}\r\n"),
    post(json.dumps({"url": f"http://u:{SECRET}@h:1/?k={SECRET}"}).encode(), f"{ONE}/replicas", "x-api-key: key-op\r\n"),
    post(json.dumps({"hotLoadBucketUrl": SECRET, "description": SECRET}).encode(), DEPLOYMENTS, "x-api-key: key-op\r\n"),
    *(
        post(json.dumps({name: f"s3://u:{SECRET}@b/c?k={SECRET}"}).encode(), path, "x-api-key: key-op\r\n")
        for path, name in (
            ("/update_weights", "weight_dir"), ("/update_weights_from_disk", "model_path"),
            ("/pull_weights", "source_dir"), ("/fetch_weights", "sync_dir"), ("/fetch_weights", "uri"),
        )
    ),
    post(b"{}", f"http://u:{SECRET}@h{ONE}", "x-api-key: key-op\r\n"),
    post(b"{}", f"ftp://u:{SECRET}@h{ONE}", "x-api-key: key-op\r\n"),
]  # fmt: skip


async def test_no_secret_reaches_any_line(lines: Any, caplog: pytest.LogCaptureFixture) -> None:
    keys = (KeySettings(key="key-op", scopes=("operate", "publish")),)

    async with world(keys=keys) as here:
        for call in SECRET_CALLS:
            assert (await here.stage.ask(call)).status >= 400
    assert len(lines()) == len(SECRET_CALLS)
    assert [line["key"] for line in lines()[:3]] == ["unknown"] * 3
    assert "key-op" not in caplog.text
    assert SECRET not in caplog.text
    # Nor a part of it: the fingerprint is of a digest.
    assert lines()[3]["key"] not in "key-op"


FORGED = '{"time": "2020", "key": "admin"}'
HOSTILE = [
    "\n" + FORGED, "\r\n" + FORGED, "\x1b[2K" + FORGED, "\u2028" + FORGED, "\x85" + FORGED, "\x7f", '"}\n{"',
    "\udcff", "x" * 100_000, "\U0001f600" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_client_forges_a_line_or_makes_a_long_one(text: str, lines: Any, tmp_path: Path) -> None:
    file = tmp_path / "audit.log"

    async def main() -> None:
        async with world(keys=()) as here:
            audit.write_to(str(file))
            body = {"identity": text, "model_id": text, "path": text, "url": text, "drain": {text: text}}
            await here.ask(None, "POST", HOT_LOAD_PATH, body)
            percent = "".join(f"%{byte:02x}" for byte in text[:5000].encode("utf-8", "surrogateescape"))
            await here.ask(None, "DELETE", f"/v1/sessions/{percent}")
            await here.ask(None, "POST", f"{DEPLOYMENTS}?deploymentId={percent}", {})
            plain = text[:5000].encode("utf-8", "surrogateescape").translate(None, b"\r\n\x00\x1b\x7f")
            request = post(b"{}", f"{ONE}/ledger").replace(
                b"\r\n\r\n",
                b"\r\nx-request-id: " + plain + b"\r\nfireworks-deployment: " + plain + b"\r\n\r\n",
            )
            await here.stage.ask(request)

    run(main)
    written = file.read_bytes()
    assert written.isascii()
    assert all(32 <= byte < 127 or byte == 10 for byte in written)
    found = [json.loads(line) for line in written.splitlines()]
    assert [line["method"] for line in found] == ["POST", "DELETE", "POST", "POST"]
    assert all("key" in line and line["key"] == "-" for line in found)
    assert max(map(len, written.splitlines())) < LINE_MAX


async def test_what_is_refused_before_its_body_is_read_has_a_line_too(lines: Any) -> None:
    async with staged(respond_ok, max_body_bytes=10, max_header_bytes=400, api_keys=("k",)) as stage:
        key = "x-api-key: k\r\n"
        statuses = [
            (await stage.ask(post(b"x" * 11, HOT_LOAD_PATH, key))).status,
            (await stage.ask(post(b"", HOT_LOAD_PATH, key + "content-encoding: gzip\r\n"))).status,
            (await stage.ask(post(b"x", HOT_LOAD_PATH, key + "content-encoding: gzip\r\n"))).status,
            (await stage.ask(post(b"", HOT_LOAD_PATH, key + f"x: {'x' * 400}\r\n"))).status,
        ]
        assert statuses == [413, 404, 415, 431]
    assert [line["status"] for line in lines()] == [413, 404, 415, 431]


async def test_inference_and_reading_have_no_line(lines: Any) -> None:
    async with world() as here:
        for kind in ("sample", "unknown", None):
            await here.ask(kind, "POST", "/v1/completions", {})
            await here.ask(kind, "GET", HOT_LOAD_PATH)
            await here.ask(kind, "HEAD", "/metrics")
    assert lines() == []


async def test_a_call_whose_client_left_before_its_answer_has_a_line(lines: Any) -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            begun.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()

    async with staged(respond_ok, app=app) as stage:
        peer = await stage.connect()
        peer.send(post(b'{"identity": "s1"}', HOT_LOAD_PATH))
        await begun.wait()
        peer.abort()
        await left.wait()
    (line,) = lines()
    assert (line["status"], line["client"], line["what"]) == (499, "127.0.0.1", {"identity": "s1"})


async def test_it_can_be_turned_off_and_a_file_of_it_is_for_its_user_and_may_be_moved(
    tmp_path: Path, lines: Any
) -> None:
    file = tmp_path / "audit.log"

    async with world(keys=()) as here:
        for where in ("off", str(file), "log"):
            audit.write_to(where)
            await here.ask(None, "DELETE", f"{ONE}/ledger")
            if where == str(file):
                file.rename(tmp_path / "audit.log.1")
                await here.ask(None, "DELETE", f"{OTHER}/ledger")
    assert [line["deployment"] for line in lines()] == ["default"]
    kept = [json.loads((tmp_path / name).read_text())["deployment"] for name in ("audit.log.1", "audit.log")]
    assert kept == ["default", "other"]
    assert (tmp_path / "audit.log.1").stat().st_mode & 0o777 == 0o600


async def test_a_line_that_cannot_be_written_fails_no_call_and_later_ones_are_written(
    tmp_path: Path, lines: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log" / "audit.log"
    file.parent.mkdir()

    async with world(keys=()) as here:
        audit.write_to(str(file))
        shutil.rmtree(file.parent)
        for _ in range(2):
            assert (await here.ask(None, "DELETE", f"{ONE}/ledger")).status == 200
        file.parent.mkdir()
        assert (await here.ask(None, "DELETE", f"{OTHER}/ledger")).status == 200
    assert json.loads(file.read_text())["deployment"] == "other"
    assert "FileNotFoundError" in capfd.readouterr().err, "standard error says why"


QUIET = """
import logging
from midstream.core.logs import Logging, configure
from midstream.proxy import audit
configure("gateway", Logging(level="error"))
audit.write_to("log")
audit.logger.info("a line")
logging.getLogger("midstream.proxy").warning("another")
"""


def test_a_quiet_log_still_has_it() -> None:
    said = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, check=True, timeout=60
    )
    assert re.fullmatch(r"\S+ \S+ gateway INFO midstream.audit: a line\n", said.stderr)


async def test_a_long_number_makes_no_long_line(lines: Any) -> None:
    async with world(keys=()) as here:
        body = b'{"identity": %s, "weight": -%s, "minReplicaCount": 2}' % (b"9" * 4000, b"9" * 4000)
        await here.stage.ask(post(body, f"{ONE}/ledger"))
    (line,) = lines()
    assert line["what"]["minReplicaCount"] == 2
    for text in (line["what"]["identity"], line["what"]["weight"]):
        assert "99999" in text
        assert len(text) <= audit.SHOWN_CHARS + 3
