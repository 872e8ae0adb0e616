"""A server that is not ready yet: what it says of that, and what it goes on waiting for."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Set
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstream.core.config import Settings, TinkerSettings
from midstream.launch import supervisor as supervisor_module
from midstream.launch.process import ChildMessages, HostUnwell, Supervised, ignore
from midstream.launch.specs import GatewaySpec, ReplicaSpec
from midstream.launch.supervisor import Supervisor, lacking


def health(*deployments: tuple[int, int, list[str]], ready: int = 1) -> dict[str, Any]:
    """deployments: usable, wanted, failed."""
    names = ("accounts/a/deployments/d", "accounts/a/deployments/e")
    return {
        "gateway_workers_ready": ready,
        "deployments": [
            {"name": name, "usable": usable, "elsewhere": 0, "wanted": wanted, "failed": failed}
            for name, (usable, wanted, failed) in zip(names, deployments, strict=False)
        ],
    }


def test_what_a_server_lacks_to_be_ready() -> None:
    assert lacking(health((2, 2, []), ready=1), 2, set()) == "1 of 2 gateway processes are ready"
    assert lacking(health((2, 2, []), ready=0), 1, set()) == "the gateway process is starting"
    assert lacking(health((1, 2, [])), 1, set()) == "accounts/a/deployments/d: 1 of 2 replicas are usable"
    busy = {"error": {"message": "the control app does not answer"}}
    assert lacking(busy, 1, set()).startswith("the gateway cannot say: ")
    waits = health((2, 2, []), (0, 1, ["e-replica-0"]))
    assert lacking(waits, 1, set()) == "", "another deployment's failure is that one's alone"
    assert lacking(waits, 1, {"e-replica-0"}) == "accounts/a/deployments/e: 0 of 1 replicas are usable"


class Fake(Supervised):
    """Starts at the third attempt: the hosts before were not well."""

    def __init__(self, name: str, port: int, attempts: int) -> None:
        self.name, self.host, self.port, self.attempts = name, "127.0.0.1", port, attempts

    @property
    def running(self) -> bool:
        return True

    async def start(self, on_waiting: Callable[[str], None] = ignore) -> None:
        self.attempts -= 1
        if self.attempts > 0:
            raise HostUnwell(f"{self.name}: its node died")

    async def ended(self) -> str:
        await asyncio.Event().wait()
        return ""

    def tell(self, message: msgspec.Struct) -> None: ...
    async def stop(self, grace_s: float) -> None: ...
    def kill(self) -> None: ...
    def renew(self) -> None: ...


class FakeLauncher:
    def __init__(self, port: int) -> None:
        self.port = port

    async def replica(self, spec: ReplicaSpec, replicas: int) -> Supervised:
        return Fake(spec.name, 1, 0)

    def gateway(self, name: str, spec: GatewaySpec, conversation: ChildMessages) -> Supervised:
        return Fake(name, self.port, 3)

    async def keep_spare(self) -> None: ...
    def remove_caches(self, replica: str, others: Set[str]) -> None: ...

    def upload_stranded(self) -> bool:
        return True

    def set_strange_caches_aside(self, wanted: Set[str]) -> Callable[[], None]:
        return lambda: None


@contextlib.asynccontextmanager
async def answering(answers: list[dict[str, Any] | None]) -> AsyncIterator[int]:
    """Its port; each connection gets the next answer of /health, the last one again and again. None: it is cut off."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        said = answers.pop(0) if len(answers) > 1 else answers[0]
        if said is not None:
            body = json.dumps(said).encode()
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("since", "level", "words"),
    [("NOT_READY_S", "WARNING", "not ready yet"), ("WAITING_S", "INFO", "waiting")],
)
def test_a_server_waits_for_its_gateways_host_and_says_once_what_it_lacks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    since: str,
    level: str,
    words: str,
) -> None:
    """A start that takes long is no warning yet."""
    caplog.set_level("INFO")
    monkeypatch.setattr(supervisor_module, since, 0.0)
    settings = Settings(state_dir=str(tmp_path), tinker=TinkerSettings(enabled=False))

    async def main() -> str:
        lines = asyncio.Queue[str]()
        some = health((0, 1, []))
        busy = {"error": {"message": "the control app does not answer"}}
        async with answering([None, None, busy, some, some, health((1, 1, []))]) as port:
            models = {"tiny-moe": tmp_path / "models" / "tiny-moe"}
            models["tiny-moe"].mkdir(parents=True)
            supervisor = Supervisor(settings, "tiny-moe", models, FakeLauncher(port))
            serving = asyncio.create_task(supervisor.serve(lines.put_nowait))
            said = asyncio.create_task(lines.get())
            await asyncio.wait((serving, said), timeout=60, return_when="FIRST_COMPLETED")
            assert not serving.done(), serving.exception()
            serving.cancel()
            await asyncio.wait((serving,))
            await supervisor.close()
            return said.result()

    assert asyncio.run(main()).startswith("midstream ready on http://127.0.0.1:")
    died = [record.message for record in caplog.records if "its node died" in record.message]
    assert died == [f"gateway: its node died; trying again in {pause} s" for pause in ("0.2", "0.4")]
    lacks = [record for record in caplog.records if record.message.startswith(f"{words}: ")]
    assert [record.levelname for record in lacks] == [level] * 3
    assert lacks[0].message.startswith(f"{words}: the gateway does not answer at http://127.0.0.1:")
    assert lacks[1].message.startswith(f"{words}: the gateway cannot say: ")
    assert lacks[2].message == f"{words}: accounts/a/deployments/d: 0 of 1 replicas are usable"
