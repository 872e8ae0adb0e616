"""`midstream dashboard`: opens a server's dashboard in a browser.

Always holds: the address is printed, whether or not there is a browser. The key is never part of it: the page asks for one.
"""

from __future__ import annotations

import argparse
import sys
import webbrowser

import httpx

from midstream.commands.common import add_url_arguments, address, guarded
from midstream.core.pages import DASHBOARD

ANSWER_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=guarded(_open))
    add_url_arguments(parser)
    parser.add_argument("--no-browser", action="store_true", help="print the address alone")


def _open(options: argparse.Namespace) -> int:
    url = address(options).rstrip("/") + DASHBOARD
    try:
        status = httpx.get(url, timeout=ANSWER_S).status_code
    except httpx.HTTPError as error:
        print(f"midstream dashboard: no answer from {url}: {error}", file=sys.stderr)
        return 1
    if status != httpx.codes.OK:
        print(
            f"midstream dashboard: {url} answers with status {status}: no dashboard is there", file=sys.stderr
        )
        return 1
    print(url)
    if not options.no_browser:
        webbrowser.open(url)
    return 0
