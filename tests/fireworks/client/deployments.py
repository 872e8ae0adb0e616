"""A deployment's life through DeploymentManager and through `fireworks.Fireworks().deployments`."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fireworks
import httpx
from fireworks import Fireworks
from fireworks.training.sdk.deployment import DeploymentConfig
from sdk import answer, arguments, manager, samples

given = arguments()
deployments = manager(given)
client = Fireworks(api_key=given.api_key, account_id="acme", base_url=given.url, max_retries=0)
NEW = "rollouts-2"


def refusal(call: Any) -> dict[str, Any]:
    try:
        call()
    except fireworks.APIStatusError as error:
        return {"status": error.status_code, **error.body["error"]}
    return {"status": 200}


def names() -> list[str]:
    return [deployment.name or "" for deployment in client.deployments.list(page_size=1)]


config = DeploymentConfig(deployment_id=NEW, base_model=given.model, accept_shapeless_risk=True)
result: dict[str, Any] = {"before": names(), "missing": deployments.get(NEW)}
result["created"] = asdict(deployments.create_or_get(config))
result["again"] = asdict(deployments.create_or_get(config))
result["ready"] = asdict(deployments.wait_for_ready(NEW, timeout_s=300, poll_interval_s=0.5))
result["typed"] = client.deployments.get(NEW).to_dict()
result["listed"] = names()
result["conflict"] = refusal(lambda: client.deployments.create(base_model=given.model, deployment_id=NEW))
result["unknown_model"] = refusal(
    lambda: client.deployments.create(base_model="accounts/acme/models/none", deployment_id="d3")
)

given.deployment = NEW
bucket = Path(result["ready"]["hot_load_bucket_url"].removeprefix("file://"))
shutil.copytree(given.checkpoint, bucket / given.identity)
result["hot_loaded"] = deployments.hotload_and_wait(NEW, given.model, given.identity)
result["samples"] = samples(given, given.prompt, max_tokens=5)
result["others"] = deployments.hotload_check_status(given.first, given.model)

result["reattached"] = asdict(
    deployments.reattach_trainer(
        NEW,
        base_model=given.model,
        trainer_job_name="accounts/acme/rlorTrainerJobs/job-1",
        timeout_s=300,
        poll_interval_s=0.5,
        hot_load_transition_type="SYNC",
    )
)
result["renamed"] = client.deployments.update(NEW, base_model=given.model, display_name="Second").to_dict()
try:
    deployments.update(NEW, {"displayName": "Third"}, "no_such_field")
except httpx.HTTPStatusError as error:
    result["unknown_mask"] = {"status": error.response.status_code, **error.response.json()["error"]}
deployments.scale_to_zero(NEW)
result["scaled"] = client.deployments.get(NEW).to_dict()
deployments.delete(NEW)
deployments._wait_for_deletion(NEW, timeout_s=300, poll_interval_s=0.5)
result["after"] = names()
answer(result)
