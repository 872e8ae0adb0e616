"""What the load generator reads out of stored bytes, and what it refuses to count."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from loadgen import Load, percentile, run, token_times

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def framed(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(*logprobs: float, legacy: bool = False) -> bytes:
    listed: dict[str, Any] = (
        {"token_logprobs": list(logprobs)}
        if legacy
        else {"content": [{"logprob": logprob} for logprob in logprobs]}
    )
    return b"data: " + json.dumps({"choices": [{"index": 0, "logprobs": listed}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_a_token_has_the_time_of_the_read_that_completed_its_event_wherever_reads_and_chunks_are_cut() -> (
    None
):
    first, second = event(-1.0), event(-2.0, -3.0)
    # An event over two chunks, two events in one.
    parts = [first[:7], first[7:] + second, DONE, b""]
    raw = HEAD + b"".join(map(framed, parts))
    # Of the payloads, less the CRLF.
    ends = [len(HEAD + b"".join(map(framed, parts[:n]))) - 2 for n in (2, 2, 3)]
    for cut in range(1, len(raw)):
        times, carrying = token_times([1.0, 2.0], [raw[:cut], raw[cut:]])
        early = 1.0 if ends[0] <= cut else 2.0
        assert times == [early] * 3, cut
        assert carrying == 2


def test_tokens_are_counted_in_both_formats_of_logprobs_and_other_events_carry_none() -> None:
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\r\n\r\n'
    parts = [event(-1.0, legacy=True), b": comment\n\n", event(-1.0, -2.0), usage, DONE, b""]
    times, carrying = token_times([0.5], [HEAD + b"".join(map(framed, parts))])
    assert times == [0.5, 0.5, 0.5]
    assert carrying == 2


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (HEAD + framed(event(-1.0)), "was cut"),
        (HEAD + framed(event(-1.0)) + b"5\r\nab", "was cut"),
        (HEAD + framed(event(-1.0)) + framed(b""), r"without \[DONE\]"),
        (HEAD + framed(b'data: {"error": {"message": "no"}}\n\n') + framed(b""), "failed: .*no"),
        (b"HTTP/1.1 400 Bad Request\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "not a stream"),
        (b"", "not a stream"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(raw: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_times([1.0], [raw])


def test_a_percentile_is_the_smallest_value_that_covers_the_share() -> None:
    values = [float(i) for i in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.01) == 7.0


async def against_a_server_with(tokens: int, load: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """(what is measured against a server that answers with so many tokens, bodies it was sent)."""
    bodies = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        count = min(tokens, bodies[-1]["max_tokens"])
        writer.write(HEAD)
        for _ in range(count):
            writer.write(framed(event(-1.0)))
            await writer.drain()
        writer.write(framed(DONE) + framed(b""))
        # Until the client leaves.
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        measured = await run(Load(port=port, model="m", vocabulary=50, seed=1, timeout_s=120, **load))
    return measured, bodies


def test_a_burst_sends_distinct_prompts_of_the_length_asked_for_and_counts_every_token() -> None:
    load = {"streams": 3, "prompt_tokens": 20, "new_tokens": 4, "extra": {"logprobs": 0}}
    measured, bodies = asyncio.run(against_a_server_with(4, load))
    assert measured.tokens == 12
    assert measured.tokens_per_event == 1.0
    prompts = {tuple(body["prompt"]) for body in bodies}
    assert len(prompts) == 3
    assert all(len(prompt) == 20 and min(prompt) >= 0 and max(prompt) < 50 for prompt in prompts)
    assert [(body["logprobs"], body["ignore_eos"], body["stream"]) for body in bodies] == [
        (0, True, True)
    ] * 3


def test_a_burst_with_a_stream_that_is_short_of_tokens_fails() -> None:
    load = {"streams": 2, "prompt_tokens": 5, "new_tokens": 4}
    with pytest.raises(ValueError, match="3 tokens, not 4"):
        asyncio.run(against_a_server_with(3, load))
