"""The log level that was asked for is the level of everything a process logs."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime

import pytest

SAYS = """
import logging
from midstream.core.logs import Logging, configure
configure("gateway", Logging(level="{level}"))
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


AS_JSON = """
import logging, sys, threading, warnings
from midstream.core.logs import Logging, configure
logging.getLogger("a.library").addHandler(logging.StreamHandler())
configure("replica-0", Logging(format="json", fields={"replica": "replica-0"}))
log = logging.getLogger("midstream.proxy")
named = {"session": "s\\n{}", "snapshot": "step-1", "secret": "hidden"}
log.warning("lost %d\\nof %s", 3, "it", extra=named)
log.info("wrong %d", "number")
logging.getLogger("a.library").warning("of its own")
print("printed ", end=""); print("here\\nand there")
sys.stderr.write("without an end")
sys.stderr.close()
warnings.warn("old", DeprecationWarning)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
thread = threading.Thread(target=lambda: [][1]); thread.start(); thread.join()
raise RuntimeError("ends")
"""


def test_in_json_every_line_is_one_object_whatever_it_came_from() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", AS_JSON],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(line["process"], line["replica"]) for line in lines} == {("replica-0", "replica-0")}
    assert [(line["logger"], line["level"], line["message"]) for line in lines] == [
        ("midstream.proxy", "warning", "lost 3\nof it"),
        ("midstream.proxy", "info", "wrong %d ('number',) (%d format: a real number is required, not str)"),
        ("a.library", "warning", "of its own"),
        ("stdout", "info", "printed here"),
        ("stdout", "info", "and there"),
        ("stderr", "warning", "without an end"),
        ("py.warnings", "warning", lines[6]["message"]),
        ("midstream.proxy", "error", "failed"),
        ("uncaught", "critical", "list index out of range"),
        ("uncaught", "critical", "ends"),
    ]
    assert (lines[0]["session"], lines[0]["snapshot"]) == ("s\n{}", "step-1")
    assert "secret" not in lines[0]
    assert "DeprecationWarning: old" in lines[6]["message"]
    assert "ZeroDivisionError" in lines[7]["exception"]
    assert "IndexError" in lines[8]["exception"]
    assert datetime.fromisoformat(lines[0]["time"]).tzinfo is not None


def test_a_process_logs_as_the_one_that_started_it() -> None:
    child = "import logging; from midstream.core import logs; logs.configure_as_parent('engine'); logging.warning('up')"
    parent = (
        "import subprocess, sys; from midstream.core import logs; "
        "logs.configure('replica-1', logs.Logging(level='error', format='json', fields={'replica': 'replica-1'})); "
        "subprocess.run([sys.executable, '-c', sys.argv[1].replace('warning', 'error')]); "
        "subprocess.run([sys.executable, '-c', sys.argv[1]])"
    )
    done = subprocess.run([sys.executable, "-c", parent, child], capture_output=True, text=True, timeout=60)
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(x["process"], x["replica"], x["message"]) for x in said] == [("engine", "replica-1", "up")]


def test_a_log_that_cannot_be_written_harms_nobody() -> None:
    """Whoever read it is gone: what Python prints then would be logged again, and so on."""
    code = (
        "import logging, os, sys; from midstream.core import logs; "
        "logs.configure('serve', logs.Logging(format='json')); os.close(2); "
        "logging.warning('lost'); print('lost', file=sys.stderr); os.write(1, b'goes on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("goes on", "")
