"""Signals that need more than an engine can do, and what is shown of engines; replica reports are set by the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openapi_answers import Checked
from reports import replica_report

from midstream.api.app import control_app
from midstream.api.hotload import hotload_apis
from midstream.core.served_names import ServedNames
from midstream.core.types import ENGINE_FEATURES, Desired, EngineCard
from midstream.core.wires import HOT_LOAD_PATH
from midstream.fleet.loop import Reconciler
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.ledger import Ledger, database, sqlite_url
from midstream.proxy.metrics import GatewayMetrics

MODEL = "accounts/local/models/tiny-moe"
DEPLOYMENT = "accounts/local/deployments/default"


def card(*lacks: str, kind: str = "vllm", version: str = "0.32.0") -> EngineCard:
    return EngineCard(
        kind=kind, version=version, features=tuple(f for f in ENGINE_FEATURES if f not in lacks)
    )


class Server:
    """The control app over a ledger and two replicas that were not heard of yet."""

    def __init__(self, path: Path) -> None:
        for identity in ("a", "b"):
            (path / "bucket" / identity).mkdir(parents=True)
            (path / "bucket" / identity / "config.json").write_text("{}")
        self.bucket = (path / "bucket").as_uri()
        self.ledger = Ledger(sqlite_url(path / "ledger.sqlite"))
        self.replicas = ReplicaSet(
            DeploymentReplicas([(f"replica-{i}", f"http://127.0.0.1:{i + 1}") for i in range(2)])
        )
        reconciler = Reconciler(self.ledger, self.replicas, DEPLOYMENT)
        deployments = Deployments(Deployment(ServedNames(MODEL, DEPLOYMENT), self.replicas, reconciler))
        apis = hotload_apis(self.ledger, deployments)
        app = control_app(deployments, GatewayMetrics(deployments), apis=apis)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(Checked(app)), base_url="http://gateway")

    def report(self, index: int, engine: EngineCard | None, **more: Any) -> None:
        view = self.replicas.views[index]
        view.replica.hear(
            replica_report(replica=view.name, boot="b", ready=engine is not None, card=engine, **more)
        )

    async def signal(self, **body: Any) -> httpx.Response:
        return await self.http.post(HOT_LOAD_PATH, json={"identity": "a", **body})

    async def desired(self) -> Desired | None:
        return (await self.ledger.state(DEPLOYMENT)).desired

    async def model(self) -> dict[str, Any]:
        (listed,) = (await self.http.get("/v1/models")).json()["data"]
        one: dict[str, Any] = (await self.http.get(f"/v1/models/{MODEL}")).json()
        assert one == listed
        return one


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(database, "SYNCHRONOUS", "OFF")

    @asynccontextmanager
    async def run() -> AsyncIterator[Server]:
        server = Server(tmp_path)
        try:
            await server.ledger.ensure_deployment(DEPLOYMENT, MODEL, server.bucket, "ASYNC")
            yield server
        finally:
            await server.http.aclose()
            server.ledger.close()

    return run


Play = Callable[[], AbstractAsyncContextManager[Server]]


async def test_a_signal_that_one_replicas_engine_cannot_follow_is_refused_and_not_stored(play: Play) -> None:
    async with play() as server:
        server.report(0, card(kind="embedded", version="0.1.0"))
        server.report(1, card("max_cache_age"))
        answer = await server.signal(reset_prompt_cache={"max_age": 2})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_request_error")
        assert error["param"] == "reset_prompt_cache"
        assert error["message"] == (
            "reset_prompt_cache: this deployment's engine (vllm 0.32.0) does not know how old cached KV is;"
            " signal all, new_session or none (feature max_cache_age)"
        )
        assert await server.desired() is None
        for number, policy in enumerate(("all", "new_session", "none")):
            taken = await server.signal(identity="ab"[number % 2], reset_prompt_cache=policy)
            assert taken.status_code == 200, taken.text


async def test_engines_that_have_the_feature_or_were_not_heard_of_stop_no_signal(play: Play) -> None:
    async with play() as server:
        for first, second in ((None, None), (card("routes"), None), (card("routes"), card("grammars"))):
            server.report(0, first)
            if second is not None:
                server.report(1, second)
            answer = await server.signal(reset_prompt_cache={"max_age": 0})
            assert answer.status_code == 200, answer.text
        desired = await server.desired()
        assert desired is not None
        assert (desired.max_cache_age, desired.reset_prompt_cache) == (0, "none")


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({}, True),
        ({"reset_prompt_cache": True}, True),
        ({"reset_prompt_cache": "all"}, True),
        ({"reset_prompt_cache": "new_session"}, True),
        ({"reset_prompt_cache": "none"}, False),
        ({"reset_prompt_cache": False}, False),
        ({"reset_prompt_cache": {"max_age": 1}}, False),
    ],
)
async def test_an_engine_that_reuses_what_it_likes_takes_only_signals_that_forbid_nothing(
    play: Play, asked: dict[str, Any], refused: bool
) -> None:
    async with play() as server:
        server.report(0, card("cache_policies"))
        answer = await server.signal(**asked)
        assert answer.status_code == (400 if refused else 200)
        if refused:
            assert answer.json()["error"]["message"].endswith("(feature cache_policies)")
        assert ((await server.desired()) is None) == refused


async def test_a_model_shows_what_the_engines_that_serve_it_have_in_common(play: Play) -> None:
    async with play() as server:
        assert "midstream" not in await server.model()
        # Heard of, its engine not started.
        server.report(0, None)
        assert "midstream" not in await server.model()

        server.report(0, card("routes"), max_model_len=4096)
        shown = (await server.model())["midstream"]
        assert shown == {
            "engine": {
                "kind": "vllm",
                "version": "0.32.0",
                "features": [feature for feature in ENGINE_FEATURES if feature != "routes"],
                "lacks": ["routes"],
            },
            "max_model_len": 4096,
        }

        server.report(1, card("resume", "grammars", kind="embedded", version="0.1.0"), max_model_len=1024)
        shown = (await server.model())["midstream"]
        assert shown["max_model_len"] == 1024
        engine = shown["engine"]
        assert (engine["kind"], engine["version"]) == ("embedded, vllm", "0.1.0, 0.32.0")
        assert engine["lacks"] == ["routes", "grammars", "resume"]
        assert {*engine["features"], *engine["lacks"]} == set(ENGINE_FEATURES)
        assert len(engine["features"]) == len(ENGINE_FEATURES) - 3

        # Lost.
        server.replicas.views[0].replica.hear(None)
        assert (await server.model())["midstream"]["engine"]["kind"] == "embedded"


async def test_full_weights_are_refused_where_policies_stand_on_the_base_and_the_reason_is_told(
    play: Play,
) -> None:
    async with play() as server:
        why = {"full_snapshots": "policies stand on the weights that vLLM began with"}
        server.report(0, msgspec.structs.replace(card("full_snapshots"), why=why))
        answer = await server.signal()
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "identity")
        assert error["message"].endswith(f"(feature full_snapshots): {why['full_snapshots']}")
        assert await server.desired() is None
        assert (await server.model())["midstream"]["engine"]["why"] == why


async def test_health_names_each_replicas_engine(play: Play) -> None:
    async with play() as server:
        server.report(0, card())
        rows = (await server.http.get("/health")).json()["replicas"]
        assert rows[0]["engine"] == "vllm 0.32.0"
        assert "engine" not in rows[1]
        server.report(0, EngineCard(kind="vllm"))
        assert (await server.http.get("/health")).json()["replicas"][0]["engine"] == "vllm"


async def test_a_policy_is_refused_by_name_wherever_it_is_asked_for_and_none_is_made(play: Any) -> None:
    async with play() as server:
        server.report(0, card())
        server.report(1, card("policies"))
        adapter = {"lora_name": "red", "lora_path": server.bucket + "/a"}
        answers = {
            "policy": [
                await server.signal(policy="red"),
                await server.http.post(f"/v1/{DEPLOYMENT}/policies", json={"policy": "red"}),
            ],
            "lora_name": [
                await server.http.post("/v1/load_lora_adapter", json=adapter),
                await server.http.post("/load_lora_adapter", json=adapter),
            ],
            "model": [await server.http.post("/v1/accounts/local/deployedModels", json={"model": "a"})],
        }
        for param, answer in ((param, each) for param, of in answers.items() for each in of):
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), answer.text
            assert "engine (vllm 0.32.0) does not serve adapters" in error["message"]
            assert "(feature policies)" in error["message"]
        assert not await server.ledger.policies()
