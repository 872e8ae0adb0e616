"""A server that speaks SGLang's HTTP API, as far as SglangEngine uses it, made from the requests and answers of SGLang 0.5.23.

It computes: the KV of a position is a hash of the weights, the token and the KV before, and logits are numbers drawn from the
last one. So weights, tokens and cached KV all show in a log-probability, and `logprobs_of` says what it must be. The weights
are the bytes of a directory's .safetensors files. The cache finds the longest prefix computed under the same extra_key.

Always holds: nothing is computed while it is paused. Unknown fields of a request are ignored, as SGLang ignores them.
A test plants faults by the attributes of FakeSglang.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from listening import stop_listening

VOCAB, CONTEXT, EOS = 96, 512, 2
#: What SGLang calls the most tokens of a prompt, and refuses.
PROMPT_MAX = CONTEXT - 6
INFO: dict[str, Any] = {
    "version": "0.5.23",
    "max_req_input_len": PROMPT_MAX,
    "max_total_num_tokens": 8192,
    "page_size": 1,
    "device": "cpu",
    "dtype": "float32",
    "quantization": None,
    "tp_size": 1,
    "ep_size": 1,
    "skip_tokenizer_init": True,
    "disable_overlap_schedule": True,
    "incremental_streaming_output": True,
    "tokenizer_worker_num": 1,
    "dp_size": 1,
    "pp_size": 1,
    "speculative_algorithm": None,
    "enable_hierarchical_cache": False,
    "disaggregation_mode": "null",
    "allow_auto_truncate": False,
    "stream_interval": 1,
    "enable_watermark": False,
    "preferred_sampling_params": None,
    "disable_radix_cache": False,
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "enable_return_routed_experts": False,
}
#: Of a model with experts (write_model): which of its layers have them, how many, and how many a token takes.
LAYERS, SPARSE, EXPERTS, TAKEN = 3, (1, 2), 12, 2


async def until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {condition}"
        await asyncio.sleep(0.002)


def weights_of(directory: Path) -> bytes:
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.digest()


def write_model(directory: Path, weights: str = "base", *, experts: bool = False) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "eos_token_id": EOS,
    }
    if experts:
        config |= {"model_type": "qwen3_moe", "num_hidden_layers": LAYERS, "num_experts": EXPERTS}
        config |= {"num_experts_per_tok": TAKEN, "mlp_only_layers": [0], "decoder_sparse_step": 1}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_text(weights)
    return directory


def next_kv(weights: bytes, token: int, before: bytes) -> bytes:
    return hashlib.blake2b(weights + token.to_bytes(4, "little") + before, digest_size=16).digest()


def logits_of(kv: bytes, vocab: int) -> np.ndarray:
    return np.random.default_rng(int.from_bytes(kv, "little")).normal(size=vocab) * 2


def experts_of(kv: bytes) -> np.ndarray:
    """[layers, experts] of the pass that made it; zeros where a layer has none."""
    chosen = np.zeros((LAYERS, TAKEN), dtype=np.int32)
    drawn = np.random.default_rng(int.from_bytes(kv, "little") + 1)
    for layer in SPARSE:
        chosen[layer] = drawn.permutation(EXPERTS)[:TAKEN]
    return chosen


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(logits - np.log(np.exp(logits).sum()))


def logprobs_of(prompt: Sequence[int], made: Sequence[tuple[int, bytes]], vocab: int = VOCAB) -> list[float]:
    """Of tokens, each with the weights that sampled it, if the KV of each was computed by what sampled the next one."""
    kv, ahead, found = b"", list(prompt), []
    for token, weights in made:
        for each in ahead:
            kv = next_kv(weights, each, kv)
        found.append(float(log_softmax(logits_of(kv, vocab))[token]))
        ahead = [token]
    return found


def allowed_by(grammar: str, made: Sequence[int]) -> list[int]:
    """Of a grammar of token ids in a row, each one or several, as midstream proves grammars with. Behind it comes the end."""
    places = [
        [int(i) for i in re.findall(r"\d+", place)] for place in re.findall(r"\([^)]*\)|<[^>]*>", grammar)
    ]
    return places[len(made)] if len(made) < len(places) else [EOS] if EOS not in made else [*range(VOCAB)]


class FakeSglang:
    def __init__(self, model: Path) -> None:
        self.info = dict(INFO)
        self.vocab = int(json.loads((model / "config.json").read_text())["vocab_size"])
        self.weights = weights_of(model)
        self.version = "default"
        self.url = ""
        self.calls: list[tuple[str, Any]] = []
        self.cache: list[tuple[str, tuple[int, ...], list[bytes]]] = []
        #: By name: what each request has been given so far. One that has ended is not there.
        self.running: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        #: A stream stands still when it has so many tokens, until `go` is set. None: none does.
        self.hold_at: int | None = None
        self.go = asyncio.Event()
        #: Faults.
        self.deaf_to_key = self.keeps_over_flush = self.mislabels = self.silent_of_version = False
        self.tempered = self.shuffles = self.spoils_loads = self.not_finite = False
        self.drops_token: int | None = None
        #: As without midstream's plug-in: numbers of what bias, penalties and grammar leave, and no grammars.
        self.shapes_numbers = self.refuses_grammars = False
        self.ignores_bias = self.counts_nothing = self.counts_prompts = self.forgets_grammars = False
        self.shifts_routes = self.loses_cached_routes = self.blanks_routes = self.sends_no_routes = False
        self.refuses_loads = 0
        #: An answered request counts as running for a moment, as in SGLang.
        self.answers_early = True
        self.paths = dict.fromkeys(ROUTES)
        self._computing = asyncio.Event()
        self._computing.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def paused(self) -> bool:
        return not self._computing.is_set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._server is not None
        stop_listening(self._server)
        for task in tuple(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            line, *fields = head.decode("latin-1").split("\r\n")
            sizes = [f.split(":")[1] for f in fields if f.lower().startswith("content-length:")]
            body = await reader.readexactly(int(sizes[0]) if sizes else 0)
            path, _, query = line.split()[1].partition("?")
            given = json.loads(body) if body else query or None
            self.calls.append((path, given))
            if path == "/generate":
                await self._generate(given, writer)
            else:
                status, answer = (
                    ROUTES[path](self, given) if path in ROUTES else (404, {"detail": "Not Found"})
                )
                await self._answer(writer, status, answer)

    async def _answer(self, writer: asyncio.StreamWriter, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()

    # What its control endpoints do.

    def openapi(self, given: Any) -> tuple[int, Any]:
        return 200, {"paths": {path: {} for path in [*self.paths, "/generate"]}}

    def server_info(self, given: Any) -> tuple[int, Any]:
        return 200, self.info

    def model_info(self, given: Any) -> tuple[int, Any]:
        return 200, {"weight_version": self.version, "is_generation": True}

    def health(self, given: Any) -> tuple[int, Any]:
        # It would compute a token.
        return 503 if self.paused else 200, {}

    def pause(self, given: Any) -> tuple[int, Any]:
        assert given == {"mode": "in_place"}, given
        self._computing.clear()
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def resume(self, given: Any) -> tuple[int, Any]:
        self._computing.set()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def load(self, given: Any) -> tuple[int, Any]:
        directory = Path(given["model_path"])
        if self.refuses_loads > 0 or not list(directory.glob("*.safetensors")):
            self.refuses_loads -= 1
            return 400, {"success": False, "message": "Failed to update weights", "num_paused_requests": 0}
        if given.get("flush_cache", True):
            if self.running:
                return 400, {
                    "success": False,
                    "message": "the cache was not flushed",
                    "num_paused_requests": 0,
                }
            self.cache.clear()
        self.weights = weights_of(directory)
        if self.spoils_loads:
            self.weights = hashlib.sha256(self.weights + len(self.calls).to_bytes(4)).digest()
        return 200, {"success": True, "message": "Succeeded", "num_paused_requests": 0}

    def set_version(self, given: Any) -> tuple[int, Any]:
        assert given["abort_all_requests"] is False, "the default aborts every request"
        if not self.silent_of_version:
            self.version = given["new_version"]
        return 200, {"success": True, "new_version": given["new_version"]}

    def flush(self, given: Any) -> tuple[int, Any]:
        # With a time limit it waits until a request that was answered is gone.
        if self.running or (self.answers_early and not str(given).startswith("timeout=")):
            return 400, {"message": "Flush cache failed"}
        if not self.keeps_over_flush:
            self.cache.clear()
        return 200, {}

    def abort(self, given: Any) -> tuple[int, Any]:
        self.aborted |= {name for name in self.running if name.startswith(given["rid"])}
        self.go.set()
        return 200, {}

    def checksum(self, given: Any) -> tuple[int, Any]:
        return 200, {"success": True, "message": "Success.", "per_engine_checksum": self.weights.hex()}

    # What it computes.

    def _cached(self, key: str, tokens: Sequence[int]) -> list[bytes]:
        best: list[bytes] = []
        for other, known, kvs in self.cache:
            same = 0
            while same < min(len(known), len(tokens), len(kvs)) and known[same] == tokens[same]:
                same += 1
            if (other == key or self.deaf_to_key) and same > len(best):
                best = kvs[:same]
        return best

    async def _generate(self, given: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if not given.get("input_ids"):
            await self._answer(writer, 400, {"error": {"message": "input_ids cannot be empty."}})
            return
        if len(given["input_ids"]) >= PROMPT_MAX:
            await self._answer(writer, 400, {"error": {"message": "Input length exceeds the maximum"}})
            return
        if self.refuses_grammars and given["sampling_params"].get("ebnf"):
            text = "Grammar-based generation is not supported when the server is launched with --grammar-backend none"
            await self._answer(writer, 400, {"error": {"message": text}})
            return
        await self._computing.wait()
        asked, name = given["sampling_params"], given["rid"]
        made = self.running[name] = []
        request = _Computed(self, given)
        stream = given.get("stream", False)
        if stream:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
        try:
            while not request.finish:
                if self.hold_at == len(made) and stream:
                    await self.go.wait()
                await self._computing.wait()
                await asyncio.sleep(0)
                if name in self.aborted:
                    request.finish = {"type": "abort", "message": None}
                elif self._computing.is_set():
                    request.step()
                    made.append(request.made[-1])
                    request.finish = request.ends(asked)
                if stream and not writer.is_closing():
                    _event(writer, request.message(incremental=True))
                    await writer.drain()
            if stream:
                writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            else:
                await self._answer(writer, 200, request.message(incremental=False))
            await writer.drain()
        finally:
            del self.running[name]
            request.keep()


class _Computed:
    def __init__(self, fake: FakeSglang, given: dict[str, Any]) -> None:
        self.fake = fake
        self.given = given
        self.prompt: list[int] = list(given["input_ids"])
        self.key: str = given.get("extra_key") or ""
        self.scores = given.get("logprob_start_len", -1) == 0
        found = [] if self.scores else fake._cached(self.key, self.prompt[:-1])
        self.cached = len(found)
        self.kvs = list(found)
        self.made: list[int] = []
        self.logprobs: list[list[Any]] = []
        self.top: list[list[list[Any]]] = []
        self.inputs: list[list[Any]] = [[None, self._named(0), None]]
        self.input_top: list[Any] = [None]
        self.versions: list[str] = []
        self.finish: dict[str, Any] | None = None
        self.sent = 0
        self._random = np.random.default_rng()

    def _named(self, at: int) -> int:
        # In scores of a prompt SGLang calls the last id of the vocabulary 0.
        return self.prompt[at] if self.prompt[at] < self.fake.vocab - 1 else 0

    def keep(self) -> None:
        known = (*self.prompt, *self.made)
        if not self.fake.info["disable_radix_cache"]:
            self.fake.cache.append((self.key, known, self.kvs))

    def step(self) -> None:
        fake, asked = self.fake, self.given["sampling_params"]
        tokens = [*self.prompt, *self.made]
        while len(self.kvs) < len(tokens):
            at = len(self.kvs)
            self.kvs.append(next_kv(fake.weights, tokens[at], self.kvs[-1] if self.kvs else b""))
            if self.scores and at + 1 < len(self.prompt):
                raw = log_softmax(logits_of(self.kvs[-1], fake.vocab))
                self.inputs.append([float(raw[self.prompt[at + 1]]), self._named(at + 1), None])
                self.input_top.append(self._best(raw))
        raw = logits_of(self.kvs[-1], fake.vocab)
        logits = self._shaped(raw, asked)
        temperature = asked["temperature"]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int((logits / temperature + self._random.gumbel(size=fake.vocab)).argmax())
        told = log_softmax(logits if fake.shapes_numbers else raw)
        if fake.tempered and temperature:
            told = log_softmax(raw / temperature)
        self.made.append(token)
        self.logprobs.append([None if fake.not_finite else float(told[token]), token, None])
        self.top.append(self._best(told))
        self.versions.append(fake.version)

    def _shaped(self, raw: np.ndarray, asked: dict[str, Any]) -> np.ndarray:
        """In SGLang's order: penalties, grammar, bias."""
        fake, logits = self.fake, raw.copy()
        counted = [] if fake.counts_nothing else [*self.made, *(self.prompt if fake.counts_prompts else ())]
        for token in counted:
            logits[token] -= asked["frequency_penalty"]
        logits[list(set(counted))] -= asked["presence_penalty"]
        if (grammar := asked.get("ebnf")) and not fake.forgets_grammars:
            held = np.full(len(logits), -1e30)
            allowed = allowed_by(grammar, self.made)
            held[allowed] = logits[allowed]
            logits = held
        for token, bias in (asked.get("logit_bias") or {}).items():
            logits[int(token)] += 0 if fake.ignores_bias else bias
        return logits

    def routes(self, start: int) -> str:
        rows = [experts_of(kv) for kv in self.kvs[start : len(self.prompt) + len(self.made) - 1]]
        if self.fake.shifts_routes and len(self.made) > 1:
            rows = [rows[-1], *rows[:-1]]
        for at in range(max(self.cached - start, 0) if self.fake.loses_cached_routes else 0):
            rows[at] = np.arange(LAYERS * TAKEN, dtype=np.int32).reshape(LAYERS, TAKEN)
        if self.fake.blanks_routes:
            rows = [np.zeros_like(row) for row in rows]
        return base64.b64encode(np.array(rows, dtype=np.int32).tobytes()).decode()

    def _best(self, raw: np.ndarray) -> list[list[Any]]:
        return [[float(raw[i]), int(i), None] for i in np.argsort(-raw)[: self.given["top_logprobs_num"]]]

    def ends(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        # With ignore_eos SGLang heeds no stop_token_ids, and without it also the model's own end.
        stops = () if asked["ignore_eos"] else (*asked["stop_token_ids"], EOS)
        if self.made[-1] in stops:
            return {"type": "stop", "matched": self.made[-1]}
        full = len(self.made) >= asked["max_new_tokens"]
        return {"type": "length", "length": len(self.made)} if full else None

    def message(self, *, incremental: bool) -> dict[str, Any]:
        first, self.sent = (self.sent, len(self.made)) if incremental else (0, len(self.made))
        ids, logprobs = self.made[first:], self.logprobs[first:]
        if (
            self.fake.drops_token is not None
            and first <= self.fake.drops_token < len(self.made)
            and incremental
        ):
            ids, logprobs = [], []
        if self.fake.shuffles:
            ids = [(i + 1) % self.fake.vocab for i in ids]
        meta = {
            "id": self.given["rid"],
            "finish_reason": self.finish,
            "prompt_tokens": len(self.prompt),
            "weight_version": self.fake.version,
            "num_retractions": 0,
            "input_token_logprobs": self.inputs if self.scores else [],
            "output_token_logprobs": logprobs,
            "output_token_logprobs_length": len(self.made),
            "completion_tokens": len(self.made),
            "cached_tokens": self.cached,
        }
        if self.given["top_logprobs_num"]:
            meta["output_top_logprobs"] = self.top[first:]
            meta["input_top_logprobs"] = self.input_top if self.scores else []
        if self.finish and self.given.get("return_routed_experts") and not self.fake.sends_no_routes:
            meta["routed_experts"] = self.routes(self.given["routed_experts_start_len"])
        if self.finish:
            meta["weight_versions"] = self._spans()
            meta["weight_version"] = self.versions[-1] if self.versions else self.fake.version
        return {"output_ids": ids, "meta_info": meta}

    def _spans(self) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        versions = self.versions[-1:] * len(self.versions) if self.fake.mislabels else self.versions
        for at, version in enumerate(versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = at + 1
            else:
                spans.append({"version": version, "start": at, "end": at + 1})
        return spans or [{"version": self.fake.version, "start": 0, "end": 0}]


def _event(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    data = b"data: " + json.dumps(message).encode() + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


ROUTES = {
    "/openapi.json": FakeSglang.openapi,
    "/server_info": FakeSglang.server_info,
    "/model_info": FakeSglang.model_info,
    "/health": FakeSglang.health,
    "/pause_generation": FakeSglang.pause,
    "/continue_generation": FakeSglang.resume,
    "/update_weights_from_disk": FakeSglang.load,
    "/update_weight_version": FakeSglang.set_version,
    "/flush_cache": FakeSglang.flush,
    "/abort_request": FakeSglang.abort,
    "/weights_checker": FakeSglang.checksum,
}


@contextlib.contextmanager
def in_a_thread(model: Path) -> Iterator[tuple[FakeSglang, asyncio.AbstractEventLoop]]:
    """For tests whose engine is in another process. What is set on the fake is set in its loop."""
    made: list[tuple[FakeSglang, asyncio.AbstractEventLoop]] = []
    started, ended = threading.Event(), asyncio.Event()

    async def serve() -> None:
        fake = FakeSglang(model)
        await fake.start()
        made.append((fake, asyncio.get_running_loop()))
        started.set()
        await ended.wait()
        await fake.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(60)
    try:
        yield made[0]
    finally:
        made[0][1].call_soon_threadsafe(ended.set)
        thread.join(60)


def fake_python(folder: Path) -> str:
    """Path of an executable in `folder` that is the server, whatever module it is asked for. It notes what it was given."""
    stub = folder / "python"
    code = f"import sys; sys.path[:0] = {sys.path!r}; import fake_sglang; fake_sglang.main({str(folder)!r}, sys.argv[1:])"
    script = folder / "main.py"
    script.write_text(code)
    stub.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {script} "$@"\n')
    stub.chmod(0o755)
    return str(stub)


def main(folder: str, arguments: list[str]) -> None:
    given = {"argv": arguments, "env": dict(os.environ), "pid": os.getpid()}
    (Path(folder) / "given").write_text(json.dumps(given))

    async def serve() -> None:
        fake = FakeSglang(Path(arguments[arguments.index("--model-path") + 1]))
        await fake.start(int(arguments[arguments.index("--port") + 1]))
        await asyncio.Event().wait()

    asyncio.run(serve())
