"""A copy of a trainer's tensors that is made beside the training, and the optimizer steps that wait for it.

Owns: the hooks on the trainer's optimizers, and the versions that the tensors had when the publication began.
Always holds:
- No step of an optimizer that was given begins before the copy has ended, well or not.
- If a tensor is seen to have changed since the publication began, the copy is an error and never a snapshot.
- A hook is registered and removed between steps, as torch refuses both within one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from midstream.client.errors import PublishError

#: Smaller tensors are copied before `begin` returns. So a forward pass may change small buffers, as those of routers.
AT_ONCE_BYTES = 64 * 1024
#: Torch counts no change by fused optimizers, nor through `.data`. So some numbers are compared, too: so many of a tensor at
#: most, so many of all together, and those of so many tensors. A step moves nearly all numbers in float32, and some percent in
#: bfloat16.
SAMPLED_OF_ONE, SAMPLED_OF_ALL, SAMPLED_TENSORS = 64, 16_384, 1_024

_T = TypeVar("_T")


class Copying:
    """The copy of one publication. tensors: of torch, by name. optimizers: their next steps wait.

    Attribute tensors: what is to be copied, under the same names. Raises ValueError for an optimizer without hooks.
    """

    def __init__(self, tensors: Mapping[str, Any], optimizers: Any) -> None:
        found = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
        # Their memory, also if a trainer has its parameters lie elsewhere meanwhile.
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._seen = _Seen(self.tensors)
        for name in self._seen.small:
            self.tensors[name] = self.tensors[name].clone()
        self._queued = _queued(self.tensors.values())
        self._ended = Future[None]()
        #: Held by the first caller that raises the error of the copy.
        self._raised = threading.Lock()
        #: What makes the copy. None: it has not begun, and no step waits.
        self._publication: Future[Any] | None = None
        self._hooks: list[Any] = []
        try:
            for optimizer in found:
                self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        except AttributeError as error:
            self.release()
            raise ValueError(
                f"optimizer: must be a torch.optim.Optimizer or several, got a {type(optimizer).__name__};"
                " give the one inside a wrapper"
            ) from error

    def __repr__(self) -> str:
        return f"<Copying {'over' if self._ended.done() else 'tensors'}, {len(self._hooks)} optimizers>"

    def run(self, copy: Callable[[], _T]) -> _T:
        """Call `copy`, which copies the tensors. Use in the publication's thread.

        Raises PublishError when a tensor changed meanwhile, and the errors of `copy`.
        """
        try:
            for event in self._queued:
                event.synchronize()
            result = copy()
            if (changed := self._seen.changed()) is not None:
                raise PublishError(
                    f"tensor {changed} was changed before it was copied, so nothing was published; give every"
                    " optimizer that changes weights, or call wait_copied() before you change them"
                )
        finally:
            self.forget()
        self._ended.set_result(None)
        return result

    def follow(self, publication: Future[Any]) -> None:
        """Steps wait from now on. When `publication` ends before the copy does, that ends the copy, too: with its error."""
        self._publication = publication
        publication.add_done_callback(self._publication_ended)

    def wait(self, timeout_s: float | None) -> None:
        """Return when the copy is whole. Raises what the copy raised, and TimeoutError."""
        error = self._ended.exception(timeout_s)
        if error is not None:
            self.claim_error()
            raise error

    def claim_error(self) -> bool:
        """True for the first caller: it raises the error of the copy."""
        return self._raised.acquire(blocking=False)

    def release(self) -> None:
        """Remove the hooks. Call between steps. May be called twice."""
        while self._hooks:
            self._hooks.pop().remove()

    def forget(self) -> None:
        """Let go of the tensors."""
        self.tensors.clear()
        self._seen.forget()

    def _before_step(self, *_: object) -> None:
        if self._publication is None:
            return
        error = self._ended.exception()
        if error is not None and self.claim_error():
            raise error

    def _publication_ended(self, publication: Future[Any]) -> None:
        if not self._ended.done():
            self._ended.set_exception(publication.exception())


class _Seen:
    """What tensors were when a publication began. tensors: the same dict at `changed`, but for the small ones.

    There may be many thousands. Then each call of torch for one of them takes time, and so do objects that Python's garbage
    collector looks at.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        #: The names of those that may change.
        self.small = [name for name, tensor in tensors.items() if tensor.nbytes < AT_ONCE_BYTES]
        # Inference tensors have no counter.
        self._versions = [
            None if tensor.nbytes < AT_ONCE_BYTES or tensor.is_inference() else tensor._version
            for tensor in tensors.values()
        ]
        large = [
            name
            for name, tensor in tensors.items()
            if tensor.nbytes >= AT_ONCE_BYTES and tensor.is_contiguous()
        ]
        large = large[:: max(1, -(-len(large) // SAMPLED_TENSORS))]
        count = max(1, min(SAMPLED_OF_ONE, SAMPLED_OF_ALL // max(1, len(large))))
        #: Views of some numbers of a tensor, by name, of each dtype and device.
        self._views: dict[Any, dict[str, Any]] = {}
        for name in large:
            tensor = tensors[name]
            # In several columns: rows have even lengths, and the step is odd.
            step = max(1, tensor.numel() // count) | 1
            view = tensor.as_strided((-(-tensor.numel() // step),), (step,))
            self._views.setdefault((tensor.dtype, tensor.device), {})[name] = view
        self._samples = {kind: _joined(views) for kind, views in self._views.items()}

    def changed(self) -> str | None:
        """A tensor that is not what it was."""
        for (name, tensor), version in zip(self._tensors.items(), self._versions, strict=True):
            if version is not None and tensor._version != version:
                return name
        for kind, views in self._views.items():
            before, now = self._samples[kind], _joined(views)
            if not now.equal(before):
                at = 0
                for name, view in views.items():
                    size = view.numel() * view.element_size()
                    if not now[at : at + size].equal(before[at : at + size]):
                        return name
                    at += size
        return None

    def forget(self) -> None:
        self._views.clear()
        self._samples.clear()


def _joined(views: Mapping[str, Any]) -> Any:
    """Their bytes, one after the other."""
    import torch

    return torch.cat([*views.values()]).view(torch.uint8)


def _queued(tensors: Iterable[Any]) -> list[Any]:
    """Events after which the tensors of devices have the values that they were given until now."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    if not devices:
        return []
    import torch

    return [torch.cuda.current_stream(device).record_event() for device in devices]
