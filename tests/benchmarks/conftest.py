"""The benchmarks are scripts, not a package: their folder is put on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
