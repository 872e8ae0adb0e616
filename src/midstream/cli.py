"""The `midstream` command.

Owns: options, and how a failure looks on a terminal: one line on standard error. Exit codes: 0 done, 1 it failed while
running, 2 it was asked for something that cannot work, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import NoReturn

from midstream import __version__
from midstream.config import Settings, load_settings
from midstream.errors import ConfigError

SERVE_OPTIONS = (
    "model",
    "replicas",
    "engine",
    "host",
    "port",
    "bucket",
    "transition",
    "state_dir",
    "log_level",
    "kv_cache_memory",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="midstream", description="Rollout serving for RL post-training.")
    parser.add_argument("--version", action="version", version=f"midstream {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="start a gateway and its replicas on this machine"))
    _add_model(commands.add_parser("model", help="write a built-in model as a Hugging Face directory"))
    demo = commands.add_parser(
        "demo", help="the main job: an RL loop with weights hot-loaded under live rollouts"
    )
    if "demo" in sys.argv[1:2]:  # its options come with its dependencies, which serving does not need
        _add_demo(demo)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.set_defaults(run=_serve)
    parser.add_argument("--model", help=f"built-in name or Hugging Face directory (default: {default.model})")
    parser.add_argument("--replicas", type=int, help=f"engines to start (default: {default.replicas})")
    parser.add_argument("--engine", choices=("embedded", "vllm"), help=f"(default: {default.engine})")
    parser.add_argument("--host", help=f"address to listen on (default: {default.host})")
    parser.add_argument("--port", type=int, help=f"0 takes a free one (default: {default.port})")
    parser.add_argument("--bucket", help="where snapshots appear, file:///DIR (default: STATE_DIR/bucket)")
    parser.add_argument(
        "--transition",
        choices=("async", "sync"),
        help=f"whether streams cross a swap or finish before it (default: {default.transition})",
    )
    parser.add_argument("--state-dir", help=f"ledger, caches, built-in models (default: {default.state_dir})")
    parser.add_argument(
        "--kv-cache-memory",
        metavar="SIZE",
        help="KV cache of each embedded engine, e.g. 512MiB (default: 65536 tokens)",
    )
    parser.add_argument("--config", help="TOML file with any of the settings; options here win over it")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="(default: info)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_model)
    parser.add_argument("name", choices=("tiny-moe",))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    from midstream.demo.main import add_arguments, run_demo

    parser.set_defaults(run=run_demo)
    add_arguments(parser)


def _serve(options: argparse.Namespace) -> int:
    from midstream.launch import local

    settings = load_settings(options.config, {name: getattr(options, name) for name in SERVE_OPTIONS})
    if settings.engine == "vllm":
        raise ConfigError("--engine vllm: not available in this version; use embedded")
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s serve %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with local.locked(Path(settings.state_dir)):
        local.check_port(settings.host, settings.port)
        local.bucket_url(settings)
        name, directory = local.resolve_model(settings)
        try:
            asyncio.run(local.run(settings, name, directory, lambda line: print(line, flush=True)))
        except local.StartFailed as error:
            print(f"midstream serve: {error}", file=sys.stderr)
            return 1
    return 0


def _model(options: argparse.Namespace) -> int:
    from midstream.models.tiny_moe import write_tiny_moe

    try:
        write_tiny_moe(
            options.directory,
            seed=options.seed,
            layers=options.layers,
            hidden=options.hidden,
            experts=options.experts,
            top_k=options.top_k,
            dtype=options.dtype,
        )
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    print(f"wrote {options.directory}")
    return 0


def main() -> int:
    options = build_parser().parse_args()
    try:
        code: int = options.run(options)
    except ConfigError as error:
        print(f"midstream {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    raise SystemExit(main())
