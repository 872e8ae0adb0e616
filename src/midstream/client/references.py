"""Reads the records of a response from the file that its `record_reference` names (docs/records.md).

Always holds: what is wrong with a file is a RecordFileError that names it (record_file.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from midstream.client.decode import Routes, SamplingMasks, masks_of_bytes
from midstream.client.errors import RecordFileError
from midstream.client.record_file import Columns, RecordFile, masks_in
from midstream.core import extras
from midstream.core.decoding import NOT_JSON
from midstream.core.record_files import FILE_BYTES_MAX, MASK, ROUTER_WEIGHTS, ChoiceAbout
from midstream.core.references import RecordReference
from midstream.core.traces import Span, TracedEarlierKv
from midstream.core.types import NEAR_TIES

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, eq=False, repr=False)
class ChoiceColumns:
    """The records of one choice: arrays of a row for each generated token, views of the file's columns.

    index: of the choice. prompt_tokens: the position of the first row. sampling_logprobs: NaN where the engine does not know
    it. routes: [tokens, moe_layers, top_k]; None where the request did not ask for them.
    router_weights: of the same shape, None likewise. mask_bytes: the sampling masks of all
    rows behind each other, None likewise; those of row j are `mask_bytes[mask_offsets[j]:mask_offsets[j + 1]]`. near_ties:
    bits, by their place in `near_tie_names`. constrained: the `logprobs` of the row is of the tokens that a grammar allowed.
    snapshots: over the rows. kv_snapshots, earlier_kv_snapshots: as responses have them, over all positions.
    """

    index: int
    prompt_tokens: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float64]
    sampling_logprobs: npt.NDArray[np.float64]
    routes: Routes | None
    router_weights: npt.NDArray[np.float32] | None
    mask_bytes: npt.NDArray[np.uint8] | None
    mask_offsets: npt.NDArray[np.int32] | None
    near_ties: npt.NDArray[np.uint8]
    constrained: npt.NDArray[np.bool_]
    snapshots: list[Span]
    kv_snapshots: list[Span]
    earlier_kv_snapshots: list[TracedEarlierKv]
    near_tie_names: tuple[str, ...] = tuple(NEAR_TIES)

    def sampling_masks(self) -> SamplingMasks:
        """The masks as ids. Raises ValueError where the request did not ask for them, and for bytes that are no masks."""
        if self.mask_bytes is None or self.mask_offsets is None:
            raise ValueError("the records have no sampling masks: ask for return_sampling_mask")
        return masks_of_bytes(self.mask_bytes, self.mask_offsets.astype(np.int64), self.token_ids)


def read_reference(
    url: str, reference: Mapping[str, Any] | RecordReference, *, bytes_max: int = FILE_BYTES_MAX
) -> list[ChoiceColumns]:
    """The records of a response, a ChoiceColumns for each choice, in their order.

    url: of the bucket of records, as `midstream serve --records` has it. reference: `record_reference` of the response, or of
    the last chunks of a stream. bytes_max: a larger file, and one that would take more in memory, is an error.

    Raises RecordFileError, which names the file: it is gone (RecordFileGone), has other bytes than the reference says, or is no
    file of records.
    RuntimeError where pyarrow is not installed.
    """
    if hint := extras.advice(extras.missing(["pyarrow"])):
        raise RuntimeError(f"reading a record file {hint}")
    found = _checked(reference)
    file = RecordFile(url, found, bytes_max)
    return [_choice(file, choice, columns) for choice, columns in file.choices(found.choices)]


def _checked(reference: Mapping[str, Any] | RecordReference) -> RecordReference:
    """Raises RecordFileError."""
    try:
        found = msgspec.convert(msgspec.to_builtins(reference), RecordReference)
    except (*NOT_JSON, TypeError) as error:
        raise RecordFileError(f"this is no record_reference: {error}") from error
    at = 0
    for rows in found.choices:
        if rows.start != at:
            raise RecordFileError(
                f"{found.file}: the reference's rows of choice {rows.index} do not begin at {at}"
            )
        at += rows.count
    if at != found.rows:
        raise RecordFileError(f"{found.file}: the reference's choices have {at} rows, not {found.rows}")
    return found


def _choice(file: RecordFile, choice: ChoiceAbout, columns: Columns) -> ChoiceColumns:
    weights = columns.get(ROUTER_WEIGHTS)
    mask_bytes, mask_offsets = masks_in(columns[MASK]) if MASK in columns else (None, None)
    return ChoiceColumns(
        index=choice.index,
        prompt_tokens=choice.prompt_tokens,
        token_ids=columns["token_id"].to_numpy(),
        logprobs=columns["logprob"].to_numpy(),
        sampling_logprobs=columns["sampling_logprob"].to_numpy(zero_copy_only=False),
        routes=file.routes(columns),
        router_weights=file.router_weights(weights) if weights is not None else None,
        mask_bytes=mask_bytes,
        mask_offsets=mask_offsets,
        near_ties=columns["near_tie"].to_numpy(),
        constrained=columns["constrained"].to_numpy(zero_copy_only=False),
        snapshots=_spans(columns["snapshot"]),
        kv_snapshots=choice.kv_snapshots,
        earlier_kv_snapshots=choice.earlier_kv_snapshots,
    )


def _spans(column: pa.DictionaryArray) -> list[Span]:
    codes = column.indices.to_numpy()
    if not len(codes):
        return []
    names = column.dictionary.to_pylist()
    starts = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist()]
    ends = [*starts[1:], len(codes)]
    return [Span(names[codes[start]], start, end) for start, end in zip(starts, ends, strict=True)]
