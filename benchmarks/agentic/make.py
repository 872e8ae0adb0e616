"""Makes the traces in agentic/traces from packages of others, which give lengths; no text of theirs is kept.

Owns: `make agent-traces`. The packages are in an environment of their own, and are under the Apache License 2.0:
    coding    aiperf's agentic-code generator with its own default lengths: a system prompt and tools that all share, the task
              of a group, turns that add what tools returned, up to 167,000 tokens
    tools     bfcl-eval's multi-turn tasks: its simulated APIs execute the calls that it holds for right, one call per turn
    gym       the example rollouts in nemo-gym of environments with several turns
Always holds: equal versions give equal files. Waits are drawn here: aiperf's are of agents with a human, the others have none.
A token of a text is counted as four bytes.

    python -m agentic.make coding|tools|gym [--package DIR]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentic.trace import Trace, Trajectory, write

TRACES = Path(__file__).parent / "traces"
SEED = 37
GROUPS, STREAMS = 32, 8
LICENCE = "Apache-2.0"
#: Of the waits before a next turn, as a router's users measured them: 86 % within 1 s, 95 % within 10 s. The rest: within 30 s.
WAITS = ((0.86, 0.05, 1.0), (0.09, 1.0, 10.0), (0.05, 10.0, 30.0))
BYTES_PER_TOKEN = 4
#: Turns of a coding agent. aiperf asks for all four.
TURNS = {"mean": 14, "median": 12, "min": 3, "max": 30, "allow_truncation": True}
GYM = ("newton_bench", "finance_sec_search", "tales", "example_multi_step", "ns_tools")


def wait_s(rng: random.Random) -> float:
    (_, least, most), *_ = rng.choices(WAITS, weights=[share for share, _, _ in WAITS])
    return round(rng.uniform(least, most), 3)


def waits(name: str, count: int) -> tuple[float, ...]:
    rng = random.Random(f"{SEED}-{name}")
    return tuple(wait_s(rng) for _ in range(count))


def tokens(text: Any) -> int:
    """Of a text, or of a value as JSON."""
    written = text if isinstance(text, str) else json.dumps(text)
    return max(1, round(len(written.encode()) / BYTES_PER_TOKEN))


def coding() -> Trace:
    """A group's prompt is the beginning of its first session, so that all streams of it have one task."""
    from aiperf.dataset.agentic_code_gen.config import load_config
    from aiperf.dataset.agentic_code_gen.models import TurnCountConfig
    from aiperf.dataset.agentic_code_gen.session_synthesizer import SessionSynthesizer

    config = load_config("default").model_copy(update={"turns": TurnCountConfig(**TURNS)})
    sessions = SessionSynthesizer(config, seed=SEED).synthesize_sessions(GROUPS * STREAMS)
    found = []
    for place, session in enumerate(sessions):
        group, stream = divmod(place, STREAMS)
        prompt_len = sessions[group * STREAMS].turns[0].input_length
        first, *later = session.turns
        found.append(
            Trajectory(
                group,
                stream,
                prompt_len,
                tuple(turn.output_length for turn in (first, *later)),
                tuple(turn.new_tokens for turn in later),
                waits(f"coding-{place}", len(later)),
            )
        )
    about = {"source": "aiperf", "version": importlib.metadata.version("aiperf"), "licence": LICENCE}
    about |= {"config": "default", "turns": TURNS, "seed": SEED}
    return Trace(config.cache.layer1_tokens, tuple(found), about)


def tools() -> Trace:
    """Every fourth task is a group. Its streams take the same calls, since the package holds one way to each answer."""
    import bfcl_eval
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

    data = Path(bfcl_eval.__file__).parent / "data"
    name = "BFCL_v4_multi_turn_base.json"
    answers = {one["id"]: one["ground_truth"] for one in _lines(data / "possible_answer" / name)}
    documents = {
        kind: tokens((data / "multi_turn_func_doc" / file).read_text())
        for kind, file in MULTI_TURN_FUNC_DOC_FILE_MAPPING.items()
    }
    found = []
    for group, task in enumerate(list(_lines(data / name))[::4]):
        turns = list(_called(task, answers[task["id"]]))
        asked = tokens(task["question"][0])
        prompt_len = asked + sum(documents[kind] for kind in task["involved_classes"])
        outs, observed = zip(*turns, strict=True)
        found += [
            Trajectory(
                group,
                stream,
                prompt_len,
                outs,
                observed[:-1],
                waits(f"tools-{group}-{stream}", len(outs) - 1),
            )
            for stream in range(STREAMS)
        ]
    version = importlib.metadata.version("bfcl-eval")
    return Trace(0, tuple(found), {"source": "bfcl-eval", "version": version, "licence": LICENCE})


def _called(task: dict[str, Any], answers: Sequence[Sequence[str]]) -> Iterator[tuple[int, int]]:
    """Tokens of each call and of what comes behind it: its result, and before the last call of a request the next request."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

    requests = [*task["question"][1:], []]
    for calls, following in zip(answers, requests, strict=True):
        results, _ = execute_multi_turn_func_call(
            list(calls), task["initial_config"], task["involved_classes"], "trace", task["id"]
        )
        for number, (call, result) in enumerate(zip(calls, results, strict=True), start=1):
            yield tokens(call), tokens(result) + (tokens(following) if number == len(calls) else 0)


def gym(package: Path) -> Trace:
    """package: nemo-gym's wheel, unpacked: it needs a newer Python than this one, but its data do not."""
    found: list[Trajectory] = []
    for name in GYM:
        for rollout in _lines(package / "resources_servers" / name / "data" / "example_rollouts.jsonl"):
            asked = rollout["responses_create_params"]
            turns = list(_answered(rollout["response"]["output"]))
            if len(turns) < 2:
                continue
            outs, observed = zip(*turns, strict=True)
            prompt_len = tokens(asked["input"]) + tokens(asked.get("tools") or "")
            times = waits(f"gym-{len(found)}", len(outs) - 1)
            found.append(Trajectory(len(found), 0, prompt_len, outs, observed[:-1], times))
    (metadata,) = package.glob("nemo_gym-*.dist-info")
    about = {
        "source": "nemo-gym",
        "version": metadata.name.split("-")[1].removesuffix(".dist"),
        "licence": LICENCE,
    }
    return Trace(0, tuple(found), about | {"environments": GYM})


def _answered(items: Sequence[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Tokens of each turn's answer and of what the environment put behind it."""
    out = observed = 0
    for item in items:
        by_environment = item["type"] == "function_call_output" or item.get("role") == "user"
        if by_environment:
            observed += tokens(item.get("output") or item.get("content") or "")
            continue
        if observed:
            yield out, observed
            out = observed = 0
        out += tokens(
            {
                name: value
                for name, value in item.items()
                if name in ("arguments", "name", "content", "summary")
            }
        )
    if out:
        yield out, max(1, observed)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, path.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", choices=("coding", "tools", "gym"))
    parser.add_argument("--package", type=Path, help="of gym: its unpacked wheel")
    args = parser.parse_args()
    made = {"coding": coding, "tools": tools, "gym": lambda: gym(args.package)}[args.trace]()
    write(TRACES / f"{args.trace}.jsonl", made)


if __name__ == "__main__":
    main()
