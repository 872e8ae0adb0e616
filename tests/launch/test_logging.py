"""The log level that was asked for is the level of everything a process logs."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
from datetime import datetime

import pytest

from midstream.core import logs

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


LONG = """
import logging, sys
from midstream.core import logs
logs.configure(sys.argv[1], logs.Logging(format="json"))
for number in range(100):
    try:
        raise ValueError("w" * 9000)
    except ValueError:
        logging.getLogger("x").exception("%d: %s", number, "é" * 3000)
"""


def test_a_line_whose_fields_are_long_fits_too() -> None:
    # Of the letters that take most, as a session's key may have them.
    record = logging.LogRecord("x", logging.WARNING, "", 0, "lost", (), None)
    record.session, record.snapshot = "𝄞" * 256, "𝄢" * 256
    text = logs.JsonFormatter("gateway", {}).format(record)
    assert len(text) <= logs.LINE_BYTES_MAX
    line = json.loads(text)
    assert (line["message"], line["level"]) == ("lost", "warning")
    assert line["session"].startswith("𝄞" * 60)
    assert line["snapshot"].startswith("𝄢" * 60)


def test_long_lines_of_several_processes_stay_apart_in_one_pipe() -> None:
    read, write = os.pipe()
    processes = [subprocess.Popen([sys.executable, "-c", LONG, f"p{n}"], stderr=write) for n in range(3)]
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        read_lines = list(pipe)
    lines = [json.loads(line) for line in read_lines]
    assert max(map(len, read_lines)) <= select.PIPE_BUF
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(lines) == 300
    for name in ("p0", "p1", "p2"):
        mine = [line for line in lines if line["process"] == name]
        assert [int(line["message"].partition(":")[0]) for line in mine] == list(range(100))
        assert all(line["message"].endswith("é ...") for line in mine)
        # What a traceback says last is kept.
        assert all(line["exception"].endswith("w") for line in mine)


def test_a_bar_of_progress_is_told_as_it_was_last_and_a_closed_output_ends_nothing() -> None:
    code = (
        "import sys; from midstream.core import logs; logs.configure('engine', logs.Logging(format='json')); "
        "[sys.stderr.write(f'\\r{n} of 5000') for n in range(5001)]; sys.stderr.write('\\n'); "
        "print('x' * 5000, end='', file=sys.stderr)"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [json.loads(line)["message"] for line in done.stderr.splitlines()]
    assert lines[0] == "5000 of 5000"
    assert lines[1].startswith("x" * 900)
    assert done.returncode == 0
