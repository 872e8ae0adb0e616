"""midstream behind vLLM's own weight transfer, for trainers that speak it: vLLM 0.32, the backend `midstream`.

`register()` adds the backend to vLLM's `WeightTransferTrainerFactory`. A trainer then needs its init info here, and otherwise
what vLLM has: `HTTPVLLMWeightSyncClient` with the address of the gateway, and a `WeightSource` such as `ModuleSource`.

Always holds: the bytes are those of `SnapshotPublisher(to="push")`. Rank 0 of the trainer sends; the others iterate the source,
because gathering a tensor may need all of them. A send that failed ends the group, and a new engine is made for the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from midstream.client.push import PIECE_BYTES, Deadline, Rendezvous, TrainerGroup
from midstream.client.weights import SnapshotTensor

BACKEND = "midstream"
_REASON_CHARS_MAX = 1000


@dataclass
class MidstreamTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """What `WeightTransferTrainerFactory.trainer_init` takes for this backend.

    master_address, master_port: of this machine, where replicas find the trainer; port 0 takes a free one. world_size: one more
    than the gateway's /get_world_size says. key: "" makes a random one. timeout_s: of forming the group, and again of each
    transfer, in seconds.
    """

    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int
    world_size: int
    key: str = field(default="", repr=False)
    packed: bool = True
    packed_buffer_size_bytes: int = PIECE_BYTES
    packed_num_buffers: int = 2
    timeout_s: float = 300.0


class MidstreamTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Sends the weights of a source to every replica of a deployment, in the calls of vLLM's client."""

    init_info_cls = MidstreamTrainerInitInfo

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        is_sender: bool = True,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._timeout_s = timeout_s
        self._group: TrainerGroup | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: MidstreamTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> MidstreamTrainerEngine:
        """The engine. On rank 0 all replicas are in its group. Raises the client's error, and PushFailed."""
        if source is None:
            raise ValueError(f"the backend {BACKEND} needs a WeightSource")
        made = cls(client=client, source=source, is_sender=init_info.is_sender, timeout_s=init_info.timeout_s)
        if made.is_sender:
            asked = Rendezvous(
                master_address=init_info.master_address,
                master_port=init_info.master_port,
                world_size=init_info.world_size,
                key=init_info.key,
                packed=init_info.packed,
                packed_buffer_size_bytes=init_info.packed_buffer_size_bytes,
                packed_num_buffers=init_info.packed_num_buffers,
            )
            with _reasons():
                made._group = TrainerGroup.form(
                    asked, client.init_weight_transfer_engine, Deadline(init_info.timeout_s)
                )
        return made

    def send_weights(self, weight_version: str | None = None) -> None:
        """Send the source's weights. Returns when every replica serves them. weight_version: their name; None lets the ledger
        make one. Raises the client's error, and PushFailed."""
        declared = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        group = self._group
        if group is None or group.closed:
            raise RuntimeError("the group has ended; make another engine with trainer_init")
        update_info = {
            "names": [one.name for one in declared],
            "dtype_names": [str(one.dtype).removeprefix("torch.") for one in declared],
            "shapes": [list(one.shape) for one in declared],
        }
        with _reasons():
            self.client.start_weight_update()
            group.send(
                self._parts(declared),
                lambda: self.client.update_weights(update_info),
                Deadline(self._timeout_s),
            )
            self.client.finish_weight_update(weight_version)

    def shutdown(self) -> None:
        """End the group, and say so to the server."""
        group, self._group = self._group, None
        if group is not None and not group.closed:
            try:
                self.client.shutdown_weight_transfer_engine()
            finally:
                group.close()

    def _parts(self, declared: list[ParamMeta]) -> Iterator[Any]:
        """The bytes of the source's tensors. Raises ValueError when they are not those that were declared."""
        count = 0
        for count, (name, tensor) in enumerate(self.source, start=1):
            if count > len(declared):
                raise ValueError(f"tensor {name} is not in the metadata of the source")
            wanted, found = declared[count - 1], (name, tensor.dtype, tuple(tensor.shape))
            if found != (wanted.name, wanted.dtype, tuple(wanted.shape)):
                raise ValueError(f"the source gave {found}, and its metadata has {wanted}")
            yield SnapshotTensor(name, tensor, None).flat()
        if count < len(declared):
            raise ValueError(f"the source gave {count} tensors, and its metadata has {len(declared)}")


def register() -> None:
    """Add the backend to vLLM's factory. May be called again."""
    # vLLM refuses a name that it has, also of the same engine.
    with contextlib.suppress(ValueError):
        WeightTransferTrainerFactory.register_engine(BACKEND, MidstreamTrainerEngine)


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    """Within: an error of vLLM's client has the server's words, which the client leaves out."""
    try:
        yield
    # Of whatever kind: it is raised again as it is.
    except Exception as error:
        response = getattr(error, "response", None)
        if response is not None:
            error.add_note(str(response.text)[:_REASON_CHARS_MAX])
        raise
