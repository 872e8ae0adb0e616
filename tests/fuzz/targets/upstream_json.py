"""What a vLLM server and this server's own public port answer, and frames of child processes: read by engines and the front.

Checked: an answer is read or refused by the documented error. A stream gives the same chunks however it is cut. Routes that
are read are those that numpy reads.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from midstream.engine.embedded.protocol import reply_decoder
from midstream.engine.servers.chunks import EventReader, InvalidAnswer, error_of
from midstream.engine.servers.model import Shape
from midstream.engine.servers.routes import InvalidRoutes
from midstream.engine.sglang import protocol as sglang
from midstream.engine.vllm.protocol import ChunkReader, prompt_records, read_answer
from midstream.engine.vllm.routes import decode_routes, passes_of, routes_with
from midstream.http.ipc import Frames, frame
from midstream_tinker.samples import CheckedSample, sampled
from midstream_tinker.trainer.protocol import reply_decoder as trainer_decoder
from midstream_tinker.trainer.types import WorkFailed
from midstream_tinker.types import TinkerSamplingParams
from targets.target import Target, check, controlled, outcome, pieces

RECORDED = Path(__file__).parents[2] / "engine_vllm" / "data"
SHAPE = Shape(
    vocab_size=64,
    hidden_layers=3,
    moe_layers=(1, 2),
    top_k=2,
    num_experts=8,
    eos_token_ids=(),
)
PROMPT = (5, 6, 7)


def chunks(parts: Iterable[bytes], reader: EventReader) -> list[Any]:
    return [chunk for part in parts for chunk in reader.feed(part)]


def run_stream(data: bytes) -> None:
    control, stream = controlled(data)
    top = (None, 0, 3)[control % 3]
    for reader in (lambda: ChunkReader(top or 0, kv=True), lambda: sglang.SglangReader(top or 0)):
        whole, refused = outcome(InvalidAnswer, lambda make=reader: chunks([stream], make()))
        cut, cut_refused = outcome(InvalidAnswer, lambda make=reader: chunks(pieces(stream, control), make()))
        # Equal values of NaN differ.
        check(repr(whole) == repr(cut), "other chunks when the stream is cut", whole, cut)
        check((refused is None) == (cut_refused is None), "a stream is refused only in one piece", refused)


def run_answer(data: bytes) -> None:
    control, body = controlled(data)
    top = (None, 0, 3)[control % 3]
    answer, _ = outcome(InvalidAnswer, lambda: read_answer(body, top, kv=control % 2 == 0))
    if answer is not None:
        asked = {"first": 2, "count": 1, "weights": bool(control & 4)}
        outcome(InvalidRoutes, lambda: routes_with(passes_of(answer), SHAPE, **asked))
    records, _ = outcome(InvalidAnswer, lambda: prompt_records(body, PROMPT, 2, 2, "s"))
    check(records is None or [r.token_id for r in records] == [6, 7], "records of another prompt", records)
    outcome(InvalidAnswer, lambda: sglang.read_answer(body, top or 0))
    records, _ = outcome(InvalidAnswer, lambda: sglang.prompt_records(body, PROMPT, 2, 2, "s", 300))
    check(records is None or [r.token_id for r in records] == [6, 7], "records of another prompt", records)
    said = error_of("vLLM", 400, body)
    check(said.isprintable() and len(said) < 1100, "an error that is no line", said)


def run_routes(data: bytes) -> None:
    control, array = controlled(data)
    text = array.decode("latin-1") if control & 1 else base64.b64encode(array).decode()
    count = 1 + control // 2 % 4
    routes, _ = outcome(InvalidRoutes, lambda: decode_routes(text, SHAPE, first=0, count=count))
    if routes is None:
        return
    expected = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    if expected.shape[1] == SHAPE.hidden_layers:
        expected = expected[:, list(SHAPE.moe_layers)]
    check(b"".join(routes) == expected.astype(np.uint8).tobytes(), "other routes than numpy reads", routes)


def run_frames(data: bytes) -> None:
    control, stream = controlled(data)
    decoder: msgspec.msgpack.Decoder[Any] = trainer_decoder if control & 128 else reply_decoder

    def messages(parts: Iterable[bytes]) -> list[Any]:
        frames = Frames(decoder)
        return [message for part in parts for message in frames.feed(part)]

    whole, _ = outcome(msgspec.DecodeError, lambda: messages([stream]))
    cut, _ = outcome(msgspec.DecodeError, lambda: messages(pieces(stream, control)))
    check(repr(whole) == repr(cut), "other messages when the stream is cut", whole, cut)
    for message in whole or ():
        again = messages([frame(message)])
        check(repr(again) == repr([message]), "another message when it is sent again", message, again)


def run_completion(data: bytes) -> None:
    control, body = controlled(data)
    echoed = control % 4
    sample = CheckedSample(
        prompt=PROMPT,
        n=1 + control // 4 % 2,
        params=TinkerSamplingParams(),
        prompt_logprobs=bool(echoed),
        topk=control // 8 % 3 if echoed else 0,
        echoed=echoed,
    )
    result, _ = outcome(WorkFailed, lambda: sampled(sample, body, {}, None))
    if result is not None:
        check(len(result.result.sequences) == sample.n, "another number of sequences", result)
        scored = result.result.prompt_logprobs
        check(scored is None or len(scored) == len(PROMPT), "another number of prompt tokens", scored)


def recorded(pattern: str) -> Iterator[bytes]:
    for file in sorted(RECORDED.glob(pattern)):
        yield file.read_bytes()[:4000]


def stream_seeds() -> Iterator[bytes]:
    for control, stream in zip((0, 1, 2, 33, 52, 255, 4, 8, 70), recorded("stream_*.txt"), strict=False):
        yield bytes([control]) + stream
    yield b"\x01" + b': ping\n\ndata: {"error":"no"}\n\ndata: [DONE]\n\n'


def answer_seeds() -> Iterator[bytes]:
    for body in (*recorded("answer_*.txt"), *recorded("error_*.txt")):
        yield b"\x02" + body
    token = {"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]}}
    for control, weights in ((0, []), (4, [0x3F000000] * 12)):
        rows = [-3, 2, 1, 0x01000100, 0x00000302, *weights]
        routed = token | {"finish_reason": "length", "sampling_mask": [rows]}
        yield bytes([control]) + msgspec.json.encode({"choices": [routed]})
    scores = [None, {"6": {"logprob": -1.0, "rank": 1}}, {"7": {"logprob": -2.0, "rank": 2}}]
    yield b"\x00" + msgspec.json.encode({"prompt_logprobs": scores})


def routes_seeds() -> Iterator[bytes]:
    for dtype in ("u1", "<i4", "<u2"):
        for layers in (2, 3):
            file = io.BytesIO()
            np.save(file, np.arange(2 * layers * 2).reshape(2, layers, 2).astype(dtype) % 8)
            yield b"\x02" + file.getvalue()
            yield b"\x03" + base64.b64encode(file.getvalue())


def frames_seeds() -> Iterator[bytes]:
    for control, message in (
        (0, {"type": "Ready"}),
        (1, [1, 2]),
        (128, {"type": "Ready", "names": []}),
        (255, {}),
    ):
        yield bytes([control]) + frame(message) + frame(message)


def completion_seeds() -> Iterator[bytes]:
    entries = [
        {
            "token_id": t,
            "logprob": -1.0,
            "sampling_logprob": -1.0,
            "top_logprobs": [{"token_id": t, "logprob": -1.0}],
        }
        for t in (*PROMPT, 9)
    ]
    span = [{"snapshot": "s", "start": 0, "end": 1}]
    choice = {"index": 0, "finish_reason": "stop", "logprobs": {"content": entries}, "snapshots": span}
    yield b"\x03" + msgspec.json.encode({"choices": [choice | {"prompt_snapshots": span}]})
    yield b"\x0b" + msgspec.json.encode(
        {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}}
    )
    short = choice | {"logprobs": {"content": entries[3:]}}
    yield b"\x00" + msgspec.json.encode({"choices": [short]})
    yield b"\x04" + msgspec.json.encode({"choices": [short, short | {"index": 1}]})


JSON_WORDS = (
    b'{"',
    b'":',
    b"null",
    b"true",
    b"[[[[[[[[",
    b"1e999",
    b"-1",
    b'"\\ud800"',
    b"18446744073709551616",
    b"\xff",
)
EVENT_WORDS = (
    b"data: ",
    b"data: [DONE]\n\n",
    b"event: ",
    b"\r\n",
    b'{"choices":[',
    b'"token_ids":[',
    b'"error":',
    *JSON_WORDS,
)
STREAM = Target(run_stream, stream_seeds, EVENT_WORDS)
ANSWER = Target(run_answer, answer_seeds, EVENT_WORDS)
ROUTES = Target(
    run_routes,
    routes_seeds,
    (b"\x93NUMPY\x01\x00", b"'descr': '<i4'", b"'shape': (2, 2, 2), ", b"True"),
    1024,
)
FRAMES = Target(
    run_frames, frames_seeds, (b"\xa4type", b"\x00\x00\x00", b"\xdd\xff\xff\xff\xff", b"\x91" * 64), 1024
)
COMPLETION = Target(run_completion, completion_seeds, JSON_WORDS)
