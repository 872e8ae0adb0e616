"""midstream behind TRL's AsyncGRPOTrainer: the push door in the place of its NCCL group, for TRL 1.16.

    trainer = AsyncGRPOTrainer(..., weight_transfer=PushTransfer(...), rollout_worker=PushRolloutWorker(...))

Owns: a `weight_transfer` and a `rollout_worker` as TRL's two protocols have them.
Always holds: every call to the server is one of TRL's own `VLLMClient` or rollout loop. Only the bytes of the weights take
another way, gloo (client/push.py), because TRL's own class sends them between GPUs. A send that failed ends the group, and the
next one forms another.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
from trl.experimental.async_grpo.vllm_client import VLLMClient

from midstream.client.names import as_checkpoint
from midstream.client.push import PIECE_BYTES, Deadline, Rendezvous, TrainerGroup
from midstream.client.pushing import INIT_AGAIN, Tensors
from midstream.client.weights import Cast

#: A metric beside TRL's own: the place of the snapshot that sampled, the mean over tokens. The first one that sampled has 1.
SNAPSHOT = "midstream/snapshot"


class PushTransfer:
    """A `weight_transfer` of AsyncGRPOTrainer. Its methods are those of TRL's WeightTransferProtocol.

    url: of the gateway. config_dir: the directory of the served model, whose names the tensors get. dtype: that is served.
    address: of this machine, as the replicas reach it. timeout_s: of forming the group, and again of each transfer.
    """

    def __init__(
        self,
        url: str,
        *,
        config_dir: str | PathLike[str],
        dtype: Cast | None = None,
        address: str = "127.0.0.1",
        timeout_s: int = 1800,
    ) -> None:
        self._vllm = VLLMClient(url)
        self._config_dir = Path(config_dir)
        self._dtype = dtype
        self._address = address
        self._timeout_s = timeout_s
        self._group: TrainerGroup | None = None

    def __repr__(self) -> str:
        return f"PushTransfer({self._vllm.server_url}, {self._group or 'no group'})"

    def init_weight_transfer(self) -> None:
        self._vllm.wait_for_server_ready()
        self._form()

    def pause(self) -> None:
        """Nothing stands still for a push: the old weights serve until the switch, and each token has its label."""

    def resume(self) -> None:
        """There was no pause."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Returns when every replica serves them. Raises what TRL's client raises, and PushFailed."""
        tensors = Tensors(as_checkpoint(dict(iterator), self._config_dir), self._dtype)
        group = self._started()
        update_info = msgspec.to_builtins(tensors.sent)
        group.send(
            tensors.parts(),
            lambda: self._vllm.update_weights(update_info, timeout=self._timeout_s),
            Deadline(self._timeout_s),
        )
        self._vllm.finish_weight_update(timeout=self._timeout_s)

    def destroy(self) -> None:
        # The server notices that the store is gone.
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _form(self) -> TrainerGroup:
        self.destroy()
        asked = Rendezvous(
            master_address=self._address,
            master_port=0,
            world_size=1 + self._vllm.get_world_size(),
            packed_buffer_size_bytes=PIECE_BYTES,
        )
        self._group = TrainerGroup.form(
            asked,
            lambda info: self._vllm.init_weight_transfer_engine(info, timeout=self._timeout_s),
            Deadline(self._timeout_s),
        )
        return self._group

    def _started(self) -> TrainerGroup:
        """The group, with an update begun. It is formed again, once, where the server asks for it."""
        group = self._group
        if group is None or group.closed:
            group = self._form()
        try:
            self._vllm.start_weight_update(timeout=self._timeout_s)
        # TRL's client raises nothing more specific.
        except Exception as error:
            if INIT_AGAIN not in str(error):
                raise
            group = self._form()
            self._vllm.start_weight_update(timeout=self._timeout_s)
        return group


class LabelledLoop(_AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's rollout loop, which also counts the labels of the tokens that it gets."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._places: dict[str, int] = {}

    async def _post(self, path: str, payload: dict[str, Any], *given: Any, **more: Any) -> Any:
        answer = await super()._post(path, payload, *given, **more)
        sums = self._rates[SNAPSHOT]
        for choice in answer.get("choices", ()):
            for span in choice.get("snapshots", ()):
                place = self._places.setdefault(span["snapshot"], len(self._places) + 1)
                count = span["end"] - span["start"]
                sums[0] += place * count
                sums[1] += count
        return answer


class PushRolloutWorker(AsyncRolloutWorker):  # type: ignore[misc]
    """TRL's rollout worker where no vLLM is installed: it asks for the package, and calls nothing of it."""

    _loop_cls = LabelledLoop

    def __init__(self, **given: Any) -> None:
        with mock.patch.object(async_rollout_worker, "is_vllm_available", return_value=True):
            super().__init__(**given)
