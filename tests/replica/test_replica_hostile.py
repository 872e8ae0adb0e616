"""Bodies and messages that are no JSON, or nest too deeply: refused, never an error of the server's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from replica_fakes import FakeEngine, running

from midstream.core.decoding import message_of
from midstream.core.errors import InvalidRequest
from midstream.core.resumption import ResumeLogReader, read_resume
from midstream.core.sessions import SessionsAsked
from midstream.core.transfer import TransferOrder
from midstream.core.types import Desired, Hint
from midstream.core.versions import Admitted, from_header
from midstream.proxy.resume import reason_of

DEEP = b'{"x":' + b"[" * 5000
NO_TEXT = b'{"snapshot":"\xff","path":"\xff","tenant":"\xff"}'


@pytest.mark.parametrize("body", [DEEP, NO_TEXT])
@pytest.mark.parametrize("kind", [Desired, SessionsAsked, Hint, TransferOrder])
def test_a_message_to_a_replica_is_refused(kind: Any, body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a message"):
        message_of(body, msgspec.json.Decoder(kind), "a message")


@pytest.mark.parametrize("body", [DEEP, NO_TEXT])
def test_a_stream_to_resume_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a stream to resume"):
        read_resume(body)


def test_a_resume_log_that_nests_too_deeply_is_refused() -> None:
    opening = '{"id":"i","created":1,"seed":2,"prompts":"d"}'
    for state in (DEEP.decode(), f"{opening}\n{DEEP.decode()}"):
        with pytest.raises(InvalidRequest, match="no lines of a resume log"):
            ResumeLogReader(state)


def test_headers_and_answers_that_cannot_be_read_say_nothing() -> None:
    assert from_header(DEEP, Admitted) is None
    assert reason_of(DEEP) == "its answer is no stream"


HI = [{"role": "user", "content": "a"}]
HOLE = "nested"
USED = {"type": "tool_use", "id": "c", "name": "f", "input": HOLE}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "a"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": HOLE, "content": "a"}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": HOLE}]}]}),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [USED]},
                    {"role": "user", "content": [RESULT]},
                ],
            },
        ),
        ("/v1/messages/count_tokens", {"messages": HI, "tools": [{"type": HOLE, "name": "f"}]}),
        ("/v1/responses", {"input": [{"type": HOLE}]}),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {}, "midstream": {"snapshot": HOLE}},
        ),
        ("/generate", {"input_ids": [[1], [2]], "sampling_params": [{"stop": HOLE}, {"stop": HOLE}]}),
        ("/tokenize", {"messages": [{"role": HOLE, "content": "a"}]}),
    ],
)
async def test_no_depth_of_a_body_is_an_error_of_the_server(tmp_path: Path, path: str, body: Any) -> None:
    """One that is just within what the decoder takes was beyond what its message takes."""

    async with running(tmp_path, FakeEngine()) as here:
        given = json.dumps({"model": "tiny"} | body)
        for begin, end in (("[", "]"), ('{"a":', "}")):
            for depth in range(850, 1001):
                nested = given.replace(f'"{HOLE}"', f"{begin * depth}0{end * depth}")
                answer = await here.http.post(path, content=nested.encode())
                assert answer.status_code == 400, (depth, answer.text)
