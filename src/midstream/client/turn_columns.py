"""Puts into the turns of records the columns that they leave to a file (journal.py).

Always holds: a turn gets the columns of its own tokens, or a RecordFileError names its record and the file.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec

from midstream.client.errors import RecordFileError, RecordFileGone
from midstream.client.references import ChoiceColumns, read_reference
from midstream.core.decoding import NOT_JSON
from midstream.core.references import LeftOut, TurnReference


class TurnColumns:
    """url: of the bucket of records. It keeps the file that it read last, as the choices of a response are turns behind each
    other."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._last: tuple[str, list[ChoiceColumns] | RecordFileGone] = ("", [])

    def turn(self, turn: dict[str, Any], where: str) -> dict[str, Any]:
        """The turn of a record as it would be without a reference. where: names the record.

        Raises RecordFileGone where the bucket has no such file, and RecordFileError.
        """
        try:
            given = msgspec.convert(turn["record_reference"], TurnReference)
        except (*NOT_JSON, TypeError) as error:
            raise RecordFileError(f"{where}: record_reference: {error}") from error
        file = given.reference.file
        choices = self._choices(given, where)
        if isinstance(choices, RecordFileGone):
            raise RecordFileGone(f"{where}: {choices}") from choices
        found = [one for one in choices if one.index == given.choice]
        if not found or found[0].token_ids.tolist() != turn.get("token_ids"):
            raise RecordFileError(f"{where}: choice {given.choice} of {file} has other tokens than the turn")
        try:
            for column in given.columns:
                turn = {**turn, **_FIELDS[column](found[0])}
        except RecordFileError as error:
            raise RecordFileError(f"{where}: {error}") from error
        return turn

    def _choices(self, given: TurnReference, where: str) -> list[ChoiceColumns] | RecordFileGone:
        file = given.reference.file
        if self._last[0] != file:
            try:
                self._last = (file, read_reference(self._url, given.reference))
            except RecordFileGone as error:
                self._last = (file, error)
            except (RecordFileError, RuntimeError) as error:
                raise RecordFileError(f"{where}: {error}") from error
        return self._last[1]


def _traced_sampling(columns: ChoiceColumns) -> dict[str, Any]:
    given = columns.sampling_logprobs.tolist()
    return {"sampling_logprobs": [None if at != at else at for at in given] or None}


def _traced_routes(columns: ChoiceColumns) -> dict[str, Any]:
    routes = columns.routes
    if routes is None or not len(routes):
        return {}
    return {
        "routing_matrix": [b64encode(row.tobytes()).decode() for row in routes],
        "routing_matrix_dtype": "uint8" if routes.itemsize == 1 else "uint16",
        "routing_matrix_shape": list(routes.shape[1:]),
    }


def _traced_weights(columns: ChoiceColumns) -> dict[str, Any]:
    if columns.router_weights is None or not len(columns.token_ids):
        return {}
    return {"router_weights": [b64encode(row.tobytes()).decode() for row in columns.router_weights]}


def _traced_masks(columns: ChoiceColumns) -> dict[str, Any]:
    if columns.mask_bytes is None or columns.mask_offsets is None or not len(columns.token_ids):
        return {}
    data, ends = columns.mask_bytes, columns.mask_offsets.tolist()
    return {
        "sampling_masks": [b64encode(data[start:end].tobytes()).decode() for start, end in pairwise(ends)]
    }


#: By column, the fields of a turn that it fills. Each may raise RecordFileError.
_FIELDS: dict[LeftOut, Callable[[ChoiceColumns], dict[str, Any]]] = {
    "logprob": lambda columns: {"logprobs": columns.logprobs.tolist() or None},
    "sampling_logprob": _traced_sampling,
    "route": _traced_routes,
    "router_weights": _traced_weights,
    "sampling_mask": _traced_masks,
}
