"""A vLLM server's start, its end in every way there is, and what a user is told when it does not come up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from stubserver import Fake, running, until

from midstream.core.errors import ConfigError
from midstream.core.server_settings import VllmSettings
from midstream.engine.servers import process as server_module
from midstream.engine.servers.process import ServerFailed
from midstream.engine.vllm.arguments import (
    WORKER,
    adapter_places,
    by_priority,
    command_line,
    data_parallel,
    environment,
    unheard,
)
from midstream.engine.vllm.server import VllmServer

# Each starts processes.
pytestmark = pytest.mark.slow

MODEL = Path("/models/tiny")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    folder = tmp_path / "fake"
    folder.mkdir()
    fake = Fake(folder)
    yield fake
    # A test that failed leaves nothing behind, either.
    if (folder / "pids").exists():
        for name in ("keeper", "server", "core", "worker"):
            pid = fake.pids()[name]
            # The keeper of an attached one is this process.
            if running(pid) and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def make(fake: Fake, url: str | None = None, served_name: str = "tiny", **settings: Any) -> VllmServer:
    values: dict[str, Any] = {"python": fake.python, "load_s_max": 30.0, **settings}
    return VllmServer(
        MODEL, VllmSettings(**values), url=url, served_name=served_name, log=fake.folder / "log" / "vllm.log"
    )


@asynccontextmanager
async def with_server(server: VllmServer) -> AsyncIterator[VllmServer]:
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def failing(server: VllmServer) -> str:
    """What it says when it does not start."""
    with pytest.raises(ServerFailed) as failed:
        asyncio.run(server.start())
    return str(failed.value)


async def soon(what: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(120):
        return await what


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def all_gone(fake: Fake) -> None:
    for name, pid in fake.pids().items():
        until(lambda pid=pid: not running(pid), f"the {name} is gone")


class TestStart:
    async def test_says_what_it_is(self, fake: Fake) -> None:
        server = make(fake)

        async def check(server: VllmServer) -> None:
            assert server.pid == fake.pids()["server"]
            assert (server.version, server.max_model_len, server.served_name) == ("0.32.0", 2048, "tiny")
            assert server.headers == ""
            assert not server.returns_routes

        async with with_server(server):
            await check(server)
        assert server.pid is None

    async def test_command_line_and_environment(self, fake: Fake) -> None:
        settings = {"args": ("--dtype", "float32"), "env": {"VLLM_API_KEY": "secret", "DO_NOT_TRACK": "0"}}

        async with with_server(make(fake, **settings)) as server:
            given = fake.given()
            assert given["argv"][2:5] == ["vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
            assert given["argv"][-2:] == ["--dtype", "float32"]
            assert given["env"]["VLLM_SERVER_DEV_MODE"] == "1"
            # The user's settings win.
            assert given["env"]["DO_NOT_TRACK"] == "0"
            assert server.headers == "authorization: Bearer secret\r\n"
            assert not any(b"secret" in command_of(pid) for pid in fake.pids().values())

    async def test_every_start_has_its_own_seed(self, fake: Fake) -> None:
        seeds = []

        async def check(server: VllmServer) -> None:
            argv = fake.given()["argv"]
            seeds.append(argv[argv.index("--seed") + 1])

        server = make(fake)
        for _ in range(2):
            async with with_server(server):
                await check(server)
        assert len(set(seeds)) == 2

    async def test_a_slow_one_is_waited_for(self, fake: Fake) -> None:
        (fake.folder / "wait").touch()

        server = make(fake)
        starting = asyncio.create_task(server.start())
        await asyncio.to_thread(until, (fake.folder / "pids").exists, "the server runs")
        # It is asked, and refuses the connection.
        for _ in range(3):
            await asyncio.sleep(server_module.START_POLL_S)
            assert not starting.done()
        (fake.folder / "wait").unlink()
        await soon(starting)  # type: ignore[arg-type]
        assert server.max_model_len == 2048
        await server.close()
        all_gone(fake)

    def test_one_that_never_comes_up_is_given_up(self, fake: Fake) -> None:
        (fake.folder / "wait").touch()
        # By then it runs.
        said = failing(make(fake, load_s_max=6.0))
        assert "not ready within 6 s (vllm.load_s_max)" in said
        all_gone(fake)

    async def test_cancelled_it_leaves_nothing(self, fake: Fake) -> None:
        (fake.folder / "wait").touch()

        starting = asyncio.create_task(make(fake).start())
        await asyncio.to_thread(until, (fake.folder / "pids").exists, "the server runs")
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        all_gone(fake)

    def test_an_early_end_is_shown_with_its_log(self, fake: Fake) -> None:
        lines = [f"line {number}" for number in range(30)]
        (fake.folder / "exit").write_text("\n".join(lines))
        said = failing(make(fake))
        assert "ended with code 3 before it was ready" in said
        assert said.splitlines()[-15:] == lines[-15:]

    def test_no_such_interpreter(self, fake: Fake) -> None:
        said = failing(make(fake, python="/nowhere/bin/python"))
        assert "vllm.python is /nowhere/bin/python" in said
        assert "No such file" in said

    def test_endpoints_that_are_missing_name_what_to_start_it_with(self, fake: Fake) -> None:
        said = failing(make(fake, env={"VLLM_SERVER_DEV_MODE": "0"}))
        assert "no /pause: start it with the environment variable VLLM_SERVER_DEV_MODE=1" in said
        assert "--enable-scale-out" not in said
        all_gone(fake)

    async def test_the_last_log_is_kept_beside(self, fake: Fake) -> None:
        server, folder = make(fake), fake.folder / "log"
        async with with_server(server):
            pass
        first = (folder / "vllm.log").read_text()
        assert "startup complete" in first
        (fake.folder / "exit").write_text("another")
        await asyncio.to_thread(failing, server)
        assert (folder / "vllm.log").read_text() == "another\n"
        assert (folder / "vllm.log.1").read_text() == first

    def test_a_port_is_nobody_elses(self, fake: Fake) -> None:
        """Nobody gets it between its choice and the server's own bind, which takes half a minute with vLLM."""
        with server_module._reserve() as held:
            port = held.getsockname()[1]
            with (
                pytest.raises(ConnectionRefusedError),
                server_module.socket.create_connection(("127.0.0.1", port)),
            ):
                pass
            with server_module.socket.socket() as other, pytest.raises(OSError, match="in use"):
                # Without SO_REUSEADDR.
                other.bind(("127.0.0.1", port))
            # With it, as vLLM.
            with server_module.socket.create_server(("127.0.0.1", port)):
                server_module.socket.create_connection(("127.0.0.1", port)).close()


class TestEnd:
    """`close`, and each process killed by itself: nothing is left in any case."""

    async def test_close(self, fake: Fake) -> None:
        async with with_server(make(fake)) as server:
            pids = fake.pids()
            assert all(running(pid) for pid in pids.values())
            await server.close()
            assert [name for name, pid in pids.items() if running(pid)] == []
            await server.close()

    async def test_close_that_is_cancelled_goes_on(self, fake: Fake) -> None:
        async with with_server(make(fake)) as server:
            pids = fake.pids()
            closing = asyncio.create_task(server.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            await server.close()
            assert [name for name, pid in pids.items() if running(pid)] == []

    async def test_kill(self, fake: Fake) -> None:
        async with with_server(make(fake)) as server:
            pids = fake.pids()
            server.kill()
            assert "ended with code -9" in await soon(server.wait_ended())
            await server.close()
            assert [name for name, pid in pids.items() if running(pid)] == []

    @pytest.mark.parametrize(
        ("victim", "why"),
        [("server", "vLLM ended with code -9"), ("core", "vLLM ended with code 1"), ("keeper", "vLLM ended")],
    )
    async def test_killed(self, fake: Fake, victim: str, why: str) -> None:
        async with with_server(make(fake)) as server:
            os.kill(fake.pids()[victim], signal.SIGKILL)
            assert why in await soon(server.wait_ended())
            pids = fake.pids()
            await server.close()
            assert [name for name, pid in pids.items() if running(pid)] == []

    @pytest.mark.parametrize("victim", ["server", "core", "worker"])
    async def test_stopped(self, fake: Fake, victim: str) -> None:
        async with with_server(make(fake)) as server:
            assert not server.is_stopped
            pid = fake.pids()[victim]
            os.kill(pid, signal.SIGSTOP)
            until(lambda: server.is_stopped, "it is seen")
            os.kill(pid, signal.SIGCONT)
            until(lambda: not server.is_stopped, "its end is seen")
            os.kill(pid, signal.SIGSTOP)
            await server.close()
            assert not server.is_stopped
            assert not running(pid)

    async def test_it_starts_again(self, fake: Fake) -> None:
        async with with_server(make(fake)) as server:
            before = fake.pids()
            os.kill(before["server"], signal.SIGKILL)
            await soon(server.wait_ended())
            await server.start()
            assert not any(running(pid) for pid in before.values())
            assert running(fake.pids()["server"])
        all_gone(fake)

    @pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
    @pytest.mark.parametrize("when", ["starting", "serving"])
    def test_replica_killed(self, fake: Fake, when: str, group: bool) -> None:
        if when == "starting":
            (fake.folder / "wait").touch()
        with replica(fake) as process:
            if when == "serving":
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
            until((fake.folder / "pids").exists, "the server runs")
            # As the supervisor does.
            if group:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        all_gone(fake)


REPLICA = """
import asyncio, sys
from pathlib import Path
from midstream.core.server_settings import VllmSettings
from midstream.engine.vllm.server import VllmServer

async def main():
    python, log = sys.argv[1:]
    server = VllmServer(Path("/m"), VllmSettings(python=python), url=None, served_name="m", log=Path(log))
    await server.start()
    print("ready", flush=True)
    await server.wait_ended()

asyncio.run(main())
"""


def replica(fake: Fake) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", REPLICA, fake.python, str(fake.folder / "vllm.log")],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


class TestHealth:
    async def test_one_that_stays_sick_is_said_to_have_ended(self, fake: Fake) -> None:
        async with with_server(make(fake, silence_s_max=0.5)) as server:
            (fake.folder / "sick").touch()
            assert "did not answer /health for 0.5 s" in await soon(server.wait_ended())
        all_gone(fake)

    async def test_one_that_says_its_engine_is_dead_is_not_waited_for(self, fake: Fake) -> None:
        async with with_server(make(fake, silence_s_max=300.0)) as server:
            (fake.folder / "dead").touch()
            assert "its engine is dead" in await soon(server.wait_ended())

    async def test_a_healthy_one_goes_on(self, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        """However long: its silence counts from its last answer."""

        monkeypatch.setattr(server_module, "HEALTH_POLL_S", 0.05)
        async with with_server(make(fake, silence_s_max=60.0)) as server:
            asked = 0
            health = server.health

            async def counted(timeout_s: float) -> int:
                nonlocal asked
                asked += 1
                return await health(timeout_s) if asked % 3 == 0 else 0

            monkeypatch.setattr(server, "health", counted)
            ended = asyncio.create_task(server.wait_ended())
            async with asyncio.timeout(120):
                while asked < 12:
                    assert not ended.done()
                    await asyncio.sleep(0.01)
            ended.cancel()


#: What an attached server has to be started with.
WANTED = ("--seed", "7", "--max-logprobs", "21", "--structured-outputs-config", '{"backend": "guidance"}')


class TestAttach:
    @pytest.fixture
    def attached(self, fake: Fake) -> Iterator[Callable[..., str]]:
        """attached(*flags, **env) -> the URL of a server that others run."""
        running_ones = []
        # Nobody else is given them meanwhile.
        ports = contextlib.ExitStack()

        def start(
            *flags: str, name: str = "theirs", scale_out: bool = True, wanted: bool = True, **env: str
        ) -> str:
            port = ports.enter_context(server_module._reserve()).getsockname()[1]
            command = [fake.python, "--port", str(port), "--served-model-name", name, *flags]
            command += ["--enable-scale-out"] * scale_out
            # Of a flag that is given twice, the first one counts here.
            command += [*WANTED] * wanted
            running_ones.append(
                subprocess.Popen(command, env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", **env})
            )
            return f"http://127.0.0.1:{port}"

        yield start
        for process in running_ones:
            process.kill()
            process.wait()
        ports.close()

    async def test_it_is_left_as_it_is(self, fake: Fake, attached: Callable[..., str]) -> None:
        url = attached("--enable-return-routed-experts")

        async with with_server(make(fake, url + "/")) as server:
            assert (server.url, server.pid) == (url, None)
            # What it calls its model.
            assert server.served_name == "theirs"
            assert server.returns_routes
            server.kill()
        pids = fake.pids()
        assert all(running(pids[name]) for name in ("server", "core", "worker"))

    @pytest.mark.parametrize(
        ("flags", "variable", "lacks"),
        [
            ((), "True", "vLLM runs without --enable-lora"),
            (("--max-loras", "4"), "", "vLLM runs without VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
            (("--max-loras", "4", "--lora-target-modules", "q_proj"), "True", "with --lora-target-modules"),
            (("--max-loras", "4"), "True", ""),
        ],
    )
    async def test_whether_it_takes_adapters(
        self, fake: Fake, attached: Callable[..., str], flags: tuple[str, ...], variable: str, lacks: str
    ) -> None:
        url = attached(*flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING=variable)

        async with with_server(make(fake, url)) as server:
            assert server.no_adapters.endswith(lacks)
            assert bool(server.no_adapters) == bool(lacks)
            assert server.adapter_places == (4 if flags else 0)

    async def test_its_end_is_noticed(self, fake: Fake, attached: Callable[..., str]) -> None:
        async with with_server(make(fake, attached(), silence_s_max=300.0)) as server:
            os.kill(fake.pids()["server"], signal.SIGKILL)
            assert "nothing listens at" in await soon(server.wait_ended())

    def test_what_it_lacks_is_named(self, fake: Fake, attached: Callable[..., str]) -> None:
        said = failing(make(fake, attached(scale_out=False, VLLM_SERVER_DEV_MODE="0")))
        assert "no /inference/v1/generate: start it with --enable-scale-out" in said
        assert "VLLM_SERVER_DEV_MODE=1" in said

    @pytest.mark.parametrize(
        ("flags", "hint"),
        [
            (("--disable-fastapi-docs",), "--disable-fastapi-docs"),
            (("--logprobs-mode", "processed_logprobs"), "start it with --logprobs-mode raw_logprobs"),
            (
                ("--kv-transfer-config", '{"kv_connector": "ExampleConnector"}'),
                "start it with no KV connector but OffloadingConnector or SimpleCPUOffloadConnector",
            ),
        ],
    )
    def test_flags_it_must_not_have(
        self, fake: Fake, attached: Callable[..., str], flags: tuple[str, ...], hint: str
    ) -> None:
        assert hint in failing(make(fake, attached(*flags)))

    def test_every_flag_that_is_missing_is_named_at_once(
        self, fake: Fake, attached: Callable[..., str]
    ) -> None:
        said = failing(make(fake, attached("--api-server-count", "4", wanted=False)))
        for flag in ("--max-logprobs 21", "--seed", "--structured-outputs-config", "--api-server-count 1"):
            assert flag in said
        assert "--logprobs-mode" not in said

    async def test_what_is_waited_for_is_said_while_it_loads(
        self, fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(server_module, "SAY_S", 0.01)
        caplog.set_level("INFO")
        (fake.folder / "wait").touch()

        server = make(fake)
        starting = asyncio.create_task(server.start())
        said = "waiting for vLLM to load the model"
        await asyncio.to_thread(until, lambda: said in caplog.text, "it is said")
        (fake.folder / "wait").unlink()
        await soon(starting)  # type: ignore[arg-type]
        await server.close()
        assert "30 s at most (vllm.load_s_max)" in caplog.text
        assert "to answer /health" in make(fake, "http://127.0.0.1:1")._waits_for(3.0)

    async def test_its_key(self, fake: Fake, attached: Callable[..., str]) -> None:
        url = attached(VLLM_API_KEY="k1")
        assert "set VLLM_API_KEY in vllm.env" in await asyncio.to_thread(failing, make(fake, url))
        async with with_server(make(fake, url, env={"VLLM_API_KEY": "k1"})) as server:
            assert server.version == "0.32.0"

    @pytest.mark.parametrize(
        "url", ["https://127.0.0.1:1", "127.0.0.1:80", "http://127.0.0.1:1/v1", "http://"]
    )
    def test_urls_that_are_none(self, fake: Fake, url: str) -> None:
        assert "vllm.urls: expected http://HOST:PORT" in failing(make(fake, url))

    def test_nobody_there(self, fake: Fake) -> None:
        with server_module._reserve() as sock:
            said = failing(make(fake, f"http://127.0.0.1:{sock.getsockname()[1]}", load_s_max=0.5))
        assert "was not ready within 0.5 s" in said


class TestArguments:
    def line(self, *args: str) -> list[str]:
        return command_line("python", MODEL, "tiny", 8001, 7, args)

    def test_ours(self) -> None:
        assert self.line() == [
            *("python", "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)),
            *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "8001"),
            *("--generation-config", "vllm", "--enable-scale-out", "--enable-prompt-tokens-details"),
            *("--disable-uvicorn-access-log", "--structured-outputs-config", '{"backend": "guidance"}'),
            *("--max-logprobs", "21", "--seed", "7", "--scheduling-policy", "priority"),
            *("--worker-extension-cls", "midstream_vllm_worker.Worker"),
        ]

    @pytest.mark.parametrize(
        ("args", "ours"),
        [
            (("--seed", "3"), "--seed"),
            (("--seed=-3",), "--seed"),
            (("--seed", "-3"), "--seed"),
            (("--max_logprobs", "50"), "--max-logprobs"),
            (("--scheduling_policy=fcfs",), "--scheduling-policy"),
            (("--structured-outputs-config.backend", "xgrammar"), "--structured-outputs-config"),
            (("--no-disable-uvicorn-access-log",), "--disable-uvicorn-access-log"),
        ],
    )
    def test_the_users_win(self, args: tuple[str, ...], ours: str) -> None:
        line = self.line(*args)
        assert line[-len(args) :] == list(args)
        assert ours not in line[: -len(args)]

    def test_versions_whose_scheduler_is_known_get_midstreams(self, tmp_path: Path) -> None:
        python = tmp_path / "bin" / "python"
        scheduler = tmp_path / "lib/python3.11/site-packages/vllm/v1/core/sched/scheduler.py"

        def given(*args: str) -> bool:
            return "--scheduler-cls" in command_line(str(python), MODEL, "tiny", 8001, 7, args)

        assert not given()
        scheduler.parent.mkdir(parents=True)
        scheduler.write_text("self.waiting = None")
        assert not given()
        scheduler.write_text("self.kv_holding_waiting = None")
        assert given()
        # It knows its checks by their priority. It runs on the first machine alone.
        assert given("--nnodes", "2", "--seed", "1")
        for args in (("--scheduling-policy", "fcfs"),):
            assert not given(*args)
        # Other ranks stand still when one gets a check, and a connector may let it wait.
        for args in (
            ("-dp", "2"),
            ("--kv-transfer-config", "{}"),
            ("--kv-transfer-config", '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'),
            ('--kv_transfer_config={"kv_connector":"SimpleCPUOffloadConnector"}',),
            ("--kv_offloading_size=4", "--kv-offloading-backend", "native"),
        ):
            assert not given(*args)
        assert given("--data-parallel-size", "1")

    def test_it_goes_by_priority_unless_the_user_says_otherwise(self) -> None:
        assert by_priority(())
        assert by_priority(("--scheduling-policy", "priority"))
        assert not by_priority(("--seed", "3", "--scheduling_policy=fcfs"))

    def test_it_has_several_engines_where_the_user_says_so(self) -> None:
        assert not data_parallel(())
        assert not data_parallel(("--data-parallel-size", "1"))
        for args in (("--data_parallel_size=2",), ("-dp", "4"), ("-dp=2",)):
            assert data_parallel(args)
        assert unheard(WORKER, several=False) == ""
        assert "the first alone" in unheard(WORKER, several=True)
        assert "without midstream's worker extension" in unheard("", several=True)

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (("--port", "80"), "--port cannot be given"),
            (("--port=80",), "--port cannot be given"),
            (("--served_model_name", "x"), "--served-model-name cannot be given"),
            (("--dtype", "float32", "--model=x"), "--model cannot be given"),
            (("--nnodes", "2"), "--nnodes needs a --seed, the same on all machines"),
            (("--api-key", "secret"), "--api-key cannot be given: the process list would show it"),
            (("--api-k", "secret"), "--api-k: vLLM would read it as --api-key: write the flag out"),
            (("--api_k=secret",), "--api-k: vLLM would read it as --api-key: write the flag out"),
            (("--kv-transfer-c={}",), "--kv-transfer-c: vLLM would read it as --kv-transfer-config"),
            (("--logprobs-m", "raw_logits"), "--logprobs-m: vLLM would read it as --logprobs-mode"),
            (("--data-parallel-si=2",), "vLLM would read it as --data-parallel-size"),
            (("--config=x.yaml",), "--config cannot be given"),
            (("--no-enable-scale-out",), "--no-enable-scale-out cannot be given"),
            (("--api-server-count", "2"), "--api-server-count must be 1, got 2"),
            (("--lora-modules", "a=b"), "--lora-modules cannot be given: publish adapters as policies"),
            (
                ("--lora_target_modules", "q_proj"),
                "--lora-target-modules cannot be given: vLLM would leave out",
            ),
            (("--enable-lora", "--max-loras", "many"), "--max-loras must be a number, got many"),
            (("-asc=2",), "--api-server-count must be 1, got 2"),
            (("-as", "2"), "--api-server-count must be 1, got 2"),
            (("-dph",), "--data-parallel-hybrid-lb cannot be given: a replica is one server"),
            (("-dpe",), "--data-parallel-external-lb cannot be given: a replica is one server"),
            (("-n", "2"), "--nnodes needs a --seed, the same on all machines"),
            (("--distributed-executor", "ray"), "vLLM would read it as --distributed-executor-backend"),
            (("--logprobs-mode", "processed_logprobs"), "--logprobs-mode must be raw_logprobs"),
            (("--logprobs_mode=raw_logits",), "--logprobs-mode must be raw_logprobs"),
            (
                ("--kv-transfer-config", '{"kv_connector": "ExampleConnector"}'),
                "--kv-transfer-config cannot be given with ExampleConnector: ",
            ),
            (
                (
                    '--kv_transfer_config={"kv_connector":"OffloadingConnector","kv_connector_module_path":"my.own"}',
                ),
                "--kv-transfer-config cannot be given with my.own: ",
            ),
            (("--kv-transfer-config.kv_connector", "ExampleConnector"), "give it as one JSON object"),
            (("--kv-offloading-backend", "lmcache"), "--kv-offloading-backend must be native, got lmcache: "),
            (("tiny", "--seed", "1"), "expected a flag of vLLM first, got 'tiny'"),
        ],
    )
    def test_those_we_depend_on_are_refused(self, args: tuple[str, ...], said: str) -> None:
        with pytest.raises(ConfigError, match=r"^vllm\.args: ") as refused:
            self.line(*args)
        assert said in str(refused.value)
        assert "secret" not in str(refused.value)

    def test_adapters(self) -> None:
        assert "--max-loras" not in self.line()
        line = self.line("--enable-lora")
        assert line[line.index("--max-loras") + 1] == str(adapter_places(["--enable-lora"])) == "8"
        assert self.line("--enable_lora", "--max-loras=3")[-2:] == ["--enable_lora", "--max-loras=3"]
        assert adapter_places(["--enable_lora", "--max-loras=3"]) == 3
        assert adapter_places(["--max-loras", "3"]) == 0
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment({}, {}, "python")
        env = environment({}, {}, "python", adapters=True)
        assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"

    def test_those_that_only_look_like_it_are_not(self) -> None:
        args = (
            "--model-impl",
            "vllm",
            "--logprobs-mode=raw_logprobs",
            "--api-server-count",
            "1",
            "-tp",
            "2",
            "-n",
            "1",
            "--seed",
            "3",
        )
        assert self.line(*args)[-len(args) :] == list(args)

    def test_environment(self, tmp_path: Path) -> None:
        python = str(tmp_path / "bin" / "python")
        env = environment({"HOME": "/h"}, {"HOME": "/g"}, python, cores=(2, 3), gpus=(1,))
        assert env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
        assert env["CUDA_VISIBLE_DEVICES"] == "1"
        assert env["HOME"] == "/g"
        assert "LD_PRELOAD" not in env
        theirs = {"CUDA_VISIBLE_DEVICES": "5", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
        assert theirs.items() <= environment(theirs, {}, python).items()
        assert theirs.items() <= environment({}, theirs, python, cores=(2, 3), gpus=(1,)).items()
        bound = {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}
        assert bound.items() <= environment(bound, {}, python, cores=(2, 3)).items()

    def test_gpus_are_of_those_that_are_visible(self) -> None:
        visible = {"CUDA_VISIBLE_DEVICES": "4, GPU-5e,7"}
        env = environment(visible, {}, "python", gpus=(1, 2))
        assert env["CUDA_VISIBLE_DEVICES"] == "GPU-5e,7"
        with pytest.raises(ConfigError, match=r"^vllm\.gpus: GPU 3, counted from 0, is not among"):
            environment(visible, {}, "python", gpus=(2, 3))

    def test_openmp_of_a_cpu_build_is_preloaded(self, tmp_path: Path) -> None:
        python, library = str(tmp_path / "bin" / "python"), tmp_path / "lib" / "libiomp5.so"
        packages = tmp_path / "lib" / "python3.11" / "site-packages"
        packages.mkdir(parents=True)
        library.touch()
        # Not vLLM for CPUs.
        assert "LD_PRELOAD" not in environment({}, {}, python)
        (packages / "vllm-0.32.0+cpu.dist-info").mkdir()
        assert environment({}, {}, python)["LD_PRELOAD"] == str(library)
        assert environment({"LD_PRELOAD": "/x.so"}, {}, python)["LD_PRELOAD"] == f"{library}:/x.so"
        assert environment({"LD_PRELOAD": "/libiomp5.so"}, {}, python)["LD_PRELOAD"] == "/libiomp5.so"
        assert environment({}, {"LD_PRELOAD": ""}, python)["LD_PRELOAD"] == ""
