"""The script of `midstream completion`, run by a real bash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from midstream import cli

ASK = """
. "$1"; shift
function=$(complete -p midstream | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
"$function" midstream "${COMP_WORDS[$COMP_CWORD]}" "${COMP_WORDS[$((COMP_CWORD - 1))]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab")
    file = tmp_path_factory.mktemp("completion") / "midstream.bash"
    command = [sys.executable, "-m", "midstream.cli", "completion", "bash"]
    file.write_text(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    return file


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["st"], {"status"}),
        (["serve", "--repl"], {"--replicas", "--replica-url", "--replicas-dns"}),
        (["serve", "--engine", ""], {"embedded", "vllm"}),
        (["delta", "en"], {"encode"}),
        (["delta", "encode", "--par"], {"--parent"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
    ],
)
def test_it_offers_commands_options_and_values(script: Path, words: list[str], offered: set[str]) -> None:
    asked = ["bash", "-c", ASK, "bash", str(script), "midstream", *words]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
    assert offered <= set(done.stdout.split())
    if words[-1]:
        assert all(word.startswith(words[-1]) for word in done.stdout.split())


def test_the_whole_parser_has_the_options_of_every_command() -> None:
    said = cli.build_whole_parser()
    commands = next(action.choices for action in said._actions if action.dest == "command")
    assert set(commands) == set(cli.COMMANDS)
    for name in cli.COMMANDS:
        options = cli.build_parser([name])._actions[-1].choices[name].format_usage()
        assert commands[name].format_usage() == options


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_have_one_too(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in cli.COMMANDS)
