"""What is told of KV while adapters are replaced under their policies' names, in every cache policy, beside full weights that
change: with preemption, a second tier, pins, policies that end and are made again, and streams that move to another engine.

Each record is computed again in plain transformers over exactly the KV that it is said to stand on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapter_helpers import ATTENTION, EXPERTS, adapted, write_adapter
from kv_claims import judge
from msgspec.structs import replace
from recompute import Recomputer
from test_kv_storm import ERROR, OPEN, POLICIES, TOKENS, Storm
from tiers import of_tier
from transformers import AutoModelForCausalLM

from midstream.core.config import EngineSettings
from midstream.core.types import GenerateRequest
from midstream.engine.embedded.core import EngineCore
from midstream.replica.namespaces import Namespaces, cache_salt

ADAPTERS, NAMES, RESIDENT = 4, ("red", "blue"), 2
SEEDS = of_tier(fast=1, test=1, all=4)
pytestmark = pytest.mark.slow


class Policy:
    """One life of a policy's name, as a replica has it. served: its snapshots, the newest last."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.namespaces = Namespaces()
        self.served: list[str] = []


class PolicyStorm(Storm):
    """Identities are of one adapter each, and several policies serve the same one, also at once."""

    def __init__(self, core: EngineCore, adapters: list[Path], seed: int) -> None:
        super().__init__(core, [], seed)
        self.adapters, self.lives, self.pinned = adapters, 0, 0
        self.policies: dict[str, Policy] = {}
        for name in NAMES:
            self.begin(name)

    def begin(self, name: str) -> None:
        self.lives += 1
        self.policies[name] = Policy(f"{name}#{self.lives}")
        self.replace(self.policies[name])

    def replace(self, policy: Policy) -> None:
        reset, age = self.rng.choice(POLICIES)
        number = self.rng.randrange(ADAPTERS)
        identity = f"v{number}"
        self.core.set_staged(self.core.stage(self.adapters[number]), policy.key)
        self.core.commit(identity, policy.key)
        policy.namespaces.commit(reset, age)
        policy.served = [*(each for each in policy.served if each != identity), identity]
        self.core.retain(policy.key, policy.served[-RESIDENT:])
        if reset == "all":
            self.core.abandon_kv(policy.key)

    def commit(self) -> None:
        name = self.rng.choice(NAMES)
        if self.rng.random() < 0.1:
            self.core.end_policy(self.policies[name].key)
            self.begin(name)
        else:
            self.replace(self.policies[name])

    def add(self, asked: GenerateRequest) -> None:
        """Under a policy, with the salt and the bound on ages that its replica would choose.

        A stream of an engine that was lost keeps its policy's name, and its pin: it goes on only where its snapshot is.
        """
        rng, moved = self.rng, bool(asked.policy)
        policy = self.policies[asked.policy.partition("#")[0] or rng.choice(NAMES)]
        resident = policy.served[-RESIDENT:]
        pin = asked.snapshot if moved else rng.choice(resident) if rng.random() < 0.3 else None
        if pin not in (None, *resident):
            return
        older = pin if pin not in (None, policy.served[-1]) else None
        self.pinned += older is not None
        session = rng.choice([None, ("", "a"), ("", "b")])
        own = "" if older is None else f"@{older}"
        spaces = policy.namespaces
        namespace = spaces.admit(session) if older is None else spaces.resets
        salt = cache_salt(namespace, "", "", policy.key + own)
        age = asked.kv_age_max if moved else None if older else spaces.kv_age_max
        super().add(replace(asked, policy=policy.key, snapshot=pin, salt=salt, kv_age_max=age))


@pytest.fixture(scope="module")
def adapted_models(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> tuple[Path, list[Path], Recomputer]:
    base, place = tiny_model(dtype="float32"), tmp_path_factory.mktemp("adapters")
    module, recomputer, written = (
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        Recomputer({}),
        list[Path](),
    )
    for number in range(ADAPTERS):
        peft = adapted(
            module, number, r=8, lora_alpha=16, target_modules=ATTENTION, target_parameters=EXPERTS
        )
        written.append(place / f"v{number}")
        write_adapter(peft, written[-1])
        recomputer.add_model(f"v{number}", peft)
    return base, written, recomputer


Adapted = tuple[Path, list[Path], Recomputer]


def engine(base: Path, folder: Path, **more: str) -> EngineCore:
    settings = EngineSettings(max_batch_tokens=64, max_running=OPEN, kv_cache_tokens=320, **more)
    return EngineCore(base, settings, folder)


def check(storm: PolicyStorm, recomputer: Recomputer) -> None:
    verdict = judge(storm.streams, recomputer, ERROR["cpu"])
    print(
        f"{verdict}; {storm!r}; {storm.lives} lives, {storm.pinned} pinned to older ones, {verdict.mixed} mixed"
    )
    assert not verdict.wrong, str(verdict)
    for stream in storm.streams:
        pin = stream.request.snapshot
        assert pin is None or {token.snapshot for token in stream.tokens} <= {pin}, stream
    assert verdict.mixed


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("tier", ["one tier", "two tiers"])
def test_an_adapter_that_is_replaced_under_its_name_leaves_no_kv_without_its_label(
    tmp_path: Path, adapted_models: Adapted, seed: int, tier: str
) -> None:
    base, adapters, recomputer = adapted_models
    more = {"kv_offload_memory": "512KiB"} if tier == "two tiers" else {}
    drawn = random.Random(f"{seed} {tier}").randrange(2**20)
    storm = PolicyStorm(engine(base, tmp_path, **more), adapters, drawn)
    storm.swaps = 0.15
    storm.run(2 * TOKENS)
    check(storm, recomputer)
    assert storm.preempted
    assert storm.pinned
    assert storm.lives > len(NAMES)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_streams_of_policies_that_go_on_on_another_engine_are_borne_out_there(
    tmp_path: Path, adapted_models: Adapted, seed: int
) -> None:
    """Which serves other adapters under the same names. Every second engine that is lost demands KV of one age."""
    base, adapters, recomputer = adapted_models
    storm = PolicyStorm(engine(base, tmp_path), adapters, 50 + seed)
    storm.swaps, moved = 0.15, 0
    for number in range(4):
        storm.run(sum(len(stream.tokens) for stream in storm.streams) + TOKENS // 4)
        lost = PolicyStorm(engine(base, tmp_path), adapters, 100 * seed + number)
        lost.swaps = 0.15
        for _ in range(40):
            lost.turn()
        moved += storm.take_over(lost, exact=bool(number % 2))
        storm.end()
    check(storm, recomputer)
    assert moved
