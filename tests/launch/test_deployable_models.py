"""Which models a server knows, and what its command line says of the default deployment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from midstream.core.config import DeploymentSettings, GatewaySettings, Settings
from midstream.core.errors import ConfigError
from midstream.launch import gateway
from midstream.launch.gateway import default_deployment, first_answer
from midstream.launch.models import known_models, model_directory
from midstream.launch.specs import GatewaySpec
from midstream.ledger import DeploymentRow, Ledger, LedgerUnavailable, sqlite_url


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    directory = tmp_path / "policy"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_the_command_lines_model_the_settings_and_the_built_in_one_are_known(
    policy: Path, tmp_path: Path
) -> None:
    settings = Settings(
        deployment=DeploymentSettings(model=str(policy)),
        models={"other": str(policy)},
        state_dir=str(tmp_path),
    )
    name, known = known_models(settings)
    assert name == "policy"
    built_in = tmp_path / "models" / "tiny-moe"
    assert known == {"policy": policy, "other": policy, "tiny-moe": built_in}
    assert (
        known_models(msgspec.structs.replace(settings, deployment=DeploymentSettings(model="other")))[0]
        == "other"
    )
    assert known_models(Settings(state_dir=str(tmp_path))) == ("tiny-moe", {"tiny-moe": built_in})
    assert model_directory(known, "other", tmp_path) == policy
    with pytest.raises(ConfigError, match=r"models\.gone"):
        model_directory(known, "gone", tmp_path)


@pytest.mark.parametrize(
    ("model", "models", "says"),
    [
        ("/no/such", {}, "--model /no/such: neither a built-in model"),
        ("tiny-moe", {"x": "/no/such"}, "models.x /no/such"),
        ("tiny-moe", {"a/b": "POLICY"}, "'a/b': expected letters"),
        ("POLICY", {"policy": "OTHER"}, "models.policy is another directory"),
    ],
)
def test_a_model_that_cannot_be_is_named(
    model: str, models: dict[str, str], says: str, policy: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    paths = {"POLICY": str(policy), "OTHER": str(other)}
    settings = Settings(
        deployment=DeploymentSettings(model=paths.get(model, model)),
        models={name: paths.get(path, path) for name, path in models.items()},
    )
    with pytest.raises(ConfigError, match=says):
        known_models(settings)


@pytest.fixture
def spec(tmp_path: Path) -> GatewaySpec:
    return GatewaySpec(
        host="h",
        port=1,
        model="accounts/a/models/m",
        deployment="accounts/a/deployments/d",
        replicas=2,
        models=("m",),
        bucket="file:///bucket",
        transition="async",
        ledger=sqlite_url(tmp_path / "ledger.sqlite"),
        token="t",
        settings=GatewaySettings(),
        log_level="info",
    )


async def test_the_command_line_counts_when_it_changed_and_the_api_otherwise(spec: GatewaySpec) -> None:
    ledger = Ledger(spec.ledger)

    async def started(**said: object) -> tuple[int, int, str]:
        row = await default_deployment(ledger, msgspec.structs.replace(spec, **said))
        return row.replicas_min, row.replicas_max, row.transition

    assert await started() == (2, 2, "ASYNC")
    await ledger.update_deployment(spec.deployment, replicas_min=3, replicas_max=3, transition="SYNC")
    assert await started() == (3, 3, "SYNC"), "a restart alone changes nothing"
    assert await started(replicas=1) == (1, 1, "SYNC"), "what was said anew counts, the rest stays"
    assert await started(replicas=1, transition="sync") == (1, 1, "SYNC")
    await ledger.update_deployment(spec.deployment, fields={"displayName": "kept"})
    assert await started(replicas=1, transition="async") == (1, 1, "ASYNC")
    assert (await ledger.deployment(spec.deployment)).fields["displayName"] == "kept"

    async def bucket(**said: object) -> str:
        return (await default_deployment(ledger, msgspec.structs.replace(spec, **said))).bucket_url

    assert await bucket() == "file:///bucket"
    await ledger.update_deployment(spec.deployment, bucket_url="file:///bucket/run-2")
    assert await bucket() == "file:///bucket/run-2", "or the next signal would be looked for elsewhere"
    assert await bucket(bucket="file:///other") == "file:///other"
    assert await bucket() == "file:///bucket"
    ledger.close()


@pytest.mark.parametrize("refusals", [2, 99])
def test_a_ledger_that_does_not_answer_at_the_start_is_asked_again(
    spec: GatewaySpec, refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [refusals]

    class Busy(Ledger):
        async def deployment(self, name: str) -> DeploymentRow:
            left[0] -= 1
            if left[0] >= 0:
                raise LedgerUnavailable("the ledger cannot be used now: canceling statement")
            return await super().deployment(name)

    async def main() -> str:
        ledger = Busy(spec.ledger)
        try:
            return (await first_answer(ledger, spec)).name
        finally:
            ledger.close()

    monkeypatch.setattr(gateway, "LEDGER_PAUSE_S", 0.0)
    if refusals == 2:
        assert asyncio.run(main()) == spec.deployment
    else:
        monkeypatch.setattr(gateway, "LEDGER_WAIT_S", 0.0)
        with pytest.raises(ConfigError, match="canceling statement, for 0 s"):
            asyncio.run(main())
