"""The demo is an example: its modules are imported from there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))
