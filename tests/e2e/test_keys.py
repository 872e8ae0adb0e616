"""A server whose keys have scopes, on two gateway processes, with the OpenAI SDK and the command line as clients."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Server, command, serve

from midstream.http.auth import tenant_of

KEYS = {
    "all": "key-of-all",
    "sample": "key-to-sample",
    "publish": "key-to-publish",
    "observe": "key-to-observe",
}
REPLICA_TOKEN = "token-of-the-replicas"
CONFIG = f"""\
[replica]
token = "{REPLICA_TOKEN}"
[gateway]
workers = 2
audit_log = "AUDIT_LOG"
api_keys = [
  "sha256:{hashlib.sha256(KEYS["all"].encode()).hexdigest()}",
  {{ key = "{KEYS["sample"]}", scopes = ["sample:default"], tenant = "rollouts" }},
  {{ key = "{KEYS["publish"]}", scopes = ["publish:default"] }},
  {{ key = "{KEYS["observe"]}", scopes = ["observe"] }},
]
"""
# Of both processes, most likely.
CONNECTIONS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("keys")
    config = directory / "midstream.toml"
    config.write_text(CONFIG.replace("AUDIT_LOG", str(directory / "audit.log")))
    options = ("--replicas", "1", "--config", str(config))
    with serve(directory / "state", "--model", str(tiny_model()), *options) as running:
        yield running


def sdk(server: Server, key: str, asked: list[str]) -> openai.OpenAI:
    """asked: the method and path of each request that it sends."""
    hook = {"request": [lambda request: asked.append(f"{request.method} {request.url.path}")]}
    http = httpx.Client(event_hooks=hook, timeout=60, trust_env=False)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[key], http_client=http)


def ask(server: Server, key: str | None, method: str, path: str) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {KEYS[key]}"}
    return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=60, trust_env=False)


def midstream(server: Server, key: str, *arguments: str) -> tuple[int, str, str]:
    env = {**os.environ, "MIDSTREAM_SERVER": server.url, "MIDSTREAM_API_KEY": KEYS[key]}
    done = subprocess.run(command(*arguments), env=env, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout, done.stderr


def test_the_openai_sdk_samples_with_its_key_and_takes_a_refusal_at_once(server: Server) -> None:
    asked: list[str] = []
    body: Any = {"model": server.model, "prompt": "x", "max_tokens": 2}
    with sdk(server, "sample", asked) as client:
        assert [model.id for model in client.models.list()] == [server.model]
        assert client.completions.create(**body).usage
        asked.clear()
        with pytest.raises(openai.PermissionDeniedError, match="lacks the scope 'sample' on model 'else'"):
            client.completions.create(**(body | {"model": "else"}))
        assert asked == ["POST /v1/completions"]
    asked.clear()
    with sdk(server, "publish", asked) as client:
        for stream in (False, True):
            with pytest.raises(openai.PermissionDeniedError, match="'sample' on any deployment") as refused:
                client.completions.create(**body, stream=stream)
            assert refused.value.code == "permission_error"
        assert asked == ["POST /v1/completions"] * 2


def test_both_processes_refuse_the_same(server: Server) -> None:
    ledger = f"/v1/{server.deployment}/ledger"
    before = ask(server, "all", "GET", ledger).json()
    for _ in range(CONNECTIONS):
        told = []
        for key, method, path in (
            ("sample", "DELETE", ledger),
            ("sample", "GET", "/hot_load/v1/models/hot_load"),
            ("publish", "DELETE", ledger),
            ("observe", "DELETE", f"/v1/{server.deployment}"),
            ("publish", "POST", "/v1/chat/completions"),
            ("observe", "GET", "/api/v1/get_server_capabilities"),
        ):
            told.append(ask(server, key, method, path).status_code)
        assert told == [403] * 6
        assert ask(server, None, "GET", "/health").json() == {"status": "ok"}
        assert ask(server, None, "GET", ledger).status_code == 401
        health = ask(server, "observe", "GET", "/health").json()
        # The other process may lag behind for a moment: it is ready when it can use the same replicas.
        assert health["gateway_workers_ready"] in (1, 2)
        assert len(health["replicas"]) == 1
        assert "midstream_gateway_requests" in ask(server, "observe", "GET", "/metrics").text
    assert ask(server, "all", "GET", ledger).json() == before
    log = server.log.read_text()
    audited = Counter(
        (line["key"], line["tenant"], line["method"], line["path"], line["deployment"], line["status"])
        for line in map(json.loads, (server.state_dir.parent / "audit.log").read_text().splitlines())
    )
    fingerprints = {name: hashlib.sha256(key.encode()).hexdigest()[:12] for name, key in KEYS.items()}
    tenants = {name: tenant_of(key) for name, key in KEYS.items()} | {"sample": "rollouts"}
    deleted = {"sample": ledger, "publish": ledger, "observe": f"/v1/{server.deployment}"}
    assert audited == {
        (fingerprints[key], tenants[key], "DELETE", path, "default", 403): CONNECTIONS
        for key, path in deleted.items()
    }
    assert f"refused: tenant rollouts, DELETE {ledger}: this API key lacks the scope 'operate'" in log
    assert not [key for key in KEYS.values() if key in log]


def test_no_process_shows_a_key_or_the_replica_token_to_who_lists_processes(server: Server) -> None:
    pids = [server.process.pid, *server.children()]
    assert len(pids) >= 5, "supervisor, two gateways, replica, engine"
    for pid in pids:
        for shown in ("cmdline", "environ"):
            said = Path(f"/proc/{pid}/{shown}").read_bytes()
            assert not [secret for secret in (*KEYS.values(), REPLICA_TOKEN) if secret.encode() in said]


def test_a_replicas_port_answers_nobody_on_this_machine_without_the_token(server: Server) -> None:
    views = ask(server, "observe", "GET", f"/v1/{server.deployment}/replicas").json()["replicas"]
    assert len(views) == 1
    for view in views:
        for key in ({}, {"authorization": f"Bearer {KEYS['all']}"}, {"x-midstream-token": "guessed"}):
            for method, path in (
                ("GET", "/health"),
                ("POST", "/v1/completions"),
                ("POST", "/replica/desired"),
            ):
                answer = httpx.request(method, view["url"] + path, headers=key, json={}, trust_env=False)
                assert answer.status_code == 401, (method, path)


def test_the_command_line_says_which_scope_its_key_lacks(
    server: Server, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    arguments = ("publish", str(tiny_model(seed=1)), "--identity", "step-1", "--work-dir", str(tmp_path))
    code, _, err = midstream(server, "sample", *arguments)
    assert (code, len(err.splitlines())) == (1, 1)
    assert "lacks the scope 'publish' or 'observe' on any deployment" in err
    code, out, err = midstream(server, "publish", *arguments)
    assert (code, "served by 1 replica" in out) == (0, True), err
    # Without the numbers of /metrics.
    code, out, err = midstream(server, "publish", "status")
    assert code == 0, err
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["replica-0", "step-1"]]
    for key in ("publish", "observe"):
        code, out, err = midstream(server, key, "ledger")
        assert (code, "step-1" in out) == (0, True), err
    code, _, err = midstream(server, "sample", "status")
    assert (code, "lacks the scope 'publish' or 'observe' on the default deployment" in err) == (1, True)
