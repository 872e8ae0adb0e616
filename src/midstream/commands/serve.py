"""`midstream serve`: its options, and the supervisor started with them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from midstream.commands import common
from midstream.core import logs
from midstream.core.config import Settings
from midstream.core.errors import ConfigError
from midstream.core.settings import load_settings

if TYPE_CHECKING:
    from midstream.launch.local import Launcher

logger = logging.getLogger(__name__)

SERVE_OPTIONS = (
    "model",
    "replicas",
    "engine",
    "launcher",
    "ray_address",
    "host",
    "port",
    "bucket",
    "records",
    "transition",
    "swap_order",
    "pin_drain_s",
    "resident_snapshots",
    "resident_policies",
    "database",
    "state_dir",
    "log_level",
    "log_format",
    "kv_cache_memory",
    "replica_url",
    "replicas_dns",
    "gateway_workers",
    "tls_cert",
    "tls_key",
    "no_tinker",
    "vllm_args",
    "vllm_python",
    "vllm_url",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.set_defaults(run=_serve)
    parser.add_argument("--model", help=f"built-in name or Hugging Face directory (default: {default.model})")
    parser.add_argument("--replicas", type=int, help=f"engines to start (default: {default.replicas})")
    common.add_arguments(parser)
    parser.add_argument(
        "--launcher",
        choices=("local", "ray"),
        help=f"where replicas run: on this machine, or on the Ray cluster that it is a node of (default: {default.launcher})",
    )
    parser.add_argument(
        "--ray-address", metavar="HOST:PORT", help="of the cluster, where this machine is a node of several"
    )
    _add_network_arguments(parser, default)
    parser.add_argument(
        "--bucket",
        help="where snapshots appear, file:///DIR, s3://BUCKET/PREFIX, gs:// or az:// (default: STATE_DIR/bucket)",
    )
    parser.add_argument(
        "--records",
        metavar="URL",
        help="where the tokens and numbers of sessions' turns are kept for trainers, as of --bucket (default: nowhere)",
    )
    _add_swap_arguments(parser, default)
    parser.add_argument(
        "--database",
        metavar="URL",
        help="the ledger's, e.g. postgresql://USER@HOST/NAME; a password is better kept in PGPASSWORD, ~/.pgpass or "
        "--config (default: an SQLite file in STATE_DIR)",
    )
    parser.add_argument("--state-dir", help=f"ledger, caches, built-in models (default: {default.state_dir})")
    parser.add_argument(
        "--kv-cache-memory",
        metavar="SIZE",
        help="KV cache of each embedded engine, e.g. 512MiB (default: 65536 tokens)",
    )
    parser.add_argument("--no-tinker", action="store_true", help="without the Tinker API below /api/v1")
    parser.add_argument("--config", help="TOML file with any of the settings; options here win over it")
    common.add_log_arguments(parser)


def _add_swap_arguments(parser: argparse.ArgumentParser, default: Settings) -> None:
    parser.add_argument(
        "--transition",
        choices=("async", "sync"),
        help=f"whether streams cross a swap or finish before it (default: {default.transition})",
    )
    parser.add_argument(
        "--swap-order",
        choices=("together", "one-by-one"),
        help=f"how the replicas of a deployment switch to a snapshot (default: {default.swap_order})",
    )
    parser.add_argument(
        "--pin-drain-s",
        type=float,
        metavar="SECONDS",
        help=f"how long an async swap waits for requests pinned to what serves (default: {default.pin_drain_s:g})",
    )
    parser.add_argument(
        "--resident-snapshots",
        type=int,
        metavar="K",
        help="how many snapshots stay loaded in each replica, for requests that ask for them (default: "
        f"{default.resident_snapshots}, the one that serves)",
    )
    parser.add_argument(
        "--resident-policies",
        type=int,
        metavar="K",
        help=f"how many policies each replica holds at once (default: {default.resident_policies})",
    )


def _add_network_arguments(parser: argparse.ArgumentParser, default: Settings) -> None:
    parser.add_argument("--host", help=f"address to listen on (default: {default.host})")
    parser.add_argument("--port", type=int, help=f"0 takes a free one (default: {default.port})")
    parser.add_argument(
        "--replica-url",
        action="append",
        metavar="URL",
        help="http://HOST:PORT of a replica that others run; may be repeated. --replicas may be 0 then",
    )
    parser.add_argument(
        "--replicas-dns",
        metavar="HOST:PORT",
        help="such a replica at each address of the host, looked up again and again",
    )
    parser.add_argument(
        "--gateway-workers",
        type=int,
        metavar="N",
        help="processes that share the port (default: 1)",
    )
    parser.add_argument(
        "--tls-cert", metavar="FILE", help="PEM certificate chain: the port speaks HTTPS only"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="its private key, without a password")


def _serve(options: argparse.Namespace) -> int:
    from midstream.launch import supervisor
    from midstream.launch.engines import check_installed, records_fields
    from midstream.launch.local import check_port
    from midstream.launch.models import known_models, model_directory
    from midstream.launch.process import StartFailed
    from midstream.launch.restart import locked

    settings = load_settings(options.config, {name: getattr(options, name) for name in SERVE_OPTIONS})
    logs.configure("serve", logs.Logging(level=settings.log_level, format=settings.log_format))
    with locked(Path(settings.state_dir)):
        if settings.launcher == "local" or not settings.ray.gateway:
            check_port(settings.host, settings.port)
        bucket = supervisor.bucket_url(settings)
        records_fields(settings, "")
        name, models = known_models(settings)
        check_installed(settings)
        model_directory(models, name, Path(settings.state_dir))
        out = sys.stdout
        with _launcher(settings, bucket) as launcher:
            serving = supervisor.run(settings, name, models, partial(_ready, out), launcher)
            try:
                asyncio.run(serving)
            except StartFailed as error:
                print(f"midstream serve: {error}", file=sys.stderr)
                return 1
    return 0


def _ready(out: TextIO, line: str) -> None:
    """The line goes to standard output, where programs wait for it, and what to try first to the log."""
    print(line, file=out, flush=True)
    if url := re.search(r"https?://[^\s,]+", line):
        logger.info("try it in another terminal: midstream chat %s", url[0])
        logger.info("watch it: %s/dashboard, or midstream top %s", url[0], url[0])


@contextlib.contextmanager
def _launcher(settings: Settings, bucket: str) -> Iterator[Launcher]:
    """Where the processes run. Raises ConfigError when there is no such place."""
    if settings.launcher == "local":
        from midstream.launch.local import LocalLauncher

        yield LocalLauncher(settings)
        return
    try:
        from midstream.launch.ray_launcher import RayLauncher
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError("--launcher ray: needs Ray: pip install 'midstream[ray]'") from error
    # Ray prints what happens on the cluster.
    with contextlib.redirect_stdout(sys.stderr):
        launcher = RayLauncher(settings, bucket)
        try:
            yield launcher
        finally:
            launcher.close()
