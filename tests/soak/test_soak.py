"""A small soak: few streams for under a minute, one trouble after another, and nothing is found.

It runs in a process of its own, so that its clients' sockets and the oracle's process end with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from soak import Plan, shown, soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def small(out: Path) -> None:
    plan = Plan(
        minutes=0.7,
        streams=16,
        replicas=2,
        out=out,
        storm=(0.2, 0.6),
        trouble_every_s=1.0,
        swap_every_s=2.0,
        sample_every_s=1.0,
        warm_up_s=10.0,
        samplers=1,
    )
    outcome = soak(plan)
    found = {
        "found": outcome.found,
        "tokens": outcome.tokens,
        "counts": outcome.counts,
        "shown": shown(outcome),
    }
    (out / "outcome.json").write_text(json.dumps(found, default=str))


@pytest.mark.variant
def test_a_small_soak_finds_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True, timeout=800)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["found"] == [], outcome["shown"]
    counts = outcome["counts"]
    assert outcome["tokens"] > 1000
    assert counts.get("tokens unchecked", 0) == 0
    assert counts["tokens computed"] + counts["tokens looked up"] == outcome["tokens"]
    assert counts["swaps"] > 1
    assert counts["tinker: sample"] > 0
    assert any(what.startswith("trouble") for what in counts), "the adversary did nothing"
    assert any(what.startswith("hostile") for what in counts)
    measured = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    roles = {line["of"].split()[0] for line in measured}
    assert roles >= {"supervisor", "gateway", "replica", "engine", "front", "server"}


if __name__ == "__main__":
    small(Path(sys.argv[1]))
