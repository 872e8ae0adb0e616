"""`midstream replica`: one engine without a gateway, for gateways that name it with --replica-url."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from midstream.commands import common
from midstream.core import logs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_replica)
    common.add_arguments(parser, "replica")


def _replica(options: argparse.Namespace) -> int:
    from midstream.launch.engines import check_installed
    from midstream.launch.local import check_port
    from midstream.launch.models import known_models, model_directory
    from midstream.launch.process import StartFailed
    from midstream.launch.restart import locked

    settings = common.settings_of(options)
    logs.configure("replica", logs.Logging(level=settings.log.level, format=settings.log.format))
    check_installed(settings)
    # It imports tokenizers and more.
    from midstream.launch import standalone_replica

    with locked(Path(settings.state_dir)):
        check_port(settings.replica.host, settings.replica.port)
        name, models = known_models(settings)
        spec = standalone_replica.replica_spec(
            settings, name, model_directory(models, name, Path(settings.state_dir))
        )
        try:
            asyncio.run(standalone_replica.run(spec, lambda line: print(line, flush=True)))
        except StartFailed as error:
            print(f"midstream replica: {error}", file=sys.stderr)
            return 1
    return 0
