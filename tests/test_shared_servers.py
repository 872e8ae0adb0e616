"""A server that tests share is ended behind the last of them, and is started again for one that stands before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """
from pathlib import Path
import pytest
from shared_servers import SharedServers

def say(words):
    with open("said", "a") as file:
        file.write(words + "; ")

def pytest_configure(config):
    config.pluginmanager.register(SharedServers())

def pytest_runtestloop(session):
    # As a worker that takes tests over from another one.
    order = sorted(session.items, key=lambda item: item.name)
    for item, after in zip(order, [*order[1:], None]):
        item.ihook.pytest_runtest_protocol(item=item, nextitem=after)
    return True

@pytest.fixture(scope="session")
def server():
    say("start")
    yield
    say("end")

@pytest.fixture(autouse=True)
def named(request):
    yield
    say(request.node.name)
"""
FIRST = """
import pytest
@pytest.fixture(scope="module")
def client(server):
    return server
def test_1(client): ...
def test_2(server): ...
def test_3(): ...
def test_5(server): ...
"""
OWN = """
import pytest
@pytest.fixture
def server(): ...
def test_4(server): ...
"""


def test_it_ends_with_its_last_test_and_is_started_again_for_an_earlier_one(tmp_path: Path) -> None:
    for name, text in {"conftest.py": CONFTEST, "test_first.py": FIRST, "test_own.py": OWN}.items():
        (tmp_path / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(tmp_path),
    ]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    # test_5 stands behind test_3, so the server stays for it. test_4 has a server of its own, and stands behind all.
    assert (tmp_path / "said").read_text() == (
        "start; test_1; test_2; test_3; end; test_4; start; test_5; end; "
    )
