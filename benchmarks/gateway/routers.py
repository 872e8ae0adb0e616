"""The routers that are compared: how each is started on a list of replicas, told of a change of them, and ended.

Always holds: every router runs with session affinity by the same header, keeps its connections to replicas, checks their
health as it does by default, and writes no log line per request; it may use one core only.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from hardware import commit_of, source_of

from gateway import peers
from gateway.tools import pin
from midstream.core.config import GatewaySettings
from midstream.core.supervision import Listening
from midstream.fleet.desired_state import Running, RunningReplica
from midstream.launch.specs import GatewaySpec

PR_SET_PDEATHSIG = 1
START_S_MAX = 60.0
GONE_S_MAX = 30.0
DEPLOYMENT = "accounts/local/deployments/default"


class RouterFailed(Exception):
    """It did not start; the message ends with its log."""


class Router(ABC):
    """One router in front of `urls`, on `core`."""

    name: str
    # What it prints is for its supervisor, and no log.
    talks = False

    def __init__(self, folder: Path, urls: Sequence[str], core: int) -> None:
        self.folder, self.urls, self.core = folder, list(urls), core
        self.port, self.other_port = free_port(), free_port()
        self.log = folder / f"{self.name}.log"
        # Indexes of replicas it was told to leave out.
        self.out = set[int]()
        self.process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]: ...

    def environment(self) -> dict[str, str]:
        """Variables that its process has beside this one's."""
        return {}

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Why it cannot run here; None when it can."""

    @abstractmethod
    def version(self) -> str: ...

    @abstractmethod
    def apply(self) -> None:
        """Tell the running router that all replicas but those in `out` are its own."""

    def files(self) -> dict[str, str]:
        """Configuration that its command names, for the record."""
        return {}

    def started(self) -> None:  # noqa: B027
        """The process runs."""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, request: bytes) -> None:
        """Return when `request` is answered with 200. Raises RouterFailed."""
        core = self.core

        def child() -> None:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.sched_setaffinity(0, {core})

        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self.talks else log,
                stderr=log,
                start_new_session=True,
                preexec_fn=child,
                env={**os.environ, **self.environment()},
            )
        try:
            self.started()
            self._wait_until_it_serves(request)
        except (OSError, RouterFailed):
            self.stop()
            said = self.log.read_text(errors="replace")[-3000:]
            raise RouterFailed(f"{self.name} did not serve:\n{said}") from None
        self.pin(core)

    def _wait_until_it_serves(self, request: bytes) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_S_MAX
        while probe(self.port, request) != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RouterFailed(self.name)
            time.sleep(0.1)

    def pin(self, core: int) -> None:
        self.core = core
        pin(self.pid, core)

    def restart(self, request: bytes) -> None:
        self.stop()
        self.start(request)

    def leave(self, index: int) -> None:
        self.out.add(index)
        self.apply()

    def join(self, index: int) -> None:
        self.out.discard(index)
        self.apply()

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def configuration(self) -> dict[str, Any]:
        """How it was run, with its folder left out."""
        folder = str(self.folder) + "/"
        shown = [Path(part).name if part.startswith("/") else part for part in self.command()]
        files = {name: text.replace(folder, "") for name, text in self.files().items()}
        return {"command": " ".join(shown), **({"files": files} if files else {})}


class Midstream(Router):
    """The gateway process as the supervisor starts it; this is the supervisor, of replicas that are mocks."""

    name = "midstream"
    talks = True

    def command(self) -> list[str]:
        return [sys.executable, "-m", "midstream.launch.gateway"]

    @classmethod
    def missing(cls) -> str | None:
        return None

    def version(self) -> str:
        return "this commit"

    def started(self) -> None:
        assert self.process is not None
        spec = GatewaySpec(
            host="127.0.0.1",
            port=0,
            model="accounts/local/models/m",
            deployment=DEPLOYMENT,
            replicas=len(self.urls),
            models=("m",),
            bucket=(self.folder / "bucket").as_uri(),
            transition="async",
            ledger=f"sqlite:///{self.folder / 'ledger.db'}",
            token="bench-gateway",
            settings=GatewaySettings(),
            log_level="info",
        )
        (self.folder / "bucket").mkdir(exist_ok=True)
        # Also of a commit that has fewer settings.
        defaults = {**msgspec.to_builtins(spec), "settings": {}}
        self._say(msgspec.json.encode(defaults))
        assert self.process.stdout is not None
        # It listens; a line said before that is not heard.
        said = self.process.stdout.readline()
        told = msgspec.json.decode(said, type=Listening) if said else Listening()
        if not told.port:
            raise RouterFailed(self.name)
        self.port = told.port
        threading.Thread(target=_read_out, args=(self.process.stdout,), daemon=True).start()
        self.apply()

    def apply(self) -> None:
        running = Running(
            tuple(
                RunningReplica(name=f"replica-{i}", deployment=DEPLOYMENT, url=url)
                for i, url in enumerate(self.urls)
                if i not in self.out
            )
        )
        self._say(msgspec.json.encode(running))

    def _say(self, line: bytes) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()


class MidstreamBefore(Midstream):
    """Another commit of it, beside this one: what a change costs."""

    name = "midstream-before"
    checkout: Path | None = None

    def environment(self) -> dict[str, str]:
        return source_of(self.checkout)

    @classmethod
    def missing(cls) -> str | None:
        return None if cls.checkout is not None else "no --before"

    def version(self) -> str:
        return commit_of(self.checkout)


class PythonPeer(Router):
    """A router from the package index, told of replicas over HTTP."""

    def arguments(self) -> list[str]:
        return []

    def command(self) -> list[str]:
        common = ["--host", "127.0.0.1", "--port", str(self.port), "--prometheus-port", str(self.other_port)]
        return [str(peers.program(self.name)), *self.arguments(), "--worker-urls", *self.urls, *common]

    @classmethod
    def missing(cls) -> str | None:
        return None if peers.program(cls.name) else f"{peers.PACKAGES[cls.name]} is not installed"

    def version(self) -> str:
        return peers.PACKAGES[self.name]

    def apply(self) -> None:
        known = self.workers()
        for index, url in enumerate(self.urls):
            if index in self.out and url in known:
                ask(self.port, "DELETE", f"/workers/{known[url]}")
            elif index not in self.out and url not in known:
                ask(self.port, "POST", "/workers", {"url": url})
        # It drains in the background.
        deadline = time.monotonic() + GONE_S_MAX
        while any(self.urls[index] in self.workers() for index in self.out):
            if time.monotonic() > deadline:
                raise RouterFailed(f"{self.name} did not let go of a replica in {GONE_S_MAX:g} s")
            time.sleep(0.1)

    def workers(self) -> dict[str, str]:
        """URL to id."""
        status, answer = ask(self.port, "GET", "/workers")
        if status != 200:
            raise RouterFailed(f"{self.name}: GET /workers answered {status}")
        return {one["url"]: one["id"] for one in json.loads(answer)["workers"]}


class VllmRouter(PythonPeer):
    name = "vllm-router"
    policy = "consistent_hash"

    def arguments(self) -> list[str]:
        # "warning" logs every request.
        return ["--policy", self.policy, "--log-level", "error"]

    def apply(self) -> None:
        for index, url in enumerate(self.urls):
            path = "/remove_worker" if index in self.out else "/add_worker"
            ask(self.port, "POST", f"{path}?url={url}")


class VllmRouterByCache(VllmRouter):
    """It sends a request where most of its text went before, unless loads differ much."""

    policy = "cache_aware"


class Smg(PythonPeer):
    name = "smg"

    def arguments(self) -> list[str]:
        return ["launch", "--policy", "consistent_hashing", "--log-level", "warn"]


class SglangRouter(PythonPeer):
    name = "sglang-router"

    def arguments(self) -> list[str]:
        return ["launch", "--policy", "manual", "--assignment-mode", "min_group", "--log-level", "warn"]


class DebianPeer(Router):
    """A router that reads a file."""

    def files(self) -> dict[str, str]:
        return {f"{self.name}.conf": self.config()}

    @abstractmethod
    def config(self) -> str: ...

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.conf"

    @classmethod
    def missing(cls) -> str | None:
        return None if peers.program(cls.name) else "is not installed"

    def version(self) -> str:
        done = subprocess.run(
            [str(peers.program(self.name)), "-v"], capture_output=True, text=True, check=False
        )
        found = re.search(r"\d+\.\d+\.\d+", done.stdout + done.stderr)
        return found[0] if found else "unknown"

    def start(self, request: bytes) -> None:
        self.path.write_text(self.config())
        super().start(request)


class HAProxy(DebianPeer):
    name = "haproxy"
    threads = 1
    connections_max = 8192

    def command(self) -> list[str]:
        return [str(peers.program(self.name)), "-db", "-f", str(self.path)]

    def config(self) -> str:
        servers = "".join(
            f"    server r{i} {url.removeprefix('http://')} check inter 2s\n"
            for i, url in enumerate(self.urls)
        )
        return f"""global
    nbthread {self.threads}
    maxconn {self.connections_max}
    stats socket {self.folder}/haproxy.sock level admin
defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    option http-no-delay
frontend front
    bind 127.0.0.1:{self.port}
    default_backend replicas
backend replicas
    balance hdr(x-session-id)
    hash-type consistent
    http-reuse always
    option httpchk GET /health
{servers}"""

    def apply(self) -> None:
        for index in range(len(self.urls)):
            state = "maint" if index in self.out else "ready"
            with socket.socket(socket.AF_UNIX) as control:
                control.connect(str(self.folder / "haproxy.sock"))
                control.sendall(f"set server replicas/r{index} state {state}\n".encode())
                while control.recv(4096):
                    pass


class Nginx(DebianPeer):
    name = "nginx"

    def command(self) -> list[str]:
        return [str(peers.program(self.name)), "-p", str(self.folder), "-c", str(self.path)]

    def config(self) -> str:
        servers = "".join(
            f"        server {url.removeprefix('http://')}{' down' if i in self.out else ''};\n"
            for i, url in enumerate(self.urls)
        )
        temporary = "".join(
            f"    {kind}_temp_path {self.folder}/nginx-{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        user = "user root;\n" if os.geteuid() == 0 else ""
        return f"""{user}daemon off;
worker_processes 1;
pid {self.folder}/nginx.pid;
error_log {self.log} warn;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    keepalive_requests 1000000000;
    client_max_body_size 64m;
    client_body_buffer_size 1m;
{temporary}    upstream replicas {{
        hash $http_x_session_id consistent;
{servers}        keepalive 512;
        keepalive_requests 1000000000;
    }}
    server {{
        listen 127.0.0.1:{self.port} backlog=4096;
        location / {{
            proxy_pass http://replicas;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 1h;
        }}
    }}
}}
"""

    def apply(self) -> None:
        self.path.write_text(self.config())
        os.kill(self.pid, signal.SIGHUP)
        # The new worker takes over; it says so nowhere.
        time.sleep(1.0)
        self.pin(self.core)


ROUTERS: tuple[type[Router], ...] = (
    Midstream,
    MidstreamBefore,
    VllmRouter,
    Smg,
    SglangRouter,
    HAProxy,
    Nginx,
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def probe(port: int, request: bytes) -> int:
    """The status that one request gets; 0 when nobody answers."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10.0) as client:
            client.sendall(request)
            line = client.makefile("rb").readline()
    except OSError:
        return 0
    return int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else 0


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    try:
        headers = {} if body is None else {"content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _read_out(pipe: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        while pipe.read1(65536):
            pass


def folder_for(name: str, under: Path) -> Path:
    folder = under / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Short, since sockets lie in it; others may read it, since a router's workers may be others."""
    return tempfile.TemporaryDirectory(prefix="gwb-", dir="/tmp")
