"""vLLM's wire, against bytes that a vLLM server sent: no token, number, label or error is lost or made up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.core.types import GenerateRequest, SamplingParams, TopLogprob
from midstream.engine.servers.chunks import alternatives, error_of
from midstream.engine.vllm import protocol
from midstream.engine.vllm.protocol import Chunk, ChunkReader, InvalidAnswer

DATA = Path(__file__).parent / "data"
PROMPT = tuple(range(5, 25))
STREAMS = {
    "plain": 0,
    "cached": 0,
    "top3": 3,
    "several": 2,
    "no_logprobs": 0,
    "grammar": 0,
    "switched": 0,
    "aborted": 0,
}
#: These were recorded without log-probabilities.
UNSCORED = ("no_logprobs", "switched", "aborted")


def recorded(name: str) -> bytes:
    return (DATA / f"stream_{name}.txt").read_bytes()


def stream(name: str) -> bytes:
    """A recorded stream, with log-probabilities where none were recorded."""
    data = recorded(name)
    return b"\n".join(map(_scored, data.split(b"\n"))) if name in UNSCORED else data


def _scored(line: bytes) -> bytes:
    if not line.startswith(b"data: {"):
        return line
    message = json.loads(line[6:])
    for choice in message["choices"]:
        ids = choice["token_ids"]
        choice["logprobs"] = {"content": [{"token_id": i, "logprob": -i / 8} for i in ids]}
    return b"data: " + json.dumps(message, separators=(",", ":")).encode()


def answer(name: str) -> bytes:
    return (DATA / f"{name}.txt").read_bytes()


def request(**given: Any) -> GenerateRequest:
    sampling = SamplingParams(
        **({"max_tokens": 8, "seed": 7, "stop_token_ids": (258,)} | given.pop("sampling", {}))
    )
    return GenerateRequest(**({"request_id": "r", "prompt": PROMPT, "sampling": sampling} | given))


def said(asked: GenerateRequest, choice: int = 0, **options: Any) -> dict[str, Any]:
    more: dict[str, Any] = {"model": "m", "salt": "s", "stream": True} | options
    return json.loads(protocol.body(asked, choice, **more))  # type: ignore[no-any-return]


def plainly(data: bytes) -> list[dict[str, Any]]:
    """The messages of a stream, read in the plainest way."""
    lines = data.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


# Streams


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_says_what_its_json_says(name: str) -> None:
    chunks = ChunkReader(STREAMS[name]).feed(stream(name))
    choices = [choice for message in plainly(stream(name)) for choice in message["choices"]]
    assert [t.token_id for c in chunks for t in c.tokens] == [i for c in choices for i in c["token_ids"]]
    scored = [s for c in choices if c["logprobs"] for s in c["logprobs"]["content"]]
    assert [t.logprob for c in chunks for t in c.tokens] == [s["logprob"] for s in scored]
    finishes = [c.finish for c in chunks if c.finish is not None]
    assert finishes == [choices[-1]["finish_reason"]]
    spans = [tuple(s.values()) for s in choices[-1]["weight_versions"]]
    assert [c.spans for c in chunks if c.spans is not None] == [tuple(spans)]
    assert [c.done for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(c.error is None for c in chunks)


def test_the_end_of_a_stream_says_how_much_was_cached() -> None:
    assert [c.cached for c in ChunkReader().feed(stream("plain")) if c.cached is not None] == [0]
    assert [c.cached for c in ChunkReader().feed(stream("cached")) if c.cached is not None] == [256]


def test_weight_versions_are_spans_of_the_choice_s_tokens() -> None:
    chunks = ChunkReader().feed(stream("switched"))
    (spans,) = [c.spans for c in chunks if c.spans is not None]
    assert [version for version, _, _ in spans] == ["default", "3:step-3"]
    assert spans[0][1] == 0
    assert spans[0][2] == spans[1][1]
    assert spans[1][2] == sum(len(c.tokens) for c in chunks)


def test_an_aborted_choice_says_so() -> None:
    assert [c.finish for c in ChunkReader().feed(stream("aborted")) if c.finish] == ["abort"]


def test_a_chunk_of_several_tokens_keeps_them_all() -> None:
    chunks = ChunkReader(2).feed(stream("several"))
    assert max(len(c.tokens) for c in chunks) == 3
    assert all(len(t.top) == 2 for c in chunks for t in c.tokens)


def test_alternatives_are_the_best_ones_best_first_whatever_was_sampled() -> None:
    """vLLM's list begins with the sampled token; a plain scoring of the same tokens says what the best ones are."""
    tokens = [t for c in ChunkReader(3).feed(stream("top3")) for t in c.tokens]
    prompt = (*PROMPT, *(t.token_id for t in tokens))
    records = protocol.prompt_records(answer("answer_rescored"), prompt, len(tokens), 3, "x")
    assert [[t.token_id for t in token.top] for token in tokens] == [
        [t.token_id for t in record.top_logprobs] for record in records
    ]
    assert [t.logprob for t in tokens] == pytest.approx([r.logprob for r in records], abs=0.1)
    outside = [t for t in tokens if t.token_id not in {best.token_id for best in t.top}]
    assert outside, "the recorded stream should have a sampled token that is not among the best"
    assert protocol.read_answer(answer("answer_top3"), 3).tokens == tuple(tokens)


@pytest.mark.parametrize("name", STREAMS)
def test_older_versions_name_tokens_in_words_and_give_no_ranks(name: str) -> None:
    """vLLM 0.20 to 0.28."""
    data = re.sub(
        rb'"token_id":(\d+),"logprob":', rb'"token":"token_id:\1","bytes":null,"logprob":', stream(name)
    )
    older = re.sub(rb',"rank":\d+', b"", data)
    assert (older == stream(name)) == (b'"logprob":' not in stream(name))
    assert ChunkReader(STREAMS[name]).feed(older) == ChunkReader(STREAMS[name]).feed(stream(name))


@pytest.mark.parametrize("name", STREAMS)
@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 1 << 13), max_size=12), crlf=st.booleans(), comments=st.booleans())
def test_bytes_may_be_cut_anywhere(name: str, cuts: list[int], crlf: bool, comments: bool) -> None:
    data = stream(name)
    whole = ChunkReader(STREAMS[name]).feed(data)
    if comments:
        data = data.replace(b"\n\n", b"\n\n: ping\n\nevent: message\n", 3)
    if crlf:
        data = data.replace(b"\n", b"\r\n")
    places = sorted({min(cut, len(data)) for cut in cuts})
    lines = ChunkReader(STREAMS[name])
    pieces = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
    assert [chunk for piece in pieces for chunk in lines.feed(piece)] == whole


def test_byte_by_byte() -> None:
    lines = ChunkReader(3)
    data = stream("top3")
    found = [chunk for i in range(len(data)) for chunk in lines.feed(data[i : i + 1])]
    assert found == ChunkReader(3).feed(data)


def test_nothing_comes_of_a_line_that_is_not_complete() -> None:
    data = stream("plain")
    lines = ChunkReader()
    assert lines.feed(data[: data.index(b"\n")]) == []
    assert len(lines.feed(b"\n")) == 1


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.engine.servers.chunks.LINE_MAX", 1000)
    lines = ChunkReader()
    for _ in range(10):
        lines.feed(b"x" * 100)
    with pytest.raises(InvalidAnswer, match="a line of more than 1000 bytes"):
        lines.feed(b"x")


@pytest.mark.parametrize(
    "data",
    [
        b"data: {\n",
        b'data: {"choices": 1}\n',
        b"data: null\n",
        b"data: [1]\n",
        b'data: {"choices": [{"token_ids": ["a"]}]}\n',
        b'data: {"choices": [{"token_ids": [1]}, {"token_ids": [2]}]}\n',
        b"data: \xff\xfe\n",
        b"<html>\n",
        b"HTTP/1.1 200 OK\r\n",
    ],
)
def test_a_broken_line_is_an_error_and_no_token(data: bytes) -> None:
    with pytest.raises(InvalidAnswer):
        ChunkReader().feed(data)


def test_log_probabilities_that_were_asked_for_and_do_not_come_are_an_error() -> None:
    with pytest.raises(InvalidAnswer, match="log-probabilities"):
        ChunkReader(0).feed(recorded("no_logprobs"))
    other = stream("plain").replace(b'{"content":[{"token_id":189', b'{"content":[{"token_id":190', 1)
    with pytest.raises(InvalidAnswer, match="190"):
        ChunkReader(0).feed(other)


@pytest.mark.parametrize("top", [0, 3])
def test_a_log_probability_that_is_not_finite_ends_the_choice(top: int) -> None:
    name = "plain" if top == 0 else "top3"
    first = plainly(stream(name))[0]["choices"][0]["logprobs"]["content"][0]
    broken = stream(name).replace(str(first["logprob"]).encode(), b"-9999.0")
    assert broken != stream(name)
    chunk = ChunkReader(top).feed(broken)[0]
    assert chunk.error is not None
    assert "not finite" in chunk.error
    assert chunk.not_finite


# Answers


def test_an_answer_in_one_piece_is_all_of_its_choice() -> None:
    chunk = protocol.read_answer(answer("answer_top3"), 3)
    assert chunk.done
    assert chunk.finish == "length"
    assert chunk.cached == 0
    assert chunk.spans == (("default", 0, 8),)
    assert len(chunk.tokens) == 8


@pytest.mark.parametrize("data", [b"", b"{}", b'{"choices": []}', b"[]", b"<html>"])
def test_an_answer_without_a_choice_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidAnswer):
        protocol.read_answer(data)


@pytest.mark.parametrize(("name", "top"), [("answer_echo", 3), ("answer_echo0", 0), ("answer_echo", 1)])
def test_prompt_records_are_those_of_the_prompt_s_last_tokens(name: str, top: int) -> None:
    raw = json.loads(answer(name))["prompt_logprobs"]
    records = protocol.prompt_records(answer(name), PROMPT, len(PROMPT), top, "step-3")
    assert [r.token_id for r in records] == list(PROMPT)
    assert {r.snapshot for r in records} == {"step-3"}
    assert {r.sampling_logprob for r in records} == {None}
    assert (records[0].logprob, records[0].top_logprobs) == (0.0, ())
    for record, scores in zip(records[1:], raw[1:], strict=True):
        assert record.logprob == scores[str(record.token_id)]["logprob"]
        assert record.rank == scores[str(record.token_id)]["rank"]
        best = sorted((s["rank"], int(i), s["logprob"]) for i, s in scores.items())[:top]
        assert record.top_logprobs == tuple(TopLogprob(i, logprob) for _, i, logprob in best)
        assert len(record.top_logprobs) == top
    for last in (0, 1, 7, 19, 20, 99):
        assert (
            protocol.prompt_records(answer(name), PROMPT, last, top, "step-3")
            == records[20 - min(last, 20) :]
        )


def test_scores_of_another_prompt_are_refused() -> None:
    with pytest.raises(InvalidAnswer, match="position 19"):
        protocol.prompt_records(answer("answer_echo"), (*PROMPT[:-1], 99), 1, 3, "x")
    with pytest.raises(InvalidAnswer, match="of 20 tokens for a prompt of 19"):
        protocol.prompt_records(answer("answer_echo"), PROMPT[:-1], 1, 3, "x")
    with pytest.raises(InvalidAnswer, match="no prompt_logprobs"):
        protocol.prompt_records(answer("answer_top3"), PROMPT, 1, 3, "x")
    lost = answer("answer_echo0").replace(b'"6":{"logprob":-6.9517974853515625', b'"6":{"logprob":-9999.0')
    with pytest.raises(InvalidAnswer, match="not finite"):
        protocol.prompt_records(lost, PROMPT, len(PROMPT), 0, "x")


# Errors


@pytest.mark.parametrize(
    ("name", "words"),
    [("token", "Token id 999"), ("length", "longer than the maximum"), ("grammar", "Grammar error")],
)
def test_an_error_inside_a_stream_is_an_error(name: str, words: str) -> None:
    chunks = ChunkReader().feed(answer(f"error_{name}"))
    assert [c.done for c in chunks] == [False, True]
    assert chunks[0].error is not None
    assert words in chunks[0].error
    assert "\n" not in chunks[0].error


@pytest.mark.parametrize(
    ("status", "data", "words"),
    [
        (404, answer("error_model"), "vLLM answered 404: The model `x` does not exist"),
        (400, answer("error_body"), "JSON decode error"),
        (422, b'{"detail": [{"msg": "Field required"}]}', "Field required"),
        (500, b"Internal Server Error", "vLLM answered 500: Internal Server Error"),
        (502, b"", "without a word"),
        (500, b'{"error": {}}', "without a word"),
        (500, b'{"error": "gone"}', "gone"),
        (500, b"\xff\x00\x1b[31m", "vLLM answered 500"),
    ],
)
def test_an_error_answer_gives_one_line_for_the_user(status: int, data: bytes, words: str) -> None:
    message = error_of("vLLM", status, data)
    assert words in message
    assert message.isprintable()


def test_a_long_error_is_cut() -> None:
    assert len(error_of("vLLM", 500, b"x" * 10_000_000)) < 1100


# Bodies


def test_a_body_says_every_sampling_parameter_itself() -> None:
    sampling = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
        "logit_bias": {65: 3.0},
    }
    body = said(request(sampling=sampling, top_logprobs=3))
    params = body["sampling_params"]
    seed = params.pop("seed")
    assert 0 <= seed < 2**63
    assert params == sampling | {
        "logit_bias": {"65": 3.0},
        "n": 1,
        "max_tokens": 8,
        "min_tokens": 0,
        "stop_token_ids": [258],
        "ignore_eos": True,
        "detokenize": False,
        # One more: see alternatives.
        "logprobs": 4,
    }
    assert body["token_ids"] == list(PROMPT)
    assert (body["model"], body["cache_salt"], body["stream"]) == ("m", "s", True)
    assert body["stream_options"] == {"include_usage": True}


def test_filters_that_are_off_are_said_to_be_off() -> None:
    params = said(request(sampling={"top_p": 1.5, "top_k": -1, "min_p": -1.0, "temperature": 1e-6}))[
        "sampling_params"
    ]
    assert (params["top_p"], params["top_k"], params["min_p"], params["temperature"]) == (1.0, 0, 0.0, 0.0)
    # Greedy.
    assert "seed" not in params


def test_a_log_probability_is_asked_for_always_and_alternatives_when_wanted() -> None:
    assert said(request())["sampling_params"]["logprobs"] == 0
    assert said(request(top_logprobs=3))["sampling_params"]["logprobs"] == 4
    assert said(request(want_logprobs=False, top_logprobs=3))["sampling_params"]["logprobs"] == 0
    assert alternatives(request(top_logprobs=3)) == 3
    assert alternatives(request(top_logprobs=3, want_logprobs=False)) == 0


def test_every_choice_and_every_resumption_draws_its_own_numbers() -> None:
    def seed(choice: int, emitted: int, value: int) -> Any:
        asked = request(n=3, emitted=((1,) * emitted,) * 3, sampling={"seed": value})
        return said(asked, choice)["sampling_params"]["seed"]

    places = [(c, e, v) for c in range(3) for e in range(3) for v in (-1, 0, 7, 2**63 - 1, -(2**63))]
    seeds = [seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= s < 2**63 for s in seeds)
    assert [seed(*place) for place in places] == seeds
    assert "seed" not in said(request(reproducible=False))["sampling_params"]


def test_emitted_tokens_are_part_of_the_prompt_and_of_the_limit() -> None:
    asked = request(n=2, emitted=((1, 2, 3), ()), sampling={"max_tokens": 5})
    bodies = [said(asked, choice) for choice in asked.choices]
    assert [b["token_ids"] for b in bodies] == [[*PROMPT, 1, 2, 3], [*PROMPT]]
    assert [b["sampling_params"]["max_tokens"] for b in bodies] == [2, 5]
    with pytest.raises(ValueError, match="0 tokens are left"):
        said(request(emitted=((1, 2, 3),), sampling={"max_tokens": 3}))


def test_scoring_routes_and_grammars_are_asked_for_as_vllm_wants_them() -> None:
    body = said(request(), stream=False, prompt_logprobs=3, max_tokens=1, routes_start=4, salt="")
    params = body["sampling_params"]
    assert (params["prompt_logprobs"], params["max_tokens"], params["routed_experts_prompt_start"]) == (
        3,
        1,
        4,
    )
    assert not body["stream"]
    assert body.keys().isdisjoint({"stream_options", "cache_salt"})
    body = said(request(grammar='start: "a"', want_logprobs=False))
    assert body["sampling_params"]["structured_outputs"] == {"grammar": 'start: "a"'}
    assert body["reasoning_ended"] is True


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request(emitted=((1,),), sampling={"presence_penalty": 0.5}), "presence_penalty"),
        (request(emitted=((1,),), sampling={"frequency_penalty": 0.5}), "frequency_penalty"),
        (request(emitted=((1,),), grammar='start: "a"', want_logprobs=False), "begin the grammar again"),
        (request(grammar='{"grammars": []}', want_logprobs=False), "Lark"),
        (request(sampling={"temperature": 0.005}), "temperature"),
    ],
)
def test_what_vllm_cannot_do_is_said(asked: GenerateRequest, words: str) -> None:
    problem = protocol.problem(asked)
    assert problem is not None
    assert words in problem


@pytest.mark.parametrize(
    "asked",
    [
        request(),
        request(emitted=((1,),), sampling={"repetition_penalty": 1.5, "logit_bias": {1: 1.0}}),
        request(emitted=((), None), n=2, sampling={"presence_penalty": 0.5}),
        request(grammar='start: "a"', want_logprobs=False),
        request(grammar='start: "a"', top_logprobs=3),
        request(sampling={"temperature": 0.0}),
        request(sampling={"temperature": 0.01}),
    ],
)
def test_what_vllm_can_do_has_no_problem(asked: GenerateRequest) -> None:
    assert protocol.problem(asked) is None


def test_log_probabilities_under_a_grammar_are_not_the_model_s_own() -> None:
    """A forced letter of this stream has log-probability 0 by vLLM's account."""
    tokens = [t for c in ChunkReader().feed(stream("grammar")) for t in c.tokens]
    assert bytes(t.token_id for t in tokens[:6]) == b"hello "
    assert {t.logprob for t in tokens[:6]} == {0.0}


def test_a_chunk_without_anything_says_nothing() -> None:
    assert ChunkReader().feed(b'data: {"choices":[],"usage":null}\n\n') == [Chunk()]


def test_an_answer_that_is_nested_too_deeply_is_refused() -> None:
    deep = b'{"x":' + b"[" * 5000
    with pytest.raises(InvalidAnswer):
        protocol.read_answer(deep)
    with pytest.raises(InvalidAnswer):
        protocol.prompt_records(deep, (1,), 1, 0, "s")
    with pytest.raises(InvalidAnswer):
        ChunkReader().feed(b"data: " + deep + b"\n\n")
    assert error_of("vLLM", 500, deep).startswith("vLLM answered 500: ")
