"""For whom the KV cache holds what, and what is evicted first: a part of midstream_vllm_scheduler.py.

A request names its session (SESSION in its `extra_args`). When it ends or is preempted, the session claims its cached blocks
until the next turn takes them up (midstream/engine/claims.py, as in the embedded engine). The engine core answers LOOK, a call
that vLLM would hand to its workers, with what the cache holds. The call says which sessions are over, too.

Always holds: a claim pins nothing. vLLM counts claimed blocks as free, admits and preempts as if they were, and gets them when
it has no other. What is evicted first: blocks without content, those that ended sessions had alone, all others without a claim
in vLLM's order, and then claims, one after the other. It is vLLM's own scheduler for models and versions that this module does
not know.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

CORE = "vllm.v1.engine.core"
CLAIMS = Path(__file__).parents[2] / "claims.py"
SPEC, MANAGER = "FullAttentionSpec", "FullAttentionManager"
numbers = importlib.import_module("midstream_vllm_numbers")


def claims_module() -> ModuleType:
    """midstream is not installed where vLLM is, so the file is loaded by its path. Raises OSError."""
    name = "midstream_claims"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, CLAIMS)
        assert spec is not None
        assert spec.loader is not None
        # Its dataclasses look for their module while it is loaded.
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except OSError:
            del sys.modules[name]
            raise
    return sys.modules[name]


@dataclass(frozen=True, slots=True)
class CachedPlace:
    """What a block of vLLM has in it. key: as vLLM finds it, by salt, adapter and tokens: equal ones are equal."""

    block: Any = field(compare=False)
    key: Any

    @property
    def kept(self) -> bool:
        return bool(self.block.block_hash == self.key)


class ClaimedLine:
    """vLLM's line of free blocks, with those that sessions claim, or had alone when they ended, taken out of it.

    queue: the line. Its count of free blocks still includes all of them. evicted: blocks that were taken while claimed.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        # Of blocks that are in use, too: their claims, the session of the last one, and those that several sessions had.
        self._claims: dict[int, int] = {}
        self._claimant: dict[int, str] = {}
        self._shared: set[int] = set()
        self._held: dict[int, Any] = {}
        self._ended: OrderedDict[int, Any] = OrderedDict()
        # Blocks in vLLM's own line that have content, and how many more it is to have.
        self._cached = 0
        self._wanted = 0
        self.evicted = 0
        #: Is called when vLLM's line is too short, and gives up claims.
        self.on_need: Any = lambda: None
        self._pop, self._remove, self._append = queue.popleft_n, queue.remove, queue.append_n
        # What is put at the front of the line has no content.
        queue.popleft_n, queue.remove, queue.append_n = self.take, self.remove, self.put

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def loose(self) -> int:
        return self._cached + len(self._ended)

    @property
    def gives(self) -> bool:
        return self._in_line >= self._wanted

    @property
    def _in_line(self) -> int:
        return int(self._queue.num_free_blocks) - len(self._held) - len(self._ended)

    def take(self, count: int) -> list[Any]:
        """The blocks to be used next. As vLLM has it, there are so many."""
        taken: list[Any] = list(self._pop(min(count, self._in_line - self._cached)))
        while len(taken) < count and self._ended:
            taken.append(self._ended.popitem(last=False)[1])
            self._queue.num_free_blocks -= 1
        rest = count - len(taken)
        if (short := rest - self._in_line) > 0:
            self._wanted = rest
            self.on_need()
            self._wanted = 0
            self.evicted += short
        self._cached -= rest
        taken += self._pop(rest)
        for block in taken:
            self._claims.pop(block.block_id, None)
            self._claimant.pop(block.block_id, None)
            self._shared.discard(block.block_id)
        return taken

    def remove(self, block: Any) -> None:
        """It is used again with what is in it."""
        for aside in (self._held, self._ended):
            if aside.pop(block.block_id, None) is not None:
                self._queue.num_free_blocks -= 1
                return
        self._remove(block)
        self._cached -= block.block_hash is not None

    def put(self, blocks: Iterable[Any]) -> None:
        """Nobody uses them any more."""
        into_line = []
        for block in blocks:
            if self._claims.get(block.block_id):
                self._held[block.block_id] = block
                self._queue.num_free_blocks += 1
            else:
                into_line.append(block)
        self._cached += sum(block.block_hash is not None for block in into_line)
        self._append(into_line)

    def claim(self, place: CachedPlace, session: str) -> None:
        """The session claims the place, whose block is in use. It may have other claims on it."""
        number = place.block.block_id
        self._claims[number] = self._claims.get(number, 0) + 1
        if self._claimant.get(number, session) != session:
            self._shared.add(number)
        self._claimant[number] = session

    def unclaim(self, place: CachedPlace, *, ended: bool = False) -> None:
        """Drop one claim on a place that is kept. ended: with its session; if no other session had it, it goes first."""
        number = place.block.block_id
        if (left := self._claims.pop(number, 1) - 1) > 0:
            self._claims[number] = left
            return
        block = self._held.pop(number, None)
        if block is None:
            return
        if ended and number not in self._shared:
            self._ended[number] = block
            self._ended.move_to_end(number, last=False)
        else:
            self._queue.num_free_blocks -= 1
            self.put([block])

    def emptied(self, block: Any) -> None:
        """vLLM took away its content. If nobody uses it, it is the first to be used."""
        number = block.block_id
        for left in (self._claims, self._claimant):
            left.pop(number, None)
        self._shared.discard(number)
        if block.ref_cnt:
            return
        if self._held.pop(number, None) is None and self._ended.pop(number, None) is None:
            self._remove(block)
            self._cached -= 1
        else:
            self._queue.num_free_blocks -= 1
        self._queue.prepend_n([block])

    def clear(self) -> None:
        """No block has content any more."""
        aside = [*self._held.values(), *self._ended.values()]
        for left in (self._claims, self._claimant, self._shared, self._held, self._ended):
            left.clear()
        self._queue.num_free_blocks -= len(aside)
        self._append(aside)
        self._cached = 0


class KvHoldings:
    """The claims of sessions on the cache of one scheduler. size: tokens of a block. blocks_of: by the id of a request."""

    def __init__(
        self,
        pool: Any,
        size: int,
        blocks_of: Any,
        claims: ModuleType,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._pool, self._size, self._blocks_of = pool, size, blocks_of
        # The last content of each block. Sessions that have a prefix share its places.
        self._known: dict[int, CachedPlace] = {}
        self._line = ClaimedLine(pool.free_block_queue)
        self._claims, self._return = claims.Claims(self._line), claims.Return
        self._parts = claims.SaltParts.of
        self._line.on_need = lambda: self._claims.give_up(clock())
        reset = pool.reset_prefix_cache
        evict: Any = getattr(pool, "evict_blocks", None)

        def reset_prefix_cache() -> Any:
            done = reset()
            if done:
                self._end(list({claim.session for claim in self._claims}))
                self._line.clear()
            return done

        def evict_blocks(numbers: Iterable[int]) -> None:
            """Of blocks that could not be loaded. What is behind them in a claim is of no use."""
            emptied = [pool.blocks[number] for number in numbers]
            emptied = [block for block in emptied if block.block_hash is not None]
            evict(numbers)
            for block in emptied:
                self._line.emptied(block)
            self._claims.cut()

        pool.reset_prefix_cache = reset_prefix_cache
        if evict is not None:
            pool.evict_blocks = evict_blocks

    def begins(self, request: Any, found: int) -> None:
        """It is computed from now on, behind so many cached tokens."""
        session = _asked(request)[0]
        if session:
            matched = self._places(self._blocks_of.get(request.request_id, ())[: found // self._size])
            levels = request.num_tokens // self._size
            self._claims.take_up(session, self._salt(request), matched, levels)

    def leaves(self, request: Any) -> None:
        """Its blocks are about to be released. One that was preempted comes back before all others."""
        session, returns_s, kept_s = _asked(request)
        if session and kept_s > 0:
            returns = self._return(returns_s if request.is_finished() else 0.0, kept_s)
            path = self._places(self._blocks_of.get(request.request_id, ()))
            self._claims.add(session, self._salt(request), path, returns, self._clock())

    def look(self, ended: Iterable[str] = ()) -> dict[str, int]:
        """As midstream.core.kv has it, behind the end of these sessions."""
        self._end(ended)
        line, total = self._line, self._pool.num_gpu_blocks - 1
        return {
            "block_tokens": self._size,
            "total": total,
            "used": total - self._pool.get_num_free_blocks(),
            "held": line.held,
            "loose": line.loose,
            "missing": self._claims.missing,
            "evicted_tokens": line.evicted * self._size,
            "again_tokens": self._claims.needed_again * self._size,
        }

    def _places(self, blocks: Iterable[Any]) -> list[CachedPlace]:
        """The first ones, as far as all are cached."""
        found = []
        for block in blocks:
            number, key = block.block_id, block.block_hash
            if key is None:
                break
            place = self._known.get(number)
            if place is None or place.key != key:
                place = self._known[number] = CachedPlace(block, key)
            found.append(place)
        return found

    def _salt(self, request: Any) -> Any:
        adapter = getattr(request, "lora_request", None)
        return self._parts(request.cache_salt or "", "" if adapter is None else str(adapter.lora_name))

    def _end(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            self._claims.end(session)


def _asked(request: Any) -> tuple[str, float, float]:
    """The session, when its next turn is likely, and how long its KV is kept for that, in seconds."""
    session, returns_s, kept_s = numbers.said(request.sampling_params, numbers.SESSION, ("", 0.0, 0.0))
    return session, returns_s, kept_s


def holding(own: Any) -> Any:
    """vLLM's scheduler class with claims of sessions; itself if it is none that this module knows."""
    try:
        core = importlib.import_module(CORE).EngineCore
        claims = claims_module()
        init, schedule, free, _ = own.__init__, own.schedule, own._free_request_blocks, core.collective_rpc
    except (ImportError, AttributeError, OSError) as error:
        # This is another version of vLLM, or other files. midstream finds out that it answers nothing.
        print(f"midstream: the scheduler keeps no KV for sessions: {error}", flush=True)
        return own

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.midstream_holdings = None
        try:
            managers = self.kv_cache_manager.coordinator.single_type_managers
            self.midstream_unheld = why_not(managers)
            if not self.midstream_unheld:
                pool, only = self.kv_cache_manager.block_pool, managers[0]
                self.midstream_holdings = KvHoldings(pool, only.block_size, only.req_to_blocks, claims)
        except AttributeError as error:
            self.midstream_unheld = str(error)
        hear(core)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        if self.midstream_holdings is not None:
            for name, found in _begun(output):
                self.midstream_holdings.begins(self.requests[name], found)
        return output

    def release(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self.midstream_holdings is not None:
            self.midstream_holdings.leaves(request)
        return free(self, request, *args, **kwargs)

    return type(
        "HoldingScheduler", (own,), {"__init__": begin, "schedule": step, "_free_request_blocks": release}
    )


def why_not(managers: Sequence[Any]) -> str:
    """Why the blocks of a request are not its positions in their order; empty if they are."""
    specs = [type(manager.kv_cache_spec).__name__ for manager in managers]
    if specs != [SPEC] or type(managers[0]).__name__ != MANAGER:
        return f"its KV cache is of another kind than full attention: {', '.join(specs)}"
    return ""


def _begun(output: Any) -> Iterable[tuple[str, int]]:
    """Requests that a step gives blocks for the first time, or again, with the cached tokens of each."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    again = output.scheduled_cached_reqs
    if again.resumed_req_ids:
        for name, found in zip(again.req_ids, again.num_computed_tokens, strict=True):
            if name in again.resumed_req_ids:
                yield name, found


def hear(core: Any) -> None:
    """Have the engine core answer LOOK itself from now on."""
    own = core.collective_rpc
    if hasattr(own, "midstream"):
        return

    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        if method != numbers.LOOK:
            return own(self, method, timeout, args, kwargs)
        holdings = self.scheduler.midstream_holdings
        if holdings is None:
            return [{"why": self.scheduler.midstream_unheld}]
        return [holdings.look(**(kwargs or {}))]

    collective_rpc.midstream = True  # type: ignore[attr-defined]
    core.collective_rpc = collective_rpc
