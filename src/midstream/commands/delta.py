"""`midstream delta`: incremental snapshots made, applied and checked on local directories. No torch, no server."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from midstream.errors import ConfigError, SnapshotError
from midstream.snapshots.delta import encode_delta, rebuild, verify
from midstream.snapshots.formats import compression_format
from midstream.snapshots.layout import read_spec

REPORT_EVERY_S = 5.0  # where standard error is no terminal


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
    parser.add_argument("--format", default="arc_v2", help="arc_v2 (zstd, the default) or arc_v1 (zlib)")
    parser.add_argument("--threads", type=int, help="(default: one per core)")


def _guarded(options: argparse.Namespace) -> int:
    """Run the action; a snapshot that is not what it should be is 1, a wrong option 2."""
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
    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {options.threads}")
    try:
        options.act(options)
    except SnapshotError as error:
        print(f"midstream delta {options.action}: {error}", file=sys.stderr)
        return 1
    return 0


def _encode(options: argparse.Namespace) -> None:
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
        progress=_Progress(),
    )
    print(
        f"wrote {options.out}: {stats.changed} of {stats.tensors} tensors changed, {_size(stats.bytes_in)} -> "
        f"{_size(stats.bytes_out)} ({stats.ratio:.1f}x smaller) in {_speed(stats.bytes_in, stats.seconds)}"
    )


def _decode(options: argparse.Namespace) -> None:
    started = time.perf_counter()
    rebuild(
        options.parent,
        options.delta,
        options.out,
        options.format,
        threads=options.threads,
        progress=_Progress(),
    )
    seconds = time.perf_counter() - started
    total = sum(path.stat().st_size for path in options.out.glob("*.safetensors"))
    tensors = len(read_spec(options.out).tensors)
    print(f"wrote {options.out}: {tensors} tensors, {_size(total)} in {_speed(total, seconds)}")


def _verify(options: argparse.Namespace) -> None:
    started, progress = time.perf_counter(), _Progress()
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
    print(
        f"{options.delta} fits {options.parent}{is_result}: {_size(blobs)} for {_size(progress.total)}, "
        f"{_speed(progress.total, seconds)}"
    )


class _Progress:
    """One line on standard error, written over on a terminal and now and then in a file."""

    def __init__(self) -> None:
        self.total = 0
        self._tty = sys.stderr.isatty()
        self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        self.total = total
        now = time.monotonic()
        if now - self._last < (0.2 if self._tty else REPORT_EVERY_S):
            return
        self._last = now
        line = f"{done / max(1, total):4.0%} of {_size(total)}"
        print(
            f"\r{line}" if self._tty else line, end="\r" if self._tty else "\n", file=sys.stderr, flush=True
        )


def _size(count: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"


def _speed(count: int, seconds: float) -> str:
    return f"{seconds:.2f} s ({count / 1e9 / max(seconds, 1e-9):.2f} GB/s)"
