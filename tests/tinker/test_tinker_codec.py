"""Protobuf as the SDK versions read and write it, by their own conversions; and bodies that no SDK writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sdk_venvs import SDKS, run_sdk

from midstream_tinker import codec, messages
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.trainer.types import Datum, LossOutputs, Tensor
from midstream_tinker.types import (
    CreateModelBody,
    DrawnSequence,
    OptimStepBody,
    SampleBody,
    SampleResult,
    addressee,
    decode,
)

# Scripts may take 400.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLE = SampleResult(
    sequences=(
        DrawnSequence(tokens=(5, 2**31 - 1), logprobs=(-0.5, -1.25), stopped=True),
        DrawnSequence(tokens=(0,), logprobs=(-3.0,), stopped=False),
    ),
    prompt_logprobs=(None, -0.125, -2.0),
    topk_prompt_logprobs=(None, ((9, -0.125), (0, -0.75)), ((4, -1.0),)),
    cached_tokens=17,
)


def floats(*values: float, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(
        dtype="float32",
        shape=shape or (len(values),),
        data=np.asarray(values, dtype="<f4").tobytes(),
    )


OUTPUTS = LossOutputs(
    outputs=(
        {"logprobs": floats(-1.0, -2.0, -3.0)},
        {"logprobs": floats(-4.0)},
    ),
    metrics={"loss:sum": 2.5, "tokens:sum": 4.0},
)


@pytest.fixture(scope="module", params=SDKS)
def converted(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What one SDK version made of SAMPLE and OUTPUTS, and its own request."""
    sample, outputs = codec.sample_response(SAMPLE), codec.loss_outputs(OUTPUTS)
    asked = {"sample": sample.hex(), "outputs": outputs.hex()}
    in_json = {"sample_json": codec.sample_json(sample), "outputs_json": codec.loss_outputs_json(outputs)}
    asked |= msgspec.to_builtins(in_json)
    answered: dict[str, Any] = run_sdk(request.param, Path(__file__).with_name("codec_in_sdk.py"), asked)
    return answered | {"version": request.param}


def test_the_sdk_reads_samples_as_they_were_made(converted: dict[str, Any]) -> None:
    assert converted["sample"] == {
        "sequences": [["stop", [5, 2**31 - 1], [-0.5, -1.25]], ["length", [0], [-3.0]]],
        "prompt_logprobs": [None, -0.125, -2.0],
        "topk_prompt_logprobs": [None, [[9, -0.125], [0, -0.75]], [[4, -1.0]]],
        "prompt_cache_hit_tokens": 17,
    }


def test_the_sdk_reads_training_results_as_they_were_made(converted: dict[str, Any]) -> None:
    assert converted["outputs"] == {
        "type": "ArrayRecord",
        "outputs": [
            {"logprobs": ["float32", [3], [-1.0, -2.0, -3.0]]},
            {"logprobs": ["float32", [1], [-4.0]]},
        ],
        "metrics": {"loss:sum": 2.5, "tokens:sum": 4.0},
    }


def test_an_sdk_that_reads_json_results_reads_the_same_from_both_forms(converted: dict[str, Any]) -> None:
    """The later versions take protobuf only."""
    both = [converted["sample"], converted["outputs"]]
    assert converted["from_json"] == (both if converted["version"] == "0.24" else None)


def test_the_json_form_of_datums_of_several_shapes_keeps_their_order_and_shapes() -> None:
    two_wide = floats(-1.0, -2.0, -3.0, -4.0, shape=(2, 2))
    outputs = ({"logprobs": floats(-9.0)}, {"logprobs": two_wide, "n": integers(4, 5)})
    made = codec.loss_outputs_json(
        codec.loss_outputs(LossOutputs(outputs=outputs, metrics={"loss:sum": 1.5}))
    )
    assert msgspec.to_builtins(made) == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": {"data": [-9.0], "dtype": "float32", "shape": [1]}},
            {
                "logprobs": {"data": [-1.0, -2.0, -3.0, -4.0], "dtype": "float32", "shape": [2, 2]},
                "n": {"data": [4, 5], "dtype": "int64", "shape": [2]},
            },
        ],
        "metrics": {"loss:sum": 1.5},
    }


def test_a_training_request_of_the_sdk_is_read_whole(converted: dict[str, Any]) -> None:
    read = codec.forward_backward(bytes.fromhex(converted["request"]))
    assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == (
        "session_1:train:0",
        3,
        "ppo",
        True,
    )
    assert read.config == {"clip_low_threshold": 0.75}
    first, second = read.data
    assert first.tokens == (1, 2, 2**31 - 1)
    assert first.inputs == {
        "target_tokens": integers(2, 3, 4),
        "advantages": floats(0.0, 1.25, -1.25),
        "weights": floats(0.5, 0, 0, -1.5, 0, 0, 0, 0, 0, 2.5, 0, 0, shape=(3, 4)),
    }
    assert second == Datum(tokens=(7,), inputs={"target_tokens": integers(8)})


def integers(*values: int) -> Tensor:
    return Tensor(dtype="int64", shape=(len(values),), data=np.asarray(values, dtype="<i8").tobytes())


def test_datums_of_different_shapes_are_several_records_in_order() -> None:
    two_wide = floats(-1.0, -2.0, -3.0, -4.0, shape=(2, 2))
    outputs = ({"logprobs": floats(-9.0)}, {"logprobs": two_wide}, {"logprobs": floats(-8.0, -7.0)})
    message = messages.ForwardBackwardOutput.FromString(
        codec.loss_outputs(LossOutputs(outputs=outputs, metrics={}))
    )
    records = message.loss_fn_outputs
    assert [record.num_datums for record in records] == [1, 1, 1]
    assert [list(record.fields["logprobs"].trailing_shape) for record in records] == [[], [2], []]
    read = [np.frombuffer(record.fields["logprobs"].data, dtype="<f4").tolist() for record in records]
    assert read == [[-9.0], [-1.0, -2.0, -3.0, -4.0], [-8.0, -7.0]]


def test_a_text_option_of_a_loss_is_read_beside_numbers() -> None:
    message = request()
    message.loss_fn_config["clip"] = 0.5
    message.loss_fn_config_v2["clip"].number = 0.5
    message.loss_fn_config_v2["loss_id"].text = "mine"
    assert codec.forward_backward(message.SerializeToString()).config == {"clip": 0.5, "loss_id": "mine"}


def request() -> Any:
    message = messages.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([1, 2], dtype="<i4").tobytes()
    return message


def sparse(
    message: Any, shape: list[int], starts: list[int], columns: list[int], values: list[float]
) -> None:
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.dtype = codec.FLOAT32
    tensor.shape.extend(shape)
    tensor.sparse_csr.values = np.asarray(values, dtype="<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(starts, dtype="<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray(columns, dtype="<i8").tobytes()


@pytest.mark.parametrize(
    ("shape", "starts", "columns"),
    [
        pytest.param([2, 3], [0, 1], [0], id="a row is missing"),
        pytest.param([2, 3], [0, 2, 1], [0], id="starts go down"),
        pytest.param([2, 3], [1, 1, 1], [0], id="first start"),
        pytest.param([2, 3], [0, 1, 1], [3], id="column beyond"),
        pytest.param([2, 3], [0, 1, 1], [-1], id="column before"),
        pytest.param([2, 3], [0, 1, 2], [0, 1], id="values are missing"),
        pytest.param([6], [0, 1], [0], id="one dimension"),
        pytest.param([2**31, 2**31], [0, 1, 1], [0], id="too large"),
        pytest.param([2**40, 0], [0], [], id="too many rows"),
        pytest.param([-2, 3], [0, 1, 1], [0], id="negative"),
    ],
)
def test_sparse_inputs_that_do_not_fit_are_refused(
    shape: list[int], starts: list[int], columns: list[int]
) -> None:
    message = request()
    sparse(message, shape, starts, columns, [1.0])
    with pytest.raises(TinkerRefusal) as caught:
        codec.forward_backward(message.SerializeToString())
    assert caught.value.status == 400
    assert caught.value.param == "data[0].loss_fn_inputs.weights"


def test_sparse_inputs_share_one_limit() -> None:
    message = request()
    side = 2500
    sparse(message, [side, side], [0] * (side + 1), [], [])
    message.data.add().CopyFrom(message.data[0])
    message.data.add().CopyFrom(message.data[0])
    assert side * side * 4 < codec.MAX_MADE_BYTES < 3 * side * side * 4
    with pytest.raises(TinkerRefusal, match=r"data\[2\].loss_fn_inputs.weights is too large"):
        codec.forward_backward(message.SerializeToString())


def damaged(change: str) -> bytes:
    message = request()
    inputs = message.data[0].loss_fn_inputs
    if change == "image":
        message.data[0].model_input.add().image.SetInParent()
    elif change == "dtype":
        inputs["weights"].dtype = 4
        inputs["weights"].dense = b"1234"
    elif change == "size":
        inputs["weights"].dtype = codec.FLOAT32
        inputs["weights"].dense = b"12345"
    elif change == "shape":
        inputs["weights"].dtype = codec.FLOAT32
        inputs["weights"].dense = b"12345678"
        inputs["weights"].shape.extend([3])
    elif change == "no tokens":
        message.data[0].model_input[0].encoded_text.tokens = b""
    elif change == "negative token":
        message.data[0].model_input[0].encoded_text.tokens = np.asarray([-1], dtype="<i4").tobytes()
    elif change == "no data":
        message.ClearField("data")
    elif change == "no model":
        message.model_id = ""
    elif change == "seq_id":
        message.seq_id = -1
    else:
        return b"\xff\xff not protobuf"
    return bytes(message.SerializeToString())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ("image", "data[0].model_input.chunks[1]"),
        ("dtype", "data[0].loss_fn_inputs.weights"),
        ("size", "data[0].loss_fn_inputs.weights"),
        ("shape", "data[0].loss_fn_inputs.weights"),
        ("no tokens", "data[0].model_input"),
        ("negative token", "data[0].model_input"),
        ("no data", "data"),
        ("no model", "model_id"),
        ("seq_id", "seq_id"),
        ("nonsense", None),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(change: str, param: str | None) -> None:
    with pytest.raises(TinkerRefusal) as caught:
        codec.forward_backward(damaged(change))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_refused_request_still_says_whose_turn_it_was() -> None:
    assert codec.addressee(damaged("image")) == ("m", 1)
    assert codec.addressee(damaged("nonsense")) is None
    assert addressee(b'{"model_id":"m","seq_id":4,"adam_params":{"beta1":7}}') == ("m", 4)
    assert addressee(b'{"model_id":"m"}') is None
    assert addressee(b"{") is None


# -- JSON bodies

PROMPT = b'"prompt":{"chunks":[{"type":"encoded_text","tokens":[1,2]},{"type":"encoded_text","tokens":[]}]}'


def sample_body(extra: bytes = b"", params: bytes = b"") -> SampleBody:
    return decode(b'{%s,"sampling_params":{%s}%s}' % (PROMPT, params, extra), SampleBody)


def test_a_sample_body_is_read_with_the_sdks_defaults() -> None:
    body = sample_body(b',"sampling_session_id":"sampling_1","seq_id":590000000000000001,"type":"sample"')
    assert body.prompt.token_ids() == (1, 2)
    assert (body.num_samples, body.seq_id) == (1, 590000000000000001)
    assert (body.sampling_params.temperature, body.sampling_params.top_k, body.sampling_params.stop) == (
        1.0,
        -1,
        None,
    )
    stops = [
        sample_body(params=b'"stop":' + stop).sampling_params.stop
        for stop in (b'"a"', b'["a"]', b"[3]", b"[]")
    ]
    assert stops == ["a", ("a",), (3,), ()]


@pytest.mark.parametrize(
    ("extra", "params", "param"),
    [
        (b',"guidance":2', b"", "guidance"),
        (b"", b'"min_p":0.1', "sampling_params.min_p"),
        (b',"num_samples":"two"', b"", "num_samples"),
        (b',"seq_id":-1', b"", "seq_id"),
    ],
)
def test_a_field_that_would_change_the_sample_is_refused_by_name(
    extra: bytes, params: bytes, param: str
) -> None:
    with pytest.raises(TinkerRefusal) as caught:
        sample_body(extra, params)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_unknown_field_that_holds_nothing_is_no_reason_to_refuse() -> None:
    body = sample_body(b',"guidance":null,"boost":false,"biases":{},"more":0', b'"min_p":0.0')
    assert body == sample_body()


def test_a_chunk_that_is_no_text_is_refused() -> None:
    body = decode(
        b'{"prompt":{"chunks":[{"type":"image","data":"aGk=","format":"png"}]},"sampling_params":{}}',
        SampleBody,
    )
    with pytest.raises(TinkerRefusal, match="'image'") as caught:
        body.prompt.token_ids()
    assert caught.value.param == "prompt.chunks[0]"


def test_a_prompt_without_tokens_is_refused() -> None:
    body = decode(
        b'{"prompt":{"chunks":[{"type":"encoded_text","tokens":[]}]},"sampling_params":{}}', SampleBody
    )
    with pytest.raises(TinkerRefusal, match="no tokens"):
        body.prompt.token_ids()


def test_nested_bodies_are_checked_too() -> None:
    with pytest.raises(TinkerRefusal) as caught:
        decode(
            b'{"session_id":"s","model_seq_id":0,"base_model":"m","lora_config":{"rank":8,"alpha":16}}',
            CreateModelBody,
        )
    assert caught.value.param == "lora_config.alpha"
    with pytest.raises(TinkerRefusal) as caught:
        decode(b'{"model_id":"m","seq_id":1,"adam_params":{"beta1":1.5}}', OptimStepBody)
    assert caught.value.param == "adam_params.beta1"


def test_what_is_not_json_is_said_to_be_none() -> None:
    for body in (b"", b"{", b"\xff"):
        with pytest.raises(TinkerRefusal, match="not JSON"):
            decode(body, SampleBody)


def test_logprobs_that_are_not_finite_survive() -> None:
    sequence = DrawnSequence(tokens=(1,), logprobs=(-math.inf,), stopped=False)
    message = messages.SampleResponse.FromString(codec.sample_response(SampleResult(sequences=(sequence,))))
    assert np.frombuffer(message.sequences[0].logprobs, dtype="<f4")[0] == -math.inf
    assert not message.HasField("prompt_logprobs")
    assert not message.HasField("topk_prompt_logprobs")
