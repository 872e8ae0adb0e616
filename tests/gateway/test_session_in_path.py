"""Sessions that a request's path names, for harnesses that can set nothing but a base URL."""

from __future__ import annotations

import json
import logging
from urllib.parse import quote

import pytest
from gateway_harness import Message, Peer, Stage, get, post, staged
from test_resume import BODY, WHOLE, WRITES, go_on, losing, read_chunk, read_head

from midstream.core.key_settings import KeySettings
from midstream.core.session_keys import MAX_KEY_BYTES, SESSION_HEADERS
from midstream.core.wires import WIRES, split_session, wire_of

#: Before the wire's own path, and the session that it names.
FORMS = {
    "/sessions/s-1": "s-1",
    "/trajectories/s-1": "s-1",
    "/ng-rollout/s-1/training-token-capture": "s-1",
    "/proxy/rollout/r1/attempt/a1/mode/m1/openai": "r1/a1",
}
PATH = "/v1/completions"


async def respond(request: Message, peer: Peer) -> None:
    peer.respond(b'{"ok":true}')


def session_of(request: Message) -> str | None:
    return request.headers.get("x-midstream-session")


async def refused(stage: Stage, request: bytes) -> Message:
    """The answer to a request that no replica is sent."""
    before = [len(mock.requests) for mock in stage.mocks]
    answer = await stage.ask(request)
    assert [len(mock.requests) for mock in stage.mocks] == before
    return answer


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", WIRES)
async def test_a_path_names_the_session_and_the_replica_gets_the_plain_path(form: str, path: str) -> None:
    async with staged(respond) as stage:
        assert (await stage.ask(post(b'{"a":1}', f"{form}{path}?x=/y"))).status == 200
        [request] = stage.mocks[0].requests
        assert request.start == f"POST {path}?x=/y HTTP/1.1"
        assert request.body == b'{"a":1}'
        assert session_of(request) == quote(FORMS[form], safe="")
        assert int(request.headers["x-midstream-placed"]) > 0
        # What was in the path is in no header but the gateway's own.
        assert not set(SESSION_HEADERS) & set(request.headers)


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("a%2Fb", "a/b"),
        ("a%20b", "a b"),
        ("%20a%20", " a "),
        ("a+b", "a+b"),
        ("%C3%A9", "é"),
        ("%E9", "é"),
        ("%F0%9F%A6%8A", "\U0001f98a"),
        ("%", "%"),
        ("%zz", "%zz"),
        ("%253A", "%3A"),
        ("a:b;c=d,e", "a:b;c=d,e"),
        ("..", ".."),
        ("a" * MAX_KEY_BYTES, "a" * MAX_KEY_BYTES),
    ],
)
async def test_a_key_is_what_the_path_says_once_it_is_decoded(written: str, key: str) -> None:
    async with staged(respond) as stage:
        assert (await stage.ask(post(path=f"/sessions/{written}{PATH}"))).status == 200
        [request] = stage.mocks[0].requests
        assert request.start == f"POST {PATH} HTTP/1.1"
        assert session_of(request) == quote(key, safe="")


NO_KEYS = (
    *("a%0D%0Ax-midstream-tenant:%20forged", "a%0Ab", "%0D", "%00", "a%7F", "%09a", "a%09", "a%C2%85"),
    *("a%0D%0A%0D%0APOST%20%2Fv1%2Fcompletions%20HTTP%2F1.1", ""),
    *("a" * (MAX_KEY_BYTES + 1), "%C3%A9" * (MAX_KEY_BYTES // 2 + 1)),
)


@pytest.mark.parametrize("form", FORMS)
async def test_a_path_that_cannot_be_a_key_is_refused_and_nothing_of_it_reaches_a_replica(form: str) -> None:
    async with staged(respond) as stage:
        client = await stage.connect()
        for written in NO_KEYS:
            path = form.replace("s-1", written).replace("r1", written) + PATH
            for body in (b"{}", b'{"user":"u"}'):
                client.send(post(body, path))
                answer = await client.message()
                assert (answer.status, answer.error["param"]) == (400, "path"), written
        # The connection is as good as before.
        client.send(post())
        assert (await client.message()).status == 200
        [request] = stage.mocks[0].requests
        assert session_of(request) is None
        assert "x-midstream-tenant" not in request.headers


async def test_every_part_of_an_attempt_has_to_be_there() -> None:
    async with staged(respond) as stage:
        for path in (
            "/proxy/rollout//attempt/a/mode/m/openai",
            "/proxy/rollout/r/attempt//mode/m/openai",
        ):
            answer = await refused(stage, post(path=path + PATH))
            assert (answer.status, answer.error["param"]) == (400, "path")


@pytest.mark.parametrize(
    "path",
    [
        "/sessions" + PATH,
        "/sessions/a/b" + PATH,
        "/sessions/a/sessions/b" + PATH,
        "/sessions/a/" + PATH,
        "/SESSIONS/a" + PATH,
        "/x/sessions/a" + PATH,
        "//sessions/a" + PATH,
        "/sessions/a%2Fv1/completions",
        "/sessions/a?/v1/completions",
        "/sessions/a/v1/completions/",
        "/sessions/a/api/v1/asample",
        "/sessions/a/hot_load/v1/models/hot_load",
        "/sessions/a/replica/resume",
        "/ng-rollout/a" + PATH,
        "/proxy/rollout/r/attempt/a" + PATH,
    ],
)
async def test_other_paths_name_no_session_and_are_not_there(path: str) -> None:
    async with staged(respond) as stage:
        assert (await refused(stage, post(path=path))).status == 404


@pytest.mark.parametrize("name", SESSION_HEADERS)
async def test_a_header_that_names_another_session_is_a_400_that_names_it(name: str) -> None:
    async with staged(respond) as stage:
        path = "/sessions/%C3%A9" + PATH
        client = await stage.connect()
        client.send(post(path=path, headers=f"{name}: other\r\n"))
        answer = await client.message()
        assert (answer.status, answer.error["param"]) == (400, name)
        assert not stage.mocks[0].requests
        # Which is about the request, and not about the connection. The same session, and none, do not disagree.
        head = post(path=path, headers=f"{name}: @\r\n")
        for value in (b"", b" \t", "é".encode(), b"\xe9 "):
            client.send(head.replace(b"@", value))
            assert (await client.message()).status == 200
        assert {session_of(request) for request in stage.mocks[0].requests} == {"%C3%A9"}


@pytest.mark.parametrize("body", [{"user": "u"}, {"prompt_cache_key": "k", "user": ""}, {"user": "a\nb"}])
async def test_a_path_goes_before_the_body_as_headers_do(body: dict[str, str]) -> None:
    """Harnesses send the name of their end user there, which is not about the session."""

    async with staged(respond) as stage:
        assert (await stage.ask(post(json.dumps(body).encode(), "/sessions/s" + PATH))).status == 200
        [request] = stage.mocks[0].requests
        assert session_of(request) == "s"
        assert json.loads(request.body) == body


async def test_a_session_of_a_path_is_the_one_of_that_key_however_it_is_named() -> None:
    async with staged(*[respond] * 4) as stage:
        first = await stage.ask(post(path="/proxy/rollout/r/attempt/a/mode/m/openai" + PATH))
        home = first.headers["x-midstream-replica"]
        assert first.headers["x-midstream-route-reason"] == "new"
        for request in (
            *(post(path=f"/{form}/r%2Fa{PATH}") for form in ("sessions", "trajectories")),
            *(post(headers=f"{name}: r/a\r\n") for name in SESSION_HEADERS),
            post(b'{"user":"r/a"}'),
        ):
            answer = await stage.ask(request)
            assert answer.headers["x-midstream-replica"] == home
            assert answer.headers["x-midstream-route-reason"] == "sticky"


async def test_absolute_targets_and_http_1_0_name_sessions_too() -> None:
    async with staged(respond) as stage:
        for request in (
            post(path="http://other:80/sessions/s%201/v1/completions?a=b"),
            post(path="/sessions/s%201/v1/completions?a=b", version="1.0"),
        ):
            assert (await stage.ask(request)).status == 200
        for seen in stage.mocks[0].requests:
            assert seen.start == f"POST {PATH}?a=b HTTP/1.1"
            assert session_of(seen) == "s%201"


async def test_pipelined_requests_each_have_their_own_session() -> None:
    async with staged(respond) as stage:
        client = await stage.connect()
        paths = [f"/sessions/s{n}{PATH}" if n % 3 else PATH for n in range(9)]
        client.send(b"".join(post(b"%d" % n, path) for n, path in enumerate(paths)))
        for _ in paths:
            assert (await client.message()).status == 200
        told = [(request.body, session_of(request)) for request in stage.mocks[0].requests]
        assert told == [(b"%d" % n, f"s{n}" if n % 3 else None) for n in range(9)]


@pytest.mark.parametrize("prefix", ["", "/inference"])
@pytest.mark.parametrize("form", FORMS)
async def test_what_is_only_read_through_such_a_path_is_what_there_is_without_it(
    form: str, prefix: str
) -> None:
    async with staged(respond) as stage:
        plain = prefix + "/v1/models"
        listed = await stage.ask(get(plain))
        assert listed.status == 200
        assert (await stage.ask(get(form + plain))).body == listed.body
        one = f"{plain}/{json.loads(listed.body)['data'][0]['id']}"
        assert (await stage.ask(get(form + one))).body == (await stage.ask(get(one))).body
        assert (await stage.ask(get(f"{form}{prefix}{PATH}"))).status == 405
        # Nothing else is there: what changes something has one name, which the audit log shows.
        for path in ("/v1/sessions", "/health", "/metrics", "/v1/accounts"):
            assert (await stage.ask(get(form + path))).status == 404
        assert (await stage.ask(get(form + "/v1/sessions/s", method="DELETE"))).status == 404


async def test_a_key_may_do_through_such_a_path_what_it_may_do_without_it() -> None:
    def key(name: str, scope: str) -> KeySettings:
        return KeySettings(key=name, scopes=(scope,), tenant=name)

    keys = (key("k1", "sample"), key("k2", "observe"), key("k3", "sample:default"), key("k4", "sample:x"))
    async with staged(respond, api_keys=keys) as stage:
        # The head alone is enough to be refused.
        head = post(b"", f"/sessions/s{PATH}", "authorization: Bearer @\r\n")
        head = head.replace(b"Content-Length: 0", b"Content-Length: 9")
        for name, status in ((b"none", 401), (b"k2", 403)):
            answer = await refused(stage, head.replace(b"@", name))
            assert answer.status == status
            assert set(answer.error) == {"message", "type", "code", "param"}
        for name, status in ((b"k1", 200), (b"k3", 200), (b"k4", 403)):
            answer = await stage.ask(head.replace(b"@", name) + b'{"a": 1} ')
            assert answer.status == status
            if status == 200:
                assert stage.mocks[0].requests[-1].headers["x-midstream-tenant"] == name.decode()


async def test_a_request_that_is_refused_has_its_wires_error_and_no_line_in_the_audit_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "midstream.audit")

    def told() -> list[tuple[str, int]]:
        said = [json.loads(r.getMessage()) for r in caplog.records if r.name == "midstream.audit"]
        return [(line["path"], line["status"]) for line in said]

    async with staged(respond, api_keys=("k",)) as stage:
        known = "x-api-key: k\r\n"
        for form in FORMS:
            assert (await stage.ask(post(path=form + PATH))).status == 401
            assert (await stage.ask(post(path=form + PATH, headers=known))).status == 200
            other = known + "x-session-id: other\r\n"
            assert (await stage.ask(post(path=form + PATH, headers=other))).status == 400
        assert told() == []
        # What no wire has is a control call, and is shown as it was asked for.
        assert (await stage.ask(post(path="/sessions/s/v1/x", headers=known))).status == 404
        assert (await stage.ask(post(path="/sessions/s/v1/x"))).status == 401
        assert told() == [("/sessions/s/v1/x", 404), ("/sessions/s/v1/x", 401)]


async def test_a_stream_that_was_asked_for_through_such_a_path_is_resumed_under_the_plain_one() -> None:
    async def second(request: Message, peer: Peer) -> None:
        if "/replica/resume" in request.start:
            go_on(request, peer)
        else:
            await losing(b"".join(WRITES[:2]))(request, peer)

    async with staged(second, second) as stage:
        client = await stage.connect()
        client.send(post(BODY, f"/trajectories/s%201{PATH}?a=b"))
        assert (await read_head(client.reader)).status == 200
        events = []
        while chunk := await read_chunk(client.reader):
            events += [line[6:] for line in chunk.split(b"\n") if line.startswith(b"data: ")]
        assert [e.decode() if e == b"[DONE]" else json.loads(e) for e in events] == WHOLE[0]
        [resume] = [r for mock in stage.mocks for r in mock.requests if "/replica/resume" in r.start]
        assert json.loads(resume.body)["path"] == f"{PATH}?a=b"
        assert session_of(resume) == "s%201"


async def test_a_request_that_replicas_were_lost_with_is_known_under_any_session() -> None:
    async def die(request: Message, peer: Peer) -> None:
        peer.abort()

    async with staged(die, die, die) as stage:
        answers = [await stage.ask(post(b"poison", f"/sessions/s{n}{PATH}")) for n in range(3)]
        assert answers[-1].status == 422


def test_splitting_leaves_a_target_that_names_no_session_as_it_is() -> None:
    for target in (
        b"/v1/completions?x=/sessions/a/v1",
        b"*",
        b"",
        b"/sessions",
        b"/sessions/a",
        b"/sessions/a?/",
    ):
        assert split_session(target) == (None, target)
    assert wire_of(b"/sessions/a/v1/completions") is None
