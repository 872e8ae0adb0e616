"""`midstream publish`: a checkpoint directory, or an adapter's, becomes a snapshot that every replica serves."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

from midstream.client import SnapshotPublisher
from midstream.client.publication import Kind, Phase, Published
from midstream.client.snapshot_calls import ResetPromptCache
from midstream.commands.common import (
    add_server_arguments,
    address,
    api_key,
    connect,
    full_deployment_name,
    guarded,
)
from midstream.commands.progress import ProgressLine, add_progress_argument
from midstream.core.errors import ConfigError
from midstream.core.text import seconds, size
from midstream.core.types import PolicyFate

WORK_DIR = ".midstream/publish"
POLICIES = ("all", "new_session", "none")
MAX_AGE = "max_age="
_DOING: dict[Phase, str] = {
    "writing": "copying the checkpoint",
    "encoding": "encoding the delta",
    "uploading": "writing to the bucket",
    "loading": "signalled; waiting for the replicas",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=guarded(_publish))
    parser.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="a Hugging Face checkpoint")
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="instead, a LoRA adapter as PEFT writes it"
    )
    parser.add_argument("--policy", metavar="NAME", help="of the deployment, which the adapter is for")
    add_server_arguments(parser, of="")
    parser.add_argument(
        "--bucket", metavar="URL", help="file:///DIR, s3://, gs:// or az:// (default: the deployment's own)"
    )
    parser.add_argument("--identity", metavar="NAME", help="of the snapshot (default: DIR's name)")
    _add_kind_arguments(parser)
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path(WORK_DIR),
        metavar="PATH",
        help="where the last published checkpoint is kept, which the next delta needs (default: %(default)s)",
    )
    parser.add_argument(
        "--ignore-config",
        action="append",
        default=[],
        metavar="FIELD",
        help="of config.json, may differ from the served model's; may be repeated",
    )
    parser.add_argument(
        "--policies",
        choices=get_args(PolicyFate),
        help="what becomes of the deployment's policies under full weights",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a snapshot of this name")
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="for the replicas to be ready (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object with what was published")
    add_progress_argument(parser)


def _add_kind_arguments(parser: argparse.ArgumentParser) -> None:
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--full", action="store_const", dest="kind", const="full", help="send all of it")
    kind.add_argument(
        "--delta",
        action="store_const",
        dest="kind",
        const="delta",
        help="send a delta, or fail if that cannot be",
    )
    parser.add_argument(
        "--reset",
        type=_policy,
        default="all",
        metavar="POLICY",
        help="what the swap does to prompt caches: all (default), new_session, none, or max_age=K",
    )
    parser.add_argument(
        "--full-every",
        type=int,
        default=20,
        metavar="K",
        help="one in so many is sent whole, the others as deltas (default: %(default)s)",
    )
    parser.add_argument("--format", choices=("arc_v2", "arc_v1"), default="arc_v2", help="of deltas")


def _policy(text: str) -> ResetPromptCache:
    if text in POLICIES:
        return text  # type: ignore[return-value]
    age = text.removeprefix(MAX_AGE)
    if text.startswith(MAX_AGE) and age.isascii() and age.isdecimal():
        return {"max_age": int(age)}
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(POLICIES)}, {MAX_AGE}K")


def _publish(options: argparse.Namespace) -> int:
    if (options.directory is None) == (options.adapter is None):
        raise ConfigError("name either DIR or --adapter DIR")
    if (options.adapter is None) != (options.policy is None):
        raise ConfigError("--adapter and --policy go together")
    directory: Path = options.directory or options.adapter
    if not directory.is_dir():
        raise ConfigError(f"{directory}: is not a directory")
    identity = options.identity or directory.resolve().name
    kind: Kind | None = options.kind
    with (
        ProgressLine(options.progress) as line,
        SnapshotPublisher(
            address(options),
            _bucket(options),
            deployment=options.deployment,
            api_key=api_key(options),
            full_every=options.full_every,
            compression=options.format,
            work_dir=_work_dir(options),
            policy=options.policy,
        ) as publisher,
    ):
        # An address without a server is an error before any file is written.
        publisher.server.snapshots.status(retry_s=0)
        done = publisher.publish(
            identity,
            directory,
            kind=kind,
            overwrite=options.overwrite,
            reset_prompt_cache=options.reset,
            extra_fields_ignore=options.ignore_config,
            policies=options.policies,
            timeout_s=options.timeout,
            on_status=lambda status: line.often(f"{_DOING['loading']}: {status}"),
            on_phase=lambda phase: line.show(_DOING[phase]),
        )
    print(json.dumps(as_json(done)) if options.json else summary(done))
    return 0


def _work_dir(options: argparse.Namespace) -> Path:
    """Each policy has its own, as each has a last adapter of its own."""
    place: Path = options.work_dir
    return place if options.policy is None else place / f"policy-{quote(options.policy, safe='')}"


def _bucket(options: argparse.Namespace) -> str:
    """The URL that was given, else the deployment's own."""
    if options.bucket is not None:
        return str(options.bucket)
    with connect(options) as server:
        # A name that is none is a wrong argument.
        full_deployment_name(server, options.deployment)
        return server.deployments.own_bucket(retry_s=0)


def as_json(done: Published) -> dict[str, Any]:
    """The numbers of `summary`. Sizes in bytes, times in seconds."""
    numbers = dataclasses.asdict(done)
    numbers["replicas"] = [replica.name for replica in done.replicas]
    return numbers


def summary(done: Published) -> str:
    """One line: what was sent, and how long it took."""
    if done.kind == "delta":
        share = f"{size(done.bytes_sent)} instead of {size(done.bytes_whole)}"
        sent = f"a delta on {done.previous}, {share}"
    else:
        sent = f"full, {size(done.bytes_sent)} ({done.why})"
    count = len(done.replicas)
    took = done.write_s + done.encode_s + done.upload_s
    return (
        f"published {done.identity}: {sent}; sent in {seconds(took)}, served by {count} "
        f"replica{'s' if count != 1 else ''} after {seconds(done.load_s)} more"
    )
