"""A Tinker client that trains while its trainer process is killed and stopped, and checks what it was promised.

Always holds: a call ends with its result, or with an error that a trainer's or a front's end in its time explains. After such
an error every call fails until a state is loaded. A state that was saved can be loaded, by the old client or by a new run, and
has the loss that it had when it was saved.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from simclient import Oracle, Wrong
from simtinker import PAUSE_S, FrontLost, TinkerClient

from midstream_tinker.codec import FLOAT32, INT64
from midstream_tinker.messages import ForwardBackwardRequest

#: Of a loss that was computed twice from the same weights.
ERROR = 1e-4
#: Names of states, used again and again.
STATES = 3
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
LORA = {"rank": 4, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
TEXT = tuple(range(20, 52))
#: What an error says of a model that went with its trainer.
LOST = "Make the training client anew from a saved state"


class Lost(Exception):
    """The trainer's or the front's end took the model."""


class Refused(Exception):
    """A call failed in bad weather, say on a full disk; the model is as it was."""


class Trainee(TinkerClient):
    """lives_since: whether the trainer process and the server met with nothing that may end the trainer, since then."""

    def __init__(
        self,
        name: str,
        port: int,
        rng: random.Random,
        oracle: Oracle,
        count: Callable[[str], None],
        lives_since: Callable[[float], bool],
    ) -> None:
        super().__init__(name, port, rng, oracle, count, lambda: 0)
        self._lives_since = lives_since
        self._session = self._model = ""
        self._seq, self._runs, self._exports = 0, 0, 0
        #: By name: its path, and the losses that it may have. Two, where a save over it did not end well.
        self._states: dict[str, tuple[str, tuple[float, ...]]] = {}
        #: When the model was made or loaded last.
        self._since = 0.0

    async def run(self) -> None:
        begun = asyncio.get_running_loop().time()
        while not self._session:
            try:
                self._session = (await self._call("create_session", {"tags": []}))["session_id"]
            except FrontLost as error:
                self._explained(begun, error)
        there = False
        while not self.over:
            try:
                if not there:
                    await (self._resumed() if self._states else self._begun())
                    there = True
                await self._cycle()
            except Lost:
                there = False
                self._count("trainer: lost")
            except Refused:
                self._count("trainer: refused")
                await asyncio.sleep(PAUSE_S)

    # -- a run

    async def _begun(self) -> None:
        self._since = asyncio.get_running_loop().time()
        body = {
            "session_id": self._session,
            "model_seq_id": self._runs,
            "base_model": "sim",
            "lora_config": LORA,
        }
        self._runs += 1
        self._model, self._seq = (await self._result("create_model", body))["model_id"], 0
        self._count("trainer: run")

    async def _resumed(self) -> None:
        """From any state: by the client that lost its model, once that is told so again, or by a new run."""
        path, losses = self._states[self._rng.choice(sorted(self._states))]
        body: dict[str, Any] = {"path": path, "optimizer": True}
        anew = self._rng.random() < 0.5
        if anew:
            body |= {"session_id": self._session, "model_seq_id": self._runs}
            self._runs += 1
        else:
            await self._refused_while_lost()
            body |= {"model_id": self._model, "seq_id": self._next()}
        self._since = asyncio.get_running_loop().time()
        loaded = await self._result("load_weights", body)
        if anew:
            self._model, self._seq = loaded["model_id"], 0
        loss = await self._loss()
        if all(abs(loss - known) > ERROR for known in losses):
            raise Wrong(f"{self.name}: {path} has the loss {loss}, it was saved with {losses}")
        self._count("trainer: new run from a state" if anew else "trainer: state loaded")

    async def _refused_while_lost(self) -> None:
        try:
            await self._result(
                "optim_step", {"model_id": self._model, "seq_id": self._next(), "adam_params": ADAM}
            )
        except Lost:
            self._count("trainer: refused until a state is loaded")
        else:
            raise Wrong(f"{self.name}: {self._model} was lost, and a step of it is carried out")

    async def _cycle(self) -> None:
        """Steps, their calls under way together; then a state, and now and then weights for sampling."""
        sent = []
        for _ in range(self._rng.randint(1, 6)):
            sent.append(await self._sent("forward_backward", self._example(forward_only=False)))
            body = {"model_id": self._model, "seq_id": self._next(), "adam_params": ADAM}
            sent.append(await self._sent("optim_step", body))
        for request in sent:
            await self._ended(*request)
        self._count("trainer: steps")
        await self._save(await self._loss())
        if self._rng.random() < 0.2:
            self._exports += 1
            body = {"model_id": self._model, "seq_id": self._next(), "path": f"w{self._exports}"}
            await self._result("save_weights_for_sampler", body)
            self._count("trainer: weights for sampling saved")
        await asyncio.sleep(self._rng.random())

    async def _save(self, loss: float) -> None:
        name = f"{self._model.rpartition(':')[2]}-{self._rng.randrange(STATES)}"
        known = self._states.get(name)
        if known is not None:
            self._states[name] = known[0], (*known[1], loss)
        body = {"model_id": self._model, "seq_id": self._next(), "path": name, "overwrite": True}
        self._states[name] = (await self._result("save_weights", body))["path"], (loss,)
        self._count("trainer: state saved")

    async def _loss(self) -> float:
        told = await self._ended(*await self._sent("forward_backward", self._example(forward_only=True)))
        return float(told["metrics"]["loss:sum"])

    def _example(self, *, forward_only: bool) -> bytes:
        message = ForwardBackwardRequest(
            model_id=self._model, seq_id=self._next(), loss_fn="cross_entropy", forward_only=forward_only
        )
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(TEXT[:-1], "<i4").tobytes()
        for name, dtype, values in (
            ("target_tokens", INT64, TEXT[1:]),
            ("weights", FLOAT32, [1.0] * (len(TEXT) - 1)),
        ):
            field = datum.loss_fn_inputs[name]
            field.dtype = dtype
            field.dense = np.asarray(values, "<i8" if dtype == INT64 else "<f4").tobytes()
        return bytes(message.SerializeToString())

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    # -- calls

    async def _result(self, path: str, body: Any) -> Any:
        return await self._ended(*await self._sent(path, body))

    async def _sent(self, path: str, body: Any) -> tuple[str, str]:
        try:
            return path, (await self._call(path, body))["request_id"]
        except FrontLost as error:
            raise self._explained(self._since, error) from error

    async def _ended(self, path: str, request: str) -> Any:
        """Its result. Raises Lost or Refused, or Wrong when nothing explains its error."""
        try:
            result = await self._polled(request)
        except FrontLost as error:
            raise self._explained(self._since, error) from error
        if "error" not in result:
            return result
        lost = self._explained(self._since, f"{path}: {result}", known=result.get("category") == "server")
        raise lost if LOST in result["error"] else Refused(str(lost))

    def _explained(self, since: float, error: object, *, known: bool = True) -> Lost:
        """Raises Wrong when nothing had happened, or when the error is not one of the server's side."""
        if not known or self._lives_since(since):
            raise Wrong(f"{self.name}: {error}, and nothing explains it")
        return Lost(str(error))
