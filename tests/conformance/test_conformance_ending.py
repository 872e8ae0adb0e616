"""How a run ends: whatever happens, the deployment is put back, or the exit code and the last lines say that it is not."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serving import Server, started
from starlette.responses import JSONResponse, Response
from tampering import Fault, Json, tampering
from tiers import variant

from midstream import cli
from midstream.client import ServerClient
from midstream_conformance import command as conformance
from midstream_conformance import target, traffic
from midstream_conformance.target import Target

HOT_LOAD = "/hot_load"
# As in conftest.py.
API_KEY = "conformance-key"


def run(url: str, options: list[str], out: Path, *rows: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["conformance", url, *options, "--json", str(out), "--only", *rows])
    return code, json.loads(out.read_text())


def transition(server: Server) -> str:
    headers = {"authorization": f"Bearer {API_KEY}"}
    found: str = httpx.get(f"{server.url}/v1/{server.deployment}", headers=headers, timeout=60).json()[
        "hotLoadTransitionType"
    ]
    return found


def served(server: Server) -> set[str | None]:
    asked = ServerClient(server.url, api_key=API_KEY)
    try:
        return {replica.snapshot for replica in asked.snapshots.status().replicas}
    finally:
        asked.close()


@pytest.mark.parametrize("number", [variant(signal.SIGTERM), signal.SIGINT], ids=lambda number: number.name)
def test_an_interrupted_run_puts_back_what_it_changed(
    server: Server, options: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    out, log = tmp_path / "results.json", tmp_path / "log"
    rows = ("hotload.ready", "transitions", "policies")
    with started(log, "conformance", server.url, *options, "--json", str(out), "--only", *rows) as process:
        assert process.stdout is not None
        shown = []
        for line in process.stdout:
            shown.append(line)
            if "hotload.ready" in line:
                process.send_signal(number)
                break
        shown += process.stdout.readlines()
        code = process.wait(timeout=60)
    table, errors = "".join(shown), log.read_text()
    found = json.loads(out.read_text())
    assert (code, errors) == (130, "")
    assert (found["interrupted"], found["put_back"], found["exit_code"]) == (True, True, 130)
    assert found["rows"][0]["id"] == "hotload.ready", "what was found out is lost"
    assert "putting the checkpoint's weights back" in table
    assert served(server) == {found["left_on_snapshot"]}
    assert transition(server) == "ASYNC"


class PuttingBack:
    """Snapshots, and the session they are of, which are being put back until they may be."""

    loaded = True
    target = Target(model="m", midstream=True)

    def __init__(self, stuck: str) -> None:
        self._stuck = stuck
        self.reached, self.may, self.left = asyncio.Event(), asyncio.Event(), False

    async def restore_pause(self) -> None:
        await self._step("pause")

    async def restore_transition(self) -> None:
        await self._step("transition")

    async def leave(self) -> str:
        await self._step("weights")
        self.left = True
        return "X-1"

    async def _step(self, name: str) -> None:
        if name == self._stuck:
            self.reached.set()
            await self.may.wait()


@pytest.mark.variant
@pytest.mark.parametrize("stuck", ["pause", "transition", "weights"])
@pytest.mark.parametrize("times", [1, 2])
async def test_the_first_interruption_also_while_it_puts_back_does_not_keep_it_from_that(
    stuck: str, times: int
) -> None:
    putting, out = PuttingBack(stuck), io.StringIO()
    session: Any = SimpleNamespace(
        target=putting.target,
        restore_pause=putting.restore_pause,
        restore_transition=putting.restore_transition,
    )
    snapshots: Any = putting
    running = asyncio.create_task(
        conformance._rows([], session, snapshots, conformance._Shown([], out), strict=False)
    )
    await putting.reached.wait()
    for _ in range(times):
        running.cancel()
        # Turns of the loop in which it is heard.
        for _ in range(3):
            await asyncio.sleep(0)
    putting.may.set()
    if times == 1:
        _, left, code = await running
        assert (putting.left, left.on_snapshot, left.put_back, code) == (True, "X-1", True, 130)
        assert "interrupted\n" in out.getvalue()
    else:
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not putting.left
        assert "interrupted again: it is not known what the deployment is left on" in out.getvalue()


def test_what_served_before_is_told_and_can_be_had_again(server: Server, options: list[str], tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    (before,) = served(server)
    code, found = run(server.url, options, tmp_path / "results.json", "hotload.ready")
    assert (code, found["served_before"]) == (0, [before])
    assert f"{before} served before" in capsys.readouterr().out


class Deaf(Fault):
    """Takes no signal any more once `heard` were sent."""

    def __init__(self, heard: int) -> None:
        self._left = heard

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.endswith(HOT_LOAD) and body:
            self._left -= 1
            if self._left < 0:
                return JSONResponse({"error": {"message": "not now", "code": "no"}}, 503)
        return None


@pytest.mark.variant
def test_weights_that_cannot_be_put_back_are_no_success(
    server: Server, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The checkpoint, and another variant.
    with tampering(server.url, Deaf(heard=2)) as url:
        code, found = run(url, options, tmp_path / "results.json", "hotload.ready")
    assert found["rows"][0]["verdict"] == "pass"
    assert (code, found["exit_code"], found["put_back"], found["left_on_snapshot"]) == (1, 1, False, None)
    assert "could not be put back" in capsys.readouterr().out


class NoWayBack(Fault):
    """Does not set the transition back to ASYNC the first `times`."""

    def __init__(self, times: int) -> None:
        self.left = times

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if body.get("hotLoadTransitionType") == "ASYNC" and self.left:
            self.left -= 1
            return JSONResponse({"error": {"message": "not now", "code": "no"}}, 503)
        return None


@pytest.mark.variant
@pytest.mark.parametrize(("times", "put_back"), [(1, True), (99, False)])
def test_a_transition_that_stays_is_a_failure(
    server: Server,
    options: list[str],
    tmp_path: Path,
    times: int,
    put_back: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target, "STREAM_S", 0.4)
    # Whoever is held off, the transition is set and set back.
    monkeypatch.setattr(traffic, "LONGER", (1,))
    try:
        with tampering(server.url, NoWayBack(times)) as url:
            code, found = run(url, options, tmp_path / "results.json", "transitions.sync_425")
        assert transition(server) == ("ASYNC" if put_back else "SYNC")
    finally:
        path = f"{server.url}/v1/{server.deployment}?updateMask=hot_load_transition_type"
        headers = {"authorization": f"Bearer {API_KEY}"}
        httpx.patch(
            path, json={"hotLoadTransitionType": "ASYNC"}, headers=headers, timeout=60
        ).raise_for_status()
    row = found["rows"][0]
    assert (row["verdict"], found["put_back"], code) == ("fail", put_back, 1)
    assert "ASYNC" in row["why"]


class NoResuming(Fault):
    """Does not end a pause the first `times`."""

    def __init__(self, times: int) -> None:
        self.left = times

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path == "/resume" and self.left:
            self.left -= 1
            return JSONResponse({"error": {"message": "not now", "code": "no"}}, 503)
        return None


@pytest.mark.variant
@pytest.mark.parametrize(("times", "put_back"), [(1, True), (99, False)])
def test_a_pause_that_stays_is_a_failure(
    server: Server,
    options: list[str],
    tmp_path: Path,
    times: int,
    put_back: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    headers = {"authorization": f"Bearer {API_KEY}"}
    try:
        with tampering(server.url, NoResuming(times)) as url:
            code, found = run(url, options, tmp_path / "results.json", "trainer.abort")
        told = httpx.get(f"{server.url}/is_paused", headers=headers, timeout=60).json()
        assert told["is_paused"] is not put_back
    finally:
        httpx.post(f"{server.url}/resume", headers=headers, timeout=60).raise_for_status()
    row = found["rows"][0]
    assert (row["verdict"], found["put_back"], code) == ("fail", put_back, 1)
    assert "not now" in row["why"]
    assert ("POST /resume ends that" in capsys.readouterr().out) is not put_back


def another_bucket(server: Server, checkpoint: Path, tmp_path: Path) -> tuple[str, Path]:
    return (tmp_path / "elsewhere").as_uri(), checkpoint


def another_model(server: Server, checkpoint: Path, tmp_path: Path) -> tuple[str, Path]:
    from midstream.models.tiny_moe import write_tiny_moe

    write_tiny_moe(tmp_path / "other", seed=1, dtype="bfloat16", hidden=64)
    return server.bucket.as_uri(), tmp_path / "other"


@pytest.mark.variant
@pytest.mark.parametrize("places", [another_bucket, another_model])
def test_a_bucket_or_checkpoint_that_is_another_one_is_no_failure_of_the_endpoint(
    server: Server,
    checkpoint: Path,
    tmp_path: Path,
    places: Callable[[Server, Path, Path], tuple[str, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    bucket, directory = places(server, checkpoint, tmp_path)
    out = tmp_path / "results.json"
    out.write_text("of another run")
    options = ["--api-key", API_KEY, "--bucket", bucket, "--checkpoint", str(directory), "--json", str(out)]
    (before,) = served(server)
    code = cli.main(["conformance", server.url, *options, "--only", "hotload"])
    said = capsys.readouterr().err
    assert code == 2
    assert len(said.splitlines()) == 1
    assert "--bucket, --checkpoint" in said
    assert f"{before} served before" in said
    assert served(server) == {before}
    assert out.read_text() == "of another run"
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_rows_that_switch_nothing_load_nothing(server: Server, options: list[str], tmp_path: Path) -> None:
    before = served(server)
    code, found = run(server.url, options, tmp_path / "results.json", "openai.models")
    assert (code, found["left_on_snapshot"], found["put_back"]) == (0, None, True)
    assert served(server) == before


def test_a_key_is_shown_nowhere(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conformance", server.url, "--api-key", f"{API_KEY}\r", "--only", "openai.models"]) == 2
    shown = capsys.readouterr()
    assert "--api-key" in shown.err
    assert API_KEY not in shown.out + shown.err


class AnyBearer(Fault):
    """A wrong Bearer token is as good as the right one."""

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if headers.get("authorization"):
            headers["authorization"] = f"Bearer {API_KEY}"
        return None


class Unguarded(Fault):
    """Paths that begin so ask for no key."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if path.startswith(self._prefix):
            headers["authorization"] = f"Bearer {API_KEY}"
        return None


class BearerOnly(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        headers.pop("x-api-key", None)
        return None


@pytest.mark.variant
@pytest.mark.parametrize(
    "fault",
    [
        AnyBearer(),
        Unguarded("/v1/completions"),
        Unguarded("/hot_load"),
        Unguarded("/v1/accounts"),
        BearerOnly(),
    ],
)
def test_a_key_that_is_not_asked_for_everywhere_is_found(
    server: Server, options: list[str], tmp_path: Path, fault: Fault
) -> None:
    with tampering(server.url, fault) as url:
        code, found = run(url, options, tmp_path / "results.json", "status.key")
    assert (code, found["rows"][0]["verdict"]) == (1, "fail")


class NoRoutes(Fault):
    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        if "include_routing_matrix" not in body:
            return None
        message = "Extra inputs are not permitted, field: 'include_routing_matrix'"
        return JSONResponse({"error": {"message": message, "code": "invalid_request_error"}}, 400)


@pytest.mark.variant
@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_an_endpoint_without_router_replay_fails(
    server: Server, options: list[str], tmp_path: Path, with_checkpoint: bool
) -> None:
    with tampering(server.url, NoRoutes()) as url:
        code, found = run(
            url, options if with_checkpoint else options[:2], tmp_path / "results.json", "routes"
        )
    assert code == 1
    assert {row["verdict"] for row in found["rows"]} == {"fail"}
