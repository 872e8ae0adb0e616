"""A scheduler of vLLM (--scheduler-cls) that computes midstream's checks while vLLM is paused (mode keep), and nothing else.

It is vLLM's own, with other requests out of its sight for a step in a pause. They are in no step. They keep their KV, too, but
where no block is free for a check: then vLLM preempts one that it would have to preempt at its next steps. vLLM's newer model
runner has a slot for each request that runs or stands still. Where none is free there, one is preempted for a check, too.

Beside that it says which weights computed the KV of a request (midstream_vllm_provenance.py), and keeps that of sessions
between two turns (midstream_vllm_kv.py).

Always holds: outside such a step it schedules what vLLM's does. It is vLLM's own where ranks wait for each other in a step
(data parallelism), and where a connector may keep a check waiting for KV.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: The priority of a check that may be computed in a pause.
IN_PAUSE = -2
INTERFACE, QUEUES = "vllm.v1.core.sched.interface", "vllm.v1.core.sched.request_queue"
DIFFUSION = "vllm.v1.core.sched.diffusion_scheduler"
PROVENANCE, HOLDINGS = "midstream_vllm_provenance", "midstream_vllm_kv"


def scheduler(**given: Any) -> Any:
    """In the place of a class, as vLLM's depends on its configuration."""
    config = given["vllm_config"]
    ours, config.scheduler_config.scheduler_cls = config.scheduler_config.scheduler_cls, None
    own = config.scheduler_config.get_scheduler_cls()
    config.scheduler_config.scheduler_cls = ours
    diffusion = getattr(config, "diffusion_config", None) is not None
    if diffusion:
        # vLLM would have named it, if it had not been given ours.
        own = getattr(importlib.import_module(DIFFUSION), f"Diffusion{own.__name__}")
    if config.parallel_config.data_parallel_size == 1 and config.kv_transfer_config is None:
        if not diffusion:
            telling = importlib.import_module(PROVENANCE).telling(own)
            own = importlib.import_module(HOLDINGS).holding(telling)
        own = checking(own)
    return own(**given)


def checking(own: Any) -> Any:
    """vLLM's scheduler class with checks in a pause; itself if it is none that this module knows."""
    try:
        states = importlib.import_module(INTERFACE).PauseState
        paused, unpaused = states.PAUSED_ALL, states.UNPAUSED
        new_queue = importlib.import_module(QUEUES).create_request_queue
        init, unfinished, schedule = own.__init__, own.get_num_unfinished_requests, own.schedule
        set_state, _ = own.set_pause_state, own._preempt_request
    except (ImportError, AttributeError) as error:
        # This is another version of vLLM. midstream finds out that it checks nothing in a pause.
        print(f"midstream: the scheduler is vLLM's: {error}", flush=True)
        return own

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if not _has_slots(self):
            # Checks are admitted beside all that stand still. At the end of a pause their step may not be over.
            self.max_num_running_reqs += self.max_num_active_reqs

    def count(self: Any) -> int:
        return len(_checks(self)) if self.pause_state == paused else int(unfinished(self))

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        checks = _checks(self) if self.pause_state == paused else []
        if not checks:
            return schedule(self, *args, **kwargs)
        active = self.max_num_active_reqs
        if _has_slots(self):
            self.max_num_active_reqs = min(active, _free_slots(self, checks))
        hidden = _hide_others(self, checks, new_queue)
        self._pause_state = unpaused
        try:
            output = schedule(self, *args, **kwargs)
        finally:
            self._pause_state, self.max_num_active_reqs = paused, active
            computed = self.running
            _show(self, hidden)
        if not computed:
            self.midstream_waits_for_room = not _make_room(self, hidden.running)
        return output

    def change(self: Any, state: Any) -> None:
        self.midstream_waits_for_room = False
        set_state(self, state)

    members = {"get_num_unfinished_requests": count, "schedule": step, "set_pause_state": change}
    return type(
        "CheckingScheduler", (own,), {"__init__": begin, "midstream_waits_for_room": False, **members}
    )


@dataclass(frozen=True)
class Hidden:
    """The requests that are no checks, as a scheduler has them. waiting, holding: its queues."""

    running: list[Any]
    waiting: Any
    holding: Any


def _hide_others(scheduler: Any, checks: list[Any], new_queue: Callable[[Any], Any]) -> Hidden:
    """Leave the scheduler with queues that have checks alone."""
    others = [request for request in scheduler.running if request not in checks]
    hidden = Hidden(others, scheduler.waiting, scheduler.kv_holding_waiting)
    scheduler.running = [request for request in scheduler.running if request in checks]
    scheduler.waiting, scheduler.kv_holding_waiting = (new_queue(scheduler.policy) for _ in range(2))
    for request in [request for request in hidden.waiting if request in checks]:
        hidden.waiting.remove_request(request)
        scheduler.waiting.add_request(request)
    return hidden


def _show(scheduler: Any, hidden: Hidden) -> None:
    scheduler.running = hidden.running + scheduler.running
    hidden.waiting.prepend_requests(scheduler.waiting)
    hidden.holding.prepend_requests(scheduler.kv_holding_waiting)
    scheduler.waiting, scheduler.kv_holding_waiting = hidden.waiting, hidden.holding


def _checks(scheduler: Any) -> list[Any]:
    """That may be computed in a pause, and can be."""
    if scheduler.midstream_waits_for_room:
        return []
    return [r for r in (*scheduler.running, *scheduler.waiting) if r.priority == IN_PAUSE]


def _has_slots(scheduler: Any) -> bool:
    """Whether each running request holds a slot, of max_num_running_reqs, in a step or not."""
    return bool(getattr(scheduler, "use_v2_model_runner", False))


def _free_slots(scheduler: Any, checks: list[Any]) -> int:
    """Slots for checks. As many are free as there are checks, unless other checks have them."""
    others = [request for request in scheduler.running if request not in checks]
    while len(others) + len(checks) > scheduler.max_num_running_reqs and _make_room(scheduler, others):
        others = [request for request in others if request in scheduler.running]
    return int(scheduler.max_num_running_reqs) - len(others)


def _make_room(scheduler: Any, others: list[Any]) -> bool:
    """Free the KV of the request that is preempted first. False if none has any."""
    if not others:
        return False
    last = max(others, key=lambda request: (request.priority, request.arrival_time))
    scheduler.running.remove(last)
    scheduler._preempt_request(last, time.monotonic())
    return True
