"""Details of the wire format that clients of OpenAI's and Fireworks' servers rely on."""

import json
from collections.abc import AsyncIterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from replica_fakes import DEPLOYMENT, MODEL, FakeEngine, Running, record, running, sse

from midstream.core.errors import InvalidRequest
from midstream.core.resumption import HEADER_RESUMABLE
from midstream.core.session_keys import SESSION_BODY_FIELDS
from midstream.core.types import GenerateRequest, GenerationEvent, ModelInfo
from midstream.replica.request.checked import check
from midstream.replica.request.schema import parse_completion
from midstream.replica.sessions import session_of


async def ask(here: Running, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    return await here.http.post(path, json={"model": MODEL, **fields}, headers=headers)


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["message"], error["param"]


async def test_every_answer_names_the_replica_and_the_deployment(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        for more in ({}, {"stream": True}, {"n": 0}):
            fields: dict[str, Any] = {"max_tokens": 1, **more}
            answer = await ask(here, prompt="a", **fields)
            names = [answer.headers["fireworks-backend-host"], answer.headers["fireworks-deployment"]]
            assert names == ["replica-0", DEPLOYMENT]


async def test_the_usage_chunk_carries_the_metrics_too(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        fields: dict[str, Any] = {"stream_options": {"include_usage": True}, "perf_metrics_in_response": True}
        *_, last, usage, done = sse((await ask(here, prompt="a", max_tokens=1, stream=True, **fields)).text)
        assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 1, "[DONE]")
        assert usage["perf_metrics"] == last["perf_metrics"]
        assert usage["perf_metrics"]["prompt-tokens"] == 1
        assert "usage" not in last


@pytest.mark.parametrize("logprobs", [0, 1, 5])
async def test_chat_takes_logprobs_only_as_a_boolean(tmp_path: Path, logprobs: int) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        chat: Any = [{"role": "user", "content": "a"}]
        answer = await ask(here, "/v1/chat/completions", messages=chat, logprobs=logprobs)
        assert refusal(answer) == (
            400,
            "logprobs: must be true or false on chat completions; alternatives are asked for by top_logprobs",
            "logprobs",
        )


async def test_an_explicit_echo_false_wins_over_echo_last(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        for echo, text in ((False, "he"), (True, "Bhe"), (None, "Bhe")):
            whole = (await ask(here, prompt=[65, 66], max_tokens=1, echo_last=1, echo=echo)).json()
            assert whole["choices"][0]["text"] == text


async def test_a_snapshot_is_named_in_the_body_or_else_in_the_header(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:

        async def named(body: str, header: str) -> tuple[int, str]:
            headers = {"fireworks-model": header}
            answer = await ask(here, prompt="a", max_tokens=1, model=body, headers=headers)
            return answer.status_code, answer.json().get("error", {}).get("message", "")

        await here.swapped("v1")
        assert await named(MODEL, f"{MODEL}@v1") == (200, "")
        assert await named(MODEL, MODEL) == (200, "")
        assert await named(f"{MODEL}@v1", f"{MODEL}@v2") == (200, "")
        assert await named(MODEL, f"{MODEL}@v2") == (409, f"snapshot 'v2' is not serving; {MODEL}@v1 is")
        assert await named("tiny@", MODEL) == (400, "model: the snapshot named after @ must not be empty")
        assert await named("tiny", "tiny@") == (
            400,
            "fireworks-model: the snapshot named after @ must not be empty",
        )


@pytest.mark.parametrize("name", ["f`o", "`", "a` - at `$.model", "a\nb", "é"])
async def test_an_unknown_field_is_named_exactly(tmp_path: Path, name: str) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        unknown: dict[str, Any] = {name: 1}
        answer = await ask(here, prompt="a", **unknown)
        assert refusal(answer) == (400, f"Extra inputs are not permitted, field: '{name}'", name)


@pytest.mark.parametrize(
    "name", ["x-multi-turn-session-id", "x-session-affinity", "x-session-id", "x-smg-routing-key"]
)
def test_an_empty_session_header_names_none_and_alone_it_is_refused_by_name(name: str) -> None:
    unnamed, named = (
        attrgetter(*SESSION_BODY_FIELDS)(
            check(parse_completion(body), ModelInfo(max_model_len=10, vocab_size=10))
        )
        for body in (b'{"model":"m","prompt":"a"}', b'{"model":"m","prompt":"a","user":"u"}')
    )
    with pytest.raises(InvalidRequest) as raised:
        session_of(unnamed, {name: ""})
    assert raised.value.param == name
    assert session_of(named, {name: ""}) == ("", "u")
    assert session_of(unnamed, {name: ""} | {"x-session-id": "c"}) == ("", "c")
    assert session_of(named, {"x-midstream-session": ""}) == ("", "u"), "the gateway sends none"


async def test_a_method_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        for path in ("/v1/completions", "/inference/v1/chat/completions", "/replica/desired"):
            answer = await here.http.get(path)
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_the_first_echoed_token_shares_the_label_of_the_second(tmp_path: Path) -> None:
    class Cached(FakeEngine):
        """The prompt was scored under an older snapshot; only its first token, which nothing scores, has the new label."""

        async def _events(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
            async for event in super()._events(request):
                if event.prompt is None:
                    yield event
                    continue
                older = [msgspec.structs.replace(r, snapshot="older") for r in event.prompt[1:]]
                yield msgspec.structs.replace(event, prompt=(event.prompt[0], *older))

    async with running(tmp_path, Cached()) as here:

        async def labels(prompt: list[int]) -> list[tuple[str, int]]:
            text = (await ask(here, prompt=prompt, max_tokens=1, echo=True, logprobs=True, stream=True)).text
            return [
                (event["model"].rpartition("@")[2], len(event["choices"][0]["logprobs"]["content"]))
                for event in sse(text)[:-1]
                if event["choices"][0]["logprobs"]
            ]

        assert await labels([65, 66, 67]) == [("older", 3), ("base", 1)]
        assert await labels([65]) == [("base", 1), ("base", 1)]


async def test_legacy_logprobs_keep_tokens_of_different_bytes_apart(tmp_path: Path) -> None:
    class Halves(FakeEngine):
        async def _events(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
            async for event in super()._events(request):
                alternatives = [
                    msgspec.structs.replace(top, token_id=0xC2 + i)
                    for r in event.tokens
                    for i, top in enumerate(r.top_logprobs)
                ]
                tokens = [msgspec.structs.replace(r, top_logprobs=tuple(alternatives)) for r in event.tokens]
                yield msgspec.structs.replace(event, tokens=tuple(tokens))

    async with running(tmp_path, Halves()) as here:
        here.engine.reply = (0xE2,)
        choice = (await ask(here, prompt=[65], max_tokens=1, logprobs=2)).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == ["bytes:\\xe2"]
        assert choice["logprobs"]["top_logprobs"] == [
            {"bytes:\\xc2": -0.5, "bytes:\\xc3": -1.5, "bytes:\\xe2": -1.0}
        ]


@pytest.mark.parametrize("labels", [("base", "v1"), ("v1", "base")])
async def test_the_model_of_an_answer_is_the_newest_snapshot_although_an_older_token_came_last(
    tmp_path: Path, labels: tuple[str, str]
) -> None:
    class Overtaking(FakeEngine):
        """The first prompt's choice crosses a swap; the second one's only token, made before it, is delivered last."""

        async def _events(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
            first = request.prompt == (65,)
            await self.until(lambda: first or self.overtaken)
            for position, label in enumerate(labels if first else labels[:1]):
                made = record(97, 1 + position, request, label, prompt=False)
                finish: Any = "length" if not first or position else None
                yield GenerationEvent(tokens=(made,), finish=finish, cached_tokens=0)
            self.overtaken = True
            self._announce()

        overtaken = False

    async with running(tmp_path, Overtaking()) as here:
        whole = (await ask(here, prompt=[[65], [66]], max_tokens=2)).json()
        assert [[s["snapshot"] for s in c["snapshots"]] for c in whole["choices"]] == [
            list(labels),
            [labels[0]],
        ]
        assert whole["model"] == f"{MODEL}@{labels[1]}"


@pytest.mark.parametrize("chat", [True, False])
async def test_nothing_stands_between_the_finish_reason_and_the_usage(tmp_path: Path, chat: bool) -> None:
    """LiteLLM's hosted_vllm takes a comment there for the end of the stream. It then counts the usage itself, wrongly."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    body |= {"model": MODEL, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    async with running(tmp_path, FakeEngine()) as here:
        text = (await here.http.post(path, json=body, headers={HEADER_RESUMABLE: "1"})).text
    _, found, rest = text.rpartition('"finish_reason":"length"')
    _, usage, *others = rest.split("\n\n")
    assert found
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 3
    assert others == [": m end", "data: [DONE]", ""]
