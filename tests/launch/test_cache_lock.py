"""Two replica processes never share a cache directory, also when the server before was killed and its replica still ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from midstream.core.errors import ConfigError
from midstream.launch.replica import alone

HOLDER = """
import sys
from pathlib import Path
from midstream.launch.replica import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_the_next_waits_for_the_one_before_and_says_so_when_that_does_not_end(tmp_path: Path) -> None:
    cache = tmp_path / "snapshots" / "replica-0"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(cache)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError, match="replica-0: another replica process uses it"), alone(cache, 0.0):
        pass
    with alone(tmp_path / "snapshots" / "replica-1", 0.0):
        pass
    holder.communicate(b"end\n", timeout=60)
    with alone(cache, 0.0):
        pass
