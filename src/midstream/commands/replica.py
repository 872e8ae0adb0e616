"""`midstream replica`: one engine without a gateway, for gateways that name it with --replica-url."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from midstream.commands import common
from midstream.core import logs
from midstream.core.config import Settings
from midstream.core.settings import load_settings

OPTIONS = (
    "model",
    "engine",
    "host",
    "port",
    "state_dir",
    "records",
    "log_level",
    "log_format",
    "kv_cache_memory",
    "vllm_args",
    "vllm_python",
    "vllm_url",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.set_defaults(run=_replica)
    parser.add_argument("--model", help=f"built-in name or Hugging Face directory (default: {default.model})")
    common.add_arguments(parser)
    parser.add_argument("--host", help=f"address to listen on (default: {default.host})")
    parser.add_argument("--port", type=int, help="0 takes a free one (default: 8080)")
    parser.add_argument("--state-dir", help=f"caches, built-in models (default: {default.state_dir})")
    parser.add_argument(
        "--records", metavar="URL", help="where records of sessions' turns go (default: nowhere)"
    )
    parser.add_argument("--kv-cache-memory", metavar="SIZE", help="KV cache of the engine, e.g. 4GiB")
    parser.add_argument("--config", help="TOML file with any of the settings, replica_token among them")
    common.add_log_arguments(parser)


def _replica(options: argparse.Namespace) -> int:
    from midstream.launch.engines import check_installed
    from midstream.launch.local import check_port
    from midstream.launch.models import known_models, model_directory
    from midstream.launch.process import StartFailed
    from midstream.launch.restart import locked

    settings = load_settings(options.config, {name: getattr(options, name) for name in OPTIONS})
    logs.configure("replica", logs.Logging(level=settings.log_level, format=settings.log_format))
    check_installed(settings)
    # It imports tokenizers and more.
    from midstream.launch import replica

    with locked(Path(settings.state_dir)):
        check_port(settings.host, settings.port)
        name, models = known_models(settings)
        spec = replica.replica_spec(settings, name, model_directory(models, name, Path(settings.state_dir)))
        try:
            asyncio.run(replica.run(spec, lambda line: print(line, flush=True)))
        except StartFailed as error:
            print(f"midstream replica: {error}", file=sys.stderr)
            return 1
    return 0
