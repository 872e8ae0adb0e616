"""Requests that cover all pairs of features, and what their answers say, whatever API they are of.

Owns: the features of a request, a covering array of them, and the reading of answers: of a stream, its parts joined.
Always holds: an array depends on its seed alone. A pair that a server refuses is in no row of it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pair_answers import Told

Row = dict[str, str]
#: Of each feature, its values. The first one is the plain one.
FEATURES: dict[str, tuple[str, ...]] = {
    "how": ("stream", "whole"),
    "wire": ("completions", "text", "chat", "responses", "messages", "vllm", "vllm text", "sglang"),
    "n": ("1", "3"),
    "prompts": ("1", "2"),
    "scores": ("none", "echo", "echo_last", "prompt_logprobs", "only"),
    "numbers": ("content", "none", "top", "legacy"),
    "temperature": ("1", "0", "0.7"),
    "filter": ("none", "top_p", "top_k", "min_p", "all"),
    "penalty": ("none", "repetition", "presence", "frequency"),
    "limit": ("none", "bias", "allowed", "bad_words", "min_tokens", "ignore_eos"),
    "stop": ("none", "string", "ids", "included"),
    "form": ("free", "json", "regex", "choice", "forced", "auto", "strict", "no call"),
    "length": ("12", "1", "70", "context"),
    "records": ("none", "routes", "weights", "masks", "raw", "reference", "files"),
    "session": ("new", "none", "second", "branch"),
    "model": ("base", "pinned", "policy", "older policy"),
    "version": ("none", "min", "staleness"),
    "cache": ("shared", "off", "isolated"),
    "priority": ("0", "3"),
    "failover": ("exact", "any", "off"),
    "kept": ("masks", "none", "logprobs", "routes"),
}
PLAIN: Row = {name: values[0] for name, values in FEATURES.items()}
#: What a value needs of others, where a row says nothing of them.
NEEDS: dict[tuple[str, str], Row] = {
    ("form", "forced"): {"wire": "chat"},
    ("form", "auto"): {"wire": "chat"},
    ("form", "strict"): {"wire": "chat"},
    ("form", "no call"): {"wire": "chat"},
    ("records", "masks"): {"filter": "top_p"},
    ("scores", "prompt_logprobs"): {"how": "whole"},
}
Pair = tuple[tuple[str, str], tuple[str, str]]


def with_needs(some: Row) -> Row:
    """A whole row, which is plain where `some` says nothing."""
    row = dict(PLAIN)
    for item in some.items():
        row |= NEEDS.get(item, {})
    return row | some


def pairs_of(row: Row) -> Iterator[Pair]:
    return itertools.combinations(sorted(row.items()), 2)


def all_pairs() -> list[Pair]:
    return [
        ((one, first), (other, second))
        for one, other in itertools.combinations(sorted(FEATURES), 2)
        for first in FEATURES[one]
        for second in FEATURES[other]
    ]


def covering(seed: int, refused: Callable[[Row], bool], tries: int = 12) -> Iterator[Row]:
    """Rows that have all pairs which some accepted row has. refused: the server takes no such row."""
    rng = random.Random(seed)
    left = {pair for pair in all_pairs() if not refused(with_needs(dict(pair)))}
    while left:
        begun = rng.choice(sorted(left))
        rows = [_filled(dict(begun), left, refused, rng) for _ in range(tries)]
        best = max(rows, key=lambda row: sum(pair in left for pair in pairs_of(row)))
        left.difference_update(pairs_of(best))
        left.discard(begun)
        yield best


def _filled(row: Row, left: set[Pair], refused: Callable[[Row], bool], rng: random.Random) -> Row:
    for name in rng.sample(sorted(FEATURES), len(FEATURES)):
        if name in row:
            continue

        def gain(value: str, name: str = name) -> int:
            return sum(tuple(sorted(((name, value), item))) in left for item in row.items())

        values = sorted(FEATURES[name], key=lambda value: (-gain(value), rng.random()))
        row[name] = next(
            (value for value in values if not refused(with_needs(row | {name: value}))), PLAIN[name]
        )
    return row


# -- bodies

TOOL = {
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "type": "object",
        "properties": {"far": {"type": "boolean"}},
        "required": ["far"],
        "additionalProperties": False,
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, "three"]}},
    "required": ["a"],
    "additionalProperties": False,
}
REGEX, CHOICES = "(ab|c){2,6}z", ["yes", "no way"]
STOPS, STOP_IDS = ["e", "qu"], [101, 32, 9]
LENGTHS = {"12": 12, "1": 1, "70": 70, "context": 10**6, "long": 300}
TOKEN_WIRES = frozenset(("completions", "vllm", "vllm text", "sglang"))


@dataclass
class Names:
    """The snapshots of a server. older: those that stay loaded behind the newest."""

    model: str
    policy: str = "red"
    older: str = "base"
    older_adapter: str = ""


def path_of(wire: str) -> str:
    paths = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
    paths |= {"sglang": "/generate"} | dict.fromkeys(("vllm", "vllm text"), "/inference/v1/generate")
    return paths.get(wire, "/v1/completions")


_TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
_STRICT = {"tools": [{"type": "function", "function": {**TOOL, "strict": True}}]}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
_FILTERS = {"top_p": 0.8, "top_k": 20, "min_p": 0.02}
_ROUTES = {"include_routing_matrix": True}
_FILES = {"return_sampling_mask": True, "return_record_reference": True}
#: What a value adds to a body, by the names of a completion with vLLM's fields.
ADDED: dict[tuple[str, str], dict[str, Any]] = {
    ("n", "3"): {"n": 3},
    ("scores", "echo"): {"echo": True},
    ("scores", "echo_last"): {"echo_last": 3},
    ("scores", "prompt_logprobs"): {"prompt_logprobs": 1},
    ("scores", "only"): {"echo": True, "max_tokens": 0},
    ("numbers", "content"): {"logprobs": True},
    ("numbers", "top"): {"logprobs": True, "top_logprobs": 3},
    ("numbers", "legacy"): {"logprobs": 2},
    ("filter", "top_p"): {"top_p": 0.8},
    ("filter", "top_k"): {"top_k": 20},
    ("filter", "min_p"): {"min_p": 0.02},
    ("filter", "all"): _FILTERS,
    ("penalty", "repetition"): {"repetition_penalty": 1.3},
    ("penalty", "presence"): {"presence_penalty": 0.7},
    ("penalty", "frequency"): {"frequency_penalty": 0.5},
    ("limit", "bias"): {"logit_bias": {"101": 3.0, "116": -4.0}},
    ("limit", "allowed"): {"allowed_token_ids": [*range(60, 126), 256, 257, 258]},
    ("limit", "bad_words"): {"bad_words": ["e", "th", "{"]},
    ("limit", "ignore_eos"): {"ignore_eos": True},
    ("stop", "string"): {"stop": STOPS},
    ("stop", "ids"): {"stop_token_ids": STOP_IDS},
    ("stop", "included"): {"stop": STOPS, "include_stop_str_in_output": True},
    ("form", "json"): {"response_format": _FORMAT},
    ("form", "regex"): {"structured_outputs": {"regex": REGEX}},
    ("form", "choice"): {"structured_outputs": {"choice": CHOICES}},
    ("form", "forced"): {**_TOOLS, "tool_choice": "required"},
    ("form", "auto"): _TOOLS,
    ("form", "strict"): _STRICT,
    ("form", "no call"): {**_TOOLS, "tool_choice": "none"},
    ("records", "routes"): _ROUTES,
    ("records", "weights"): {**_ROUTES, "return_router_weights": True},
    ("records", "masks"): {"return_sampling_mask": True},
    ("records", "raw"): {"raw_output": True},
    ("records", "reference"): {**_ROUTES, **_FILES},
    ("records", "files"): {"routing_matrix_format": "parquet_v1", "sampling_mask": "parquet_v1"},
    ("version", "min"): {"midstream": {"min_snapshot": "base"}},
    ("version", "staleness"): {"midstream": {"max_staleness": 99}},
    ("cache", "off"): {"prompt_cache_max_len": 0},
    ("cache", "isolated"): {"prompt_cache_isolation_key": "mine"},
    ("priority", "3"): {"priority": 3},
}


def common(row: Row, names: Names, seed: int) -> dict[str, Any]:
    """By the names of a completion with vLLM's fields."""
    model = names.policy if "policy" in row["model"] else names.model
    pin = {"pinned": names.older, "older policy": names.older_adapter}.get(row["model"])
    length = LENGTHS[row["length"]]
    body: dict[str, Any] = {
        "model": model if pin is None else f"{model}@{pin}",
        "temperature": float(row["temperature"]),
        "seed": seed,
        "return_token_ids": True,
        "perf_metrics_in_response": True,
        "max_tokens": length,
        "stream": row["how"] == "stream",
    }
    if row["limit"] == "min_tokens":
        body["min_tokens"] = min(5, length)
    for item in row.items():
        body |= ADDED.get(item, {})
    return body


@dataclass
class Talk:
    """What a request continues. A turn of it is added by each answer."""

    ids: list[int]
    text: str
    messages: list[dict[str, Any]]

    def go_on(self, told: Told, added: str, *, edited: bool) -> None:
        answer = told.text + ("!" if edited else "")
        more = [*added.encode()]
        self.ids = self.ids + ([*told.ids[:-1], 33] if edited else told.ids) + more
        self.text += answer + added
        self.messages = [
            *self.messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": added},
        ]


#: A completion's names there, for the wires whose bodies have sampling parameters of their own.
_SGLANG = {
    "max_tokens": "max_new_tokens",
    "seed": "sampling_seed",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
}
_SGLANG_OUTSIDE = {
    "include_routing_matrix": "return_routed_experts",
    "top_logprobs": "top_logprobs_num",
    "prompt_cache_isolation_key": "cache_salt",
}
_OUTSIDE = frozenset(("model", "stream", "priority", "midstream", "perf_metrics_in_response"))


def body_for(row: Row, common: Mapping[str, Any], talk: Talk) -> dict[str, Any]:
    """A field that a wire does not have is sent by its name in completions, and must be refused."""
    wire, body = row["wire"], dict(common)
    if wire in ("completions", "text"):
        prompts = [talk.ids if wire == "completions" else talk.text]
        prompts += [[*talk.ids[:-2], 44, 45] if wire == "completions" else talk.text + "?"] * (
            row["prompts"] == "2"
        )
        return body | {"prompt": prompts if row["prompts"] == "2" else prompts[0]}
    if row["prompts"] == "2" and wire != "sglang":
        body["prompt"] = ["a", "b"]
    if wire == "chat":
        return body | {"messages": talk.messages}
    if wire == "messages":
        return _messages(body, talk)
    if wire == "responses":
        return _responses(body, talk)
    return _sglang(row, body, talk) if wire == "sglang" else _vllm(row, body, talk)


def _messages(body: dict[str, Any], talk: Talk) -> dict[str, Any]:
    body["messages"] = talk.messages
    if "stop" in body:
        body["stop_sequences"] = body.pop("stop")
    if form := body.pop("response_format", None):
        body["output_config"] = {"format": {"type": "json_schema", "schema": form["json_schema"]["schema"]}}
    if tools := body.get("tools"):
        functions = [dict(tool["function"]) for tool in tools]
        body["tools"] = [{"input_schema": each.pop("parameters"), **each} for each in functions]
        if choice := body.pop("tool_choice", None):
            body["tool_choice"] = {"type": {"required": "any"}.get(choice, choice)}
    return body


def _responses(body: dict[str, Any], talk: Talk) -> dict[str, Any]:
    body["input"] = [
        {"type": "message", "role": one["role"], "content": one["content"]} for one in talk.messages
    ]
    body["max_output_tokens"] = body.pop("max_tokens")
    if form := body.pop("response_format", None):
        body["text"] = {"format": {"type": "json_schema", **form["json_schema"]}}
    if tools := body.get("tools"):
        body["tools"] = [{"type": "function", "strict": False, **tool["function"]} for tool in tools]
    return body


def _vllm(row: Row, body: dict[str, Any], talk: Talk) -> dict[str, Any]:
    outside = _OUTSIDE | {"return_token_ids"}
    if "prompt_cache_isolation_key" in body:
        body["cache_salt"] = body.pop("prompt_cache_isolation_key")
    outside |= {"cache_salt"}
    if form := body.pop("response_format", None):
        body["structured_outputs"] = {"json": form["json_schema"]["schema"]}
    # Of vLLM it is the number of alternatives.
    numbers = body.pop("top_logprobs", 0)
    if body.get("logprobs") is True:
        body["logprobs"] = numbers
    sampling = {name: value for name, value in body.items() if name not in outside}
    made = {name: value for name, value in body.items() if name in outside} | {"token_ids": talk.ids}
    if row["wire"] == "vllm text":
        sampling["detokenize"], made["output_mode"] = True, "text"
    return made | {"sampling_params": sampling}


def _sglang(row: Row, body: dict[str, Any], talk: Talk) -> dict[str, Any]:
    del body["return_token_ids"]
    made: dict[str, Any] = {"input_ids": [talk.ids, [*talk.ids[:-2], 44, 45]]}
    if row["prompts"] == "1":
        made["input_ids"] = talk.ids
    if body.pop("logprobs", None):
        made["return_logprob"] = True
    if body.pop("prompt_logprobs", None):
        made |= {"return_logprob": True, "logprob_start_len": 0}
    if body.pop("return_sampling_mask", None):
        made["return_sampling_mask"] = True
    if form := body.pop("response_format", None):
        body["json_schema"] = json.dumps(form["json_schema"]["schema"])
    elif "regex" in body.get("structured_outputs", {}):
        body["regex"] = body.pop("structured_outputs")["regex"]
    sampling = dict[str, Any]()
    for name, value in body.items():
        if name in _SGLANG_OUTSIDE or name in _OUTSIDE:
            made[_SGLANG_OUTSIDE.get(name, name)] = value
        else:
            sampling[_SGLANG.get(name, name)] = value
    return made | {"sampling_params": sampling, "return_prompt_token_ids": True}
