"""What a person reads who installed midstream without its extras."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Runs in each interpreter that finds it, before anything else: these packages are not found then.
WITHOUT = """
import importlib.machinery as machinery
found = machinery.PathFinder.find_spec
gone = {gone!r}
machinery.PathFinder.find_spec = (
    lambda name, path=None, target=None: None if name.partition(".")[0] in gone else found(name, path, target)
)
"""
ENGINE = {"torch", "transformers", "tokenizers", "safetensors", "jinja2", "llguidance", "peft"}
OTHERS = {"openai", "ray", "vllm", "rich", "shtab"}


def run_without(gone: set[str], folder: Path, *arguments: str) -> tuple[int, str, str]:
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WITHOUT.format(gone=gone))
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "midstream.cli", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("gone", "arguments", "says"),
    [
        (ENGINE, ["serve", "--port", "0"], "the embedded engine needs torch, "),
        (ENGINE, ["replica", "--port", "0"], "the embedded engine needs torch, "),
        (ENGINE, ["serve", "--port", "0", "--engine", "vllm"], "the vllm engine needs tokenizers, "),
        (ENGINE, ["model", "tiny-moe", "made"], "needs torch, not installed here"),
        (
            ENGINE,
            ["serve", "--replicas", "0", "--replica-url", "http://127.0.0.1:1", "--port", "0"],
            "the built-in model needs torch, ",
        ),
    ],
)
def test_a_core_install_says_what_to_install(
    gone: set[str], arguments: list[str], says: str, tmp_path: Path
) -> None:
    code, out, err = run_without(gone | OTHERS, tmp_path, *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"midstream {arguments[0]}: {says}")
    assert "pip install 'midstream[engine]'" in err


def test_an_engine_of_vllm_without_vllm_says_three_ways_out(tmp_path: Path) -> None:
    code, out, err = run_without({"vllm"}, tmp_path, "serve", "--port", "0", "--engine", "vllm")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"midstream serve: --engine vllm: vLLM is not installed for {sys.executable}: ")
    for way in ("pip install vllm", "--vllm-python", "--vllm-url"):
        assert way in err


def test_an_interpreter_of_vllm_that_is_not_there_is_named(tmp_path: Path) -> None:
    arguments = ("serve", "--port", "0", "--engine", "vllm", "--vllm-python", "/no/such/python")
    code, _, err = run_without(set(), tmp_path, *arguments)
    assert (code, err) == (
        2,
        "midstream serve: --vllm-python /no/such/python: cannot be run: No such file or directory\n",
    )
