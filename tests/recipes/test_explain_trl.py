"""`midstream explain` over TRL's own log-probabilities: each planted mistake is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from recipes import ROOT, needs

EXAMPLE = ROOT / "examples" / "explain"
sys.path.append(str(EXAMPLE))


@needs("trl")
@pytest.mark.timeout(600)
def test_each_mistake_in_numbers_of_trl_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import mistakes

    assert mistakes.main(tmp_path) == 0
    trl = ROOT / ".venv-recipes" / "trl" / "bin" / "python"
    subprocess.run([trl, EXAMPLE / "with_trl.py", tmp_path], check=True, timeout=300)
    # TRL applies no masks, so a turn with a filter is never without a mistake.
    assert mistakes.explained(tmp_path, mistakes.MISTAKES | {"makes-none": "mask"}) == 0
    assert "MISSED" not in capsys.readouterr().out
