"""KV that one engine gives to another: found there as here, with all that is kept beside it, and nowhere else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import needs_compiler, request, run
from msgspec.structs import replace
from test_offload import FLIPS, VOCABULARY, Twin, lora

from midstream.core.config import EngineSettings
from midstream.core.types import BASE_SNAPSHOT, GenerateRequest
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.kv_copies import UNKNOWN, kind_of
from midstream.engine.kv_copies import KvPiece, KvPlace, KvRefused
from midstream.replica.namespaces import cache_salt

PROMPT = random.Random(5).choices(range(VOCABULARY), k=100)
SALT = cache_salt(0, "t", "", "m")
KEPT_S = 30.0


def packed(prompt: Sequence[int]) -> bytes:
    return np.array(prompt, dtype=np.int32).tobytes()


def given(
    core: EngineCore, place: KvPlace, first: int, most: int, age_max: int | None = None
) -> tuple[KvPiece, np.ndarray]:
    content = np.zeros(most * core.copies.block_bytes, dtype=np.uint8)
    part = core.copies.give(place, first, most, age_max, content)
    return part, content[: part.count * core.copies.block_bytes]


def travels(
    old: EngineCore,
    new: EngineCore,
    prompt: Sequence[int],
    salts: tuple[bytes, bytes] = (SALT, SALT),
    *,
    policy: str = "",
    session: str = "s",
    age_max: int | None = None,
    most: int = 3,
) -> int:
    """The blocks that are at the new home then."""
    there, here = (KvPlace(salt, policy, packed(prompt)) for salt in salts)
    part, content = given(old, there, 0, 0, age_max)
    if not part.total:
        return 0
    total, blocks = part.total, new.copies.take(here, part, content, session, KEPT_S)
    while blocks < total:
        part, content = given(old, there, blocks, most, age_max)
        before, blocks = blocks, new.copies.take(here, part, content, session, KEPT_S)
        if blocks <= before:
            break
    for core in (old, new):
        core.check()
    return blocks


def asked(name: str, prompt: Sequence[int], salt: bytes = SALT, **more: Any) -> GenerateRequest:
    echo = more.pop("echo", 0)
    plain = request(name, prompt, max_tokens=more.pop("max_tokens", 4), echo=echo, salt=salt)
    return replace(plain, want_kv_snapshots=True, **more)


def commit(core: EngineCore, model: Path, snapshot: str, files: str = "f", **more: Any) -> None:
    core.set_staged(core.stage(model))
    core.commit(snapshot, files=files or snapshot, **more)


class Homes(Twin):
    """Sessions that move between two engines before most turns, or stay on one. Each has an isolation key of its own."""

    def __init__(self, cores: list[EngineCore], staged: dict[str, Path], seed: int) -> None:
        super().__init__(cores[0], staged, seed)
        self.cores = cores
        self.home: dict[str, int] = {}
        self.moved = 0

    def move(self, number: int) -> None:
        """Of all sessions that may: those in the newest namespace."""
        for key, prompt in self.histories.items():
            policy, session = key.split("/")
            namespaces = self.namespaces[policy]
            where, moves = ("", session), self.rng.random() < 0.5
            if namespaces.newest(where) is None or not moves or len(self.cores) == 1:
                continue
            old = self.home.get(key, 0)
            self.home[key] = 1 - old
            salt = cache_salt(namespaces.admit(where), "", session, policy or "base")
            blocks = travels(
                self.cores[old],
                self.cores[1 - old],
                prompt,
                (salt, salt),
                policy=policy,
                session=key,
                age_max=namespaces.kv_age_max,
                most=1 + number % 4,
            )
            self.moved += blocks

    def turn(self, number: int) -> None:
        # As Twin, on the session's home.
        rng = self.rng
        policy, session = rng.choice(["", "", "lora"]), rng.choice(["a", "b", "c", "d"])
        key = f"{policy}/{session}"
        before = self.histories.get(key) or rng.choice(self.trunks)[: rng.randrange(20, 97)]
        prompt = [*before, *[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))]][-200:]
        echo = rng.choice((0, 0, len(prompt), rng.randrange(len(prompt))))
        namespaces = self.namespaces[policy]
        salt = cache_salt(namespaces.admit(("", session)), "", session, policy or "base")
        one = request(
            f"r{number}", prompt, echo=echo, seed=number, salt=salt, max_tokens=rng.randrange(1, 24)
        )
        one = replace(
            one,
            policy=policy,
            session=key,
            kept_s=KEPT_S,
            kv_age_max=namespaces.kv_age_max,
            want_kv_snapshots=True,
        )
        found = run(self.cores[self.home.get(key, 0)], [one])[f"r{number}", 0]
        self.histories[key] = [*prompt, *[t.token_id for t in found.tokens]]
        self.said.append(self.numbers(found))

    def swap(self, number: int) -> None:
        policy, (reset, age) = self.rng.choice(["", "lora"]), self.rng.choice(FLIPS)
        directory = self.staged["lora"] if policy else self.rng.choice(list(self.staged.values())[:2])
        for core in self.cores:
            core.set_staged(core.stage(directory), policy)
            core.commit(f"{policy}step-{number}", policy, files=str(directory))
            if reset == "all":
                core.abandon_kv(policy)
        self.namespaces[policy].commit(reset, age, str(number))


@pytest.mark.parametrize(("kernels", "count"), [("native", 90), ("torch", 30)])
def test_sessions_that_move_say_what_those_say_that_stay_bit_for_bit(
    tmp_path: Path, tiny_model: Callable[..., Path], kernels: str, count: int
) -> None:
    """Over swaps of each cache policy, adapters, bounds on ages, and echoes. And what was cached is cached there."""
    needs_compiler(kernels)
    base, other = tiny_model(), tiny_model(seed=1)
    staged = {"base": base, "other": other, "lora": lora(base, tmp_path)}
    settings = EngineSettings(kernels=kernels, kv_cache_tokens=65536)  # type: ignore[arg-type]
    worlds = []
    for homes in (1, 2):
        world = Homes([EngineCore(base, settings) for _ in range(homes)], staged, seed=4)
        for core in world.cores:
            core.set_staged(core.stage(staged["lora"]), "lora")
            core.commit("lora", "lora", files="lora")
        moves = random.Random(9)
        for number in range(count):
            if number % 9 == 8:
                world.swap(number)
            # Which sessions move is no matter of what is asked.
            world.rng, kept = moves, world.rng
            world.move(number)
            world.rng = kept
            world.turn(number)
        worlds.append(world)
    assert worlds[1].said == worlds[0].said
    assert worlds[1].moved > 50
    assert sum(core.stats().kv.travelled_tokens for core in worlds[1].cores) > 500


@pytest.fixture
def pair(tiny_model: Callable[..., Path]) -> list[EngineCore]:
    return [EngineCore(tiny_model(), EngineSettings()) for _ in range(2)]


def test_kv_of_several_snapshots_arrives_with_their_names(
    pair: list[EngineCore], tiny_model: Callable[..., Path]
) -> None:
    """The new home counts its commits otherwise: it holds a policy that the old one does not have."""
    old, new = pair
    new.set_staged(new.stage(tiny_model(seed=3)), "beside")
    new.commit("b", "beside", files="b")
    run(old, [asked("first", PROMPT[:50])])
    for core in pair:
        commit(core, tiny_model(seed=1), "s1")
    run(old, [asked("second", PROMPT, echo=40)])
    assert travels(old, new, PROMPT) == 6
    stays, moves = (run(core, [asked("third", PROMPT, echo=40)])["third", 0] for core in pair)
    assert moves.kv == stays.kv == [(BASE_SNAPSHOT, 0, 48), ("s1", 48, 103)]
    assert (moves.cached, moves.tokens, moves.prompt) == (stays.cached, stays.tokens, stays.prompt)
    assert moves.cached == 96


def test_other_weights_under_the_same_names_get_nothing(
    pair: list[EngineCore], tiny_model: Callable[..., Path]
) -> None:
    old, new = pair
    commit(old, tiny_model(seed=1), "s1", files="one")
    commit(new, tiny_model(seed=2), "s1", files="other")
    run(old, [asked("first", PROMPT)])
    with pytest.raises(KvRefused, match="other weights"):
        travels(old, new, PROMPT)
    commit(new, tiny_model(seed=1), "s1", files="one", overwritten=[("s1", "s1#1")])
    assert travels(old, new, PROMPT) == 6
    # One switch more, and the ages would be others.
    run(old, [asked("more", PROMPT + PROMPT)])
    commit(old, tiny_model(seed=2), "s2", files="two")
    with pytest.raises(KvRefused, match="other weights"):
        travels(old, new, PROMPT + PROMPT)
    assert new.stats().kv.travelled_tokens == 96


def test_kv_of_weights_that_nobody_knows_stays(
    pair: list[EngineCore], tiny_model: Callable[..., Path]
) -> None:
    for core in pair:
        core.set_staged(core.stage(tiny_model(seed=1)))
        core.commit("s1")
    run(pair[0], [asked("first", PROMPT)])
    assert travels(*pair, PROMPT) == 0
    for core in pair:
        commit(core, tiny_model(seed=1), "s1", files="one", overwritten=[("s1", UNKNOWN)])
    assert travels(*pair, PROMPT) == 0


def test_kv_is_found_under_its_salt_alone_and_within_the_bound_on_ages(
    pair: list[EngineCore], tiny_model: Callable[..., Path]
) -> None:
    old, new = pair
    run(old, [asked("first", PROMPT)])
    other = cache_salt(0, "u", "", "m")
    assert travels(old, new, PROMPT, (other, other)) == 0, "another tenant found what is not its own"
    assert travels(old, new, [*PROMPT[:40], 1, *PROMPT[41:]]) == 2, "other tokens were given"
    assert travels(old, new, PROMPT) == 6
    assert run(new, [asked("other", PROMPT, other)])["other", 0].cached == 0
    for core in pair:
        commit(core, tiny_model(seed=1), "s1")
    another = EngineCore(tiny_model(), EngineSettings())
    commit(another, tiny_model(seed=1), "s1")
    assert travels(old, another, PROMPT, age_max=0) == 0, "older KV was given than a turn would find"
    assert run(new, [asked("young", PROMPT, kv_age_max=0)])["young", 0].cached == 0
    assert travels(old, another, PROMPT, age_max=1) == 6
    assert run(another, [asked("old", PROMPT, kv_age_max=1)])["old", 0].cached == 96


def broken(part: KvPiece) -> list[KvPiece]:
    """What no engine says."""
    label, files = part.commits[0]
    return [
        replace(part, **change)
        for change in (
            {"count": part.count + 1},
            {"first": part.first + 1},
            {"first": 2**40},
            {"total": part.total - part.count},
            {"spans": ()},
            {"spans": ((0, 1),)},
            {"spans": ((1, 0),)},
            {"spans": ((0, 0), (0, 0))},
            {"spans": ((0, 0), (2**40, 0))},
            {"commits": ()},
            {"commits": ((label, files), (label, files))},
            {"commits": ((label, "x"),)},
        )
    ]


def test_a_piece_that_contradicts_itself_leaves_the_cache_as_it_was(pair: list[EngineCore]) -> None:
    old, new = pair
    run(old, [asked("first", PROMPT)])
    place = KvPlace(SALT, "", packed(PROMPT))
    part, content = given(old, place, 0, 6)
    before = new.stats().kv
    for wrong in broken(part):
        with pytest.raises(KvRefused):
            new.copies.take(place, wrong, content, "s", KEPT_S)
    with pytest.raises(KvRefused):
        new.copies.take(place, part, content[:-1], "s", KEPT_S)
    with pytest.raises(KvRefused):
        new.copies.take(place._replace(policy="gone"), part, content, "s", KEPT_S)
    with pytest.raises(KvRefused):
        new.copies.take(place._replace(tokens=packed(PROMPT[:90])), part, content, "s", KEPT_S)
    assert new.stats().kv == before
    assert new.copies.take(place, part, content, "s", KEPT_S) == 6
    assert new.copies.take(place, part, content, "s", KEPT_S) == 6, "a piece that comes twice is there once"
    assert new.stats().kv.travelled_tokens == 96
    new.check()


def test_a_piece_whose_beginning_is_not_here_is_not_taken(pair: list[EngineCore]) -> None:
    old, new = pair
    run(old, [asked("first", PROMPT)])
    place = KvPlace(SALT, "", packed(PROMPT))
    part, content = given(old, place, 3, 3)
    assert new.copies.take(place, part, content, "s", KEPT_S) == 0
    # The same tokens, computed by others.
    assert new.stats().kv.travelled_tokens == 0


def test_what_came_is_cached_kv_as_any_other(tiny_model: Callable[..., Path]) -> None:
    """It is claimed for its session, goes for a sequence that runs, and leaves nothing when the session ends."""
    old = EngineCore(tiny_model(), EngineSettings())
    new = EngineCore(tiny_model(), EngineSettings(kv_cache_tokens=160))
    run(old, [asked("first", PROMPT)])
    run(new, [asked("others", PROMPT[::-1], session="o", kept_s=KEPT_S)])
    assert travels(old, new, PROMPT) == 6
    kv = new.stats().kv
    assert kv.held >= 6, "the pool would evict the first blocks for the last ones"
    assert kv.used == 0
    assert run(new, [asked("again", PROMPT, session="s", kept_s=KEPT_S)])["again", 0].cached == 96
    new.scheduler.end_session("s")
    new.scheduler.end_session("o")
    assert new.stats().kv.held == 0
    assert run(new, [asked("large", PROMPT[1:] + PROMPT[:40])])["large", 0].error is None
    new.check()


def test_a_history_that_has_no_room_comes_in_part_and_takes_nothing_from_a_stream(
    tiny_model: Callable[..., Path],
) -> None:
    old = EngineCore(tiny_model(), EngineSettings())
    new = EngineCore(tiny_model(), EngineSettings(kv_cache_tokens=96))
    run(old, [asked("first", PROMPT)])
    new.add(asked("stream", PROMPT[::-1][:60], max_tokens=20))
    new.step()
    blocks = travels(old, new, PROMPT, most=1)
    assert 0 < blocks < 6
    (stream,) = new.scheduler.running
    steps = 0
    while not new.idle:
        assert new.step()
        steps += 1
    assert (stream.generated, steps) == (20, 19), "a stream stood still, or was computed again"
    new.check()


def test_what_lies_in_the_second_tier_travels_too(tiny_model: Callable[..., Path]) -> None:
    settings = EngineSettings(kv_cache_tokens=160, kv_offload_memory="64MiB")
    old, new = (EngineCore(tiny_model(), settings) for _ in range(2))
    run(old, [asked("first", PROMPT, echo=100)])
    run(old, [asked("others", PROMPT[::-1] + PROMPT[:40])])
    assert old.stats().kv.offloaded >= 4
    assert travels(old, new, PROMPT) == 6
    large = EngineCore(tiny_model(), EngineSettings())
    run(large, [asked("first", PROMPT, echo=100)])
    stays, moves = (run(core, [asked("again", PROMPT, echo=100)])["again", 0] for core in (large, new))
    assert (moves.cached, moves.tokens, moves.prompt) == (stays.cached, stays.tokens, stays.prompt)


def test_engines_that_differ_say_so(tiny_model: Callable[..., Path]) -> None:
    def kind(model: Path, **settings: Any) -> tuple[str, int]:
        core = EngineCore(model, EngineSettings(**settings))
        form = core.copies.form(kind_of(core.weights(), core.runner.model.decoder, model))
        return form.kind, form.block_tokens

    usual = kind(tiny_model())
    assert kind(tiny_model()) == usual
    others = [
        kind(tiny_model(seed=1)),
        kind(tiny_model(), dtype="bfloat16"),
        kind(tiny_model(), kernels="torch"),
        kind(tiny_model(), block_size=8),
    ]
    assert len({usual, *others}) == 5


def test_a_history_that_gives_way_to_itself_is_no_claim_on_the_second_tier(
    tiny_model: Callable[..., Path],
) -> None:
    """A stream leaves room for half of it. A claim on what has gone to the second tier would end the engine later."""
    old = EngineCore(tiny_model(), EngineSettings())
    new = EngineCore(tiny_model(), EngineSettings(kv_cache_tokens=112, kv_offload_memory="64MiB"))
    run(old, [asked("first", PROMPT)])
    new.add(asked("stream", PROMPT[::-1][:60], max_tokens=20))
    new.step()
    assert travels(old, new, PROMPT, most=6) == 6
    while not new.idle:
        new.step()
    stays, moves = (run(core, [asked("again", PROMPT)])["again", 0] for core in (old, new))
    assert (moves.cached, moves.tokens) == (96, stays.tokens)
    new.scheduler.end_session("s")
    new.check()
