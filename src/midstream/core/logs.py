"""The log of every process of a server: lines of text for people, or one JSON object a line for programs.

Owns: what a line holds, and the way in which a process passes the choice on to the processes that it starts.
Always holds of JSON:
- Each line is one object. A traceback, a warning, and what a library prints are inside such an object.
- `time`, `level`, `process`, `pid`, `logger` and `message` are in each. FIELDS are in a line if its call gives them as `extra`.
- A line is printable ASCII, so nothing that a client sends begins a line of its own.

What native code writes to standard error by itself, such as the last words of a crash, is not changed.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, TextIO

import msgspec

LogFormat = Literal["text", "json"]

#: What a log call may say as `extra`, beside its message.
FIELDS = ("deployment", "policy", "replica", "session", "snapshot", "child")
#: Of a line of JSON, with its end: what POSIX has a pipe take in one piece.
LINE_BYTES_MAX = 4095
#: Of a line that was printed and has not ended: a longer one is logged in parts.
BEGUN_MAX = 4096
#: In the environment: how a process logs that this one starts.
VARIABLE = "MIDSTREAM_LOG"
#: Libraries of which only warnings and errors are logged.
NOISY = ("httpx", "httpcore", "uvicorn", "asyncio", "filelock", "transformers", "torch", "urllib3")


class Logging(msgspec.Struct, frozen=True, kw_only=True):
    """level: in small letters. fields: those that hold for every line of the process, such as its replica."""

    level: str = "info"
    format: LogFormat = "text"
    fields: dict[str, str] = {}


def configure(process: str, how: Logging) -> None:
    """Log to standard error from now on. process: its name in each line. Called once, before threads are started."""
    os.environ[VARIABLE] = msgspec.json.encode(how).decode()
    handler = logging.StreamHandler(sys.stderr)
    if how.format == "json":
        handler.setFormatter(JsonFormatter(process, how.fields))
        _catch_the_rest()
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=how.level.upper(), handlers=[handler])
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def configured() -> Logging:
    """How this process logs, or its parent does. If neither said it: text, from info on."""
    try:
        return msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=Logging)
    except msgspec.DecodeError:
        return Logging()


def configure_as_parent(process: str) -> None:
    """Log as the parent process does."""
    configure(process, configured())


class JsonFormatter(logging.Formatter):
    def __init__(self, process: str, fields: Mapping[str, str]) -> None:
        super().__init__()
        self._process = process
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": _message(record),
            **self._fields,
        }
        for name in FIELDS:
            if (value := getattr(record, name, None)) is not None:
                line[name] = str(value)
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return _fitted(line)


def _fitted(line: dict[str, Any]) -> str:
    """The line as JSON, of LINE_BYTES_MAX at most, since a pipe that processes share keeps such lines whole. It cuts the
    beginning of a traceback, and the end of a message."""
    text = json.dumps(line, ensure_ascii=True)
    for name, part in (
        ("exception", slice(-1500, None)),
        ("message", slice(0, 1000)),
        ("exception", slice(-200, None)),
    ):
        kept = line.get(name, "")[part]
        if len(text) > LINE_BYTES_MAX and kept != line.get(name, ""):
            line[name] = f"... {kept}" if part.start else f"{kept} ..."
            text = json.dumps(line, ensure_ascii=True)
    while len(text) > LINE_BYTES_MAX:
        # A character that is not ASCII takes up to twelve.
        sizes = {name: len(json.dumps(value)) for name, value in line.items()}
        longest = max(sizes, key=sizes.__getitem__)
        half = len(line[longest]) // 2
        line[longest] = (
            f"... {line[longest][-half:]}" if longest == "exception" else f"{line[longest][:half]} ..."
        )
        text = json.dumps(line, ensure_ascii=True)
    return text


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError) as error:
        # A wrong log call costs its numbers, not its line.
        return f"{record.msg} {record.args!r} ({error})"


class _Printed(io.TextIOBase):
    """Stands for a standard stream: each line that is printed becomes a line of the log.

    What is printed because a line could not be written is discarded, or it would be tried again for ever.
    """

    def __init__(self, stream: TextIO, name: str, level: int) -> None:
        super().__init__()
        self._stream = stream
        self._logger = logging.getLogger(name)
        self._level = level
        # Never held while a line is logged: the handler has a lock of its own.
        self._lock = threading.Lock()
        self._begun = ""
        self._inside = threading.local()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, begun = f"{self._begun}{text}".split("\n")
            # A bar of progress writes itself over and over.
            begun = begun.rpartition("\r")[2]
            lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
            if len(begun) > BEGUN_MAX:
                lines, begun = [*lines, begun], ""
            self._begun = begun
        self._say(lines)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """Says what was begun; the stream itself stays open."""
        with self._lock:
            line, self._begun = self._begun, ""
        self._say([line])

    def fileno(self) -> int:
        """The descriptor of the stream itself, for processes that inherit it."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def _say(self, lines: Iterable[str]) -> None:
        if getattr(self._inside, "saying", False):
            return
        self._inside.saying = True
        try:
            for line in lines:
                if line.strip():
                    self._logger.log(self._level, "%s", line.rstrip())
        finally:
            self._inside.saying = False


def _catch_the_rest() -> None:
    """What would reach standard error past the log becomes a part of it. Standard output stays, where it is another file."""
    logging.captureWarnings(True)
    _take_over_handlers()
    sys.excepthook = _uncaught
    threading.excepthook = lambda failed: _uncaught(
        failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback
    )
    sys.unraisablehook = lambda failed: _uncaught(
        failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback
    )
    if sys.stderr is None:
        return
    same = sys.stdout is not None and _same_file(sys.stdout, sys.stderr)
    sys.stderr = _Printed(sys.stderr, "stderr", logging.WARNING)
    if same:
        sys.stdout = _Printed(sys.stdout, "stdout", logging.INFO)


def _take_over_handlers() -> None:
    """Libraries that were imported already may have handlers of their own, which write text."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            own = [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]
            for handler in own:
                logger.removeHandler(handler)
                logger.propagate = True


def _same_file(one: TextIO, other: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.path.sameopenfile(one.fileno(), other.fileno())
    return False


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, SystemExit | KeyboardInterrupt):
        return
    logging.getLogger("uncaught").critical("%s", error or kind.__name__, exc_info=(kind, error, trace))
