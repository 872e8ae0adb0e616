"""What commands that read records say, and exit with, where record files are gone.

Always holds: a command that would succeed exits with GAPS instead, unless its user allows the gap.
"""

from __future__ import annotations

import argparse
import sys

from midstream.client.gone import GoneFiles
from midstream.core.text import plain

#: The exit code: all that could be done was done, and turns are without the columns of record files that are gone.
GAPS = 3


def add_gaps_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-gone",
        action="store_true",
        help=f"exit with 0, not {GAPS}, where record files are gone, as those older than records.files_keep_s are",
    )


def exit_code(code: int, gone: GoneFiles, options: argparse.Namespace) -> int:
    """code: that of the command without a gap. Says on stderr what is gone."""
    if not gone.turns:
        return code
    print(plain(gone.summary()), file=sys.stderr)
    return GAPS if code == 0 and not options.allow_gone else code
