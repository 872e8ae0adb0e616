from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import server_logs
import tiers
from coroutine_tests import run_test
from postgres import REQUIRED, Postgres, Wire, find_server, postgres_server
from s3server import S3Server, s3_server
from shared_servers import SharedServers

from midstream.core.child import importing

# Tests run side by side, and their models are small: more threads would wait for each other. PyTorch reads it when it starts.
os.environ.setdefault(tiers.THREADS, "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    tiers.configure(config)
    config.pluginmanager.register(SharedServers(), "shared-servers")
    hypothesis.settings.register_profile(
        "tier",
        max_examples=tiers.examples(100),
        # The same examples in each run of CI. `make test-all` looks for new ones, so that they refuse no other change.
        derandomize=not tiers.explores(config),
        # A busy machine is no reason to fail.
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("tier")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all test files as a process of midstream imports its modules: without a search for garbage."""
    with importing():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.select(config, items)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return run_test(pyfuncitem, lambda main: asyncio.run(main()))


_cpu = tiers.CpuTime()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.cpu_s = _cpu.look()  # type: ignore[attr-defined]
    if report.failed:
        report.sections += server_logs.sections()
    if report.when == "teardown":
        server_logs.forget_ended()
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(seed=0, dtype="float32", ...) -> a Hugging Face directory, written once per test run."""
    from midstream.models.tiny_moe import write_tiny_moe

    root = tmp_path_factory.mktemp("models")
    written: dict[str, Path] = {}

    def get(*, seed: int = 0, dtype: str = "float32", **options: int) -> Path:
        name = "-".join([str(seed), dtype, *(f"{k}{v}" for k, v in sorted(options.items()))])
        if name not in written:
            write_tiny_moe(root / name, seed=seed, dtype=dtype, **options)
            written[name] = root / name
        return written[name]

    return get


@pytest.fixture
def free_port() -> Iterator[int]:
    """Of loopback, where nobody listens and the system lets nobody else; who reuses addresses, as all servers here do, can."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture(scope="session")
def postgres_process() -> Iterator[Postgres]:
    programs = find_server()
    if programs is None:
        why = "no PostgreSQL here (Debian: apt-get install postgresql)"
        if os.environ.get(REQUIRED):
            pytest.fail(why)
        pytest.skip(why)
    with postgres_server(programs) as server:
        yield server


@pytest.fixture
def postgres_url(postgres_process: Postgres) -> Iterator[str]:
    """An empty database."""
    name = f"ledger-{secrets.token_hex(6)}"
    yield postgres_process.create(name)
    postgres_process.drop(name)


@pytest.fixture
def wire(postgres_process: Postgres) -> Iterator[Wire]:
    made = Wire(postgres_process.port)
    yield made
    made.heard_again()
    made.close()


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    with s3_server() as server:
        server.make_bucket("rollouts")
        yield server


@pytest.fixture
def s3(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real S3 server with the bucket `rollouts`, and its credentials in the environment."""
    for name, value in s3_process.environment().items():
        monkeypatch.setenv(name, value)
    return s3_process
