"""Training requests in the JSON of SDK 0.18 mean what their protobuf means, and are refused by the same names."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from midstream_tinker import codec, json_losses, messages
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.trainer.types import Datum, Tensor


def body(**changes: Any) -> bytes:
    """Changes are of the input; None leaves a field out."""
    tensor = {"data": [0.5, -1.5], "dtype": "float32", "shape": [2]}
    datum = {
        "model_input": {"chunks": [{"tokens": [1], "type": "encoded_text"}, {"tokens": [2**31 - 1]}]},
        "loss_fn_inputs": {"advantages": tensor, "target_tokens": {"data": [3, 2**62], "dtype": "int64"}},
    }
    given = {"data": [datum], "loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.75}} | changes
    return json.dumps({"model_id": "m", "seq_id": 3, "forward_backward_input": given}).encode()


def with_tensor(**tensor: Any) -> bytes:
    chunks = {"chunks": [{"tokens": [1], "type": "encoded_text"}]}
    return body(data=[{"model_input": chunks, "loss_fn_inputs": {"weights": tensor}}])


def test_a_request_in_json_is_read_as_the_same_one_in_protobuf() -> None:
    message = messages.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn="ppo")
    message.loss_fn_config["clip_low_threshold"] = 0.75
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([1, 2**31 - 1], dtype="<i4").tobytes()
    advantages, targets = datum.loss_fn_inputs["advantages"], datum.loss_fn_inputs["target_tokens"]
    advantages.dtype, advantages.dense = codec.FLOAT32, np.asarray([0.5, -1.5], dtype="<f4").tobytes()
    targets.dtype, targets.dense = codec.INT64, np.asarray([3, 2**62], dtype="<i8").tobytes()
    read = json_losses.forward_backward(body())
    assert read == codec.forward_backward(message.SerializeToString())
    assert not read.forward_only


def test_a_forward_pass_in_json_has_no_gradients() -> None:
    sent = body().replace(b"forward_backward_input", b"forward_input")
    assert json_losses.forward_backward(sent).forward_only


def test_a_sparse_tensor_in_json_becomes_a_dense_one() -> None:
    sent = with_tensor(
        data=[0.5, 2.5],
        dtype="float32",
        shape=[2, 3],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[1, 2],
    )
    dense = np.asarray([[0, 0.5, 0], [0, 0, 2.5]], dtype="<f4").tobytes()
    made = Tensor(dtype="float32", shape=(2, 3), data=dense)
    assert json_losses.forward_backward(sent).data == (Datum(tokens=(1,), inputs={"weights": made}),)


WEIGHTS = "data[0].loss_fn_inputs.weights"


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        pytest.param(b"{", None, id="no JSON"),
        pytest.param(b'{"model_id": "m", "seq_id": 1}', "forward_backward_input", id="no input"),
        pytest.param(
            body()[:-1] + b', "forward_input": {"data": [], "loss_fn": "ppo"}}',
            "forward_backward_input",
            id="two inputs",
        ),
        pytest.param(body().replace(b'"seq_id": 3', b'"seq_id": 2147483648'), "seq_id", id="a seq_id beyond"),
        pytest.param(body(data=[]), "data", id="no datum"),
        pytest.param(body(other=1), "forward_backward_input.other", id="an unknown field"),
        pytest.param(
            body(data=[{"model_input": {"chunks": []}, "loss_fn_inputs": {}}]),
            "data[0].model_input",
            id="no tokens",
        ),
        pytest.param(
            body(data=[{"model_input": {"chunks": [{"type": "image"}]}, "loss_fn_inputs": {}}]),
            "data[0].model_input.chunks[0]",
            id="an image",
        ),
        pytest.param(with_tensor(data=[1.5], dtype="int64"), WEIGHTS, id="a fraction as int64"),
        pytest.param(with_tensor(data=[2**63], dtype="int64"), WEIGHTS, id="beyond int64"),
        pytest.param(with_tensor(data=[1e39], dtype="float32"), WEIGHTS, id="beyond float32"),
        pytest.param(with_tensor(data=[10**400], dtype="float32"), WEIGHTS, id="beyond any float"),
        pytest.param(with_tensor(data=[1, 2], dtype="float32", shape=[3]), WEIGHTS, id="another shape"),
        pytest.param(with_tensor(data=[1], dtype="float32", shape=[2**70]), WEIGHTS, id="a huge shape"),
        pytest.param(
            with_tensor(data=[1], dtype="float32", shape=[1, 1], sparse_crow_indices=[0, 1]),
            WEIGHTS,
            id="half a sparse tensor",
        ),
        pytest.param(
            with_tensor(
                data=[1],
                dtype="float32",
                shape=[1, 1],
                sparse_crow_indices=[0, 1],
                sparse_col_indices=[7],
            ),
            WEIGHTS,
            id="a column beyond",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(sent: bytes, param: str | None) -> None:
    with pytest.raises(TinkerRefusal) as caught:
        json_losses.forward_backward(sent)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_unknown_field_of_a_tensor_is_refused() -> None:
    with pytest.raises(TinkerRefusal, match="strides") as caught:
        json_losses.forward_backward(with_tensor(data=[1], dtype="float32", strides=[1]))
    assert caught.value.status == 400
