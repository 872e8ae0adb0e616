"""How a process begins: its module is imported without a search for garbage, and runs with one."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.core.child import importing

MODULE = """
import gc, sys
while_importing = gc.isenabled()
def main():
    print(while_importing, gc.isenabled(), *sys.argv[1:])
    return 3
"""


def test_a_module_is_imported_without_the_collector_and_runs_with_it(tmp_path: Path) -> None:
    (tmp_path / "small_child.py").write_text(MODULE)
    command = [sys.executable, "-m", "midstream.core.child", "small_child", "replica-0", "7"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("False True replica-0 7\n", "", 3)


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_as_it_was_after_an_import_that_fails(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(ImportError), importing():
            importlib.import_module("midstream.not_there")
        assert gc.isenabled() == on
    finally:
        gc.enable()
