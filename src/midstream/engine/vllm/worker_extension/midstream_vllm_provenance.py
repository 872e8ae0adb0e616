"""Which weights computed the KV of each position, as vLLM's scheduler knows: a part of midstream_vllm_scheduler.py.

Weights have an epoch: the number before the colon of the version that midstream gives them (/update_weight_version), which it
does in a pause, while nothing is computed. A policy behind the number (adapters.py) says that its adapter alone was switched:
the others' epochs stay. Spans are (epoch, first position) of runs of positions, in their order. Each cached block has the spans
of all positions up to its end. A request that asks for it (KV in its `extra_args`) gets its spans with the first token behind
every change of them: in the place of a sampling mask, which vLLM passes on with the token as it is.

Always holds: KV of several epochs is used as it was computed. So of the cached blocks that fit, one is used only if its spans
begin with those of the block before it. A request that bounds the age of cached KV gets no older block. It is vLLM's own
scheduler for models and versions that this module does not know.
"""

from __future__ import annotations

import heapq
import importlib
import inspect
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

CORE, OUTPUT, LISTS = "vllm.v1.engine.core", "vllm.v1.engine", "vllm.v1.outputs"
KEYS = "vllm.v1.core.kv_cache_utils"
SPEC, MANAGER = "FullAttentionSpec", "FullAttentionManager"
COORDINATORS = ("UnitaryKVCacheCoordinator", "KVCacheCoordinatorNoPrefixCache")
#: The first parameters of what is stood around.
FORMS = [
    ["block_hashes", "max_cache_hit_length"],
    ["request", "blocks", "num_cached_blocks", "num_full_blocks"],
]
numbers, masks = map(importlib.import_module, ("midstream_vllm_numbers", "midstream_vllm_masks"))
#: Of equal blocks, so many are looked at. Each of many equal prompts that come at once leaves one.
EQUAL_MAX = 8
#: Policies whose switches are remembered: those whose adapters were switched last.
POLICIES_MAX = 10_000
#: Epoch, first position.
Spans = tuple[tuple[int, int], ...]


def until(spans: Spans, end: int) -> Spans:
    """Those of the positions before `end`."""
    if spans and spans[-1][1] < end:
        return spans
    return tuple(span for span in spans if span[1] < end)


def continued(spans: Spans, epoch: int, start: int) -> Spans:
    """From position `start` on, `epoch` computes them."""
    before = until(spans, start)
    return before if before and before[-1][0] == epoch else (*before, (epoch, start))


class KvHistory:
    """The spans of cached blocks and of requests. size: tokens of a block."""

    def __init__(self, size: int) -> None:
        self._size = size
        # By the id of the block.
        self._cached: dict[int, Spans] = {}
        self._unnamed = -1
        # The epochs that began for all, and those that began for one policy alone, in their order.
        self._began = [-1]
        self._of_policy: OrderedDict[str, list[int]] = OrderedDict()
        # By the id of the request: those whose spans have to be told, with the spans.
        self._fresh: dict[str, tuple[Any, Spans]] = {}
        # Steps that are not over, and what each has to tell.
        self._steps: deque[tuple[Any, dict[str, tuple[Any, Spans]]]] = deque()

    def switch(self, version: str, requests: Iterable[Any]) -> None:
        """Nothing is computed now. What is computed from now on, by all or by one policy, is of `version`."""
        policy = self._begin(version)
        for request in requests:
            spans: Spans | None = getattr(request, "midstream_spans", None)
            if spans and request.num_computed_tokens and policy in ("", _policy(request)):
                self._is(request, continued(spans, self.epoch_of(request), request.num_computed_tokens))

    def _begin(self, version: str) -> str:
        """Returns the policy; "" for all."""
        number, _, policy = version.partition(":")[0].partition(" ")
        if number.isdecimal():
            epoch = int(number)
        else:
            # Others named it. It is none that a label stands for, and unlike all others.
            policy, self._unnamed = "", self._unnamed - 1
            epoch = self._unnamed
        if policy:
            self._of_policy.setdefault(policy, []).append(epoch)
            self._of_policy.move_to_end(policy)
            if len(self._of_policy) > POLICIES_MAX:
                self._of_policy.popitem(last=False)
            return policy
        if epoch <= self._began[-1]:
            # Somebody begins to count again.
            self._began.clear()
            self._of_policy.clear()
        self._began.append(epoch)
        return ""

    def epoch_of(self, request: Any) -> int:
        """Of what computes its positions now."""
        return next(self._newest_first(request))

    def _newest_first(self, request: Any) -> Iterator[int]:
        """The epochs that began for it."""
        own = self._of_policy.get(_policy(request), ())
        return (
            heapq.merge(reversed(self._began), reversed(own), reverse=True) if own else reversed(self._began)
        )

    def admit(self, request: Any, cached: Spans, count: int) -> None:
        """What the request has: so many cached positions. The others are to be computed."""
        self._is(request, continued(cached, self.epoch_of(request), count))

    def _is(self, request: Any, spans: Spans) -> None:
        if spans == getattr(request, "midstream_spans", None):
            return
        request.midstream_spans = spans
        if _asked(request)[0]:
            self._fresh[request.request_id] = (request, spans)

    def cache(self, request: Any, blocks: Sequence[Any], first: int, end: int) -> None:
        """These of its blocks are full, and can be found from now on."""
        for number in range(first, end):
            self._cached[blocks[number].block_id] = until(request.midstream_spans, (number + 1) * self._size)

    def longest(self, request: Any, candidates: Iterable[Sequence[Any]]) -> tuple[list[Any], Spans]:
        """The longest chain of blocks that were computed one behind the other. Of equally long ones, the youngest.

        candidates: of each place, the blocks of its tokens.
        """
        oldest = self._oldest(request)
        # By the spans so far: the chain, as (the chain before, its last block).
        ways: dict[Spans, Any] = {(): None}
        for number, blocks in enumerate(candidates):
            further: dict[Spans, Any] = {}
            for block in blocks:
                spans = self._cached.get(block.block_id, ())
                before = until(spans, number * self._size)
                if spans and before in ways and (oldest is None or spans[0][0] >= oldest):
                    further.setdefault(spans, (ways[before], block))
            if not further:
                break
            ways = further
        spans = max(ways, key=lambda spans: [epoch for epoch, _ in spans])
        found, way = [], ways[spans]
        while way is not None:
            way, block = way
            found.append(block)
        return found[::-1], spans

    def _oldest(self, request: Any) -> int | None:
        age_max = _asked(request)[1]
        return None if age_max < 0 else next(islice(self._newest_first(request), age_max, None), None)

    def scheduled(self, step: Any, names: Any) -> None:
        """A step begins, with these requests in it."""
        if not self._fresh:
            return
        telling = {name: told for name, told in self._fresh.items() if name in names}
        if telling:
            self._steps.append((step, telling))
        gone = [name for name, (request, _) in self._fresh.items() if request.is_finished()]
        for name in gone:
            del self._fresh[name]

    def told(self, step: Any) -> dict[str, tuple[Any, Spans]]:
        """What the outputs of a step have to tell, by request. Steps end in the order in which they begin."""
        if any(begun is step for begun, _ in self._steps):
            while self._steps:
                begun, telling = self._steps.popleft()
                if begun is step:
                    return telling
        return {}

    def tell(self, output: Any, told: tuple[Any, Spans]) -> np.ndarray:
        """What is told with an output that has a token."""
        request, spans = told
        if self._fresh.get(output.request_id) is told:
            del self._fresh[output.request_id]
        before = request.num_output_tokens - len(output.new_token_ids)
        return np.array([before, *(number for span in spans for number in span)], dtype=np.int64)


def _asked(request: Any) -> tuple[bool, int]:
    told, age_max = numbers.said(request.sampling_params, numbers.KV, (0, numbers.ANY_AGE))
    return bool(told), age_max


def _policy(request: Any) -> str:
    """What the name of its adapter begins with; "" without one."""
    adapter = getattr(request, "lora_request", None)
    return "" if adapter is None else str(adapter.lora_name).rpartition("@")[0]


def telling(own: Any) -> Any:
    """vLLM's scheduler class with a history, and with what workers say of tokens; itself if it is none that this knows."""
    try:
        core = importlib.import_module(CORE).EngineCore
        lists = importlib.import_module(LISTS).SamplingMaskLists
        group_key = importlib.import_module(KEYS).make_block_hash_with_group_id
        if "new_sampling_mask" not in importlib.import_module(OUTPUT).EngineCoreOutput.__struct_fields__:
            raise AttributeError("its outputs have no new_sampling_mask")
        init, schedule, update, _ = (
            own.__init__,
            own.schedule,
            own.update_from_output,
            core.set_weight_version,
        )
    except (ImportError, AttributeError) as error:
        # This is another version of vLLM. midstream finds out that it tells nothing.
        print(f"midstream: the scheduler does not say which weights computed KV: {error}", flush=True)
        return own

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.midstream_history = None
        try:
            why = why_not(self)
        except AttributeError as error:
            why = str(error)
        if why:
            print(f"midstream: the scheduler does not say which weights computed KV: {why}", flush=True)
            return
        self.midstream_history = keep(self, group_key)
        hear(core)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        if self.midstream_history is not None:
            self.midstream_history.scheduled(output, output.num_scheduled_tokens)
        return output

    def take(self: Any, scheduler_output: Any, answer: Any, *args: Any, **kwargs: Any) -> Any:
        history = self.midstream_history
        told = {} if history is None else history.told(scheduler_output)
        beside = masks.of(answer)
        outputs = update(self, scheduler_output, answer, *args, **kwargs)
        every = (output for of_client in outputs.values() for output in of_client.outputs)
        for output in every if told or beside else ():
            name = output.request_id
            if not output.new_token_ids:
                continue
            saying = [history.tell(output, told[name])] if name in told else []
            saying += masks.without_passes(beside.get(name, ()), output)
            if saying:
                output.new_sampling_mask = masks.joined(saying, lists)
        return outputs

    return type("TellingScheduler", (own,), {"__init__": begin, "schedule": step, "update_from_output": take})


def why_not(scheduler: Any) -> str:
    """Why the spans of its requests would not be known; empty if they are."""
    coordinator = scheduler.kv_cache_manager.coordinator
    managers, kind = coordinator.single_type_managers, type(coordinator).__name__
    specs = [type(manager.kv_cache_spec).__name__ for manager in managers]
    # Latents (MLA) have a spec of their own: the weights of a later pass expand them.
    if specs != [SPEC] or type(managers[0]).__name__ != MANAGER or kind not in COORDINATORS:
        return f"its KV cache is of another kind than full attention: {', '.join(specs)}"
    if getattr(managers[0].kv_cache_spec, "non_causal", False):
        return "its positions see later ones"
    if getattr(scheduler, "prefix_replay_tokens", 0):
        return "it computes a part of cached prompts again"
    if scheduler.vllm_config.speculative_config is not None:
        return "it decodes speculatively"
    pool = scheduler.kv_cache_manager.block_pool
    forms = [_names(coordinator.find_longest_cache_hit), _names(pool.cache_full_blocks)[:4]]
    if forms != FORMS or not isinstance(pool.cached_block_hash_to_block._cache, dict):
        return "it keeps its cached blocks in another way"
    return "it runs with --return-sampling-mask" if scheduler.return_sampling_mask else ""


def _names(method: Any) -> list[str]:
    return [*inspect.signature(method).parameters]


def keep(scheduler: Any, group_key: Any) -> KvHistory:
    """Have everything that is found in the cache, or put there, go through a history."""
    manager = scheduler.kv_cache_manager
    pool, coordinator = manager.block_pool, manager.coordinator
    size = coordinator.single_type_managers[0].block_size
    history = KvHistory(size)
    look_up, cache_full = manager.get_computed_blocks, pool.cache_full_blocks
    # The one that is looking, and what it found.
    asking: list[Any] = []
    found: list[Spans] = []

    def find(block_hashes: Any, max_cache_hit_length: int) -> Any:
        places = (_named(pool, group_key(each, 0)) for each in block_hashes[: max_cache_hit_length // size])
        blocks, spans = history.longest(asking[-1], places)
        found.append(spans)
        return (blocks,), len(blocks) * size, 0

    def get_computed_blocks(request: Any) -> Any:
        asking.append(request)
        try:
            answer = look_up(request)
        finally:
            asking.clear()
            spans = found.pop() if found else ()
        history.admit(request, spans, answer[1])
        return answer

    def cache_full_blocks(
        request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, **more: Any
    ) -> Any:
        history.cache(request, blocks, num_cached_blocks, num_full_blocks)
        places = {"num_cached_blocks": num_cached_blocks, "num_full_blocks": num_full_blocks}
        return cache_full(request=request, blocks=blocks, **places, **more)

    coordinator.find_longest_cache_hit = find
    manager.get_computed_blocks, pool.cache_full_blocks = get_computed_blocks, cache_full_blocks
    return history


def _named(pool: Any, key: Any) -> Sequence[Any]:
    """The cached blocks of a hash, the last one first."""
    found = pool.cached_block_hash_to_block._cache.get(key)
    if found is None:
        return ()
    return tuple(islice(reversed(found.values()), EQUAL_MAX)) if isinstance(found, dict) else (found,)


def hear(core: Any) -> None:
    """Have the scheduler hear how weights are called from now on."""
    own = core.set_weight_version
    if hasattr(own, "midstream"):
        return

    def set_weight_version(self: Any, weight_version: str) -> Any:
        answer = own(self, weight_version)
        history = getattr(self.scheduler, "midstream_history", None)
        if history is not None:
            history.switch(weight_version, self.scheduler.requests.values())
        return answer

    set_weight_version.midstream = True  # type: ignore[attr-defined]
    core.set_weight_version = set_weight_version
