"""The proof, at every start, that a vLLM server computes with adapters: small ones are loaded, and numbers are compared.

For each kind of linear map in the model's layers an adapter of this kind alone must change the log-probabilities of a prompt.
With an adapter in each of vLLM's places, the base weights must give the numbers that they gave before, also in steps that they
share with an adapter. vLLM's kernels for a CPU would fail this without midstream's worker extension.

A request that runs is given another adapter in a pause. Its tokens before must be those of the first one, the next one must not
be, and vLLM must say that the weights changed between them.

Always holds: no adapter of the proof is left at the server, and none of its files.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import random
import secrets
import shutil
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from midstream.core.errors import SnapshotError
from midstream.engine.servers.chunks import InvalidAnswer, Token
from midstream.engine.servers.control import ServerRefused
from midstream.engine.servers.requests import ServedWeights
from midstream.engine.servers.scoring import ANSWER_S_MAX
from midstream.engine.servers.switching import TOLERANCE, NotExact, Score, score
from midstream.engine.vllm import protocol
from midstream.engine.vllm.adapters import Proven, adaptable, name_of
from midstream.engine.vllm.arguments import UNCROSSED
from midstream.engine.vllm.crossing_proof import CROSSING, CrossingProof, asked
from midstream.engine.vllm.scoring import Scorer
from midstream.engine.vllm.server import VllmServer
from midstream.engine.vllm.swap import Control
from midstream.http.call import CallFailed
from midstream.snapshots.adapter import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from midstream.snapshots.layout import file_header, read_spec
from midstream.snapshots.tasks import finished

logger = logging.getLogger(__name__)

#: How far the outputs of a map move for an input of size 1.
STRENGTH = 4.0
#: Tokens that the base generates, and those that an adapter generates beside it.
OWN, BESIDE = 6, 24
#: In nats, on average over a prompt that shares its steps with others. In bfloat16 a batch changes the rounding.
SHARED_TOLERANCE = 0.25


class NoAdapters(Exception):
    """vLLM serves, but no adapters. The message says why."""


class Proof:
    """sizes: of the vocabulary and of the context. folder: for adapters' files; what it has is removed."""

    def __init__(
        self,
        server: VllmServer,
        control: Control,
        scorer: Callable[[ServedWeights], Scorer],
        sizes: tuple[int, int],
        folder: Path,
    ) -> None:
        self._server = server
        self._control = control
        self._scorer = scorer
        self._vocab_size, self._context = sizes
        self._folder = folder
        #: What the names of its adapters begin with.
        self.policy = f"proof-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._loaded: list[str] = []

    async def run(self, model_dir: Path, own: ServedWeights) -> Proven:
        """own: the base weights. Raises NoAdapters, NotExact, CallFailed, WrongWeights."""
        await finished(shutil.rmtree, self._folder, True)
        try:
            base = await asyncio.to_thread(read_spec, model_dir)
        except SnapshotError as error:
            raise NoAdapters(str(error)) from error
        kinds = adaptable(base)
        if not kinds:
            raise NoAdapters("the model has no linear maps that midstream knows how to adapt")
        try:
            before, greedy = await self._score(own), await self._greedy(own.name, OWN)
            proven, refusal = set(), ""
            for kind, module in kinds.items():
                try:
                    name = await self._load(module, base.tensors[f"{module}.weight"].shape)
                except ServerRefused as error:
                    refusal = str(error)
                    continue
                if max(_differences(before, await self._score(ServedWeights(name, own.epochs)))) > TOLERANCE:
                    proven.add(kind)
            if not proven:
                raise NoAdapters(refusal or "no adapter changes what vLLM computes")
            if left_out := sorted(kinds.keys() - proven):
                logger.warning("vLLM does not adapt %s; such adapters are refused", ", ".join(left_out))
            module = kinds[min(proven)]
            while len(self._loaded) < self._server.adapter_places:
                await self._load(module, base.tensors[f"{module}.weight"].shape)
            await self._compare(own, before, greedy)
        finally:
            await self._clean_up()
        return Proven(base, frozenset(proven), self._server.adapter_places)

    @asynccontextmanager
    async def beside(self, proven: Proven, own: ServedWeights) -> AsyncIterator[Score]:
        """Within, an adapter is loaded. What the base weights and what this adapter on them say of a prompt.

        So whatever is proved of loads holds for both. Raises ServerRefused, CallFailed.
        """
        async with self.adapter(proven) as name:

            async def scores() -> list[float]:
                return [*await self._score(own), *await self._score(ServedWeights(name, own.epochs))]

            yield scores

    @asynccontextmanager
    async def adapter(self, proven: Proven) -> AsyncIterator[str]:
        """Within, one is loaded; its name. Raises ServerRefused, CallFailed."""
        module = adaptable(proven.base)[min(proven.kinds)]
        try:
            yield await self._load(module, proven.base.tensors[f"{module}.weight"].shape)
        finally:
            await self._clean_up()

    async def why_not_crossed(self, proven: Proven, own: ServedWeights) -> str:
        """Why a running request does not continue with another adapter; "" if it does. Raises NotExact, CallFailed."""
        module = adaptable(proven.base)[min(proven.kinds)]
        shape = proven.base.tensors[f"{module}.weight"].shape
        try:
            name, other = await self._load(module, shape), await self._load(module, shape, "another")
            for count in CROSSING:
                files = (self._folder / name, self._folder / other)
                proof = CrossingProof(
                    self._server,
                    self._control,
                    own,
                    self.policy,
                    name,
                    other,
                    files,
                    self._greedy,
                    self._score,
                )
                request = asked(self._vocab_size, self._context, count, f"crossing-{name}")
                # Else all of its tokens had been sampled when it was to stand still. The first name is another one now.
                if (why := await proof.why_not(request)) is not None:
                    return why
                await self._control.load_adapter(name, files[0], in_place=True)
            return UNCROSSED
        except ServerRefused as error:
            return str(error)
        finally:
            await self._clean_up()

    async def _compare(self, own: ServedWeights, before: list[float], greedy: list[Token]) -> None:
        """Raises NotExact unless the base weights give what they gave before."""
        alone = _differences(before, await self._score(own)) + _drift(
            greedy, await self._greedy(own.name, OWN)
        )
        beside = asyncio.create_task(self._greedy(self._loaded[-1], BESIDE))
        try:
            shared = _differences(before, await self._score(own))
            shared += _drift(greedy, await self._greedy(own.name, OWN))
        finally:
            await asyncio.wait((beside,))
            # An error of its own is worth less than one of the base weights.
            failed = beside.exception()
        if failed is not None:
            raise failed
        for off, bound in ((max(alone), TOLERANCE), (sum(shared) / len(shared), SHARED_TOLERANCE)):
            if not off <= bound:
                raise NotExact(
                    f"beside adapters vLLM gives the base weights log-probabilities that differ by {off:.3g}. Start it "
                    "without --enable-lora, or on a CPU with midstream's worker extension"
                )

    async def _load(self, module: str, shape: tuple[int, ...], which: str = "") -> str:
        name = name_of(self.policy, str(next(self._numbers)))
        directory = self._folder / name
        await asyncio.to_thread(write_probe, directory, module, shape, which)
        await self._control.load_adapter(name, directory)
        self._loaded.append(name)
        return name

    async def _score(self, weights: ServedWeights) -> list[float]:
        return await score(self._scorer(weights), self._vocab_size, self._context)

    async def _greedy(self, name: str, count: int) -> list[Token]:
        request = asked(self._vocab_size, self._context, count, name)
        data = protocol.body(request, 0, model=name, salt=secrets.token_hex(16), stream=False)
        answer = await self._server.ask(protocol.PATH, data, ANSWER_S_MAX)
        try:
            return list(protocol.read_answer(answer).tokens)
        except InvalidAnswer as error:
            raise NotExact(f"vLLM's answer to a prompt cannot be used: {error}") from error

    async def _clean_up(self) -> None:
        for name in self._loaded:
            try:
                await self._control.unload_adapter(name)
            except (CallFailed, ServerRefused) as error:
                logger.warning("%s: vLLM keeps its name: %s", name, error)
        self._loaded = []
        await finished(shutil.rmtree, self._folder, True)


def _differences(a: list[float], b: list[float]) -> list[float]:
    """Infinite where a number is not finite."""
    off = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return [each if math.isfinite(each) else math.inf for each in off]


def _drift(a: list[Token], b: list[Token]) -> list[float]:
    """The differences of greedy tokens, up to the first that differs: a near tie, after which the prompts differ, too."""
    same = sum(
        1
        for _ in itertools.takewhile(
            lambda pair: pair[0].token_id == pair[1].token_id, zip(a, b, strict=True)
        )
    )
    return _differences(*([token.logprob for token in tokens[: same + 1]] for tokens in (a, b)))


def write_probe(directory: Path, module: str, shape: tuple[int, ...], which: str = "") -> None:
    """An adapter of rank 1 of one map, strong enough to be seen in any model. shape: (outputs, inputs). which: of several."""
    outputs, inputs = shape
    signs = random.Random(module + which)
    a = array("f", (signs.choice((-1.0, 1.0)) / math.sqrt(inputs) for _ in range(inputs)))
    b = array("f", (signs.choice((-STRENGTH, STRENGTH)) for _ in range(outputs)))
    sides = (("A", (1, inputs), a.tobytes()), ("B", (outputs, 1), b.tobytes()))
    header = file_header(
        (f"base_model.model.{module}.lora_{side}.weight", "F32", shape, len(data))
        for side, shape, data in sides
    )
    alpha = 2 if which else 1
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": alpha, "target_modules": [module.rsplit(".", 1)[-1]]}
    directory.mkdir(parents=True)
    (directory / ADAPTER_WEIGHTS_FILE).write_bytes(header + b"".join(data for _, _, data in sides))
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(config))
