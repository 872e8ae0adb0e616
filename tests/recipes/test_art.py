"""ART's pipeline against a running server, as examples/art shows it. Run by `make test-recipes`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from recipes import needs, run_recipe
from serving import serve

pytestmark = needs("art")
STEPS = 12


@pytest.mark.timeout(600)
def test_art_learns_through_the_tinker_api_from_data_that_are_at_most_two_snapshots_old(
    tmp_path: Path,
) -> None:
    with serve(tmp_path / "state") as server:
        taken = run_recipe("art", server, STEPS)
        log = server.log.read_text()
    assert taken[0].reward < 0.1 < 0.3 < taken[-1].reward, taken
    # The first step samples the run's own weights, and later ones do not wait for the newest.
    assert taken[0].behind == 0.0
    assert all(0 <= step.behind <= 2 for step in taken), taken
    assert any(step.behind > 0 for step in taken), taken
    # Each step's label stands for weights that the replicas loaded before they sampled.
    served = {int(step) for step in re.findall(r"serves snapshot tinker-\S+-step_(\d{6})", log)}
    assert served == set(range(STEPS + 1))
