"""Training requests as SDK 0.18 writes them, in JSON. Later ones send protobuf, which codec.py reads.

Always holds: a request is made into the protobuf message first. So both forms are checked by the same code, and refused by the
same names. A number that its dtype cannot hold is refused: an int64 is never rounded, a float32 never becomes infinite.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from midstream_tinker import codec, messages
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.trainer.types import ForwardBackward
from midstream_tinker.types import Exact, Text, TinkerBody, TinkerPrompt, decode

_KINDS: dict[str, tuple[int, str]] = {"float32": (codec.FLOAT32, "<f4"), "int64": (codec.INT64, "<i8")}


class TensorBody(TinkerBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Flat. With indices it is sparse (CSR), and data has what is not zero."""

    data: tuple[int | float, ...]
    dtype: Literal["float32", "int64"]
    shape: tuple[int, ...] | None = None
    sparse_crow_indices: tuple[int, ...] | None = None
    sparse_col_indices: tuple[int, ...] | None = None


class DatumBody(Exact, frozen=True, kw_only=True):
    model_input: TinkerPrompt
    loss_fn_inputs: dict[str, TensorBody]


class LossBody(Exact, frozen=True, kw_only=True):
    data: tuple[DatumBody, ...]
    loss_fn: Text
    loss_fn_config: dict[str, float] | None = None


class LossesBody(Exact, frozen=True, kw_only=True):
    """One input: with gradients, or of a forward pass alone."""

    model_id: Text
    # As wide as in the message.
    seq_id: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    forward_backward_input: LossBody | None = None
    forward_input: LossBody | None = None
    type: str | None = None


def forward_backward(body: bytes) -> ForwardBackward:
    """Raises TinkerRefusal (400)."""
    asked = decode(body, LossesBody)
    given = asked.forward_backward_input or asked.forward_input
    if given is None or (asked.forward_backward_input and asked.forward_input):
        message = "one of forward_backward_input and forward_input is needed"
        raise TinkerRefusal(400, message, "forward_backward_input")
    message = messages.ForwardBackwardRequest(model_id=asked.model_id, loss_fn=given.loss_fn)
    message.seq_id = asked.seq_id or 0
    message.forward_only = asked.forward_backward_input is None
    message.loss_fn_config.update(given.loss_fn_config or {})
    datums = [_written(datum, f"data[{index}]") for index, datum in enumerate(given.data)]
    return codec.read_request(message, datums)


def _written(datum: DatumBody, where: str) -> bytes:
    message = messages.DatumMessage()
    tokens = datum.model_input.token_ids(f"{where}.model_input")
    message.model_input.add().encoded_text.tokens = np.asarray(tokens, dtype="<i4").tobytes()
    for name, tensor in datum.loss_fn_inputs.items():
        _write_tensor(message.loss_fn_inputs[name], tensor, f"{where}.loss_fn_inputs.{name}")
    return bytes(message.SerializeToString())


def _write_tensor(message: Any, tensor: TensorBody, where: str) -> None:
    message.dtype, kind = _KINDS[tensor.dtype]
    message.shape.extend(_numbers(tensor.shape or (), "<i8", where))
    rows, columns = tensor.sparse_crow_indices, tensor.sparse_col_indices
    values = _numbers(tensor.data, kind, where).tobytes()
    if rows is None and columns is None:
        message.dense = values
        return
    if rows is None or columns is None:
        raise TinkerRefusal(400, f"{where} has one of its sparse indices without the other", where)
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = _numbers(rows, "<i8", where).tobytes()
    message.sparse_csr.col_indices = _numbers(columns, "<i8", where).tobytes()


def _numbers(values: tuple[int | float, ...], kind: str, where: str) -> np.ndarray[Any, np.dtype[Any]]:
    whole = kind == "<i8"
    try:
        with np.errstate(over="ignore"):
            made = np.asarray(values, dtype=kind)
    except OverflowError as error:
        raise TinkerRefusal(400, f"{where} has a number that its type cannot hold", where) from error
    if (whole and any(isinstance(value, float) for value in values)) or not np.isfinite(made).all():
        raise TinkerRefusal(400, f"{where} has a number that its type cannot hold", where)
    return made
