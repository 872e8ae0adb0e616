"""Reads the records of a response from the file that its `record_reference` names (docs/records.md).

Always holds: what is wrong with a file is a RecordFileError that names it (record_file.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from midstream.client.decode import Routes, SamplingMasks, masks_of_bytes
from midstream.client.errors import RecordFileError
from midstream.client.record_file import ChoiceRows, RecordFile
from midstream.core import extras
from midstream.core.decoding import NOT_JSON
from midstream.core.record_files import FILE_BYTES_MAX
from midstream.core.references import RecordReference
from midstream.core.traces import Span, TracedEarlierKv
from midstream.core.types import NEAR_TIES

if TYPE_CHECKING:
    import pyarrow as pa


#: Methods of ChoiceRows, each for a column that is decoded when it is asked for.
_LARGE = {"routes", "router_weights", "masks"}


@dataclass(frozen=True, eq=False, repr=False)
class ChoiceColumns:
    """The records of one choice: arrays of a row for each generated token, views of the file's columns.

    index: of the choice. prompt_tokens: the position of the first row. sampling_logprobs: NaN where the engine does not know
    it. near_ties: bits, by their place in `near_tie_names`. constrained: the `logprobs` of the row is of the tokens that a
    grammar allowed. snapshots: over the rows. kv_snapshots, earlier_kv_snapshots: as responses have them, over all positions.

    The large columns are decoded when they are first asked for. That raises RecordFileError for a page that no server writes.
    """

    index: int
    prompt_tokens: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float64]
    sampling_logprobs: npt.NDArray[np.float64]
    near_ties: npt.NDArray[np.uint8]
    constrained: npt.NDArray[np.bool_]
    snapshots: list[Span]
    kv_snapshots: list[Span]
    earlier_kv_snapshots: list[TracedEarlierKv]
    # ChoiceRows, which no caller needs to know. None: every column is there.
    _rows: Any
    near_tie_names: tuple[str, ...] = tuple(NEAR_TIES)
    # Large columns, by the name of the method of ChoiceRows.
    _kept: dict[str, Any] = field(default_factory=dict)

    @property
    def routes(self) -> Routes | None:
        """[tokens, moe_layers, top_k]; None where the request did not ask for them."""
        routes: Routes | None = self._decoded("routes")
        return routes

    @property
    def router_weights(self) -> npt.NDArray[np.float32] | None:
        """Of the shape of `routes`; None where the request did not ask for them."""
        weights: npt.NDArray[np.float32] | None = self._decoded("router_weights")
        return weights

    @property
    def mask_bytes(self) -> npt.NDArray[np.uint8] | None:
        """The sampling masks of all rows behind each other; those of row j are
        `mask_bytes[mask_offsets[j]:mask_offsets[j + 1]]`. None where the request did not ask for them."""
        masks = self._decoded("masks")
        return None if masks is None else masks[0]

    @property
    def mask_offsets(self) -> npt.NDArray[np.int32] | None:
        """See `mask_bytes`."""
        masks = self._decoded("masks")
        return None if masks is None else masks[1]

    def sampling_masks(self) -> SamplingMasks:
        """The masks as ids. Raises ValueError where the request did not ask for them, and for bytes that are no masks."""
        masks = self._decoded("masks")
        if masks is None:
            raise ValueError("the records have no sampling masks: ask for return_sampling_mask")
        data, offsets = masks
        return masks_of_bytes(data, offsets.astype(np.int64), self.token_ids)

    def _decoded(self, name: str) -> Any:
        """What the method of ChoiceRows of this name returns, which is called once. Behind the last one the file's bytes go."""
        rows, kept = self._rows, self._kept
        if name not in kept:
            with rows.decoding:
                if name not in kept:
                    kept[name] = getattr(rows, name)()
            if kept.keys() == _LARGE:
                self.__dict__["_rows"] = None
        return kept[name]

    def __getstate__(self) -> dict[str, Any]:
        """With all columns, as another process has no file."""
        for name in _LARGE:
            self._decoded(name)
        return {**self.__dict__, "_rows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


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
    return [_choice(rows) for rows in file.choices(found.choices)]


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


def _choice(rows: ChoiceRows) -> ChoiceColumns:
    about, columns, kept = rows.about, rows.small(), dict.fromkeys(rows.lacking())
    return ChoiceColumns(
        index=about.index,
        prompt_tokens=about.prompt_tokens,
        token_ids=columns["token_id"].to_numpy(),
        logprobs=columns["logprob"].to_numpy(),
        sampling_logprobs=columns["sampling_logprob"].to_numpy(zero_copy_only=False),
        near_ties=columns["near_tie"].to_numpy(),
        constrained=columns["constrained"].to_numpy(zero_copy_only=False),
        snapshots=_spans(columns["snapshot"]),
        kv_snapshots=about.kv_snapshots,
        earlier_kv_snapshots=about.earlier_kv_snapshots,
        _rows=rows if kept.keys() < _LARGE else None,
        _kept=kept,
    )


def _spans(column: pa.DictionaryArray) -> list[Span]:
    codes = column.indices.to_numpy()
    if not len(codes):
        return []
    names = column.dictionary.to_pylist()
    starts = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist()]
    ends = [*starts[1:], len(codes)]
    return [Span(names[codes[start]], start, end) for start, end in zip(starts, ends, strict=True)]
