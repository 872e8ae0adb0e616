"""`midstream conformance URL`: the promised behaviours of a live endpoint, row by row.

The rows and their options are a distribution of their own (conformance/). This module only loads it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util

from midstream.core.errors import ConfigError

PACKAGE = "midstream_conformance"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Raises ConfigError when the distribution is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            "the rows are a distribution of their own, midstream-conformance, which is not installed here; "
            "install it from a checkout of midstream: pip install ./conformance"
        )
    importlib.import_module(f"{PACKAGE}.command").add_arguments(parser)
