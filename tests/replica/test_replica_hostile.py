"""Messages between gateways and replicas that are no JSON, or nest too deeply: refused, never an error of the server's own."""

from __future__ import annotations

import pytest

from midstream.core.errors import InvalidRequest
from midstream.core.resumption import ResumeLogReader, read_resume
from midstream.core.versions import Admitted, from_header
from midstream.http.reader import Request
from midstream.proxy.resume import reason_of
from midstream.replica import app

DEEP = b'{"x":' + b"[" * 5000
NO_TEXT = b'{"snapshot":"\xff","path":"\xff","tenant":"\xff"}'


@pytest.mark.parametrize("body", [DEEP, NO_TEXT])
@pytest.mark.parametrize("decoder", [app._desired, app._asked, app._hinted])
def test_a_message_to_a_replica_is_refused(decoder: object, body: bytes) -> None:
    request = Request(b"POST", b"/", [], {}, body, False, True)
    with pytest.raises(InvalidRequest, match="not a message"):
        app._decoded(request, decoder, "a message")  # type: ignore[arg-type]


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
