"""Bodies of the Tinker API: JSON and protobuf, and the states that a trainer goes on from.

Checked: a body is read or refused by a 400. What is read is read the same when it is written again. A tensor that is taken is
one that the trainer can make an array of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np

from midstream_tinker import codec, json_losses, messages, types
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.samples import check as check_sample
from midstream_tinker.trainer.types import ForwardBackward, WorkFailed
from targets.snapshot_files import BETWEEN, directory, safetensors_file
from targets.target import Target, check, controlled, outcome

BODIES: tuple[type[types.TinkerBody], ...] = (
    types.SampleBody,
    types.CreateSessionBody,
    types.SessionBody,
    types.CreateSamplingSessionBody,
    types.RetrieveBody,
    types.CancelBody,
    types.CreateModelBody,
    types.OptimStepBody,
    types.SaveWeightsBody,
    types.SaveWeightsForSamplerBody,
    types.LoadWeightsBody,
    types.WeightsInfoBody,
    json_losses.LossesBody,
)


def check_status(refused: Exception | None) -> None:
    if isinstance(refused, TinkerRefusal):
        check(
            refused.status == 400, "a client's bytes are the server's fault", refused.status, refused.detail
        )
        refused.detail.encode()


def run_json(data: bytes) -> None:
    control, body = controlled(data)
    into = BODIES[control % len(BODIES)]
    read, refused = outcome(TinkerRefusal, lambda: types.decode(body, into))
    check_status(refused)
    addressee = types.addressee(body)
    if read is None:
        return
    known = (getattr(read, "model_id", None), getattr(read, "seq_id", None))
    check(addressee is None or None in known or addressee == known, "another addressee", addressee, read)
    again = types.decode(msgspec.json.encode(read), into)
    check(repr(again) == repr(read), "another body when it is written again", read, again)
    if isinstance(read, types.SampleBody):
        sample, refused = outcome(TinkerRefusal, lambda: check_sample(read))
        check_status(refused)
        if sample is not None:
            check(len(sample.prompt) > 0, "a sample without a prompt", sample)
            json.loads(sample.completion("m"))
    if isinstance(read, json_losses.LossesBody):
        losses, refused = outcome(TinkerRefusal, lambda: json_losses.forward_backward(body))
        check_status(refused)
        if losses is not None:
            check_losses(losses)


def json_seeds() -> Iterator[bytes]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"tokens": [3]}]}
    tensor = {"data": [1.5, 2], "dtype": "float32", "shape": [2, 3]}
    tensor |= {"sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 2]}
    params = {"max_tokens": 4, "temperature": 0.5, "stop": ["a"], "seed": 1, "top_p": 1, "top_k": -1}
    bodies: dict[type[types.TinkerBody], dict[str, Any]] = {
        types.SampleBody: {
            "prompt": prompt,
            "sampling_params": params,
            "num_samples": 2,
            "sampling_session_id": "s",
        },
        types.CreateSessionBody: {"tags": [], "sdk_version": "0.38", "user_metadata": {"a": 1}},
        types.SessionBody: {"session_id": "s"},
        types.CreateSamplingSessionBody: {"session_id": "s", "sampling_session_seq_id": 0, "base_model": "m"},
        types.RetrieveBody: {"request_id": "r"},
        types.CancelBody: {"request_id": "r"},
        types.CreateModelBody: {
            "session_id": "s",
            "model_seq_id": 0,
            "base_model": "m",
            "lora_config": {"rank": 8},
        },
        types.OptimStepBody: {
            "model_id": "m",
            "seq_id": 1,
            "adam_params": {"learning_rate": 1e-4, "beta1": 0.9},
        },
        types.SaveWeightsBody: {"model_id": "m", "seq_id": 1, "path": "p"},
        types.SaveWeightsForSamplerBody: {"model_id": "m", "seq_id": 1, "path": "p"},
        types.LoadWeightsBody: {"model_id": "m", "seq_id": 1, "path": "tinker://x", "optimizer": True},
        types.WeightsInfoBody: {"tinker_path": "tinker://x"},
        json_losses.LossesBody: {
            "model_id": "m",
            "seq_id": 1,
            "forward_backward_input": {
                "data": [{"model_input": prompt, "loss_fn_inputs": {"weights": tensor}}],
                "loss_fn": "ppo",
                "loss_fn_config": {"clip_low_threshold": 0.8},
            },
        },
    }
    for number, kind in enumerate(BODIES):
        yield bytes([number]) + json.dumps(bodies[kind]).encode()
    yield b"\x00" + json.dumps({"prompt": prompt, "sampling_params": {}, "prompt_logprobs": True}).encode()
    yield b"\x07" + json.dumps({"model_id": "m", "seq_id": 1, "optimizer_params": {"a": [1, {}]}}).encode()


# -- protobuf


def run_protobuf(data: bytes) -> None:
    read, refused = outcome(TinkerRefusal, lambda: codec.forward_backward(data))
    check_status(refused)
    addressee = codec.addressee(data)
    if read is None:
        return
    check(addressee in (None, (read.model_id, read.seq_id)), "another addressee", addressee, read.model_id)
    check_losses(read)


def check_losses(read: ForwardBackward) -> None:
    for datum in read.data:
        for name, tensor in datum.inputs.items():
            array = np.frombuffer(tensor.data, np.dtype(tensor.dtype)).reshape(tensor.shape)
            check(array.nbytes == len(tensor.data), "another size than its bytes", name)
    again = codec.forward_backward(written(read))
    check(ordered(again) == ordered(read), "another request when it is written again", read, again)


def ordered(read: ForwardBackward) -> str:
    """Maps have no order. Equal values of NaN differ."""
    config = dict(sorted(read.config.items()))
    data = tuple(msgspec.structs.replace(d, inputs=dict(sorted(d.inputs.items()))) for d in read.data)
    return repr(msgspec.structs.replace(read, config=config, data=data))


def written(read: ForwardBackward) -> bytes:
    message = messages.ForwardBackwardRequest(
        model_id=read.model_id, seq_id=read.seq_id, loss_fn=read.loss_fn, forward_only=read.forward_only
    )
    for name, value in read.config.items():
        kept = message.loss_fn_config_v2[name]
        if isinstance(value, str):
            kept.text = value
        else:
            kept.number = value
    for datum in read.data:
        added = message.data.add()
        added.model_input.add().encoded_text.tokens = np.asarray(datum.tokens, "<i4").tobytes()
        for name, tensor in datum.inputs.items():
            field = added.loss_fn_inputs[name]
            field.dtype = {"float32": codec.FLOAT32, "int64": codec.INT64, "int32": codec.INT32}[tensor.dtype]
            field.dense = tensor.data
            field.shape.extend(tensor.shape)
    return bytes(message.SerializeToString())


def sparse(shape: list[int], starts: list[int], columns: list[int]) -> bytes:
    """A request with a sparse tensor."""
    message = request()
    field = message.data[0].loss_fn_inputs["weights"]
    field.dtype = codec.FLOAT32
    field.shape.extend(shape)
    field.sparse_csr.values = np.ones(len(columns), "<f4").tobytes()
    field.sparse_csr.crow_indices = np.array(starts, "<i8").tobytes()
    field.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()
    return bytes(message.SerializeToString())


def request() -> Any:
    message = messages.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    message.data.add().model_input.add().encoded_text.tokens = np.arange(2, dtype="<i4").tobytes()
    return message


def protobuf_seeds() -> Iterator[bytes]:
    yield bytes(request().SerializeToString())
    yield sparse([2, 3], [0, 1, 2], [0, 2])
    yield sparse([4, 2], [0, 0, 1, 1, 3], [1, 0, 1])
    yield sparse([0, 3], [0], [])
    for dtype, kind in ((codec.FLOAT32, "<f4"), (codec.INT64, "<i8"), (codec.INT32, "<i4")):
        message = request()
        field = message.data[0].loss_fn_inputs["target_tokens"]
        field.dtype = dtype
        field.dense = np.arange(2).astype(kind).tobytes()
        message.loss_fn_config["clip"] = 0.2
        message.loss_fn_config_v2["how"].text = "x"
        yield bytes(message.SerializeToString())
        field.shape.extend([2, 1])
        yield bytes(message.SerializeToString())
    message = request()
    message.data[0].model_input.add().image.SetInParent()
    yield bytes(message.SerializeToString())


# -- a trainer's states


def run_state(data: bytes) -> None:
    """meta.json, the adapter's weights, the optimizer's state; one that is empty is not there."""
    import torch

    from midstream_tinker.trainer import checkpoints
    from midstream_tinker.trainer.optimizer import Optimizer
    from midstream_tinker.trainer.types import LoraConfig

    place = directory()
    names = (checkpoints.META_FILE, checkpoints.ADAPTER_FILE, checkpoints.OPTIMIZER_FILE)
    for name, content in zip(names, data.split(BETWEEN), strict=False):
        if content:
            (place / name).write_bytes(content)
    weights = {"a": torch.nn.Parameter(torch.zeros(2))}
    optimizer = Optimizer(weights)
    model = SimpleNamespace(
        base=SimpleNamespace(directory=_base()),
        lora=LoraConfig(rank=1),
        trainable=weights,
        optimizer=optimizer,
    )
    _, refused = outcome(WorkFailed, lambda: checkpoints.load_state(cast(Any, model), place, optimizer=True))
    if refused is not None:
        check(
            not weights["a"].detach().any() and not optimizer.state(),
            "a refused state left something",
            refused,
        )


_bases: list[Path] = []


def _base() -> Path:
    if not _bases:
        place = directory().parent / "base"
        place.mkdir()
        (place / "config.json").write_bytes(b"{}")
        (place / "model.safetensors").write_bytes(safetensors_file({}, b""))
        _bases.append(place)
    return _bases[0]


def state_seeds() -> Iterator[bytes]:
    from midstream_tinker.trainer.checkpoints import FORMAT, Meta, fingerprint
    from midstream_tinker.trainer.types import LoraConfig

    meta = Meta(format=FORMAT, base=fingerprint(_base()), lora=LoraConfig(rank=1), steps=3, optimizer=True)
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    weights = safetensors_file({"a": entry}, np.ones(2, "<f4").tobytes())
    moments = {
        f"{kind}/a": entry | {"data_offsets": [8 * i, 8 * i + 8]}
        for i, kind in enumerate(("exp_avg", "exp_avg_sq"))
    }
    step = {"step/a": {"dtype": "F32", "shape": [], "data_offsets": [16, 20]}}
    yield BETWEEN.join([msgspec.json.encode(meta), weights, safetensors_file(moments | step, bytes(20))])
    yield BETWEEN.join([msgspec.json.encode(meta), weights, safetensors_file({}, b"")])
    yield BETWEEN.join([msgspec.json.encode(meta), weights])
    yield BETWEEN.join([b"{}", weights])


WORDS = (
    b'"chunks":[',
    b'"tokens":[',
    b"2147483648",
    b"1e999",
    b"[" * 32,
    b'"\\ud800"',
    b'"stop":',
    b"null",
    b"\xff",
)
WIRE_WORDS = (
    b"\x0a\x01m",
    b"\x10\x01",
    b"\xff" * 9 + b"\x01",
    b"\x7f\xff\xff\xff\xff\xff\xff\xff",
    bytes(8),
    b"\x80" * 8,
)
JSON = Target(run_json, json_seeds, WORDS)
PROTOBUF = Target(run_protobuf, protobuf_seeds, WIRE_WORDS, 1024)
STATE = Target(run_state, state_seeds, (BETWEEN, b'"shape":[', b'"lora":{', b'"rank":', b"[" * 32), 2048)
