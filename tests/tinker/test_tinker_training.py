"""What training calls do to models, checkpoints and what serves; the trainer process and the deployment are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from training_fakes import BASE, TENANT, World, create, forward_backward, optim, world

from midstream_tinker.futures import PROTOBUF
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.trainer import protocol as m
from midstream_tinker.trainer.types import WorkFailed
from midstream_tinker.types import (
    CreateSamplingSessionBody,
    LoadWeightsBody,
    OptimizerConfig,
    OptimStepBody,
    SaveWeightsBody,
    SaveWeightsForSamplerBody,
)
from midstream_tinker.weights import parse_uri

KEY = "tml-key"


@asynccontextmanager
async def play(root: Path, **options: float) -> AsyncIterator[World]:
    async with world(root, **options) as at:
        yield at


async def save(at: World, model: str, seq_id: int, name: str, *, overwrite: bool = False) -> str:
    body = SaveWeightsBody(model_id=model, seq_id=seq_id, path=name, overwrite=overwrite)
    return await at.training.submit(TENANT, KEY, body)


async def save_for_sampler(at: World, model: str, seq_id: int, name: str) -> str:
    body = SaveWeightsForSamplerBody(model_id=model, seq_id=seq_id, path=name)
    return await at.training.submit(TENANT, KEY, body)


async def save_ephemeral(at: World, model: str, seq_id: int, number: int = 0) -> str:
    body = SaveWeightsForSamplerBody(model_id=model, seq_id=seq_id, sampling_session_seq_id=number)
    return await at.training.submit(TENANT, KEY, body)


async def load(at: World, model: str, seq_id: int, path: str) -> str:
    body = LoadWeightsBody(model_id=model, seq_id=seq_id, path=path, optimizer=True)
    return await at.training.submit(TENANT, KEY, body)


async def restore(at: World, seq: int, path: str) -> str:
    body = LoadWeightsBody(session_id=at.session, model_seq_id=seq, path=path, optimizer=True)
    return await at.training.submit(TENANT, KEY, body)


# -- order


async def test_requests_are_carried_out_in_seq_order_whatever_the_order_of_arrival(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        requests = [await at.step(model, 4, 0.4), await at.loss(model, 3), await at.step(model, 2, 0.2)]
        requests.append(await at.loss(model, 1))
        for request in requests:
            assert (await at.ended(request)).outcome is not None
        assert at.trainer.weights[model] == ["loss 1", "step 0.2", "loss 3", "step 0.4"]


async def test_a_repeated_submission_is_the_same_request_and_another_body_is_refused(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        first = await at.step(model, 1)
        assert await at.step(model, 1) == first
        await at.ended(first)
        assert await at.step(model, 1) == first
        with pytest.raises(TinkerRefusal) as refused:
            await at.step(model, 1, 0.7)
        assert (refused.value.status, refused.value.param) == (400, "seq_id")
        other = forward_backward(model, 2, token=3)
        made = await at.training.submit(TENANT, KEY, other)
        with pytest.raises(TinkerRefusal):
            await at.loss(model, 2)
        await at.ended(made)
        assert at.trainer.weights[model] == ["step 0.1", "loss 2"]


async def test_create_model_is_idempotent_and_a_session_number_stands_for_one_model(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        body = create(at.new_session(), 0, 8)
        first = await at.training.submit(TENANT, KEY, body)
        assert await at.training.submit(TENANT, KEY, body) == first
        assert (await at.result(first)) == {"type": "create_model", "model_id": f"{at.session}:train:0"}
        with pytest.raises(TinkerRefusal) as refused:
            await at.training.submit(TENANT, KEY, create(at.session, 0, 16))
        assert refused.value.status == 400
        assert [type(said) for said in at.trainer.said] == [m.CreateModel]


async def test_a_request_that_fails_or_is_refused_holds_up_nobody(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        failed = await at.loss(model, 1, "nonsense")
        error = TinkerRefusal(400, "the field data is not supported here", "data")
        refused = at.training.refuse(TENANT, model, 2, error)
        assert refused is not None
        other = {"type": "dimuon", "learning_rate": 0.1}
        muon = OptimStepBody(model_id=model, seq_id=3, optimizer_params=other)
        unknown = await at.training.submit(TENANT, KEY, muon)
        last = await at.step(model, 4)
        assert await at.error(failed) == ("the loss 'nonsense' is not known here", "user")
        assert await at.error(refused) == ("the field data is not supported here", "user")
        assert "'dimuon'" in (await at.error(unknown))[0]
        assert (await at.result(last))["metrics"] == {"grad_norm:mean": 2.0}


async def test_a_refusal_for_nobody_knows_whose_model_takes_no_turn(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        error = TinkerRefusal(400, "no")
        assert at.training.refuse("somebody else", model, 1, error) is None
        assert at.training.refuse(TENANT, "session_00:train:9", 1, error) is None
        assert (await at.result(await at.step(model, 1)))["metrics"]


async def test_models_take_turns(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        one, other = await at.model(0), await at.model(1)
        held = asyncio.Event()
        at.trainer.before = lambda command: held.wait()
        requests = [await at.step(one, seq_id) for seq_id in range(1, 5)]
        requests += [await at.step(other, seq_id) for seq_id in range(1, 5)]
        await asyncio.sleep(0)
        held.set()
        for request in requests:
            await at.ended(request)
        steps = [said.model_id for said in at.trainer.said if isinstance(said, m.OptimStep)]
        assert steps == [one, other] * 4


async def test_training_goes_on_while_weights_are_on_their_way_to_the_replicas(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        at.publish.gate = asyncio.Event()
        first = await save_ephemeral(at, model, 1, 0)
        await at.ended(await at.step(model, 2))
        second = await save_ephemeral(at, model, 3, 1)
        third = await at.step(model, 4)
        assert not at.future(first).done
        # A second export waits for the first.
        assert at.trainer.weights[model] == ["step 0.1"]
        at.publish.gate.set()
        await at.result(third)
        await at.result(second)
        run = f"tinker-{at.session.removeprefix('session_')}-0"
        assert at.publish.bucket == {f"{run}-1": [], f"{run}-3": ["step 0.1"]}
        assert at.publish.serving == [(f"{run}-1", KEY), (f"{run}-3", KEY)]
        assert list(at.places.exports.iterdir()) == []


# -- what belongs to whom, and what is not there


async def test_what_is_unknown_or_belongs_to_another_key_is_a_404(tmp_path: Path) -> None:
    async def scene(at: World) -> None:
        model = await at.model()
        path = str((await at.result(await save(at, model, 1, "mine")))["path"])
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: at.training.submit("other", KEY, optim(model, 2)),
            lambda: at.training.submit(TENANT, KEY, optim("session_00:train:0", 2)),
            lambda: at.training.submit("other", KEY, create(at.session, 5)),
            lambda: at.training.delete_checkpoint("other", path),
            lambda: at.training.delete_checkpoint(TENANT, path.replace("mine", "yours")),
            lambda: restore_as(at, "other", path),
        ]
        for call in calls:
            with pytest.raises(TinkerRefusal) as refused:
                await call()
            assert refused.value.status == 404
        with pytest.raises(TinkerRefusal) as refused:
            at.training.weights_info("other", path)
        assert refused.value.status == 404

    async def restore_as(at: World, tenant: str, path: str) -> str:
        session = at.store.create_session(tenant).id
        body = LoadWeightsBody(session_id=session, model_seq_id=0, path=path)
        return await at.training.submit(tenant, KEY, body)

    async with play(tmp_path) as at:
        await scene(at)


async def test_another_base_model_or_optimizer_is_refused_with_what_there_is(tmp_path: Path) -> None:
    async def scene(at: World) -> None:
        body = create(at.new_session())
        for field, value in (("base_model", "gpt-2"), ("optimizer_config", OptimizerConfig(type="dimuon"))):
            with pytest.raises(TinkerRefusal) as refused:
                await at.training.submit(TENANT, KEY, replaced(body, field, value))
            assert (refused.value.status, refused.value.param) == (400, field)
        assert BASE in str(refused.value) or "adamw" in str(refused.value)

    def replaced(body: object, field: str, value: object) -> object:
        import msgspec

        return msgspec.structs.replace(body, **{field: value})  # type: ignore[type-var]

    async with play(tmp_path) as at:
        await scene(at)


async def test_a_request_without_seq_id_is_refused(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        for seq_id in (None, 0):
            with pytest.raises(TinkerRefusal) as refused:
                await at.training.submit(TENANT, KEY, optim(model, seq_id))
            assert (refused.value.status, refused.value.param) == (400, "seq_id")


# -- saved weights


async def test_a_loss_result_is_protobuf(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        outcome = (await at.ended(await at.loss(model, 1))).outcome
        assert outcome is not None
        assert outcome.media_type == PROTOBUF
        assert b"loss:sum" in outcome.body


async def test_a_state_and_sampler_weights_of_one_name_are_two_checkpoints(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model(rank=4)
        await at.step(model, 1)
        state, sampler = await save(at, model, 2, "final"), await save_for_sampler(at, model, 3, "final")
        paths = [str((await at.result(request))["path"]) for request in (state, sampler)]
        assert paths == [f"tinker://{model}/{kind}/final" for kind in ("weights", "sampler_weights")]
        kept = {row.kind: row for row in at.store.checkpoints(TENANT, model)}
        identity = f"tinker-{at.session.removeprefix('session_')}-0-3-final"
        assert kept["sampler_weights"].snapshot == identity
        assert kept["weights"].snapshot is None
        assert at.publish.bucket == {identity: ["step 0.1"]}
        # Saving changes nothing that serves.
        assert at.publish.serving == []
        row, lora = at.training.weights_info(TENANT, paths[0])
        assert (row.base_model, lora.rank, row.size) == (BASE, 4, 7)
        with pytest.raises(TinkerRefusal, match="for sampling"):
            at.training.weights_info(TENANT, paths[1])


async def test_a_state_that_could_not_be_written_is_no_checkpoint(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()

        def refuse(command: object) -> None:
            if isinstance(command, m.SaveState):
                raise WorkFailed("the disk is full", "server")

        at.trainer.before = refuse
        assert await at.error(await save(at, model, 1, "a")) == ("the disk is full", "server")
        assert at.store.checkpoints(TENANT, model) == []


async def test_a_name_is_not_used_twice_unless_overwriting_is_asked_for(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        path = str((await at.result(await save(at, model, 1, "a")))["path"])
        await at.step(model, 2)
        message, category = await at.error(await save(at, model, 3, "a"))
        assert path in message
        assert category == "user"
        assert (await at.result(await save(at, model, 4, "a", overwrite=True)))["path"] == path
        assert len(at.store.checkpoints(TENANT, model)) == 1
        await at.ended(await at.step(model, 5, 0.5))
        await at.result(await load(at, model, 6, path))
        assert at.trainer.weights[model] == ["step 0.1"]
        await at.result(await save_for_sampler(at, model, 7, "a"))
        assert "is there already" in (await at.error(await save_for_sampler(at, model, 8, "a")))[0]


@pytest.mark.parametrize("name", ["../../escape", "a/b", "", ".", "..", "x" * 200, "a\x00b"])
async def test_a_bad_name_fails_its_request_and_writes_nothing(tmp_path: Path, name: str) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        assert (await at.error(await save(at, model, 1, name)))[1] == "user"
        assert (await at.error(await save_for_sampler(at, model, 2, name)))[1] == "user"
        assert not any(isinstance(said, m.SaveState | m.ExportWeights) for said in at.trainer.said)
        assert at.publish.bucket == {}


async def test_a_model_is_made_of_a_saved_state(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model(rank=4)
        await at.step(model, 1)
        path = str((await at.result(await save(at, model, 2, "s")))["path"])
        made = await restore(at, 1, path)
        assert await restore(at, 1, path) == made
        assert (await at.result(made)) == {
            "type": "load_weights",
            "model_id": f"{at.session}:train:1",
            "path": path,
        }
        row = at.store.model(TENANT, f"{at.session}:train:1")
        assert row is not None
        assert (row.lora.rank, row.restored_from) == (4, path)
        await at.ended(await at.step(row.id, 1, 0.3))
        assert at.trainer.weights[row.id] == ["step 0.1", "step 0.3"]
        assert at.trainer.weights[model] == ["step 0.1"]


async def test_a_state_of_another_shape_does_not_go_into_a_model_even_if_that_is_lost(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model, other = await at.model(0, rank=4), await at.model(1, rank=0)
        path = str((await at.result(await save(at, model, 1, "s")))["path"])
        message, category = await at.error(await load(at, other, 1, path))
        assert "rank 4" in message
        assert "all weights" in message
        assert category == "user"
        at.trainer.die()
        assert "rank 4" in (await at.error(await load(at, other, 2, path)))[0]
        await at.result(await load(at, model, 2, path))
        assert list(at.trainer.weights) == [model]


async def test_a_deleted_state_is_gone_with_its_files(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        path = str((await at.result(await save(at, model, 1, "s")))["path"])
        await at.training.delete_checkpoint(TENANT, path)
        assert at.store.checkpoints(TENANT) == []
        assert not at.places.checkpoint(parse_uri(path)).exists()
        with pytest.raises(TinkerRefusal):
            await restore(at, 1, path)


async def test_a_name_that_is_used_again_while_its_old_state_is_deleted_keeps_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        path = str((await at.result(await save(at, model, 1, "s")))["path"])
        await at.step(model, 2)
        really = asyncio.to_thread

        async def late(*args: object, **options: object) -> object:
            monkeypatch.setattr(asyncio, "to_thread", really)
            await at.result(await save(at, model, 3, "s"))
            return await really(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(asyncio, "to_thread", late)
        await at.training.delete_checkpoint(TENANT, path)
        directory = at.places.checkpoint(parse_uri(path))
        assert (directory / "state.json").read_text() == '["step 0.1"]'
        assert [place.name for place in directory.parent.iterdir()] == ["s"]


async def test_what_a_trainer_that_died_left_half_written_is_removed(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        await at.result(await save(at, model, 1, "s"))

        def die(command: m.Command) -> None:
            if isinstance(command, m.SaveState | m.ExportWeights):
                place = Path(command.directory)
                half = place.with_name(f".{place.name}.writing-ab")
                half.mkdir(parents=True)
                (half / "model.safetensors").write_bytes(b"half")
                at.trainer.die()

        at.trainer.before = die
        await at.error(await save_ephemeral(at, model, 2))
        assert list(at.places.exports.iterdir()) == []
        at.trainer.before = None
        await at.result(await load(at, model, 3, f"tinker://{model}/weights/s"))
        at.trainer.before = die
        await at.error(await save(at, model, 4, "t"))

    async with play(tmp_path):
        states = [place.name for place in (tmp_path / "tinker").glob("checkpoints/*/*/*")]
        assert states == ["s"]


# -- sampling sessions


async def test_ephemeral_weights_become_a_sampling_session_of_their_run(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        request = await save_ephemeral(at, model, 1, 4)
        session = at.store.sampling_session(TENANT, (await at.result(request))["sampling_session_id"])
        assert session is not None
        run = f"tinker-{at.session.removeprefix('session_')}-0"
        assert (session.policy, session.snapshot, session.run, session.seq) == ("run", f"{run}-1", run, 4)
        assert session.base_model == BASE


async def test_a_sampling_session_never_stands_for_other_weights_than_were_saved_for_it(
    tmp_path: Path,
) -> None:
    async with play(tmp_path) as at:
        mine, other = await at.model(), await at.model(1)
        await at.result(await save_ephemeral(at, mine, 1, 4))
        for model, seq_id in ((other, 1), (mine, 2)):
            message, category = await at.error(await save_ephemeral(at, model, seq_id, 4))
            assert "sampling_session_seq_id 4 was used before" in message
            assert category == "user"


async def test_a_sampling_session_on_saved_weights_serves_them_first_and_once(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        path = str((await at.result(await save_for_sampler(at, model, 1, "best")))["path"])
        body = CreateSamplingSessionBody(session_id=at.session, sampling_session_seq_id=2, model_path=path)
        made = await at.training.create_sampling_session(TENANT, "tml-other", body)
        assert await at.training.create_sampling_session(TENANT, "tml-other", body) == made
        assert (made.policy, made.model_path, made.base_model) == ("exact", path, BASE)
        assert at.publish.serving == [(made.snapshot, "tml-other")]
        assert list(at.publish.bucket) == [made.snapshot]


async def test_asking_again_while_weights_load_does_not_put_them_over_what_came_after(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        path = str((await at.result(await save_for_sampler(at, model, 1, "best")))["path"])
        body = CreateSamplingSessionBody(session_id=at.session, sampling_session_seq_id=2, model_path=path)
        # Serve; publish; serve again, if it comes to that.
        gates = [asyncio.Event() for _ in range(3)]
        entered = iter(gates)

        async def may_go_on() -> None:
            await next(entered).wait()

        at.publish._may_go_on = may_go_on  # type: ignore[method-assign]
        first = asyncio.create_task(at.training.create_sampling_session(TENANT, KEY, body))
        again = asyncio.create_task(at.training.create_sampling_session(TENANT, KEY, body))
        for _ in range(5):
            # Both have asked; only one may be loading.
            await asyncio.sleep(0)
        gates[0].set()
        made = await first
        for gate in gates[1:]:
            gate.set()
        newer = await at.result(await save_ephemeral(at, model, 2, 3))
        assert (await again) == made
        assert newer["sampling_session_id"] != made.id
        assert len(at.publish.serving) == 2
        assert at.publish.serving[-1][0].endswith("-2")


@pytest.mark.parametrize(("category", "status"), [("user", 400), ("server", 503), ("unknown", 422)])
async def test_weights_that_cannot_be_served_make_no_session(
    tmp_path: Path, category: str, status: int
) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        path = str((await at.result(await save_for_sampler(at, model, 1, "best")))["path"])
        at.publish.failure = WorkFailed("replica-0 could not load it: NaN", category)  # type: ignore[arg-type]
        body = CreateSamplingSessionBody(session_id=at.session, sampling_session_seq_id=0, model_path=path)
        with pytest.raises(TinkerRefusal, match="NaN") as refused:
            await at.training.create_sampling_session(TENANT, KEY, body)
        assert refused.value.status == status
        assert at.store.sampling_sessions(TENANT, at.session) == []
        failed = await save_ephemeral(at, model, 2, 0)
        assert await at.error(failed) == ("replica-0 could not load it: NaN", category)
        at.publish.failure = None
        assert (await at.result(await save_ephemeral(at, model, 3, 1)))["sampling_session_id"]


async def test_a_state_cannot_be_sampled(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        path = str((await at.result(await save(at, model, 1, "s")))["path"])
        body = CreateSamplingSessionBody(session_id=at.session, sampling_session_seq_id=0, model_path=path)
        with pytest.raises(TinkerRefusal) as refused:
            await at.training.create_sampling_session(TENANT, KEY, body)
        assert (refused.value.status, refused.value.param) == (400, "model_path")
        assert at.publish.serving == []


# -- the trainer process, and room in it


async def test_when_the_trainer_dies_its_models_are_lost_and_say_so_until_they_are_loaded(
    tmp_path: Path,
) -> None:
    async with play(tmp_path) as at:
        model, other = await at.model(0), await at.model(1)
        await at.step(model, 1)
        path = str((await at.result(await save(at, model, 2, "s")))["path"])

        def die(command: object) -> None:
            if isinstance(command, m.RunForwardBackward):
                at.trainer.die()

        at.trainer.before = die
        pending = [await at.loss(model, 3), await at.step(model, 4), await at.step(other, 1)]
        for request in pending:
            message, category = await at.error(request)
            assert category == "server"
            assert "the trainer process was killed" in message
            assert "saved state" in message
        assert await at.error(await at.step(model, 5)) == await at.error(pending[1])
        at.trainer.before = None
        await at.result(await load(at, model, 6, path))
        await at.result(await at.step(model, 7, 0.7))
        assert at.trainer.weights == {model: ["step 0.1", "step 0.7"]}
        assert "killed" in (await at.error(await at.step(other, 2)))[0]
        assert at.trainer.starts == 2


async def test_what_follows_a_model_that_no_trainer_could_be_started_for_says_so(tmp_path: Path) -> None:
    async with play(tmp_path) as at:

        async def refused() -> None:
            raise WorkFailed("the model cannot be trained: no memory", "server")

        at.trainer.start = refused  # type: ignore[method-assign,assignment]
        body = create(at.new_session())
        made = await at.training.submit(TENANT, KEY, body)
        message, _ = await at.error(await at.step(f"{at.session}:train:0", 1))
        assert "no memory" in (await at.error(made))[0]
        assert "could not be made (the model cannot be trained: no memory)" in message


async def test_after_a_restart_checkpoints_are_there_and_models_can_be_loaded(tmp_path: Path) -> None:
    session = model = path = sampler = ""

    async def before(at: World) -> None:
        nonlocal session, model, path, sampler
        model = await at.model(rank=4)
        session = at.session
        await at.step(model, 1)
        path = str((await at.result(await save(at, model, 2, "s")))["path"])
        sampler = str((await at.result(await save_for_sampler(at, model, 3, "s")))["path"])

    async def after(at: World) -> None:
        at.session = session
        message, category = await at.error(await at.loss(model, 9))
        assert category == "server"
        assert "restarted" in message
        await at.result(await load(at, model, 10, path))
        await at.result(await at.step(model, 11, 0.2))
        restored = str((await at.result(await restore(at, 1, path)))["model_id"])
        assert at.trainer.weights == {model: ["step 0.1", "step 0.2"], restored: ["step 0.1"]}
        assert [row.uri for row in at.store.checkpoints(TENANT, model)] == [sampler, path]

    async with play(tmp_path) as at:
        await before(at)
    async with play(tmp_path) as at:
        await after(at)


async def test_a_finished_session_frees_its_models_once_their_requests_are_done(tmp_path: Path) -> None:
    async with play(tmp_path) as at:
        model = await at.model()
        dropping = asyncio.Event()
        at.trainer.before = lambda command: dropping.set() if isinstance(command, m.DropModel) else None
        requests = [await at.step(model, 1), await save_ephemeral(at, model, 2)]
        await at.training.finish_session("other", at.session)
        await at.training.finish_session(TENANT, at.session)
        late = await at.step(model, 3)
        for request in requests:
            await at.result(request)
        assert "finished" in (await at.error(late))[0]
        await dropping.wait()
        # Its turn with the trainer comes after.
        other = await at.model(1)
        assert list(at.trainer.weights) == [other]


async def test_when_there_is_no_room_models_of_clients_that_are_gone_make_way(tmp_path: Path) -> None:
    now = 1000.0

    async def scene(at: World) -> None:
        nonlocal now
        gone = await at.model(0)
        here_session = at.new_session()
        here = await at.model(0)
        refused = await at.training.submit(TENANT, KEY, create(here_session, 1))
        message, category = await at.error(refused)
        assert "2 models" in message
        assert category == "user"
        now += 400
        at.store.touch_session(TENANT, here_session)
        made = str(
            (await at.result(await at.training.submit(TENANT, KEY, create(here_session, 2))))["model_id"]
        )
        assert sorted(at.trainer.weights) == sorted([here, made])
        assert "its client had gone" in (await at.error(await at.step(gone, 1)))[0]

    async with world(tmp_path, max_models=2, clock=lambda: now) as at:
        await scene(at)


async def test_what_a_request_that_never_comes_held_up_fails(tmp_path: Path) -> None:
    async with play(tmp_path, gap_s=0.01) as at:
        model = await at.model()
        message, category = await at.error(await at.step(model, 2))
        assert "seq_id 1" in message
        assert category == "user"
        await at.result(await at.step(model, 3))
        assert at.trainer.weights[model] == ["step 0.1"]


async def test_a_model_whose_session_has_expired_makes_way_for_the_next(tmp_path: Path) -> None:
    now = 1000.0

    async with world(tmp_path, clock=lambda: now) as at:
        await at.model(0)
        now += 25 * 3600
        at.new_session()
        at.store.expire()
        made = await at.model(0)
        assert list(at.trainer.weights) == [made]


async def test_nothing_is_held_of_a_model_whose_session_expired_unfinished(tmp_path: Path) -> None:
    now = 1000.0

    async with world(tmp_path, clock=lambda: now) as at, asyncio.timeout(120):
        old = await at.model(0)
        worker = at.training._models[old].turns_task
        assert worker is not None
        now += 25 * 3600
        at.new_session()
        at.store.expire()
        new = await at.model(0)
        await worker
        assert list(at.training._models) == list(at.trainer.weights) == [new]
        await at.result(await at.step(new, 1))
        assert at.trainer.weights[new] == ["step 0.1"]
