"""What `--help` says of each option: what it is, and its default."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from midstream import cli


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in {id(one): one for one in action.choices.values()}.values():
                yield from parsers(below)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_option_says_what_it_is_and_its_default(command: str) -> None:
    top = cli.build_parser([command])
    for parser in parsers(top):
        # Only the command that was asked for has its options.
        if not parser.prog.startswith(f"midstream {command}"):
            continue
        said = " ".join(parser.format_help().split())
        # The formatter breaks a line behind a hyphen.
        said = said.replace("- ", "-")
        for action in parser._actions:
            name = f"{parser.prog} {'/'.join(action.option_strings) or action.dest}"
            if isinstance(action, argparse._SubParsersAction):
                continue
            text = action.help or ""
            assert len(text.partition("(default")[0].strip()) > 3, f"{name} does not say what it is"
            takes_value = bool(action.option_strings) and action.nargs != 0
            repeated = isinstance(action, argparse._AppendAction) or action.default == []
            if takes_value and not action.required and not repeated and "default" not in text:
                default = "none" if action.default is None else str(action.default)
                assert f"(default: {default})" in said, name
