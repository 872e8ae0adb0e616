"""What an answer says, whatever API it is of: of a stream, its parts joined.

Owns: the reading of the answers of all APIs that generate.
Always holds: a stream and a whole answer of the same tokens are read as equal, but for ids and times.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Told:
    """One choice."""

    index: int
    prompt: list[int] | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling: list[float | None] = field(default_factory=list)
    tops: list[Any] = field(default_factory=list)
    routes: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    echoed: list[Any] = field(default_factory=list)
    prompt_scores: Any = None
    labels: list[str] = field(default_factory=list)
    kv: list[Any] | None = None
    earlier: list[Any] = field(default_factory=list)
    finish: Any = None
    raw: Any = None
    sequence_routes: Any = None
    files: Any = None


@dataclass
class Said:
    """A whole answer. resumed: another replica continued it."""

    choices: dict[int, Told] = field(default_factory=dict)
    usage: Any = None
    resumed: bool = False
    branch: Any = None
    reference: Any = None
    done: bool = False
    error: Any = None

    def choice(self, index: int) -> Told:
        return self.choices.setdefault(index, Told(index))


def take_openai(said: Said, event: dict[str, Any]) -> None:
    snapshot = event["model"].partition("@")[2]
    said.usage = event.get("usage") or said.usage
    said.reference = event.get("record_reference") or said.reference
    _take_seam(said, event.get("midstream") or {})
    for part in event["choices"]:
        told = said.choice(part["index"])
        told.prompt = part.get("prompt_token_ids") or event.get("prompt_token_ids") or told.prompt
        told.ids += part.get("token_ids") or []
        shown = part.get("delta") or part.get("message") or {"content": part.get("text")}
        told.text += shown.get("content") or ""
        told.thinking += shown.get("reasoning_content") or ""
        for call in shown.get("tool_calls") or ():
            told.calls.append((call["function"]["name"], call["function"]["arguments"]))
        _take_logprobs(told, part.get("logprobs") or {}, len(part.get("token_ids") or ()))
        told.prompt_scores = part.get("prompt_logprobs") or event.get("prompt_logprobs") or told.prompt_scores
        _take_labels(told, part, snapshot)
        told.finish = part.get("finish_reason") or told.finish
        told.raw = part.get("raw_output") or told.raw
        told.files = told.files or [
            part[name] for name in ("routing_references", "sampling_mask_references") if part.get(name)
        ]


def _take_seam(said: Said, seam: dict[str, Any]) -> None:
    said.resumed = said.resumed or "resumed" in seam
    said.branch = seam.get("branch") or seam.get("branches") or said.branch


def _take_labels(told: Told, part: dict[str, Any], snapshot: str) -> None:
    spans = part.get("snapshots") if isinstance(part.get("snapshots"), list) else None
    if spans is not None:
        told.labels = [span["snapshot"] for span in spans for _ in range(span["start"], span["end"])]
    else:
        told.labels += [snapshot] * (len(told.ids) - len(told.labels))
    told.kv = part.get("kv_snapshots") or told.kv
    told.earlier += part.get("earlier_kv_snapshots") or []


def _take_logprobs(told: Told, logprobs: dict[str, Any], ids: int) -> None:
    if "token_logprobs" in logprobs:
        echoed = len(logprobs["tokens"]) - ids
        told.echoed += list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))[:echoed]
        told.logprobs += logprobs["token_logprobs"][echoed:]
        told.tops += (logprobs["top_logprobs"] or [])[echoed:]
        told.offsets += logprobs["text_offset"][echoed:]
        return
    entries = logprobs.get("content") or []
    for at, entry in enumerate(entries):
        if at < len(entries) - ids:
            told.echoed.append(entry)
            continue
        told.logprobs.append(entry["logprob"])
        told.sampling.append(entry["sampling_logprob"])
        told.tops.append(entry["top_logprobs"])
        told.offsets.append(entry.get("text_offset", 0))
        for name, into in (
            ("routing_matrix", told.routes),
            ("router_weights", told.weights),
            ("sampling_mask", told.masks),
        ):
            if name in entry:
                into.append(entry[name])


def take_records(said: Said, own: dict[str, Any], text: Iterable[tuple[str, Any]] = ()) -> None:
    """Of the Messages and Responses APIs: `midstream`, and the blocks beside it."""
    told = said.choice(0)
    _take_seam(said, own)
    told.prompt = own.get("prompt_token_ids") or told.prompt
    told.ids += own.get("token_ids") or []
    _take_logprobs(told, own.get("logprobs") or {}, len(own.get("token_ids") or ()))
    if own:
        _take_labels(told, own, own["snapshot"])
    for kind, value in text:
        if kind == "text":
            told.text += value
        elif kind == "thinking":
            told.thinking += value
        else:
            told.calls.append(value)


def take_messages(said: Said, event: dict[str, Any]) -> None:
    kind, own, told = event["type"], event.get("midstream") or {}, said.choice(0)
    if kind == "message":
        blocks = [_block(block) for block in event["content"]]
        take_records(said, own, blocks)
        told.finish, said.usage = [event["stop_reason"], event["stop_sequence"]], event["usage"]
        return
    if kind == "content_block_start":
        block = event["content_block"]
        if block["type"] == "tool_use":
            told.calls.append((block["name"], ""))
    delta = event.get("delta") or {}
    take_records(said, own, [(name, delta[name]) for name in ("text", "thinking") if name in delta])
    if "partial_json" in delta:
        name, arguments = told.calls.pop()
        told.calls.append((name, arguments + delta["partial_json"]))
    if kind == "message_delta":
        told.finish, said.usage = [delta["stop_reason"], delta["stop_sequence"]], event["usage"]
    said.done = said.done or kind == "message_stop"


def _block(block: dict[str, Any]) -> tuple[str, Any]:
    if block["type"] == "tool_use":
        return "call", (block["name"], json.dumps(block["input"]))
    return block["type"], block[block["type"]]


def take_responses(said: Said, event: dict[str, Any]) -> None:
    if event.get("object") == "response":
        _take_response(said, event, event["midstream"])
        return
    kind, own, told = event["type"], event.get("midstream") or {}, said.choice(0)
    if kind == "response.created":
        take_records(said, event["response"]["midstream"])
    elif kind in ("response.completed", "response.incomplete"):
        final = Said()
        _take_response(final, event["response"], {})
        end, end_told = event["response"]["midstream"], final.choice(0)
        shown = (told.text, told.thinking, told.calls)
        if shown != (end_told.text, end_told.thinking, end_told.calls):
            said.error = {"message": f"its end has {end_told}, its deltas {shown}"}
        told.finish, said.usage, said.done = end_told.finish, final.usage, True
        _take_labels(told, end, end["snapshot"])
    elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
        told.calls.append((event["item"]["name"], ""))
    elif kind == "response.function_call_arguments.delta":
        name, arguments = told.calls.pop()
        told.calls.append((name, arguments + event["delta"]))
        take_records(said, own)
    elif kind.endswith(".delta"):
        name = "text" if kind == "response.output_text.delta" else "thinking"
        take_records(said, own, [(name, event["delta"])])
    else:
        take_records(said, own)


def _take_response(said: Said, event: dict[str, Any], own: dict[str, Any]) -> None:
    blocks: list[tuple[str, Any]] = []
    for item in event["output"]:
        if item["type"] == "function_call":
            blocks.append(("call", (item["name"], item["arguments"])))
        else:
            name = "text" if item["type"] == "message" else "thinking"
            blocks += [(name, part["text"]) for part in item["content"]]
    take_records(said, own, blocks)
    said.choice(0).finish, said.usage = [event["status"], event["incomplete_details"]], event["usage"]


def take_vllm(said: Said, event: dict[str, Any]) -> None:
    said.usage = event.get("usage") or said.usage
    for part in event["choices"]:
        told, own = said.choice(part["index"]), part.get("midstream") or {}
        _take_seam(said, own)
        told.prompt = event.get("prompt_token_ids") or told.prompt
        told.ids += part["token_ids"]
        told.text += part.get("text") or ""
        _take_logprobs(told, part.get("logprobs") or {}, len(part["token_ids"]))
        told.masks += part.get("sampling_mask") or []
        versions = part.get("weight_versions")
        spans = versions and [{"snapshot": one["version"], **one} for one in versions]
        _take_labels(told, own | ({"snapshots": spans} if spans else {}), own["snapshot"])
        told.prompt_scores = event.get("prompt_logprobs") or told.prompt_scores
        told.sequence_routes = part.get("routed_experts") or told.sequence_routes
        finish = part.get("finish_reason")
        told.finish = [finish, part.get("stop_reason")] if finish else told.finish


def take_sglang(said: Said, event: Any) -> None:
    """Each event of a stream has all of its choice so far."""
    for part in event if isinstance(event, list) else [event]:
        index, meta, own = part.get("index", 0), part["meta_info"], part["midstream"]
        told = said.choices[index] = Told(index)
        _take_seam(said, own)
        told.prompt = part.get("prompt_token_ids")
        told.ids, told.text = part["output_ids"], part["text"]
        told.logprobs = [row[0] for row in meta.get("output_token_logprobs") or ()]
        told.sampling = own.get("sampling_logprobs") or []
        told.tops = meta.get("output_top_logprobs") or []
        told.masks = meta.get("output_token_sampling_mask") or []
        told.prompt_scores = meta.get("input_token_logprobs")
        told.sequence_routes = meta.get("routed_experts")
        told.finish = meta.get("finish_reason")
        versions = meta.get("weight_versions") or []
        told.labels = [one["version"] for one in versions for _ in range(one["start"], one["end"])]
        told.kv, told.earlier = own.get("kv_snapshots"), own.get("earlier_kv_snapshots") or []
        said.usage = [meta["prompt_tokens"], meta["completion_tokens"]]


TAKE = {"chat": take_openai, "completions": take_openai, "text": take_openai, "messages": take_messages}
TAKE |= {"responses": take_responses, "vllm": take_vllm, "vllm text": take_vllm, "sglang": take_sglang}


def take_line(said: Said, wire: str, line: str) -> None:
    """Of a stream."""
    if line == "data: [DONE]":
        said.done = True
    elif line.startswith("data: "):
        event = json.loads(line[6:])
        if isinstance(event, dict) and ("error" in event or event.get("type") == "error"):
            said.error = event.get("error", event)
        else:
            TAKE[wire](said, event)
