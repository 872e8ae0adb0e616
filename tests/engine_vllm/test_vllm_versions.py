"""What differs between versions of vLLM is found at the server and in its environment, not read from its number."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.engine.vllm.arguments import SCALE_OUT, command_line
from midstream.engine.vllm.server_info import ENDPOINTS, NAMES_WEIGHTS, TRANSFER_ENDPOINTS, missing_endpoints


@pytest.mark.parametrize(
    ("file", "given"),
    [
        ("openai/cli_args.py", False),
        ("launchers/cli_args.py", True),
    ],
)
def test_a_flag_is_given_where_vllm_knows_it(tmp_path: Path, file: str, given: bool) -> None:
    source = tmp_path / "lib/python3.11/site-packages/vllm/entrypoints" / file
    source.parent.mkdir(parents=True)
    source.write_text("    enable_scale_out: bool = False\n" if given else "    tokens_only: bool = False\n")
    command = command_line(str(tmp_path / "bin/python"), Path("/model"), "m", 1, 2, [])
    assert (f"--{SCALE_OUT}" in command) == given
    assert "--enable-prompt-tokens-details" in command


def test_a_flag_is_given_where_the_files_of_vllm_are_not_found(tmp_path: Path) -> None:
    assert f"--{SCALE_OUT}" in command_line(str(tmp_path / "bin/python"), Path("/model"), "m", 1, 2, [])


def test_a_server_that_does_not_name_its_weights_is_started_and_not_attached_to() -> None:
    assert missing_endpoints(ENDPOINTS, attached=False, transfer=False) == ""
    assert missing_endpoints([*ENDPOINTS, NAMES_WEIGHTS], attached=True, transfer=False) == ""
    assert NAMES_WEIGHTS in missing_endpoints(ENDPOINTS, attached=True, transfer=False)


def test_weights_in_place_need_calls_around_an_update() -> None:
    assert missing_endpoints([*ENDPOINTS, *TRANSFER_ENDPOINTS], attached=False, transfer=True) == ""
    assert "vllm.weight_transfer" in missing_endpoints(ENDPOINTS, attached=False, transfer=True)
