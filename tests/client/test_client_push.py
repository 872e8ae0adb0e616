"""Publishing by push: what real receivers get, and how a publication ends when the server or a receiver does not play along."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from publish_world import listening
from trainer_push_world import Peers, PushWorld, push_world, refused, tensors_of

from midstream.client import (
    NotReadyInTime,
    PublishError,
    SnapshotFailed,
    SnapshotPublisher,
    TrainingRun,
    push,
)
from midstream.client.errors import PushFailed, SignalRefused, Unanswered
from midstream.client.push import PIECE_BYTES, PIECES_FLYING, Deadline, Rendezvous, TrainerGroup, pieces
from midstream.client.weights import TensorCopy

pytestmark = pytest.mark.slow

SIZE, INIT, START, UPDATE = (
    "get_world_size",
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
)
FINISH, SHUTDOWN = "finish_weight_update?reset_prompt_cache=all", "shutdown_weight_transfer_engine"
FORMING = [SIZE, INIT]


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    kept = Peers()
    yield kept
    kept.close()


@pytest.fixture
def world(peers: Peers) -> Iterator[PushWorld]:
    with push_world(peers, 1) as made:
        yield made


def weights() -> dict[str, torch.Tensor]:
    """Of every size and kind that cuts pieces in another way."""
    made = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(300, 7, generator=made).to(torch.bfloat16),
        "scale": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "turned": torch.randn(5, 40, generator=made).t(),
        "odd": torch.arange(3, dtype=torch.uint8),
        "flag": torch.tensor([True, False]),
        "eight": torch.randn(9, generator=made).to(torch.float8_e4m3fn),
        "counts": torch.arange(11),
    }


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(wanted) and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and found[name]
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .equal(tensor.contiguous().reshape(-1).view(torch.uint8))
        for name, tensor in wanted.items()
    )


def waited(event: threading.Event) -> None:
    assert event.wait(60)


@pytest.mark.parametrize(("count", "piece_bytes"), [(1, PIECE_BYTES), (1, 100), (2, 100)])
def test_every_receiver_gets_the_tensors_in_their_order(
    peers: Peers, count: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.client.pushing.PIECE_BYTES", piece_bytes)
    with push_world(peers, count) as world, world.publisher() as publisher:
        done = publisher.publish("v1", weights())
        assert world.serving == "v1"
        assert len(world.served[0][1]) == count
        assert all(same(tensors_of(world.sent, data), weights()) for data in world.served[0][1])
    size = sum(tensor.nbytes for tensor in weights().values())
    assert (done.kind, done.bytes_sent, done.bytes_whole, done.previous) == ("push", size, size, None)
    assert len(done.replicas) == count
    assert world.calls == [*FORMING, START, UPDATE, FINISH, SHUTDOWN]
    assert world.rendezvous["world_size"] == count + 1


def test_a_group_serves_many_publications(world: PushWorld) -> None:
    with world.publisher() as publisher:
        for step in range(3):
            publisher.publish(f"v{step}", {"a": torch.full((4,), float(step))})
    assert [name for name, _ in world.served] == ["v0", "v1", "v2"]
    assert [tensors_of(world.sent, data[0])["a"][0] for _, data in world.served] == [0.0, 1.0, 2.0]
    assert world.calls == [*FORMING, *[START, UPDATE, FINISH] * 3, SHUTDOWN]


def test_begin_copies_so_that_the_trainer_may_change_its_tensors(world: PushWorld) -> None:
    open_ = threading.Event()
    world.before = lambda name: waited(open_) if name == START else None
    state = weights()
    with world.publisher() as publisher:
        publication = publisher.begin("v1", state)
        for tensor in state.values():
            tensor.zero_()
        open_.set()
        publication.wait()
        assert same(tensors_of(world.sent, world.served[0][1][0]), weights())
        # The second copy takes the place of the first.
        publisher.begin("v2", weights(), dtype="float32").wait()
    cast = {
        name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in weights().items()
    }
    assert same(tensors_of(world.sent, world.served[1][1][0]), cast)


def test_a_push_beside_the_training_sends_what_the_weights_were(
    world: PushWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy is whole when the next step begins, the other one is of weights that somebody changed."""
    may_copy, take = threading.Event(), TensorCopy.take

    def taken(memory: TensorCopy, tensors: Any) -> Any:
        waited(may_copy)
        return take(memory, tensors)

    monkeypatch.setattr(TensorCopy, "take", taken)
    parameter = torch.nn.Parameter(torch.randn(300, 300, generator=torch.Generator().manual_seed(1)))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: may_copy.set())
    state = {"a.weight": parameter.detach()}
    with world.publisher() as publisher:
        for step in range(2):
            before = parameter.detach().clone()
            may_copy.clear()
            publication = publisher.begin(f"v{step}", state, optimizer=optimizer)
            optimizer.step()
            assert not parameter.equal(before)
            publication.wait()
            assert same(tensors_of(world.sent, world.served[step][1][0]), {"a.weight": before})
        may_copy.clear()
        publication = publisher.begin("torn", state, optimizer=())
        with torch.no_grad():
            parameter.zero_()
        may_copy.set()
        with pytest.raises(PublishError, match=r"^tensor a\.weight was changed before it was copied"):
            publication.wait()
    assert [name for name, _ in world.served] == ["v0", "v1"]


def test_numpy_arrays_are_pushed_and_cast(world: PushWorld) -> None:
    array = np.linspace(-3, 3, 50, dtype=np.float32).reshape(5, 10)
    array.flags.writeable = False
    with world.publisher() as publisher:
        publisher.publish("v1", {"a": array}, dtype="bfloat16")
    found = tensors_of(world.sent, world.served[0][1][0])
    assert found["a"].equal(torch.from_numpy(array.copy()).to(torch.bfloat16))


def test_a_run_may_push(world: PushWorld) -> None:
    with world.publisher() as publisher, TrainingRun(publisher, "run", behind=1) as run:
        for step in range(2):
            run.publish({"a": torch.tensor([step])})
    assert [name for name, _ in world.served] == ["run/0", "run/1"]


def test_a_model_is_pushed_under_the_names_of_its_checkpoint(
    world: PushWorld, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The names and bytes of what the same publisher writes as files."""
    import safetensors.torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(seed=3))
    names = set(model.state_dict())
    model.save_pretrained(tmp_path)
    written = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert set(written) - {"lm_head.weight"} != names - {"lm_head.weight"}, "its experts are fused in memory"
    with world.publisher() as publisher:
        publisher.publish("v1", model=model)
        first = tensors_of(world.sent, world.served[0][1][0])
        publisher.publish("v2", model.state_dict(), model=model)
    assert same(dict(sorted(first.items())), dict(sorted(written.items())))
    assert world.served[0][1] == world.served[1][1]


@pytest.mark.variant
def test_the_example_pushes_every_step(peers: Peers, tiny_model: Callable[..., Path]) -> None:
    checkpoint = tiny_model(seed=3)
    with push_world(peers, 2) as world, listening(world) as url:
        example = Path(__file__).parents[2] / "examples" / "push.py"
        command = [sys.executable, str(example), url, str(checkpoint), "3"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        assert [name for name, _ in world.served] == ["push/0", "push/1", "push/2"]
        assert len({data for _, received in world.served for data in received}) == 3
    assert done.stdout.count("2 replicas serve it") == 2
    assert done.stdout.endswith("push/2 serves\n")


def test_the_cache_policy_is_in_the_last_call(world: PushWorld) -> None:
    with world.publisher() as publisher:
        for number, policy in enumerate(("new_session", False, True)):
            publisher.publish(f"v{number}", {"a": torch.zeros(1)}, reset_prompt_cache=policy)  # type: ignore[arg-type]
    asked = [name.partition("=")[2] for name in world.calls if name.startswith("finish")]
    assert asked == ["new_session", "none", "all"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"config_dir": "/x"}, "config_dir: a push sends tensors alone"),
        ({"kind": "full"}, "kind: a push sends all tensors"),
        ({"overwrite": True}, "overwrite: a push replaces no files"),
        ({"extra_fields_ignore": ["x"]}, "extra_fields_ignore: a push sends no config.json"),
        ({"adapter": object()}, "adapter: adapters are published as files"),
        ({"reset_prompt_cache": {"max_age": 2}}, "reset_prompt_cache: a push takes"),
    ],
)
def test_arguments_of_files_are_refused_by_name(how: dict[str, Any], words: str) -> None:
    publisher = offline()
    for publish in (publisher.publish, publisher.begin):
        with pytest.raises(ValueError, match=words):
            publish("v1", {"a": torch.zeros(1)}, **how)


def test_a_publisher_that_pushes_has_no_bucket() -> None:
    for name, value in {"bucket": "/x", "work_dir": "/x", "policy": "p"}.items():
        with pytest.raises(ValueError, match=f"{name}: is for files"):
            offline(**{name: value})
    with pytest.raises(ValueError, match="to must be 'files' or 'push', got 'disk'"):
        offline(to="disk")
    with pytest.raises(ValueError, match="write_full: this publisher pushes"):
        offline().write_full("v1", {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="weights: a directory is published as files"):
        offline().publish("v1", "/a/directory")
    with pytest.raises(ValueError, match=r"'_orig_mod.' come from torch.compile"):
        offline().publish("v1", {"_orig_mod.a": torch.zeros(1)})


def offline(**kwargs: Any) -> SnapshotPublisher:
    http = httpx.Client(transport=httpx.MockTransport(lambda _: refused(404, "not here")))
    return SnapshotPublisher("http://server", **({"to": "push", "http": http} | kwargs))


def test_a_call_that_is_refused_before_a_byte_moves_ends_the_broadcast(world: PushWorld) -> None:
    world.before = lambda name: refused(400, "tensor b is not in the model") if name == UPDATE else None
    with world.publisher() as publisher:
        with pytest.raises(SignalRefused, match="tensor b is not in the model") as raised:
            publisher.publish("v1", {"b": torch.zeros(10)}, timeout_s=60.0)
        assert raised.value.status == 400
        world.before = lambda _: None
        publisher.publish("v2", {"a": torch.zeros(10)})
    assert world.calls == [*FORMING, START, UPDATE, *FORMING, START, UPDATE, FINISH, SHUTDOWN]


@pytest.mark.parametrize(("count", "dies"), [(1, 0), (2, 0), (4, 2)])
def test_a_receiver_that_dies_in_mid_broadcast_ends_the_publication(
    peers: Peers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, count: int, dies: int
) -> None:
    monkeypatch.setattr("midstream.client.pushing.PIECE_BYTES", 2**20)
    caplog.set_level(logging.DEBUG)
    with push_world(peers, count) as world, world.publisher() as publisher:

        class Dying:
            """Kills a receiver while its bytes are made."""

            dtype, shape = np.dtype("uint8"), (2**22,)

            def __array__(self, *_: Any, **__: Any) -> Any:
                world.peers[dies].end()
                return np.zeros(self.shape, np.uint8)

        state = {"a": torch.zeros(2**22), "b": Dying(), "c": torch.zeros(2**22)}
        with pytest.raises(PushFailed, match=r"replica-\d was lost"):
            publisher.publish("v1", state)
        assert world.serving == "base"
        world.peers[dies : dies + 1] = peers.take(1)
        publisher.publish("v2", {"a": torch.zeros(3)})
        assert world.serving == "v2"
        assert world.rendezvous["key"] not in caplog.text + repr(publisher)
        assert len(world.rendezvous["key"]) == 32


def test_a_call_that_does_not_end_after_a_receiver_died_is_not_waited_for(
    world: PushWorld, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.client.push.REASON_S", 0.2)
    silent = threading.Event()

    def before(name: str) -> httpx.Response | None:
        if name == UPDATE:
            world.peers[0].end()
            silent.wait(60)
            return refused(503, "too late")
        return None

    world.before = before
    with world.publisher() as publisher, pytest.raises(PushFailed, match="a receiver was lost while weights"):
        publisher.publish("v1", {"a": torch.zeros(10)})
    silent.set()
    world.peers[:] = peers.take(1)


def test_a_changed_membership_forms_the_group_again(peers: Peers) -> None:
    with push_world(peers, 1) as world, world.publisher() as publisher:
        publisher.publish("v1", {"a": torch.zeros(3)})
        first, more = world.rendezvous, peers.take(1)

        def before(name: str) -> httpx.Response | None:
            if name == START and len(world.peers) == 1:
                world.peers += more
                return refused(409, "replica-1 is new: world size is now 2; init again")
            return None

        world.before = before
        publisher.publish("v2", {"a": torch.ones(3)})
        assert [len(data) for _, data in world.served] == [1, 2]
        assert world.rendezvous["world_size"] == 3
        assert world.rendezvous["key"] != first["key"]
    assert world.calls[5:] == [START, *FORMING, START, UPDATE, FINISH, SHUTDOWN]


def test_a_second_refusal_in_one_publication_is_raised(world: PushWorld) -> None:
    world.before = lambda name: refused(409, "init again") if name == START else None
    with world.publisher() as publisher, pytest.raises(SignalRefused, match="init again"):
        publisher.publish("v1", {"a": torch.zeros(3)})
    assert world.calls == [*FORMING, START, *FORMING, START]


def test_another_trainers_group_is_an_error_at_once(world: PushWorld) -> None:
    world.before = lambda name: refused(409, "another trainer's group is open") if name == INIT else None
    with world.publisher() as publisher, pytest.raises(SignalRefused, match="another trainer") as raised:
        publisher.publish("v1", {"a": torch.zeros(3)})
    assert raised.value.status == 409
    assert world.calls == FORMING


def test_replicas_that_are_not_ready_are_waited_for_with_a_group_each(world: PushWorld) -> None:
    answers = [refused(503, "replica-0 is not ready"), refused(503, "replica-0 is not ready")]
    keys: list[str] = []

    def before(name: str) -> httpx.Response | None:
        if name == INIT:
            keys.append(world.bodies[-1]["init_info"]["key"])
            return answers.pop() if answers else None
        return None

    world.before = before
    with world.publisher() as publisher:
        publisher.publish("v1", {"a": torch.zeros(3)})
    assert world.serving == "v1"
    assert len(set(keys)) == 3


def test_start_is_sent_again_and_update_is_not(world: PushWorld) -> None:
    answers = [refused(503, "the gateway starts")]
    world.before = lambda name: answers.pop() if name == START and answers else None
    with world.publisher() as publisher:
        publisher.publish("v1", {"a": torch.zeros(3)})
        world.before = lambda name: refused(503, "replica-0 did not answer") if name == UPDATE else None
        with pytest.raises(PushFailed, match="replica-0 did not answer"):
            publisher.publish("v2", {"a": torch.zeros(3)})
    assert world.calls == [*FORMING, START, START, UPDATE, FINISH, START, UPDATE]


def test_a_group_that_never_forms_ends_at_the_deadline(
    world: PushWorld, capfd: pytest.CaptureFixture[str]
) -> None:
    world.before = lambda name: httpx.Response(200, json={}) if name == INIT else None
    with world.publisher() as publisher, pytest.raises(PushFailed, match=r"after 4 s|did not form") as raised:
        publisher.publish("v1", {"a": torch.zeros(3)}, timeout_s=4.0)
    key = world.bodies[1]["init_info"]["key"]
    assert key not in str(raised.value)
    # The thread that waited for receivers has ended by the time that torch says so.
    assert key not in capfd.readouterr().err


def test_a_receiver_that_stands_still_ends_the_publication_at_the_deadline(world: PushWorld) -> None:
    still = threading.Event()

    def before(name: str) -> httpx.Response | None:
        """The call that is given up asks no receiver later, when the next test may have it."""
        if name != UPDATE:
            return None
        waited(still)
        return refused(503, "too late")

    publisher = world.publisher()
    publisher.publish("v1", {"a": torch.zeros(10)})
    world.before = before
    with pytest.raises(PushFailed, match="after 5 s"):
        publisher.publish("v2", {"a": torch.zeros(10)}, timeout_s=5.0)
    assert world.serving == "v1"
    world.before = lambda _: refused(503, "stopped")
    still.set()
    publisher.close()


def test_an_address_of_another_machine_is_refused_by_name(world: PushWorld) -> None:
    with (
        world.publisher(address="192.0.2.1") as publisher,
        pytest.raises(PublishError, match=r"192\.0\.2\.1:0"),
    ):
        publisher.publish("v1", {"a": torch.zeros(3)}, timeout_s=5.0)
    assert world.calls == [SIZE]


def test_a_lost_answer_to_the_last_call_is_looked_up(world: PushWorld) -> None:
    def before(name: str) -> httpx.Response | None:
        if name == FINISH:
            world.serving = "v1"
            raise httpx.ReadError("connection reset")
        return None

    world.before = before
    with world.publisher() as publisher:
        assert publisher.publish("v1", {"a": torch.zeros(3)}).status.serves("v1")


def test_a_last_call_that_was_not_taken_is_raised(world: PushWorld) -> None:
    world.before = lambda name: refused(503, "replica-0 did not answer") if name == FINISH else None
    with world.publisher() as publisher, pytest.raises(Unanswered, match="replica-0 did not answer"):
        publisher.publish("v1", {"a": torch.zeros(3)})
    assert world.calls.count(FINISH) == 1


def test_weights_that_do_not_load_have_the_replicas_reason(world: PushWorld) -> None:
    def before(name: str) -> httpx.Response | None:
        if name == FINISH:
            world.failed = "v1"
            return refused(400, "r0 could not load it")
        return None

    world.before = before
    with (
        world.publisher() as publisher,
        pytest.raises(SnapshotFailed, match=r"r0 could not load .* it has NaN"),
    ):
        publisher.publish("v1", {"a": torch.zeros(3)})


def test_a_wait_after_the_last_call_has_the_deadline(world: PushWorld) -> None:
    later_s = 0.0

    def before(name: str) -> httpx.Response | None:
        nonlocal later_s
        if name != FINISH:
            return None
        later_s = 1000.0
        return httpx.Response(200, json={})

    world.before = before
    with (
        world.publisher(monotonic=lambda: time.monotonic() + later_s) as publisher,
        pytest.raises(NotReadyInTime),
    ):
        publisher.publish("v1", {"a": torch.zeros(3)})


@pytest.mark.fast
@pytest.mark.parametrize("sizes", [[], [0], [1, 2, 3], [10, 0, 5], [4, 4], [3, 9, 1, 8], [25]])
@pytest.mark.parametrize("packed", [True, False])
def test_pieces_have_all_bytes_in_order(sizes: list[int], packed: bool) -> None:
    whole = torch.arange(sum(sizes), dtype=torch.uint8)
    parts = whole.split(sizes)
    found: list[torch.Tensor] = []
    sending: list[torch.Tensor] = []
    for piece in pieces(parts, 4, packed=packed):
        # Two are under way while another one is made.
        sending.append(piece)
        found += [sending.pop(0).clone()] if len(sending) > PIECES_FLYING else []
    found += sending
    assert torch.cat([torch.empty(0, dtype=torch.uint8), *found]).equal(whole)
    lengths = [len(piece) for piece in found]
    if packed:
        assert all(length == 4 for length in lengths[:-1])
        assert lengths[-1:] in ([], [len(whole) % 4 or 4])
    else:
        assert lengths == [size for size in sizes if size]


class LandingOutOfOrder:
    """A group of gloo whose second piece lands at once, and the others only when the trainer waits. A piece has the bytes that
    it has when it lands."""

    def __init__(self) -> None:
        self.flying: dict[int, tuple[torch.Tensor, torch.futures.Future[None]]] = {}
        self.sent = 0
        self.received: dict[int, bytes] = {}

    def broadcast(self, tensors: list[torch.Tensor], _: Any) -> Any:
        number, ended = self.sent, torch.futures.Future[None]()
        self.flying[number] = tensors[0], ended
        self.sent += 1
        if number == 1:
            self.land(number)
        return SimpleNamespace(get_future=lambda: ended, wait=ended.wait)

    def land(self, number: int) -> None:
        tensor, ended = self.flying.pop(number)
        self.received[number] = bytes(tensor.numpy())
        ended.set_result(None)


@pytest.mark.fast
def test_a_piece_keeps_its_bytes_until_it_lands_also_if_a_later_one_lands_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Rendezvous(master_address="127.0.0.1", master_port=1, world_size=2, packed_buffer_size_bytes=4)
    group, gloo, wait = TrainerGroup(asked, object()), LandingOutOfOrder(), push.wait
    group._gloo = gloo

    def waits(*arguments: Any) -> Any:
        if gloo.flying:
            gloo.land(min(gloo.flying))
        return wait(*arguments)

    monkeypatch.setattr(push, "wait", waits)
    whole = torch.arange(24, dtype=torch.uint8)
    group.send(whole.split(2), lambda: None, Deadline(60.0, time.monotonic))
    assert b"".join(gloo.received[number] for number in range(6)) == bytes(whole.numpy())


@pytest.mark.fast
def test_a_piece_inside_a_part_is_not_copied() -> None:
    part = torch.zeros(12, dtype=torch.uint8)
    assert [piece.data_ptr() - part.data_ptr() for piece in pieces([part], 4)] == [0, 4, 8]


def test_the_first_and_the_last_call_say_what_becomes_of_policies(world: PushWorld) -> None:
    with world.publisher() as publisher:
        publisher.publish("v1", {"a": torch.ones(4)}, policies="end")
        publisher.publish("v2", {"a": torch.ones(4)})
    said = [body for name, body in zip(world.calls, world.bodies, strict=True) if name in (START, FINISH)]
    assert said == [
        {"policies": "end"},
        {"weight_version": "v1", "policies": "end"},
        None,
        {"weight_version": "v2"},
    ]
