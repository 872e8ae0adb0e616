"""Every `midstream` command line in a document is one that the command line takes."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.cli import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    file
    for file in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md"))
    # Made of the parsers themselves, and of what modules say.
    if file.name not in ("cli.md", "modules.md")
)
#: What follows a command in a shell.
_ENDS = re.compile(r"\s(?:\||>|&|&&|;)(?:\s|$)|\s#\s")
#: What a paragraph may leave out of a command that it mentions.
_LEFT_OUT = ("the following arguments are required", "expected one argument")


def command_lines(text: str) -> Iterator[tuple[str, bool]]:
    """(command, whether it is whole) of code blocks, and of `code` in a paragraph. One with "..." is not checked."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [(line, True) for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    mentions = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines += [(code.replace("\n", " "), False) for code in mentions]
    for line, whole in lines:
        found = re.match(r"\s*(?:\$ )?(?:\.venv/bin/)?midstream (.*)", line)
        if found:
            words = _ENDS.split(found[1])[0].strip()
            if words.split(" ")[0] in COMMANDS and "..." not in words and "{" not in words:
                yield words, whole


LINES = [
    pytest.param(*line, id=f"{file.stem}: {line[0]}")
    for file in DOCUMENTS
    for line in dict.fromkeys(command_lines(file.read_text()))
]


def test_documents_have_commands() -> None:
    assert len(LINES) > 60


@pytest.mark.parametrize(("words", "whole"), LINES)
def test_a_command_of_a_document_is_taken(
    words: str, whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    # What may be given is given, and a letter that stands for a number is one.
    arguments = [
        re.sub(r"^[KN]$", "2", word) for word in shlex.split(words.replace("[", "").replace("]", ""))
    ]
    if not whole and len(arguments) == 1:
        return
    with contextlib.suppress(SystemExit):
        build_parser(arguments).parse_args(arguments)
    said = capsys.readouterr().err
    assert said == "" or (not whole and any(words in said for words in _LEFT_OUT))
