"""What `make setup` says while pip works, and when it fails: requirements/fetch.py before a stand-in for pip."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FETCH = ROOT / "requirements" / "fetch.py"
#: It prints, as pip does, and then waits until the test has read that it goes on.
PIP = """#!{python}
import os, sys
if "broken" in sys.argv:
    print("ERROR: No matching distribution found for nothing==1")
    sys.exit(7)
print("Collecting torch==2.13.0", flush=True)
print("  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (190.5 MB)", flush=True)
print("  Using cached numpy-2.4.6-cp311-cp311-linux_x86_64.whl (18.0 MB)", flush=True)
open(os.environ["GATE"]).read()
print("Installing collected packages: numpy, torch", flush=True)
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP.format(python=sys.executable))
    python.chmod(0o755)
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "env"


def run(environment: Path, code: str) -> subprocess.Popen[str]:
    script = f"import sys; sys.path.insert(0, {str(FETCH.parent)!r}); import fetch; sys.exit({code})"
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "GATE": str(environment.parent / "gate")},
    )  # fmt: skip


def test_a_wait_is_said_with_what_is_fetched_and_how_much_so_far(environment: Path) -> None:
    pins = environment.parent / "pins.txt"
    (environment.parent / "more.txt").write_text("# Of both.\nnumpy==2.4.6\nsympy==1.14\n")
    pins.write_text("-r more.txt\ntorch==2.13.0  # the CPU's\n")
    running = run(environment, f"fetch.main({str(environment)!r}, 'vLLM', '-r', {str(pins)!r}, quiet_s=0.02)")
    assert running.stdout is not None
    first = running.stdout.readline()
    assert first == f"setup: vLLM into {environment}: 3 packages\n"
    # pip waits; the lines go on.
    wanted = "2 packages and 208 MB so far; fetching numpy-2.4.6-cp311-cp311-linux_x86_64 (18.0 MB)"
    assert any(wanted in line for line in iter(running.stdout.readline, ""))
    (environment.parent / "gate").write_text("go on")
    out, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (0, "")
    last = out.splitlines()[-1]
    assert last.startswith(
        "setup: vLLM is installed: 2 packages, 208 MB, 18 MB of them from pip's cache, in "
    )


def test_what_is_measured_is_of_what_the_makefile_installs() -> None:
    named = set(re.findall(r"\$\(FETCH\) \S+ ['\"]([^'\"]+)['\"]", (ROOT / "Makefile").read_text()))
    measured = json.loads((ROOT / "requirements" / "sizes.json").read_text())
    assert {what for what in measured if what.replace("requirements/tinker.txt", "$<") not in named} == set()


def test_what_pip_said_is_shown_when_it_fails(environment: Path) -> None:
    running = run(environment, f"fetch.main({str(environment)!r}, 'nothing', 'broken')")
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 7
    assert "ERROR: No matching distribution found for nothing==1\n" in errors
    assert errors.endswith("setup: nothing: pip ended with 7\n")
