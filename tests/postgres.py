"""A real PostgreSQL server for tests: its own data directory, a loopback port, a password; ended by its process id."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg

PASSWORD = "hush-hush-4711"
# Set in CI: a missing server is then a failure, not a skip.
REQUIRED = "MIDSTREAM_TEST_POSTGRES"
START_S = 120.0


def find_server() -> Path | None:
    """The directory of PostgreSQL's programs: in PATH, or where Debian puts them."""
    if (found := shutil.which("initdb")) and shutil.which("postgres"):
        return Path(found).resolve().parent
    installed = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return max((path.parent for path in installed), key=lambda p: int(p.parent.name), default=None)


@dataclass
class Postgres:
    port: int

    def url(self, database: str) -> str:
        return f"postgresql://tester:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """Make an empty database; its URL."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as db:
            db.execute(f'CREATE DATABASE "{database}"'.encode())
        return self.url(database)

    def drop(self, database: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as db:
            db.execute(f'DROP DATABASE "{database}" WITH (FORCE)'.encode())


class Wire:
    """A connection to the database that can go silent without breaking, as one through a firewall does."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def silent(self) -> None:
        self._flows.clear()

    def heard_again(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError), one, other:
            while data := one.recv(65536):
                self._flows.wait()
                other.sendall(data)


@contextlib.contextmanager
def postgres_server(programs: Path) -> Iterator[Postgres]:
    """PostgreSQL refuses to run as root: it then runs as another user, who owns the data directory."""
    root = Path(tempfile.mkdtemp(prefix="midstream-postgres-"))
    user = unprivileged() if os.getuid() == 0 else None
    try:
        secret = root / "password"
        secret.write_text(PASSWORD)
        if user is not None:
            for path in (root, secret):
                os.chown(path, user.pw_uid, user.pw_gid)
        data = root / "data"
        initdb = [programs / "initdb", "-D", data, "-U", "tester", "-A", "scram-sha-256", "--pwfile", secret]
        _run([*map(str, initdb), "-E", "UTF8", "--no-locale", "--no-sync"], user, root)
        with _running(programs, data, root, user) as port:
            yield Postgres(port)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def unprivileged() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError("no user to run PostgreSQL as")


def as_user(user: pwd.struct_passwd | None) -> dict[str, object]:
    return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _run(command: list[str], user: pwd.struct_passwd | None, cwd: Path) -> None:
    done = subprocess.run(command, capture_output=True, cwd=cwd, timeout=120, **as_user(user))  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr.decode()


@contextlib.contextmanager
def _running(programs: Path, data: Path, root: Path, user: pwd.struct_passwd | None) -> Iterator[int]:
    for _ in range(5):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": "",
            "fsync": "off",
        }
        command = [str(programs / "postgres"), "-D", str(data)]
        command += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (root / "log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, cwd=root, **as_user(user))  # type: ignore[call-overload]
        try:
            if _answers(server, port, data, root / "log"):
                yield port
                return
        finally:
            # A fast shutdown.
            server.send_signal(signal.SIGINT)
            server.wait(120)
    raise AssertionError("somebody else took every port that was free")


def _answers(server: subprocess.Popen[bytes], port: int, data: Path, log: Path) -> bool:
    """Wait until it does; False: somebody else had taken the port, maybe another PostgreSQL of the same password."""
    deadline = time.monotonic() + START_S
    while server.poll() is None:
        with (
            contextlib.suppress(psycopg.OperationalError),
            psycopg.connect(Postgres(port).url("postgres"), connect_timeout=5) as db,
        ):
            if db.execute("SHOW data_directory").fetchone() == (str(data),):
                return True
        assert time.monotonic() < deadline, f"PostgreSQL did not start: {log.read_text()}"
        time.sleep(0.05)
    said = log.read_text()
    assert "Address already in use" in said, f"PostgreSQL did not start: {said}"
    return False
