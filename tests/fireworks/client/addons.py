"""LoRA add-ons through `fireworks.Fireworks().lora`: loaded, sampled by name, replaced, listed, changed, unloaded."""

from __future__ import annotations

from typing import Any

import fireworks
from fireworks import Fireworks
from sdk import answer, arguments

given = arguments()
client = Fireworks(api_key=given.api_key, account_id="acme", base_url=given.url, max_retries=0)
DEPLOYMENT = f"accounts/acme/deployments/{given.deployment}"


def refusal(call: Any) -> dict[str, Any]:
    try:
        call()
    except fireworks.APIStatusError as error:
        return {"status": error.status_code, **error.body["error"]}
    return {"status": 200}


def sampled(model: str) -> dict[str, Any]:
    completion = client.completions.create(
        model=model, prompt=given.prompt, max_tokens=6, seed=1, logprobs=True, return_token_ids=True
    )
    choice = completion.choices[0].to_dict()
    return {
        "model": completion.model,
        "tokens": choice["token_ids"],
        "logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
    }


def named(name: str) -> str:
    return f"accounts/acme/models/{name}"


def listed() -> list[str]:
    return [one.model or "" for one in client.lora.list(page_size=1)]


def load(name: str, **more: Any) -> Any:
    return client.lora.load(model=named(name), deployment=DEPLOYMENT, **more)


result: dict[str, Any] = {"before": listed()}
result["loaded"] = load("red", display_name="Red", description="of the red team").to_dict()
result["got"] = client.lora.get("red").to_dict()
load("blue")
result["listed"] = listed()
result["models"] = {model.name: model.kind for model in client.models.list()}
result["red"] = sampled(named("red"))
result["red_on"] = sampled(f"{named('red')}#{DEPLOYMENT}")
result["blue"] = sampled("blue")
result["base"] = sampled(given.model)
result["elsewhere"] = refusal(lambda: sampled(f"{named('red')}#accounts/acme/deployments/none"))
result["twice"] = refusal(lambda: load("red"))
result["renamed"] = client.lora.update("red", display_name="Crimson").to_dict()
result["moved"] = refusal(lambda: client.lora.update("red", model=named("blue")))
for field, value in (("serverless", True), ("public", True), ("default", False)):
    result[field] = refusal(lambda field=field, value=value: load("green", **{field: value}))
result["nowhere"] = refusal(lambda: load("nothing-there"))
result["unfit"] = refusal(lambda: load("unfit"))
result["no_deployment"] = refusal(lambda: client.lora.load(model=named("green"), deployment="none"))
result["filtered"] = refusal(lambda: client.lora.list(filter='model="red"'))
result["after_refusals"] = listed()
result["replacing"] = load("green", replace_merged_addon=True).to_dict()
result["green"] = sampled(named("green"))
result["replaced"] = [refusal(lambda name=name: sampled(named(name))) for name in ("red", "blue")]
result["unfit_replaces"] = refusal(lambda: load("unfit", replace_merged_addon=True))
result["green_still"] = sampled(named("green"))
result["again"] = load("green", replace_merged_addon=True).to_dict()
client.lora.unload("green")
result["unloaded"] = [refusal(lambda: client.lora.get("green")), refusal(lambda: sampled(named("green")))]
result["after"] = [name for name in listed() if name != named("kept")]
result["kept"] = sampled("kept")
answer(result)
