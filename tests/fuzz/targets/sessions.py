"""Sessions at the gateway: their lists, traces, ends and rewards, and stored responses; beside two whole replicas.

Checked: a client's bytes are never a 5xx. A refusal has the one error shape, names a field and rewards nothing. Gateway and
replicas read the same of a reward, and the trace shows what was given. A tenant sees no session of another one. A trace that
is shown is one that training records can be made of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

from midstream.api.responses import PAGE_SIZE_MAX as ITEMS_MAX
from midstream.api.trajectories import PAGE_SIZE_MAX
from midstream.client.export import jsonl_records
from midstream.client.records import sequences_of
from midstream.core.errors import ReplicaUnavailable
from midstream.core.headers import HEADER_RECORDS, HEADER_SESSION, HEADER_TENANT
from midstream.core.traces import METADATA_BYTES_MAX, RewardGiven
from midstream.fleet.known_replica import KnownReplica
from midstream.fleet.loop import Reconciler
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from targets.control_side import NAMES, Call, ControlSide, check_refusal, decoded, fields_of, side
from targets.target import Target, check, controlled
from targets.wire_replica import WireReplica

#: By tenant. Of the first one the session has turns on both replicas.
KEYS = {"": ("s", "a/b", "ü"), "t": ("of t",)}
TENANT = 128
_REWARD = fields_of(RewardGiven)
#: In a path, the key of the input stands for KEY.
CALLS = (
    Call("GET", "/v1/sessions", (), ("limit", "after")),
    Call("GET", "/v1/sessions/KEY", ("key",)),
    Call("DELETE", "/v1/sessions/KEY", ("key",)),
    Call("GET", "/sessions/KEY/trace", ("key",)),
    Call("POST", "/v1/sessions/KEY/reward", (*_REWARD, "key")),
    Call("POST", "/sessions/s/reward", (*_REWARD, "key")),
    Call("GET", "/v1/responses/KEY", (), ("stream",)),
    Call("DELETE", "/v1/responses/KEY"),
    Call("GET", "/inference/v1/responses/KEY/input_items", (), ("limit", "order", "after")),
)
LIST, GET, END, TRACE, REWARD, REWARD_S, RESPONSE, REMOVE, ITEMS = range(len(CALLS))
_UNSEEN = frozenset(range(0x21)) | frozenset(range(0x7F, 0x100)) | frozenset(b"?#")


class InProcess(DeploymentReplicas):
    """Its replicas answer without a socket."""

    def __init__(self, replicas: dict[str, WireReplica]) -> None:
        super().__init__([(name, f"http://{name}:1") for name in replicas])
        self._apps = replicas

    async def post(
        self, replica: KnownReplica, path: str, body: bytes, expected: int, timeout_s: float | None = None
    ) -> bytes:
        answer = await self._apps[replica.name].answer(path, body, {})
        if answer.status != expected:
            raise ReplicaUnavailable(f"{replica.name} answered {answer.status}: {answer.body!r}")
        return answer.body


class SessionSide(ControlSide):
    def __init__(self) -> None:
        super().__init__()
        self.replicas = {name: WireReplica(name, self.loop) for name in ("r0", "r1")}
        replicas = ReplicaSet(InProcess(self.replicas))
        reconciler = Reconciler(self.ledger, replicas, NAMES.deployment)
        self.serve(Deployments(Deployment(NAMES, replicas, reconciler)))
        #: The id of a stored response.
        self.stored = ""
        self.loop.run_until_complete(self._fill())

    async def _fill(self) -> None:
        for replica, held in (("r0", KEYS), ("r1", {"": ("s",)})):
            for tenant, keys in held.items():
                for key in keys:
                    await self._turn(replica, tenant, key)
        self.stored = decoded((await self._turn("r0", "", "s", "/v1/responses", {"input": "hi"})).body)["id"]

    async def _turn(
        self,
        replica: str,
        tenant: str,
        key: str,
        path: str = "/v1/completions",
        body: dict[str, Any] | None = None,
    ) -> Any:
        headers = {HEADER_SESSION: quote(key), HEADER_TENANT: tenant, HEADER_RECORDS: "routes"}
        asked = json.dumps(body or {"prompt": "hi", "max_tokens": 2}).encode()
        answer = await self.replicas[replica].answer(path, asked, headers)
        assert answer.status == 200, answer
        return answer

    def trace(self, tenant: str, key: str) -> Any:
        call = Call("GET", f"/v1/sessions/{quote(key, safe='')}/trace")
        status, answer = self.ask(call, b"", b"", {HEADER_TENANT: tenant})
        return decoded(answer) if status == 200 else None

    def rewards(self) -> list[Any]:
        traces = [self.trace(tenant, key) for tenant, keys in KEYS.items() for key in keys]
        return [one["rewards"] for trace in traces for one in trace["traces"]]

    def forget(self) -> None:
        for tenant, keys in KEYS.items():
            for key in keys:
                for replica in self.replicas.values():
                    replica.replica.close_session((tenant, key))
        for replica in self.replicas.values():
            replica.forget()
        self.loop.run_until_complete(self._fill())

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.close()
        super().close()


def run(data: bytes) -> None:
    """The call, the key up to a line feed, the query up to a line feed, the body."""
    control, rest = controlled(data)
    number = control % TENANT % len(CALLS)
    tenant = "t" if control >= TENANT else ""
    key, _, rest = rest.partition(b"\n")
    query, _, body = rest.partition(b"\n")
    server, same = side(SessionSide), False
    # Others no head has.
    path_key = bytes(byte for byte in key if byte not in _UNSEEN).decode()
    if path_key == "STORED":
        path_key = server.stored
    call = CALLS[number]._replace(path=CALLS[number].path.replace("KEY", path_key))
    try:
        status, answer = server.ask(call, query, body, {HEADER_TENANT: tenant})
        check(status < 500, "a client's bytes are the server's fault", status, answer)
        told = decoded(answer)
        if status >= 400:
            if status != 404 and status != 405:
                check_refusal(call, body, told)
            check("error" in told, "an error of another shape", told)
            check(number not in (REWARD, REWARD_S) or not any(server.rewards()), "a refusal rewards", answer)
        elif told.get("object") == "session.reward":
            check_rewarded(server, tenant, body, told)
        elif number == LIST:
            check_list(tenant, told)
        elif told.get("object") == "session.trace":
            check(told["id"] in KEYS[tenant], "a session of another tenant", told["id"])
            check(jsonl_records(sequences_of(told)), "a trace without a sequence", told)
        elif number in (GET, END) and told.get("object") == "session":
            check(told["id"] in KEYS[tenant], "a session of another tenant", told["id"])
            check(told["id"] in unquote(path_key), "another session than was asked for", path_key, told)
        elif number == ITEMS:
            check(len(told["data"]) <= ITEMS_MAX, "more than a page", told)
        same = status >= 400 or call.method == "GET"
    finally:
        if not same:
            server.forget()


def check_list(tenant: str, told: Any) -> None:
    keys = [one["id"] for one in told["data"]]
    check(keys == sorted(set(keys)), "keys out of order", keys)
    check(set(keys) <= set(KEYS[tenant]) and len(keys) <= PAGE_SIZE_MAX, "a session of another tenant", keys)
    check(not told["unreachable"], "a replica that does not understand its gateway", told)


def check_rewarded(server: SessionSide, tenant: str, body: bytes, told: Any) -> None:
    given = json.loads(body)
    check(not told["unreachable"], "a replica that does not understand its gateway", told)
    check(len(json.dumps(given.get("metadata"))) <= 6 * METADATA_BYTES_MAX, "metadata without a bound", given)
    trace = server.trace(tenant, told["id"])
    for one in trace["traces"]:
        kept = [
            (reward["reward"], reward["turn"], reward["name"], reward["metadata"])
            for reward in one["rewards"]
        ]
        said = (given["reward"], given.get("turn"), given.get("name", "reward"), given.get("metadata"))
        meant = one["replica"] in told["replicas"]
        check(kept == ([said] if meant else []), "another reward than was given", kept, said, meant)
        check(given.get("replica") in (None, one["replica"]) or not meant, "another replica", given, told)
    check(jsonl_records(sequences_of(trace)), "a trace without a sequence", trace)


def seeds() -> Iterator[bytes]:
    rewards: tuple[tuple[int, str, dict[str, Any]], ...] = (
        (REWARD, "s", {"reward": 0.5}),
        (
            REWARD,
            "s",
            {"reward": 1, "turn": 1, "replica": "r1", "name": "judge", "metadata": {"a": [1.5, None]}},
        ),
        (REWARD, "s", {"reward": 1, "turn": 1}),
        (REWARD, "a%2Fb", {"reward": -1e300, "turn": 2}),
        (REWARD, "a/b", {"reward": 1, "turn": 1, "metadata": {"m": "x" * 64}}),
        (REWARD, "nobody", {"reward": 1}),
        (REWARD, "s", {"turn": 0}),
        (REWARD, "s", {"reward": 1, "name": "-"}),
        (REWARD, "s", {"reward": 1, "more": 2}),
        (REWARD_S, "", {"reward": 1, "replica": "r0"}),
        (REWARD + TENANT, "of%20t", {"reward": 2}),
        (REWARD + TENANT, "s", {"reward": 2}),
    )
    for number, key, body in rewards:
        yield bytes([number]) + f"{key}\n\n{json.dumps(body)}".encode()
    others = (
        (LIST, "", "limit=1&after=a/b"),
        (LIST + TENANT, "", ""),
        (LIST, "", "limit=0"),
        (GET, "%C3%BC", ""),
        (GET, "a/b/trace", ""),
        (END, "s", ""),
        (END, "nobody", ""),
        (TRACE, "a%2Fb", ""),
        (TRACE, "s", ""),
        (RESPONSE, "STORED", "stream=false"),
        (RESPONSE, "resp_1_r1", ""),
        (REMOVE, "STORED", ""),
        (ITEMS, "STORED", "limit=1&order=asc"),
        (ITEMS, "STORED", "after=x&order=desc"),
    )
    for number, key, query in others:
        yield bytes([number]) + f"{key}\n{query}\n".encode()


WORDS: tuple[bytes, ...] = (
    *(
        b'"reward":',
        b'"turn":',
        b'"replica":"r1"',
        b'"name":"',
        b'"metadata":{',
        b"STORED",
        b"of%20t",
        b"a%2Fb",
    ),
    *(
        b"limit=",
        b"after=",
        b"order=asc",
        b"stream=true",
        b"%00",
        b"%ff",
        b"%2Ftrace",
        b"/trace",
        b"/reward",
        b"%0A",
    ),
    *(
        b"null",
        b"true",
        b"[" * 32,
        b'"\\u0000"',
        b"\xff",
        b"1e308",
        b"1e999",
        b"18446744073709551616",
        b"-0.0",
    ),
)
TARGET = Target(run, seeds, WORDS, 2048)
