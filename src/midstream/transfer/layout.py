"""Where the tensors of one update lie in the file that a receiver fills. Pure: no I/O, no torch.

Always holds: the tensors lie in the order in which they were sent, without gaps, so the tensors of one call are one range. The
room for the header is reserved up front, for any order. So replicas that got the same calls make equal files.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from midstream.core.errors import InvalidRequest
from midstream.core.transfer import SentTensors
from midstream.snapshots.layout import DTYPE_BITS, CheckpointSpec, TensorSpec
from midstream.snapshots.messages import listed, shown, shown_value
from midstream.snapshots.names import hint
from midstream.snapshots.tied import HEAD, embedding_of, ties_head

NAMES, DTYPES, SHAPES = "update_info.names", "update_info.dtype_names", "update_info.shapes"
#: Data begins at a multiple of it: no tensor shares a page with the header.
ALIGNMENT = 4096
#: As other writers of checkpoints say it; some readers look for it.
METADATA = {"format": "pt"}

#: As torch names them.
_TORCH_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_BY_SAFETENSORS = {name: torch for torch, name in _TORCH_NAMES.items()}

#: Begin and end, in bytes of the file.
Range = tuple[int, int]


class UpdateLayout:
    """The tensors that an update may send, and those that it has sent.

    base: of the served model. Every tensor of it has to come. An output layer that is tied to the embedding may come or not.
    """

    def __init__(self, base: CheckpointSpec) -> None:
        self._expected = dict(base.tensors)
        # In the order in which they came.
        self._placed: dict[str, Range] = {}
        self._optional: set[str] = set()
        if ties_head(base.config, base.tensors):
            self._optional = {HEAD}
            embedding = embedding_of(base.tensors)
            if embedding is not None:
                self._expected.setdefault(HEAD, base.tensors[embedding])
        all_bytes = sum(_bytes_of(spec) for spec in self._expected.values())
        # No offset has more digits than the last one.
        longest = self._encoded(dict.fromkeys(self._expected, (all_bytes, all_bytes)))
        self.data_start = math.ceil((8 + len(longest)) / ALIGNMENT) * ALIGNMENT
        #: Of the file, if every tensor comes.
        self.bytes_max = self.data_start + all_bytes
        #: Where the next tensor begins.
        self.end = self.data_start

    def __repr__(self) -> str:
        return f"<UpdateLayout {len(self._placed)} of {len(self._expected)} tensors, {self.sent_bytes} bytes>"

    @property
    def sent_bytes(self) -> int:
        return self.end - self.data_start

    def check(self, sent: SentTensors) -> None:
        """Raise InvalidRequest, which names the field and the tensor, unless these may come next."""
        for field, values in ((DTYPES, sent.dtype_names), (SHAPES, sent.shapes)):
            if len(values) != len(sent.names):
                raise InvalidRequest(
                    f"{field}: has {len(values)} entries, and {NAMES} has {len(sent.names)}", param=field
                )
        if not sent.names:
            raise InvalidRequest(f"{NAMES}: no tensor is named", param=NAMES)
        self._check_names(sent.names)
        for name, dtype, shape in zip(sent.names, sent.dtype_names, sent.shapes, strict=True):
            _check_form(name, dtype, shape, self._expected[name])

    def _check_names(self, names: Sequence[str]) -> None:
        if strange := [name for name in names if name not in self._expected]:
            advice = hint(strange, self._expected)
            because = f": {advice}" if advice else ""
            raise InvalidRequest(
                f"{NAMES}: the served model has no tensor {listed(strange)}{because}", param=NAMES
            )
        counts = Counter(names)
        if twice := [name for name, count in counts.items() if count > 1 or name in self._placed]:
            raise InvalidRequest(f"{NAMES}: sent twice in one update: {listed(twice)}", param=NAMES)

    def place(self, sent: SentTensors) -> list[Range]:
        """Give each of these tensors, which passed `check`, its range of the file."""
        placed = []
        for name in sent.names:
            begin, self.end = self.end, self.end + _bytes_of(self._expected[name])
            self._placed[name] = (begin, self.end)
            placed.append((begin, self.end))
        return placed

    def check_complete(self) -> None:
        """Raise InvalidRequest, which names tensors, unless all have come that have to."""
        missing = [name for name in self._expected if name not in self._placed and name not in self._optional]
        if missing:
            count = "1 tensor was" if len(missing) == 1 else f"{len(missing)} tensors were"
            raise InvalidRequest(f"{NAMES}: {count} not sent: {listed(sorted(missing))}", param=NAMES)

    def header(self) -> bytes:
        """The beginning of the file, up to the first tensor."""
        start = self.data_start
        encoded = self._encoded(
            {name: (begin - start, end - start) for name, (begin, end) in self._placed.items()}
        )
        # The format allows spaces behind the object.
        return (start - 8).to_bytes(8, "little") + encoded.ljust(start - 8)

    def _encoded(self, offsets: dict[str, Range]) -> bytes:
        entries: dict[str, object] = {"__metadata__": METADATA}
        for name, (begin, end) in offsets.items():
            spec = self._expected[name]
            entries[name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [begin, end],
            }
        return json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()


def pieces(ranges: Iterable[Range], piece_bytes: int | None) -> Iterator[Range]:
    """The broadcasts that fill these ranges: of `piece_bytes` at most; None: each range is one. An empty range has none."""
    for begin, end in ranges:
        size = piece_bytes or max(1, end - begin)
        for at in range(begin, end, size):
            yield at, min(at + size, end)


def _check_form(name: str, dtype: str, shape: Sequence[int], expected: TensorSpec) -> None:
    if _TORCH_NAMES.get(dtype) != expected.dtype:
        served = _BY_SAFETENSORS.get(expected.dtype, expected.dtype)
        raise InvalidRequest(
            f"{DTYPES}: tensor {shown(name)} has dtype {shown(dtype)}, the served model {served}",
            param=DTYPES,
        )
    if tuple(shape) != expected.shape:
        has, served = shown_value(list(shape)), shown_value(list(expected.shape))
        raise InvalidRequest(
            f"{SHAPES}: tensor {shown(name)} has shape {has}, the served model {served}", param=SHAPES
        )


def _bytes_of(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPE_BITS[spec.dtype] // 8
