"""Token ids in, token ids out: vLLM's and SGLang's paths, and those that turn text into ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from midstream_conformance.answers import Json, largest_difference
from midstream_conformance.checks.asking import GREEDY, serving
from midstream_conformance.checks.paths import answered, call, refused, streamed
from midstream_conformance.endpoint import TRAJECTORY_HEADER
from midstream_conformance.outcome import expect
from midstream_conformance.rows import Evidence, row
from midstream_conformance.session import Session

DOCUMENT = "docs/generate.md"
VLLM_DOCUMENT = f"{DOCUMENT}: vLLM's POST /inference/v1/generate"
SGLANG_DOCUMENT = f"{DOCUMENT}: SGLang's POST /generate"
NOTHING_DOCUMENT = f"{DOCUMENT}: Paths that generate nothing"
VLLM, SGLANG = "/inference/v1/generate", "/generate"
TOKENS = 16
# Blanks, line ends, and characters of two and of four bytes.
TEXT = "Rollout 7:  caf\u00e9 \u2192 \U0001f642\n\tdone, isn't it?\n"
QUESTION = [{"role": "user", "content": "What is left?"}]


@dataclass(frozen=True)
class Made:
    """What was generated. logprobs: nats, of `ids`. finish: the reason."""

    ids: list[int]
    logprobs: list[float]
    finish: str | None


def _vllm_body(session: Session, prompt: Sequence[int]) -> Json:
    """Greedy, and with nothing of the cache."""
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    return {"token_ids": list(prompt), "sampling_params": sampling, "cache_salt": session.key()}


def _sglang_body(session: Session, prompt: Sequence[int]) -> Json:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
    return {**body, "cache_salt": session.key()}


def _of_vllm(events: Sequence[Json]) -> Made:
    """Of a plain answer alone, or joined over a stream."""
    made = Made([], [], None)
    finishes = []
    for choice in (choice for event in events for choice in event["choices"]):
        made.ids.extend(choice["token_ids"])
        content = (choice.get("logprobs") or {}).get("content") or ()
        made.logprobs.extend(float(entry["logprob"]) for entry in content)
        finishes.append(choice.get("finish_reason"))
    given = [reason for reason in finishes if reason is not None]
    expect(
        len(given) == 1 and given == finishes[-1:],
        "one finish_reason, at the end, was expected",
        got=finishes,
    )
    return Made(made.ids, made.logprobs, given[0])


def _of_sglang(output: Json) -> Made:
    """An event has all so far."""
    meta = output["meta_info"]
    rows = meta["output_token_logprobs"]
    of_ids = [token for _, token, *_ in rows]
    expect(of_ids == output["output_ids"], "output_token_logprobs are of other ids than output_ids",
           output_ids=output["output_ids"], of=of_ids)  # fmt: skip
    return Made(
        output["output_ids"], [float(one[0]) for one in rows], (meta["finish_reason"] or {}).get("type")
    )


def _same(found: Made, wanted: Made, session: Session, what: str) -> Evidence:
    expect(found.ids == wanted.ids, f"the ids are not those of {what}", got=found.ids, wanted=wanted.ids)
    expect(found.finish == wanted.finish, f"the finish reason is not that of {what}", got=found.finish)
    apart = largest_difference(found.logprobs, wanted.logprobs)
    expect(apart <= session.tolerance, f"the log-probabilities are not those of {what}", max_difference=apart)
    return {"tokens": len(found.ids), "max_difference": apart}


async def _completion(session: Session, prompt: Sequence[int], headers: dict[str, str]) -> Made:
    answer = await session.endpoint.complete(
        prompt, headers=headers, max_tokens=TOKENS, logprobs=True, **GREEDY
    )
    choice = answer.choice
    expect(len(choice.ids) == TOKENS, f"a completion of {TOKENS} tokens has {len(choice.ids)}")
    return Made(choice.ids, choice.logprobs, choice.finish)


@row(
    "ids.vllm",
    "POST /inference/v1/generate gives the greedy ids and log-probabilities of a completion of the same prompt ids",
    VLLM_DOCUMENT,
    ("vllm_generate",),
)
async def vllm(session: Session) -> Evidence:
    prompt, headers = session.prompt(24), {TRAJECTORY_HEADER: session.key()}
    found = _of_vllm([await answered(session, VLLM, _vllm_body(session, prompt), headers)])
    return _same(found, await _completion(session, prompt, headers), session, "a completion")


@row(
    "ids.vllm_stream",
    "A stream of POST /inference/v1/generate joins up to the plain answer",
    VLLM_DOCUMENT,
    ("vllm_generate",),
)
async def vllm_stream(session: Session) -> Evidence:
    prompt, headers = session.prompt(24), {TRAJECTORY_HEADER: session.key()}
    plain = _of_vllm([await answered(session, VLLM, _vllm_body(session, prompt), headers)])
    events = await streamed(session, VLLM, _vllm_body(session, prompt), headers)
    return {**_same(_of_vllm(events), plain, session, "the plain answer"), "events": len(events)}


@row(
    "ids.sglang",
    "POST /generate gives the greedy ids and log-probabilities of a completion of the same prompt ids",
    SGLANG_DOCUMENT,
    ("sglang_generate",),
)
async def sglang(session: Session) -> Evidence:
    prompt, headers = session.prompt(24), {TRAJECTORY_HEADER: session.key()}
    found = _of_sglang(await answered(session, SGLANG, _sglang_body(session, prompt), headers))
    return _same(found, await _completion(session, prompt, headers), session, "a completion")


@row(
    "ids.sglang_stream",
    "Each event of POST /generate has all so far, the last one the whole answer; of midstream each can have only what is new",
    SGLANG_DOCUMENT,
    ("sglang_generate",),
)
async def sglang_stream(session: Session) -> Evidence:
    prompt, headers = session.prompt(24), {TRAJECTORY_HEADER: session.key()}
    answer = await answered(session, SGLANG, _sglang_body(session, prompt), headers)
    plain = _of_sglang(answer)
    events = await streamed(session, SGLANG, _sglang_body(session, prompt), headers)
    before: list[int] = []
    for event in events:
        ids = _of_sglang(event).ids
        expect(ids[: len(before)] == before, "an event lacks ids of the one before", before=before, got=ids)
        before = ids
    evidence = _same(_of_sglang(events[-1]), plain, session, "the plain answer")
    expect(events[-1]["text"] == answer["text"], "the text is not that of the plain answer")
    if session.target.midstream:
        body = {**_sglang_body(session, prompt), "incremental_streaming_output": True}
        new = await streamed(session, SGLANG, body, headers)
        parts = [_of_sglang(event) for event in new]
        ids, logprobs = [i for part in parts for i in part.ids], [x for part in parts for x in part.logprobs]
        _same(
            Made(ids, logprobs, parts[-1].finish),
            plain,
            session,
            "the plain answer, where each event has what is new",
        )
    return {**evidence, "events": len(events)}


@row(
    "ids.render",
    "POST /v1/chat/completions/render gives the ids that a chat uses; generated from, they give the chat's greedy ids",
    NOTHING_DOCUMENT,
    ("render", "vllm_generate"),
)
async def render(session: Session) -> Evidence:
    headers = {TRAJECTORY_HEADER: session.key()}
    fields = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "cache_salt": session.key()}
    asked: Json = {"model": session.endpoint.model, "messages": QUESTION, **fields}
    rendered = await answered(session, "/v1/chat/completions/render", asked)
    chat = await session.endpoint.complete(
        QUESTION, path="/chat/completions", headers=headers, return_token_ids=True, **fields
    )
    expect(rendered["token_ids"] == chat.body["prompt_token_ids"], "the ids are not those of the chat's prompt",
           rendered=rendered["token_ids"], chat=chat.body["prompt_token_ids"])  # fmt: skip
    rendered["cache_salt"] = session.key()
    found = _of_vllm([await answered(session, VLLM, rendered, headers)])
    expect(found.ids == chat.choice.token_ids, "what was rendered generates other ids than the chat",
           got=found.ids, chat=chat.choice.token_ids)  # fmt: skip
    return {"prompt_tokens": len(rendered["token_ids"]), "tokens": len(found.ids)}


@row(
    "ids.tokenize",
    "POST /tokenize gives the ids that a completion or a chat uses; POST /detokenize gives their text back",
    NOTHING_DOCUMENT,
    ("tokenize",),
)
async def tokenize(session: Session) -> Evidence:
    told = await answered(session, "/tokenize", {"prompt": TEXT})
    ids = told["tokens"]
    expect(told["count"] == len(ids), "count is not how many tokens there are", count=told["count"])
    asked: dict[str, Any] = {"max_tokens": 1, "return_token_ids": True}
    completed = (await session.endpoint.complete(TEXT, **asked)).choice.prompt_token_ids
    expect(ids == completed, "a completion of the text has other prompt ids", got=ids, completion=completed)
    back = (await answered(session, "/detokenize", {"tokens": ids}))["prompt"]
    # Where the tokenizer puts a special token before every text.
    first = (await answered(session, "/detokenize", {"tokens": ids[:1]}))["prompt"]
    expect(back in (TEXT, first + TEXT), "detokenize does not give the text back", sent=TEXT, got=back)
    of_chat = (await answered(session, "/tokenize", {"messages": QUESTION}))["tokens"]
    chat = await session.endpoint.complete(QUESTION, path="/chat/completions", **asked)
    expect(of_chat == chat.body["prompt_token_ids"], "a chat has other prompt ids",
           got=of_chat, chat=chat.body["prompt_token_ids"])  # fmt: skip
    return {"tokens": len(ids), "chat_tokens": len(of_chat)}


@row(
    "ids.errors",
    "What cannot be served is a 400 that names the field as its path does",
    f"{DOCUMENT}: introduction",
    ("midstream",),
)
async def errors(session: Session) -> Evidence:
    prompt = [20, 21]
    cases: list[tuple[str, Json, str]] = [
        (VLLM, {"token_ids": prompt, "sampling_params": {"max_tokens": -1}}, "sampling_params.max_tokens"),
        (VLLM, {"token_ids": prompt, "sampling_params": {"no_such": 1}}, "sampling_params.no_such"),
        (VLLM, {"token_ids": [10**9], "sampling_params": {}}, "token_ids"),
        (VLLM, {"token_ids": prompt, "sampling_params": {}, "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        (SGLANG, {"input_ids": prompt, "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        (SGLANG, {"input_ids": [10**9]}, "input_ids"),
        ("/v1/chat/completions/render", {"messages": QUESTION, "temperature": 99}, "temperature"),
        ("/tokenize", {"prompt": "a", "no_such": 1}, "no_such"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ]  # fmt: skip
    for path, body, field in cases:
        refused(await call(session, path, body), f"{path} with a bad {field}", field)
    return {"fields": len(cases)}


@row(
    "ids.labels",
    "weight_version, weight_versions and midstream.snapshot are the snapshot that serves, over all ids, streamed too",
    f"{VLLM_DOCUMENT}; SGLang's POST /generate",
    ("midstream",),
)
async def labels(session: Session) -> Evidence:
    prompt = session.prompt(24)
    vllm_asked, sglang_asked = _vllm_body(session, prompt), _sglang_body(session, prompt)
    plain, events = await answered(session, VLLM, vllm_asked), await streamed(session, VLLM, vllm_asked)
    choices = [choice for event in (plain, *events) for choice in event["choices"]]
    named = {str(choice["midstream"]["snapshot"]) for choice in choices}
    spans = [choice["weight_versions"] for choice in (plain["choices"][0], choices[-1])]
    outputs = [await answered(session, SGLANG, sglang_asked), *await streamed(session, SGLANG, sglang_asked)]
    named |= {str(output["meta_info"]["weight_version"]) for output in outputs}
    named |= {str(output["midstream"]["snapshot"]) for output in outputs}
    spans += [output["meta_info"]["weight_versions"] for output in (outputs[0], outputs[-1])]
    served = await serving(session)
    expect(len(named) == 1 and named <= {*served}, "the labels are not the one snapshot that serves",
           labels=sorted(named), serving=served)  # fmt: skip
    (label,) = named
    wanted = [{"version": label, "start": 0, "end": TOKENS}]
    odd = [found for found in spans if found != wanted]
    expect(not odd, f"weight_versions: {wanted} was expected", got=odd[:1])
    return {"label": label, "answers": len(choices) + len(outputs)}
