"""OpenAI compatibility: what unmodified OpenAI clients take for granted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midstream_conformance.answers import Answer, is_hit
from midstream_conformance.checks.asking import GREEDY, STOP_TRIES, plain_and_streamed, stop_at
from midstream_conformance.endpoint import TRAJECTORY_HEADER, refusal
from midstream_conformance.outcome import Skipped, expect
from midstream_conformance.rows import FIREWORKS, PROTOCOL, Evidence, row
from midstream_conformance.session import Session

SDKS = f"{FIREWORKS}: introduction (compatible with the OpenAI SDKs)"
NAMES = f"{PROTOCOL}: Paths and names"
METRICS = f"{PROTOCOL}: Metrics in responses"
QUESTION = "Say something about the weather."
MODEL_HEADER = "fireworks-model"


@row("openai.models", "GET /models lists the model that is served", SDKS)
async def models(session: Session) -> Evidence:
    endpoint = session.endpoint
    response = await endpoint.request("GET", f"{endpoint.prefix}/models")
    expect(response.status_code == 200, refusal(response))
    listed = [entry["id"] for entry in response.json()["data"]]
    expect(endpoint.model in listed, f"{endpoint.model} is not listed", listed=listed)
    return {"listed": len(listed)}


@row("openai.prefixes", "/v1 and /inference/v1 serve the same", NAMES)
async def prefixes(session: Session) -> Evidence:
    prompt = session.prompt(24)
    body = {"model": session.endpoint.model, "prompt": prompt, "max_tokens": 8, **GREEDY}
    texts = []
    headers = {TRAJECTORY_HEADER: session.key()}
    for prefix in ("/v1", "/inference/v1"):
        response = await session.endpoint.request("POST", f"{prefix}/completions", body, headers)
        expect(response.status_code == 200, f"{prefix}: {refusal(response)}")
        texts.append(response.json()["choices"][0]["text"])
    expect(texts[0] == texts[1], "greedy answers differ", v1=texts[0], inference=texts[1])
    return {"characters": len(texts[0])}


@row("openai.deployment", "model may be the deployment's name, accounts/A/deployments/D", NAMES)
async def deployment(session: Session) -> Evidence:
    name = session.target.deployment
    if name is None:
        raise Skipped("the endpoint does not say what its deployment is called; name it with --deployment")
    answer = await session.endpoint.complete([20, 21], max_tokens=1, model=name)
    return {"asked": name, "answered": answer.model}


@row(
    "openai.model_header",
    "fireworks-model goes before the body's model: one that is not there is a 404",
    NAMES,
)
async def model_header(session: Session) -> Evidence:
    answered = await session.endpoint.complete([20, 21], max_tokens=1)
    full = answered.model.partition("@")[0]
    await session.endpoint.complete([20, 21], headers={MODEL_HEADER: full}, max_tokens=1)
    headers = {MODEL_HEADER: "accounts/nobody/models/none"}
    response = await session.endpoint.post("/completions", {"prompt": [20, 21], "max_tokens": 1}, headers)
    expect(response.status_code == 404, f"an unknown one: 404 was expected, got {refusal(response)}")
    return {"model": full}


@row("openai.stream", "A completion's stream joins up to the plain answer", SDKS)
async def stream(session: Session) -> Evidence:
    return _same(*await plain_and_streamed(session, session.prompt(24), max_tokens=16))


@row("openai.chat_stream", "A chat completion's stream joins up to the plain answer", SDKS)
async def chat_stream(session: Session) -> Evidence:
    messages = [{"role": "user", "content": QUESTION}]
    return _same(*await plain_and_streamed(session, messages, path="/chat/completions", max_tokens=16))


def _same(plain: Answer, streamed: Answer) -> Evidence:
    one, two = plain.choice, streamed.choice
    expect(one.text == two.text, "the texts differ", plain=one.text, streamed=two.text)
    expect(one.finish == two.finish, "the finish reasons differ", plain=one.finish, streamed=two.finish)
    expect(one.text, "the answers are empty")
    return {"characters": len(one.text), "chunks": len(streamed.events) - 1, "finish": one.finish}


@row(
    "openai.done",
    "A stream ends with its finish reason and then [DONE]; choices is a list in every chunk",
    SDKS,
)
async def done(session: Session) -> Evidence:
    answer = await session.endpoint.complete(session.prompt(24), max_tokens=12, ignore_eos=True, stream=True)
    expect(answer.done, "the last event is not [DONE]", last=str(answer.events[-1])[:80])
    expect(answer.events.count("[DONE]") == 1, "[DONE] comes more than once")
    reasons = [
        choice.get("finish_reason")
        for event in answer.events
        if isinstance(event, dict)
        for choice in event["choices"]
    ]
    given = [reason for reason in reasons if reason is not None]
    expect(given == ["length"], "one finish_reason, length, was expected", finish_reasons=given)
    expect(reasons[-1] == "length", "tokens follow the finish reason")
    return {"events": len(answer.events)}


@row("openai.n", "n gives so many choices, plain and streamed, sampled each for itself", SDKS)
async def several(session: Session) -> Evidence:
    distinct = []
    for streamed in (False, True):
        answer = await session.endpoint.complete(
            session.prompt(24),
            n=4,
            max_tokens=16,
            ignore_eos=True,
            temperature=1,
            logprobs=True,
            stream=streamed,
        )
        expect(
            sorted(answer.choices) == [0, 1, 2, 3], "choices 0 to 3 were expected", got=sorted(answer.choices)
        )
        lengths = [len(choice.tokens) for choice in answer.choices.values()]
        expect(lengths == [16] * 4, "16 tokens were expected of each choice", lengths=lengths)
        distinct.append(len({tuple(choice.ids) for choice in answer.choices.values()}))
    expect(min(distinct) > 1, "all choices are the same tokens")
    return {"distinct": distinct}


@row(
    "openai.stop", "A stop string ends the text before it, with finish_reason stop, plain and streamed", SDKS
)
async def stop(session: Session) -> Evidence:
    for _ in range(STOP_TRIES):
        prompt, headers = session.prompt(24), {TRAJECTORY_HEADER: session.key()}
        fields = {"max_tokens": 48, **GREEDY}
        text = (await session.endpoint.complete(prompt, headers=headers, **fields)).choice.text
        at = stop_at(text)
        if at is not None:
            break
    else:
        raise Skipped(f"{STOP_TRIES} answers of this model had no printable character to stop at")
    for streamed in (False, True):
        answer = await session.endpoint.complete(
            prompt, headers=headers, stop=[text[at]], stream=streamed, **fields
        )
        expect(answer.choice.text == text[:at], "the text is not what comes before the stop string",
               expected=text[:at], got=answer.choice.text)  # fmt: skip
        expect(answer.choice.finish == "stop", f"finish_reason is {answer.choice.finish}, not stop")
    return {"stopped_after_characters": at, "of": len(text)}


@row(
    "openai.usage",
    "usage counts prompt and completion tokens, and in a stream's last chunk says the same",
    SDKS,
)
async def usage(session: Session) -> Evidence:
    prompt = session.prompt(37)
    fields: dict[str, Any] = {"max_tokens": 7, "ignore_eos": True}
    plain = await session.endpoint.complete(prompt, **fields)
    streamed = await session.endpoint.complete(
        prompt, stream=True, stream_options={"include_usage": True}, **fields
    )
    wanted = {"prompt_tokens": 37, "completion_tokens": 7, "total_tokens": 44}
    for answer in (plain, streamed):
        found = {name: (answer.usage or {}).get(name) for name in wanted}
        expect(found == wanted, f"{wanted} was expected", got=found)
        expect(answer.choice.finish == "length", f"finish_reason is {answer.choice.finish}, not length")
    return wanted


@row(
    "openai.prompts",
    "A list of prompts, as token ids, is answered in their order",
    f"{PROTOCOL}: Inference request fields",
)
async def prompts(session: Session) -> Evidence:
    asked = [session.prompt(20), session.prompt(30)]
    answer = await session.endpoint.complete(asked, max_tokens=4, ignore_eos=True, return_token_ids=True)
    expect(sorted(answer.choices) == [0, 1], "two choices were expected", got=sorted(answer.choices))
    got = [answer.choices[i].prompt_token_ids for i in range(2)]
    expect(got == asked, "the choices are not those of the prompts in their order")
    return {"prompt_tokens": (answer.usage or {}).get("prompt_tokens")}


@row(
    "openai.token_ids",
    "return_token_ids gives the ids of prompt and answer: completions, chat, streams of both",
    f"{PROTOCOL}: Token ids",
)
async def token_ids(session: Session) -> Evidence:
    prompt = session.prompt(24)
    fields: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True, "logprobs": True}
    for streamed in (False, True):
        answer = await session.endpoint.complete(prompt, stream=streamed, **fields)
        where = "stream" if streamed else "plain"
        expect(answer.choice.prompt_token_ids == prompt, f"{where}: prompt_token_ids is not the prompt")
        _has_ids(answer, where)
    chat = await session.endpoint.chat(QUESTION, **fields)
    ids = chat.body.get("prompt_token_ids")
    expect(isinstance(ids, list) and ids, "chat: there is no prompt_token_ids at the top level")
    _has_ids(chat, "chat")
    chunks = await session.endpoint.chat(QUESTION, stream=True, **fields)
    events = [event for event in chunks.events if isinstance(event, dict)]
    above = next((event["prompt_token_ids"] for event in events if event.get("prompt_token_ids")), None)
    given = chunks.choice.prompt_token_ids or above
    expect(given == ids, "chat, stream: no chunk has the plain answer's prompt_token_ids", got=given)
    _has_ids(chunks, "chat, stream")
    return {"chat_prompt_tokens": len(ids or ())}


def _has_ids(answer: Answer, where: str) -> None:
    choice = answer.choice
    expect(len(choice.ids) == 8, f"{where}: 8 tokens were expected, got {len(choice.ids)}")
    expect(choice.token_ids == choice.ids, f"{where}: token_ids are not those of logprobs",
           token_ids=choice.token_ids, logprobs=choice.ids)  # fmt: skip


@row(
    "openai.raw_output",
    "raw_output has the ids of prompt and answer, echoed ones included; a stream's last chunk too",
    f"{PROTOCOL}: Token ids",
)
async def raw_output(session: Session) -> Evidence:
    prompt = session.prompt(24)
    fields: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "raw_output": True, "logprobs": True}
    ways: list[dict[str, Any]] = [{}, {"stream": True}, {"echo": True}]
    for more in ways:
        if more.get("echo") and session.target.missing("prompt_logprobs"):
            continue
        choice = (await session.endpoint.complete(prompt, **fields, **more)).choice
        count = 8 + len(prompt) * bool(more.get("echo"))
        expect(len(choice.ids) == count, f"{more}: {count} tokens were expected, got {len(choice.ids)}")
        raw = choice.extra.get("raw_output") or {}
        expect(raw, f"{more}: the choice has no raw_output")
        expect(raw["prompt_token_ids"] == prompt, f"{more}: prompt_token_ids is not the prompt")
        expect(raw["completion_token_ids"] == choice.ids, f"{more}: completion_token_ids are not those of logprobs",
               got=raw["completion_token_ids"], logprobs=choice.ids)  # fmt: skip
    return {"tokens": 8}


@row(
    "openai.request_id",
    "x-request-id is echoed, and unknown headers are tolerated",
    f"{PROTOCOL}: Session headers",
)
async def request_id(session: Session) -> Evidence:
    asked = session.key()
    answer = await session.endpoint.complete(
        session.prompt(8), headers={"x-request-id": asked, "x-nobody-knows": "1"}, max_tokens=1
    )
    got = answer.headers.get("x-request-id")
    expect(got == asked, "x-request-id is not what was sent", sent=asked, got=got)
    return {"x-request-id": got}


@row(
    "openai.metrics",
    "Headers count prompt and cached tokens as usage does; perf_metrics_in_response gives them in the body",
    METRICS,
)
async def metrics(session: Session) -> Evidence:
    prompt, key = session.prompt(), session.key()
    await session.turn(prompt, key)
    answer = await session.turn(prompt, key, perf_metrics_in_response=True)
    said = [answer.headers.get(f"fireworks-{name}") for name in ("prompt-tokens", "cached-prompt-tokens")]
    expect(said == [str(len(prompt)), str(answer.cached)], "the headers are not what usage says",
           headers=said, usage=[len(prompt), answer.cached])  # fmt: skip
    inside = answer.body.get("perf_metrics") or {}
    found = _numbers(inside, ("prompt-tokens", "cached-prompt-tokens"))
    expect(found == [len(prompt), answer.cached], "perf_metrics is not what usage says", perf_metrics=inside)
    return {"prompt_tokens": len(prompt), "cached_tokens": answer.cached}


@row(
    "openai.stream_metrics", "perf_metrics_in_response gives the counts in a stream's last chunk too", METRICS
)
async def stream_metrics(session: Session) -> Evidence:
    prompt, key = session.prompt(), session.key()
    await session.turn(prompt, key)
    answer = await session.turn(prompt, key, stream=True, perf_metrics_in_response=True)
    inside = answer.body.get("perf_metrics") or {}
    found = _numbers(inside, ("prompt-tokens", "cached-prompt-tokens"))
    sound = found[0] == len(prompt) and is_hit(found[1] or 0, len(prompt))
    expect(sound, "perf_metrics of the last chunk does not count the prompt and what was cached of it",
           perf_metrics=inside, prompt=len(prompt))  # fmt: skip
    return {"prompt_tokens": found[0], "cached_tokens": found[1]}


def _numbers(metrics: dict[str, Any], names: Sequence[str]) -> list[int | None]:
    found = [metrics.get(name) for name in names]
    return [None if value is None else int(value) for value in found]


@row("openai.seed", "Equal seeds give equal tokens, other seeds others", SDKS, ("reproducible_sampling",))
async def seed(session: Session) -> Evidence:
    prompt, headers = session.prompt(24), {TRAJECTORY_HEADER: session.key()}
    said = []
    for number in (1, 1, 2):
        answer = await session.endpoint.complete(
            prompt, headers=headers, seed=number, temperature=1, max_tokens=24, ignore_eos=True, logprobs=True
        )
        said.append(answer.choice.ids)
    expect(said[0] == said[1], "the same seed gave other tokens", first=said[0], second=said[1])
    expect(said[0] != said[2], "another seed gave the same 24 tokens")
    return {"tokens": len(said[0])}
