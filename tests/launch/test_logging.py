"""The log level that was asked for is the level of everything a process logs."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAYS = """
import logging
from midstream.launch.channel import configure_logging
configure_logging("gateway", "{level}")
for name in ("midstream.proxy.proxy", "uvicorn.error", "httpx"):
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger(name), level)(level)
"""


@pytest.mark.parametrize(
    ("level", "ours", "others"),
    [
        ("debug", {"DEBUG", "INFO", "WARNING", "ERROR"}, {"WARNING", "ERROR"}),
        ("info", {"INFO", "WARNING", "ERROR"}, {"WARNING", "ERROR"}),
        ("warning", {"WARNING", "ERROR"}, {"WARNING", "ERROR"}),
        ("error", {"ERROR"}, {"ERROR"}),
    ],
)
def test_a_level_holds_for_every_logger(level: str, ours: set[str], others: set[str]) -> None:
    command = [sys.executable, "-c", SAYS.format(level=level)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr
    levels: dict[str, set[str]] = {}
    for line in said.splitlines():
        _, _, process, name, logger, _ = line.split()
        assert process == "gateway"
        levels.setdefault(logger.rstrip(":"), set()).add(name)
    assert levels == {"midstream.proxy.proxy": ours, "uvicorn.error": others, "httpx": others}
