"""Fuzzes the parsers of bytes from outside, guided by coverage: python tests/fuzz/fuzz.py --seconds 60 --targets safetensors

Owns: one process per target under atheris, which instruments midstream and nothing else; what is printed of them.
Always holds: a target begins with its seeds and its folder in corpora/. A finding's bytes are kept and named, and the exit
code is 1. `--replay FILE` runs one input without atheris. docs/fuzzing.md says what to do with a finding.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CORPORA = HERE / "corpora"
PROGRESS_S = 5.0
MEMORY_MB = 2048
#: Beyond its time a process gets so long to start and to end.
GRACE_S = 120.0
LATE = {
    "trainer_states": ("midstream_tinker.trainer.checkpoints", "midstream_tinker.trainer.optimizer"),
    "adapters": ("midstream.engine.adapter",),
}
_STATUS = re.compile(r"^#(\d+)\s+\S+\s+cov: (\d+) ft: (\d+) corp: (\d+)", re.MULTILINE)
_DONE = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
_ARTIFACT = re.compile(r"Test unit written to (\S+)")


@dataclass
class Run:
    """One target's process. log: where it writes. found: its finding, if it has one."""

    name: str
    work: Path
    process: subprocess.Popen[bytes]
    log: Path
    until: float
    began_with: int
    executions: int = 0
    coverage: int = 0
    corpus: int = 0
    found: list[Path] = field(default_factory=list)

    @property
    def new(self) -> int:
        return len(list((self.work / "corpus").iterdir())) - self.began_with

    def look(self) -> None:
        text = self.log.read_text(errors="replace")
        if lines := _STATUS.findall(text):
            self.executions, self.coverage, _, self.corpus = map(int, lines[-1])
        if done := _DONE.search(text):
            self.executions = int(done[1])
        self.found = [Path(path) for path in dict.fromkeys(_ARTIFACT.findall(text))]

    def complaint(self) -> str:
        """What went wrong, as its log's last lines say it; empty when nothing did."""
        if self.process.returncode == 0 and not self.found:
            return ""
        lines = self.log.read_text(errors="replace").splitlines()
        kept = [line for line in lines if not line.startswith(("#", "INFO", "stat::"))]
        return "\n".join(line[:400] for line in kept[-25:])


def names_of_targets() -> list[str]:
    """Without importing them: this process stays small."""
    listed = (HERE / "targets" / "__init__.py").read_text()
    return re.findall(r'^    "(\w+)": ', listed, re.MULTILINE)


def start(name: str, options: argparse.Namespace) -> Run:
    work = options.work / name
    corpus, findings = work / "corpus", work / "findings"
    for made in (corpus, findings):
        made.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__)), "--one", name, "--work", str(options.work)]
    command += ["--seconds", str(options.seconds)]
    for option, value in (("--runs", options.runs), ("--plant", options.plant), ("--seed", options.seed)):
        if value is not None:
            command += [option, str(value)]
    log = work / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment())
    until = time.monotonic() + options.seconds + GRACE_S
    return Run(name, work, process, log, until, len(list(corpus.iterdir())))


def environment() -> dict[str, str]:
    """One core for each process, and this checkout's modules."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def fuzz_all(names: Sequence[str], options: argparse.Namespace) -> list[Run]:
    waiting, running, ended = list(names), list[Run](), list[Run]()
    printed = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                running.append(start(waiting.pop(0), options))
            wait_for_one(running)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                ended.append(run)
                run.look()
                print(line(run), flush=True)
            if time.monotonic() - printed >= PROGRESS_S:
                printed = time.monotonic()
                for run in running:
                    run.look()
                    print(f"  ... {line(run)}", flush=True)
    finally:
        for run in running:
            run.process.kill()
            run.process.wait()
    return ended


def wait_for_one(running: Sequence[Run]) -> None:
    """Until the first of them ends, or for a second. One that is over its time is killed."""
    try:
        running[0].process.wait(1)
    except subprocess.TimeoutExpired:
        for run in running:
            if time.monotonic() > run.until:
                run.process.kill()


def line(run: Run) -> str:
    findings = f"FOUND {', '.join(map(str, run.found))}" if run.found else ""
    if not findings and run.process.returncode not in (None, 0):
        findings = f"ended with {run.process.returncode}, see {run.log}"
    return f"{run.name:20}{run.executions:10} runs  {run.coverage:6} edges  {run.new:5} new inputs  {findings}".rstrip()


def report(runs: Sequence[Run]) -> int:
    print(f"\n{'target':20}{'executions':>12}{'edges':>8}{'new':>7}{'findings':>10}")
    failed = 0
    for run in sorted(runs, key=lambda run: run.name):
        wrong = bool(run.found) or run.process.returncode != 0
        failed += wrong
        print(f"{run.name:20}{run.executions:12}{run.coverage:8}{run.new:7}{len(run.found) or int(wrong):10}")
    for run in runs:
        if complaint := run.complaint():
            print(f"\n{run.name}: {', '.join(map(str, run.found)) or run.log}\n{complaint}")
    return 1 if failed else 0


# -- inside a target's process


def find_targets() -> None:
    """Targets are imported from this folder, and what they share with tests from the folder of all tests."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]


def fuzz_one(options: argparse.Namespace) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    find_targets()
    with atheris.instrument_imports(include=["midstream"]):
        from targets import TARGETS

        target = TARGETS[options.one]
        # What a target imports late, because of torch. Within an input it would look like a hang.
        for module in LATE.get(options.one, ()):
            importlib.import_module(module)
    if options.plant:
        import planted_faults

        planted_faults.FAULTS[options.plant].put_in()
    work = options.work / options.one
    seeds = work / "seeds"
    seeds.mkdir(exist_ok=True)
    for seed in target.seeds():
        (seeds / hashlib.sha1(seed).hexdigest()[:16]).write_bytes(seed)
    dictionary = work / "words.txt"
    dictionary.write_text("".join(f'"{escaped(word)}"\n' for word in target.words))
    arguments = [
        str(HERE / "fuzz.py"),
        f"-max_total_time={options.seconds}",
        f"-max_len={target.max_bytes}",
        f"-timeout={target.timeout_s}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-dict={dictionary}",
        f"-artifact_prefix={work}/findings/",
        "-print_final_stats=1",
        *([f"-runs={options.runs}"] if options.runs is not None else []),
        *([f"-seed={options.seed}"] if options.seed is not None else []),
        str(work / "corpus"),
        str(seeds),
        *([str(CORPORA / options.one)] if (CORPORA / options.one).is_dir() else []),
    ]
    atheris.Setup(arguments, noted(target.run, work / "findings"), enable_python_coverage=True)
    atheris.Fuzz()


def noted(run: Callable[[bytes], object], findings: Path) -> Callable[[bytes], None]:
    """As `run`, but an input that raises is written to `findings` at once, under libFuzzer's name for it.

    libFuzzer writes it when the process exits, behind the libraries' own handlers. A run ended in those once, without it.
    """

    def one(data: bytes) -> None:
        try:
            run(data)
        except Exception:
            file = findings / f"crash-{hashlib.sha1(data).hexdigest()}"
            file.write_bytes(data)
            print(f"Test unit written to {file}", file=sys.stderr, flush=True)
            raise

    return one


def escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def replay(file: Path, name: str) -> None:
    """Raises what the target raises."""
    find_targets()
    from targets import TARGETS

    TARGETS[name].run(file.read_bytes())
    print(f"{name}: {file} passes")


def target_of(file: Path, given: Sequence[str]) -> str:
    """By the folder that the file is in, unless a target is given."""
    names = [*given, *(part for part in reversed(file.resolve().parts) if part in names_of_targets())]
    if not names:
        raise SystemExit(f"{file}: of which target? say --targets NAME")
    return names[0]


def parsed(arguments: Iterator[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--targets", nargs="+", default=[], choices=names_of_targets(), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--work", type=Path, default=ROOT / ".fuzz", help="inputs that were found stay here")
    parser.add_argument("--runs", type=int, help="executions of each target at most")
    parser.add_argument("--seed", type=int, help="of the mutations")
    parser.add_argument("--plant", help="a fault of planted_faults.py to put in")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one input, without atheris")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(None if arguments is None else list(arguments))
    options.work = options.work.resolve()
    return options


def main() -> None:
    options = parsed()
    if options.replay:
        replay(options.replay, target_of(options.replay, options.targets))
    elif options.one:
        fuzz_one(options)
    else:
        sys.exit(report(fuzz_all(options.targets or names_of_targets(), options)))


if __name__ == "__main__":
    main()
