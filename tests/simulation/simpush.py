"""Trainers of a simulated history that push weights through the four calls, and what befalls them and the receivers.

Always holds: what may be served is in `oracle.weights` before the call that commits it. Weights with a number that is not
finite are not, nor tensors that do not fit, nor what only a damaged replica has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simclient import Answer, Broken, Oracle, Signal, Wrong, exchange
from simengine import weights_of
from simreceiver import PIECE_BYTES, Group, GroupBroken
from simstrikes import Strike, Strikes, own_process
from simtrainer import HOT_LOAD, LEDGER, Weights, not_finite

from midstream.core.config import PushSettings
from midstream.core.transfer import STORE_PREFIX, SentTensors
from midstream.fleet.push import GRACE_S
from midstream.fleet.push_orders import ALIVE_S, ANSWER_S
from midstream.snapshots.content import MANIFEST_FILE, parse_manifest
from midstream.snapshots.layout import CheckpointSpec, read_spec
from midstream.snapshots.store.local import TEMPORARY_PREFIX
from midstream.transfer.layout import UpdateLayout

if TYPE_CHECKING:
    from simprocess import Process
    from simworld import World

DEPLOYMENT = "/v1/accounts/local/deployments/default"
WEIGHTS = "model.safetensors"
WORLD_SIZE, INIT, START, UPDATE, FINISH, SHUTDOWN = (
    "/get_world_size",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/shutdown_weight_transfer_engine",
)
#: open: between the start and the tensors.
PHASES = ("init", "start", "open", "update", "finish")
#: A call may take so much longer than its deadline, in calm weather.
BOUND_S = 3.0
#: How long a trainer tries to push one snapshot.
PUSH_S = 25.0
#: Of histories, those with pushes.
WITH_PUSHES = 0.4
TRAINERS = 2
#: What a trainer is answered that may try again.
NOT_NOW = frozenset((408, 409, 425, 429, 502, 503, 504))
#: A replica joined that was seen so often in so many seconds.
SEEN, SEEN_S = 4, 2.4
#: A group that works on an update, and its receivers, have ended so long after the storm.
GROUP_S = 40.0


def settings_of(rng: random.Random) -> PushSettings:
    return PushSettings(
        join_s=rng.choice((2.0, 5.0)),
        update_s=rng.choice((3.0, 6.0)),
        finish_s=rng.choice((5.0, 10.0)),
        quorum=rng.choice((1.0, 1.0, 0.5)),
    )


def kinds(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """What befalls pushes in one history, as (kind, value)."""
    made: list[tuple[str, dict[str, Any]]] = [("push", _push(rng)) for _ in range(rng.randint(1, 7))]
    for kind in ("kill receiver", "hang receiver"):
        if rng.random() < 0.4:
            made += [(kind, {"which": rng.random()}) for _ in range(rng.randint(1, 3))]
    return made


def _push(rng: random.Random) -> dict[str, Any]:
    trouble = rng.choice((None, None, None, "dies", "stalls", "gateway", "replica", "damage", "bad", "nan"))
    return {
        "trainer": rng.choice((0, 0, 0, 1)),
        "weights": rng.randrange(6),
        "policy": rng.choice(("all", "new_session", "none", None)),
        "calls": rng.randint(1, 4),
        "packed": rng.random() < 0.7,
        "trouble": trouble,
        "phase": rng.choice(PHASES),
        "s": round(rng.choice((rng.uniform(0.0, 0.5), rng.uniform(0.5, 9.0))), 3),
        "shutdown": rng.random() < 0.3,
    }


class Died(Exception):
    """The trainer is gone."""


@dataclass
class Member:
    """A trainer's place in a group. port: of its store. since: when it began to join."""

    port: int
    group: Group
    packed: bool
    since: float


def more_than(ready: Sequence[tuple[float, int]], members: int, since: float, now: float) -> bool:
    """Whether there were clearly more replicas than a group's members, lately and since the group was formed. ready: how many
    there were, by the time at which that was seen. A count of before the group may be of replicas that have left meanwhile.
    """
    lately = [(at, count) for at, count in ready if at >= now - SEEN_S]
    seen = len(lately) >= SEEN and lately[-1][0] > since
    return seen and min(count for _, count in lately) > members


class PushTrainer:
    """limits: of the calls, in seconds. slack_s(begun): how long the server could not answer since then. joined(member):
    whether there are more replicas than its group has. kill(name): a process whose name begins so is killed."""

    def __init__(
        self,
        number: int,
        port: int,
        world: World,
        url: str,
        weights: Weights,
        oracle: Oracle,
        limits: PushSettings,
        seed: int,
        say: Callable[[str], None],
        slack_s: Callable[[float], float],
        joined: Callable[[Member], bool],
        kill: Callable[[str], None],
        strikes: Strikes | None,
    ) -> None:
        self.name = f"push-{number}"
        self._port, self._world, self._oracle, self._limits = port, world, oracle, limits
        self._url = url
        self._weights, self._slack_s, self._joined, self._kill = weights, slack_s, joined, kill
        self._rng = random.Random(f"{seed} {self.name}")
        self._say = say
        self._spec = read_spec(world.model_dir)
        self._turn = asyncio.Lock()
        self._member: Member | None = None
        self._named = 0
        self._killing: asyncio.Task[None] | None = None
        self._strikes = strikes
        #: The phase that it is in, of which push.
        self._now: tuple[str, str] = ("", "")
        #: What it does, until it dies. Its own stalls.
        self._doing: asyncio.Task[str | None] | None = None
        self._stalls: list[tuple[float, float]] = []
        self._process: Process | None = None
        self._missed: list[Strike] = []
        #: Snapshots whose push was answered with success.
        self.pushed: list[str] = []

    def _count(self, what: str) -> None:
        self._world.counts[what] += 1

    async def befall(self, value: dict[str, Any]) -> None:
        async with self._turn:
            try:
                self._process = own_process()
                self._doing = asyncio.create_task(self.push(value), name=self.name)
                await self._doing
            except (Died, asyncio.CancelledError):
                self._count("push: the trainer died")
                self._say(f"{self.name} died")
                self.leave()
            finally:
                self._doing = None

    async def push(self, value: dict[str, Any], patience_s: float = PUSH_S) -> str | None:
        """The snapshot's name, once it serves; None if that was refused. Raises Died."""
        self._named += 1
        name = f"{self.name}-{self._named}"
        plan = _Plan(name, value, self._spec, self._weights.variants[value["weights"]], self._rng)
        if plan.good:
            self._oracle.weights[name] = plan.weights
        until = self._world.now + patience_s
        while self._world.now < until:
            try:
                if await self._try(plan):
                    if not plan.good:
                        raise Wrong(f"{name} was taken: {value}")
                    if value["shutdown"]:
                        await self.shut_down()
                    return name
            except (Broken, GroupBroken) as error:
                self._say(f"{name}: {error}")
                self.leave()
            if not plan.good and plan.refused:
                return None
            if value.get("lost") and plan.asked_to_finish:
                break
            await asyncio.sleep(0.3 + self._rng.random() * 1.5)
        self._count("push: given up")
        return None

    def die(self) -> None:
        """At any moment."""
        self.leave()
        if self._doing is not None:
            self._doing.cancel()

    def leave(self) -> None:
        """Its store is closed, as at its death."""
        member, self._member = self._member, None
        if member is not None:
            self._world.receivers.stores[member.port].close()

    # -- the calls

    async def _try(self, plan: _Plan) -> bool:
        """Whether it serves. Leaves the group where a call did not succeed."""
        if self._member is not None and self._member.packed != plan.value["packed"]:
            self.leave()
        steps = (self._join, self._start, self._send, self._finish)
        for step in steps:
            if not await step(plan):
                self.leave()
                return False
        return True

    async def _join(self, plan: _Plan) -> bool:
        if self._member is not None:
            return True
        answer = await self._call(plan, "", "GET", WORLD_SIZE, None, 0.0)
        if answer.status != 200:
            return False
        size = 1 + int(answer.json()["world_size"])
        key = f"key{self._rng.randrange(10**9)}"
        port = self._world.receivers.open_store()
        store = self._world.receivers.stores[port]
        group = store.group(f"{STORE_PREFIX}/{key}", size)
        member = self._member = Member(port, group, plan.value["packed"], self._world.now)
        info = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "world_size": size,
            "rank_offset": 1,
            "key": key,
            "packed": member.packed,
            "packed_buffer_size_bytes": PIECE_BYTES,
        }
        joining = asyncio.create_task(member.group.join(0, own_process()), name="trainer joins")
        try:
            answer = await self._call(plan, "init", "POST", INIT, {"init_info": info}, self._limits.join_s)
            if answer.status != 200:
                return False
            await joining
        finally:
            joining.cancel()
        self._count("push: a group was formed")
        # What one replica alone got wrong shows only where others can be compared with it.
        if plan.damages and size > 2 and self._limits.quorum == 1.0:
            plan.damages = False
            member.group.damaged = self._rng.choice((1, size - 1))
            self._count("push: damage")
        return True

    async def _start(self, plan: _Plan) -> bool:
        assert self._member is not None
        joined = self._joined(self._member)
        answer = await self._call(plan, "start", "POST", START, {}, self._limits.update_s)
        if answer.status == 200 and joined:
            raise Wrong(f"{START} is answered {answer}, and a replica joined before")
        return answer.status == 200

    async def _send(self, plan: _Plan) -> bool:
        if plan.dies_in("open"):
            raise Died
        if plan.stalls_in("open"):
            await asyncio.sleep(plan.stall())
        for sent, data in plan.parts(self._rng):
            sending = asyncio.create_task(self._broadcast(plan, sent, data), name="trainer sends")
            info = {"names": sent.names, "dtype_names": sent.dtype_names, "shapes": sent.shapes}
            try:
                answer = await self._call(
                    plan, "update", "POST", UPDATE, {"update_info": info}, self._limits.update_s
                )
                if answer.status != 200:
                    return False
                await sending
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        return True

    async def _broadcast(self, plan: _Plan, sent: SentTensors, data: Sequence[bytes]) -> None:
        assert self._member is not None
        group = self._member.group
        whole = b"".join(data)
        packed = [whole[at : at + PIECE_BYTES] for at in range(0, len(whole), PIECE_BYTES)]
        pieces = packed if self._member.packed else [piece for piece in data if piece]
        for number, piece in enumerate(pieces):
            if plan.stalls_in("broadcast") and number == len(pieces) // 2:
                self._count("push: the trainer stalls between two broadcasts")
                await asyncio.sleep(plan.stall())
            await group.send(piece)

    async def _finish(self, plan: _Plan) -> bool:
        policy = plan.value["policy"]
        query = "" if policy is None else f"?reset_prompt_cache={policy}"
        self._watch_commit(plan)
        body = {"weight_version": plan.name}
        self._oracle.signals_begin(plan.name)
        plan.asked_to_finish = True
        try:
            answer = await self._call(plan, "finish", "POST", FINISH + query, body, self._limits.finish_s)
        except BaseException:
            self._oracle.unsure.add(plan.name)
            raise
        if answer.status != 200:
            # It may be committed, and not serve everywhere yet.
            self._oracle.unsure.add(plan.name)
            return False
        if answer.json()["weight_version"] != plan.name:
            raise Wrong(f"{plan.name} was pushed: {answer}")
        self._say(f"{plan.name} serves")
        self._count("push: serves")
        self.pushed.append(plan.name)
        await self._note_signal(plan.name)
        return True

    def _watch_commit(self, plan: _Plan) -> None:
        """The phase changes with the commit; and strikes behind it begin."""

        def committed(_: Process) -> None:
            if plan.loses_answer():
                self._count("push: the ledger's answer to the commit is lost")
                self._world.disk.lose_answer = True
            if self._now == (plan.name, "finish"):
                self._now = (plan.name, "signal")
                self._begin_strike(plan, "signal")

        def keeps(process: Process) -> None:
            place = f"{self._url}/{plan.name}/{MANIFEST_FILE}"
            self._begin_strike(plan, "keep", process, lambda: place not in self._world.bucket.objects)

        self._world.on_push["commit", plan.name] = committed
        self._world.on_push["keep", plan.name] = keeps

    def _begin_strike(
        self,
        plan: _Plan,
        phase: str,
        at: Process | None = None,
        still: Callable[[], bool] | None = None,
    ) -> None:
        if self._strikes is None:
            return
        strike = plan.struck_in(phase) or self._due_in(phase)
        if strike is None:
            return
        if strike.victim == "trainer" and strike.kind == "stall":
            self._stalls.append((self._world.now, strike.s + 1.0))
        within = (plan.name, phase)
        assert self._process is not None
        still = still or (lambda: self._now == within)
        self._strikes.begin(strike, still, self._missed.append, self.die, self._process, at)

    def _due_in(self, phase: str) -> Strike | None:
        """A strike that missed its phase in an earlier try. It comes at once."""
        strike = next((one for one in self._missed if one.phase == phase), None)
        if strike is not None:
            self._missed.remove(strike)
            strike = strike._replace(after_s=0.0)
        return strike

    def _stalled_s(self, begun: float) -> float:
        return sum(seconds for at, seconds in self._stalls if at + seconds >= begun)

    async def _note_signal(self, name: str) -> None:
        """Which generation it is, as the ledger says."""
        try:
            rows = (await exchange(self._port, "GET", LEDGER)).json().get("snapshots", ())
        except Broken:
            rows = ()
        found = [row for row in rows if row["identity"] == name]
        if not found:
            self._oracle.unsure.add(name)
            return
        row = found[0]
        self._oracle.signals.append(
            Signal(row["generation"], name, row["reset_prompt_cache"], row["max_cache_age"])
        )

    async def shut_down(self) -> None:
        try:
            answer = await exchange(self._port, "POST", SHUTDOWN, {})
            self._count(f"push {SHUTDOWN}: {answer.status}")
        except Broken as error:
            self._say(f"{SHUTDOWN}: {error}")
        self.leave()

    async def _call(
        self, plan: _Plan, phase: str, method: str, path: str, body: Any, within_s: float
    ) -> Answer:
        """Raises Broken, Died, Wrong."""
        if plan.stalls_in(phase):
            self._count(f"push: the trainer stalls before {phase}")
            await asyncio.sleep(plan.stall())
        if (doomed := plan.kills_in(phase)) is not None:
            self._count(f"push: a {doomed} is killed in {phase}")
            self._killing = asyncio.create_task(self._kill_in(doomed, plan.value["s"]), name="kill")
        begun, self._now = self._world.now, (plan.name, phase)
        self._begin_strike(plan, phase)
        asking = asyncio.create_task(exchange(self._port, method, path, body), name=f"{self.name} {path}")
        if plan.dies_in(phase):
            await asyncio.wait((asking,), timeout=min(plan.value["s"], 1.5))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            raise Died
        try:
            answer = await asking
        finally:
            self._now = ("", "")
            bound = BOUND_S if self._strikes is None else GRACE_S
            # Before a group is formed, members of an older one say whether its trainer lives.
            bound += ALIVE_S + ANSWER_S if phase == "init" else 0.0
            slack = self._slack_s(begun) + self._stalled_s(begun)
            took, most = self._world.now - begun, within_s + bound + slack
            if took > most:
                raise Wrong(f"{path} took {took:.1f} s, at most {most:.1f} s are allowed")
        self._say(f"{plan.name} {path}: {answer.status} {'' if answer.status == 200 else answer.body[:300]}")
        self._count(f"push {path}: {answer.status}")
        # A replica could not load it: files that cannot be staged are an error of the snapshot's.
        unloaded = path.startswith(FINISH) and b"could not load" in answer.body
        if answer.status != 200 and answer.status not in NOT_NOW:
            if plan.good and not unloaded:
                raise Wrong(f"{path} {json.dumps(body)[:300]}: {answer}")
            plan.refused = True
        return answer

    async def _kill_in(self, name: str, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.5))
        self._kill(name)


class _Plan:
    """One push: what is sent, what becomes of it, and the trouble that its trainer has, once."""

    def __init__(
        self, name: str, value: dict[str, Any], spec: CheckpointSpec, files: Any, rng: random.Random
    ) -> None:
        self.name, self.value = name, value
        trouble = value["trouble"]
        self.good = trouble not in ("bad", "nan")
        self.refused = self.asked_to_finish = False
        self.damages = trouble == "damage"
        self._bad = trouble == "bad"
        self._strike: Strike | None = value.get("strike")
        self._loses: bool = value.get("lost", False)
        self._trouble = trouble if trouble in ("dies", "stalls", "gateway", "replica") else None
        raw = (not_finite(files) if trouble == "nan" else files)[WEIGHTS]
        self._names = sorted(spec.tensors)
        rng.shuffle(self._names)
        self._data, self._spec = tensors_of(raw), spec
        layout = UpdateLayout(spec)
        layout.place(self._sent(self._names))
        self.weights = weights_of(
            [(WEIGHTS, layout.header() + b"".join(self._data[each] for each in self._names))]
        )

    def parts(self, rng: random.Random) -> list[tuple[SentTensors, list[bytes]]]:
        """What each call sends."""
        count = min(self.value["calls"], len(self._names))
        cuts = sorted(rng.sample(range(1, len(self._names)), count - 1))
        edges = zip([0, *cuts], [*cuts, len(self._names)], strict=True)
        parts = [self._names[begin:end] for begin, end in edges]
        made = [(self._sent(names), [self._data[name] for name in names]) for names in parts]
        if self._bad:
            sent, data = made[-1]
            wrong = tuple((*shape, 1) for shape in sent.shapes)
            made[-1] = SentTensors(names=sent.names, dtype_names=sent.dtype_names, shapes=wrong), data
        return made

    def _sent(self, names: Sequence[str]) -> SentTensors:
        shapes = tuple(self._spec.tensors[name].shape for name in names)
        return SentTensors(names=tuple(names), dtype_names=("float32",) * len(names), shapes=shapes)

    def stalls_in(self, phase: str) -> bool:
        at = "broadcast" if self.value["phase"] == "update" else self.value["phase"]
        return self._trouble == "stalls" and phase == at

    def stall(self) -> float:
        self._trouble = None
        seconds: float = self.value["s"]
        return seconds

    def kills_in(self, phase: str) -> str | None:
        """What dies, once."""
        if self._trouble not in ("gateway", "replica") or phase != self.value["phase"]:
            return None
        doomed, self._trouble = self._trouble, None
        return doomed

    def loses_answer(self) -> bool:
        """Once."""
        lost, self._loses = self._loses, False
        return lost

    def struck_in(self, phase: str) -> Strike | None:
        """Once."""
        strike = self._strike
        if strike is None or strike.phase != phase:
            return None
        self._strike = None
        return strike

    def dies_in(self, phase: str) -> bool:
        return self._trouble == "dies" and phase == self.value["phase"]


def tensors_of(raw: bytes) -> dict[str, bytes]:
    """The bytes of each tensor of a safetensors file."""
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        for name, entry in header.items()
    }


class Pushes:
    """All push trainers of a history, and the trouble of receivers."""

    def __init__(
        self,
        port: int,
        world: World,
        url: str,
        weights: Weights,
        oracle: Oracle,
        limits: PushSettings,
        seed: int,
        say: Callable[[str], None],
        kill: Callable[[str], None],
        strikes: Strikes | None,
    ) -> None:
        self._port, self._world, self._url, self._say = port, world, url, say
        self._oracle = oracle
        #: When something began that keeps the server from answering, and how long it takes.
        self.pauses: list[tuple[float, float]] = []
        #: How many replicas were ready, by the time at which that was seen.
        self.ready: list[tuple[float, int]] = []
        given = (port, world, url, weights, oracle, limits, seed, say, self._slack_s, self._joined, kill)
        self.trainers = [PushTrainer(number, *given, strikes) for number in range(TRAINERS)]
        self._last = PushTrainer(TRAINERS, *given, None)
        self._grows = random.Random(f"{seed} push end").random() < 0.5

    def _slack_s(self, begun: float) -> float:
        return sum(seconds for at, seconds in self.pauses if at + seconds >= begun)

    def _joined(self, member: Member) -> bool:
        """Whether there were clearly more replicas than its group has, for a while, in good weather."""
        now = self._world.now
        return more_than(self.ready, member.group.size - 1, member.since, now) and not self._slack_s(
            now - SEEN_S
        )

    async def befall(self, kind: str, value: dict[str, Any]) -> None:
        if kind == "push":
            await self.trainers[value["trainer"]].befall(value)
            return
        there = [end for end in self._world.receivers.ends.values() if end.process.alive and not end.hung]
        if not there:
            return
        end = there[int(value["which"] * len(there))]
        self._say(f"{kind}: {end.process}")
        self._world.counts[f"{kind}: done"] += 1
        if kind == "kill receiver":
            self._world.receivers.end(end.process)
        else:
            end.hang()

    async def end_well(self, until: float) -> str:
        """In calm weather: a new trainer pushes, and again when a replica joined; nothing is left behind its group. The name of
        what serves."""
        for trainer in self.trainers:
            trainer.leave()
        self.pauses.clear()
        until += await self._groups_end()
        name = await self._push_in_calm(until)
        if self._grows:
            await self._one_more(name, until)
            name = await self._push_in_calm(until)
        await self._last.shut_down()
        while why := self._left(name):
            if self._world.now > until:
                raise Wrong(why)
            await asyncio.sleep(0.2)
        self._world.counts["end: push well"] += 1
        return name

    async def converge(self, until: float) -> None:
        """In calm weather, before anything else is signalled: all replicas come to serve the newest commit. Raises Wrong."""
        until += await self._groups_end()
        while True:
            wanted = self._desired()
            rows = await self._rows()
            served = {row["current_snapshot_identity"] for row in rows if row["readiness"]}
            # A signal of torn files is taken, and never serves. Nor does what no replica could stage, until the next signal.
            serves = wanted in self._oracle.weights and not self._world.counts["event: staging"]
            right = served == {wanted} if serves else len(served) == 1
            if right and all(row["readiness"] for row in rows):
                break
            if self._world.now > until:
                raise Wrong(f"{wanted} is the newest commit, and not all serve it: {json.dumps(rows)[:2000]}")
            await asyncio.sleep(0.2)
        self._world.counts["end: all serve the newest commit"] += 1

    def _desired(self) -> str:
        with contextlib.closing(sqlite3.connect(self._world.place / "ledger.db")) as db:
            ((found,),) = db.execute("SELECT desired_snapshot FROM deployments").fetchall()
        return "base" if found is None else str(found)

    async def _push_in_calm(self, until: float) -> str:
        value = {"weights": 3, "policy": "all", "calls": 2, "packed": True, "trouble": None}
        value |= {"phase": "", "s": 0.0, "shutdown": False}
        name = await self._last.push(value, until - self._world.now)
        if name is None:
            raise Wrong("no push is taken in calm weather")
        rows = await self._rows()
        if not rows or any(row["current_snapshot_identity"] != name for row in rows):
            raise Wrong(f"{name} was answered, and not all serve it: {json.dumps(rows)[:2000]}")
        return name

    async def _one_more(self, name: str, until: float) -> None:
        """A replica joins, and gets what was pushed before it came."""
        count = len(await self._rows()) + 1
        body = {"minReplicaCount": count, "maxReplicaCount": count}
        answer = await exchange(self._port, "PATCH", DEPLOYMENT, body)
        if answer.status != 200:
            raise Wrong(f"a replica more is answered {answer}")
        rows: Any = []
        while len(rows) != count or any(row["current_snapshot_identity"] != name for row in rows):
            if self._world.now > until:
                raise Wrong(f"not all of {count} serve {name}: {json.dumps(rows)[:2000]}")
            await asyncio.sleep(0.2)
            rows = await self._rows()
        self._world.counts["end: a replica joined behind a push"] += 1
        await asyncio.sleep(SEEN_S)

    async def _rows(self) -> Any:
        return (await exchange(self._port, "GET", HOT_LOAD)).json()["replicas"]

    async def _groups_end(self) -> float:
        """Waits until no group works on an update, and none that has ended has receivers; how long that took. Raises Wrong."""
        begun = self._world.now
        while why := self._works():
            if self._world.now > begun + GROUP_S:
                raise Wrong(why)
            await asyncio.sleep(0.2)
        return self._world.now - begun

    def _works(self) -> str | None:
        with contextlib.closing(sqlite3.connect(self._world.place / "ledger.db")) as db:
            rows = db.execute(
                "SELECT name, phase, deadline FROM transfers WHERE open_of IS NOT NULL"
            ).fetchall()
        late = [row for row in rows if row[2] is not None]
        if late:
            return f"groups are past their deadlines: {late}"
        if not rows and (receivers := self._world.receivers.alive()):
            return f"no group is open, and receivers are left: {receivers}"
        return None

    def _left(self, name: str) -> str | None:
        """What is not as it has to be when no group is open."""
        if receivers := self._world.receivers.alive():
            return f"receivers are left: {receivers}"
        for process, replica in self._world.replicas:
            if process.alive:
                root: Path = replica.transfers._chains._cache.root
                if left := [path.name for path in root.iterdir() if path.name.startswith(TEMPORARY_PREFIX)]:
                    return f"{process} has {left}"
        return self._kept(name)

    def _kept(self, name: str) -> str | None:
        """Whether the bucket has it whole."""
        objects = self._world.bucket.objects
        manifest = objects.get(f"{self._url}/{name}/{MANIFEST_FILE}")
        if manifest is None:
            return f"{name} was not put into the bucket"
        stated = {file.name for file in parse_manifest(manifest.data)}
        data = {file: objects[f"{self._url}/{name}/{file}"].data for file in stated}
        if weights_of(data.items()) != self._oracle.weights[name]:
            raise Wrong(f"the bucket has other weights of {name}")
        return None
