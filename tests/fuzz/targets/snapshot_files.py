"""Files that a trainer uploads: safetensors, indexes, manifests, configurations, ARC2 blobs and deltas.

Checked: only the documented errors come out. A safetensors file that is accepted is what the `safetensors` package reads. A
blob decodes to what the standard library or libzstd's other interface makes of it. A rebuilt file has the checksums that the
delta claims. Nothing is written beside it, and nothing is left after a refusal.
"""

from __future__ import annotations

import atexit
import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import zstandard

from midstream.core.errors import ConfigError, SnapshotCorrupt, SnapshotError
from midstream.core.types import CompressionFormat
from midstream.engine.servers.model import read_shape
from midstream.snapshots.arc2.blob import MAX_WINDOW_BYTES, BlobEncoder, BlobError, decoded
from midstream.snapshots.content import encode_manifest, parse_manifest
from midstream.snapshots.layout import INDEX_FILE, WEIGHTS_FILE, read_checkpoint, read_file_layout
from midstream.snapshots.rebuild import rebuild, verify
from targets.target import Target, check, controlled, outcome

VECTORS = Path(__file__).parents[2] / "snapshots" / "vectors" / "arc2"
#: Between the files of one input.
BETWEEN = b"\n=====\n"
SHARDS = ("model-1.safetensors", "model-2.safetensors")
FORMATS: tuple[CompressionFormat, ...] = ("arc_v1", "arc_v2")
_work: list[Path] = []


def directory() -> Path:
    """An empty directory of this process, in memory where the system has such."""
    if not _work:
        memory = Path("/dev/shm")
        root = tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None)
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        _work.append(Path(root))
    fresh = _work[0] / "case"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    return fresh


# -- one file


def run_safetensors(data: bytes) -> None:
    path = directory() / WEIGHTS_FILE
    path.write_bytes(data)
    layout, refused = outcome(SnapshotError, lambda: read_file_layout(path))
    loose, _ = outcome(SnapshotError, lambda: read_file_layout(path, gaps=True))
    check(refused is not None or loose == layout, "another layout where gaps are allowed", layout, loose)
    if layout is None:
        check(str(refused).isprintable(), "a message that is no line", refused)
        return
    try:
        read = dict(safetensors.deserialize(data))
    except safetensors.SafetensorError as error:
        check(False, "a file is accepted that safetensors refuses", str(error), data)
    check(read.keys() == layout.tensors.keys(), "other tensors than safetensors reads", list(read))
    for name, spec in layout.tensors.items():
        begin, end = layout.ranges[name]
        other = read[name]
        check(
            tuple(other["shape"]) == spec.shape, "another shape than safetensors reads", name, other["shape"]
        )
        check(bytes(other["data"]) == data[begin:end], "other bytes than safetensors reads", name)


def safetensors_file(tensors: dict[str, Any], data: bytes) -> bytes:
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + data


def safetensors_seeds() -> Iterator[bytes]:
    for file in sorted(VECTORS.glob("*.safetensors")):
        yield file.read_bytes()

    def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    yield safetensors_file({}, b"")
    yield safetensors_file({"a": entry("F32", [2], 0, 8), "b": entry("BF16", [1, 2], 8, 12)}, bytes(12))
    yield safetensors_file({"__metadata__": {"format": "pt"}, "a": entry("U8", [0], 0, 0)}, b"")
    yield safetensors_file({"a": entry("F4", [2], 0, 1), "c": entry("C64", [], 1, 9)}, bytes(9))
    yield safetensors_file({"a": entry("I8", [2**40, 0], 0, 0)}, b"")


# -- a directory


def run_directory(data: bytes) -> None:
    """Files in this order: configuration, index, both shards; one that is empty is not there."""
    place = directory()
    names = ("config.json", INDEX_FILE, *SHARDS)
    for name, content in zip(names, data.split(BETWEEN), strict=False):
        if content:
            (place / name).write_bytes(content)
    read, refused = outcome(SnapshotError, lambda: read_checkpoint(place))
    if read is None:
        check(str(refused).isprintable(), "a message that is no line", refused)
        return
    spec, files = read
    check(set(files) <= set(SHARDS), "files from elsewhere", list(files))
    check({t.file for t in spec.tensors.values()} <= set(files), "a tensor of no file", spec.tensors)


def directory_seeds() -> Iterator[bytes]:
    one = safetensors_file({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"x")
    two = safetensors_file({"b": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"yz")
    for weight_map in (
        {"a": SHARDS[0], "b": SHARDS[1]},
        {"a": SHARDS[0]},
        {"a": "../model-1.safetensors", "b": SHARDS[1]},
        {},
    ):
        yield BETWEEN.join([b"{}", json.dumps({"weight_map": weight_map}).encode(), one, two])
    yield BETWEEN.join([b'{"model_type": "x"}', b"", one])


def run_manifest(data: bytes) -> None:
    content, _ = outcome(SnapshotCorrupt, lambda: parse_manifest(data))
    if content is not None:
        check(
            parse_manifest(encode_manifest(content)) == content,
            "another manifest when written again",
            content,
        )


def manifest_seeds() -> Iterator[bytes]:
    file = {"name": "config.json", "size": 2, "digest": "0" * 64}
    for files in (
        [],
        [file],
        [file, file | {"name": WEIGHTS_FILE, "size": 0}],
        [file, file],
        [file | {"size": -1}],
    ):
        written = json.loads(encode_manifest(()))
        yield json.dumps(written | {"files": files}).encode()


def run_config(data: bytes) -> None:
    place = directory()
    (place / "config.json").write_bytes(data)
    shape, _ = outcome(ConfigError, lambda: read_shape(place))
    if shape is not None:
        check(set(shape.moe_layers) <= set(range(shape.hidden_layers)), "experts in no layer", shape)
        check(shape.top_k <= max(shape.num_experts, 0), "more experts than there are", shape)


def config_seeds() -> Iterator[bytes]:
    base = {
        "num_hidden_layers": 4,
        "vocab_size": 9,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "eos_token_id": [1],
    }
    families = {
        "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
        "deepseek_v3": {"first_k_dense_replace": 1, "moe_layer_freq": [1, 0, 1, 1]},
        "llama4": {"interleave_moe_layer_step": 2},
        "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": -1},
        "jamba": {"expert_layer_period": 2},
        "lfm2_moe": {"num_dense_layers": 1},
        "mixtral": {},
    }
    for family, more in families.items():
        yield json.dumps(base | {"model_type": family} | more).encode()
    yield json.dumps({"text_config": base | {"model_type": "qwen3_moe_text"}, "eos_token_id": 2}).encode()


# -- deltas


def run_blob(data: bytes) -> None:
    control, blob = controlled(data)
    length, blob = controlled(blob)
    size, compression = length * (1 + control // 2 % 64), FORMATS[control & 1]
    pieces, refused = outcome(
        BlobError, lambda: [bytes(piece) for piece in decoded(compression, memoryview(blob), size)]
    )
    if pieces is not None:
        check(b"".join(pieces) == second_reading(compression, blob), "another reading of a blob", blob)
        check(sum(map(len, pieces)) == size, "another size than the tensor's", size)
    check(refused is None or str(refused).isprintable(), "a message that is no line", refused)
    check_encoder(compression, blob)


def second_reading(compression: CompressionFormat, blob: bytes) -> bytes:
    if compression == "arc_v1":
        return zlib.decompress(blob) if blob else b""
    result = b""
    while blob:
        frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
        result += frame.decompress(blob)
        check(frame.eof, "a frame that is cut short is accepted", blob)
        blob = frame.unused_data
    return result


def check_encoder(compression: CompressionFormat, data: bytes) -> None:
    """The halves of an input as old and new bytes: encoded and decoded they come back."""
    size = len(data) // 2
    if not size:
        return
    old, new = bytearray(data[:size]), data[size : 2 * size]
    encoder = BlobEncoder(compression, size)
    encoder.add(memoryview(old), memoryview(new))
    parts, checksum = encoder.finish()
    back = b"".join(bytes(p) for p in decoded(compression, memoryview(b"".join(parts)), size))
    check(
        back == bytes(a ^ b for a, b in zip(data[:size], new, strict=True)), "a blob does not come back", data
    )
    check(checksum == str(zlib.adler32(new)), "another checksum than zlib's", checksum)


def blob_of(compression: CompressionFormat, old: bytes, new: bytes) -> bytes:
    encoder = BlobEncoder(compression, len(old))
    encoder.add(memoryview(bytearray(old)), memoryview(new))
    return b"".join(encoder.finish()[0])


def blob_seeds() -> Iterator[bytes]:
    old, new = bytes(range(200)), bytes(range(100)) + bytes(100)
    for number, compression in enumerate(FORMATS):
        blob = blob_of(compression, old, new)
        yield bytes([number, 200]) + blob
        yield bytes([number, 200]) + blob[:-1]
        yield bytes([number, 199]) + blob
        yield bytes([number, 200]) + blob + b"\x00"
    frame = zstandard.ZstdCompressor().compress(bytes(100))
    skipped = b"\x50\x2a\x4d\x18\x02\x00\x00\x00ab"
    yield bytes([1, 200]) + frame + frame
    yield bytes([1, 100]) + skipped + frame
    checked = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(bytes(50))
    yield bytes([1, 50]) + checked
    yield b"\x00\x00"


def run_delta(data: bytes) -> None:
    """The delta's file, then its index if there is one."""
    control, data = controlled(data)
    compression = FORMATS[control & 1]
    root = directory()
    parent, delta, out = root / "parent", root / "delta", root / "out"
    for made in (parent, delta):
        made.mkdir()
    shutil.copyfile(VECTORS / "A_src.safetensors", parent / WEIGHTS_FILE)
    (parent / "config.json").write_bytes(b"{}")
    weights, _, index = data.partition(BETWEEN)
    (delta / WEIGHTS_FILE).write_bytes(weights)
    if index:
        (delta / INDEX_FILE).write_bytes(index)
        (parent / INDEX_FILE).write_bytes(index)
    _, refused = outcome(SnapshotError, lambda: rebuild(parent, delta, out, compression, threads=1))
    _, verified = outcome(SnapshotError, lambda: verify(parent, delta, compression, threads=1))
    check(
        (refused is None) == (verified is None), "verify says another thing than rebuild", refused, verified
    )
    there = {path.name for path in root.iterdir()}
    check(
        there == {"parent", "delta"} | ({"out"} if refused is None else set()),
        "files beside the result",
        there,
    )
    if refused is None:
        check_rebuilt(delta, out)
    check(str(refused).isprintable(), "a message that is no line", refused)


def check_rebuilt(delta: Path, out: Path) -> None:
    claimed = read_file_layout(delta / WEIGHTS_FILE, gaps=True).metadata
    made, layout = (out / WEIGHTS_FILE).read_bytes(), read_file_layout(out / WEIGHTS_FILE)
    for name, (begin, end) in layout.ranges.items():
        check(claimed[name] == str(zlib.adler32(made[begin:end])), "not the checksum that it claims", name)
    check({p.name for p in out.iterdir()} <= {WEIGHTS_FILE, INDEX_FILE, "config.json"}, "files from nowhere")


def delta_seeds() -> Iterator[bytes]:
    for number, name in enumerate(("A_diff_arc_v1", "A_diff_arc_v2")):
        yield bytes([number]) + (VECTORS / f"{name}.safetensors").read_bytes()
    for name in ("A_bad_checksum", "A_bad_size", "A_bad_zstd", "A_missing_checksum", "A_missing_key"):
        yield b"\x01" + (VECTORS / f"{name}.safetensors").read_bytes()
    tensors = read_file_layout(VECTORS / "A_src.safetensors").tensors
    index = json.dumps({"weight_map": dict.fromkeys(tensors, WEIGHTS_FILE)}).encode()
    yield b"\x01" + (VECTORS / "A_diff_arc_v2.safetensors").read_bytes() + BETWEEN + index


HEADER_WORDS: tuple[bytes, ...] = (
    *(
        b'"dtype":"',
        b'"shape":[',
        b'"data_offsets":[0,',
        b'"__metadata__":{',
        b"BF16",
        b"F8_E8M0",
        b"F4",
        b"C64",
    ),
    *(
        b"9223372036854775807",
        b"18446744073709551615",
        b"4611686018427387904",
        b"\\ud800",
        b"NaN",
        b"-0",
        b"1e3",
    ),
    *(b"../", b".safetensors", b'"weight_map":{', BETWEEN),
)
BLOB_WORDS = (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18", b"\x78\x9c", b"\x01\x00\x00", b"\xff\xff\xff\xff")
CONFIG_WORDS: tuple[bytes, ...] = (
    b'"moe_layer_freq":',
    b'"text_config":{',
    b'"num_hidden_layers":',
    b"1000000000000",
    b"[]",
    b"null",
)
SAFETENSORS = Target(run_safetensors, safetensors_seeds, HEADER_WORDS, 2048)
DIRECTORY = Target(run_directory, directory_seeds, HEADER_WORDS, 2048)
MANIFEST = Target(run_manifest, manifest_seeds, (b'"files":[', b'"digest":"', b"[" * 32, b"\xff"), 4096)
CONFIG = Target(run_config, config_seeds, CONFIG_WORDS, 2048)
BLOB = Target(run_blob, blob_seeds, BLOB_WORDS, 1024)
DELTA = Target(run_delta, delta_seeds, (*HEADER_WORDS, *BLOB_WORDS), 2048)
