"""A Chromium of the machine's own, for tests of pages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REQUIRED = os.environ.get("MIDSTREAM_TEST_CHROMIUM") == "required"

needs_chromium = pytest.mark.skipif(CHROMIUM is None and not REQUIRED, reason="no Chromium is installed")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A Playwright browser."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "MIDSTREAM_TEST_CHROMIUM=required, and there is no Chromium"
    with sync_playwright() as play:
        launched = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()
