"""References to the files that have the records of a response, as responses and records have them. Pure.

Owns: the form of a reference, of the rows of a choice, and of the columns that a turn's record leaves to the file; and
Fireworks' form, which is of the positions of one choice.
Always holds: a reference names one file by the digest of its bytes, so what it refers to does not change.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Format = Literal["midstream_records_v1"]
FORMAT: Final = "midstream_records_v1"
#: Columns that a record may leave to a file.
LeftOut = Literal["logprob", "sampling_logprob", "route", "router_weights", "sampling_mask"]

_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]


class ReferencedRows(msgspec.Struct, frozen=True):
    """The rows of one choice: its number in the response, its first row, and how many there are."""

    index: _Count
    start: _Count
    count: _Count


class RecordReference(msgspec.Struct, frozen=True, kw_only=True):
    """Where the records of a response are. file: below the URL of the bucket of records. sha256: of the file, in hex."""

    format: Format
    file: str
    sha256: _Digest
    bytes: _Count
    rows: _Count
    choices: list[ReferencedRows]


class TurnReference(msgspec.Struct, frozen=True):
    """Where the columns of a turn's record are. choice: the one of the response that is the turn. columns: those that the
    record leaves to the file."""

    reference: RecordReference
    choice: _Count
    columns: list[LeftOut]


#: Fireworks' name for columns that are in Parquet files.
PARQUET: Final = "parquet_v1"


class SharedFile(msgspec.Struct, frozen=True, kw_only=True):
    """store_id: the URL of the bucket of records. schema: what the file is. The rest is as in RecordReference."""

    format: Literal["parquet_v1"] = PARQUET
    schema: Format = FORMAT
    store_id: str
    file: str
    sha256: _Digest
    bytes: _Count
    row_count: _Count


class SharedSpan(msgspec.Struct, frozen=True):
    """`count` positions from `input_token_start` on, and the rows that they have. No file: they have none."""

    input_token_start: _Count
    count: Annotated[int, Meta(ge=1, le=2**53)]
    file_index: _Count | UnsetType | None = UNSET
    file_row_start: _Count | UnsetType | None = UNSET


class SharedReferences(msgspec.Struct, frozen=True):
    """Rows of `length` positions. The spans cover each position once, in order."""

    length: _Count
    files: list[SharedFile]
    spans: list[SharedSpan]


class InFiles(msgspec.Struct, frozen=True):
    """The columns of a choice that are in files and not in its response. None: the request did not ask for it there."""

    store_id: str
    routes: SharedReferences | None
    masks: SharedReferences | None
