"""Bodies of the inference APIs beside OpenAI's, answered by a whole replica: wire/ and what it calls.

Checked: a client's bytes are never a 5xx, nor an error in a stream. A refusal has the shape that the clients of its wire
read, and names a field of that wire. Gateway and replica agree on model, session and version constraint. A stream of what is
read could be resumed. A rendered request is one that generate takes.
"""

from __future__ import annotations

import atexit
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from midstream.core import session_keys
from midstream.core.decoding import NOT_JSON
from midstream.core.headers import HEADER_RECORDS, HEADER_SESSION, HEADER_UNKNOWN_FIELDS
from midstream.core.resumption import read_resume
from midstream.core.wires import WIRES
from midstream.fleet.sessions import body_model, session_key
from midstream.proxy.resume import resume_body
from midstream.proxy.versions import constraint_of_request
from midstream.replica.request.schema import ChatBody, CompletionBody
from midstream.replica.stored import Shelf
from midstream.replica.wire import bodies
from midstream.replica.wire.base import Read
from midstream.replica.wire.table import GENERATING
from targets.rollout_requests import demanded, refusable
from targets.target import Target, check, controlled
from targets.wire_replica import INFO, NAMES, Answer, WireReplica


class Path(NamedTuple):
    """body: what declares the fields of a body."""

    path: str
    body: type[msgspec.Struct]


MESSAGES = (
    Path("/v1/messages", bodies.MessagesBody),
    Path("/v1/messages/count_tokens", bodies.CountBody),
)
RESPONSES = (Path("/v1/responses", bodies.ResponsesBody),)
TOKENS = (
    Path("/inference/v1/generate", bodies.VllmGenerateBody),
    Path("/generate", bodies.SglangGenerateBody),
)
TEXTS = (
    Path("/tokenize", bodies.TokenizeBody),
    Path("/detokenize", bodies.DetokenizeBody),
    Path("/v1/chat/completions/render", ChatBody),
    Path("/v1/completions/render", CompletionBody),
)
#: A bit of the control byte each, above those that choose the path.
HEADERS = ((16, HEADER_UNKNOWN_FIELDS, "ignore"), (32, HEADER_SESSION, "s"), (64, HEADER_RECORDS, "routes"))
#: What a refusal may be about that is no field.
_OF_THE_WHOLE = ("the body ",)
_replicas: list[WireReplica] = []


def replica() -> WireReplica:
    if not _replicas:
        _replicas.append(WireReplica())
        atexit.register(close)
    return _replicas[0]


def close() -> None:
    while _replicas:
        _replicas.pop().close()


def run(paths: Sequence[Path], data: bytes) -> None:
    control, body = controlled(data)
    path = paths[control % 16 % len(paths)]
    headers = {name: value for bit, name, value in HEADERS if control & bit}
    try:
        check_agreement(path, body)
        answer = replica().ask(path.path, body, headers)
        if answer.status == 200:
            check_success(path, answer)
        else:
            check_refusal(path, body, answer)
        if path.path.endswith("/render") and answer.status == 200:
            check_rendered(path, answer)
        if path in RESPONSES and answer.status == 200:
            check_continued(body, answer)
    finally:
        replica().forget()


# -- answers


def check_success(path: Path, answer: Answer) -> None:
    told = events(answer.body) if answer.streamed else [json.loads(answer.body)]
    check(told, "a stream of no event", answer)
    for event in told:
        failed = isinstance(event, dict) and event.get("error") is not None
        check(not failed, "an error in an answer that began", event)
    if not answer.streamed and path in TOKENS:
        check_numbers(told[0])


def events(body: bytes) -> list[Any]:
    check(body.endswith(b"\n\n"), "a stream that ends within an event", body)
    lines = [line for line in body.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def check_numbers(told: Any) -> None:
    """As many log-probabilities as token ids."""
    for output in told if isinstance(told, list) else told.get("choices", [told]):
        ids = output.get("token_ids", output.get("output_ids"))
        asked = output.get("logprobs") or {}
        scored = asked.get("content") or output.get("meta_info", {}).get("output_token_logprobs")
        check(scored is None or len(scored) == len(ids), "a token without its number", output)


def check_refusal(path: Path, body: bytes, answer: Answer) -> None:
    check(400 <= answer.status < 500, "a client's bytes are the server's fault", answer.status, answer.body)
    told = json.loads(answer.body)
    error = told["error"]
    check({"message", "type", "code", "param"} <= error.keys(), "an error of another shape", told)
    anthropic = WIRES[path.path].errors == "anthropic"
    check((told.get("type") == "error") == anthropic, "an error of another wire", told)
    if answer.status != 400:
        return
    message, param = error["message"], error["param"]
    if param is None:
        check(message.startswith(_OF_THE_WHOLE), "a refusal that names no field", message)
        return
    try:
        given = msgspec.json.decode(body)
    except NOT_JSON:
        # An unknown field is refused where it stands, before the rest is looked at.
        return
    root = re.split(r"[.\[]", param)[0]
    known = {*path.body.__struct_encode_fields__, *(given if isinstance(given, dict) else ())}
    check(root in known or param in known, "a field that this wire has not", param, message)


def check_rendered(path: Path, answer: Answer) -> None:
    rendered = json.loads(answer.body)
    for one in rendered if isinstance(rendered, list) else [rendered]:
        # The answer shall fit what it is read into, and be plain.
        again = replica().ask("/inference/v1/generate", json.dumps(one).encode(), {})
        check(again.status == 200, "a rendered request that generate refuses", one, again.body)
        prompt = replica().engine.asked[0].prompt
        check(prompt == tuple(one["token_ids"]), "another prompt than was rendered", prompt, one)


def check_continued(body: bytes, answer: Answer) -> None:
    """A second turn by the id of the first one has the messages that one with all items has."""
    told = events(answer.body) if answer.streamed else [json.loads(answer.body)]
    first = told[-1]["response"] if answer.streamed else told[0]
    if first["store"] is False:
        return
    new = [{"role": "user", "content": "and"}]
    listed = replica().replica.responses.find("", first["id"])
    check(listed is not None, "a response that was not stored", first)
    assert listed is not None
    by_id = read(RESPONSES[0], json.dumps({"previous_response_id": first["id"], "input": new}).encode())
    instead = read(RESPONSES[0], json.dumps({"input": [*listed.input, *listed.output, *new]}).encode())
    assert isinstance(by_id.body, ChatBody)
    assert isinstance(instead.body, ChatBody)
    check(by_id.body.messages == instead.body.messages, "other messages by id", by_id.body, instead.body)


# -- what is read


def read(path: Path, body: bytes) -> Read:
    shelf = Shelf(replica().replica.responses, "", False)
    return GENERATING[WIRES[path.path].name].read(body, shelf)


def check_agreement(path: Path, body: bytes) -> None:
    wire = WIRES[path.path]
    if wire.name not in GENERATING:
        return
    found, _ = refusable(partial(read, path, body))
    if found is None:
        return
    made = found.body
    model = body_model(body, wire.user)
    check(model == made.model, "the gateway reads another model", model, made.model)
    key, _ = refusable(lambda: session_key({}, body, wire.user))
    own, _ = refusable(
        lambda: session_keys.session_key(
            session_keys.named_in_body(made.prompt_cache_key, made.session_id, made.user)
        )
    )
    # A name that is written with escapes is none to the gateway's search, which costs affinity only.
    check(key == own or b"\\" in body, "the gateway reads another session", key, own)
    constraint, _ = refusable(lambda: constraint_of_request(NAMES, {}, body, wire.user))
    asked, _ = refusable(lambda: demanded(made))
    check(constraint == asked, "the gateway reads another version constraint", constraint, asked)
    resumed = read_resume(resume_body(path.path.encode(), "r0", True, "", body))
    again = read(path, bytes(resumed.body))
    check(
        plain(path, again) == plain(path, found), "another request when its stream is resumed", again, found
    )


def plain(path: Path, found: Read) -> str:
    """Without what is drawn anew: of a response, its own id."""
    made = msgspec.to_builtins(found.body)
    if path in RESPONSES:
        made["request_id"] = None
    return repr((made, found.ignored, found.prompt_from, found.cumulative, found.whole, found.resumable))


# -- seeds


HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
LOGGED: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "include_routing_matrix": True}


def encoded(control: int, bodies: Sequence[dict[str, Any]]) -> Iterator[bytes]:
    for body in bodies:
        yield bytes([control]) + json.dumps(body).encode()


def messages_seeds() -> Iterator[bytes]:
    tools = [{"name": "f", "description": "d", "input_schema": PARAMETERS}]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]}
    history = [
        *HI,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "h"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "so"}]},
    ]
    rows: list[dict[str, Any]] = [
        {"messages": HI, "stream": True, "temperature": 0.5, "top_k": 3, "stop_sequences": ["x"]},
        {"messages": history, "tools": tools, "system": [{"type": "text", "text": "s"}]},
        {"messages": HI, "tools": tools, "tool_choice": {"type": "tool", "name": "f"}},
        {"messages": HI, "tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"messages": HI, "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"}, "seed": 1},
        {"messages": HI, "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}}},
        {"messages": HI, "return_token_ids": True, "midstream": {"snapshot": "base"}, **LOGGED},
        {"messages": HI, "tool_choice": {}},
        {"messages": [{"role": "user", "content": "", "name": "n"}], "container": "c"},
    ]
    for control in (0, 1, 16, 32 + 64):
        yield from encoded(control, [{"model": "m", "max_tokens": 2} | row for row in rows[control // 16 :]])


def responses_seeds() -> Iterator[bytes]:
    tools = [{"type": "function", "name": "f", "parameters": PARAMETERS, "strict": True}]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    form = {"type": "json_schema", "name": "n", "schema": PARAMETERS}
    rows: list[dict[str, Any]] = [
        {"input": "hi", "stream": True, "instructions": "i", "max_output_tokens": 3},
        {"input": items, "tools": tools, "tool_choice": "auto", "store": False},
        {"input": HI, "tools": tools, "tool_choice": {"type": "function", "name": "f"}},
        {"input": HI, "text": {"format": form, "verbosity": "medium"}, "metadata": {"a": "b"}},
        {"input": HI, "include": ["message.output_text.logprobs"], "top_logprobs": 1, "stream": True},
        {"input": HI, "previous_response_id": "resp_r0_x", "reasoning": {"effort": "low"}},
        {"input": HI, "model": "m@base", "user": "u", "return_token_ids": True, **LOGGED},
        {"input": [], "truncation": "auto"},
        {"input": [{"type": "item_reference", "id": "x"}], "background": True},
    ]
    for control in (0, 16, 32 + 64):
        yield from encoded(control, rows[control // 16 :])


def token_seeds() -> Iterator[bytes]:
    ids: dict[str, Any] = {"token_ids": [65, 66, 67], "model": "m"}
    sampling: dict[str, Any] = {"max_tokens": 2, "temperature": 1.0, "top_k": -1, "stop_token_ids": [7]}
    rows: list[dict[str, Any]] = [
        {"sampling_params": sampling | {"logprobs": 1, "seed": 3}, "stream": True, "return_token_ids": True},
        {"sampling_params": sampling | {"return_routed_experts": True, "routed_experts_prompt_start": 1}},
        {"sampling_params": sampling | {"return_routed_experts": "raw", "n": 2}, "output_mode": "text"},
        {"sampling_params": sampling | {"prompt_logprobs": 2, "include_routing_matrix": True}},
        {"sampling_params": {"structured_outputs": {"json": '{"type": "object"}'}, "bad_words": ["a"]}},
        {"sampling_params": {"stop": ["x"], "logit_bias": {"65": 1}, "allowed_token_ids": [65, 70]}},
        {"sampling_params": {"flat_logprobs": False, "extra_args": {}, "min_tokens": 1}, "priority": 1},
    ]
    for control in (0, 16, 32 + 64):
        yield from encoded(control, [ids | row for row in rows])
    sampling = {"max_new_tokens": 2, "stop": None, "no_stop_trim": True, "sampling_seed": 1}
    scored: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    rows = [
        {"text": "ab", "sampling_params": sampling, "stream": True, "rid": "r", **scored},
        {"input_ids": [65, 66], "return_routed_experts": True, "return_text_in_logprobs": True, **scored},
        {"input_ids": [[65], [66, 67]], "rid": ["a", "b"], "sampling_params": [sampling, sampling]},
        {"text": ["a", "b"], "sampling_params": {"n": 2}, "extra_key": "k", "cache_salt": "s"},
        {"text": "a", "sampling_params": {"json_schema": '{"type": "object"}', "min_new_tokens": 0}},
        {"text": "a", "sampling_params": {"regex": "a+/b"}, "routing_key": "u", "model": "m"},
        {"text": "a", "stream": True, "incremental_streaming_output": True, "return_logprob": [True]},
        {"text": "a", "lora_path": "x"},
    ]
    for control in (1, 17, 33 + 64):
        yield from encoded(control, rows)


def text_seeds() -> Iterator[bytes]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    yield from encoded(0, [{"prompt": "a b", "return_token_strs": True}, {"messages": HI, "tools": tools}])
    yield from encoded(0, [{"prompt": "a", "messages": HI}, {"prompt": "", "add_special_tokens": True}])
    yield from encoded(1, [{"tokens": [65, 256]}, {"tokens": []}, {"tokens": [-1, INFO.vocab_size]}])
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}
    chats: list[dict[str, Any]] = [
        {"messages": HI, "temperature": 0.5, "stop": ["x"], "stream": True, "logit_bias": {"65": 1}},
        {"messages": HI, "logprobs": True, "top_logprobs": 3, "cache_salt": "s", "priority": 2},
        {"messages": HI, "response_format": form, "max_tokens": 4, "seed": 1},
        {"messages": HI, "tools": tools, "tool_choice": "auto", "request_id": "r"},
    ]
    yield from encoded(2, chats)
    texts: list[dict[str, Any]] = [
        {"prompt": ["a", "b"], "logprobs": 2, "n": 2},
        {"prompt": [65, 66], "stop_token_ids": [3], "ignore_eos": True, "min_tokens": 1},
        {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}, "include_stop_str_in_output": True},
        {"prompt": "a", "detokenize": False, "prompt_logprobs": 1, "max_tokens": 0},
    ]
    yield from encoded(3, texts)


SHARED_WORDS: tuple[bytes, ...] = (
    *(b"null", b"true", b"[" * 32, b"[" * 400, b'{"a":' * 200, b"1e999", b"18446744073709551616", b"\xff"),
    *(b'"\\ud800"', b'"\\\\ud800"', b'"model":"m"', b'"midstream":{', b'"stream":true', b'"seed":', b"-1"),
)
OWN_WORDS: dict[str, tuple[bytes, ...]] = {
    "messages": (
        *(b'"system":', b'"content":[', b'"type":"tool_use"', b'"type":"tool_result"', b'"input":{'),
        *(b'"tool_choice":{', b'"output_config":{', b'"metadata":{"user_id":', b'"thinking":{'),
    ),
    "responses": (
        *(b'"input":[', b'"type":"function_call"', b'"type":"reasoning"', b'"previous_response_id":"'),
        *(b'"text":{"format":{', b'"include":[', b'"tool_choice":', b'"store":false', b'"id":'),
    ),
    "tokens": (
        *(b'"sampling_params":{', b'"token_ids":[', b'"input_ids":[', b'"rid":', b'"logprob_start_len":'),
        *(b'"structured_outputs":{', b'"json_schema":"', b'"regex":"', b'"return_routed_experts":'),
        *(b'"stop":', b'"n":', b'"logprobs":', b'"prompt_logprobs":', b'"bad_words":[', b'"output_mode":'),
    ),
    "texts": (
        *(b'"prompt":', b'"messages":[', b'"tools":[', b'"tokens":[', b'"echo":', b'"response_format":{'),
        *(b'"logprobs":', b'"max_tokens":', b'"stop":', b'"reasoning_effort":', b'"structured_outputs":{'),
    ),
}
MESSAGES_BODIES = Target(
    partial(run, MESSAGES), messages_seeds, (*SHARED_WORDS, *OWN_WORDS["messages"]), 4096
)
RESPONSES_BODIES = Target(
    partial(run, RESPONSES), responses_seeds, (*SHARED_WORDS, *OWN_WORDS["responses"]), 4096
)
TOKEN_BODIES = Target(partial(run, TOKENS), token_seeds, (*SHARED_WORDS, *OWN_WORDS["tokens"]), 4096)
TEXT_BODIES = Target(partial(run, TEXTS), text_seeds, (*SHARED_WORDS, *OWN_WORDS["texts"]), 4096)
