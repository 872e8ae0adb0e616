"""vLLM's own four-phase update through midstream's door, beside the same update of a bare vLLM server.

Owns: the part of `make bench-push` that needs vLLM. Two servers run with one flag more than usual, vLLM's weight transfer with
the backend `gloo` of midstream's worker extension: one is asked directly, the other through a gateway and a replica
(`vllm.weight_transfer`). One trainer, vLLM's own client in vLLM's own environment (four_phase_trainer.py), updates both in
turns, in the other order each round. No server has requests.

Reported for each phase of control (init, start, update, finish, shutdown) in medians over the rounds, in ms: what the client
waited for either, and the difference. midstream promises more in two of them, which is shown beside:
    update   the server is paused before the first tensor and vLLM's own start is called then, and the tensors are written down
    finish   returns once the weights serve and are proved: `finish_swap_ms` of it is the swap, as the replica reports it.
             `finish_control_ms` is what is left without the proof, which vLLM does not make: the swap's verifying and check

    python vllm_push.py [--models 10MB 1GB] [--rounds 7] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from engine import vllm_versions
from hardware import provenance, write_result
from servers import CONTEXT, VLLM_PYTHON, Model, Vllm
from swaps import say, write_models
from vllm_servers import OverVllm

from midstream.client import ServerClient
from midstream.engine.vllm.arguments import command_line, environment

PHASES = ("init", "start", "update", "finish", "shutdown")
BARE, OURS = "bare", "midstream"
SOURCE = Path(__file__).parents[1] / "src"
BACKEND = "gloo"
#: Parts of a swap, as the replica reports them.
SWAP = ("fetch_ms", "verify_ms", "stage_ms", "check_ms")
PROOF = ("verify_ms", "check_ms")


class BareVllm(Vllm):
    """vLLM's own server, with the flags that midstream gives."""

    name = "vllm-bare"

    def command(self) -> list[str]:
        args = ["--max-model-len", str(CONTEXT), "--enforce-eager"]
        served = self.model.name
        return command_line(
            str(VLLM_PYTHON), self.model.directory, served, self.port, 1, args, weight_transfer=BACKEND
        )

    def environment(self) -> dict[str, str]:
        return environment({}, super().environment(), str(VLLM_PYTHON))


class InPlaceVllm(OverVllm):
    """midstream over one vLLM, into which trainers write."""

    def command(self) -> list[str]:
        command = super().command()
        config = Path(command[command.index("--config") + 1])
        # What is kept for restarts is written behind the commit, and would run beside the next round.
        more = f'weight_transfer = "{BACKEND}"\n[push]\nkeep = false\n'
        config.write_text(config.read_text() + more)
        return command


class Trainer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def update(self, url: str, version: str) -> dict[str, float]:
        """Seconds of each phase."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"url": url, "version": version}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        # vLLM prints lines of its own.
        while not (line := self._process.stdout.readline()).startswith("{"):
            if not line:
                raise SystemExit("the trainer has ended")
        found: dict[str, float] = json.loads(line)
        return found


@contextmanager
def trainer(checkpoint: Path) -> Iterator[Trainer]:
    process = subprocess.Popen(
        [str(VLLM_PYTHON), str(Path(__file__).with_name("four_phase_trainer.py")), str(checkpoint)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )
    try:
        made = Trainer(process)
        made.answer()
        yield made
    finally:
        process.kill()
        process.communicate()


def measured(model: Model, directories: Sequence[Path], rounds: int, folder: Path) -> dict[str, Any]:
    """The line of one model. It begins with a round that is not counted."""
    model = Model(model.name, model.directory, model.vocabulary, 2, "0-1", 1)
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    args = ("--max-model-len", str(CONTEXT), "--enforce-eager")
    found: dict[str, list[dict[str, float]]] = {BARE: [], OURS: []}
    with (
        BareVllm(model, folder) as bare,
        InPlaceVllm(model, folder, args=args, env=env) as ours,
        trainer(directories[1]) as writing,
        closing(ServerClient(f"http://127.0.0.1:{ours.port}")) as client,
    ):
        urls = {BARE: f"http://127.0.0.1:{bare.port}", OURS: f"http://127.0.0.1:{ours.port}"}
        for number in range(rounds + 1):
            order = (BARE, OURS) if number % 2 else (OURS, BARE)
            for name in order:
                took = {
                    f"{phase}_ms": s * 1e3 for phase, s in writing.update(urls[name], f"v{number}").items()
                }
                if name == OURS:
                    swap = client.snapshots.status().replicas[0].last_swap or {}
                    took["finish_swap_ms"] = sum(swap[part] for part in SWAP)
                    took |= {f"finish_{part}": swap[part] for part in SWAP}
                    took["finish_control_ms"] = took["finish_ms"] - sum(swap[part] for part in PROOF)
                say(f"{model.name} {name}: {', '.join(f'{k} {v:.1f}' for k, v in took.items())}")
                if number:
                    found[name].append(took)
    return {"model": model.name, "bytes": _bytes(directories[1]), **differences(found)}


def differences(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Medians of both, and of what midstream takes more in each round."""
    sides = {
        side: {key: round(statistics.median(one[key] for one in runs), 2) for key in runs[0]}
        for side, runs in found.items()
    }
    pairs = list(zip(found[BARE], found[OURS], strict=True))
    more = {
        phase: round(statistics.median(ours[f"{phase}_ms"] - bare[f"{phase}_ms"] for bare, ours in pairs), 2)
        for phase in PHASES
    }
    control = [ours["finish_control_ms"] - bare["finish_ms"] for bare, ours in pairs]
    return {**sides, "more_ms": {**more, "finish_control": round(statistics.median(control), 2)}}


def _bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["10MB", "1GB"], choices=["10MB", "1GB"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/vllm-push.json")
    options = parser.parse_args()
    if not VLLM_PYTHON.exists():
        parser.error(f"{VLLM_PYTHON} is missing; `make setup-vllm` makes it")
    with tempfile.TemporaryDirectory(prefix="bench-vllm-push-") as folder:
        lines = []
        for name, (model, directories) in write_models(options.models, Path(folder), "cpu").items():
            logs = Path(folder) / f"logs-{name}"
            logs.mkdir()
            lines.append(measured(model, directories, options.rounds, logs))
    result = provenance(rounds=options.rounds, models=options.models, backend=BACKEND)
    result["versions"]["vllm environment"] = vllm_versions()
    result["lines"] = lines
    if options.write:
        say(f"wrote {write_result('vllm-push', result)}")
    print(json.dumps(lines, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
