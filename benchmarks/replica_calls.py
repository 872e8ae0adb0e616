"""How many Python functions a replica's process calls for one token of a stream with log-probabilities.

    python benchmarks/replica_calls.py [--functions] [--cpu]

The number is the same on every machine. A replica runs here without sockets: its engine and its clients are transports that
this module plays. Each read has the same bytes. One stream gets a token in each read. Of 16 streams, one message of the
embedded engine has a token of each; of vLLM, each read of a stream has four chunks. Prints JSON. --functions: also how often
each of midstream's functions was called per token. --cpu: also the time of the process per token, in microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import uvloop
from calls import Calls
from hardware import provenance
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from midstream.core.config import EngineSettings
from midstream.core.headers import HEADER_BOOT
from midstream.core.resumption import HEADER_RESUMABLE
from midstream.core.served_names import ServedNames
from midstream.core.server_settings import VllmSettings
from midstream.core.types import EngineStats, GenerationEvent, ModelInfo, TokenRecord
from midstream.engine.embedded import engine as embedded
from midstream.engine.embedded import protocol
from midstream.engine.kv_copies import KvForm
from midstream.engine.servers import engine as served
from midstream.engine.servers.model import Shape
from midstream.engine.vllm import engine as vllm
from midstream.http.call import ResponseStream
from midstream.http.http1 import ClientConnection
from midstream.http.ipc import HEADER, frame
from midstream.models.tiny_moe import CHAT_TEMPLATE
from midstream.replica.app import ReplicaApp
from midstream.replica.gate import Door
from midstream.replica.replica import Replica
from midstream.replica.server import LIMITS
from midstream.replica.swap.source import SnapshotSource
from midstream.replica.text.chat import TextModel
from midstream.replica.text.vocabulary import BYTE_ALPHABET

NAMES = ServedNames("accounts/local/models/tiny", "accounts/local/deployments/default")
INFO = ModelInfo(max_model_len=2**20, vocab_size=300, eos_token_ids=(257,))
KV = KvForm(kind="", block_tokens=16, block_bytes=16)
#: Rounds of reads before those that count: each token of TEXT has come twice then, and is known.
WARM = 80
COUNTED = 32
#: With --cpu. The fastest of the repetitions counts.
TIMED, REPEATED = 400, 5
#: Of the event loop after a read: all that it brings about is done then.
TURNS = 4
#: Chunks of one stream in a read, where there are 16 streams.
CHUNKS = 4
TEXT = b"A prime number is greater than one. "
_commands = msgspec.msgpack.Decoder(protocol.Command)


class Transport:
    """One end of a connection whose other end this module plays."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """The other end does not read."""

    close = abort


def write_model(directory: Path) -> Path:
    """A tokenizer with one token for each byte, and a chat template."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(BYTE_ALPHABET), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


class EmbeddedPlayed(embedded.EmbeddedEngine):
    """The embedded engine without its process. `play` is a step of it: a token for each request."""

    def __init__(self, directory: Path, chunks: int) -> None:
        super().__init__(directory, EngineSettings())
        self._transport = Transport()
        self._step = 0

    async def start(self) -> ModelInfo:
        self._link = link = embedded._EngineLink(self._dispatch)
        link.connection_made(cast(asyncio.Transport, self._transport))
        link.data_received(bytes(frame(protocol.Ready(INFO, KV))))
        return INFO

    async def close(self) -> None:
        """There is no process."""

    def reads(self) -> list[Callable[[], None]]:
        assert self._link is not None
        events, self._step = [], self._step + 1
        for data in self._transport.written:
            command = _commands.decode(data[HEADER.size :])
            if isinstance(command, protocol.Generate):
                token = TEXT[self._step % len(TEXT)]
                record = TokenRecord(token, -1.25 - self._step / 512, -0.75 - self._step / 512, "base")
                more = {"cached_tokens": 0, "queued_s": 0.0} if self._step == 1 else {}
                event = GenerationEvent(tokens=(record,), **more)
                events.append((command.request.request_id, event))
        message = bytes(frame(protocol.Events(events, EngineStats(running=len(events), steps=self._step))))
        return [partial(self._link.data_received, message)]


class VllmPlayed(vllm.VllmEngine):
    """VllmEngine without a server. chunks: of each read."""

    def __init__(self, directory: Path, chunks: int) -> None:
        super().__init__(directory, VllmSettings(), directory, url="http://127.0.0.1:1")
        self._chunks = chunks
        self._step = 0
        self._responses: list[ResponseStream] = []
        served.open_stream = self._open  # type: ignore[assignment]

    async def start(self) -> ModelInfo:
        self._shape = Shape(INFO.vocab_size, 2, (), 0, 0, INFO.eos_token_ids)
        self._server.max_model_len = INFO.max_model_len
        self._proving.started()
        self._boot.begin()
        return INFO

    async def close(self) -> None:
        """There is no server."""

    async def _open(self, url: str, method: str, path: str, body: bytes, on_body: Any, *_: Any) -> Any:
        response = ResponseStream(b"", on_body)
        response.connection_made(cast(asyncio.Transport, Transport()))
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        response.data_received(head)
        self._responses.append(response)
        return response

    def reads(self) -> list[Callable[[], None]]:
        data = b""
        for _ in range(self._chunks):
            self._step += 1
            event = b"data: " + msgspec.json.encode(self._message()) + b"\n\n"
            data += b"%x\r\n%b\r\n" % (len(event), event)
        return [partial(response.data_received, data) for response in self._responses]

    def _message(self) -> dict[str, Any]:
        """As vLLM 0.32 sends it (tests/engine_vllm/data/stream_plain.txt)."""
        token, logprob = TEXT[self._step % len(TEXT)], -1.25 - self._step / 512
        scored = {"token_id": token, "logprob": logprob, "rank": 1}
        choice = {
            "index": 0,
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": [token],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
            "logprobs": {"content": [{**scored, "top_logprobs": [scored]}]},
        }
        return {"request_id": "generate-8f1", "usage": None, "output_mode": "tokens", "choices": [choice]}


async def ask(app: ReplicaApp, replica: Replica, fields: dict[str, Any]) -> Transport:
    """A gateway's request: a stream of one choice."""
    transport = Transport()
    client = ClientConnection(app, LIMITS, asyncio.get_running_loop())
    client.connection_made(cast(asyncio.Transport, transport))
    body = json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Name a prime number."}],
            "max_tokens": 500_000,
            "stream": True,
            "logprobs": True,
            **fields,
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{HEADER_RESUMABLE}: 1\r\n"
        f"{HEADER_BOOT}: {replica.boot}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    client.data_received((head + body).encode())
    for _ in range(20):
        await asyncio.sleep(0)
    return transport


async def count(
    make: type[EmbeddedPlayed | VllmPlayed], streams: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Of a replica of its own."""
    chunks = CHUNKS if streams > 1 and make is VllmPlayed else 1
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory))
        engine = make(model, chunks)
        replica = Replica(
            name="replica-0",
            engine=engine,
            text=TextModel.load(model),
            source=cast(SnapshotSource, SimpleNamespace(prefetch=None, chains=None)),
            names=NAMES,
            base_directory=model,
        )
        own = replica.own
        own.start(await engine.start())
        replica.ready = True
        own.gate.set(Door.OPEN)
        app = ReplicaApp(replica)
        clients = [await ask(app, replica, {"seed": number}) for number in range(streams)]

        await play(engine, WARM)
        calls, tokens = Calls(), streams * chunks
        await play(engine, COUNTED, calls)
        found = calls.result(COUNTED * tokens, functions=options.functions)
        if options.cpu:
            rounds = [await play(engine, TIMED) for _ in range(REPEATED)]
            found["cpu us"] = round(min(rounds) / TIMED / tokens * 1e6, 2)
        written = b"".join(clients[-1].written)
        assert written.count(b'"logprob":') >= (WARM + COUNTED) * chunks, written[:2000]
        await replica.close()
    return found


async def play(engine: EmbeddedPlayed | VllmPlayed, rounds: int, calls: Calls | None = None) -> float:
    """Seconds of the process that the rounds took. The reads are made before."""
    made = [engine.reads() for _ in range(rounds)]
    if calls is not None:
        calls.counting = True
        sys.setprofile(calls.note)
    begun_s = time.process_time()
    for reads in made:
        for read in reads:
            read()
        for _ in range(TURNS):
            await asyncio.sleep(0)
    took_s = time.process_time() - begun_s
    sys.setprofile(None)
    return took_s


CASES: dict[str, tuple[type[EmbeddedPlayed | VllmPlayed], int]] = {
    "embedded, 1 stream": (EmbeddedPlayed, 1),
    "embedded, 16 streams": (EmbeddedPlayed, 16),
    "vllm, 1 stream": (VllmPlayed, 1),
    "vllm, 16 streams": (VllmPlayed, 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", action="store_true", help="also each function of midstream")
    parser.add_argument("--cpu", action="store_true", help="also the process's time")
    options = parser.parse_args()
    found = {}
    for name, (make, streams) in CASES.items():
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found[name] = runner.run(count(make, streams, options))
    print(json.dumps({**provenance(chunks=CHUNKS), "per token": found}, indent=1))


if __name__ == "__main__":
    main()
