"""A real PgBouncer before the PostgreSQL server of the tests: in transaction mode, two connections for all clients."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
from postgres import PASSWORD, Postgres, as_user, unprivileged

INI = """[databases]
* = host=127.0.0.1 port={server} user=tester password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = plain
auth_file = {root}/users
pool_mode = transaction
default_pool_size = 2
# As docs/api.md says.
ignore_startup_parameters = extra_float_digits, options
"""


def find_pgbouncer() -> str | None:
    """In PATH, or where Debian puts it."""
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")


@contextlib.contextmanager
def pooled(server: Postgres, program: str) -> Iterator[Postgres]:
    """It refuses to run as root, as PostgreSQL does."""
    user = unprivileged() if os.getuid() == 0 else None
    root = Path(tempfile.mkdtemp(prefix="midstream-pgbouncer-"))
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        (root / "users").write_text(f'"tester" "{PASSWORD}"\n')
        (root / "ini").write_text(INI.format(server=server.port, password=PASSWORD, port=port, root=root))
        root.chmod(0o755)
        for name in ("users", "ini"):
            (root / name).chmod(0o644)
        log = root / "log"
        with log.open("wb") as out:
            process = subprocess.Popen([program, str(root / "ini")], stdout=out, stderr=out, **as_user(user))  # type: ignore[call-overload]
        try:
            found = Postgres(port)
            deadline = time.monotonic() + 60.0
            while True:
                assert process.poll() is None, log.read_text()
                with (
                    contextlib.suppress(psycopg.OperationalError),
                    psycopg.connect(found.url("postgres"), connect_timeout=5),
                ):
                    break
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield found
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(60)
    finally:
        shutil.rmtree(root, ignore_errors=True)
