"""Runs in an SDK's own environment: its conversions of what midstream wrote, and what it writes itself.

stdin: JSON {"sample": hex, "outputs": hex, "sample_json": object, "outputs_json": object}; stdout: JSON {"sample",
"outputs", "request": hex, "from_json": [sample, outputs], or null for a version that reads no JSON results}.
"""

import json
import sys

import numpy as np
from tinker import types
from tinker.lib._pydantic_conv import deserialize_json_response
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest


def sample(read: types.SampleResponse) -> dict:
    return {
        "sequences": [[one.stop_reason, one.tokens, one.logprobs] for one in read.sequences],
        "prompt_logprobs": read.prompt_logprobs,
        "topk_prompt_logprobs": read.topk_prompt_logprobs,
        "prompt_cache_hit_tokens": read.prompt_cache_hit_tokens,
    }


def outputs(read: types.ForwardBackwardOutput) -> dict:
    return {
        "type": read.loss_fn_output_type,
        "outputs": [
            {name: [tensor.dtype, tensor.shape, tensor.tolist()] for name, tensor in datum.items()}
            for datum in read.loss_fn_outputs
        ],
        "metrics": read.metrics,
    }


def from_json(sampled: dict, losses: dict) -> list | None:
    read = deserialize_json_response(sampled, types.SampleResponse)
    if isinstance(read, dict):
        return None
    return [sample(read), outputs(deserialize_json_response(losses, types.ForwardBackwardOutput))]


def request() -> bytes:
    """Dense and sparse inputs, a chunk without tokens, an input without a shape."""
    sparse = types.TensorData(
        data=[0.5, -1.5, 2.5],
        dtype="float32",
        shape=[3, 4],
        sparse_crow_indices=[0, 2, 2, 3],
        sparse_col_indices=[0, 3, 1],
    )
    prompt = types.ModelInput(
        chunks=[
            types.EncodedTextChunk(tokens=[1, 2]),
            types.EncodedTextChunk(tokens=[]),
            types.EncodedTextChunk(tokens=[2**31 - 1]),
        ]
    )
    first = types.Datum(
        model_input=prompt,
        loss_fn_inputs={
            "target_tokens": [2, 3, 4],
            "advantages": np.asarray([0.0, 1.25, -1.25], dtype=np.float32),
            "weights": sparse,
        },
    )
    second = types.Datum(
        model_input=types.ModelInput.from_ints([7]),
        loss_fn_inputs={"target_tokens": types.TensorData(data=[8], dtype="int64")},
    )
    body = ForwardBackwardRequest(
        forward_backward_input=ForwardBackwardInput(
            data=[first, second], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.75}
        ),
        model_id="session_1:train:0",
        seq_id=3,
    )
    message = forward_backward_request_to_proto(body)
    message.forward_only = True
    return message.SerializeToString()


asked = json.load(sys.stdin)
json.dump(
    {
        "sample": sample(deserialize_sample_response(bytes.fromhex(asked["sample"]))),
        "outputs": outputs(deserialize_forward_backward_output(bytes.fromhex(asked["outputs"]))),
        "from_json": from_json(asked["sample_json"], asked["outputs_json"]),
        "request": request().hex(),
    },
    sys.stdout,
)
