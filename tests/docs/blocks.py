"""Every block of the README, the documents and the examples' pages, and what becomes of it: run here, run by another test, or
only shown.

Owns: BLOCKS, which names the blocks of each page in their order. `test_pasted_blocks.py` runs those that are run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Block(NamedTuple):
    """language: as the fence says it; "" for none."""

    page: str
    number: int
    language: str
    text: str


class Run(NamedTuple):
    """Run as pasted. how: `python`, with the one that `environment` names; `sh`; `toml`, read as a server's settings; or the
    path that a JSON body is posted to."""

    how: str
    environment: str = ".venv"


class Elsewhere(NamedTuple):
    """Run by a test of another tier or place, as it needs what is not here. test: a file or folder of tests/."""

    test: str
    why: str


class Shown(NamedTuple):
    """Nothing to run. why: what it is."""

    why: str


PYTHON, SH, SETTINGS = Run("python"), Run("sh"), Run("toml")
TINKER, HARNESS = Run("python", ".venv-tinker"), Run("python", ".venv-harness")
PICTURE, OUTPUT, NAMES = Shown("a picture"), Shown("output"), Shown("names to be filled in: KEY, DIR, URL")
PROXY = Shown("settings of a proxy")
TRACE_LINE, HEADER_LINE = Shown("a line of a trace"), Shown("a header")
TRANSCRIPT = Shown("commands with what they print; tests/docs/test_commands.py reads the commands")
SERVER_START = Elsewhere(
    "e2e/serving.py", "it installs everything, and starts the server that the next blocks ask"
)
RAY = Elsewhere("launch_ray", "it needs a Ray cluster")
MAKE = Elsewhere("test_makefile.py", "its targets are built by make, some for hours")
DEPLOY = Elsewhere("deploy", "it needs a container engine, a Kubernetes cluster or systemd")

BLOCKS: dict[str, list[Run | Elsewhere | Shown]] = {
    # It samples the base weights, so it comes before a page that publishes others.
    "docs/tinker.md": [TINKER, SETTINGS, OUTPUT],
    "README.md": [PICTURE, MAKE, PYTHON, PYTHON, TINKER],
    "CONTRIBUTING.md": [MAKE],
    "docs/api.md": [SETTINGS, PROXY, PROXY, NAMES],
    "docs/architecture.md": [PICTURE],
    "docs/cli.md": [TRANSCRIPT, OUTPUT, TRANSCRIPT, SH, OUTPUT],
    "docs/configuration.md": [SETTINGS],
    "docs/benchmarks.md": [TRACE_LINE],
    "docs/conformance.md": [NAMES],
    "docs/engines.md": [MAKE, OUTPUT, Elsewhere("e2e/test_sglang_served.py", "it needs SGLang")],
    "docs/exact-sessions.md": [OUTPUT],
    "docs/fireworks.md": [
        Elsewhere("fireworks", "the SDK is in an environment of its own, and the bucket needs two snapshots"),
        Elsewhere("fireworks", "it needs a bucket of records, and the SDK"),
        Elsewhere("fireworks", "it needs a policy that was published"),
    ],
    "docs/fuzzing.md": [MAKE],
    "docs/generate.md": [Run("/inference/v1/generate"), Run("/generate")],
    "docs/harnesses.md": [
        PYTHON,
        HARNESS,
        Elsewhere("e2e/test_verifiers.py", "verifiers takes packages of its own"),
    ],
    "docs/install.md": [
        NAMES,
        Elsewhere("packaging", "it compiles kernels"),
        DEPLOY,
        DEPLOY,
        DEPLOY,
        DEPLOY,
    ],
    "docs/kv-cache.md": [HEADER_LINE],
    "docs/messages.md": [HARNESS],
    "docs/metrics.md": [Elsewhere("e2e/test_prometheus.py", "it needs Prometheus")],
    "docs/policies.md": [
        NAMES,
        Elsewhere("e2e/test_policies_published.py", "it needs a model that PEFT wraps"),
        TRANSCRIPT,
        NAMES,
    ],
    "docs/publishing.md": [
        PYTHON,
        PYTHON,
        Elsewhere("client/test_client_push.py", "it needs receivers, and runs examples/push.py"),
        TRANSCRIPT,
        PYTHON,
    ],
    "docs/ray.md": [RAY, OUTPUT, SETTINGS, RAY, SETTINGS],
    "docs/recipes.md": [Elsewhere("vllm/test_vllm_push.py", "it needs vLLM")],
    "docs/records.md": [NAMES, NAMES, NAMES, OUTPUT, OUTPUT, NAMES, NAMES],
    "docs/runbook.md": [NAMES],
    "docs/soak.md": [MAKE],
    "docs/start.md": [SERVER_START, SH, SH, SH],
    "docs/state-machines.md": [PICTURE, PICTURE, PICTURE, PICTURE, PICTURE, PICTURE],
    "docs/tracing.md": [
        Elsewhere("e2e/test_tracing.py", "it needs a collector of traces"),
        SETTINGS,
        PICTURE,
        PICTURE,
        Elsewhere("e2e/test_tracing.py", "it needs a collector of traces"),
    ],
    "docs/verify.md": [
        NAMES,
        NAMES,
        Elsewhere("engine/test_explain.py", "it needs records"),
        Elsewhere("engine/test_explain.py", "it needs records"),
        Elsewhere("e2e/test_verify.py", "it needs a statement"),
        Elsewhere("e2e/test_verify.py", "it needs records"),
        SETTINGS,
    ],
    "docs/vllm.md": [
        Elsewhere("vllm", "it needs vLLM"),
        SETTINGS,
        Elsewhere("vllm", "it needs vLLM"),
        Elsewhere("e2e/test_remote_replica.py", "it needs two machines"),
        Elsewhere("vllm/test_vllm_two_machines.py", "it needs two machines"),
    ],
    "examples/art/README.md": [Elsewhere("recipes/test_art.py", "it needs the trainer"), OUTPUT],
    "examples/demo/README.md": [MAKE],
    "examples/explain/README.md": [
        Elsewhere("e2e/test_examples.py", "it starts a server"),
        OUTPUT,
        Elsewhere("recipes/test_explain_trl.py", "it needs the trainer"),
    ],
    "examples/plain_loop/README.md": [Elsewhere("e2e/test_examples.py", "it trains for minutes")],
    "examples/ray/README.md": [RAY, RAY, RAY, RAY],
    "examples/trl/README.md": [
        Elsewhere("recipes/test_trl.py", "it needs the trainer"),
        Elsewhere("recipes/test_trl.py", "it needs the trainer"),
    ],
    "examples/verifiers/README.md": [Elsewhere("recipes/test_verifiers_recipe.py", "it needs the trainer")],
    "examples/verl/README.md": [Elsewhere("recipes/test_verl.py", "it needs the trainer"), OUTPUT],
}


def pages() -> list[str]:
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    files += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
    return [str(file.relative_to(ROOT)) for file in files]


def blocks(page: str) -> Iterator[Block]:
    """In their order. Generated parts of references have signatures, which are not blocks to run."""
    text = re.sub(r"<!-- begin: .*?<!-- end: .*?-->", "", (ROOT / page).read_text(), flags=re.DOTALL)
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    for number, (language, inner) in enumerate(found):
        yield Block(page, number, language, inner)
