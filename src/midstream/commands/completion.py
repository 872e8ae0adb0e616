"""`midstream completion SHELL`: a script that completes commands, options and their values. It is printed, never installed.

Always holds: the script has the options of the version that wrote it, and starts no Python when a key is pressed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

SHELLS = ("bash", "zsh", "fish")
#: Where a shell looks for such scripts by itself.
_INSTALL = {
    "bash": "midstream completion bash > ~/.local/share/bash-completion/completions/midstream",
    "zsh": "midstream completion zsh > DIR/_midstream, where DIR is in $fpath",
    "fish": "midstream completion fish > ~/.config/fish/completions/midstream.fish",
}
_DIRECTORIES = ("DIR",)
_FILES = ("FILE", "PATH", "CONFIG")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_completion)
    parser.add_argument(
        "shell", choices=SHELLS, help="; ".join(f"{shell}: {how}" for shell, how in _INSTALL.items())
    )


def _completion(options: argparse.Namespace) -> int:
    import shtab

    whole: argparse.ArgumentParser = options.whole_parser()
    for action in _actions(whole):
        kind = action.metavar or (action.dest.upper() if action.option_strings else "")
        if kind in _DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif kind in _FILES or action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(whole, shell=options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
