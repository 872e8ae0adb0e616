"""The gateway's control app for targets, over a ledger of its own; and what holds of every refusal by it.

Always holds: there is one app of each kind in a process, from its first use until `close_all`.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec

from midstream.api.app import control_app
from midstream.core.decoding import NOT_JSON
from midstream.core.headers import HEADER_DEPLOYMENT, HEADER_MODEL
from midstream.core.served_names import ServedNames
from midstream.fleet.registry import Deployments
from midstream.ledger import Ledger, database, sqlite_url
from midstream.proxy.metrics import GatewayMetrics
from targets.snapshot_files import directory
from targets.target import check

NAMES = ServedNames("accounts/a/models/m", "accounts/a/deployments/d")


class Call(NamedTuple):
    """path: as on the wire. fields: those that the body may have. query: the parameters that are read."""

    method: str
    path: str
    fields: Collection[str] = ()
    query: tuple[str, ...] = ()


class ControlSide:
    """A subclass makes deployments and calls `serve`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.place = directory().parent / type(self).__name__
        # Of the one before, in this process.
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        # Nothing of it has to outlive a power cut.
        database.SYNCHRONOUS = "OFF"
        self.ledger = Ledger(sqlite_url(self.place / "control.sqlite"))

    def serve(self, deployments: Deployments, apis: Iterable[object] = ()) -> None:
        self.deployments = deployments
        self._app = control_app(deployments, GatewayMetrics(deployments), apis=apis)

    def ask(self, call: Call, query: bytes, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        return self.loop.run_until_complete(self.answer(call, query, body, headers))

    async def answer(
        self, call: Call, query: bytes = b"", body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        told: list[Any] = []
        named = (headers or {}).items()
        scope = {
            "type": "http",
            "method": call.method,
            "path": unquote(call.path),
            "raw_path": call.path.encode(),
            "root_path": "",
            "query_string": query,
            "headers": [(name.encode(), value.encode()) for name, value in named],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("gateway", 80),
            "client": None,
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            told.append(message)

        # Starlette raises what it answered with a 500.
        await self._app(scope, receive, send)
        return told[0]["status"], b"".join(message.get("body", b"") for message in told[1:])

    def close(self) -> None:
        self.ledger.close()
        self.loop.close()


_Side = TypeVar("_Side", bound=ControlSide)
_open: dict[type[ControlSide], ControlSide] = {}


def side(kind: type[_Side]) -> _Side:
    """The one of this process."""
    if kind not in _open:
        _open[kind] = kind()
    found = _open[kind]
    assert isinstance(found, kind)
    return found


def close_all() -> None:
    while _open:
        _open.popitem()[1].close()


def fields_of(body: type[msgspec.Struct]) -> Collection[str]:
    return body.__struct_encode_fields__


def check_refusal(call: Call, body: bytes, told: Any) -> None:
    """It has the API's shape, and names a field of the call, a header, or a parameter of the query."""
    error = told["error"]
    check({"message", "type", "code", "param"} <= error.keys(), "an error of another shape", told)
    message, param = error["message"], error["param"]
    if param is None:
        check(message.startswith("the body "), "a refusal that names no field", message)
        return
    root = re.split(r"[.\[]", param)[0]
    known = {*call.query, HEADER_DEPLOYMENT, HEADER_MODEL, *call.fields, *given(body)}
    check(root in known or param in known, "a field that this call has not", param, message)


def given(body: bytes) -> Collection[str]:
    """The fields of a body that is an object."""
    try:
        read = msgspec.json.decode(body)
    except NOT_JSON:
        return ()
    return read if isinstance(read, dict) else ()


def files_in(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def decoded(answer: bytes) -> Any:
    return json.loads(answer)
