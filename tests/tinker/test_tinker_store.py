"""The front's rows: made once, kept over a restart, seen by their tenant only, and not for ever."""

from __future__ import annotations

import inspect
import sqlite3
import time
from pathlib import Path

import pytest

from midstream.core.clock import steady, steady_clock
from midstream.core.errors import ConfigError
from midstream_tinker import store as module
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.store import EXPIRE_EVERY_S, IDLE_S, SILENT_S, CheckpointRow, Store
from midstream_tinker.trainer.types import LoraConfig
from midstream_tinker.training import Training


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    return Store(":memory:", clock)


def checkpoint(model_id: str, name: str = "final", tenant: str = "t", created: float = 1.0) -> CheckpointRow:
    return CheckpointRow(
        uri=f"tinker://{model_id}/weights/{name}",
        tenant=tenant,
        model_id=model_id,
        kind="weights",
        name=name,
        created=created,
        snapshot=None,
        base_model="tiny",
        size=123,
        user_metadata={"why": "test"},
    )


def test_everything_is_there_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "tinker.db"
    before = Store(path, clock)
    session = before.create_session("t", display_name="run", user_metadata={"a": [1]})
    sampler = before.create_sampling_session(
        "t", session.id, 0, base_model="tiny", policy="exact", snapshot="base"
    )
    model = before.create_model(
        "t", session.id, 0, base_model="tiny", lora=LoraConfig(rank=8, seed=2**63 - 1)
    )
    row = checkpoint(model.id)
    before.add_checkpoint("t", row)
    before.close()
    after = Store(path, clock)
    assert after.session("t", session.id) == session
    assert after.sampling_session("t", sampler.id) == sampler
    assert after.model("t", model.id) == model
    assert after.models("t") == [model]
    assert after.checkpoint("t", row.uri) == row
    assert model.id == f"{session.id}:train:0"
    assert ":" not in sampler.id
    after.close()


def test_what_is_asked_for_twice_is_made_once(store: Store) -> None:
    session = store.create_session("t")
    samplers = [
        store.create_sampling_session("t", session.id, 3, base_model="tiny", policy="serving")
        for _ in range(2)
    ]
    assert samplers[0] == samplers[1]
    models = [
        store.create_model("t", session.id, 0, base_model="tiny", lora=LoraConfig(rank=0)) for _ in range(2)
    ]
    assert models[0] == models[1]
    assert len(store.models("t")) == 1
    assert store.sampling_session_at("t", session.id, 3) == samplers[0]
    assert store.sampling_session_at("t", session.id, 4) is None
    assert store.sampling_session_at("other", session.id, 3) is None


def test_a_counter_used_for_something_else_is_refused(store: Store) -> None:
    session = store.create_session("t")
    store.create_sampling_session("t", session.id, 0, base_model="tiny", policy="exact")
    with pytest.raises(TinkerRefusal, match="sampling_session_seq_id 0 was used before") as caught:
        store.create_sampling_session("t", session.id, 0, base_model="other", policy="exact")
    assert caught.value.status == 400
    store.create_model("t", session.id, 0, base_model="tiny", lora=LoraConfig(rank=8))
    with pytest.raises(TinkerRefusal, match="model_seq_id 0 was used before"):
        store.create_model("t", session.id, 0, base_model="tiny", lora=LoraConfig(rank=16))


def test_another_tenant_sees_and_changes_nothing(store: Store) -> None:
    session = store.create_session("t")
    sampler = store.create_sampling_session("t", session.id, 0, base_model="tiny", policy="exact")
    model = store.create_model("t", session.id, 0, base_model="tiny", lora=LoraConfig())
    row = checkpoint(model.id)
    store.add_checkpoint("t", row)
    store.sampling_session("t", sampler.id)
    assert store.session("o", session.id) is None
    assert not store.touch_session("o", session.id)
    assert store.sampling_session("o", sampler.id) is None
    assert store.model("o", model.id) is None
    assert store.checkpoint("o", row.uri) is None
    assert not store.delete_checkpoint("o", row.uri)
    assert (store.sessions("o"), store.models("o"), store.checkpoints("o")) == ([], [], [])
    with pytest.raises(TinkerRefusal) as caught:
        store.create_model("o", session.id, 1, base_model="tiny", lora=LoraConfig())
    assert (caught.value.status, caught.value.param) == (404, "session_id")
    with pytest.raises(TinkerRefusal):
        store.create_sampling_session("o", session.id, 1, base_model="tiny", policy="exact")
    assert store.checkpoint("t", row.uri) == row


def test_an_idle_session_goes_with_what_stands_under_it_but_not_its_checkpoints(
    store: Store, clock: Clock
) -> None:
    session = store.create_session("t")
    sampler = store.create_sampling_session("t", session.id, 0, base_model="tiny", policy="exact")
    kept, dropped = (
        store.create_model("t", session.id, seq, base_model="tiny", lora=LoraConfig()) for seq in (0, 1)
    )
    store.add_checkpoint("t", checkpoint(kept.id))
    assert store.sampling_session("t", sampler.id) is not None
    clock.now += IDLE_S + 1
    store.expire()
    assert store.session("t", session.id) is None
    assert store.sampling_session("t", sampler.id) is None
    assert [model.id for model in store.models("t")] == [kept.id]
    assert store.model("t", dropped.id) is None
    assert store.checkpoints("t", kept.id) == [checkpoint(kept.id)]


@pytest.mark.parametrize("sign", ["heartbeat", "sample"])
def test_a_session_in_use_stays(store: Store, clock: Clock, sign: str) -> None:
    session = store.create_session("t")
    sampler = store.create_sampling_session("t", session.id, 0, base_model="tiny", policy="exact")
    for _ in range(5):
        clock.now += IDLE_S / 2
        store.expire()
        if sign == "heartbeat":
            assert store.touch_session("t", session.id)
        else:
            assert store.sampling_session("t", sampler.id) == sampler
    assert store.session("t", session.id) is not None
    assert store.sampling_session("t", sampler.id) == sampler


def test_a_client_that_outlives_a_long_downtime_keeps_its_session(tmp_path: Path, clock: Clock) -> None:
    before = Store(tmp_path / "tinker.db", clock)
    session = before.create_session("t")
    before.close()
    clock.now += 2 * IDLE_S
    after = Store(tmp_path / "tinker.db", clock)
    after.create_session("another that comes first")
    assert after.touch_session("t", session.id)
    clock.now += EXPIRE_EVERY_S
    after.expire()
    assert after.session("t", session.id) is not None
    after.close()


def test_beyond_the_limit_silent_sessions_make_room_and_live_ones_do_not(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    first, second = store.create_session("t"), store.create_session("t")
    with pytest.raises(TinkerRefusal) as caught:
        store.create_session("t")
    assert caught.value.status == 400
    store.create_session("other")
    clock.now += SILENT_S
    store.touch_session("t", first.id)
    third = store.create_session("t")
    assert {session.id for session in store.sessions("t")} == {first.id, third.id}
    assert store.session("t", second.id) is None


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 2 * IDLE_S])
def test_a_system_clock_that_is_set_ends_no_session(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    store = Store(":memory:", steady_clock())
    live = [store.create_session("t") for _ in range(2)]
    set_clock = time.time() + jump_s
    monkeypatch.setattr(time, "time", lambda: set_clock)
    store.expire()
    with pytest.raises(TinkerRefusal, match="2 sessions in use"):
        store.create_session("t")
    assert all(store.session("t", session.id) for session in live)


@pytest.mark.parametrize("user", [Store, Training])
def test_who_compares_ages_does_so_by_one_steady_clock(user: type) -> None:
    assert inspect.signature(user).parameters["clock"].default is steady


def test_old_sampling_sessions_make_room_for_new_ones(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SAMPLING_SESSIONS", 2)
    session = store.create_session("t")
    made = []
    for seq in range(3):
        clock.now += 1
        made.append(store.create_sampling_session("t", session.id, seq, base_model="tiny", policy="serving"))
    assert {one.id for one in store.sampling_sessions("t", session.id)} == {made[1].id, made[2].id}


def test_a_checkpoint_is_replaced_listed_newest_first_and_deleted(store: Store) -> None:
    session = store.create_session("t")
    model = store.create_model("t", session.id, 0, base_model="tiny", lora=LoraConfig())
    store.add_checkpoint("t", checkpoint(model.id, "a", created=1.0))
    store.add_checkpoint("t", checkpoint(model.id, "b", created=2.0))
    store.add_checkpoint("t", checkpoint(model.id, "a", created=3.0))
    assert [(row.name, row.created) for row in store.checkpoints("t", model.id)] == [("a", 3.0), ("b", 2.0)]
    assert store.delete_checkpoint("t", f"tinker://{model.id}/weights/a")
    assert not store.delete_checkpoint("t", f"tinker://{model.id}/weights/a")
    assert [row.name for row in store.checkpoints("t")] == ["b"]


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tinker.db"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="version 99"):
        Store(path)
    path.write_bytes(b"not a database, and long enough to be seen as none" * 100)
    with pytest.raises(ConfigError, match=r"tinker\.db"):
        Store(path)
