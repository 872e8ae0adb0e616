"""Bodies and headers of rollout requests, as a replica reads them and as a gateway looks into them.

Checked: a request is read or refused by a 4xx. Gateway and replica agree on model, session and version constraint. What is
read is read the same when it is written again, and a stream of it could be resumed. A schema's grammar is decided in time.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec

from midstream.core import session_keys
from midstream.core.errors import MidstreamError
from midstream.core.resumption import ResumeLogReader, read_resume, snapshot_to_resume_under
from midstream.core.served_names import ServedNames
from midstream.core.sse import sse_event
from midstream.core.types import ModelInfo
from midstream.core.versions import (
    Admitted,
    Refusal,
    VersionConstraint,
    as_header,
    constraint_of_body,
    constraint_of_headers,
    from_header,
)
from midstream.fleet.sessions import body_model, session_key
from midstream.proxy.resume import failover_mode, resume_body
from midstream.proxy.versions import constraint_of_request
from midstream.replica.request.checked import Checked, check_messages, split_prompts
from midstream.replica.request.checked import check as check_rules
from midstream.replica.request.schema import ChatBody, CompletionBody, parse_chat, parse_completion
from midstream.replica.text.grammar import build, response_schema
from midstream.replica.text.grammarcheck import GrammarChecks
from midstream.replica.text.tools import prepare_history
from targets.target import Target, check, controlled, outcome

INFO = ModelInfo(max_model_len=100, vocab_size=300, moe_layers=2, top_k=2, num_experts=8, eos_token_ids=(7,))
NAMES = ServedNames("accounts/a/models/m", "accounts/a/deployments/d")
_T = TypeVar("_T")
_Body = ChatBody | CompletionBody


def refusable(call: Callable[[], _T]) -> tuple[_T | None, MidstreamError | None]:
    result, refused = outcome(MidstreamError, call)
    if isinstance(refused, MidstreamError):
        check(400 <= refused.status < 500, "a client's bytes are the server's fault", refused)
        msgspec.json.encode(refused.body())
        return None, refused
    return result, None


# -- bodies


def run_body(data: bytes) -> None:
    control, body = controlled(data)
    parse: Callable[[bytes], _Body] = parse_chat if control & 1 else parse_completion
    read, _ = refusable(lambda: parse(body))
    model, (key, _) = body_model(body), refusable(lambda: session_key({}, body))
    constraint, refused = refusable(lambda: constraint_of_request(NAMES, {}, body))
    if read is None:
        return
    check(model == read.model, "the gateway reads another model", model, read.model)
    named = session_keys.named_in_body(read.prompt_cache_key, read.session_id, read.user)
    ours, _ = refusable(lambda: session_keys.session_key(named))
    # A name that is written with escapes is none to the gateway's search, which costs affinity only.
    check(key == ours or b"\\" in body, "the gateway reads another session", key, ours)
    asked, _ = refusable(lambda: demanded(read))
    check(constraint == asked, "the gateway reads another version constraint", constraint, asked, refused)
    again = parse(msgspec.json.encode(read))
    check(repr(again) == repr(read), "another request when it is written again", read, again)
    resumed = read_resume(resume_body(b"/v1/x", "r0", True, "", body))
    check(repr(parse(bytes(resumed.body))) == repr(read), "another request when its stream is resumed", read)
    checked, _ = refusable(lambda: check_rules(read, INFO))
    if checked is not None:
        refusable(lambda: texts(read, checked))


def demanded(read: _Body) -> VersionConstraint:
    return constraint_of_body(read.midstream).with_(
        VersionConstraint(NAMES.wanted(NAMES.model if read.model is None else read.model))
    )


def texts(read: _Body, checked: Checked) -> None:
    if isinstance(read, CompletionBody):
        for prompt in split_prompts(read.prompt, INFO.vocab_size):
            check(
                isinstance(prompt, str) or all(0 <= t < 300 for t in prompt),
                "a token of no vocabulary",
                prompt,
            )
        return
    messages = check_messages(read.messages)
    check(all(isinstance(m["content"], str) for m in messages), "content that is no text", messages)
    refusable(lambda: prepare_history(messages, "text"))
    refusable(lambda: prepare_history(messages, "object"))
    refusable(lambda: prepare_history(messages, None))
    check(checked.tools is None or checked.tools.schemas is not None, "tools without schemas")


def body_seeds() -> Iterator[bytes]:
    hi: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        *hi,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    chats: list[dict[str, Any]] = [
        {"messages": hi, "temperature": 0.5, "stop": ["x"], "stream": True, "n": 2},
        {"messages": hi, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
        {"messages": hi, "tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"messages": history, "logprobs": True, "top_logprobs": 3, "include_routing_matrix": True},
        {"messages": parts, "response_format": {"type": "json_object"}, "user": "u"},
        {"messages": hi, "midstream": {"snapshot": "s", "wait": 1}, "prompt_cache_key": "k"},
        {"messages": hi, "reasoning_effort": "none", "logit_bias": {"3": 1}, "metadata": {"a": []}},
    ]
    for chat in chats:
        yield b"\x01" + json.dumps({"model": "m"} | chat).encode()
    for prompt in ("p", ["p", "q"], [1, 2], [[1], [2, 3]], []):
        yield b"\x00" + json.dumps({"model": "m@s", "prompt": prompt, "echo": True, "logprobs": 1}).encode()


# -- grammars


class _Lexicon:
    def literally(self, text: str) -> str:
        return json.dumps(text)

    def specials(self, without: frozenset[int]) -> str:
        return ""

    def marker_ids(self, markers: tuple[str, ...]) -> frozenset[int]:
        return frozenset(range(len(markers)))


_checks: list[GrammarChecks] = []


def run_grammar(data: bytes) -> None:
    """A response_format. The grammar library works in the child that the replica uses, within its bounds of time and memory."""
    try:
        given = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    schema, _ = refusable(lambda: response_schema(given))
    if schema is None:
        return
    if not _checks:
        _checks.append(GrammarChecks())
        atexit.register(_checks[0].close)
    problem_with = _checks[0].of_request(lambda: None)
    grammar, refused = refusable(lambda: build(schema, None, None, _Lexicon(), (7,), problem_with))
    if grammar is not None:
        grammar.encode()
        check(
            _checks[0].problem(grammar, begun=False) is None,
            "a grammar is accepted and does not compile",
            grammar,
        )
    check(refused is None or refused.param == "response_format", "a refusal of another field", refused)


def grammar_seeds() -> Iterator[bytes]:
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]},
        {"type": "array", "items": {"type": "string", "pattern": "^a+$"}, "maxItems": 3},
        {"anyOf": [{"const": 1}, {"enum": ["a", None]}]},
        {"$defs": {"t": {"type": "object", "properties": {"n": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"},
        {"type": "number", "multipleOf": 0.5, "exclusiveMaximum": 9},
        {"type": "string", "format": "date", "minLength": 2},
        {"allOf": [{"type": "object"}, {"patternProperties": {"^x": {"type": "boolean"}}}]},
        {"$ref": "#"},
    ]
    for schema in schemas:
        yield json.dumps({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}).encode()
        yield json.dumps({"type": "json_object", "schema": schema}).encode()
    yield b'{"type": "text"}'


# -- headers


def run_headers(data: bytes) -> None:
    """Lines of a name, a colon and a value, as http/reader.py gives them; then a line feed more, and a resume log."""
    head, _, log = data.partition(b"\n\n")
    lines = (line.partition(b":")[::2] for line in head.split(b"\n"))
    headers = {name.strip().lower(): value for name, value in lines}
    key, _ = refusable(lambda: session_key(headers, b""))
    check(key is None or 0 < len(key.encode()) <= session_keys.MAX_KEY_BYTES, "a key that is none", key)
    constraint, _ = refusable(lambda: constraint_of_headers(headers))
    if constraint is not None:
        names = {
            "snapshot": "snapshot",
            "min_snapshot": "min_snapshot",
            "max_staleness": "max_staleness",
            "wait_s": "wait",
        }
        said = {names[name]: value for name, value in msgspec.to_builtins(constraint).items()}
        check(
            constraint_of_body(said) == constraint, "a constraint means another thing in a body", constraint
        )
    refusable(lambda: failover_mode(headers))
    for value in headers.values():
        refusable(partial(NAMES.wanted, value.decode("utf-8", "replace"), value.decode("latin-1")))
        for kind in (Admitted, Refusal):
            check_header(value, kind)
    run_log(log)


def check_header(value: bytes, kind: type[Any]) -> None:
    found = from_header(value, kind)
    if found is not None:
        written = as_header(found)
        check(written.isascii() and written.isprintable(), "a header that is no line", written)
        check(from_header(written, kind) == found, "another header when it is written again", found)


def run_log(log: bytes) -> None:
    refusable(lambda: read_resume(log))
    state = log.decode("utf-8", "replace")
    reader, _ = refusable(lambda: ResumeLogReader(state))
    refusable(lambda: snapshot_to_resume_under(state))
    if reader is not None:
        events, _ = refusable(lambda: list(reader.events(2)))
        check(events is None or len(events) == state.count("\n"), "lines are lost", events)


def header_seeds() -> Iterator[bytes]:
    yield b"x-multi-turn-session-id: k\nx-session-affinity: a\nx-session-id:"
    yield b"x-midstream-snapshot: s\nx-midstream-min-snapshot: r\nx-midstream-max-staleness: 2\nx-midstream-snapshot-wait: 0.5"
    yield b"x-midstream-max-staleness: 1e3\nx-midstream-snapshot-wait: nan\nx-midstream-failover: exact"
    yield b"x-midstream-failover: any\nfireworks-model: accounts/a/models/m@s\nx: m@"
    yield b"a: " + as_header(Admitted("s", True)).encode()
    yield b"a: " + as_header(Refusal("s", False, VersionConstraint("t"))).encode()
    opening = b'{"id":"i","created":1,"seed":2,"prompts":"d"}'
    yield (
        b"\n\n"
        + opening
        + b'\n{"c":0,"t":[1,2],"s":"s","kv":[["s",0,2]]}\n0:5\n1:6\n{"c":1,"finish":"stop","over":true}'
    )
    yield (
        b"\n\n" + json.dumps({"path": "/v1/x", "lost": "r", "exact": True, "state": "", "body": {}}).encode()
    )


# -- server-sent events


def run_event(data: bytes) -> None:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    try:
        written = sse_event(value)
    except RecursionError:
        return
    lines = written.decode().splitlines()
    check(
        len(lines) == 2 and lines[1] == "" and lines[0].startswith("data: "),
        "an event of several lines",
        written,
    )
    check(repr(msgspec.json.decode(lines[0][6:])) == repr(value), "an event says another thing", value)


def event_seeds() -> Iterator[bytes]:
    yield json.dumps({"a": "\u2028\u2029\x85\r\n", "b": [1.5, None]}, ensure_ascii=False).encode()
    yield b'{"\xe2\x80\xa8": "\\u2028"}'


BODY_WORDS: tuple[bytes, ...] = (
    *(
        b'"messages":[',
        b'"prompt":',
        b'"tools":[',
        b'"tool_choice":',
        b'"midstream":{',
        b'"user":',
        b'"model":',
    ),
    *(
        b'"prompt_cache_key":',
        b"null",
        b"true",
        b"[" * 32,
        b"1e999",
        b'"\\ud800"',
        b"18446744073709551616",
        b"\xff",
    ),
    *(b'"tool_calls":[', b'"arguments":', b'"content":', b'"role":"assistant"', b'"response_format":{'),
)
SCHEMA_WORDS: tuple[bytes, ...] = (
    *(
        b'"$ref":"#',
        b'"anyOf":[',
        b'"allOf":[',
        b'"oneOf":[',
        b'"not":{',
        b'"pattern":"',
        b'"format":"',
        b'"type":"',
    ),
    *(
        b'"minItems":',
        b'"maxLength":',
        b'"multipleOf":',
        b'"const":',
        b'"enum":[',
        b'"if":{',
        b'"x-guidance":{',
    ),
    *(b'"additionalProperties":', b'"prefixItems":[', b"(a|b)*", b"{1,1000}", b"1e308", b"-0.0", b"10000000"),
)
HEADER_WORDS: tuple[bytes, ...] = (
    *(
        b"x-session-id:",
        b"x-midstream-snapshot:",
        b"x-midstream-max-staleness:",
        b"x-midstream-snapshot-wait:",
    ),
    *(b"inf", b"1_0", b"\xff", b"\xc2\x85", b"{", b'"kv":[', b"\n\n", b"0:1\n", b"[" * 32),
)
BODY = Target(run_body, body_seeds, BODY_WORDS)
GRAMMAR = Target(run_grammar, grammar_seeds, SCHEMA_WORDS, 1024, timeout_s=30)
HEADERS = Target(run_headers, header_seeds, HEADER_WORDS, 2048)
EVENT = Target(run_event, event_seeds, (b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\xc2\x85", b"\\u0085"), 512)
