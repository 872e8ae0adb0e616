"""Bodies that no SDK writes, made to stop or to fill the front: each is refused at once, with a 400 that says what is wrong."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midstream_tinker import codec, messages, types
from midstream_tinker import store as store_module
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.samples import CheckedSample, sampled
from midstream_tinker.store import Store
from midstream_tinker.trainer.types import LoraConfig, WorkFailed
from midstream_tinker.types import (
    CreateModelBody,
    CreateSessionBody,
    OptimStepBody,
    RetrieveBody,
    SampleBody,
    TinkerBody,
    decode,
)

MODEL = b'{"session_id":"s","model_seq_id":0,"base_model":"m","user_metadata":%s}'
STEP = b'{"model_id":"m","seq_id":1,"optimizer_params":%s}'


def refused(body: bytes, into: type[TinkerBody]) -> TinkerRefusal:
    with pytest.raises(TinkerRefusal) as caught:
        decode(body, into)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("into", [SampleBody, RetrieveBody, OptimStepBody, CreateSessionBody])
@pytest.mark.parametrize(
    ("before", "why"),
    [(b"", "Expected `object`"), (b'{"x":', "nested"), (b'{"model_id":"m","seq_id":1,"x":', "nested")],
)
def test_a_body_nested_too_deeply_is_refused(before: bytes, why: str, into: type[TinkerBody]) -> None:
    body = before + b"[" * 5_000
    assert why in refused(body, into).detail
    assert types.addressee(body) is None


def test_many_empty_parts_are_refused_before_anything_is_made_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(types, "MAX_PARTS", 8)
    chunks = [{"tokens": [1]}] * 2
    fits: dict[str, Any] = {"prompt": {"chunks": chunks}, "sampling_params": {}}
    assert decode(json.dumps(fits).encode(), SampleBody).prompt.token_ids() == (1, 1)
    fits["prompt"]["chunks"] = [*chunks, {}]
    assert "8" in refused(json.dumps(fits).encode(), SampleBody).detail


@pytest.mark.parametrize(("form", "into"), [(MODEL, CreateModelBody), (STEP, OptimStepBody)])
@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**300])
def test_a_clients_own_notes_hold_no_number_that_cannot_be_passed_on(
    form: bytes, into: type[TinkerBody], value: int
) -> None:
    name = "user_metadata" if into is CreateModelBody else "optimizer_params"
    error = refused(form % json.dumps({"a": [{"b": value}]}).encode(), into)
    assert error.param == f"{name}.a[0].b"
    kept = getattr(decode(form % b'{"a":[{"b":18446744073709551615}]}', into), name)
    assert kept == {"a": [{"b": 2**64 - 1}]}


def test_a_clients_own_notes_are_not_nested_deeply() -> None:
    deep = b'{"a":' + b"[" * 500 + b"]" * 500 + b"}"
    error = refused(MODEL % deep, CreateModelBody)
    assert "nested" in error.detail
    assert str(error.param).startswith("user_metadata.a[0]")


def test_a_clients_own_notes_are_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "MAX_NOTES_BYTES", 100)
    assert refused(MODEL % json.dumps({"a": "x" * 100}).encode(), CreateModelBody).param == "user_metadata"
    kept = decode(MODEL % json.dumps({"a": "x" * 90}).encode(), CreateModelBody).user_metadata
    assert kept == {"a": "x" * 90}


def test_a_session_makes_a_bounded_number_of_models_and_still_has_those_it_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "MAX_MODELS", 2)
    store = Store(":memory:")
    session, other = store.create_session("t"), store.create_session("t")
    made = [
        store.create_model("t", session.id, seq, base_model="tiny", lora=LoraConfig()) for seq in range(2)
    ]
    with pytest.raises(TinkerRefusal, match="2 models") as caught:
        store.create_model("t", session.id, 2, base_model="tiny", lora=LoraConfig())
    assert (caught.value.status, caught.value.param) == (400, "session_id")
    assert store.create_model("t", session.id, 1, base_model="tiny", lora=LoraConfig()) == made[1]
    assert store.create_model("t", other.id, 0, base_model="tiny", lora=LoraConfig()).session_id == other.id


def test_a_number_beyond_a_float_is_refused_by_name() -> None:
    body = b'{"prompt":{"chunks":[]},"sampling_params":{"temperature":1e999}}'
    assert refused(body, SampleBody).param == "sampling_params.temperature"


def request(tokens: int = 1) -> Any:
    message = messages.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    chunk = message.data.add().model_input.add()
    chunk.encoded_text.tokens = np.arange(tokens, dtype="<i4").tobytes()
    return message


def test_a_tensor_of_very_many_dimensions_is_refused_before_they_are_multiplied() -> None:
    message = request()
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.dtype, tensor.dense = codec.FLOAT32, np.ones(4, dtype="<f4").tobytes()
    tensor.shape.extend([2**62] * 4 + [0] * 100)
    with pytest.raises(TinkerRefusal, match="104 dimensions") as caught:
        codec.forward_backward(message.SerializeToString())
    assert (caught.value.status, caught.value.param) == (400, "data[0].loss_fn_inputs.weights")


@pytest.mark.parametrize(
    "parts",
    [
        # Datums.
        b"\x1a\x00" * 9,
        # Chunks of one.
        b"\x1a\x12" + b"\x0a\x00" * 9,
        # Inputs of one.
        b"\x1a\x12" + b"\x12\x00" * 9,
        # Settings of the loss.
        b"\x2a\x00" * 9,
    ],
)
def test_a_request_of_very_many_empty_parts_is_refused_unread(
    parts: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MAX_PARTS", 8)
    body = request().SerializeToString()
    assert len(codec.forward_backward(body).data) == 1
    with pytest.raises(TinkerRefusal, match="more than 8") as caught:
        codec.forward_backward(body + parts)
    assert (caught.value.status, caught.value.param) == (400, "data")
    assert codec.addressee(body + parts) is None
    assert codec.addressee(body) == ("m", 1)


@pytest.mark.parametrize("tail", [b"\x1a", b"\x1a\x05", b"\x1a\x02\x0a\x7f", b"\x0b\x0c", b"\x80" * 11])
def test_a_request_that_is_cut_or_no_protobuf_is_refused(tail: bytes) -> None:
    with pytest.raises(TinkerRefusal, match="not a ForwardBackwardRequest") as caught:
        codec.forward_backward(request().SerializeToString() + tail)
    assert caught.value.status == 400


def test_a_sessions_name_is_of_a_bounded_length() -> None:
    assert refused(b'{"display_name":"%s"}' % (b"x" * 1025), CreateSessionBody).param == "display_name"
    assert decode(b'{"display_name":""}', CreateSessionBody).display_name == ""


def test_an_error_of_the_records_shows_neither_the_statement_nor_its_values(tmp_path: Path) -> None:
    store = Store(tmp_path / "tinker.db")
    with sqlite3.connect(tmp_path / "tinker.db") as other:
        other.execute("DROP TABLE sessions")
    with pytest.raises(TinkerRefusal) as caught:
        store.create_session("tenant-digest", user_metadata={"token": "secret"})
    assert caught.value.status == 503
    assert not [
        word for word in ("secret", "tenant-digest", "SELECT", "INSERT") if word in caught.value.detail
    ]
    assert not [word for word in ("secret", "tenant-digest") if word in str(caught.value.__cause__)]


def sparse(shape: list[int], starts: list[int]) -> bytes:
    message = request()
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.dtype = codec.FLOAT32
    tensor.shape.extend(shape)
    tensor.sparse_csr.values = np.ones(3, dtype="<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.array(starts, dtype="<i8").tobytes()
    tensor.sparse_csr.col_indices = np.zeros(3, dtype="<i8").tobytes()
    return bytes(message.SerializeToString())


def test_sparse_rows_whose_sizes_only_fit_by_overflow_are_refused() -> None:
    """Every difference of these starts is positive in 64 bits, and numpy would write beyond its array's end."""
    made = "import sys; from midstream_tinker import codec; codec.forward_backward(sys.stdin.buffer.read())"
    body = sparse([4, 2], [0, 2**63 - 1, -(2**63), -1, 3])
    done = subprocess.run([sys.executable, "-c", made], input=body, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"TinkerRefusal" in done.stderr
    assert b"sparse indices" in done.stderr


@pytest.mark.parametrize("encoding", ["dense", "sparse_csr"])
def test_an_empty_tensor_of_a_shape_that_no_array_can_have_is_refused(encoding: str) -> None:
    message = request()
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.dtype = codec.FLOAT32
    tensor.shape.extend([0, 2**62])
    getattr(tensor, encoding)
    if encoding == "sparse_csr":
        tensor.sparse_csr.crow_indices = bytes(8)
    with pytest.raises(TinkerRefusal, match="shape") as caught:
        codec.forward_backward(message.SerializeToString())
    assert (caught.value.status, caught.value.param) == (400, "data[0].loss_fn_inputs.weights")


def test_a_completion_that_is_nested_too_deeply_is_the_servers_failure() -> None:
    params = types.TinkerSamplingParams()
    sample = CheckedSample(prompt=(1,), n=1, params=params, prompt_logprobs=False, topk=0, echoed=0)
    with pytest.raises(WorkFailed, match="cannot be read"):
        sampled(sample, b'{"x":' + b"[" * 5000, {}, None)
