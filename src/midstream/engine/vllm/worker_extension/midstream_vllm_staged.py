"""The part of the worker extension, on any device, that loads weights beside those that serve, while steps go on.

A twin of the model has modules of its own and shares what is no weight. One thread gives it parameters as a checkpoint has
them, and has vLLM load and process them there, as at a start. A switch is a call between two steps. On a CPU it exchanges
references, because packed weights lie in objects of kernels. On a device it copies, because graphs know the addresses.

Owns: the twin, its thread and its memory.
Always holds: what serves is as it was until the switch. A switch that cannot be made changes nothing. Weights are staged only
where the memory for them is free.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch

#: Steps go first. With a lower priority than this a busy core would keep the thread from ending.
NICENESS = 1
#: Free memory that is left beside what is staged, and the largest tensors of which a copy lies beside the first.
SPARE_BYTES, COPIES = 256 * 2**20, 4
#: Larger buffers that no checkpoint has are tables, which a twin shares.
BUFFER_MAX = 1 << 16
#: Of an instance: a loader of its own would load into the model that serves, and the mark would keep vLLM from processing.
NOT_SHARED = ("load_weights", "_already_called_process_weights_after_loading")
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
plans = importlib.import_module("midstream_vllm_plan")
NotStaged = plans.NotStaged


class _Dropped(Exception):
    """Nobody wants them any more."""


class WeightStage:
    """The weights that one worker stages, one model at a time. A call with the number of other weights is not for these."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._attempt: _Attempt | None = None
        # The last one that the thread was given. It does them in turn.
        self._loading: Future[None] | None = None
        # So that one model is freed before the next one takes memory.
        self._thread = ThreadPoolExecutor(1, "staging", initializer=_stand_back)

    def stage(self, number: int, path: str, *, moved: bool = False) -> str:
        """Begin to stage the files of a directory, in place of what is staged. Returns why not, or "".

        number: of these weights, for the other calls. moved: other weights of the same shapes, which a proof can tell from
        these.
        """
        if self._attempt is not None:
            self.drop(self._attempt.number)
        try:
            twin = _Twin(self._worker)
        except (NotStaged, ImportError, AttributeError) as error:
            return _said(error)
        dropped = threading.Event()
        loading = self._loading = self._thread.submit(twin.load, path, moved=moved, dropped=dropped)
        self._attempt = _Attempt(number, twin, loading, dropped)
        return ""

    def look(self, number: int) -> dict[str, Any]:
        """How far it is, and the kinds of modules that have weights.

        phase: staging, staged, failed (vLLM cannot load these weights) or refused (it may load them in place). why: of the
        last two.
        """
        attempt = self._attempt
        if attempt is None or attempt.number != number:
            return {"phase": "refused", "why": "other weights were asked for since", "kinds": []}
        phase, why = attempt.state()
        return {
            "phase": phase,
            "why": why,
            "kinds": sorted(attempt.twin.kinds()) if phase == "staged" else [],
        }

    def busy(self, number: int) -> str:
        """What the thread does, "" if nothing: it loads weights, and has set vLLM's config, which is one for all threads.

        vLLM makes a text of what a worker answers, and that of False is true.
        """
        return "loading" if self._loading is not None and not self._loading.done() else ""

    def switch(self, number: int, kinds: list[str] | None = None) -> None:
        """Serve what is staged; kinds: of these modules alone. Only between steps."""
        attempt = self._attempt
        if attempt is None or attempt.number != number or attempt.state()[0] != "staged":
            raise RuntimeError(f"the weights {number} are not staged: {self.look(number)}")
        attempt.twin.switch(kinds)

    def drop(self, number: int) -> None:
        """Free what is staged, or what a switch has replaced. Returns at once."""
        attempt = self._attempt
        if attempt is None or attempt.number != number:
            return
        self._attempt = None
        attempt.dropped.set()
        self._thread.submit(attempt.twin.free)


class _Attempt(NamedTuple):
    """dropped: set when nobody wants it any more."""

    number: int
    twin: _Twin
    loading: Future[None]
    dropped: threading.Event

    def state(self) -> tuple[str, str]:
        if not self.loading.done():
            return "staging", ""
        if (error := self.loading.exception()) is None:
            return "staged", ""
        refused = isinstance(error, (NotStaged, MemoryError, torch.OutOfMemoryError))
        # PyTorch's allocator for the CPU has no error of its own for that.
        refused = refused or "allocate memory" in str(error)
        return "refused" if refused else "failed", _said(error)


class _Twin:
    """A model beside the one that serves, for its weights alone: no step runs it.

    pairs: its modules with those that serve. It has none of the layers that vLLM wraps around modules for adapters: the
    weights lie in what these wrap, by the names of a checkpoint.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        runner = worker.model_runner
        model, config = runner.get_model(), runner.vllm_config
        if config.parallel_config.enable_eplb:
            raise NotStaged("vLLM moves experts between its ranks (--enable-eplb)")
        if getattr(config.model_config, "word_embeddings_untied_by_checkpoint", False):
            raise NotStaged("the checkpoint has an output layer that its config ties to the embeddings")
        self._device = worker.device
        self._on_cpu = self._device.type == "cpu"
        self.pairs: dict[str, tuple[Any, Any]] = {}
        # What vLLM did not set since, by the id of each twin.
        self._began: dict[int, dict[str, Any]] = {}
        # By the id of a parameter that serves, as modules may share one.
        self._tied: dict[int, Any] = {}
        # Bytes of each parameter, as a checkpoint has them.
        self._sizes: list[int] = []
        # Give the parameters their memory.
        self._prepared: list[Callable[[], None]] = []
        # What a switch does, each with the kind of its module.
        self._plan: list[tuple[str, Callable[[], None]]] = []
        self.root = self._of(model, "", {})

    def _check_room(self) -> None:
        """Raises NotStaged."""
        needed = sum(self._sizes) + COPIES * max(self._sizes, default=0) + SPARE_BYTES
        free = _free_memory(self._device, self._worker.parallel_config.world_size)
        if free < needed:
            raise NotStaged(f"it takes {needed >> 20} MiB of memory, and {free >> 20} MiB are free")

    def load(self, path: str, *, moved: bool, dropped: threading.Event) -> None:
        """Raises NotStaged, _Dropped, and what vLLM raises, which leaves what serves as it was."""
        self._check_room()
        config = self._worker.model_runner.vllm_config
        if moved and config.model_config.dtype == torch.float16:
            raise NotStaged("in float16 the numbers of the proof's weights might not be finite")
        loaders = importlib.import_module("vllm.model_executor.model_loader")
        loader = loaders.get_model_loader(config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise NotStaged(f"vLLM reloads no weights of the format {config.load_config.load_format}")
        model_config = copy.copy(config.model_config)
        model_config.model, model_config.revision = path, None
        if getattr(model_config, "model_weights", ""):
            model_config.model_weights = ""
        process = importlib.import_module(
            "vllm.model_executor.model_loader.utils"
        ).process_weights_after_loading
        current = importlib.import_module("vllm.config").set_current_vllm_config(config)
        with torch.no_grad(), current, _beside_steps(self._device):
            for prepare in self._prepared:
                prepare()
            found = _wanted(loader.get_all_weights(model_config, self.root), dropped, moved=moved)
            loaded = type(self.root).load_weights(self.root, found)
            _check_all_loaded(loader, self.root, loaded, quantized=model_config.quantization is not None)
            if dropped.is_set():
                raise _Dropped
            process(self.root, model_config, self._device)
            _finish(self._device)
        self._plan = plans.planned(self.pairs, self._began, on_cpu=self._on_cpu)

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self._plan}

    def switch(self, kinds: list[str] | None) -> None:
        chosen = [do for kind, do in self._plan if kinds is None or kind in kinds]
        with torch.no_grad():
            for do in chosen:
                do()
        _finish(self._device)

    def free(self) -> None:
        """Twins and their parameters refer to each other, so a collection of garbage alone would free them."""
        for _, twin in self.pairs.values():
            twin.__dict__.clear()
        self._plan, self._prepared = [], []
        self._began, self._tied = {}, {}
        self.pairs, self.root = {}, None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            # glibc keeps what it has from below 32 MiB, and that is most of a model.
            trim(0)

    # -- steps of making one

    def _of(self, live: Any, name: str, seen: dict[int, Any]) -> Any:
        """The twin of a module, with those below it."""
        live = _unwrapped(live)
        found = seen.get(id(live))
        if found is not None:
            return found
        # vLLM's classes have a __new__ of their own, which looks for a config.
        twin = seen[id(live)] = object.__new__(type(live))
        own = twin.__dict__
        own.update(live.__dict__)
        for key in NOT_SHARED:
            own.pop(key, None)
        for key, value in live.__dict__.items():
            if plans.is_helper(value):
                own[key] = copy.copy(value)
        own["_modules"] = {
            key: None if child is None else self._of(child, f"{name}.{key}", seen)
            for key, child in live._modules.items()
        }
        own["_parameters"], own["_buffers"] = {}, self._own_buffers(live)
        own["_non_persistent_buffers_set"] = set(live._non_persistent_buffers_set)
        self._began[id(twin)] = dict(own)
        self.pairs[name] = live, twin
        self._give_parameters(live, twin)
        return twin

    def _own_buffers(self, live: Any) -> dict[str, Any]:
        if not live._buffers:
            return {}
        parameters = {plans.address(p) for p in live.parameters() if p.numel()}
        own = {}
        for name, buffer in live._buffers.items():
            if buffer is not None and buffer.numel() and plans.address(buffer) in parameters:
                # vLLM makes other names for the storage of a parameter each time.
                continue
            table = (
                name in live._non_persistent_buffers_set
                and buffer is not None
                and buffer.numel() > BUFFER_MAX
            )
            own[name] = buffer if table or buffer is None else buffer.clone()
        return own

    def _give_parameters(self, live: Any, twin: Any) -> None:
        """As a checkpoint has them. They get their memory when the thread runs."""
        layerwise = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
        meta = importlib.import_module("vllm.model_executor.model_loader.reload.meta")
        info = layerwise.get_layerwise_info(live)
        recorded, _ = info.restore_metadata
        names = dict.fromkeys([*recorded, *(set(live._parameters) & meta.SKIP_TENSORS)])
        for name in names:
            serving = live._parameters.get(name)
            form = recorded.get(name)
            if form is None:
                if serving is None:
                    twin._parameters[name] = None
                    continue
                form = meta.to_meta_tensor(serving)
            if serving is None or id(serving) not in self._tied:
                self._sizes.append(form.numel() * form.element_size())
                if serving is not None:
                    self._tied[id(serving)] = None
            twin._parameters[name] = form
            self._prepared.append(self._preparing(live, twin, name, form, info.restore_device))

    def _preparing(self, live: Any, twin: Any, name: str, form: Any, device: Any) -> Callable[[], None]:
        meta = importlib.import_module("vllm.model_executor.model_loader.reload.meta")
        serving = live._parameters.get(name)

        def prepare() -> None:
            made = None if serving is None else self._tied.get(id(serving))
            if made is None:
                with device:
                    made = meta.materialize_meta_tensor(form)
                _rebind(made, live, twin)
                if serving is not None:
                    self._tied[id(serving)] = made
            twin._parameters[name] = made

        return prepare


def _unwrapped(module: Any) -> Any:
    """What a layer for adapters (BaseLayerWithLoRA) is wrapped around, or the module itself."""
    inner = module._modules.get("base_layer")
    return module if inner is None else _unwrapped(inner)


def _check_all_loaded(loader: Any, model: Any, loaded: set[str] | None, *, quantized: bool) -> None:
    """As strictly as vLLM checks it at a start. Raises NotStaged, and what vLLM raises."""
    if loaded is None:
        raise NotStaged("this model does not say which weights it has loaded")
    check = getattr(loader, "track_weights_loading", None)
    if check is not None and not quantized:
        check(model, set(loaded))
    # That check passes over modules whose weights vLLM processes. A start gives their parameters numbers, a twin does not.
    for name, parameter in model.named_parameters():
        if parameter.numel() and name not in loaded:
            raise NotStaged(f"{name} comes from no checkpoint")


def _rebind(tensor: Any, live: Any, twin: Any) -> None:
    """What a parameter calls of its module is called of the twin."""
    meta = importlib.import_module("vllm.model_executor.model_loader.reload.sanitize")
    for key, value in tensor.__dict__.items():
        # A reload leaves a loader of its own on what vLLM has recorded. It would load nothing here.
        while getattr(value, "__name__", "") == "online_process_loader":
            value = value.__wrapped__
        bound = isinstance(value, MethodType) and value.__self__ is live
        tensor.__dict__[key] = value.__func__.__get__(twin) if bound else value
    meta.restore_layer_refs(tensor, twin)


def _wanted(
    weights: Iterable[tuple[str, Any]], dropped: threading.Event, *, moved: bool
) -> Iterator[tuple[str, Any]]:
    for name, tensor in weights:
        if dropped.is_set():
            raise _Dropped
        yield name, _moved(tensor) if moved else tensor


def _moved(tensor: Any) -> Any:
    """Other weights of the same size: rows in another order, and half of what has no rows."""
    if tensor.dim() > 1 and len(tensor) > 1:
        bits = tensor.contiguous().view(torch.uint8)
        return torch.cat((bits[-1:], bits[:-1])).view(tensor.dtype)
    return tensor * 0.5 if tensor.is_floating_point() and tensor.element_size() > 1 else tensor


def _free_memory(device: Any, sharers: int) -> int:
    """Bytes that this worker may take, where so many share the machine."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + cached)
    if device.type != "cpu":
        raise NotStaged(f"it is not known how much memory of a {device.type} is free")
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    free = float(lines["MemAvailable"].split()[0]) * 1024
    return int(min(free, _free_in_group()) / max(1, sharers))


def _free_in_group() -> float:
    """Of a container's own limit."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        lines = dict(line.split(" ", 1) for line in (CGROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(lines["inactive_file"])
    return math.inf


def _stand_back() -> None:
    """Steps of this process go before this thread, which computes on one core."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


@contextlib.contextmanager
def _beside_steps(device: Any) -> Iterator[None]:
    """The work of this thread on a device does not wait for that of the steps, nor they for it."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream: Any = torch.cuda.Stream
    with torch.cuda.stream(stream(device)):
        yield


def _finish(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, NotStaged) else str(error)
