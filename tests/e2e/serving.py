"""A real `midstream serve` for tests, in its own process group, ended by pid."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from server_logs import shown_on_failure
from tiers import THREADS

#: `make gpu-check` sets it: the device that embedded engines compute on.
DEVICE = os.environ.get("MIDSTREAM_TEST_DEVICE", "cpu")
#: Of a configuration.
OFF = "[embedded]\nspare_after_s = 0\n"
READY = re.compile(r"midstream ready on (https?://\S+) \((\d+) replicas, model (\S+), deployment (\S+)\)")


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    model: str
    deployment: str
    state_dir: Path
    log: Path

    @property
    def bucket(self) -> Path:
        return self.state_dir / "bucket"

    def children(self) -> list[int]:
        """Pids of all descendants that still run."""
        return descendants(self.process.pid)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=120)


def descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == pid and stat[0] != "Z":
                found += [int(entry.name), *descendants(int(entry.name))]
    return found


def words_of(pid: int) -> list[str]:
    """Of its command line; none once the process has ended, which may be while this reads it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    return []


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "midstream.cli", *arguments]


def on_device(folder: Path) -> tuple[str, ...]:
    """Options of a server whose engines compute on DEVICE."""
    if DEVICE == "cpu":
        return ()
    config = folder / "device.toml"
    config.write_text(f'[embedded]\ndevice = "{DEVICE}"\n')
    return "--config", str(config)


@contextlib.contextmanager
def started(log: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A `midstream` command, its standard error in `log`; at the end it and whatever it left are stopped."""
    # It is on no cluster, and shares the cores out itself.
    left_out = ("MIDSTREAM_TEST_CLUSTER", THREADS)
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    with log.open("w") as errors:
        process = subprocess.Popen(
            command(*arguments), stdout=subprocess.PIPE, stderr=errors, text=True, env=env
        )
    try:
        with shown_on_failure(log):
            yield process
    finally:
        left = descendants(process.pid)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()


@functools.cache
def built_in_model() -> Path:
    """A directory with the built-in model, made once per test process: each server would take 5 s of a core for its own."""
    folder = Path(tempfile.mkdtemp(prefix="midstream-built-in-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run(
        command("model", "tiny-moe", str(folder / "tiny-moe")), check=True, stdout=subprocess.DEVNULL
    )
    return folder / "tiny-moe"


def with_built_in_model(state_dir: Path) -> None:
    """Have the server of this state directory find its built-in model made; tests/launch shows that a server makes it."""
    made = state_dir / "models" / "tiny-moe"
    if not made.exists():
        for directory in (state_dir, made.parent):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copytree(built_in_model(), made)


@functools.cache
def spare_off() -> Path:
    """A configuration that says nothing else. Not beside a state directory, whose disk may be the server's alone."""
    folder = Path(tempfile.mkdtemp(prefix="midstream-spare-off-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "midstream.toml").write_text(OFF)
    return folder / "midstream.toml"


def without_spare(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The options of a server that keeps no spare replica process, unless its configuration says that it does.

    Tests find the processes that they kill by their command lines.
    """
    if "--config" not in arguments:
        return (*arguments, "--config", str(spare_off()))
    config = Path(arguments[arguments.index("--config") + 1])
    text = config.read_text()
    if "spare_after_s" not in text:
        has = "[embedded]\n" in text
        config.write_text(text.replace("[embedded]\n", OFF, 1) if has else f"{text}\n{OFF}")
    return arguments


@contextlib.contextmanager
def serve(state_dir: Path, *arguments: str) -> Iterator[Server]:
    """Start, wait for the ready line, and stop whatever is left at the end."""
    log = state_dir.with_suffix(".log")
    if "--model" not in arguments:
        with_built_in_model(state_dir)
    options = without_spare(arguments)
    with started(log, "serve", "--port", "0", "--state-dir", str(state_dir), *options) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = READY.fullmatch(line.strip())
        assert match, f"no ready line, but {line!r}; log:\n{log.read_text()}"
        yield Server(process, match[1], match[3], match[4], state_dir, log)
