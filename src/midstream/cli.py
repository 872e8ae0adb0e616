"""The `midstream` command.

Owns: the list of subcommands, and how a failure looks on a terminal: one line on standard error. Exit codes: 0 done, 1 it
failed while running, 2 it was asked for something that cannot work, 130 interrupted.

Always holds: only the subcommand that was asked for is imported; each is a module of `commands/` with
`add_arguments(parser)`, which sets `run`: options in, exit code out.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from midstream import __version__
from midstream.core.errors import ConfigError

COMMANDS = {  # module of commands/: its line in --help
    "serve": "start a gateway and its replicas on this machine",
    "replica": "start one replica without a gateway, for gateways elsewhere",
    "restart": "replace the gateway of a server on this machine, without a request lost",
    "model": "write a built-in model as a Hugging Face directory",
    "publish": "put a checkpoint into the bucket and wait until every replica serves it",
    "status": "what each replica serves and does; --watch keeps looking",
    "dashboard": "open the server's dashboard in a browser",
    "ledger": "every snapshot that was signalled, and how each replica fared with it",
    "export": "training records of sessions, as JSON lines, for Tinker, verl, NeMo-Gym or verifiers",
    "delta": "make, apply and check incremental snapshots in local directories",
    "conformance": "which promised behaviours a live endpoint has, row by row",
    "demo": "the main job: an RL loop with weights hot-loaded under live rollouts",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for `arguments`; only the subcommand they name has its options. Raises ConfigError when that subcommand
    needs something that is not installed.
    """
    parser = _Parser(prog="midstream", description="Rollout serving for RL post-training.")
    parser.add_argument("--version", action="version", version=f"midstream {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, line in COMMANDS.items():
        subparser = commands.add_parser(name, help=line)
        if [name] == list(arguments[:1]):
            importlib.import_module(f"midstream.commands.{name}").add_arguments(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = build_parser(arguments).parse_args(arguments)
        code: int = options.run(options)
    except ConfigError as error:
        print(f"midstream {arguments[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    raise SystemExit(main())
