"""`midstream demo`: see demo/main.py."""

from __future__ import annotations

import argparse

from midstream.demo.main import add_arguments as add_demo_arguments
from midstream.demo.main import run_demo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_demo)
    add_demo_arguments(parser)
