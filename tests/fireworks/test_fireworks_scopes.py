"""The real client with keys that may do only some things."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fireworks_helpers import Endpoint
from serving import serve

CONFIG = """\
account = "acme"
[deployment]
name = "policy"
[gateway]
api_keys = [
  { key = "fw-rollouts", scopes = ["sample:policy"] },
  { key = "fw-publisher", scopes = ["publish:policy"] },
  { key = "fw-trainer", scopes = ["sample", "publish"] },
]
"""


@pytest.mark.variant
def test_the_client_takes_a_refusal_at_once_and_a_trainers_key_does_both(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    config = tmp_path / "midstream.toml"
    config.write_text(CONFIG)
    with serve(tmp_path / "state", "--model", str(tiny_model()), "--config", str(config)) as server:
        endpoint = Endpoint(server)
        shutil.copytree(tiny_model(seed=1), endpoint.bucket / "s1")
        told = endpoint.run("scopes", api_key="fw-rollouts", identity="s1")
        assert (told["signalled"]["status"], told["signalled"]["code"]) == (403, "permission_error")
        assert "lacks the scope 'publish'" in told["signalled"]["message"]
        assert told["signals"] == ["POST /hot_load/v1/models/hot_load"], "it is not tried again"
        assert told["completed"] is None
        assert len(told["samples"]) == 1
        told = endpoint.run("scopes", api_key="fw-publisher", identity="s1")
        assert told["signalled"] is None
        assert "lacks the scope 'sample' on any deployment" in told["completed"]
        assert len(told["completions"]) == 1, "it is not tried again"
        told = endpoint.run("scopes", api_key="fw-trainer", identity="s1")
        assert (told["signalled"], told["completed"], len(told["samples"])) == (None, None, 1)
