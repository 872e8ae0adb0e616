"""The largest bodies of each kind against a real server: which of them holds up an event loop, and for how long.

`python tests/soak/bodies.py [KIND ...]` starts a server with one replica and the Tinker front, sends each body, and prints what
each process's event loop stood still for meanwhile. It ends with exit code 1 where a step took longer than STALL_S.
"""

from __future__ import annotations

import soakpath  # noqa: F401

# isort: split
import http.client
import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import serving

from midstream.core.pulse import STALL_S
from midstream_tinker import codec, messages
from midstream_tinker import serving as tinker_limits

MB = 2**20
#: gateway.max_body_bytes, less what is around the part that is large.
LARGE = 64 * MB - 4096
#: A replica tells what it measured once a second.
TOLD_S = 2.5
#: Of training requests whose model can be read: refused ones take their turn, too.
SEQ_IDS = itertools.count(1)
_STALL = re.compile(
    r'^midstream_event_loop_stall_seconds_(sum|count)\{process="([^"]+)"\} (\S+)$', re.MULTILINE
)


class Sent(NamedTuple):
    method: str
    path: str
    body: bytes = b""
    kind: str = "application/json"


def filled(before: str, unit: bytes, after: str, size: int = LARGE) -> bytes:
    """JSON of about `size` bytes: `unit`, again and again, between `before` and `after`."""
    body = before.encode() + unit * (size // len(unit))
    return body.rstrip(b",") + after.encode()


def chat(content: bytes) -> bytes:
    return b'{"model":"tiny-moe","max_tokens":1,"messages":[' + content + b"]}"


def inference() -> dict[str, Callable[[], Sent]]:
    """What a replica reads."""
    post, text = "POST", '{"model":"tiny-moe","max_tokens":1,"prompt":'
    message = b'{"role":"user","content":"x"},'
    return {
        "prompt of one text": lambda: Sent(post, "/v1/completions", filled(text + '"', b"word ", '"}')),
        "prompt of ids": lambda: Sent(post, "/v1/completions", filled(text + "[", b"11,", "]}")),
        "prompt of floats": lambda: Sent(post, "/v1/completions", filled(text + "[", b"1.5,", "]}")),
        "prompt of texts": lambda: Sent(post, "/v1/completions", filled(text + "[", b'"",', "]}")),
        "prompt of lists": lambda: Sent(post, "/v1/completions", filled(text + "[", b"[],", "]}")),
        "unknown field": lambda: Sent(post, "/v1/completions", filled(text + '"x","u":[', b"1.5,", "]}")),
        "logit_bias": lambda: Sent(
            post,
            "/v1/completions",
            (text + '"x","logit_bias":{' + ",".join(f'"{n}":1' for n in range(3_000_000)) + "}}").encode(),
        ),
        "many stops": lambda: Sent(post, "/v1/completions", filled(text + '"x","stop":[', b'"a",', "]}")),
        "one large message": lambda: Sent(
            post,
            "/v1/chat/completions",
            chat(b'{"role":"user","content":"' + b"word " * (LARGE // 5) + b'"}'),
        ),
        "many messages": lambda: Sent(
            post, "/v1/chat/completions", chat((message * (LARGE // len(message))).rstrip(b","))
        ),
        "a few thousand messages": lambda: Sent(
            post, "/v1/chat/completions", chat((message * 4000).rstrip(b","))
        ),
        "many content parts": lambda: Sent(
            post,
            "/v1/chat/completions",
            chat(filled('{"role":"user","content":[', b'{"type":"text","text":"x"},', "]}")),
        ),
        "large tools": lambda: Sent(
            post,
            "/v1/chat/completions",
            filled(
                '{"model":"tiny-moe","messages":[{"role":"user","content":"x"}],"tools":[',
                b'{"type":"function","function":{"name":"f","parameters":{"type":"object"}}},',
                "]}",
            ),
        ),
        "large schema": lambda: Sent(
            post,
            "/v1/chat/completions",
            (
                '{"model":"tiny-moe","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema",'
                '"json_schema":{"name":"s","schema":{"type":"object","properties":{'
                + ",".join(f'"p{n}":{{"type":"string"}}' for n in range(500_000))
                + "}}}}}"
            ).encode(),
        ),
        "messages": lambda: Sent(
            post,
            "/v1/messages",
            filled(
                '{"model":"tiny-moe","max_tokens":1,"messages":[', b'{"role":"user","content":"x"},', "]}"
            ),
        ),
        "responses": lambda: Sent(
            post,
            "/v1/responses",
            filled('{"model":"tiny-moe","input":[', b'{"role":"user","content":"x"},', "]}"),
        ),
        "generate": lambda: Sent(post, "/generate", filled('{"input_ids":[', b"11,", "]}")),
        "tokenize": lambda: Sent(post, "/tokenize", filled('{"model":"tiny-moe","prompt":"', b"word ", '"}')),
        "tokenize 1 MB": lambda: Sent(
            post, "/tokenize", filled('{"model":"tiny-moe","prompt":"', b"word ", '"}', MB)
        ),
        "detokenize": lambda: Sent(
            post, "/detokenize", filled('{"model":"tiny-moe","tokens":[', b"11,", "]}")
        ),
        "detokenize 1 MB": lambda: Sent(
            post, "/detokenize", filled('{"model":"tiny-moe","tokens":[', b"11,", "]}", MB)
        ),
        "not JSON": lambda: Sent(post, "/v1/chat/completions", b"[" * LARGE),
    }


def control() -> dict[str, Callable[[], Sent]]:
    """What the control app reads and tells."""
    hot_load, small = "/hot_load/v1/models/hot_load", MB - 4096
    made = "/v1/accounts/local/deployments"
    return {
        "hot load, numbers": lambda: Sent("POST", hot_load, filled('{"identity":[', b"1.5,", "]}", small)),
        "hot load, fields": lambda: Sent(
            "POST", hot_load, ("{" + ",".join(f'"{n:x}":1' for n in range(90_000)) + "}").encode()
        ),
        "hot load, deep": lambda: Sent("POST", hot_load, b"[" * small),
        "deployment": lambda: Sent("POST", made, filled('{"displayName":"', b"word ", '"}', small)),
        "openapi": lambda: Sent("GET", "/openapi.json"),
        "metrics": lambda: Sent("GET", "/metrics"),
        "dashboard": lambda: Sent("GET", "/dashboard"),
        "deployments": lambda: Sent("GET", made),
    }


def protobuf(kind: str, model_id: str) -> bytes:
    message = messages.ForwardBackwardRequest(
        model_id=model_id, seq_id=next(SEQ_IDS), loss_fn="cross_entropy"
    )
    if kind == "large tensors":
        for _ in range(30):
            _datum(message, 16, MB // 4)
    if kind == "one datum":
        _datum(message, 16, 15 * MB // 2)
    if kind == "one prompt":
        _datum(message, 15 * MB // 2, 4)
    if kind == "a prompt of two million tokens":
        _datum(message, 2 * MB, 4)
    if kind == "sparse":
        datum = _datum(message, 16, 4)
        tensor = datum.loss_fn_inputs["sparse"]
        tensor.dtype, tensor.shape[:] = codec.FLOAT32, [1000, 16_000]
        tensor.sparse_csr.crow_indices = bytes(8 * 1001)
    if kind == "a batch":
        for _ in range(1024):
            _datum(message, 400, 400)
    return bytes(message.SerializeToString())


def _datum(message: object, tokens: int, items: int) -> object:
    datum = message.data.add()  # type: ignore[attr-defined]
    datum.model_input.add().encoded_text.tokens = bytes(4 * tokens)
    weights = datum.loss_fn_inputs["weights"]
    weights.dtype, weights.dense = codec.FLOAT32, bytes(4 * items)
    return datum


def tinker(model_id: str) -> dict[str, Callable[[], Sent]]:
    """What the Tinker front reads."""
    path, proto = "/api/v1/forward_backward", "application/x-protobuf"
    empty = b"\x0a" + bytes([len(model_id)]) + model_id.encode()
    data = messages.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number
    tag = bytes([data << 3 | 2])
    sample = '{"base_model":"tiny-moe","sampling_params":{"max_tokens":1},"num_samples":1,"prompt":{"chunks":[{"tokens":['
    json_size, sample_size = tinker_limits.MAX_JSON_LOSS_BYTES - 4096, tinker_limits.MAX_SAMPLE_BYTES - 4096
    loss = (
        f'{{"model_id":"{model_id}","seq_id":%d,'
        '"forward_backward_input":{"loss_fn":"cross_entropy","data":[{"model_input":'
        '{"chunks":[{"type":"encoded_text","tokens":[1]}]},"loss_fn_inputs":{"w":{"dtype":"float32","data":['
    )
    return {
        "a million empty parts": lambda: Sent("POST", path, empty + (tag + b"\x00") * 1_000_000, proto),
        "empty parts": lambda: Sent("POST", path, empty + (tag + b"\x00") * (32 * MB - 64), proto),
        "parts of one datum": lambda: Sent(
            "POST", path, empty + tag + b"\x80\x80\x80\x0f" + b"\x0a\x00" * (15 * MB), proto
        ),
        **{
            kind: lambda kind=kind: Sent("POST", path, protobuf(kind, model_id), proto)  # type: ignore[misc]
            for kind in (
                "a prompt of two million tokens",
                "a batch",
                "large tensors",
                "one datum",
                "one prompt",
                "sparse",
            )
        },
        "losses in JSON": lambda: Sent(
            "POST", path, filled(loss % next(SEQ_IDS), b"1.5,", "]}}}]}}", json_size)
        ),
        "losses in JSON, ids": lambda: Sent(
            "POST",
            path,
            filled((loss % next(SEQ_IDS)).replace("float32", "int64"), b"11,", "]}}}]}}", json_size),
        ),
        "a sample": lambda: Sent("POST", "/api/v1/asample", filled(sample, b"11,", "]}]}}", sample_size)),
        "a sample of 250,000 tokens": lambda: Sent(
            "POST", "/api/v1/asample", filled(sample, b"11,", "]}]}}", 750_000)
        ),
        "a sample of floats": lambda: Sent(
            "POST", "/api/v1/asample", filled(sample, b"1.5,", "]}]}}", sample_size)
        ),
        "a sample of texts": lambda: Sent(
            "POST", "/api/v1/asample", filled(sample, b'"",', "]}]}}", sample_size)
        ),
        "notes": lambda: Sent(
            "POST",
            "/api/v1/create_session",
            filled('{"user_metadata":{"a":[', b"1.5,", "]}}", MB - 4096),
        ),
    }


def kinds(model_id: str) -> dict[str, Callable[[], Sent]]:
    return {
        f"{part}: {kind}": make
        for part, of in (("replica", inference()), ("control", control()), ("tinker", tinker(model_id)))
        for kind, make in of.items()
    }


class Probe:
    """One server, asked over one connection for each request."""

    def __init__(self, server: serving.Server) -> None:
        self._host = urlsplit(server.url).netloc

    def ask(self, sent: Sent) -> tuple[int, bytes]:
        """Status 0: the connection was closed."""
        connection = http.client.HTTPConnection(self._host, timeout=120)
        try:
            connection.request(sent.method, sent.path, sent.body, {"content-type": sent.kind})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()

    def stalls(self) -> dict[tuple[str, str], float]:
        """By process and what is told: the sum in seconds, the count."""
        text = self.ask(Sent("GET", "/metrics"))[1].decode()
        return {(process, what): float(value) for what, process, value in _STALL.findall(text)}

    def measured(self, sent: Sent) -> tuple[int, bytes, dict[str, tuple[float, int]]]:
        """The answer's status and body; by process its stalls, in seconds and how many."""
        before = self.stalls()
        status, answer = self.ask(sent)
        time.sleep(TOLD_S)
        after = self.stalls()
        found = {}
        for process in sorted({process for process, _ in after}):
            seconds, count = (
                after[process, what] - before.get((process, what), 0.0) for what in ("sum", "count")
            )
            if count > 0:
                found[process] = (seconds, int(count))
        return status, answer, found

    def model(self) -> str:
        """The id of a Tinker model that is in the trainer."""
        api = "/api/v1"

        def post(path: str, **body: object) -> dict[str, str]:
            answer: dict[str, str] = json.loads(
                self.ask(Sent("POST", f"{api}/{path}", json.dumps(body).encode()))[1]
            )
            return answer

        session = post("create_session")["session_id"]
        made = post(
            "create_model", session_id=session, model_seq_id=0, base_model="tiny-moe", lora_config={"rank": 4}
        )
        while True:
            told = post("retrieve_future", request_id=made["request_id"])
            if "queue_state" not in told:
                return told["model_id"]


def rows(probe: Probe, chosen: list[str]) -> Iterator[tuple[str, bool]]:
    # The first request to each process is not what is measured.
    probe.ask(Sent("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 1}).encode()))
    for kind, make in kinds(probe.model()).items():
        if chosen and not any(one in kind for one in chosen):
            continue
        sent = make()
        begun = time.monotonic()
        status, answer, found = probe.measured(sent)
        took_s = time.monotonic() - begun - TOLD_S
        stalls = ", ".join(
            f"{process} {seconds:.3f} s in {count}" for process, (seconds, count) in found.items()
        )
        said = "" if status == 200 else answer[:90].decode(errors="replace").replace("\n", " ")
        yield (
            f"{kind:36} {len(sent.body) / MB:7.2f} MB  {status:3}  {took_s:6.2f} s  {stalls or '-':50} {said}",
            bool(found),
        )


def main() -> int:
    bad = 0
    with tempfile.TemporaryDirectory(prefix="bodies-") as place:
        config = Path(place) / "config.toml"
        config.write_text('[tinker]\nbase_model_clients = "serving"\n')
        with serving.serve(Path(place) / "state", "--replicas", "1", "--config", str(config)) as server:
            probe = Probe(server)
            for row, stalled in rows(probe, sys.argv[1:]):
                print(row, flush=True)
                bad += stalled
    print(f"{bad} kinds of bodies held up an event loop for more than {1000 * STALL_S:.0f} ms")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
