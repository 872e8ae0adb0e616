"""Session keys from requests, and the bounded table."""

import pytest

from midstream.core.errors import InvalidRequest
from midstream.core.wires import UserField
from midstream.fleet import sessions
from midstream.fleet.sessions import SessionTable, body_model, session_key
from midstream.http.auth import tenant_of


@pytest.mark.parametrize(
    ("headers", "body", "key"),
    [
        ({}, b"", None),
        ({b"x-session-id": b"c"}, b'{"user":"u"}', "c"),
        ({b"x-session-affinity": b"b", b"x-session-id": b"c"}, b"", "b"),
        ({b"x-multi-turn-session-id": b"a", b"x-session-affinity": b"b", b"x-session-id": b"c"}, b"", "a"),
        ({b"x-session-id": b"c", b"x-smg-routing-key": b"r"}, b'{"user":"u"}', "c"),
        ({b"x-session-id": b"", b"x-smg-routing-key": b"r"}, b'{"prompt_cache_key":"k"}', "r"),
        ({b"x-session-id": " é ".encode()}, b"", "é"),
        ({b"x-session-id": b"\xe9"}, b"", "é"),
        ({b"x-session-id": "\u00a0a\u2003".encode()}, b"", "\u00a0a\u2003"),
        ({b"x-other": b"a"}, b'{"prompt_cache_key":"k","user":"u"}', "k"),
        ({}, b'{"user":"u","prompt":[1,2]}', "u"),
        ({}, b'{"prompt_cache_key":null,"user":"u"}', "u"),
        ({}, b'{"prompt_cache_key":null,"user":null}', None),
        ({b"x-session-id": b"c"}, b'{"user":""}', "c"),
        ({b"x-multi-turn-session-id": b"", b"x-session-affinity": b"b"}, b"", "b"),
        ({b"x-multi-turn-session-id": b" \t", b"x-session-id": b"c"}, b"", "c"),
        ({b"x-session-id": b""}, b'{"user":"u"}', "u"),
        ({}, b'{"prompt_cache_key":"","user":"u"}', "u"),
        ({}, b'{"messages":[{"role":"user","content":"user"}]}', None),
        ({}, b'{"metadata":{"user":"not this one"}}', None),
        ({}, b'{"user":"\\u00e9"}', "é"),
        ({}, b'{"messages":[{"role":"user","content":""}],"user" \t\r\n: "u"}', "u"),
        ({}, b'{"us\\u0065r":"u"}', None),
        ({}, b'{"user":5}', None),
        ({}, b'{"user":"u"', None),
        ({}, b'["user"]', None),
        ({}, b'\xff"user"', None),
    ],
)
def test_the_key_comes_from_the_first_place_that_has_one(
    headers: dict[bytes, bytes], body: bytes, key: str | None
) -> None:
    assert session_key(headers, body) == key


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({b"x-session-id": b"a\tb"}, b"", "x-session-id"),
        ({b"x-session-id": b"x" * 513}, b"", "x-session-id"),
        ({b"x-session-id": b""}, b"", "x-session-id"),
        ({b"x-session-id": b""}, b'{"user":""}', "x-session-id"),
        ({b"x-session-id": b""}, b'{"user":"a\\nb"}', "user"),
        ({b"x-session-id": b" "}, b"", "x-session-id"),
        ({b"x-multi-turn-session-id": b" ", b"x-session-id": b""}, b"", "x-multi-turn-session-id"),
        ({b"x-session-affinity": b"\x7f", b"x-session-id": b"c"}, b"", "x-session-affinity"),
        ({b"x-session-id": b"\x0ba"}, b"", "x-session-id"),
        ({b"x-smg-routing-key": b"a\x00"}, b"", "x-smg-routing-key"),
        ({b"x-smg-routing-key": b""}, b'{"prompt_cache_key":""}', "x-smg-routing-key"),
        ({b"x-session-id": b"a\x85"}, b"", "x-session-id"),
        ({}, b'{"prompt_cache_key":"","user":""}', "prompt_cache_key"),
        ({}, b'{"prompt_cache_key":null,"user":""}', "user"),
        ({}, b'{"user":"' + b"x" * 513 + b'"}', "user"),
        ({}, b'{"prompt_cache_key":"a\\nb"}', "prompt_cache_key"),
        ({}, b'{"user":"a\\u0085b"}', "user"),
    ],
)
def test_a_value_that_cannot_be_a_key_names_its_place(
    headers: dict[bytes, bytes], body: bytes, param: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        session_key(headers, body)
    assert raised.value.param == param


def test_a_body_without_a_session_field_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decoder:
        def decode(self, body: bytes) -> None:
            raise AssertionError("parsed")

    monkeypatch.setattr(sessions, "_decoder", Decoder())
    assert session_key({}, b'{"messages":[{"role":"user","content":"a \\"user\\": b"}]}') is None
    with pytest.raises(AssertionError, match="parsed"):
        session_key({}, b'{"metadata":{"user":"u"}}')


def test_a_name_that_often_stands_for_a_role_is_a_field_only_with_a_colon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roles = b'{"role": "user", "content": "x"},' * 200_000
    body = b'{"messages": [' + roles + b'{}], "user" \n: "me"}'
    assert session_key({}, body) == "me"
    monkeypatch.setattr(sessions, "_decoder", None)
    assert session_key({}, b'{"messages": [' + roles + b"{}]}") is None


@pytest.mark.parametrize("value", [b'"\xff"', b"[" * 200_000, b"3", b'"\\ud800"'])
@pytest.mark.parametrize("field", [b"user", b"model", b"x"])
def test_a_body_that_cannot_be_read_names_nothing_and_is_the_replicas_to_refuse(
    field: bytes, value: bytes
) -> None:
    body = b'{"' + field + b'":' + value + b',"prompt_cache_key":3}'
    assert session_key({}, body) is None
    assert body_model(body) is None


def test_the_table_forgets_the_least_recently_used_session() -> None:
    table = SessionTable(2)
    table.settle(("", "a"), "r0")
    table.settle(("", "b"), "r1")
    assert table.home(("", "a")) == "r0"
    table.settle(("t", "a"), "r2")
    assert repr(table) == "SessionTable(2 of at most 2 sessions)"
    assert [table.home(s) for s in (("", "a"), ("", "b"), ("t", "a"))] == ["r0", None, "r2"]


def test_the_table_counts_sessions_by_replica() -> None:
    table = SessionTable(2)
    table.settle(("", "a"), "r0")
    table.settle(("", "b"), "r0")
    table.settle(("", "c"), "r1")
    assert table.counts == {"r0": 1, "r1": 1}
    assert table.forget(("", "c"))
    assert not table.forget(("", "b"), "r1")
    assert table.counts == {"r0": 1}
    table.learn(("", "b"), "r1", 2**60)
    assert table.counts == {"r1": 1}
    table.learn(("", "b"), "r0", 1)
    assert table.counts == {"r1": 1}


def test_sessions_of_a_boot_that_is_gone_live_nowhere() -> None:
    table = SessionTable(10)
    table.settle(("", "before"), "r0")
    table.begin("r0", "b1")
    table.settle(("", "a"), "r0")
    table.settle(("", "b"), "r0")
    table.settle(("", "c"), "r1")
    table.begin("r0", "b1")
    assert table.counts == {"r0": 3, "r1": 1}
    table.begin("r0", "b2")
    assert table.counts == {"r1": 1}
    table.learn(("", "b"), "r0", 2**60)
    homes = [table.home(("", key)) for key in ("before", "a", "b", "c")]
    assert homes == [None, None, "r0", "r1"]
    assert table.forget(("", "b"))
    assert table.counts == {"r1": 1}


def test_a_session_placed_before_its_replicas_new_boot_was_heard_of_stays_there() -> None:
    table = SessionTable(max_sessions=5, clock=lambda: 1.0)
    table.begin("r1", "boot 1")
    stamp = table.settle(("", "a"), "r1")
    table.begin("r1", "boot 2")
    table.learn(("", "a"), "r1", stamp)
    assert (table.home(("", "a")), table.counts) == ("r1", {"r1": 1})
    table.settle(("", "b"), "r1")
    table.begin("r1", "boot 3")
    table.learn(("", "b"), "r2", 3)
    assert (table.home(("", "b")), table.counts) == ("r2", {"r2": 1}), "it lived nowhere"


@pytest.mark.parametrize("goes", ["closed", "evicted", "its home is lost", "a later turn was answered"])
def test_nothing_is_kept_of_the_move_of_a_session_that_is_gone(goes: str) -> None:
    table, session = SessionTable(max_sessions=2, clock=lambda: 1.0), ("", "a")
    table.begin("r1", "boot 1")
    stamp = table.moved[session] = table.settle(session, "r1")
    table.answered(session, "r1", stamp)
    table.answered(session, "r2", None)
    assert table.moved == {session: stamp}, "no later turn was answered there"
    if goes == "closed":
        table.forget(session)
    elif goes == "evicted":
        for key in "bc":
            table.settle(("", key), "r1")
    elif goes == "its home is lost":
        table.begin("r1", "boot 2")
        assert table.home(session) is None
    else:
        table.answered(session, "r1", None)
    assert table.moved == {}


def test_a_tenant_is_stable_and_does_not_show_its_key() -> None:
    assert tenant_of("sk-1") == tenant_of("sk-1") != tenant_of("sk-2")
    assert "sk" not in tenant_of("sk-1")


def test_on_anthropics_wire_the_metadata_names_the_session() -> None:
    field: UserField = "metadata.user_id"
    body = b'{"metadata":{"user_id":"u"},"user":"x"}'
    assert session_key({}, body, field) == "u"
    assert session_key({}, body) == "x"
    assert session_key({}, b'{"metadata":{"user_id":"u"},"prompt_cache_key":"k"}', field) == "k"
    assert session_key({b"x-session-id": b"h"}, body, field) == "h"
    assert session_key({}, b'{"user":"x","messages":[{"user_id":"y"}]}', field) is None
    # The replica says what is wrong with it.
    assert session_key({}, b'{"metadata":{"user_id":1}}', field) is None
    with pytest.raises(InvalidRequest) as raised:
        session_key({}, b'{"metadata":{"user_id":""}}', field)
    assert raised.value.param == field
