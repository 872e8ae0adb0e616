"""`midstream conformance` against two vLLM replicas: every promise holds that the engine does not say it lacks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from serving import command
from vllm_bed import REPLICAS, Bed

NO_ROUTES = "has no routes"
#: Rows that are skipped, and a part of why.
SKIPPED = {
    "openai.seed": "has no reproducible_sampling",
    "echo.cached": "has no cached_prompt_logprobs",
    "status.key": "none are set",
    "messages.key": "none are set",
    "responses.key": "none are set",
}
#: Of versions up to 0.28.
WITHOUT_RANKS = {
    "logprobs.sampling": "has no sampling_logprobs",
    "routes.completions": NO_ROUTES,
    "routes.chat": NO_ROUTES,
    "routes.stream": NO_ROUTES,
    "routes.echo": NO_ROUTES,
    "routes.echo_last": NO_ROUTES,
    "routes.alignment": NO_ROUTES,
    "routes.warm": NO_ROUTES,
}
LIMIT_S = 600


def test_every_row_passes_but_those_that_the_engine_says_it_lacks(bed: Bed, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    places = ("--bucket", bed.server.bucket.as_uri(), "--checkpoint", str(bed.checkpoint))
    done = subprocess.run(
        command("conformance", bed.server.url, *places, "--json", str(out)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    found = json.loads(out.read_text())
    failed = [(row["id"], row["why"], row["evidence"]) for row in found["rows"] if row["verdict"] == "fail"]
    assert failed == []
    why = {row["id"]: row["why"] for row in found["rows"] if row["verdict"] == "skip"}
    expected = SKIPPED | ({} if bed.has_ranks else WITHOUT_RANKS)
    assert why.keys() == expected.keys()
    assert [(name, why[name]) for name, reason in expected.items() if reason not in why[name]] == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["engine"].startswith("vllm 0.")
    assert found["replicas"] == REPLICAS
