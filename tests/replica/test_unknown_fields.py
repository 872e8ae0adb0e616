"""Unknown body fields where the deployment ignores them: what is told, what is kept, and what stays refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from replica_fakes import MODEL, FakeEngine
from test_vllm_fields import HI, play

from midstream.core.errors import InvalidRequest, UnknownField, UnknownTools
from midstream.replica.request.schema import decode, parse_chat, parse_completion
from midstream.replica.request.unknown import IGNORED_MAX, header_value, read_known
from midstream.replica.wire.messages import read as parse_messages


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    known: int = 0


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    inner: Inner


IGNORE = {"x-midstream-unknown-fields": "ignore"}
TOLD = "x-midstream-ignored-fields"


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "p", **fields}).encode()


def test_known_fields_stay_as_they_came() -> None:
    known = {"seed": 2**63 - 1, "temperature": 0.1, "stop": ["\u00e9\u2028", "\\"], "logit_bias": {"5": -1.5}}
    parsed, ignored = read_known(parse_completion, body(colour={"a": [1]}, **known, size=10**30))
    assert ignored == ["colour", "size"]
    assert parsed == parse_completion(body(**known))


def test_a_bad_value_of_a_known_field_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_known(parse_completion, body(colour=1, n=0))
    assert caught.value.param == "n"


def test_an_unknown_member_of_a_known_field_is_no_field_of_the_body() -> None:
    read, ignored = read_known(parse_chat, json.dumps({"messages": HI, "top": 1}).encode())
    assert (read.messages, ignored) == (HI, ["top"])
    asked = {
        "model": "m",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "hi", "odd": 1}],
        "colour": 2,
    }
    with pytest.raises(InvalidRequest) as caught:
        read_known(parse_messages, json.dumps(asked).encode())
    assert "odd" in str(caught.value)


def test_an_unknown_member_is_named_with_its_place() -> None:
    with pytest.raises(UnknownField) as caught:
        decode(b'{"inner": {"user`s": 1}}', msgspec.json.Decoder(Outer))
    assert caught.value.param == "inner.user`s"


def test_a_name_that_looks_like_a_place_is_ignored_as_a_name() -> None:
    name = "a` - at `$.model"
    _, ignored = read_known(parse_completion, body(**{name: 1}))
    assert ignored == [name]


@pytest.mark.parametrize("rest", [b"", b" bad}", b'"n": 1'])
def test_what_follows_an_unknown_field_must_be_json_too(rest: bytes) -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        read_known(parse_completion, b'{"colour": 1, ' + rest)


def test_many_unknown_tools_are_not_looked_up_one_by_one() -> None:
    """A body holds millions. Each would be compared with all others, on the event loop."""

    class Places(list[int]):
        def __contains__(self, _: object) -> bool:
            raise AssertionError("compares with each")

    def read(_: bytes) -> None:
        raise UnknownTools(Places(range(IGNORED_MAX + 1)), "custom")

    with pytest.raises(UnknownTools):
        read_known(read, body(tools=[{"type": "custom"}] * (IGNORED_MAX + 1)))


def test_many_unknown_fields_cost_one_more_reading() -> None:
    reads = []

    def read(given: bytes) -> Any:
        reads.append(given)
        return parse_completion(given)

    _, ignored = read_known(read, body(**{f"f{number}": 0 for number in range(IGNORED_MAX)}))
    assert (len(ignored), len(reads)) == (IGNORED_MAX, 2)


def test_a_body_of_unknown_fields_alone_is_given_up() -> None:
    with pytest.raises(UnknownField):
        read_known(parse_completion, body(**{f"f{number}": 0 for number in range(IGNORED_MAX + 1)}))


def test_a_name_cannot_write_headers() -> None:
    assert header_value(["a", "b\r\nset-cookie: x", "\ud800"]) == "a, b%0D%0Aset-cookie%3A%20x, %3F"
    assert len(header_value(["x" * 10_000] * 1000)) < 5000


@pytest.mark.parametrize("stream", [False, True])
async def test_the_response_names_what_was_ignored(tmp_path: Path, stream: bool) -> None:
    async with play(tmp_path, FakeEngine()) as here:
        for path, prompt in (
            ("/v1/completions", {"prompt": "ab"}),
            ("/v1/chat/completions", {"messages": HI}),
        ):
            asked = {"model": MODEL, **prompt, "max_tokens": 2, "stream": stream}
            odd = asked | {"colour": "red", "weight": 1}
            plain = await here.http.post(path, json=asked, headers=IGNORE)
            told = await here.http.post(path, json=odd, headers=IGNORE)
            assert (plain.status_code, told.status_code) == (200, 200)
            assert TOLD not in plain.headers
            assert told.headers[TOLD] == "colour, weight"
            refused = await here.http.post(path, json=odd)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "colour")


async def test_members_of_stream_options_are_fields_as_any_other(tmp_path: Path) -> None:
    async with play(tmp_path, FakeEngine()) as here:
        asked = {"model": MODEL, "max_tokens": 2, "stream": True}
        options = {"include_usage": True, "include_obfuscation": False}
        for path, given in (
            ("/v1/completions", {"prompt": "ab"}),
            ("/v1/chat/completions", {"messages": HI}),
            ("/v1/responses", {"input": "ab", "store": False, "max_output_tokens": 16, "max_tokens": None}),
        ):
            known = {name: value for name, value in (asked | given).items() if value is not None}
            assert (await here.http.post(path, json=known | {"stream_options": options})).status_code == 200
            odd = known | {"stream_options": options | {"colour": 1, "size": 2}}
            refused = await here.http.post(path, json=odd)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options.colour")
            told = await here.http.post(path, json=odd | {"weight": 1}, headers=IGNORE)
            assert told.status_code == 200, told.text
            assert {*told.headers[TOLD].split(", ")} == {
                "weight",
                "stream_options.colour",
                "stream_options.size",
            }
        usage = known | {"stream_options": {"continuous_usage_stats": True}}
        refused = await here.http.post(path, json=usage, headers=IGNORE)
        assert "stream_options: continuous_usage_stats is not supported" in refused.json()["error"]["message"]
