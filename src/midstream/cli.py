"""The `midstream` command.

Owns: the list of subcommands, and how a failure looks on a terminal: one line on standard error, below the usage where the
arguments are wrong. Exit codes: 0 done, 1 it failed while running, 2 it was asked for something that cannot work, 130
interrupted.

Always holds: only the subcommand that was asked for is imported; each is a module of `commands/` with
`add_arguments(parser)`, which sets `run`: options in, exit code out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from midstream import __version__
from midstream.core.errors import ConfigError
from midstream.core.extras import advice

COMMANDS = {  # module of commands/: its line in --help
    "serve": "start a gateway and its replicas on this machine",
    "replica": "start one replica without a gateway, for gateways elsewhere",
    "restart": "replace the gateway of a server on this machine, without a request lost",
    "model": "write a built-in model as a Hugging Face directory",
    "publish": "put a checkpoint into the bucket and wait until every replica serves it",
    "top": "a live server at a glance: replicas, swaps, policies, sessions, throughput",
    "chat": "talk to a model in the terminal, for a first try",
    "status": "what each replica serves and does; --watch keeps looking",
    "explain-wait": "why a session's next turn has not begun",
    "dashboard": "open the server's dashboard in a browser",
    "ledger": "every snapshot that was signalled, and how each replica fared with it",
    "export": "training records of sessions, as JSON lines, for Tinker, verl, NeMo-Gym or verifiers",
    "verify": "recompute records from the snapshots in the bucket, and say what differs and why",
    "explain": "whose the gap between a trainer's log-probabilities and the server's is, by cause",
    "delta": "make, apply and check incremental snapshots in local directories",
    "conformance": "which promised behaviours a live endpoint has, row by row",
    "completion": "print a script that completes this command line in bash, zsh or fish",
}


class _Help(argparse.HelpFormatter):
    """Says the default of every option that takes a value, unless its text does."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        given = action.help
        if given is None or "default" in given or action.required or action.nargs == 0:
            return given
        if action.default in (argparse.SUPPRESS, []) or not action.option_strings:
            return given
        return f"{given} (default: {'none' if action.default is None else '%(default)s'})"


class _Parser(argparse.ArgumentParser):
    """Of a command, or of one of its actions. A mistake shows the usage, and what was perhaps meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """No argument is left over: the parser of the command refuses unknown ones, and not the parser above it."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            flag = next((argument for argument in unknown if argument.startswith("-")), "")
            meant = _meant(flag.partition("=")[0], known)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _meant(str(value), [str(choice) for choice in action.choices or ()])
            raise


def _meant(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


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
            _add_arguments(name, subparser)
    parser.set_defaults(whole_parser=build_whole_parser)
    return parser


def build_whole_parser() -> argparse.ArgumentParser:
    """With the options of every command; one that is not installed has none."""
    parser = build_parser([])
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                with contextlib.suppress(ConfigError):
                    _add_arguments(name, subparser)
    return parser


def _add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    importlib.import_module(f"midstream.commands.{name.replace('-', '_')}").add_arguments(parser)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        parser = build_parser(arguments)
        if not arguments:
            parser.print_help(sys.stderr)
            return 2
        options = parser.parse_args(arguments)
        code: int = options.run(options)
    except ConfigError as error:
        print(f"midstream {arguments[0]}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        hint = advice([(error.name or "").partition(".")[0]])
        if hint is None:
            # It is midstream's own, or a bug: the traceback says where.
            raise
        print(f"midstream {arguments[0]}: {hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    raise SystemExit(main())
