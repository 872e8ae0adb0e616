"""Results as the SDK reads them and training requests as it writes them: protobuf on one side, types.py on the other.

Results are also given as JSON, made of the protobuf when a client accepts nothing else.
Always holds: numbers are little-endian and packed. The size of a request's data is checked before anything is made of it.
Sparse tensors become dense ones, of at most MAX_MADE_BYTES in a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, islice, pairwise
from math import prod
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from midstream_tinker.answers import LossResults, LossTensor, SampledSequence, Samples
from midstream_tinker.messages import (
    DatumMessage,
    EntryMessage,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    SampleResponse,
    TensorMessage,
)
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.trainer.types import ITEM_BYTES, Datum, Dtype, ForwardBackward, LossOutputs, Tensor
from midstream_tinker.types import SampleResult
from midstream_tinker.walk import fields

STOP: Final = 0
LENGTH: Final = 1
FLOAT32: Final = 1
INT64: Final = 2
INT32: Final = 3


def _tag(message: Any, field: str) -> int:
    """Of a field that is a message, or numbers packed together."""
    number: int = message.fields_by_name[field].number
    return number << 3 | 2


MAX_MADE_BYTES = 1 << 26
MAX_DIMENSIONS = 8
# Of a tensor, with sizes of 0 counted as 1.
MAX_ITEMS = 1 << 48
_DATA = _tag(ForwardBackwardRequest.DESCRIPTOR, "data")
_INPUT = _tag(DatumMessage.DESCRIPTOR, "loss_fn_inputs")
_VALUE, _SHAPE = _tag(EntryMessage, "value"), _tag(TensorMessage, "shape")
_NO_REQUEST = "the body is not a ForwardBackwardRequest in protobuf"
# Fields of a request and of its datums, each of which takes time and memory, however few bytes it has. The SDK sends at most
# 1024 datums together, or 5 MB. With 50 chunks (one for each message of a rollout) and 12 tensors a datum that is 1024 * 63.
MAX_PARTS = 1 << 16
# Of all prompts of a request. The SDK's 5 MB have 1.3 million; one datum alone may be longer than that.
MAX_TOKENS = 1 << 21
# So many numbers become Python's own in one step, which holds the interpreter's lock.
STEP = 1 << 16
# With token 0: an empty cell of a top-k table.
EMPTY_LOGPROB = -99999.0
_DTYPES: dict[int, Dtype] = {FLOAT32: "float32", INT64: "int64", INT32: "int32"}
_NUMBERS: dict[Dtype, int] = {dtype: number for number, dtype in _DTYPES.items()}

_Row = Sequence[tuple[int, float]] | None


def sample_response(result: SampleResult) -> bytes:
    """A SampleResponse. A prompt position without logprobs is NaN, or a row of empty cells."""
    message = SampleResponse()
    for sequence in result.sequences:
        added = message.sequences.add()
        added.stop_reason = STOP if sequence.stopped else LENGTH
        added.tokens = np.asarray(sequence.tokens, dtype="<i4").tobytes()
        added.logprobs = np.asarray(sequence.logprobs, dtype="<f4").tobytes()
    if result.prompt_logprobs is not None:
        numbers = [float("nan") if value is None else value for value in result.prompt_logprobs]
        message.prompt_logprobs = np.asarray(numbers, dtype="<f4").tobytes()
    if result.topk_prompt_logprobs is not None:
        _write_topk(message.topk_prompt_logprobs, result.topk_prompt_logprobs)
    message.prompt_cache_hit_tokens = result.cached_tokens
    return bytes(message.SerializeToString())


def _write_topk(message: Any, rows: Sequence[_Row]) -> None:
    k = max((len(row) for row in rows if row is not None), default=0)
    tokens = np.zeros((len(rows), k), dtype="<i4")
    logprobs = np.full((len(rows), k), EMPTY_LOGPROB, dtype="<f4")
    for index, row in enumerate(rows):
        for rank, (token, logprob) in enumerate(row or ()):
            tokens[index, rank], logprobs[index, rank] = token, logprob
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()
    message.k, message.length = k, len(rows)


def loss_outputs(result: LossOutputs) -> bytes:
    """A ForwardBackwardOutput: one record of all datums, or several where their fields or inner shapes differ."""
    message = ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for _, datums in groupby(result.outputs, key=_signature):
        _write_record(message.loss_fn_outputs.add(), list(datums))
    for name, value in result.metrics.items():
        assert name.count(":") == 1, f"the SDK splits a metric's name at its one colon: {name}"
        message.metrics[name] = value
    return bytes(message.SerializeToString())


def _signature(datum: dict[str, Tensor]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple((name, tensor.dtype, tensor.shape[1:]) for name, tensor in sorted(datum.items()))


def _write_record(record: Any, datums: list[dict[str, Tensor]]) -> None:
    record.num_datums = len(datums)
    for name, first in datums[0].items():
        field = record.fields[name]
        field.dtype = _NUMBERS[first.dtype]
        field.trailing_shape.extend(first.shape[1:])
        field.data = b"".join(datum[name].data for datum in datums)
        ends = np.cumsum([0, *(len(datum[name].data) for datum in datums)], dtype="<i8")
        field.offsets = ends.tobytes()


def sample_json(encoded: bytes) -> Samples:
    """A SampleResponse in the SDK's JSON form: null where a prompt position has no logprob."""
    message = SampleResponse.FromString(encoded)
    result = Samples(
        sequences=[
            SampledSequence(
                stop_reason="stop" if sequence.stop_reason == STOP else "length",
                tokens=np.frombuffer(sequence.tokens, "<i4").tolist(),
                logprobs=np.frombuffer(sequence.logprobs, "<f4").tolist(),
            )
            for sequence in message.sequences
        ],
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
    )
    if message.HasField("prompt_logprobs"):
        numbers = np.frombuffer(message.prompt_logprobs, "<f4")
        result.prompt_logprobs = [None if np.isnan(number) else float(number) for number in numbers]
    if message.HasField("topk_prompt_logprobs"):
        result.topk_prompt_logprobs = _read_topk(message.topk_prompt_logprobs)
    return result


def _read_topk(message: Any) -> list[list[tuple[int, float]] | None]:
    shape = (message.length, message.k)
    tokens = np.frombuffer(message.token_ids, "<i4").reshape(shape).tolist()
    logprobs = np.frombuffer(message.logprobs, "<f4").reshape(shape).tolist()
    rows = [
        [(token, logprob) for token, logprob in zip(*row, strict=True) if logprob != EMPTY_LOGPROB]
        for row in zip(tokens, logprobs, strict=True)
    ]
    return [row or None for row in rows]


def loss_outputs_json(encoded: bytes) -> LossResults:
    """A ForwardBackwardOutput in the SDK's JSON form."""
    message = ForwardBackwardOutput.FromString(encoded)
    return LossResults(
        loss_fn_output_type=message.loss_fn_output_type,
        loss_fn_outputs=[datum for record in message.loss_fn_outputs for datum in _read_record(record)],
        metrics=dict(message.metrics),
    )


def _read_record(record: Any) -> list[dict[str, LossTensor]]:
    datums: list[dict[str, LossTensor]] = [{} for _ in range(record.num_datums)]
    for name, field in record.fields.items():
        dtype, inner = _DTYPES[field.dtype], tuple(field.trailing_shape)
        offsets = np.frombuffer(field.offsets, "<i8").tolist()
        for datum, (start, end) in zip(datums, pairwise(offsets), strict=True):
            items = _numbers(field.data[start:end], dtype, name)
            shape = items.reshape(-1, *inner).shape
            datum[name] = LossTensor(data=items.tolist(), dtype=dtype, shape=list(shape))
    return datums


def forward_backward(body: bytes) -> ForwardBackward:
    """A ForwardBackwardRequest, of which one datum is read after another. Raises TinkerRefusal (400)."""
    rest, datums = _split(body)
    return read_request(_parsed(ForwardBackwardRequest, rest), [body[start:end] for start, end in datums])


def _parsed(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise TinkerRefusal(400, _NO_REQUEST) from error


def read_request(message: Any, datums: Sequence[bytes]) -> ForwardBackward:
    """Of a ForwardBackwardRequest without its datums, and these as messages of their own. Raises TinkerRefusal (400)."""
    if not message.model_id:
        raise TinkerRefusal(400, "model_id is missing", "model_id")
    if message.seq_id < 0:
        raise TinkerRefusal(400, f"seq_id is {message.seq_id}; it counts from 1", "seq_id")
    if not datums:
        raise TinkerRefusal(400, "there is no datum in the request", "data")
    budget = _Budget(MAX_MADE_BYTES)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return ForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=tuple(
            _datum(_parsed(DatumMessage, datum), f"data[{index}]", budget)
            for index, datum in enumerate(datums)
        ),
        loss_fn=message.loss_fn,
        config=config,
        forward_only=message.forward_only,
    )


def addressee(body: bytes) -> tuple[str, int] | None:
    """The model_id and seq_id of a request that is refused, if they can be read."""
    try:
        message = _parsed(ForwardBackwardRequest, _split(body)[0])
    except TinkerRefusal:
        return None
    return (message.model_id, message.seq_id) if message.model_id and message.seq_id > 0 else None


def _split(body: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """The request without its datums, and where each of these starts and ends.

    Raises TinkerRefusal (400), also for a body of more than MAX_PARTS, before anything is made of them.
    """
    left, rest, datums, at = MAX_PARTS, [], [], 0
    try:
        for tag, start, end in fields(body, 0, len(body)):
            left -= 1
            if tag == _DATA:
                datums.append((start, end))
                left -= _parts(body, start, end, left + 1)
            else:
                rest.append(body[at:end])
            at = end
            if left < 0:
                raise TinkerRefusal(400, f"the body has more than {MAX_PARTS} datums and inputs", "data")
    except (IndexError, ValueError) as error:
        raise TinkerRefusal(400, _NO_REQUEST) from error
    return b"".join(rest), datums


def _parts(body: bytes, start: int, end: int, most: int) -> int:
    """How many a datum has, counted up to `most`. Raises TinkerRefusal (400), IndexError, ValueError."""
    parts = 0
    for tag, begin, over in islice(fields(body, start, end), max(most, 0)):
        parts += 1
        if tag == _INPUT and over - begin > STEP:
            _check_shape(body, begin, over)
    return parts


def _check_shape(body: bytes, start: int, end: int) -> None:
    """Raises TinkerRefusal (400) for a large tensor with most of its bytes in its shape: each becomes eight bytes."""
    error = TinkerRefusal(400, f"a tensor has more than {MAX_DIMENSIONS} dimensions", "data")
    for number, (entry, begin, over) in enumerate(fields(body, start, end)):
        if number == 2 * MAX_DIMENSIONS:
            raise error
        for count, (tag, at, after) in enumerate(fields(body, begin, over) if entry == _VALUE else ()):
            # A number in a packed field has ten bytes at most.
            if count == 2 * MAX_DIMENSIONS or (tag == _SHAPE and after - at > 10 * MAX_DIMENSIONS):
                raise error


class _Budget:
    """Bytes that may still be made of sparse tensors, and tokens that the prompts may still have."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._tokens = MAX_TOKENS

    def take_tokens(self, count: int, where: str) -> None:
        self._tokens -= count
        if self._tokens < 0:
            raise TinkerRefusal(
                400, f"{where}: the prompts of a request have more than {MAX_TOKENS} tokens", where
            )

    def take(self, size: int, where: str) -> None:
        self._left -= size
        if self._left < 0:
            limit = f"at most {MAX_MADE_BYTES >> 20} MiB of a request's sparse tensors, made dense, are taken"
            raise TinkerRefusal(400, f"{where} is too large: {limit}", where)


def _datum(message: Any, where: str, budget: _Budget) -> Datum:
    tokens = _tokens(message.model_input, f"{where}.model_input", budget)
    inputs = {
        name: _tensor(tensor, f"{where}.loss_fn_inputs.{name}", budget)
        for name, tensor in message.loss_fn_inputs.items()
    }
    return Datum(tokens=tokens, inputs=inputs)


def _tokens(chunks: Iterable[Any], where: str, budget: _Budget) -> tuple[int, ...]:
    tokens: list[int] = []
    for index, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            message = f"{where}: {kind or 'empty'} chunks are not supported here, only encoded_text"
            raise TinkerRefusal(400, message, f"{where}.chunks[{index}]")
        numbers = _numbers(chunk.encoded_text.tokens, "int32", where)
        budget.take_tokens(len(numbers), where)
        if numbers.size and numbers.min() < 0:
            raise TinkerRefusal(400, f"{where} has a negative token id", where)
        for at in range(0, len(numbers), STEP):
            tokens += numbers[at : at + STEP].tolist()
    if not tokens:
        raise TinkerRefusal(400, f"{where} has no tokens", where)
    return tuple(tokens)


def _tensor(message: Any, where: str, budget: _Budget) -> Tensor:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise TinkerRefusal(400, f"{where} has data type {message.dtype}, which is not taken here", where)
    if len(message.shape) > MAX_DIMENSIONS:
        raise TinkerRefusal(400, f"{where} has {len(message.shape)} dimensions", where)
    shape = tuple(message.shape)
    # The other sizes of an empty array, too, must fit the memory's addresses.
    if any(size < 0 for size in shape) or prod(size or 1 for size in shape) > MAX_ITEMS:
        raise TinkerRefusal(400, f"{where} has shape {list(shape)}", where)
    if message.WhichOneof("encoding") == "sparse_csr":
        return _dense(message.sparse_csr, dtype, shape, where, budget)
    items = len(_numbers(message.dense, dtype, where))
    # A list is sent without its shape.
    shape = shape or (items,)
    if prod(shape) != items:
        raise TinkerRefusal(400, f"{where} has {items} items, its shape is {list(shape)}", where)
    return Tensor(dtype=dtype, shape=shape, data=message.dense)


def _dense(csr: Any, dtype: Dtype, shape: tuple[int, ...], where: str, budget: _Budget) -> Tensor:
    if len(shape) != 2:
        raise TinkerRefusal(
            400, f"{where} is sparse and has shape {list(shape)}; two dimensions are taken", where
        )
    budget.take(prod(shape) * ITEM_BYTES[dtype] + shape[0] * 8, where)
    values = _numbers(csr.values, dtype, where)
    starts, columns = _numbers(csr.crow_indices, "int64", where), _numbers(csr.col_indices, "int64", where)
    # Starts are compared, since the difference of two may overflow.
    fits = (
        len(starts) == shape[0] + 1
        and starts[0] == 0
        and starts[-1] == len(values) == len(columns)
        and bool((starts[1:] >= starts[:-1]).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not fits:
        raise TinkerRefusal(400, f"{where}: its sparse indices do not fit its shape {list(shape)}", where)
    made = np.zeros(shape, dtype=values.dtype)
    made[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    # In pieces, each of which is copied under the interpreter's lock; they are joined without it.
    flat = made.reshape(-1)
    data = b"".join(flat[at : at + STEP].tobytes() for at in range(0, len(flat), STEP))
    return Tensor(dtype=dtype, shape=shape, data=data)


def _numbers(data: bytes, dtype: Dtype, where: str) -> np.ndarray[Any, np.dtype[Any]]:
    if len(data) % ITEM_BYTES[dtype]:
        raise TinkerRefusal(400, f"{where}: {len(data)} bytes are no whole number of {dtype}", where)
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<"))
