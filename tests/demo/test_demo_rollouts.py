"""Reading streams: every token with its own records, and nothing short or shifted gets through."""

import base64

import numpy as np
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from midstream.demo.rollouts import BadStream, StreamReader

pytestmark = pytest.mark.fast

PROMPT = [10, 11, 12]


def route(token: int) -> str:
    return base64.b64encode(bytes([token % 8, (token + 1) % 8, 3, 4])).decode()


def entry(token: int, generated: bool = True, first: bool = False) -> dict:
    made = {
        "token": "x", "bytes": [token], "logprob": -token / 10, "token_id": token, "text_offset": 0, "top_logprobs": [],
        "sampling_logprob": -token / 20 if generated else None,
    }  # fmt: skip
    return made if first else made | {"routing_matrix": route(token)}


def chunk(kind: str, snapshot: str, entries: list[dict], token_ids: list[int], **choice):
    usage = choice.pop("usage", None)
    own = {
        "index": 0,
        "logprobs": {"content": entries},
        "token_ids": token_ids,
        "finish_reason": None,
        **choice,
    }
    own |= {"delta": {"content": ""}} if kind == "chat" else {"text": ""}
    whole = {
        "id": "r",
        "created": 0,
        "model": f"accounts/a/models/m@{snapshot}",
        "choices": [own],
        "usage": usage,
    }
    model = ChatCompletionChunk if kind == "chat" else Completion
    return model.construct(object="chunk", **whole)


def stream(kind: str, *, finish="length", completion_tokens=3, drop=None):
    """A prompt of 3, then tokens 20, 21 | swap | 22."""
    echo = [entry(t, generated=False, first=i == 0) for i, t in enumerate(PROMPT)]
    usage = {
        "prompt_tokens": 3, "completion_tokens": completion_tokens, "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    chunks = [
        chunk(kind, "base", echo, [], prompt_token_ids=PROMPT),
        chunk(kind, "base", [entry(20), entry(21)], [20, 21]),
        chunk(kind, "step-1", [entry(22)], [22], finish_reason=finish, usage=usage),
    ]
    return [c for i, c in enumerate(chunks) if i != drop]


def read(chunks, replica="replica-1"):
    reader = StreamReader(top_k=2)
    for c in chunks:
        reader.read(c)
    return reader.turn(replica, lambda tokens: tokens[0] / 100)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_across_a_swap_keeps_each_token_with_its_own_records(kind):
    turn = read(stream(kind))
    assert turn.prompt == (10, 11, 12)
    assert turn.tokens == (20, 21, 22)
    assert turn.logprobs == (-2.0, -2.1, -2.2)
    assert turn.sampling_logprobs == (-1.0, -1.05, -1.1)
    assert turn.snapshots == ("base", "base", "step-1")
    assert turn.crossed_swap
    assert turn.cached_tokens == 2
    assert turn.replica == "replica-1"
    assert turn.reward == 0.2
    expected = [[[t % 8, (t + 1) % 8], [3, 4]] for t in (20, 21, 22)]
    assert turn.routes.tolist() == expected
    assert turn.prompt_routes.tolist() == [[[t % 8, (t + 1) % 8], [3, 4]] for t in (11, 12)]
    assert turn.input_routes.shape == (5, 2, 2)
    assert turn.input_routes.dtype == np.int64


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (stream("chat", finish=None), "without a finish reason"),
        (stream("chat", drop=2), "without a finish reason"),
        (stream("chat", drop=1), "usage counts 3 tokens, 1 came"),
        (stream("chat", drop=0), "lacks usage, prompt token ids"),
        (stream("chat", completion_tokens=4), "usage counts 4 tokens, 3 came"),
        (stream("chat", finish="abort"), "'abort'"),
    ],
)
def test_a_stream_that_is_short_or_disagrees_with_itself_is_refused(chunks, message):
    with pytest.raises(BadStream, match=message):
        read(chunks)


def test_a_response_that_names_no_replica_is_refused():
    with pytest.raises(BadStream, match="replica header"):
        read(stream("chat"), replica=None)


def test_a_token_without_its_route_is_refused():
    bare = {k: v for k, v in entry(20).items() if k != "routing_matrix"}
    chunks = stream("completion")
    chunks[1] = chunk("completion", "base", [bare, entry(21)], [20, 21])
    with pytest.raises(ValueError, match="no routing matrix"):
        read(chunks)


def test_ids_and_logprobs_that_name_different_tokens_are_refused():
    with pytest.raises(BadStream, match="different tokens"):
        read([chunk("chat", "base", [entry(20)], [21])])
