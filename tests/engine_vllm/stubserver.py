"""What a vLLM server looks like from outside, without vLLM: an interpreter to name in `vllm.python`.

`fake_python` makes one. Run, it takes `-P -m MODULE --port N ...`, notes what it was given, and speaks the endpoints that
engine/vllm/server.py asks. Under it is an "engine core" that ignores SIGTERM, and under that a "worker" in a session of its
own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DEV = ("/pause", "/resume", "/is_paused", "/collective_rpc", "/update_weight_version", "/server_info")
UNDER = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {more}; time.sleep(600)"
WORKER = UNDER.format(more="pass")
CORE = UNDER.format(
    more="import subprocess; w = subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1]], start_new_session=True); "
    "print(w.pid, flush=True); sys.stdout.close()"
)


def fake_python(folder: Path) -> str:
    """Path of an executable in `folder` that is the server, whatever module it is asked for. See `Fake` for its settings."""
    stub = folder / "python"
    stub.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {folder} "$@"\n')
    stub.chmod(0o755)
    return str(stub)


class Fake:
    """The other end: what is in the folder of a fake server. Files in it, made by a test, are what it does.

    `wait`: it begins to listen when that is gone. `sick`: /health answers 500. `dead`: 503. `exit`: it prints this and ends
    with code 3.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = fake_python(folder)

    def given(self) -> dict[str, Any]:
        """argv and environment of the last start."""
        given: dict[str, Any] = json.loads((self.folder / "given").read_text())
        return given

    def pids(self) -> dict[str, int]:
        """server, core, worker and keeper of the last start."""
        pids: dict[str, int] = json.loads((self.folder / "pids").read_text())
        return pids


def until(condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


def running(pid: int) -> bool:
    """Not gone, and not a zombie that nobody has looked at."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def serve(folder: Path, args: list[str]) -> None:
    note(folder / "given", {"argv": args, "env": dict(os.environ)})
    if (folder / "exit").exists():
        print((folder / "exit").read_text(), flush=True)
        sys.exit(3)
    core = subprocess.Popen([sys.executable, "-S", "-c", CORE, WORKER], stdout=subprocess.PIPE)
    assert core.stdout is not None
    worker = int(core.stdout.readline())
    pids = {"server": os.getpid(), "core": core.pid, "worker": worker, "keeper": os.getppid()}
    note(folder / "pids", pids)
    while (folder / "wait").exists():
        time.sleep(0.01)
    http = ThreadingHTTPServer(("127.0.0.1", int(args[args.index("--port") + 1])), Handler)
    http.daemon_threads = True
    http.folder, http.flags, http.core = folder, args, core  # type: ignore[attr-defined]
    threading.Thread(target=end_with, args=(core,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print("Application startup complete.", flush=True)
    http.serve_forever()


def end_with(core: subprocess.Popen[bytes]) -> None:
    """As vLLM's watchdog does."""
    core.wait()
    print("EngineDeadError", flush=True)
    os._exit(1)


def note(file: Path, value: object) -> None:
    """Written whole, or not there."""
    file.with_suffix(".new").write_text(json.dumps(value))
    file.with_suffix(".new").replace(file)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        folder: Path = self.server.folder  # type: ignore[attr-defined]
        flags: list[str] = self.server.flags  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        key = os.environ.get("VLLM_API_KEY")

        def value(flag: str, default: int) -> int:
            return int(flags[flags.index(f"--{flag}") + 1]) if f"--{flag}" in flags else default

        if path.startswith("/v1") and key and self.headers.get("authorization") != f"Bearer {key}":
            self.answer(401, {"error": "Unauthorized"})
        elif path == "/health":
            self.answer(
                503 if (folder / "dead").exists() else 500 if (folder / "sick").exists() else 200, None
            )
        elif path == "/openapi.json" and "--disable-fastapi-docs" not in flags:
            paths = ["/health", "/v1/models"]
            paths += ["/inference/v1/generate"] * ("--enable-scale-out" in flags)
            paths += [*DEV] * (os.environ.get("VLLM_SERVER_DEV_MODE") == "1")
            paths += ["/v1/load_lora_adapter"] * (
                os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "True"
            )
            self.answer(200, {"openapi": "3.1.0", "paths": {path: {} for path in paths}})
        elif path == "/version":
            self.answer(200, {"version": "0.32.0"})
        elif path == "/v1/models":
            name = flags[flags.index("--served-model-name") + 1]
            self.answer(200, {"object": "list", "data": [{"id": name, "max_model_len": 2048}]})
        elif path == "/server_info":
            mode = flags[flags.index("--logprobs-mode") + 1] if "--logprobs-mode" in flags else "raw_logprobs"
            routes = "--enable-return-routed-experts" in flags
            model: dict[str, Any] = {"logprobs_mode": mode, "enable_return_routed_experts": routes}
            model |= {"seed": value("seed", 0), "max_logprobs": value("max-logprobs", 20)}
            config: dict[str, Any] = {"model_config": model, "lora_config": None}
            config["parallel_config"] = {"_api_process_count": value("api-server-count", 1)}
            structured = "--structured-outputs-config"
            given = (
                json.loads(flags[flags.index(structured) + 1]) if structured in flags else {"backend": "auto"}
            )
            config["structured_outputs_config"] = given
            if "--kv-transfer-config" in flags:
                config["kv_transfer_config"] = json.loads(flags[flags.index("--kv-transfer-config") + 1])
            if "--max-loras" in flags:
                targets = ["q_proj"] if "--lora-target-modules" in flags else None
                places = int(flags[flags.index("--max-loras") + 1])
                config["lora_config"] = {"max_loras": places, "target_modules": targets}
            self.answer(200, {"vllm_config": config, "vllm_env": {}})
        else:
            self.answer(404, {"detail": "Not Found"})

    def answer(self, status: int, value: object) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:])
