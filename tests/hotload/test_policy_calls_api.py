"""Calls for policies, adapters and add-ons on a real ledger and the real control app: what is refused, and what that leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from openapi_answers import Checked
from policies_taken_up import take_up_policies
from reports import replica_report
from test_hotload_api import DEPLOYMENT, Server, write_adapter

from midstream.api.app import control_app
from midstream.api.hotload import hotload_apis
from midstream.core.served_names import POLICY_INFIX
from midstream.core.types import EngineCard
from midstream.core.wires import HOT_LOAD_PATH
from midstream.ledger import LedgerUnavailable, NewDeployment
from midstream.proxy.metrics import GatewayMetrics

POLICIES = f"/v1/{DEPLOYMENT}/policies"
ADDONS = "/v1/accounts/local/deployedModels"
LOADS = ("/v1/load_lora_adapter", "/load_lora_adapter")


class PolicyServer(Server):
    """It takes up policies."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        apis = hotload_apis(self.ledger, self.deployments, changed=self.changed)
        self.app = control_app(self.deployments, GatewayMetrics(self.deployments), apis=apis)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(Checked(self.app)), base_url="http://gateway"
        )

    async def changed(self) -> None:
        await take_up_policies(self.ledger, self.deployments)

    @property
    def policies(self) -> list[str]:
        return [policy.policy for policy in self.deployments.policies()]


@asynccontextmanager
async def serve(
    path: Path,
) -> AsyncIterator[PolicyServer]:
    server = PolicyServer(path)
    try:
        await server.ledger.ensure_deployment(
            DEPLOYMENT, server.deployments.default.model, server.bucket.as_uri(), "ASYNC"
        )
        yield server
    finally:
        await server.http.aclose()
        server.ledger.close()


def refused(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["param"]


@pytest.mark.parametrize("step", ["state", "signal"])
async def test_a_signal_that_the_end_of_its_policy_overtakes_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A 404 would say that the policy was never there."""

    async with serve(tmp_path) as server:
        write_adapter(server, "v1")
        name = f"{DEPLOYMENT}{POLICY_INFIX}red"
        body = {"identity": "v1", "policy": "red"}
        assert (await server.http.post(HOT_LOAD_PATH, json=body)).status_code == 200
        real = getattr(server.ledger, step)

        async def overtaken(of: str, *arguments: Any, **named: Any) -> Any:
            if of == name:
                await server.ledger.delete_deployment(name)
            return await real(of, *arguments, **named)

        monkeypatch.setattr(server.ledger, step, overtaken)
        answer = await server.http.post(HOT_LOAD_PATH, json=body)
        assert refused(answer) == (409, "policy")
        assert "is being ended" in answer.json()["error"]["message"]


async def test_a_fork_that_cannot_be_leaves_no_policy(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        assert (await server.http.post(POLICIES, json={"policy": "red"})).status_code == 200
        answer = await server.http.post(POLICIES, json={"policy": "blue", "from": "red"})
        assert refused(answer) == (409, "from")
        answer = await server.http.post(POLICIES, json={"policy": "blue", "from": "green"})
        assert refused(answer)[0] == 404
        assert server.policies == ["red"]


async def test_a_fork_of_files_that_are_gone_leaves_no_policy_and_a_fork_of_files_does(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path) as server:
        for name in ("red", "green"):
            assert (await server.http.post(POLICIES, json={"policy": name})).status_code == 200
        assert (await server.signal({"identity": "a", "policy": "red"})).status_code == 200
        assert (await server.http.post(POLICIES, json={"policy": "blue", "from": "red"})).status_code == 200
        (server.bucket / "a" / "config.json").unlink()
        for name in ("green", "black"):
            answer = await server.http.post(POLICIES, json={"policy": name, "from": "red"})
            assert answer.status_code == 400, answer.text
        assert server.policies == ["blue", "green", "red"]


@pytest.mark.parametrize("path", [*LOADS, ADDONS])
async def test_a_load_that_a_later_one_overtakes_leaves_that_ones_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A trainer's first step is still on its way when its second one comes."""

    async with serve(tmp_path) as server:
        for name in ("red", "v2"):
            write_adapter(server, name)
        real, later = server.ledger.signal, [{"identity": "v2", "policy": "red"}]

        async def overtaken(*arguments: Any, **named: Any) -> Any:
            result = await real(*arguments, **named)
            if later:
                assert (await server.signal(later.pop())).status_code == 200
            return result

        monkeypatch.setattr(server.ledger, "signal", overtaken)
        adapter = {"lora_name": "red", "lora_path": str(server.bucket / "red")}
        body = {"model": "red"} if path == ADDONS else adapter
        answer = await server.http.post(path, json=body)
        assert refused(answer)[0] == 409, answer.text
        assert server.policies == ["red"]
        assert (await server.ledger.state(f"{DEPLOYMENT}{POLICY_INFIX}red")).snapshot == "v2"


async def test_a_fork_that_fails_leaves_the_policy_that_another_call_signalled_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(tmp_path) as server:
        write_adapter(server, "v2")
        assert (await server.signal({"identity": "a", "policy": "red"})).status_code == 200
        real, later = server.ledger.signal, [{"identity": "v2", "policy": "blue"}]

        async def overtaken(*arguments: Any, **named: Any) -> Any:
            if not later:
                return await real(*arguments, **named)
            assert (await server.signal(later.pop())).status_code == 200
            raise LedgerUnavailable("the ledger cannot be used now")

        monkeypatch.setattr(server.ledger, "signal", overtaken)
        answer = await server.http.post(POLICIES, json={"policy": "blue", "from": "red"})
        assert refused(answer)[0] == 503, answer.text
        assert server.policies == ["blue", "red"]


GOOD = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"bias": "all"}, "bias is 'all', which is not served"),
        ({"use_dora": True}, "use_dora is True, which is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which is not served"),
        ({"rank_pattern": {"(q|v)+_proj": 4}}, "rank_pattern has (q|v)+_proj"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', which is not served; 'LORA' is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not served"),
        ({"r": 512}, "r is 512, a number from 1 to 256 is expected"),
        ({"target_modules": ["q_proj", "model.embed_tokens"]}, "target_modules has model.embed_tokens"),
        ({"target_modules": [["q_proj"]]}, "target_modules has ['q_proj']"),
        ({"exclude_modules": ["x"] * 10_001}, "exclude_modules has 10001 entries"),
        (None, "is not valid JSON"),
    ],
)
async def test_an_adapter_that_no_engine_takes_is_refused_at_the_signal(
    tmp_path: Path, said: dict[str, Any] | None, words: str
) -> None:
    """With the words that replicas have for it; and nothing is made for it."""

    async with serve(tmp_path) as server:
        write_adapter(server, "red-1", "{" if said is None else json.dumps({**GOOD, **said}))
        answer = await server.signal({"identity": "red-1", "policy": "red"})
        assert refused(answer) == (400, "identity"), answer.text
        assert "adapter_config.json: " in answer.json()["error"]["message"]
        assert words in answer.json()["error"]["message"]
        for path in LOADS:
            told = {"lora_name": "red", "lora_path": str(server.bucket / "red-1")}
            answer = await server.http.post(path, json=told)
            assert refused(answer) == (400, "lora_path"), answer.text
            assert words in answer.json()["error"]["message"]
        assert server.policies == []
        write_adapter(server, "red-2", json.dumps(GOOD))
        assert (await server.signal({"identity": "red-2", "policy": "red"})).status_code == 200
        assert server.policies == ["red"]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        # As PEFT writes them where it is told not to use safetensors.
        ("adapter_model.safetensors", "adapter_model.bin"),
        ("adapter_config.json", "config.json"),
    ],
)
async def test_an_adapter_of_which_a_file_is_not_there_is_refused_at_the_signal(
    tmp_path: Path, name: str, instead: str
) -> None:
    async with serve(tmp_path) as server:
        write_adapter(server, "red-1", json.dumps(GOOD))
        directory = server.bucket / "red-1"
        (directory / name).rename(directory / instead)
        answer = await server.signal({"identity": "red-1", "policy": "red"})
        assert refused(answer) == (400, "identity"), answer.text
        assert f"{name}: is not there" in answer.json()["error"]["message"]
        for path in LOADS:
            answer = await server.http.post(path, json={"lora_name": "red", "lora_path": str(directory)})
            assert refused(answer) == (404, "lora_path"), answer.text
            message = answer.json()["error"]["message"]
            assert message.startswith(f"lora_path: no adapter is there: {name}: is not there"), message
        assert server.policies == []


@pytest.mark.parametrize("path", LOADS)
async def test_a_name_that_no_adapter_can_have_is_refused_by_the_calls_own_field(
    tmp_path: Path, path: str
) -> None:
    async with serve(tmp_path) as server:
        for name, status in (("-x", 400), ("tiny-moe", 409)):
            told = {"lora_name": name, "lora_path": str(server.bucket / "a")}
            answer = await server.http.post(path, json=told)
            assert refused(answer) == (status, "lora_name")
            assert answer.json()["error"]["message"].startswith("lora_name: ")
            answer = await server.http.post(ADDONS, json={"model": name})
            assert refused(answer) == (status, "model")
            assert answer.json()["error"]["message"].startswith("model: ")
        assert server.policies == []


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", LOADS[0], {"lora_name": 1}, "lora_name"),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": [1]}, "lora_name"),
        ("POST", "/abort_requests", {"request_ids": ["a", 1]}, "request_ids[1]"),
        ("POST", "/abort_request", {"abort_all": 1}, "abort_all"),
        ("POST", "/update_weights", {"weight_dir": []}, "weight_dir"),
        ("POST", "/update_weights", {"weight_dir": "/a", "version_uid": "x"}, "version_uid"),
        ("POST", "/update_weights", {"update_info": {}}, "update_info.names"),
        ("POST", "/update_weights", {}, "weight_dir"),
        ("POST", "/update_weights_from_disk", {}, "model_path"),
        ("POST", "/update_weights_from_disk", {"model_path": {}}, "model_path"),
        (
            "POST",
            "/update_weights_from_disk",
            {"model_path": "/a", "weight_version": "a\x7f"},
            "weight_version",
        ),
        (
            "POST",
            "/update_weights_from_disk",
            {"model_path": "/a", "weight_version": "base"},
            "weight_version",
        ),
        ("POST", "/update_weights_from_disk", {"model_path": "/a", "weight_version": ""}, "weight_version"),
        ("POST", ADDONS, {"displayName": 1}, "displayName"),
        ("POST", POLICIES, {"policy": "red", "from": 1}, "from"),
        ("POST", POLICIES, {"policy": "red", "frozen": "no"}, "frozen"),
        ("POST", POLICIES, {}, "policy"),
        ("POST", POLICIES, {"policy": "red", "colour": 1}, "colour"),
    ],
)
async def test_a_field_of_another_kind_is_refused_by_its_name(
    tmp_path: Path, method: str, path: str, body: Any, param: str
) -> None:
    async with serve(tmp_path) as server:
        answer = await server.http.request(method, path, json=body)
        assert refused(answer) == (400, param)
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{param}") or f"'{param}'" in message
        assert server.policies == []


@pytest.mark.parametrize(
    ("path", "param"), [("/update_weights", "weight_dir"), ("/update_weights_from_disk", "model_path")]
)
async def test_a_directory_without_files_is_refused_by_the_calls_own_field(
    tmp_path: Path, path: str, param: str
) -> None:
    async with serve(tmp_path) as server:
        answer = await server.http.post(path, json={param: str(server.bucket / "nothing")})
        assert refused(answer) == (400, param)
        assert "write the snapshot, then signal it" in answer.json()["error"]["message"]
        # A signal names it by its identity.
        assert refused(await server.signal({"identity": "nothing"})) == (400, "identity")
        place = (server.bucket / "nothing").as_uri()
        answer = await server.signal({"identity": "x"}, x_fireworks_hot_load_source_url=place)
        assert refused(answer) == (400, "identity")


@pytest.mark.parametrize("body", [{}, {"frozen": False}, {"frozen": True}], ids=str)
async def test_a_policy_that_another_gateway_removed_is_made_anew(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    async with serve(tmp_path) as server:
        assert (await server.http.post(POLICIES, json={"policy": "red"})).status_code == 200
        await server.ledger.delete_deployment(f"{DEPLOYMENT}{POLICY_INFIX}red")
        answer = await server.http.post(POLICIES, json={"policy": "red", **body})
        assert (answer.status_code, answer.json()["frozen"]) == (200, body.get("frozen", False)), answer.text


@pytest.mark.parametrize(
    "call",
    ["GET", "DELETE", "status", "hint", "fork", "unload", "list", "addon GET", "addon PATCH", "addon DELETE"],
)
async def test_a_policy_that_another_gateway_made_is_found_before_it_is_heard_of(
    tmp_path: Path, call: str
) -> None:
    async def work(server: PolicyServer) -> None:
        row = await server.ledger.deployment(DEPLOYMENT)
        await server.ledger.create_deployment(
            NewDeployment(
                f"{DEPLOYMENT}{POLICY_INFIX}red",
                model=row.model,
                bucket_url=row.bucket_url,
                transition=row.transition,
            )
        )
        match call:
            case "status":
                answer = await server.http.get(HOT_LOAD_PATH, params={"policy": "red"})
            case "hint":
                answer = await server.http.post(f"{HOT_LOAD_PATH}/hint", json={"policy": "red"})
            case "unload":
                answer = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "red"})
            case "fork":
                answer = await server.http.post(POLICIES, json={"policy": "blue", "from": "red"})
                # There is such a policy, and it has nothing yet.
                assert refused(answer) == (409, "from"), answer.text
                return
            case "list":
                answer = await server.http.get(POLICIES)
                assert [row["policy"] for row in answer.json()["policies"]] == ["red"]
            case addon if addon.startswith("addon "):
                method = addon.removeprefix("addon ")
                answer = await server.http.request(method, f"{ADDONS}/red", json={"displayName": "Red"})
                if method != "DELETE":
                    listed = await server.http.get(ADDONS)
                    assert [row["name"] for row in listed.json()["deployedModels"]] == [answer.json()["name"]]
            case method:
                answer = await server.http.request(method, f"{POLICIES}/red")
        assert answer.is_success, answer.text
        none = await server.http.delete(f"{POLICIES}/none")
        assert refused(none) == (404, "policy")

    async with serve(tmp_path) as server:
        await work(server)


async def test_a_policy_that_ends_says_which_replica_that_waits_for(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        assert (await server.http.post(POLICIES, json={"policy": "red"})).status_code == 200
        facts = server.replicas.facts
        facts.set_members([("replica-0", "http://127.0.0.1:1"), ("lost", "http://127.0.0.1:2")])
        facts.members[0].hear(replica_report())
        for state, waits in (("READY", []), ("DELETING", ["lost"])):
            shown = (await server.http.get(f"{POLICIES}/red")).json()
            assert (shown["state"], shown["waits_for"]) == (state, waits)
            await server.ledger.update_deployment(f"{DEPLOYMENT}{POLICY_INFIX}red", deleting=True)


async def test_a_list_leaves_out_a_policy_that_goes_while_it_is_made(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        for name in ("red", "blue"):
            assert (await server.http.post(POLICIES, json={"policy": name})).status_code == 200
        real = server.ledger.listed

        async def listed(names: Sequence[str]) -> Any:
            await server.ledger.delete_deployment(f"{DEPLOYMENT}{POLICY_INFIX}red")
            return await real(names)

        server.ledger.listed = listed  # type: ignore[method-assign]
        answer = await server.http.get(POLICIES)
        assert answer.status_code == 200, answer.text
        assert [one["policy"] for one in answer.json()["policies"]] == ["blue"]


async def test_pages_of_policies_are_in_the_order_of_names_and_each_is_one_query(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        names = [f"p{number}" for number in range(7)]
        for name in reversed(names):
            assert (await server.http.post(POLICIES, json={"policy": name})).status_code == 200
        queries: list[str] = []
        sa.event.listen(
            server.ledger._database.engine,
            "before_cursor_execute",
            lambda conn, cursor, statement, *rest: queries.append(statement),
        )
        pages, token = [], ""
        while True:
            before = len(queries)
            answer = await server.http.get(POLICIES, params={"pageSize": 3, "pageToken": token})
            page = answer.json()
            pages.append([one["policy"] for one in page["policies"]])
            # Beside the look at what other gateways made.
            asked = [one for one in queries[before:] if "contents.files" in one]
            assert (len(asked), page["totalSize"]) == (1, 7)
            token = page["nextPageToken"]
            if not token:
                break
        assert pages == [names[:3], names[3:6], names[6:]]
        assert [one["policy"] for one in (await server.http.get(POLICIES)).json()["policies"]] == names
        wrong = await server.http.get(POLICIES, params={"pageSize": "x"})
        assert refused(wrong) == (400, "pageSize")


@pytest.mark.parametrize("read", ["deployment", "state"])
async def test_a_policy_that_goes_while_it_is_changed_is_a_conflict(tmp_path: Path, read: str) -> None:
    """read: before which of the call's reads another gateway removes it."""

    async with serve(tmp_path) as server:
        assert (await server.http.post(POLICIES, json={"policy": "red"})).status_code == 200
        change = server.ledger.update_deployment

        async def changed(name: str, **given: Any) -> Any:
            row = await change(name, **given)
            real = getattr(server.ledger, read)

            async def gone(*asked: Any) -> Any:
                await server.ledger.delete_deployment(name)
                setattr(server.ledger, read, real)
                return await real(*asked)

            setattr(server.ledger, read, gone)
            return row

        server.ledger.update_deployment = changed  # type: ignore[method-assign]
        answer = await server.http.post(POLICIES, json={"policy": "red", "frozen": False})
        assert refused(answer) == (409, "policy"), answer.text


@pytest.mark.parametrize("body", [{}, {"frozen": True}], ids=str)
async def test_a_policy_that_is_being_ended_is_not_made_or_frozen(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    async with serve(tmp_path) as server:
        assert (await server.http.post(POLICIES, json={"policy": "red"})).status_code == 200
        # Its replicas have not let it go.
        await server.ledger.update_deployment(f"{DEPLOYMENT}{POLICY_INFIX}red", deleting=True)
        answer = await server.http.post(POLICIES, json={"policy": "red", **body})
        assert refused(answer) == (409, "policy"), answer.text


#: What a caller says of policies beside full weights, whether the policy has a base of its own, and the status. Of a push, too.
FATES: list[tuple[str | None, bool, int | tuple[int, str]]] = [
    (None, False, (409, "policies")),
    ("refuse", False, (409, "policies")),
    ("keep", False, (400, "policies")),
    ("rebase", False, 200),
    ("end", False, 200),
    (None, True, 200),
    ("keep", True, 200),
    ("rebase", True, (400, "policies")),
    ("refuse", True, (409, "policies")),
    ("end", True, 200),
]


@pytest.mark.parametrize(("fate", "own_base", "expected"), FATES)
async def test_full_weights_say_what_becomes_of_policies_that_the_engine_allows(
    tmp_path: Path, fate: str | None, own_base: bool, expected: int | tuple[int, str]
) -> None:
    """Without a word they keep their base, or nothing changes for them."""

    async with serve(tmp_path) as server:
        features = tuple(name for name in EngineCard().features if own_base or name != "policy_base")
        server.report(0, card=EngineCard(features=features))
        write_adapter(server, "v1")
        assert (await server.signal({"identity": "v1", "policy": "red"})).status_code == 200
        answer = await server.signal({"identity": "a"} | ({} if fate is None else {"policies": fate}))
        assert (answer.status_code if expected == 200 else refused(answer)) == expected, answer.text
        await server.changed()
        listed = (await server.http.get(POLICIES)).json()["policies"]
        assert [policy["state"] for policy in listed] == ([] if fate == "end" else ["READY"])


async def test_full_weights_wait_for_an_engines_word_while_there_are_policies(tmp_path: Path) -> None:
    """One that has no base for policies would compute them on the new weights."""

    async with serve(tmp_path) as server:
        assert (await server.signal({"identity": "a"})).status_code == 200
        write_adapter(server, "v1")
        assert (await server.signal({"identity": "v1", "policy": "red"})).status_code == 200
        for asked in ({}, {"policies": "keep"}):
            answer = await server.signal({"identity": "b", **asked})
            assert answer.status_code == 503
            assert "whether its engine keeps a base" in answer.text
        assert (await server.signal({"identity": "b", "policies": "end"})).status_code == 200


async def test_a_policys_own_snapshot_says_nothing_of_others(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        write_adapter(server, "v1")
        answer = await server.signal({"identity": "v1", "policy": "red", "policies": "end"})
        assert refused(answer) == (400, "policies")
        assert server.policies == []
