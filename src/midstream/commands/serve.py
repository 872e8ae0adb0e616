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

if TYPE_CHECKING:
    from midstream.launch.local import Launcher

logger = logging.getLogger(__name__)


#: option, setting, what it is, and a placeholder
OPTIONS = (
    ("--replicas", "deployment.replicas", "engines to start", "N"),
    (
        "--launcher",
        "launcher",
        "where replicas run: on this machine, or on the Ray cluster that it is a node of",
        None,
    ),
    ("--ray-address", "ray.address", "of the cluster, where this machine is a node of several", "HOST:PORT"),
    (
        "--replica-url",
        "gateway.replicas",
        "http://HOST:PORT of a replica that others run; may be repeated. --replicas may be 0 then",
        "URL",
    ),
    (
        "--replicas-dns",
        "gateway.replicas_dns",
        "such a replica at each address of the host, looked up again and again",
        "HOST:PORT",
    ),
    ("--gateway-workers", "gateway.workers", "processes that share the port", "N"),
    ("--tls-cert", "gateway.tls_cert", "PEM certificate chain: the port speaks HTTPS only", "FILE"),
    ("--tls-key", "gateway.tls_key", "its private key, without a password", "FILE"),
    (
        "--bucket",
        "deployment.bucket",
        "where snapshots appear, file:///DIR, s3://BUCKET/PREFIX, gs:// or az:// (default: STATE_DIR/bucket)",
        "URL",
    ),
    ("--transition", "deployment.transition", "whether streams cross a swap or finish before it", None),
    ("--swap-order", "gateway.swap_order", "how the replicas of a deployment switch to a snapshot", None),
    (
        "--pin-drain-s",
        "replica.pin_drain_s",
        "how long an async swap waits for requests pinned to what serves",
        "SECONDS",
    ),
    (
        "--resident-snapshots",
        "replica.resident_snapshots",
        "how many snapshots stay loaded in each replica, for requests that ask for them, the one that serves included",
        "K",
    ),
    ("--resident-policies", "replica.resident_policies", "how many policies each replica holds at once", "K"),
    (
        "--database",
        "ledger.database",
        "the ledger's, e.g. postgresql://USER@HOST/NAME; a password is better kept in PGPASSWORD, ~/.pgpass or --config "
        "(default: an SQLite file in STATE_DIR)",
        "URL",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_serve)
    common.add_arguments(parser, "gateway")
    for option, setting, help_text, metavar in OPTIONS:
        common.add_setting(parser, option, setting, help_text, metavar)
    parser.add_argument(
        "--no-tinker",
        dest="tinker.enabled",
        action="store_const",
        const=False,
        help="without the Tinker API below /api/v1",
    )


def _serve(options: argparse.Namespace) -> int:
    from midstream.launch import supervisor
    from midstream.launch.engines import check_installed, records_fields
    from midstream.launch.local import check_port
    from midstream.launch.models import known_models, model_directory
    from midstream.launch.process import StartFailed
    from midstream.launch.restart import locked

    settings = common.settings_of(options)
    logs.configure("serve", logs.Logging(level=settings.log.level, format=settings.log.format))
    with locked(Path(settings.state_dir)):
        if settings.launcher == "local" or not settings.ray.gateway:
            check_port(settings.gateway.host, settings.gateway.port)
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
