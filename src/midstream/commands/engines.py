"""The options that choose an engine, for `serve` and `replica`."""

from __future__ import annotations

import argparse

from midstream.core.config import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.add_argument("--engine", choices=("embedded", "vllm"), help=f"(default: {default.engine})")
    parser.add_argument(
        "--vllm-args",
        metavar="ARGS",
        help='for each vLLM server, in one string: --vllm-args "--tensor-parallel-size 2 --quantization fp8"',
    )
    parser.add_argument(
        "--vllm-python",
        metavar="FILE",
        help="interpreter of the environment that vLLM is installed in (default: this one)",
    )
    parser.add_argument(
        "--vllm-url",
        action="append",
        metavar="URL",
        help="http://HOST:PORT of a running vLLM server to attach to instead of starting one; one per replica",
    )
