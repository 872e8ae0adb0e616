"""`midstream demo`: its options, and one run from an empty directory to a report and an exit code.

Always holds: a run ends its server, however it ends. Exit code 0 means that every check in summary.misses holds.
Functions import torch, openai and rich, so that the command line starts quickly.

The demo's server: a real `midstream serve` in its own process, which SIGTERM ends.

Always holds: the process is gone after `stop`, and after the `with` block, however that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from midstream.core.errors import ConfigError

if TYPE_CHECKING:
    from midstream.demo.progress import Display
    from midstream.demo.records import StepRow

READY = re.compile(
    r"midstream ready on (?P<url>\S+) \((?P<replicas>\d+) replicas?, model (?P<model>\S+), "
    r"deployment (?P<deployment>\S+)\)"
)


class ServerFailed(Exception):
    """The server did not start. The message has the end of its log."""


class ServerProcess:
    """A context manager around a running server. url, model, deployment: from its ready line."""

    def __init__(self, arguments: Sequence[str], log: Path, start_timeout_s: float = 180.0) -> None:
        self._arguments = [sys.executable, "-m", "midstream.cli", "serve", *arguments]
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.url = self.model = self.deployment = ""

    def __enter__(self) -> ServerProcess:
        with self._log.open("wb") as log:
            # It has a session of its own, so that Ctrl-C reaches the demo alone, which then ends the server.
            self._process = subprocess.Popen(
                self._arguments, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, grace_s: float = 20.0) -> int | None:
        """End the server. Returns its exit code; None if it never started."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        if process.poll() is None:
            process.kill()
        if process.stdout is not None:
            process.stdout.close()
        return process.wait()

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        deadline = time.monotonic() + self._start_timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([process.stdout], [], [], left)[0]:
                break
            line = process.stdout.readline()
            if not line:
                raise ServerFailed(f"midstream serve ended while starting:\n{self._log_tail()}")
            if found := READY.search(line.decode(errors="replace")):
                self.url, self.model, self.deployment = found["url"], found["model"], found["deployment"]
                return
        raise ServerFailed(
            f"midstream serve was not ready after {self._start_timeout_s:.0f} s:\n{self._log_tail()}"
        )

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])


#: Directories in the output directory. Each run makes them anew.
OWN_DIRECTORIES = ("model", "bucket", "state", "publish")


class BrokenOff(Exception):
    """The run cannot go on. The message says why, and names the log."""


class Run(NamedTuple):
    rows: list[StepRow]
    first_rollouts_sha256: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=_positive, default=20, help="training steps, each with a swap")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="report.html and summary.json go here"
    )
    parser.add_argument("--groups", type=_positive, default=6, help="problems per step")
    parser.add_argument("--samples", type=_at_least_two, default=6, help="rollouts per problem")
    parser.add_argument("--tokens", type=_positive, default=32, help="tokens per turn")
    parser.add_argument("--replicas", type=_positive, default=2, help="of the server that is started")
    parser.add_argument(
        "--full-every", type=_positive, default=5, help="a full snapshot every so many, deltas between them"
    )
    parser.add_argument("--learning-rate", type=float, default=8e-4, help="of the trainer's optimizer")


def run_demo(options: argparse.Namespace) -> int:
    """Returns 0 if all checks hold, 1 if some do not or the run broke off, 130 after an interrupt. Raises ConfigError."""
    try:
        from rich.console import Console

        from midstream.demo.main import ServerFailed, ServerProcess
        from midstream.demo.progress import PLAIN_WIDTH, Display
        from midstream.models.tiny_moe import write_tiny_moe
    except ImportError as error:
        raise ConfigError(f"the demo needs {error.name}: pip install 'midstream[engine,demo]'") from error
    logging.getLogger("httpx").setLevel(logging.WARNING)
    out = _prepared(options.out)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    started = time.monotonic()
    # SIGTERM ends the server as Ctrl-C does.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Display(console, options.steps) as display:
            display.say(f"making the model (seed {options.seed})")
            write_tiny_moe(out / "model", seed=options.seed)
            display.say(f"starting midstream serve with {options.replicas} replicas")
            with ServerProcess(_serve_arguments(options, out), out / "serve.log") as server:
                run = _run(options, out, server, display)
    except KeyboardInterrupt:
        console.print("interrupted; the server is stopped", highlight=False)
        return 130
    except (ServerFailed, BrokenOff) as error:
        console.print(f"midstream demo: {error}", highlight=False, markup=False)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)
    return _conclude(options, out, run, time.monotonic() - started, console)


def _run(options: argparse.Namespace, out: Path, server: ServerProcess, display: Display) -> Run:
    import asyncio

    import torch

    from midstream.client import PublishError
    from midstream.demo.loop import NoRollouts

    # The replicas' engines share these cores.
    torch.set_num_threads(1)
    try:
        return asyncio.run(_loop(options, out, server, display))
    except asyncio.CancelledError:
        # By SIGTERM: see _loop.
        raise KeyboardInterrupt from None
    except BaseExceptionGroup as group:
        cause = _first_cause(group)
        if isinstance(cause, PublishError | NoRollouts):
            raise BrokenOff(f"{cause}\nthe server's log is {out / 'serve.log'}") from group
        raise
    finally:
        # The event loop had a handler of its own, and has removed it.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


async def _loop(options: argparse.Namespace, out: Path, server: ServerProcess, display: Display) -> Run:
    import asyncio

    import openai

    from midstream.client import SnapshotPublisher
    from midstream.demo.loop import Loop, LoopOptions
    from midstream.demo.records import rollouts_sha256
    from midstream.demo.rollouts import Sampler, SamplerOptions
    from midstream.demo.trainer import Trainer, TrainerOptions
    from midstream.models.tiny_moe import build_tokenizer

    run = asyncio.current_task()
    assert run is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, run.cancel)
    trainer = Trainer(out / "model", TrainerOptions(learning_rate=options.learning_rate))
    tokenizer = build_tokenizer()
    sampling = SamplerOptions(
        server.model, options.seed, options.tokens, trainer.model.config.num_experts_per_tok
    )
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="demo", max_retries=0, timeout=120.0
    ) as client:
        sampler = Sampler(client, sampling, lambda text: list(tokenizer(text)["input_ids"]))
        with SnapshotPublisher(
            server.url,
            _bucket(out),
            model=server.model,
            deployment=server.deployment,
            full_every=options.full_every,
            work_dir=out / "publish",
        ) as publisher:
            display.say("sampling the first rollouts")
            loop = Loop(
                LoopOptions(options.seed, options.steps, options.groups, options.samples),
                sampler,
                trainer,
                publisher,
                out / "model",
                display.row,
            )
            try:
                rows = await loop.run()
                return Run(rows, rollouts_sha256(loop.first_rollouts))
            finally:
                for error in sampler.errors[:5]:
                    display.console.print(f"failed request: {error}", highlight=False, markup=False)


def _conclude(options: argparse.Namespace, out: Path, run: Run, seconds: float, console: Any) -> int:
    from midstream.demo.progress import steps_table, summary_lines
    from midstream.demo.report import misses, summarise, write

    summary = summarise(run.rows, seed=options.seed, steps=options.steps, seconds=seconds)
    summary["first_rollouts_sha256"] = run.first_rollouts_sha256
    summary["versions"] = _versions()
    missed = misses(summary)
    write(out, run.rows, summary, missed)
    console.print(steps_table(run.rows))
    for line in summary_lines(summary, missed, out):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for name in ("bucket", "state", "publish"):
        shutil.rmtree(out / name, ignore_errors=True)
    return 1 if missed else 0


def _prepared(out: Path) -> Path:
    """Make the output directory, and remove the results of an earlier run from it. Raises ConfigError."""
    out = out.absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in OWN_DIRECTORIES:
            if (out / name).exists():
                shutil.rmtree(out / name)
        for name in ("report.html", "summary.json"):
            (out / name).unlink(missing_ok=True)
        (out / "bucket").mkdir()
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}") from error
    return out


def _serve_arguments(options: argparse.Namespace, out: Path) -> list[str]:
    return [
        *("--model", str(out / "model")),
        *("--replicas", str(options.replicas)),
        *("--port", "0"),
        *("--bucket", _bucket(out)),
        *("--state-dir", str(out / "state")),
    ]


def _bucket(out: Path) -> str:
    return (out / "bucket").as_uri()


def _versions() -> dict[str, str]:
    names = ("midstream", "torch", "transformers", "openai")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _at_least_two(text: str) -> int:
    return _at_least(text, 2)


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value
