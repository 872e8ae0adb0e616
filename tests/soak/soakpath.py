"""Imported first: the folders whose modules the soak shares with other tests, for `import`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), *(str(HERE.parent / folder) for folder in ("", "e2e", "simulation"))]
