"""Record files: the columns of a response's token records as Parquet. Pure.

Owns: the names and types of columns, what stands in the file's metadata, where a file lies in a bucket. A replica writes them
(replica/response/referenced.py), trainers read them (client/references.py).
Always holds: a file has the name of its SHA-256. Its rows are the sampled tokens of all choices, choice after choice, each
behind tokens of its prompt where the request wanted them. A row group has rows of one choice, and begins at a multiple of
`group_tokens` positions or at the choice's first row, so that no block of KV lies in two groups of a choice.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from midstream.core.references import Format
from midstream.core.traces import Span, TracedEarlierKv

#: Of the metadata of a file.
ABOUT_KEY = b"midstream"
#: Positions of a row group: a multiple of every engine's KV block. Each group and column costs as much as a few hundred
#: rows, to write and to read.
GROUP_TOKENS = 4096
#: In files of older servers, which do not say it.
GROUP_TOKENS_BEFORE = 1024
#: Of the columns of one file in memory, as it is written. Masks alone have 32-bit offsets, so at most 2 GiB.
COLUMNS_BYTES_MAX = 3 * 2**30
MASKS_BYTES_MAX = 2**31 - 1
#: Of one file, and of what it declares, as it is read.
FILE_BYTES_MAX = 4 * 2**30
#: What a row has beside its route and its mask, about.
ROW_BYTES = 32
#: In a bucket, above a directory for each deployment.
DIRECTORY = "record-files"
SUFFIX = ".parquet"
_NAME = re.compile(r"[0-9a-f]{64}\.parquet")

#: Columns that every file has: their names, and their types in the words of Arrow.
COLUMNS = {
    "token_id": "int32",
    "logprob": "double",
    "sampling_logprob": "double",
    "snapshot": "string",
    "near_tie": "uint8",
    "constrained": "bool",
}
#: Columns that a request asks for. A route and its weights have as many bytes as the file's metadata says. A file has routes as
#: gaps (route_gaps.py), or as they are where router weights follow their order, and in files of older servers.
ROUTE, ROUTE_GAPS = "route", "route_gaps"
ROUTER_WEIGHTS, MASK = "router_weights", "sampling_mask"

_Count = Annotated[int, Meta(ge=0, le=2**53)]


class ChoiceAbout(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of a choice. prompt_tokens: the position of its first sampled token. prompt_rows: how many of its rows,
    the first ones, are of the tokens before that. The rest is as responses have it."""

    index: _Count
    start: _Count
    count: _Count
    prompt_tokens: _Count
    prompt_rows: _Count = 0
    kv_snapshots: list[Span]
    earlier_kv_snapshots: list[TracedEarlierKv]

    @property
    def position(self) -> int:
        """Of its first row."""
        return self.prompt_tokens - self.prompt_rows


class FileAbout(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a file, as JSON. id: of the response. route_shape: MoE layers and experts per token of a route.
    route_dtype: of its numbers, little-endian. group_tokens: row groups begin at multiples of it."""

    format: Format
    id: str
    model: str
    route_shape: tuple[_Count, _Count]
    route_dtype: Literal["uint8", "uint16"]
    choices: list[ChoiceAbout]
    group_tokens: Annotated[int, Meta(ge=1, le=2**53)] = GROUP_TOKENS_BEFORE

    @property
    def route_bytes(self) -> int:
        layers, top_k = self.route_shape
        return layers * top_k * (2 if self.route_dtype == "uint16" else 1)

    @property
    def weights_bytes(self) -> int:
        """Of the router weights of a route, float32."""
        layers, top_k = self.route_shape
        return layers * top_k * 4


def path_of(deployment: str, sha256: str) -> str:
    """deployment: its bare name."""
    return f"{DIRECTORY}/{deployment}/{sha256}{SUFFIX}"


def is_file_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def groups_of(rows: ChoiceAbout, group_tokens: int) -> list[tuple[int, int]]:
    """First row and end of each row group of a choice."""
    end, at, found = rows.start + rows.count, rows.start, []
    while at < end:
        position = rows.position + at - rows.start
        until = min(end, at + group_tokens - position % group_tokens)
        found.append((at, until))
        at = until
    return found
