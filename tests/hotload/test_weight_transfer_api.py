"""vLLM's weight-transfer calls on a real ledger and the real control app; the replicas' answers are the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_hotload_api import DEPLOYMENT, Server, failed, serve, while_three_load
from test_trainer_calls_api import bad

from midstream.api import trainer_calls
from midstream.core.errors import InvalidRequest
from midstream.core.http_answer import HttpAnswer
from midstream.core.transfer import (
    Begin,
    CarriedOut,
    Check,
    CheckInPlace,
    Drop,
    Finish,
    Join,
    JoinInPlace,
    LeaveGroup,
    Receive,
    Received,
    ReceiveInPlace,
    TransferOrder,
)
from midstream.core.types import EngineCard, FileContent, SnapshotContent
from midstream.fleet.replicas import ReplicaRefused
from midstream.snapshots.content import MANIFEST_FILE, content_fingerprint, encode_manifest

INIT = {"init_info": {"master_address": "127.0.0.1", "master_port": 29500, "world_size": 4, "key": "k"}}
SENT = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
#: What vLLM's trainer for NCCL says, and more than midstream knows.
NCCL = {
    "master_address": "10.0.0.1",
    "master_port": 5000,
    "rank_offset": 1,
    "world_size": 8,
    "packed": True,
    "new": [1],
}
CONTENT = (FileContent("model.safetensors", 12, "a" * 64),)


def named(generation: int) -> str:
    """The name that the ledger gives CONTENT."""
    return f"update-{generation:06d}-push-{content_fingerprint(CONTENT).removeprefix('content:')[:12]}"


class Replicas:
    """Takes orders. refusals: what an order of a kind is refused with."""

    def __init__(self, server: Server) -> None:
        self.orders: list[tuple[str, TransferOrder, float]] = []
        self.content = CONTENT
        self.refusals: dict[type, InvalidRequest] = {}
        for index in range(3):
            server.report(index)
        server.replicas.post = self.post  # type: ignore[method-assign]

    async def post(
        self, view: Any, path: str, body: bytes, expected: int, timeout_s: float | None = None
    ) -> bytes:
        assert (path, expected) == ("/replica/transfer", 200)
        order: Any = msgspec.json.decode(body, type=TransferOrder)
        assert timeout_s is not None
        assert timeout_s > order.within_s
        self.orders.append((view.name, order, timeout_s))
        refusal = self.refusals.get(type(order))
        if refusal is not None:
            answer = HttpAnswer(refusal.status, {}, msgspec.json.encode(refusal.body()))
            raise ReplicaRefused(view.name, answer)
        finished = Received(content=self.content, received_bytes=12)
        return msgspec.json.encode(finished if isinstance(order, Finish) else CarriedOut())

    def of(self, kind: type) -> list[tuple[str, Any]]:
        return [(name, order) for name, order, _ in self.orders if isinstance(order, kind)]


@asynccontextmanager
async def pushing(path: Path, ranks: tuple[int, ...] = ()) -> AsyncIterator[tuple[Server, Replicas]]:
    """ranks: of the replicas' engines, which take weights in place by NCCL; (): they have receivers."""
    async with serve(path) as server:
        replicas = Replicas(server)
        for index, count in enumerate(ranks):
            server.report(index, card=EngineCard(kind="vllm", weight_transfer="nccl", ranks=count))
        yield server, replicas


async def begin(server: Server) -> None:
    for path, body in (("init_weight_transfer_engine", INIT), ("start_weight_update", None)):
        answer = await server.http.post(f"/{path}", json=body)
        assert answer.status_code == 200, answer.text


async def send(server: Server, info: Any = SENT) -> Any:
    return await server.http.post("/update_weights", json={"update_info": info})


async def test_the_four_calls_of_vllms_client_make_a_snapshot_that_serves(tmp_path: Path) -> None:
    async with pushing(tmp_path) as (server, replicas):
        answer = await server.http.post("/init_weight_transfer_engine", json=INIT)
        told = answer.json()
        assert (told["message"], told["world_size"]) == ("Weight transfer initialized", 4)
        assert told["ranks"] == {"replica-0": 1, "replica-1": 2, "replica-2": 3}
        assert [order.rendezvous.rank_offset for _, order in replicas.of(Join)] == [1, 2, 3]
        # Without a body, as the client sends it.
        answer = await server.http.post("/start_weight_update")
        assert (answer.json()["message"], answer.json()["update"]) == ("Weight update started", 1)
        assert (await send(server)).json() == {"status": "ok", "message": "Weights updated"}
        # A list is what one broadcast after another brings.
        assert (await send(server, [SENT, {**SENT, "names": ["b"]}])).status_code == 200
        assert [order.sent.names for name, order in replicas.of(Receive) if name == "replica-1"] == [
            ("a",), ("a",), ("b",)
        ]  # fmt: skip
        null = server.http.post("/finish_weight_update", content=b"null")
        answer = await while_three_load(server, null)
        told = answer.json()
        assert (answer.status_code, told["message"]) == (200, "Weight update finished")
        assert (told["weight_version"], told["fenced"]) == (named(1), {})
        desired = await server.desired()
        assert desired is not None
        assert desired.url == f"{server.bucket.as_uri()}/{named(1)}"
        assert (desired.fingerprint, desired.content) == (content_fingerprint(CONTENT), CONTENT)
        assert desired.reset_prompt_cache == "all"
        [shown] = (await server.http.get(f"/v1/{DEPLOYMENT}/ledger")).json()["transfers"]
        assert (shown["phase"], shown["trainer"], shown["reason"]) == ("joined", "127.0.0.1:29500", None)
        assert [member["rank"] for member in shown["members"]] == [1, 2, 3]
        [update] = shown["updates"]
        assert (update["identity"], update["generation"], update["kept"]) == (
            named(1), 1, "wanted"
        )  # fmt: skip
        assert (await server.http.post("/start_weight_update")).json()["update"] == 2
        answer = await server.http.post("/shutdown_weight_transfer_engine")
        assert answer.json() == {"message": "Weight transfer shut down"}
        assert len(replicas.of(LeaveGroup)) == 3


async def test_a_version_and_a_cache_policy_are_those_of_the_signal(tmp_path: Path) -> None:
    async with pushing(tmp_path) as (server, _replicas):
        await begin(server)
        await send(server)
        path = "/finish_weight_update?reset_prompt_cache=new_session"
        for body, param in (({"weight_version": "../x"}, "weight_version"), ({"version": "1"}, "version")):
            assert bad(await server.http.post(path, json=body)) == (400, param)
        assert bad(await server.http.post("/finish_weight_update?reset_prompt_cache=some")) == (
            400, "reset_prompt_cache"
        )  # fmt: skip
        asked = server.http.post(path, json={"weight_version": "step-7"})
        answer = await while_three_load(server, asked)
        assert answer.json()["weight_version"] == "step-7"
        desired = await server.desired()
        assert desired is not None
        assert (desired.snapshot, desired.reset_prompt_cache) == ("step-7", "new_session")


async def test_a_version_that_means_other_weights_is_refused_and_another_call_to_finish_mends_it(
    tmp_path: Path,
) -> None:
    async with pushing(tmp_path) as (server, replicas):

        async def finish(version: str, **headers: str) -> Any:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            asked = server.http.post("/finish_weight_update", json={"weight_version": version}, headers=named)
            return await while_three_load(server, asked)

        async def push(digit: str) -> None:
            replicas.content = (FileContent("model.safetensors", 12, digit * 64),)
            assert (await server.http.post("/start_weight_update")).status_code == 200
            assert (await send(server)).status_code == 200

        await server.http.post("/init_weight_transfer_engine", json=INIT)
        await push("a")
        assert (await finish("7")).status_code == 200
        first = await server.desired()
        assert first is not None
        served = SnapshotContent(snapshot="7", fingerprint=first.fingerprint, files=replicas.content)
        await server.ledger.learn_content(DEPLOYMENT, served)
        await push("b")
        answer = await finish("7")
        assert bad(answer) == (400, "weight_version"), answer.text
        assert "call /finish_weight_update with another weight_version" in answer.text
        assert (await server.desired()) == first
        # The weights are still there: under another name, or in place of those.
        assert (await finish("8")).json()["weight_version"] == "8"
        await push("c")
        assert bad(await finish("7")) == (400, "weight_version")
        assert (await finish("7", x_midstream_overwrite="1")).status_code == 200
        last = await server.desired()
        assert last is not None
        assert (last.snapshot, last.content, replicas.of(Drop)) == ("7", replicas.content, [])


async def test_a_name_is_looked_at_before_a_tensor_moves_where_the_start_has_it(tmp_path: Path) -> None:
    async with pushing(tmp_path) as (server, _replicas):

        async def start(version: Any) -> Any:
            return await server.http.post("/start_weight_update", json={"weight_version": version})

        await server.http.post("/init_weight_transfer_engine", json=INIT)
        for refused, why in (("../x", "weight_version"), ("a", "has files at"), ("", "weight_version")):
            answer = await start(refused)
            assert bad(answer) == (400, "weight_version")
            assert why in answer.text
        for _ in range(2):
            # The second time as after a finish that answered 503: the same update comes again.
            assert (await start("new")).status_code == 200
            await send(server)
            answer = await while_three_load(server, server.http.post("/finish_weight_update"))
            assert answer.json()["weight_version"] == "new"
        # A call that was repeated gets the same answer.
        again = await while_three_load(server, server.http.post("/finish_weight_update"))
        assert again.json()["weight_version"] == "new"
        assert (await start("newer")).status_code == 200
        await send(server)
        body = {"weight_version": "other"}
        answer = await while_three_load(server, server.http.post("/finish_weight_update", json=body))
        assert answer.json()["weight_version"] == "other", "the finish has the last word"
        answer = await start("new")
        assert bad(answer) == (400, "weight_version")
        assert "was signalled before" in answer.text


async def test_a_deployment_that_takes_no_signals_takes_no_update(tmp_path: Path) -> None:
    async with pushing(tmp_path) as (server, replicas):
        await begin(server)
        await send(server)
        await server.ledger.update_deployment(DEPLOYMENT, fields={"enableHotLoad": False})
        # The first before a tensor moves.
        for path in ("/start_weight_update", "/finish_weight_update"):
            assert bad(await server.http.post(path)) == (400, "enableHotLoad")
        assert (await server.desired(), replicas.of(Finish), len(replicas.of(Begin))) == (None, [], 3)


@pytest.mark.parametrize(("refused", "status"), [(1, 400), (0, 503)])
async def test_a_replica_that_cannot_load_is_said_and_whether_the_weights_are_at_fault(
    tmp_path: Path, refused: int, status: int
) -> None:
    async with pushing(tmp_path) as (server, _replicas):
        await begin(server)
        await send(server)
        asked = asyncio.create_task(server.http.post("/finish_weight_update", json={"weight_version": "7"}))
        while await server.desired() is None:
            assert not asked.done()
        why = "NaN in a" if refused else "the disk is full"
        server.report(1, generation=1, refused=refused, transitions=failed("7", 1, why))
        server.replicas._changed()
        answer = await asked
        more = "" if refused else "; push it again"
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == f"replica-1 could not load '7': {why}{more}"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"world_size": 3}, "init_info.world_size"),
        ({"world_size": 1}, "init_info.world_size"),
        ({"world_size": "4"}, "init_info.world_size"),
        ({"master_port": 0}, "init_info.master_port"),
        ({"master_address": " "}, "init_info.master_address"),
        ({"master_address": "a" * 254}, "init_info.master_address"),
        ({"master_address": "10.0.0.1\0"}, "init_info.master_address"),
        ({"master_address": "10.0.0.1\nERROR a line of its own"}, "init_info.master_address"),
        ({"rank_offset": 0}, "init_info.rank_offset"),
        ({"nccl_unique_id_b64": "x"}, "init_info.nccl_unique_id_b64"),
        ({"backend": "nccl"}, "init_info.backend"),
    ],
)
async def test_an_init_that_does_not_fit_names_the_field_and_forms_no_group(
    tmp_path: Path, change: dict[str, Any], param: str
) -> None:
    async with pushing(tmp_path) as (server, replicas):
        body = {"init_info": INIT["init_info"] | change}
        status, field = bad(await server.http.post("/init_weight_transfer_engine", json=body))
        assert (status, field) == (409 if change == {"world_size": 3} else 400, param)
        assert (replicas.orders, await server.ledger.transfer(DEPLOYMENT)) == ([], None)


@pytest.mark.parametrize(
    ("info", "param"),
    [
        ({**SENT, "ipc_handles_pickled": "x"}, "update_info.ipc_handles_pickled"),
        ({"ipc_handles": []}, "update_info.ipc_handles"),
        ({**SENT, "is_checkpoint_format": True}, "update_info.is_checkpoint_format"),
        ({**SENT, "shapes": []}, "update_info.shapes"),
        ({**SENT, "shapes": [[2, -1]]}, "update_info.shapes"),
        ({**SENT, "dtype_names": [1]}, "update_info.dtype_names[0]"),
        ({"names": ["a", "a"], "dtype_names": ["x"] * 2, "shapes": [[], []]}, "update_info.names"),
        ({"names": [], "dtype_names": [], "shapes": []}, "update_info.names"),
        ([], "update_info.names"),
        ("x", "update_info"),
    ],
)
async def test_tensors_that_cannot_be_read_are_refused_by_name_and_end_the_group(
    tmp_path: Path, info: Any, param: str
) -> None:
    async with pushing(tmp_path) as (server, replicas):
        await begin(server)
        assert bad(await send(server, info)) == (400, param)
        assert (replicas.of(Receive), len(replicas.of(LeaveGroup))) == ([], 3)
        assert await server.ledger.transfer(DEPLOYMENT) is None
        assert (await server.http.post("/finish_weight_update")).status_code == 409


async def test_a_refusal_of_a_replica_is_the_trainers_and_names_its_field(tmp_path: Path) -> None:
    async with pushing(tmp_path) as (server, replicas):
        replicas.refusals[Check] = InvalidRequest(
            "update_info.names: 'a' is unknown", param="update_info.names"
        )
        await begin(server)
        answer = await send(server)
        assert bad(answer) == (400, "update_info.names")
        assert answer.json()["error"]["message"] == (
            "update_info.names: 'a' is unknown. The group has ended; init again: call /init_weight_transfer_engine"
        )
        assert replicas.of(Receive) == []


async def test_calls_out_of_order_and_draft_updates_say_what_to_do(tmp_path: Path) -> None:
    async with pushing(tmp_path) as (server, replicas):
        for path in ("/start_weight_update", "/finish_weight_update"):
            answer = await server.http.post(path)
            assert answer.status_code == 409
            assert "call /init_weight_transfer_engine" in answer.json()["error"]["message"]
        assert (await send(server)).status_code == 409
        answer = await server.http.post("/start_draft_weight_update")
        assert answer.status_code == 400
        assert "call /start_weight_update" in answer.json()["error"]["message"]
        assert bad(await server.http.post("/start_weight_update", json={"level": 1})) == (400, "level")
        assert (await server.http.post("/shutdown_weight_transfer_engine")).status_code == 200
        assert replicas.orders == []


async def test_a_start_takes_the_flag_of_older_clients_where_it_says_what_is_so(tmp_path: Path) -> None:
    async with pushing(tmp_path) as (server, _replicas):
        await server.http.post("/init_weight_transfer_engine", json=INIT)
        for body in ({"is_checkpoint_format": True}, {"is_checkpoint_format": None}, {}):
            answer = await server.http.post("/start_weight_update", json=body)
            assert answer.status_code == 200, answer.text
        for value in (False, 1):
            answer = await server.http.post("/start_weight_update", json={"is_checkpoint_format": value})
            assert bad(answer) == (400, "is_checkpoint_format")
        # No tensor moves before a start was answered, so the group stays.
        assert (await server.http.post("/start_weight_update")).json()["update"] == 4


async def test_an_update_that_is_too_long_ends_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_calls, "UPDATE_BODY_BYTES", 1000)

    async with pushing(tmp_path) as (server, replicas):
        await begin(server)
        answer = await send(server, {**SENT, "names": ["a" * 1000]})
        assert answer.status_code == 400
        assert "must be at most 1000 bytes. The group has ended" in answer.json()["error"]["message"]
        assert (len(replicas.of(LeaveGroup)), await server.ledger.transfer(DEPLOYMENT)) == (3, None)


@pytest.mark.parametrize("manifest", [False, True])
async def test_a_version_under_which_the_bucket_has_other_files_is_refused(
    tmp_path: Path, manifest: bool
) -> None:
    async with pushing(tmp_path) as (server, _replicas):
        there = server.bucket / "7"
        there.mkdir(parents=True)
        (there / "model.safetensors").write_bytes(b"y" * (12 if manifest else 13))
        if manifest:
            (there / MANIFEST_FILE).write_bytes(
                encode_manifest((FileContent("model.safetensors", 12, "b" * 64),))
            )
        await begin(server)
        for headers in ({}, {"x-midstream-overwrite": "1"}):
            await send(server)
            answer = await server.http.post(
                "/finish_weight_update", json={"weight_version": "7"}, headers=headers
            )
            assert bad(answer) == (400, "weight_version")
            assert "the bucket has other files" in answer.json()["error"]["message"]
            assert await server.desired() is None
            await server.http.post("/start_weight_update")
        # The same files may be there. The group is still open.
        for file in there.iterdir():
            file.unlink()
        (there / "model.safetensors").write_bytes(b"x" * 12)
        await server.http.post("/start_weight_update")
        await send(server)
        asked = server.http.post("/finish_weight_update", json={"weight_version": "7"})
        assert (await while_three_load(server, asked)).status_code == 200


async def test_each_engine_gets_its_own_ranks_and_all_else_as_the_trainer_said_it(tmp_path: Path) -> None:
    async with pushing(tmp_path, (4, 1, 2)) as (server, replicas):
        assert (await server.http.get("/get_world_size")).json() == {"world_size": 7}
        answer = await server.http.post("/init_weight_transfer_engine", json={"init_info": NCCL})
        assert (answer.json()["world_size"], answer.json()["ranks"]) == (
            8, {"replica-0": 1, "replica-1": 5, "replica-2": 6}
        )  # fmt: skip
        invited = [order.init for _, order in replicas.of(JoinInPlace)]
        assert [one.fields for one in invited] == [{**NCCL, "rank_offset": rank} for rank in (1, 5, 6)]
        assert {one.backend for one in invited} == {"nccl"}
        replicas.orders.clear()
        # A trainer that leaves its offset to vLLM's default.
        for said, offsets in (({"world_size": 8}, [1, 5, 6]), ({"of_this_backend": 1}, [None] * 3)):
            await server.http.post("/init_weight_transfer_engine", json={"init_info": said})
            invited = [order.init for _, order in replicas.of(JoinInPlace)]
            assert [one.fields.get("rank_offset") for one in invited] == offsets
            replicas.orders.clear()
        await server.http.post("/init_weight_transfer_engine", json={"init_info": NCCL})
        await server.http.post("/start_weight_update")
        info = {"names": ["a"], "of_this_backend": {"x": 1}}
        assert (await send(server, info)).status_code == 200
        # A list has one entry for each rank.
        assert (await send(server, [{"rank": rank} for rank in range(7)])).status_code == 200
        first, second = ([order.info.fields for name, order in replicas.of(ReceiveInPlace) if name == replica]
                         for replica in ("replica-0", "replica-2"))  # fmt: skip
        assert first == [info, [{"rank": rank} for rank in range(4)]]
        assert second == [info, [{"rank": 5}, {"rank": 6}]]
        assert len(replicas.of(CheckInPlace)) == 6


@pytest.mark.parametrize(
    ("init", "status", "param", "words"),
    [
        ({**NCCL, "world_size": 4}, 409, "init_info.world_size", "7 ranks of 3 replicas from rank 1 on make it 8"),
        ({**NCCL, "rank_offset": 2}, 409, "init_info.world_size", "make it 9, got 8"),
        ({**NCCL, "rank_offset": "1"}, 400, "init_info.rank_offset", "must be a number"),
        ([NCCL], 400, "init_info", "must be an object"),
    ],
)  # fmt: skip
async def test_a_world_that_the_engines_do_not_fit_is_said_with_the_size(
    tmp_path: Path, init: Any, status: int, param: str, words: str
) -> None:
    async with pushing(tmp_path, (4, 1, 2)) as (server, replicas):
        answer = await server.http.post("/init_weight_transfer_engine", json={"init_info": init})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param)
        assert words in error["message"]
        assert not replicas.orders


@pytest.mark.parametrize(
    ("info", "param"),
    [
        ({"names": ["a"], "ipc_handles_pickled": "gASV"}, "update_info.ipc_handles_pickled"),
        ([{"names": ["a"], "ipc_handles": []}] * 7, "update_info.ipc_handles"),
        ([{"names": ["a"]}] * 3, "update_info"),
    ],
)
async def test_what_is_not_passed_on_ends_the_group_by_name(tmp_path: Path, info: Any, param: str) -> None:
    async with pushing(tmp_path, (4, 1, 2)) as (server, replicas):
        await server.http.post("/init_weight_transfer_engine", json={"init_info": NCCL})
        await server.http.post("/start_weight_update")
        answer = await send(server, info)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert "init again" in answer.json()["error"]["message"]
        assert not replicas.of(ReceiveInPlace)
        assert len(replicas.of(LeaveGroup)) == 3


async def test_a_deployment_whose_swaps_wait_for_requests_takes_no_weights_in_place(tmp_path: Path) -> None:
    async with pushing(tmp_path, (4, 1, 2)) as (server, replicas):

        async def under(transition: str, path: str, body: Any = None) -> Any:
            await server.ledger.update_deployment(DEPLOYMENT, transition=transition)
            return await server.http.post(path, json=body)

        init = ("/init_weight_transfer_engine", {"init_info": NCCL})
        refused = await under("SYNC", *init)
        assert (refused.status_code, replicas.orders) == (409, [])
        assert "set it to ASYNC" in refused.json()["error"]["message"]
        assert (await under("ASYNC", *init)).status_code == 200
        assert (await under("SYNC", "/start_weight_update")).status_code == 409
        assert (await under("ASYNC", "/start_weight_update")).status_code == 200


async def test_replicas_that_take_weights_in_two_ways_form_no_group(tmp_path: Path) -> None:
    async with pushing(tmp_path, (4, 3)) as (server, replicas):
        answer = await server.http.post("/init_weight_transfer_engine", json={"init_info": NCCL})
        assert answer.status_code == 409
        assert "replica-2 has a receiver" in answer.json()["error"]["message"]
        assert not replicas.orders


async def test_an_update_without_a_name_gets_its_own_whatever_is_signalled_meanwhile(tmp_path: Path) -> None:
    """The name is made in the transaction that takes the signal, and nobody has files under it."""

    async with pushing(tmp_path) as (server, _replicas):
        for taken in ("update-000001-push", "update-000002-push"):
            server.write(taken)
        await begin(server)
        await send(server)
        signal, overtaken = server.ledger.signal, []

        async def overtake(*given: Any, **more: Any) -> Any:
            if not overtaken:
                overtaken.append("a")
                assert (await server.signal({"identity": "a"})).status_code == 200
            return await signal(*given, **more)

        server.ledger.signal = overtake  # type: ignore[method-assign]
        answer = await while_three_load(server, server.http.post("/finish_weight_update"))
        assert (answer.json()["weight_version"], answer.json()["generation"]) == (named(2), 2)
