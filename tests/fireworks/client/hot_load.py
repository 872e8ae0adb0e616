"""DeploymentManager.hotload_and_wait for each signal in turn; after each, the status and what the deployment samples."""

from __future__ import annotations

import time
from typing import Any

import httpx
from sdk import answer, arguments, manager, samples

given = arguments()
deployments = manager(given)


def hot_load(signal: dict[str, Any]) -> dict[str, Any]:
    started, refusal, ok = time.monotonic(), None, None
    try:
        ok = deployments.hotload_and_wait(
            deployment_id=given.deployment,
            base_model=given.model,
            snapshot_identity=signal["identity"],
            incremental_snapshot_metadata=signal.get("incremental"),
            reset_prompt_cache=signal.get("reset_prompt_cache", True),
            timeout_seconds=200,
            path=signal.get("path"),
        )
    except httpx.HTTPStatusError as error:
        refusal = {"status": error.response.status_code, **error.response.json()["error"]}
    return {
        "ok": ok,
        "refusal": refusal,
        "error": deployments.last_hotload_error_message,
        "seconds": time.monotonic() - started,
        "status": deployments.hotload_check_status(given.deployment, given.model),
        "samples": samples(given, given.prompt, n=4, max_tokens=5),
    }


answer({"account": deployments.account_id, "steps": [hot_load(signal) for signal in given.signals]})
