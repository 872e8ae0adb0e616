"""`midstream delta`: makes, applies and checks incremental snapshots in local directories. Needs no torch and no server."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from midstream.commands.progress import ProgressLine, add_progress_argument
from midstream.core.errors import ConfigError, SnapshotError
from midstream.core.text import size
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.delta_formats import compression_format, is_arc
from midstream.snapshots.layout import read_spec
from midstream.snapshots.rebuild import rebuild, verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    encode = actions.add_parser("encode", help="write the delta that turns one checkpoint into another")
    encode.set_defaults(run=_guarded, act=_encode)
    _add_paths(encode, child="the new checkpoint", out="where the delta goes; must not exist")
    encode.add_argument(
        "--level", type=int, help="of zstd (arc_v2) or zlib (arc_v1) (default: tuned for weights)"
    )
    decode = actions.add_parser("decode", help="write the whole checkpoint a delta turns its parent into")
    decode.set_defaults(run=_guarded, act=_decode)
    _add_paths(decode, delta="the delta", out="where the checkpoint goes; must not exist")
    check = actions.add_parser("verify", help="check a delta against its parent and write nothing")
    check.set_defaults(run=_guarded, act=_verify)
    _add_paths(check, delta="the delta")
    check.add_argument(
        "--out", type=Path, metavar="DIR", help="a checkpoint that must be what the delta makes"
    )


def _add_paths(parser: argparse.ArgumentParser, **directories: str) -> None:
    for name, text in {"parent": "the checkpoint the delta stands on", **directories}.items():
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR", help=text)
    parser.add_argument(
        "--format",
        default="arc_v2",
        help="arc_v2 (zstd, the default) or arc_v1 (zlib); miles_delta and skyrl_delta are only read",
    )
    parser.add_argument("--threads", type=int, help="of the computation (default: one per core)")
    add_progress_argument(parser)


def _guarded(options: argparse.Namespace) -> int:
    """Run the action. The exit code is 1 for a snapshot with an error; a wrong option raises ConfigError, which is 2."""
    try:
        options.format = compression_format(options.format)
    except ValueError as error:
        raise ConfigError(f"--format: {error}") from error
    for name in ("parent", "child", "delta"):
        path = getattr(options, name, None)
        if path is not None and not path.is_dir():
            raise ConfigError(f"--{name} {path}: is not a directory")
    if options.action != "verify" and options.out.exists():
        raise ConfigError(f"--out {options.out}: exists already")
    if options.action == "encode" and not is_arc(options.format):
        raise ConfigError(f"--format {options.format}: is only read; encode takes arc_v2 or arc_v1")
    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {options.threads}")
    try:
        with ProgressLine(options.progress) as line:
            report = options.act(options, _Bytes(line))
    except SnapshotError as error:
        print(f"midstream delta {options.action}: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0


def _encode(options: argparse.Namespace, progress: _Bytes) -> str:
    lowest, highest = (0, 9) if options.format == "arc_v1" else (-7, 22)
    if options.level is not None and not lowest <= options.level <= highest:
        raise ConfigError(f"--level must be from {lowest} to {highest}, got {options.level}")
    stats = encode_delta(
        options.parent,
        options.child,
        options.out,
        options.format,
        level=options.level,
        threads=options.threads,
        progress=progress,
    )
    return (
        f"wrote {options.out}: {stats.changed} of {stats.tensors} tensors changed, {size(stats.bytes_in)} -> "
        f"{size(stats.bytes_out)} ({stats.ratio:.1f}x smaller) in {_speed(stats.bytes_in, stats.seconds)}"
    )


def _decode(options: argparse.Namespace, progress: _Bytes) -> str:
    started = time.perf_counter()
    rebuild(
        options.parent,
        options.delta,
        options.out,
        options.format,
        threads=options.threads,
        progress=progress,
    )
    seconds = time.perf_counter() - started
    total = sum(path.stat().st_size for path in options.out.glob("*.safetensors"))
    tensors = len(read_spec(options.out).tensors)
    return f"wrote {options.out}: {tensors} tensors, {size(total)} in {_speed(total, seconds)}"


def _verify(options: argparse.Namespace, progress: _Bytes) -> str:
    started = time.perf_counter()
    verify(
        options.parent,
        options.delta,
        options.format,
        result=options.out,
        threads=options.threads,
        progress=progress,
    )
    seconds = time.perf_counter() - started
    blobs = sum(path.stat().st_size for path in options.delta.glob("*.safetensors"))
    is_result = f"; {options.out} is what it makes" if options.out else ""
    return (
        f"{options.delta} fits {options.parent}{is_result}: {size(blobs)} for {size(progress.total)}, "
        f"{_speed(progress.total, seconds)}"
    )


class _Bytes:
    """Shows how many bytes are done. total: of all."""

    def __init__(self, line: ProgressLine) -> None:
        self.total = 0
        self._line = line

    def __call__(self, done: int, total: int) -> None:
        self.total = total
        self._line.often(f"{done / max(1, total):4.0%} of {size(total)}")


def _speed(count: int, seconds: float) -> str:
    return f"{seconds:.2f} s ({count / 1e9 / max(seconds, 1e-9):.2f} GB/s)"
