"""The policies of a simulated history: trainers that signal adapters for them, fork, freeze and end them, and who samples them.

Always holds: what befalls a policy comes one after another. So all that was signalled before an end that was acknowledged, and
after which a signal was, is of a policy that is gone: no later request may be answered by it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from simclient import Broken, Oracle, Rollout, Turn, Wrong, exchange
from simengine import BLOCK
from simtrainer import HOT_LOAD, Trainer, Weights

if TYPE_CHECKING:
    from simworld import World

PATH = "/v1/accounts/local/deployments/default/policies"
NAMES = ("red", "blue")
ADAPTERS = 4
RANK = 2
#: Of prompts for all policies: cached KV of one would do for another, if it were found.
OPENING = list(range(2, 2 + 3 * BLOCK))


def adapter(number: int, hidden: int, outputs: int) -> dict[str, bytes]:
    """An adapter's files without a manifest. hidden, outputs: of the query projection that it adapts."""
    from safetensors.numpy import save

    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": np.full((RANK, hidden), number + 1, np.float32),
        f"{module}.lora_B.weight": np.full((outputs, RANK), 1, np.float32),
    }
    return {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": save(tensors, metadata={"format": "pt"}),
    }


class PolicyOracle(Oracle):
    """What may be true of a policy's answers. clear: whether every end and signal was answered, in order."""

    def __init__(self, name: str, *, synchronous: bool) -> None:
        super().__init__(synchronous=synchronous)
        self.name = name
        self.clear = True
        #: An end was acknowledged, and no signal since.
        self.ended = False
        #: Of the policy that there is now: what was signalled, and when its first signal was acknowledged.
        self.current: set[str] = set()
        self.began_at: float | None = None
        #: Policies that may yet begin with any of its snapshots: their forks are under way.
        self.forks: set[PolicyOracle] = set()

    def signals_begin(self, name: str) -> None:
        """A signal of this snapshot is going to be sent. Two policies may each wait to begin as the other one."""
        reached, waiting = {self}, [self]
        while waiting:
            policy = waiting.pop()
            policy._may_serve(name)
            for fork in policy.forks - reached:
                fork.weights |= policy.weights
                reached.add(fork)
                waiting.append(fork)

    def _may_serve(self, name: str) -> None:
        if self.ended:
            self.ended = False
            self.current = set()
            self.began_at = None
            # Another policy counts its generations anew.
            self.signals = []
        self.current.add(name)

    def may_be(self, other: PolicyOracle, name: str) -> None:
        """A snapshot of the other policy may be its own from now on."""
        self.weights |= other.weights
        self.signals_begin(name)

    def acknowledged(self, now: float) -> None:
        if self.began_at is None:
            self.began_at = now

    def lost(self) -> None:
        """An answer was lost, so it is not known what there is."""
        self.clear = False

    def generations(self, snapshot: str) -> tuple[int, int] | None:
        return super().generations(snapshot) if self.clear else None

    def check_part(self, turn: Turn, max_tokens: int) -> None:
        super().check_part(turn, max_tokens)
        spans = [*(turn.kv or ()), *(span for _, earlier in turn.earlier for span in earlier)]
        computed = {snapshot for snapshot, _, _ in spans}
        if computed - set(self.weights):
            raise Wrong(f"{self.name} reads KV of {computed}, which is none of its own: {turn}")
        began = self.began_at
        if not self.clear or self.ended or began is None or turn.begun_at <= began:
            return
        before = {*turn.labels, *computed} - self.current
        if before:
            raise Wrong(f"{self.name} was ended and made again, and is answered by {before}: {turn}")


class PolicyTrainer(Trainer):
    """Signals for one policy, its forks and its end. One at a time."""

    def __init__(self, policy: str, *given: Any) -> None:
        super().__init__(*given)
        self.policy = policy
        self.body = {"policy": policy}
        self.prefix = f"{policy}-"
        self.turn = asyncio.Lock()
        #: Whether the newest call said that there is one.
        self.there = False
        #: Calls whose answers were lost: they may yet be carried out.
        self.broken = 0

    @property
    def oracle(self) -> PolicyOracle:
        assert isinstance(self._oracle, PolicyOracle)
        return self._oracle

    async def end(self) -> None:
        status = await self.call("DELETE", f"/{self.policy}", None, (200, 404))
        if status is not None:
            self.oracle.ended = True
            self.there = False
            self.signalled.clear()
            self._parent = None

    async def freeze(self, *, frozen: bool) -> None:
        await self.call("POST", "", {"policy": self.policy, "frozen": frozen}, (200, 409))

    async def fork(self, source: PolicyTrainer) -> None:
        """It begins with what the other one serves: a name of the other's."""
        if not source.signalled:
            return
        name, broken = source.signalled[-1], self.broken
        for each in source.signalled:
            self.oracle.may_be(source.oracle, each)
        # Which of the other's snapshots it was is not known: the other may take signals meanwhile.
        self.oracle.lost()
        source.oracle.forks.add(self.oracle)
        body = {"policy": self.policy, "from": source.policy}
        status = await self.call("POST", "", body, (200, 400, 404, 409))
        if status is not None and self.broken == broken:
            source.oracle.forks.discard(self.oracle)
        if status == 200:
            self.signalled.append(name)
            self.there = True
            self._parent = None

    async def call(self, method: str, path: str, body: Any, good: Sequence[int]) -> int | None:
        """The status, one of `good`; None where it is not known what came of it. Raises Wrong."""
        for _ in range(20):
            try:
                answer = await exchange(self._port, method, PATH + path, body)
            except Broken as error:
                self._say(f"{method} {self.policy}: {error}")
                self.broken += 1
                self.oracle.lost()
            else:
                self._say(f"{method} {self.policy} {body}: {answer.status} {answer.body[:120]!r}")
                self._count(f"policy {method}: {answer.status}")
                if answer.status in good:
                    return answer.status
                if answer.status < 500 and answer.status not in (408, 425, 429):
                    raise Wrong(f"{method} {PATH}{path} {body}: {answer}")
                self.oracle.lost()
            await asyncio.sleep(0.3)
        return None


class Policies:
    """All policies of a history. entries: as `entries_of` gives them."""

    def __init__(
        self,
        port: int,
        world: World,
        url: str,
        published: Weights,
        say: Callable[[str], None],
        seed: int,
    ) -> None:
        self._port, self._world, self._say = port, world, say
        weights = Weights(published.adapters, published.adapter_deltas)
        self.trainers: dict[str, PolicyTrainer] = {}
        for name in NAMES:
            oracle = PolicyOracle(name, synchronous=False)
            oracle.committed_at = world.committed_at
            rng = random.Random(f"{seed} {name}")
            self.trainers[name] = PolicyTrainer(
                name, port, world.bucket, url, weights, oracle, rng, say, self.count
            )

    def count(self, what: str) -> None:
        self._world.counts[what] += 1

    def client(self, number: int, seed: int) -> Rollout:
        trainer = self.trainers[NAMES[number % len(NAMES)]]
        name = f"{trainer.policy} client {number}"
        client = Rollout(
            name, self._port, random.Random(f"{seed} {name}"), trainer.oracle, self.count, lambda: None
        )
        client.model = trainer.policy
        client.opening = OPENING
        return client

    async def befall(self, kind: str, value: Mapping[str, Any]) -> None:
        trainer = self.trainers[value["policy"]]
        async with trainer.turn:
            match kind:
                case "policy signal":
                    await trainer.signal({**value, "policy": value["reset"]})
                case "policy end":
                    await trainer.end()
                case "policy freeze":
                    await trainer.freeze(frozen=True)
                    await asyncio.sleep(value["s"])
                    await trainer.freeze(frozen=False)
                case "policy fork":
                    await trainer.fork(self.trainers[value["from"]])

    async def all_are_well(self, until: float) -> None:
        """In calm weather: each takes a signal, serves it on all replicas, and goes when it is ended."""
        for trainer in self.trainers.values():
            await trainer.freeze(frozen=False)
            name = await trainer.publish_full(0, "all")
            while name is None and self._world.now < until:
                # It was being ended.
                await asyncio.sleep(0.5)
                name = await trainer.publish_full(0, "all")
            if name is None:
                raise Wrong(f"no signal for {trainer.policy} is taken in calm weather")
            await self._all_serve(trainer, name, until)
            self.count("end: policy well")
        for trainer in self.trainers.values():
            await trainer.end()
            await self._is_gone(trainer, until)

    async def _all_serve(self, trainer: PolicyTrainer, name: str, until: float) -> None:
        said: Any = None
        while True:
            try:
                said = (await exchange(self._port, "GET", f"{HOT_LOAD}?policy={trainer.policy}")).json()
                rows = said.get("replicas", ())
                if rows and all(
                    row["current_snapshot_identity"] == name and row["readiness"] for row in rows
                ):
                    break
            except Broken as error:
                said = str(error)
            if self._world.now > until:
                raise Wrong(f"not all replicas serve {name} of {trainer.policy}: {json.dumps(said)[:3000]}")
            await asyncio.sleep(0.2)
        asking = self.client(NAMES.index(trainer.policy), 0)
        body, headers = asking.request(f"last-{name}", [2, 7, 1, 8])
        try:
            turn = await asking.ask_once(body, headers)
        except Broken as error:
            raise Wrong(f"a request for {trainer.policy} in calm weather: {error}") from error
        trainer.oracle.check(turn, body["max_tokens"], routes=body["include_routing_matrix"])
        if set(turn.labels) != {name}:
            raise Wrong(f"{turn.labels}, not {name}")

    async def _is_gone(self, trainer: PolicyTrainer, until: float) -> None:
        said = None
        while said != 404:
            if self._world.now > until:
                raise Wrong(f"{trainer.policy} was ended, and is still there: {said}")
            try:
                said = (await exchange(self._port, "GET", f"{PATH}/{trainer.policy}")).status
            except Broken as error:
                said = str(error)
            await asyncio.sleep(0.2)
        asked = {"model": trainer.policy, "prompt": [1], "max_tokens": 1}
        answer = await exchange(self._port, "POST", "/v1/completions", asked)
        if answer.status != 404:
            raise Wrong(f"{trainer.policy} is gone, and a request for it is answered {answer}")

    def nothing_is_left(self) -> None:
        """Of policies that are gone, on any replica or engine. Raises Wrong."""
        for process, replica in self._world.replicas:
            if not process.alive or process.engine is None:
                continue
            left = [
                *(one for one in replica.policies.everyone if one.name),
                *(name for name in process.engine.slots if name),
            ]
            if left:
                raise Wrong(f"{process} has {left}, and every policy was ended")


def kinds(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """What befalls policies in one history, as (kind, value)."""
    made: list[tuple[str, dict[str, Any]]] = []
    for _ in range(rng.randint(6, 40)):
        kind = rng.choice(("policy signal",) * 6 + ("policy end",) * 2 + ("policy freeze", "policy fork"))
        value: dict[str, Any] = {"policy": rng.choice(NAMES)}
        match kind:
            case "policy signal":
                value |= {
                    "weights": rng.randrange(ADAPTERS),
                    "reset": rng.choice(("all", "new_session", "none", None)),
                    "again": rng.random() < 0.15,
                    "form": rng.choice(("full", "full", "delta", "delta", "torn", "late")),
                }
            case "policy freeze":
                value["s"] = round(rng.uniform(0.2, 3.0), 2)
            case "policy fork":
                value["from"] = rng.choice([name for name in NAMES if name != value["policy"]])
        made.append((kind, value))
    return made
