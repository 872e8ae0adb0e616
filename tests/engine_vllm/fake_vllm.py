"""A vLLM server in this process, as far as VllmEngine sees one: scripted token by token, with faults where a test wants them.

Always holds: nothing is sampled while it is paused; a token, its log-probability and its span are of the weights that were
loaded when it was sampled, whatever the engine under test believes; the prefix cache finds blocks by salt and content only, as
vLLM's does, and remembers which load computed each.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from listening import stop_listening
from safetensors.numpy import save_file

from midstream.core.types import TokenRecord
from midstream.engine.vllm.arguments import SCHEDULER, WORKER
from midstream.engine.vllm.proof import write_probe
from midstream.engine.vllm.protocol import NOT_FINITE
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import (
    ANY_AGE,
    IDS,
    ITSELF,
    KV,
    MARK,
    MASK,
    NEAR,
    NEAR_GREEDY,
    NEAR_TOP_K,
    RANK_BASE,
    ROUTES,
    ROWS,
    SESSION,
    TIE_PLACE,
)
from midstream.engine.vllm.worker_extension.midstream_vllm_scheduler import IN_PAUSE

BLOCK = 4
# Hidden layers, and which of them has no experts.
VOCAB, LAYERS, DENSE, EXPERTS, TOP_K = 260, 3, 0, 8, 2
MAX_MODEL_LEN = 512
GENERATE = "/inference/v1/generate"
PATHS = ("/pause", "/resume", "/is_paused", "/collective_rpc", "/update_weight_version", GENERATE)
OWN = "theirs"
UPDATE = ("/start_weight_update", "/finish_weight_update")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
#: Between a token and the next best one, in nats.
GAP = 0.5
#: The method of the call that the engine's watch makes.
PROBE = "check_health"
#: What the API process answers alone, and what is asked at any time.
OF_API_PROCESS = ("/health", "/openapi.json", "/version", "/v1/models", "/server_info", "/weight_info")
WATCHED = (*OF_API_PROCESS, PROBE)
#: A number of an adapter on base weights is that of the adapter and so many times that of the base. None may reach 9999: the
#: log-probability would not be finite.
ON_BASE = 100
#: The linear maps of the model, and their shapes, where a test needs them.
MAPS = {"self_attn.q_proj": (16, 8), "mlp.down_proj": (8, 16)}


async def until(condition: Callable[[], object], what: str = "", timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what or condition}"
        await asyncio.sleep(0.002)


def write_weights(directory: Path, number: int) -> Path:
    """A snapshot of which only its number matters; -1: one that cannot be loaded."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "weights").write_text(str(number))
    return directory


def write_model(directory: Path) -> Path:
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "mlp_only_layers": [DENSE],
        "eos_token_id": 258,
    }
    write_weights(directory, 0)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_tensors(directory: Path) -> Path:
    """What adapters are compared with."""
    named = {f"model.layers.{n}.{path}.weight": shape for n in range(LAYERS) for path, shape in MAPS.items()}
    named["lm_head.weight"] = (VOCAB, 8)
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in named.items()}, directory / "model.safetensors"
    )
    return directory


def write_adapter(directory: Path, number: int, path: str = "self_attn.q_proj") -> Path:
    """An adapter of layer 0 alone, of which only its number matters."""
    write_probe(directory, f"model.layers.0.{path}", MAPS[path])
    config = directory / "adapter_config.json"
    asked = json.loads(config.read_text()) | {"lora_alpha": number, "layers_to_transform": [0]}
    config.write_text(json.dumps(asked))
    return directory


def token_at(position: int, weights: int) -> int:
    return (position * 7 + weights * 31) % 250


def logprob_at(position: int, weights: int) -> float:
    """Tells both."""
    return -(weights + 1) - position / 1024


def sampling_of(temperature: float) -> float:
    """Of a token, as among the four best."""
    return -math.log(sum(math.exp(-place * GAP / temperature) for place in range(4)))


def weights_of(record: TokenRecord) -> int:
    """By its number, whatever its label says."""
    return int(-record.logprob) - 1


def route_at(position: int) -> list[list[int]]:
    """Of the pass over the token at `position`: layer by layer, the dense one too (zeros)."""
    return [
        [0, 0] if layer == DENSE else [(position + layer) % EXPERTS, (position + layer + 3) % EXPERTS]
        for layer in range(LAYERS)
    ]


def weights_at(position: int) -> list[list[float]]:
    """Of the experts of `route_at`."""
    return [[0.5 + (position % 7) / 16, (layer + 1) / 8] for layer in range(LAYERS)]


def weights_bytes(position: int) -> bytes:
    every = enumerate(weights_at(position))
    return np.array([given for layer, given in every if layer != DENSE], dtype="<f4").tobytes()


def _npy(array: np.ndarray) -> str:
    out = io.BytesIO()
    np.save(out, array)
    return base64.b64encode(out.getvalue()).decode()


def route_bytes(position: int) -> bytes:
    return bytes(e for layer, experts in enumerate(route_at(position)) if layer != DENSE for e in experts)


@dataclass(eq=False)
class FakeRequest:
    """One request to GENERATE. What the test does to it: step, end, write, error, cut, answer."""

    fake: FakeVllm
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    tokens: list[int] = field(default_factory=list)
    # Of each.
    versions: list[str] = field(default_factory=list)
    # Loads that computed the blocks found in the cache.
    reused: list[int] = field(default_factory=list)
    placed: bool = False
    # Everything was written.
    over: bool = False
    # The client closed the connection.
    gone: bool = False
    lie: Callable[[list[dict[str, Any]]], list[dict[str, Any]] | None] = lambda spans: spans
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    # Where the files of its adapter are, as it was told when it began.
    adapter: Path | None = None
    # Which epoch computed each position, and whether that has to be told.
    kv: list[int] = field(default_factory=list)
    untold: bool = True
    telling: list[list[int]] = field(default_factory=list)

    @property
    def weights(self) -> int:
        """The number of those that compute its next token."""
        assert self.fake.weights is not None, "half-loaded weights were used"
        if self.adapter is not None:
            return self.fake.computing(self.model, self.adapter) + ON_BASE * self.fake.weights
        return self.fake.leaking() or self.fake.weights

    @property
    def model(self) -> str:
        model: str = self.body["model"]
        return model

    @property
    def prompt(self) -> list[int]:
        prompt: list[int] = self.body["token_ids"]
        return prompt

    @property
    def salt(self) -> str:
        salt: str = self.body["cache_salt"]
        return salt

    @property
    def sampling(self) -> dict[str, Any]:
        sampling: dict[str, Any] = self.body["sampling_params"]
        return sampling

    def place(self) -> None:
        """Into the batch: cached blocks are looked up, the others computed."""
        checked = self.fake.checks_in_pause and self.body.get("priority") == IN_PAUSE
        assert not self.fake.paused or checked, "nothing else is computed while paused"
        if self.placed:
            return
        self.placed = True
        self.reused = self.fake.find(self.model, self.salt, self.prompt, self._asked_kv[1])
        self.kv = [epoch for epoch in self.reused for _ in range(BLOCK)] if self.fake.tells_kv else []
        self._compute(len(self.prompt))

    @property
    def _asked_kv(self) -> tuple[int, int]:
        told, age_max = self.sampling.get("extra_args", {}).get(KV, (0, ANY_AGE))
        return told, age_max

    def _compute(self, end: int) -> None:
        """All positions before `end`."""
        new, epoch = end - len(self.kv), self.fake.epoch_of(self.model)
        self.untold |= bool(self.kv) and new > 0 and self.kv[-1] != epoch
        self.kv += [epoch] * new
        self.fake.fill(self.model + self.salt, [*self.prompt, *self.tokens][:end], self.kv)

    def preempt(self) -> None:
        """Its KV is gone, and computed again."""
        self.kv, self.untold = [], True

    def sample(self, count: int = 1) -> list[tuple[int, float]]:
        """Tokens that the model gave and nobody was told of yet."""
        self.place()
        new = []
        for _ in range(count):
            position = len(self.prompt) + len(self.tokens)
            self._compute(position)
            if self.fake.tells_kv and self._asked_kv[0] and self.untold:
                starts = [i for i, e in enumerate(self.kv) if i == 0 or e != self.kv[i - 1]]
                self.telling.append([len(self.tokens), *(n for i in starts for n in (self.kv[i], i))])
                self.untold = False
            token = (self.sampling.get("allowed_token_ids") or (token_at(position, self.weights),))[0]
            if MASK in self.sampling.get("extra_args", {}) and not self.fake.no_masks:
                self.telling.append([IDS, *self._left(token)])
            if ROUTES in self.sampling.get("extra_args", {}) and self.fake.notes_routes:
                self.telling.append(self._rows(position))
            new.append((token, logprob_at(position, self.weights)))
            self.tokens.append(new[-1][0])
            self.versions.append(self.fake.version)
        return new

    def write(self, new: Sequence[tuple[int, float]], finish: str | None = None, **more: Any) -> None:
        content = [self._scored(t, p) for t, p in new]
        choice = {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": [t for t, _ in new],
            "routed_experts": self._routes() if finish else None,
            "sampling_mask": self._told_kv(),
            "weight_versions": self._told() if finish else None,
            "logprobs": {"content": content},
        }
        self.event({"request_id": "x", "usage": None, "output_mode": "tokens", "choices": [choice | more]})

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        """The token is the best one, and the others are worse by GAP each."""
        best, rank = token, 1
        if self.fake.both and MARK in self.sampling.get("extra_args", {}):
            temperature = self.sampling["temperature"]
            drawn = sampling_of(temperature) if temperature else 0.0
            best, rank = ITSELF, RANK_BASE + int.from_bytes(struct.pack("<f", abs(drawn)), "little")
            rank += self._near_tie() * TIE_PLACE
        top = [{"token_id": token, "logprob": logprob, "rank": rank}]
        for place in range(0 if best == ITSELF else 1, self.sampling.get("logprobs", 0)):
            other = VOCAB - place if self.fake.names_alternatives else token
            there = best if place == 0 else other
            top.append({"token_id": there, "logprob": logprob - place * GAP, "rank": place + 1})
        return {"token_id": token, "logprob": logprob, "rank": rank, "top_logprobs": top}

    def _left(self, token: int) -> list[int]:
        """For a draw: those of `_scored` that top_k leaves, or all that are allowed."""
        best = range(VOCAB - 1, VOCAB - (self.sampling["top_k"] or VOCAB), -1)
        return sorted({token, *(self.sampling.get("allowed_token_ids") or best)})

    def _near_tie(self) -> int:
        """The second token is as good as the best one where a bias makes it so."""
        if NEAR not in self.sampling["extra_args"] or GAP not in self.sampling.get("logit_bias", {}).values():
            return 0
        return 0 if self.fake.no_ties else NEAR_TOP_K if self.sampling["temperature"] else NEAR_GREEDY

    def step(self, *sizes: int) -> None:
        """Chunks of so many tokens each (one of one); the request ends by itself at its last token."""
        for size in sizes or (1,):
            new = self.sample(size)
            if len(self.tokens) >= self.sampling["max_tokens"]:
                self.write(new, "length")
                self.close()
            else:
                self.write(new)

    def end(self, finish: str = "stop", count: int = 1) -> None:
        """With so many last tokens."""
        self.write(self.sample(count) if count else [], finish)
        self.close()

    def to_the_end(self) -> None:
        self.step(*[1] * (self.sampling["max_tokens"] - len(self.tokens)))

    def close(self) -> None:
        usage = self._usage(len(self.reused) * BLOCK)
        self.event({"request_id": "x", "usage": usage, "output_mode": "tokens", "choices": []})
        self.raw(b"data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")
        self.over = True
        self._hold()

    def _hold(self) -> None:
        session, _, kept_s = self.sampling.get("extra_args", {}).get(SESSION, ("", 0.0, 0.0))
        if self.fake.holds is not None and session and kept_s:
            self.fake.holds[session] = (len(self.prompt) + len(self.tokens) - 1) // BLOCK

    def _usage(self, cached: int) -> dict[str, Any]:
        details = {"prompt_tokens_details": {"cached_tokens": cached}} if self.fake.tells_cached else {}
        return {"prompt_tokens": len(self.prompt), **details}

    def event(self, message: dict[str, Any]) -> None:
        self.raw(b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n")

    def raw(self, data: bytes) -> None:
        """In HTTP chunks of `fake.cut` bytes."""
        size = self.fake.cut or len(data)
        for i in range(0, len(data), size):
            part = data[i : i + size]
            self.writer.write(b"%x\r\n%s\r\n" % (len(part), part))

    def cut(self) -> None:
        """The connection is lost."""
        self.writer.transport.abort()

    def _told_kv(self) -> list[list[int]] | None:
        told, self.telling = self.telling, []
        return told or None

    def _told(self) -> list[dict[str, Any]] | None:
        return self.lie(self._spans()) if self.fake.confirms else None

    def _spans(self) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for i, version in enumerate(self.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = i + 1
            else:
                spans.append({"version": version, "start": i, "end": i + 1})
        return spans

    def _routes(self) -> str | None:
        start = self.sampling.get("routed_experts_prompt_start")
        if start is None or not self.fake.routes:
            return None
        rows = [route_at(p) for p in range(start, len(self.prompt) + len(self.tokens) - 1)]
        return _npy(np.array(rows, dtype=np.uint8).reshape(-1, LAYERS, TOP_K))

    def _passes(self) -> str | None:
        """Those of a prompt whose choice ends with its first token, as midstream's scheduler puts them there."""
        many = [one for one in self.telling if one[0] == ROWS and one[2] > 1]
        if len(self.tokens) != 1 or not many:
            return self._routes()
        self.telling.remove(many[0])
        return _npy(np.array(many[0][1:], dtype="<u4"))

    def _rows(self, end: int) -> list[int]:
        """What goes with the token at position `end`."""
        asked, weights = self.sampling["extra_args"][ROUTES]
        first = end - 1 if self.tokens else asked
        moved = self.fake.moves_routes if self.tokens else 0
        rows = [route_at(p + moved) for p in range(first, end)]
        data = np.array(rows, dtype=np.uint8).tobytes()
        data += bytes(-len(data) % 4)
        if weights and not self.fake.no_weights:
            moved = self.fake.moves_weights if self.tokens else 0
            data += np.array([weights_at(p + moved) for p in range(first, end)], dtype="<f4").tobytes()
        words = np.frombuffer(data, "<u4")
        return [ROWS, first + self.fake.misplaces_routes, len(rows), *map(int, words)]

    def scored(self) -> dict[str, Any]:
        """What a request for prompt_logprobs is answered with."""
        if asked := "prompt_logprobs" in self.sampling:
            # Computed anew, whatever is cached.
            self.placed = True
        new = self.sample(self.sampling["max_tokens"])
        self._hold()
        weights = self.weights
        scores: list[Any] = [None]
        for position, token in enumerate(self.prompt[1:], start=1):
            logprob = NOT_FINITE if self.fake.nan_scores else logprob_at(position, weights)
            scores.append({str(token): {"logprob": logprob, "rank": 1}})
        choice = {
            "index": 0,
            "finish_reason": "length",
            "token_ids": [t for t, _ in new],
            "routed_experts": self._passes(),
            "sampling_mask": self._told_kv(),
            "weight_versions": self._told(),
            "logprobs": {"content": [self._scored(t, p) for t, p in new]},
        }
        return {
            "request_id": "x",
            "choices": [choice],
            "usage": self._usage(len(self.reused) * BLOCK),
            "prompt_logprobs": scores if asked else None,
        }


class FakeVllm:
    """What a test sets: faults, routes, cut, holds; what it looks at: calls, requests, what is loaded."""

    def __init__(self) -> None:
        self.url = ""
        self.paused = False
        self.version = "default"
        self.named: list[str] = []
        # None: half loaded.
        self.weights: int | None = 0
        self.loads = 0
        self.routes = True
        # Adapters in one step; 0: it serves none. By name: the number of each that it has, and where its files are.
        self.places = 0
        # It runs vLLM for CPUs, with midstream's worker extension.
        self.cpu = False
        #: Of its workers, where it is shown: on a CPU, or with `both`.
        self.extension = WORKER
        # It runs with the extension, which returns both log-probabilities. one_number: why it does not.
        self.both = False
        self.one_number = ""
        # It says of no token that it was near another one, or what was left for its draw.
        self.no_ties = self.no_masks = False
        # Its workers note what routers choose; the rows of later tokens are of passes so far behind, and so far off by name.
        self.notes_routes = True
        self.no_routes = self.no_router_weights = ""
        self.moves_routes = self.misplaces_routes = self.moves_weights = 0
        self.no_weights = False
        # Answers of a digest before the last one, whether one was asked for, and whether each load has another one.
        self.digest_pieces = 1
        self.digested = asyncio.Event()
        self.digests_loads = False
        self._pieces = 0
        self.adapters: dict[str, int] = {}
        self.files: dict[str, Path] = {}
        # What its workers have; a reload of the base takes it from them, and the next request of a name has them read again.
        self.loaded: dict[str, int] = {}
        # Whether it knows load_inplace; it does nothing then.
        self.in_place, self.deaf_in_place = True, False
        # What a trainer is about to write; it is in a group. None: no update is open.
        self.writing: int | None = None
        self.in_group = False
        # Workers of it.
        self.ranks = 1
        # Of those behind the first one.
        self.other_seed = "7"
        # It runs with --data-parallel-size.
        self.engines = 1
        # What its workers stage: the number by which it is asked for, and the weights.
        self.beside: tuple[int, int] | None = None
        # Why they stage nothing; how far they say they are; a switch to what is staged fails halfway.
        self.no_staging = ""
        self.look = ("staged", "")
        self.torn_switch = False
        self.switches = self.drops = 0
        # Whether they still load any weights.
        self.busy = False
        self.asked_busy = asyncio.Event()
        # Names that the tee does not see.
        self.unseen: list[str] = []
        self.finite = True
        #: A rank that is given other bytes than the others.
        self.torn: int | None = None
        self._places: dict[str, Any] | None = None
        self._tee = Path()
        # Parts of paths where adapters are taken and left out.
        self.ignored: set[str] = set()
        # As vLLM's CPU kernels: the base weights are given the adapter that was loaded last.
        self.leaks = False
        # Bytes in an HTTP chunk; 0: whole events.
        self.cut = 0
        self.healthy = True
        # It runs with midstream's scheduler, too, which needs the next.
        self.checks_in_pause = False
        # Its scheduler says which weights computed KV.
        self.tells_kv = False
        # Its scheduler holds so many blocks for sessions; None: for none. ended: those that it was told of.
        self.holds: dict[str, int] | None = None
        self.ended: list[str] = []
        # Streams with tokens of their own, as the proof of that has them. None: no stream has.
        self.unasked: list[FakeRequest] | None = None
        # It runs with --scheduling-policy priority.
        self.by_priority = False
        # It runs with --enable-prompt-tokens-details.
        self.tells_cached = True
        # Its engine core, or a worker, stands still: only its API process answers.
        self.hung = False
        # Answers of its workers to the engine's watch.
        self.probes = 0
        # As versions up to 0.28, it does not say which weights sampled a choice.
        self.confirms = True
        # As 0.20, it gives alternatives the name of the sampled token.
        self.names_alternatives = True
        # It scores no prompt with finite numbers.
        self.nan_scores = False
        # Until gate of the request is set.
        self.hold_scores = False
        self.refuse_streams = False
        # What GENERATE answers instead.
        self.refuse: tuple[int, dict[str, Any]] | None = None
        # What only a watch asks, and everything else.
        self.watched: list[str] = []
        self.calls: list[str] = []
        # Streams.
        self.requests: list[FakeRequest] = []
        self.scores: list[FakeRequest] = []
        self.cache: dict[tuple[str, tuple[int, ...]], int] = {}
        # Path to what happens when its next call comes.
        self.before: dict[str, Callable[[], None]] = {}
        # ... when it is done and not answered yet.
        self.after: dict[str, Callable[[], None]] = {}
        # Path to what its next call waits for before it is done.
        self.gates: dict[str, asyncio.Event] = {}
        self._faults: dict[str, deque[str | None]] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[Any]] = set()

    def fault(self, path: str, *kinds: str | None) -> None:
        """What happens at the next calls of `path`, one each. refuse: 500, and nothing done; close: the connection is closed;
        hang: no answer; done-close, done-hang: after it was done; odd: done, and answered with what is no JSON; None: none."""
        self._faults.setdefault(path, deque()).extend(kinds)

    def heal(self) -> None:
        """No fault that was asked for happens any more."""
        self._faults.clear()

    def leaking(self) -> int:
        return list(self.adapters.values())[-1] if self.leaks and self.adapters else 0

    def epochs_of(self, model: str) -> list[int]:
        """Of midstream's scheduler: the numbers of versions that concern a model. Without it, how many weights were loaded."""
        if not self.tells_kv:
            return [self.loads]
        named = [version.partition(":")[0].partition(" ") for version in self.named]
        policy = model.rpartition("@")[0]
        return [int(n) for n, _, of in named if n.isdecimal() and of in ("", policy)] or [self.loads]

    def epoch_of(self, model: str) -> int:
        return self.epochs_of(model)[-1]

    def computing(self, name: str, files: Path) -> int:
        """The number of the adapter that its workers have under a name. They read the files if they have none."""
        if name not in self.loaded:
            self.loaded[name] = self._number(files)
        return self.loaded[name]

    def find(self, model: str, salt: str, tokens: Sequence[int], age_max: int = ANY_AGE) -> list[int]:
        """The epoch of each cached block."""
        found: list[int] = []
        young = self.epochs_of(model)[-1 - age_max :] if age_max != ANY_AGE else []
        # The last token is always computed.
        for end in range(BLOCK, len(tokens), BLOCK):
            epoch = self.cache.get((model + salt, tuple(tokens[:end])))
            if epoch is None or (young and epoch < young[0]):
                break
            found.append(epoch)
        return found

    def fill(self, salt: str, tokens: Sequence[int], kv: Sequence[int]) -> None:
        """kv: which epoch computed each. Of two blocks of the same tokens one stays; a real one has both."""
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            if not self.tells_kv or len(set(kv[end - BLOCK : end])) == 1:
                self.cache.setdefault((salt, tuple(tokens[:end])), kv[end - 1])

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """The server is gone with all its connections; `start` may follow."""
        assert self._server is not None
        stop_listening(self._server)
        for _ in range(9):
            # Connections that were accepted get their handlers, which close them.
            await asyncio.sleep(0)
        handlers = list(self._handlers)
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await self._server.wait_closed()

    async def restart(self) -> None:
        """As its own supervisor would do: the same address, and nothing of before."""
        port = int(self.url.rpartition(":")[2])
        await self.stop()
        self.paused, self.version, self.weights, self.cache, self.adapters = False, "default", 0, {}, {}
        self.named = []
        self._resumed.set()
        await self.start(port)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._handlers.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = head[0].split(" ")
        sizes = [int(line.partition(":")[2]) for line in head if line.lower().startswith("content-length:")]
        data = await reader.readexactly(sizes[0]) if sizes else b""
        path = target.partition("?")[0]
        if path == GENERATE:
            await self._generate(json.loads(data), reader, writer)
            return
        body = json.loads(data) if data else {}
        if body.get("method") == PROBE:
            path = target = PROBE
            self.probes += not self.hung
        (self.watched if path in WATCHED else self.calls).append(target)
        if self.hung and path not in OF_API_PROCESS:
            await reader.read()
            return
        self.before.pop(path, lambda: None)()
        if path in self.gates:
            await self.gates.pop(path).wait()
        faults = self._faults.get(path)
        fault = faults.popleft() if faults else None
        if fault == "refuse":
            _answer(writer, 500, {"error": {"message": "made up by the test", "code": 500}})
        elif fault == "close":
            return
        elif fault == "hang":
            await reader.read()
            return
        else:
            status, answer = (200, {}) if path == PROBE else self._do(method, path, body)
            self.after.pop(path, lambda: None)()
            if fault == "done-close":
                return
            if fault == "done-hang":
                await reader.read()
                return
            _answer(writer, status, "<html>" if fault == "odd" else answer)
        await writer.drain()
        # The client closes.
        await reader.read()

    def _do(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match path:
            case "/health":
                return (200 if self.healthy else 503), {}
            case "/openapi.json":
                return 200, {"paths": {p: {} for p in (*PATHS, LOAD, UNLOAD, *UPDATE)}}
            case "/version":
                return 200, {"version": "0.32.0"}
            case "/v1/models":
                return 200, {"data": [{"id": OWN, "max_model_len": MAX_MODEL_LEN}]}
            case "/server_info":
                return 200, {"vllm_config": self._config()}
            case "/v1/load_lora_adapter":
                return self._load(body["lora_name"], Path(body["lora_path"]), body.get("load_inplace", False))
            case "/v1/unload_lora_adapter":
                if self.adapters.pop(body["lora_name"], None) is None:
                    return 404, {"error": {"message": "it cannot be found"}}
                return 200, {}
            case "/pause":
                self.paused = True
                self._resumed.clear()
            case "/resume":
                self._go_on()
            case "/is_paused":
                return 200, {"is_paused": self.paused}
            case "/collective_rpc":
                return self._rpc(body["method"], body["kwargs"])
            case "/update_weight_version":
                self.version = body["new_version"]
                self.named.append(self.version)
            case "/weight_info":
                return 200, {"weight_version": self.version}
            case _:
                return self._transfer(method, path, body)
        return 200, {}

    def _go_on(self) -> None:
        assert self.weights is not None, "resumed with half-loaded weights"
        self.paused = False
        self._resumed.set()
        for request in self.unasked or ():
            if not request.over:
                request.step()

    def _transfer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """What a trainer's group asks for."""
        match path:
            case "/get_world_size":
                return 200, {"world_size": self.ranks}
            case "/init_weight_transfer_engine":
                self.in_group = True
            case "/shutdown_weight_transfer_engine":
                self.in_group = False
            case "/start_weight_update":
                assert self.paused, "vLLM takes weights apart between steps only"
                self.weights, self.writing = None, 0
            case "/update_weights":
                return self._write(body["update_info"])
            case "/finish_weight_update":
                self.weights, self.writing = self.writing, None
                self.loads += 1
            case _:
                return 404, {"error": {"message": f"no {method} {path}"}}
        return 200, {}

    def _config(self) -> dict[str, Any]:
        model = {"logprobs_mode": "raw_logprobs", "enable_return_routed_experts": self.routes}
        lora = {"max_loras": self.places} if self.places else None
        config: dict[str, Any] = {"model_config": model, "lora_config": lora}
        own = SCHEDULER if self.checks_in_pause else None
        config["scheduler_config"] = {
            "policy": "priority" if self.by_priority else "fcfs",
            "scheduler_cls": own,
        }
        if self.cpu:
            config["device_config"] = {"device": "cpu"}
        if self.cpu or self.both:
            config["parallel_config"] = {
                "worker_extension_cls": self.extension,
                "data_parallel_size": self.engines,
            }
        return config

    def _rpc(self, method: str, kwargs: dict[str, Any]) -> tuple[int, Any]:
        match method:
            case "midstream_weights":
                return self._beside(**kwargs)
            case "midstream_one_number":
                return 200, {"results": [self.one_number] * self.ranks}
            case "midstream_no_routes":
                why = self.no_routes or (self.no_router_weights if kwargs["weights"] else "")
                return 200, {"results": [why] * self.ranks}
            case "midstream_digest":
                self.digested.set()
                self._pieces = 0 if kwargs["begin"] else self._pieces + 1
                digest = f"{self.loads if self.digests_loads else self.weights}"
                found = {"kind": "kind", "digest": digest, "bytes": 4}
                return 200, {"results": [found if self._pieces >= self.digest_pieces else None] * self.ranks}
            case "midstream_look":
                return 200, {"results": [self._look(**kwargs)]}
            case "midstream_seed":
                return 200, {"results": ["7", *[self.other_seed] * (self.ranks - 1)]}
            case "midstream_dtype":
                return 200, {"results": ["torch.float32"] * self.ranks}
            case "midstream_open_tee":
                self._tee, self._places = Path(kwargs["path"]), kwargs["places"]
                return 200, {"results": [None] * self.ranks}
            case "midstream_close_tee":
                self._places = None
                seen = [
                    {
                        "first": rank == 0,
                        "missing": self.unseen,
                        "digests": {"a": "1"},
                        "parts": {},
                        "finite": self.finite,
                    }
                    for rank in range(self.ranks)
                ]
                if self.torn is not None:
                    seen[self.torn]["digests"] = {"a": "2"}
                return 200, {"results": seen}
        return self._reload(Path(kwargs["weights_path"]))

    def _look(self, ended: list[str]) -> dict[str, Any]:
        if self.holds is None:
            return {"why": "made up by the test"}
        self.ended += ended
        for session in ended:
            self.holds.pop(session, None)
        used = sum(-(-len(r.kv) // BLOCK) for r in self.requests if r.placed and not (r.over or r.gone))
        return {"block_tokens": BLOCK, "total": 200, "used": used, "held": sum(self.holds.values())}

    def _beside(
        self, do: str, number: int, path: str = "", moved: bool = False, kinds: list[str] | None = None
    ) -> tuple[int, Any]:
        """What the workers stage. A switch to it loads nothing."""
        answer: Any = None
        if do == "busy":
            answer = "loading" if self.busy else ""
            self.asked_busy.set()
        elif do == "stage":
            self.beside = (number, int((Path(path) / "weights").read_text()))
            answer = self.no_staging
        elif self.beside is None or self.beside[0] != number:
            return (200, {"results": [None]}) if do == "drop" else (500, {"error": {"message": "not staged"}})
        elif do == "look":
            phase, why = ("failed", "a tensor is missing") if self.beside[1] < 0 else self.look
            answer = {"phase": phase, "why": why, "kinds": []}
        elif do == "switch":
            assert self.paused, "weights are switched between steps only"
            if self.torn_switch:
                self.weights = None
                return 500, {"error": {"message": "half of the switch was made", "code": 500}}
            self.weights, self.switches = self.beside[1], self.switches + 1
        else:
            self.beside, self.drops = None, self.drops + 1
        # vLLM makes texts of all but these.
        said = answer if answer is None or isinstance(answer, dict | list) else str(answer)
        return 200, {"results": [said] * self.ranks}

    def _write(self, info: dict[str, Any]) -> tuple[int, Any]:
        """Each tensor has the number as all its bytes."""
        assert self._places is not None
        assert self.writing is not None
        self.writing = info["number"]
        with self._tee.open("r+b") as file:
            for begin, end in self._places.values():
                file.seek(begin)
                file.write(bytes([info["number"]]) * (end - begin))
        return 200, {}

    def _reload(self, directory: Path) -> tuple[int, Any]:
        assert self.paused, "weights are loaded between steps only"
        assert not self.busy, "vLLM has one config for all its threads"
        number = int((directory / "weights").read_text())
        self.loads += 1
        if number < 0:
            self.weights = None
            return 500, {"error": {"message": "a tensor is missing", "code": 500}}
        self.weights = number
        self.loaded = {}
        return 200, {"results": [None]}

    def _load(self, name: str, directory: Path, in_place: bool) -> tuple[int, Any]:
        if name in self.adapters and not (in_place and self.in_place):
            return 400, {"error": {"message": f"{name} has already been loaded"}}
        assert self.paused or not in_place, "an adapter changes between steps only"
        if not (in_place and self.deaf_in_place):
            self.adapters[name] = self.loaded[name] = self._number(directory)
        self.files[name] = directory
        return 200, {}

    def _number(self, directory: Path) -> int:
        config = json.loads((directory / "adapter_config.json").read_text())
        header = (directory / "adapter_model.safetensors").read_bytes().decode("latin-1")
        left_out = any(part in header for part in self.ignored)
        return 0 if left_out else int(config["lora_alpha"])

    async def _generate(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.refuse is not None:
            _answer(writer, *self.refuse)
            await reader.read()
            return
        if body.get("priority", 0) and not self.by_priority:
            _answer(
                writer, 400, {"error": {"message": "Got priority but Priority scheduling is not enabled."}}
            )
            await reader.read()
            return
        if body["model"] not in (OWN, *self.adapters):
            _answer(writer, 404, {"error": {"message": f"The model {body['model']} does not exist."}})
            await reader.read()
            return
        if self.refuse_streams and body["stream"] and body["model"] != OWN:
            _answer(writer, 400, {"error": {"message": "made up by the test", "code": 400}})
            await reader.read()
            return
        if len(body["cache_salt"]) > 128 or {*"@/\\\0"} & {*body["cache_salt"]}:
            _answer(writer, 400, {"error": {"message": "cache_salt must not contain '@', '/'", "code": 400}})
            await reader.read()
            return
        request = FakeRequest(self, body, writer, adapter=self.files.get(body["model"]))
        if body["stream"]:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            if body["model"].startswith("proof-"):
                await self._run(request)
                return
            self.requests.append(request)
            if self.unasked is not None:
                self.unasked.append(request)
                request.step()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            request.gone = True
            return
        self.scores.append(request)
        gone = asyncio.ensure_future(reader.read())
        answering = asyncio.ensure_future(self._score(request))
        try:
            await asyncio.wait((gone, answering), return_when=asyncio.FIRST_COMPLETED)
            request.gone = not answering.done()
            if answering.done():
                _answer(writer, 200, answering.result())
                request.over = True
                await gone
        finally:
            gone.cancel()
            answering.cancel()
            await asyncio.gather(gone, answering, return_exceptions=True)

    async def _run(self, request: FakeRequest) -> None:
        """As vLLM does it, which waits for nobody."""
        while not request.over:
            await self._resumed.wait()
            request.step()
            await request.writer.drain()
            await asyncio.sleep(0)

    async def _score(self, request: FakeRequest) -> dict[str, Any]:
        if self.hold_scores:
            await request.gate.wait()
        if not self.checks_in_pause or request.body.get("priority") != IN_PAUSE:
            await self._resumed.wait()
        return request.scored()


def _answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data))
