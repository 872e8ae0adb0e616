"""Writing snapshots, signalling them, waiting for them."""

from __future__ import annotations

import copy
import email.utils
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from midstream.client import NotReadyInTime, PublishError, SnapshotFailed, SnapshotPublisher
from midstream.client.errors import SignalRefused
from midstream.client.server import ServerClient
from midstream.client.weights import to_bfloat16_bits, write_weights
from midstream.core.errors import SnapshotRefused
from midstream.models.tiny_moe import write_tiny_moe
from midstream.snapshots.layout import read_spec
from midstream.snapshots.store.verify import check_compatible

READY = {"stage": "done", "target_snapshot_identity": "a"}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_moe(directory, layers=2, hidden=64, experts=4)
    return directory


class Script:
    """A server that answers from a list (the last answer again and again), and a clock that sleeping moves."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.slept: list[float] = []
        self.time = 0.0

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            answer = (answer, {"error": {"message": f"status {answer}"}}, {})
        status, body, headers = answer
        return httpx.Response(status, json=body, headers=headers)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds

    def publisher(self, bucket: Path, **kwargs: Any) -> SnapshotPublisher:
        return SnapshotPublisher(
            kwargs.pop("base_url", "http://server/inference/v1/"),
            bucket.as_uri(),
            http=httpx.Client(transport=httpx.MockTransport(self.handle)),
            sleep=self.sleep,
            monotonic=lambda: self.time,
            **kwargs,
        )


def row(
    name: str, snapshot: str, ready: bool, stage: str, target: str, error: str | None = None
) -> dict[str, Any]:
    return {
        "current_snapshot_identity": snapshot,
        "readiness": ready,
        "loading_state": {"stage": stage, "target_snapshot_identity": target},
        "midstream": {"replica": name, "error": error, "last_swap": {"pause_ms": 2.0}},
    }


def replicas(*rows: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
    return 200, {"replicas": list(rows)}, {}


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[SnapshotPublisher]:
    with Script(500).publisher(tmp_path / "bucket") as made:
        yield made


# --- files ---


@pytest.mark.parametrize("max_shard_bytes", [10**9, 100, 1])
def test_tensors_are_written_under_their_names_with_their_values(
    tmp_path: Path, max_shard_bytes: int
) -> None:
    tensors = {
        "b16": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "f32": torch.linspace(-1, 1, 7, requires_grad=True),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "np": np.arange(5, dtype=np.float64)[::2],
        "big-endian": np.arange(3, dtype=">i4"),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none": np.zeros((0, 4), dtype=np.float16),
        "flags": np.array([True, False]),
    }
    write_weights(tmp_path, tensors, max_shard_bytes=max_shard_bytes)
    (tmp_path / "config.json").write_text("{}")
    loaded: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        loaded |= safetensors.torch.load_file(file)
    assert sorted(loaded) == sorted(tensors) == sorted(read_spec(tmp_path).tensors)
    for name, value in tensors.items():
        expected = (
            value
            if isinstance(value, torch.Tensor)
            else torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
        )
        assert loaded[name].dtype == expected.dtype
        assert torch.equal(loaded[name], expected.detach()), name
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes < 10**9)


def test_a_cast_applies_to_floating_point_tensors_alone(tmp_path: Path) -> None:
    tensors = {"w": torch.rand(4), "n": np.linspace(0, 1, 5, dtype=np.float32), "ids": torch.arange(3)}
    write_weights(tmp_path, tensors, cast="bfloat16")
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert {name: t.dtype for name, t in loaded.items()} == {
        "w": torch.bfloat16, "n": torch.bfloat16, "ids": torch.int64,
    }  # fmt: skip
    assert torch.equal(loaded["n"], torch.from_numpy(tensors["n"]).to(torch.bfloat16))
    assert tensors["w"].dtype == torch.float32


@given(hnp.arrays(np.float32, st.integers(0, 30), elements=st.floats(width=32)))
def test_rounding_to_bfloat16_is_torchs(array: Any) -> None:
    ours = torch.from_numpy(to_bfloat16_bits(array).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(array).to(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])


def test_a_dtype_no_snapshot_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor z has dtype complex64"):
        write_weights(tmp_path, {"z": np.zeros(1, dtype=np.complex64)})


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_a_hugging_face_model_is_written_under_its_checkpoints_names_and_stays_as_it_is(
    base: Path, tmp_path: Path, publisher: SnapshotPublisher, dtype: Any
) -> None:
    from transformers import AutoModelForCausalLM

    loaded_as = torch.float32 if dtype else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(base, dtype=loaded_as)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = copy.deepcopy(model.config.to_dict())

    place = publisher.write_full("run/1", model=model, dtype=dtype)

    check_compatible(read_spec(base), read_spec(place))
    assert json.loads((place / "config.json").read_text())["dtype"] == "bfloat16"
    written, served = (safetensors.torch.load_file(d / "model.safetensors") for d in (place, base))
    assert all(torch.equal(written[name], served[name]) for name in served)
    after = model.state_dict()
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    assert {t.dtype for t in after.values()} == {loaded_as}
    assert model.config.to_dict() == config


def test_a_gathered_state_dict_is_written_as_its_model_would_be(
    base: Path, tmp_path: Path, publisher: SnapshotPublisher
) -> None:
    """FSDP and DeepSpeed give the tensors apart from a model that has not got them whole."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    place = publisher.write_full("run/1", state, model=model, dtype="bfloat16", config_dir=base)
    written, served = (safetensors.torch.load_file(d / "model.safetensors") for d in (place, base))
    assert written.keys() == served.keys()
    assert all(torch.equal(written[name], served[name]) for name in served)
    with pytest.raises(ValueError, match="weights are its state dict"):
        publisher.write_full("run/2", base, model=model)


@pytest.mark.parametrize("apart", [False, True])
def test_a_tied_head_is_not_written_and_the_callers_state_stays_whole(
    tmp_path: Path, publisher: SnapshotPublisher, apart: bool
) -> None:
    """Shards are gathered into copies, which hide that head and embedding are one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=True, **sizes))
    model.save_pretrained(tmp_path / "base")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "lm_head.weight" in state
    how: Any = {"config_dir": tmp_path / "base"} if apart else {"model": model}
    for name in ("run/1", "run/2"):
        place = publisher.write_full(name, state, **how)
        check_compatible(read_spec(tmp_path / "base"), read_spec(place))
    assert state.keys() == model.state_dict().keys()
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        publisher.write_full("run/3", state, **how)


def test_the_served_models_configuration_wins_over_the_trainers(
    base: Path, publisher: SnapshotPublisher
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.config.attention_dropout = 0.5
    place = publisher.write_full("a", model=model, dtype="bfloat16", config_dir=base)
    assert (place / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert (place / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    check_compatible(read_spec(base), read_spec(place))


def test_tensors_and_directories_become_the_same_snapshot(
    base: Path, tmp_path: Path, publisher: SnapshotPublisher
) -> None:
    tensors = safetensors.torch.load_file(base / "model.safetensors")
    from_tensors = publisher.write_full("tensors", tensors, config_dir=base)
    (base / "optimizer.pt").write_bytes(b"not for serving")
    from_directory = publisher.write_full("directory", base)
    (base / "optimizer.pt").unlink()
    assert sorted(p.name for p in from_directory.iterdir()) == sorted(p.name for p in from_tensors.iterdir())
    assert read_spec(from_directory) == read_spec(from_tensors) == read_spec(base)
    assert (from_directory / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


def test_an_existing_snapshot_is_replaced_only_on_request(
    tmp_path: Path, base: Path, publisher: SnapshotPublisher
) -> None:
    publisher.write_full("a", {"w": np.zeros(2)}, config_dir=base)
    with pytest.raises(PublishError, match="'a' is already in the bucket"):
        publisher.write_full("a", {"w": np.ones(2)}, config_dir=base)
    place = publisher.write_full("a", {"w": np.ones(2)}, config_dir=base, overwrite=True)
    assert safetensors.numpy.load_file(place / "model.safetensors")["w"].tolist() == [1.0, 1.0]
    assert [p.name for p in (tmp_path / "bucket").iterdir()] == ["a"]


def test_snapshots_cannot_lie_inside_each_other_and_none_is_lost_in_trying(
    tmp_path: Path, base: Path, publisher: SnapshotPublisher
) -> None:
    bucket = tmp_path / "bucket"
    for identity in ("a", "run/step-1", "deep/er/step"):
        publisher.write_full(identity, {"w": np.zeros(2)}, config_dir=base)
    (bucket / "a" / "b").mkdir()
    publisher.write_full("hidden/.step", {"w": np.zeros(2)}, config_dir=base)
    before = sorted(p.relative_to(bucket).as_posix() for p in bucket.rglob("*"))
    for overwrite in (False, True):
        for identity, says in (
            ("run", r"'run' cannot be written: 'run/step-1' lies inside it"),
            ("deep", r"'deep' cannot be written: 'deep/er' lies inside it"),
            ("hidden", r"'hidden' cannot be written: 'hidden/\.step' lies inside it"),
            ("a", r"'a' cannot be written: 'a/b' lies inside it"),
            ("run/step-1/x", r"'run/step-1/x' cannot be written: it lies inside the snapshot 'run/step-1'"),
            ("a/b/c/d", r"'a/b/c/d' cannot be written: it lies inside the snapshot 'a'"),
        ):
            with pytest.raises(PublishError, match=says):
                publisher.write_full(identity, {"w": np.ones(2)}, config_dir=base, overwrite=overwrite)
    assert sorted(p.relative_to(bucket).as_posix() for p in bucket.rglob("*")) == before
    publisher.write_full("run/step-2", {"w": np.zeros(2)}, config_dir=base)


def test_a_snapshot_that_cannot_be_replaced_stays(
    tmp_path: Path, base: Path, publisher: SnapshotPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.write_full("a", {"w": np.zeros(2)}, config_dir=base)
    place = tmp_path / "bucket" / "a"
    before = (place / "model.safetensors").read_bytes()
    rename = os.rename

    def refusing(source: Path, target: Path, **more: object) -> None:
        if Path(target) == place and not str(source).endswith("-old"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refusing)
    with pytest.raises(PublishError, match="Disk quota exceeded"):
        publisher.write_full("a", {"w": np.ones(2)}, config_dir=base, overwrite=True)
    assert (place / "model.safetensors").read_bytes() == before
    assert [path.name for path in place.parent.iterdir()] == ["a"]


def test_what_a_dead_trainer_left_behind_is_in_nobodys_way(
    tmp_path: Path, base: Path, publisher: SnapshotPublisher
) -> None:
    (tmp_path / "bucket" / "run" / ".publish-dead").mkdir(parents=True)
    (tmp_path / "bucket" / "run" / ".publish-dead" / "config.json").write_text("{}")
    place = publisher.write_full("run", {"w": np.zeros(2)}, config_dir=base)
    assert (place / "model.safetensors").exists()


def test_a_failed_write_leaves_nothing_in_the_bucket(
    tmp_path: Path, base: Path, publisher: SnapshotPublisher
) -> None:
    (tmp_path / "no-config").mkdir()
    with pytest.raises(PublishError, match=r"'a' would not be whole: config\.json: is not there"):
        publisher.write_full("a", {"w": np.zeros(2)}, config_dir=tmp_path / "no-config")
    with pytest.raises(ValueError, match="tensor w has dtype"):
        publisher.write_full("a", {"w": np.zeros(2, dtype=object)}, config_dir=base)
    with pytest.raises(ValueError, match="config_dir must be given"):
        publisher.write_full("a", {"w": np.zeros(2)})
    with pytest.raises(ValueError, match="dtype cannot be given with a directory"):
        publisher.write_full("a", base, dtype="bfloat16")
    with pytest.raises(ValueError, match="either weights or model"):
        publisher.write_full("a")
    with pytest.raises(SnapshotRefused):
        publisher.write_full("../a", base)
    assert list((tmp_path / "bucket").iterdir()) == []


# --- signal ---


@pytest.mark.parametrize(
    "base_url", ["http://server", "http://server/", "http://server/v1", "http://server/inference/v1/"]
)
def test_a_signal_is_one_post_with_the_names_in_its_headers(tmp_path: Path, base_url: str) -> None:
    script = Script((200, {"identity": "a", "generation": 1, "changed": True}, {}))
    publisher = script.publisher(tmp_path, base_url=base_url, model="m", deployment="d", api_key="k")
    assert publisher.snapshots.signal("a", "new_session").body == {
        "identity": "a",
        "generation": 1,
        "changed": True,
    }
    (request,) = script.requests
    assert (request.method, str(request.url)) == ("POST", "http://server/hot_load/v1/models/hot_load")
    assert json.loads(request.content) == {"identity": "a", "reset_prompt_cache": "new_session"}
    sent = {
        name: request.headers[name] for name in ("fireworks-model", "fireworks-deployment", "authorization")
    }
    assert sent == {"fireworks-model": "m", "fireworks-deployment": "d", "authorization": "Bearer k"}


def test_answers_that_a_retry_may_cure_are_retried_with_growing_pauses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(408, 425, 429, 500, 502, 503, 504, httpx.ConnectError("refused"), (200, {"ok": 1}, {}))
    assert script.publisher(tmp_path).snapshots.signal("a").body == {"ok": 1}
    assert script.slept == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    # Once, so that a long wait is explained.
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "429" in said
    assert said.endswith("sending it again for up to 299 s more")


def test_retry_after_is_honoured_in_both_of_its_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_700_000_000.0
    date = email.utils.formatdate(now + 7, usegmt=True)
    script = Script(
        (503, {}, {"retry-after": "3"}),
        (503, {}, {"retry-after": date}),
        (503, {}, {"retry-after": "soon"}),
        (200, {}, {}),
    )
    publisher = script.publisher(tmp_path)
    publisher.server.caller._now = lambda: now
    publisher.snapshots.signal("a")
    assert script.slept == [3.0, 7.0, 1.0]


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413])
def test_a_refusal_is_not_retried_and_carries_the_servers_words(tmp_path: Path, status: int) -> None:
    script = Script((status, {"error": {"message": "no such thing"}}, {}))
    with pytest.raises(SignalRefused, match=rf"{status} no such thing") as caught:
        script.publisher(tmp_path).snapshots.signal("a")
    assert (caught.value.status, script.slept) == (status, [])


def test_retrying_ends_at_the_deadline(tmp_path: Path) -> None:
    script = Script(503)
    with pytest.raises(SignalRefused, match=r"status 503 \(gave up after 300 s\)"):
        script.publisher(tmp_path).snapshots.signal("a")
    assert 280 < sum(script.slept) <= 300
    down = Script(httpx.ConnectError("refused"))
    with pytest.raises(SignalRefused, match="refused") as caught:
        down.publisher(tmp_path).snapshots.signal("a", retry_s=1.0)
    assert caught.value.status is None


@pytest.mark.parametrize("after", ["0", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_server_that_asks_for_no_pause_is_asked_again_with_growing_ones(tmp_path: Path, after: str) -> None:
    script = Script(*[(503, {}, {"retry-after": after})] * 3, (200, {"ok": 1}, {}))
    assert script.publisher(tmp_path).snapshots.signal("a").body == {"ok": 1}
    assert script.slept == [0.25, 0.5, 1.0]


DEEP = "[" * 100_000
ROW = {"current_snapshot_identity": "a", "readiness": True}


@pytest.mark.parametrize(
    ("call", "body"),
    [
        *(
            (lambda server: server.snapshots.status(retry_s=0), body)
            for body in ([], {"replicas": 1}, {"replicas": [1]})
        ),
        (
            lambda server: server.snapshots.status(retry_s=0),
            {"replicas": [ROW | {"midstream": {"generation": "1"}}]},
        ),
        (lambda server: server.snapshots.status(retry_s=0), {"replicas": [ROW | {"loading_state": [1]}]}),
        (lambda server: server.deployments.all(retry_s=0), {"accounts": [1]}),
        (lambda server: list(server.sessions.keys(retry_s=0)), {"data": [{"id": "s"}]}),
        (
            lambda server: list(server.sessions.keys(retry_s=0)),
            {"data": [1], "has_more": False, "unreachable": []},
        ),
        # Half of a surrogate pair, which no text of a server has.
        (lambda server: list(server.sessions.keys(retry_s=0)), '"\\ud800"'),
        (lambda server: server.snapshots.status(retry_s=0), '{"replicas": ["\\ud800"]}'),
        (lambda server: server.sessions.trace("s", retry_s=0), []),
        (lambda server: server.sessions.trace("s", retry_s=0), {"unreachable": [1]}),
        (lambda server: server.sessions.reward("s", 1.0, retry_s=0), 1),
        *((lambda server: server.snapshots.status(retry_s=0), text) for text in (DEEP, "x" * 100_000)),
    ],
)
@pytest.mark.parametrize("status", [200, 409])
def test_whatever_a_server_answers_is_read_or_a_short_error(call: Any, body: Any, status: int) -> None:
    text = body if isinstance(body, str) else json.dumps(body)
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
    server = ServerClient("http://gateway", http=httpx.Client(transport=transport))
    with pytest.raises(PublishError) as caught:
        call(server)
    assert len(str(caught.value)) < 2000
    server.close()


# --- waiting ---


def test_waiting_ends_when_every_replica_serves_the_snapshot(tmp_path: Path) -> None:
    script = Script(
        replicas(row("r1", "base", True, "pending", "a"), row("r0", "base", True, "downloading", "a")),
        replicas(row("r1", "base", True, "staged", "a"), row("r0", "a", True, "done", "a")),
        replicas(row("r1", "a", False, "done", "a"), row("r0", "a", True, "done", "a")),
        replicas(row("r0", "a", True, "done", "a"), row("r1", "a", True, "done", "a")),
    )
    seen: list[list[tuple[str, str]]] = []
    status = script.publisher(tmp_path).snapshots.wait_until_ready(
        "a", on_status=lambda status: seen.append([(r.name, r.stage) for r in status.replicas])
    )
    assert [r.snapshot for r in status.replicas] == ["a", "a"]
    assert status.replicas[0].last_swap == {"pause_ms": 2.0}
    assert seen == [
        [("r1", "pending"), ("r0", "downloading")],
        [("r1", "staged"), ("r0", "done")],
        [("r1", "done"), ("r0", "done")],
        [("r0", "done"), ("r1", "done")],
    ]


def test_a_replica_that_failed_on_this_snapshot_ends_the_wait_with_its_message(tmp_path: Path) -> None:
    script = Script(
        replicas(row("r1", "base", True, "error", "older", "old news")),
        replicas(row("r1", "base", True, "error", "a", "model.safetensors: truncated")),
    )
    with pytest.raises(
        SnapshotFailed, match=r"r1 could not load snapshot 'a': model\.safetensors: trunc"
    ) as caught:
        script.publisher(tmp_path).snapshots.wait_until_ready("a")
    assert (caught.value.identity, caught.value.replica, len(script.requests)) == ("a", "r1", 2)


def test_running_out_of_time_says_where_each_replica_stands(tmp_path: Path) -> None:
    script = Script(replicas(row("r1", "base", True, "downloading", "a"), row("r0", "a", True, "done", "a")))
    with pytest.raises(TimeoutError, match=r"after 2 s: r1 is on base \(downloading\); r0 is on a") as caught:
        script.publisher(tmp_path).snapshots.wait_until_ready("a", timeout_s=2.0)
    assert isinstance(caught.value, NotReadyInTime)
    nobody = Script(replicas())
    with pytest.raises(NotReadyInTime, match="there are no replicas"):
        nobody.publisher(tmp_path).snapshots.wait_until_ready("a", timeout_s=0.5)


def test_a_server_that_is_away_at_the_deadline_was_not_ready_in_time(tmp_path: Path) -> None:
    away = httpx.ConnectError("refused")
    script = Script(replicas(row("r1", "base", True, "downloading", "a")), away)
    with pytest.raises(
        NotReadyInTime, match=r"after 5 s: r1 is on base \(downloading\); .*refused"
    ) as caught:
        script.publisher(tmp_path).snapshots.wait_until_ready("a", timeout_s=5.0)
    assert "gave up" in str(caught.value)
    with pytest.raises(NotReadyInTime, match=r"after 5 s: nothing was heard of the replicas; .*status 503"):
        Script(503).publisher(tmp_path).snapshots.wait_until_ready("a", timeout_s=5.0)
    with pytest.raises(SignalRefused, match="status 401"):
        Script(401).publisher(tmp_path).snapshots.wait_until_ready("a", timeout_s=5.0)


def test_replicas_that_load_the_snapshots_new_files_do_not_serve_them_yet(tmp_path: Path) -> None:
    script = Script(
        replicas(row("r1", "a", True, "pending", "a"), row("r0", "a", True, "done", "a")),
        replicas(row("r1", "a", True, "staged", "a"), row("r0", "a", True, "done", "a")),
        replicas(row("r1", "a", True, "downloading", "b"), row("r0", "a", True, "done", "a")),
    )
    assert script.publisher(tmp_path).snapshots.wait_until_ready("a").serves("a")
    assert len(script.requests) == 3


def test_overwritten_files_that_the_server_did_not_take_are_an_error(tmp_path: Path, base: Path) -> None:
    kept: Any = (200, {"identity": "a", "generation": 1, "changed": False}, {})
    done = replicas(row("r0", "a", True, "done", "a"))
    script = Script(kept, done)
    publisher = script.publisher(tmp_path)
    publisher.write_full("a", base)
    with pytest.raises(PublishError, match="'a' was overwritten, but the server keeps the files it had"):
        publisher.publish("a", base, overwrite=True)
    assert len(script.requests) == 1
    script.answers = [503, kept, done]
    assert publisher.publish("a", base, overwrite=True).status.serves("a"), (
        "the first signal may have been taken"
    )
    script.answers = [done, kept, replicas(row("r0", "b", True, "done", "b"))]
    assert publisher.publish("b", base, overwrite=True).status.serves("b"), "nothing was there to overwrite"


def test_an_answer_that_is_no_status_is_an_error(tmp_path: Path) -> None:
    odd_row = {**row("r0", "a", True, "done", "a"), "midstream": "odd"}
    for answer in ({"hello": 1}, {"replicas": [odd_row]}, {"replicas": [1]}):
        with pytest.raises(PublishError, match="something else than replicas"):
            Script((200, answer, {})).publisher(tmp_path).snapshots.status()
    text = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, text="<html>")))
    with pytest.raises(SignalRefused, match="without JSON"):
        SnapshotPublisher("http://server", str(tmp_path), http=text).snapshots.status()


def test_publish_writes_then_signals_then_waits(tmp_path: Path, base: Path) -> None:
    order: list[str] = []

    def handler(bucket: Path) -> Callable[[httpx.Request], httpx.Response]:
        def handle(request: httpx.Request) -> httpx.Response:
            order.append(f"{request.method} {read_spec(bucket / 'a') == read_spec(base)}")
            body = {} if request.method == "POST" else replicas(row("r0", "a", True, "done", "a"))[1]
            return httpx.Response(200, json=body)

        return handle

    http = httpx.Client(transport=httpx.MockTransport(handler(tmp_path)))
    with SnapshotPublisher("http://server", str(tmp_path), http=http) as publisher:
        assert publisher.publish("a", base).status.serves("a")
    assert order == ["POST True", "GET True"]
    assert http.is_closed


def test_a_password_in_the_servers_url_is_refused_and_not_shown() -> None:
    """It would be in every message and in the file that remembers the parent."""
    for url in (
        "http://trainer:hush@server:8080/v1",
        "http://server:8080/v1?key=hush",
        "http://server/#hush",
    ):
        with pytest.raises(ValueError, match="api_key") as caught:
            ServerClient(url)
        assert "hush" not in str(caught.value)
