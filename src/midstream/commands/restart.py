"""`midstream restart gateway`: replaces the gateway processes of a running server without losing a request."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from midstream.commands.progress import ProgressLine, add_progress_argument
from midstream.core.config import Settings

WAIT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_restart)
    parser.add_argument("what", choices=("gateway",), help="what is replaced: every process on the port")
    parser.add_argument(
        "--state-dir", help=f"of the server, on this machine (default: {Settings().state_dir})"
    )
    add_progress_argument(parser)


def _restart(options: argparse.Namespace) -> int:
    from midstream.launch.restart import restart

    with ProgressLine(options.progress) as line:
        line.show("replacing the gateway")
        error = restart(Path(options.state_dir or Settings().state_dir), WAIT_S)
    if error is not None:
        print(f"midstream restart: {error}", file=sys.stderr)
        return 1
    print("the gateway was replaced; requests that were under way continue in the old process")
    return 0
