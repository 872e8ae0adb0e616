"""midstream's scheduler of vLLM: in a pause it computes checks alone, and outside of one it is vLLM's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from midstream.engine.vllm.arguments import SCHEDULER, WORKER_DIR
from midstream.engine.vllm.server_info import Config
from midstream.engine.vllm.worker_extension import midstream_vllm_scheduler as module

UNPAUSED, PAUSED_ALL = "unpaused", "paused"


@dataclass(eq=False)
class Asked:
    name: str
    priority: int = 0
    arrival_time: float = 0.0
    blocks: int = 1


@dataclass
class Queue:
    """Of the form of vLLM's, by priority."""

    asked: list[Asked] = field(default_factory=list)

    def __iter__(self) -> Iterator[Asked]:
        return iter(sorted(self.asked, key=lambda a: (a.priority, a.arrival_time)))

    def remove_request(self, request: Asked) -> None:
        self.asked.remove(request)

    def add_request(self, request: Asked) -> None:
        self.asked.append(request)

    def prepend_requests(self, requests: Any) -> None:
        self.asked += requests


class Own:
    """Of the form of vLLM's scheduler, with so many free blocks. A check is over in the step after its own."""

    use_v2_model_runner = False

    def __init__(self, free: int = 2) -> None:
        self.policy = "priority"
        self._pause_state = UNPAUSED
        self.running: list[Asked] = []
        self.waiting, self.kv_holding_waiting = Queue(), Queue()
        self.free = free
        self.max_num_running_reqs = self.max_num_active_reqs = 3
        self.fails = False

    @property
    def pause_state(self) -> str:
        return self._pause_state

    def set_pause_state(self, state: str) -> None:
        self._pause_state = state

    def get_num_unfinished_requests(self) -> int:
        return 0 if self._pause_state == PAUSED_ALL else len(self.running) + len([*self.waiting])

    def schedule(self, throttle_prefills: bool = False) -> Any:
        assert not throttle_prefills
        scheduled = [asked.name for asked in self.running if asked.priority != module.IN_PAUSE]
        if self._pause_state == PAUSED_ALL:
            return []
        for asked in self.waiting:
            if asked.blocks <= self.free and len(self.running) < self.max_num_active_reqs:
                self.free -= asked.blocks
                self.waiting.remove_request(asked)
                self.running.append(asked)
                scheduled.append(asked.name)
        if self.fails:
            raise RuntimeError("no step")
        assert len(self.running) <= self.max_num_running_reqs
        return scheduled

    def _preempt_request(self, request: Asked, _timestamp: float) -> None:
        assert request not in self.running
        self.free += request.blocks
        self.waiting.add_request(request)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    states = SimpleNamespace(PauseState=SimpleNamespace(PAUSED_ALL=PAUSED_ALL, UNPAUSED=UNPAUSED))
    monkeypatch.setitem(sys.modules, module.INTERFACE, states)
    monkeypatch.setitem(
        sys.modules, module.QUEUES, SimpleNamespace(create_request_queue=lambda policy: Queue())
    )
    made = module.checking(Own)()
    for number in range(2):
        made.waiting.add_request(Asked(f"r{number}", number, float(number)))
    assert made.schedule() == ["r0", "r1"]
    made.waiting.add_request(Asked("waits", 1))
    made.set_pause_state(PAUSED_ALL)
    return made


def check(name: str = "check") -> Asked:
    return Asked(name, module.IN_PAUSE)


def names(scheduler: Any) -> tuple[list[str], list[str]]:
    return [a.name for a in scheduler.running], [a.name for a in scheduler.waiting]


def test_a_check_alone_is_computed_in_a_pause(scheduler: Any) -> None:
    assert (scheduler.get_num_unfinished_requests(), scheduler.schedule()) == (0, [])
    scheduler.free = 1
    scheduler.waiting.add_request(check())
    assert scheduler.get_num_unfinished_requests() == 1
    assert scheduler.schedule() == ["check"]
    assert names(scheduler) == (["r0", "r1", "check"], ["waits"])
    assert scheduler.pause_state == PAUSED_ALL
    # Its step is not over, and nothing is preempted for it.
    assert scheduler.schedule() == []
    assert names(scheduler) == (["r0", "r1", "check"], ["waits"])
    scheduler.running.pop()
    assert (scheduler.get_num_unfinished_requests(), scheduler.schedule()) == (0, [])
    # And another one.
    scheduler.free = 1
    scheduler.waiting.add_request(check("next"))
    assert scheduler.schedule() == ["next"]
    scheduler.running.pop()
    scheduler.set_pause_state(UNPAUSED)
    scheduler.free = 1
    assert scheduler.schedule() == ["r0", "r1", "waits"]


def test_a_check_is_admitted_beside_all_seats_and_may_outlive_the_pause(scheduler: Any) -> None:
    scheduler.set_pause_state(UNPAUSED)
    scheduler.free = 3
    assert scheduler.schedule() == ["r0", "r1", "waits"]
    scheduler.set_pause_state(PAUSED_ALL)
    scheduler.waiting.add_request(check())
    assert scheduler.schedule() == ["check"]
    scheduler.set_pause_state(UNPAUSED)
    assert scheduler.schedule() == ["r0", "r1", "waits"]


@pytest.mark.parametrize("checks", [1, 2, 4])
def test_a_runner_with_slots_never_has_more_requests_than_these(
    monkeypatch: pytest.MonkeyPatch, scheduler: Any, checks: int
) -> None:
    monkeypatch.setattr(Own, "use_v2_model_runner", True)
    made = module.checking(Own)()
    made.free = 9
    for number in range(3):
        made.waiting.add_request(Asked(f"r{number}", number, float(number)))
    assert made.schedule() == ["r0", "r1", "r2"]
    made.set_pause_state(PAUSED_ALL)
    given = [check(f"c{number}") for number in range(checks)]
    for asked in given:
        made.waiting.add_request(asked)
    assert made.schedule() == [asked.name for asked in given[:3]]
    kept = [f"r{number}" for number in range(max(3 - checks, 0))]
    assert [a.name for a in made.running] == kept + [a.name for a in given[:3]]
    # Their step is not over, and no other request loses its slot for it.
    assert made.schedule() == []
    assert [a.name for a in made.running] == kept + [a.name for a in given[:3]]
    assert made.max_num_active_reqs == 3
    for asked in given[:3]:
        made.running.remove(asked)
    assert made.schedule() == [asked.name for asked in given[3:]]
    made.running = [asked for asked in made.running if asked not in given]
    made.set_pause_state(UNPAUSED)
    assert sorted(made.schedule()) == ["r0", "r1", "r2"]


def test_a_check_without_room_has_the_last_of_the_lowest_priority_preempted(scheduler: Any) -> None:
    assert scheduler.free == 0
    scheduler.waiting.add_request(check())
    assert scheduler.schedule() == []
    assert names(scheduler) == (["r0"], ["check", "waits", "r1"])
    assert scheduler.get_num_unfinished_requests() == 1
    assert scheduler.schedule() == ["check"]
    assert names(scheduler) == (["r0", "check"], ["waits", "r1"])


def test_a_check_that_can_have_no_room_waits_for_the_end_of_the_pause(scheduler: Any) -> None:
    large = check()
    large.blocks = 99
    scheduler.waiting.add_request(large)
    for left in (1, 1, 0):
        assert scheduler.schedule() == []
        assert scheduler.get_num_unfinished_requests() == left
    assert names(scheduler) == ([], ["check", "r0", "waits", "r1"])
    scheduler.set_pause_state(UNPAUSED)
    assert scheduler.schedule() == ["r0", "waits"]


def test_a_step_that_fails_loses_no_request(scheduler: Any) -> None:
    scheduler.kv_holding_waiting.add_request(Asked("holds"))
    scheduler.waiting.add_request(check())
    scheduler.fails = True
    scheduler.free = 1
    with pytest.raises(RuntimeError):
        scheduler.schedule()
    assert names(scheduler) == (["r0", "r1", "check"], ["waits"])
    assert [a.name for a in scheduler.kv_holding_waiting] == ["holds"]
    assert scheduler.pause_state == PAUSED_ALL


def test_another_version_of_vllm_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module.INTERFACE, SimpleNamespace())
    assert module.checking(Own) is Own
    assert "the scheduler is vLLM's" in capsys.readouterr().out


@pytest.mark.parametrize("diffusion", [True, False])
def test_the_scheduler_is_made_of_the_one_that_vllm_would_make(
    monkeypatch: pytest.MonkeyPatch, scheduler: Any, diffusion: bool
) -> None:
    class Given(Own):
        def __init__(self, vllm_config: Any, block_size: int) -> None:
            super().__init__(block_size)

    monkeypatch.syspath_prepend(str(WORKER_DIR))
    other = type("Scheduler", (), {})
    monkeypatch.setitem(sys.modules, module.DIFFUSION, SimpleNamespace(DiffusionScheduler=Given))

    class Config:
        scheduler_cls: Any = "midstream_vllm_scheduler.scheduler"

        def get_scheduler_cls(self) -> type:
            assert self.scheduler_cls is None, "it would be this one again"
            return other if diffusion else Given

    config = SimpleNamespace(
        scheduler_config=Config(),
        diffusion_config={} if diffusion else None,
        parallel_config=SimpleNamespace(data_parallel_size=1),
        kv_transfer_config=None,
    )
    made = module.scheduler(vllm_config=config, block_size=16)
    assert hasattr(made, "midstream_waits_for_room")
    assert isinstance(made, Given)
    assert made.free == 16
    assert config.scheduler_config.scheduler_cls == "midstream_vllm_scheduler.scheduler"
    # One rank would wait for others that stand still, or a check for KV from elsewhere.
    for engines, connector in ((2, None), (1, object())):
        config.parallel_config.data_parallel_size, config.kv_transfer_config = engines, connector
        assert type(module.scheduler(vllm_config=config, block_size=16)) in (other, Given)


@pytest.mark.parametrize(
    ("other", "known"),
    [
        ({}, True),
        ({"scheduler_config": {"policy": "fcfs", "scheduler_cls": SCHEDULER}}, False),
        ({"parallel_config": {"data_parallel_size": 2}}, False),
        ({"kv_transfer_config": {"kv_connector": "any"}}, False),
    ],
)
def test_an_attached_server_where_it_could_check_nothing_is_not_paused_to_find_that_out(
    other: dict[str, Any], known: bool
) -> None:
    said = {"scheduler_config": {"policy": "priority", "scheduler_cls": SCHEDULER}} | other
    assert msgspec.convert(said, Config).scheduler == (SCHEDULER if known else "")


def test_the_module_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads it by its name, in an environment without midstream."""
    spec = importlib.util.spec_from_file_location("alone", WORKER_DIR / "midstream_vllm_scheduler.py")
    assert spec is not None
    assert spec.loader is not None
    alone = importlib.util.module_from_spec(spec)
    # As its import does.
    monkeypatch.setitem(sys.modules, "alone", alone)
    spec.loader.exec_module(alone)
    assert alone.IN_PAUSE == module.IN_PAUSE
