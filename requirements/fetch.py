#!/usr/bin/env python3
"""Installs packages with pip and says what it does: `make setup` and the like.

    python requirements/fetch.py ENVIRONMENT WHAT PIP_ARGUMENTS...

Always holds: the first line says what is installed, where, how many packages a file of requirements pins, and what they take on
the disk, where SIZES knows. After that no line is later than QUIET_S, so that a slow machine and a stopped one differ. When pip
fails, everything that it said is shown, and its exit code is the answer. Needs nothing but Python.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

QUIET_S = 10.0
#: WHAT -> MB on the disk, measured on Linux x86-64. A download is a third to a half of that.
SIZES = Path(__file__).with_name("sizes.json")
_FETCHED = re.compile(
    r"\s*(Downloading|Using cached) (\S+?)(?:\.whl|\.tar\.gz|\.zip)(?: \(([\d.]+) (bytes|[kMG]B)\))?$"
)
_UNITS = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}


class Progress:
    """What pip has done so far, from the lines that it prints."""

    def __init__(self, what: str, where: str, begun: float) -> None:
        self.what, self.where, self.begun = what, where, begun
        self.packages, self.mb, self.cached_mb = 0, 0.0, 0.0
        self.doing = "asking the package index"
        self.said: list[str] = []

    def take(self, line: str) -> None:
        self.said.append(line)
        if found := _FETCHED.match(line):
            how, name, amount, unit = found.groups()
            # An index may not say how large a file is.
            mb = float(amount) * _UNITS[unit] if amount else 0.0
            self.packages += 1
            self.mb += mb
            self.cached_mb += mb if how == "Using cached" else 0.0
            self.doing = f"fetching {name} ({mb:.1f} MB)"
        elif line.lstrip().startswith("Processing ") and line.endswith(".whl"):
            # From a directory of this machine.
            file = Path(line.split()[1])
            self.packages += 1
            self.mb += file.stat().st_size / 1e6 if file.exists() else 0.0
            self.doing = f"reading {file.name}"
        elif line.lstrip().startswith("Collecting "):
            self.doing = f"fetching {line.split()[1]}"
        elif line.startswith("Installing collected packages"):
            self.doing = f"installing {line.count(',') + 1} packages"
        elif "metadata" in line or line.lstrip().startswith(("Building wheel", "Installing build")):
            self.doing = line.strip().rstrip(". ")

    def about(self, arguments: Sequence[str], sizes: dict[str, float]) -> str:
        much = [f"{count} packages"] if (count := pinned(arguments)) else []
        much += [f"about {sizes[self.what]:.0f} MB on the disk"] if self.what in sizes else []
        return f"setup: {self.what} into {self.where}{': ' if much else ''}{', '.join(much)}"

    def now(self, at: float) -> str:
        return f"setup: {at - self.begun:.0f} s, {self.packages} packages and {self.mb:.0f} MB so far; {self.doing}"

    def end(self, at: float) -> str:
        cached = f", {self.cached_mb:.0f} MB of them from pip's cache" if self.cached_mb else ""
        much = f"{self.packages} packages, {self.mb:.0f} MB{cached}"
        return f"setup: {self.what} is installed: {much}, in {at - self.begun:.0f} s"


def pinned(arguments: Sequence[str]) -> int:
    """How many packages the files behind -r pin, with those that they name."""
    files = [Path(file) for flag, file in pairwise(arguments) if flag == "-r"]
    count = 0
    while files:
        file = files.pop()
        for line in file.read_text().splitlines():
            words = line.split("#")[0].split()
            count += bool(words) and "==" in words[0]
            files += [file.parent / words[1]] if words[:1] == ["-r"] else []
    return count


def main(environment: str, what: str, *arguments: str, quiet_s: float = QUIET_S) -> int:
    pip = [
        f"{environment}/bin/python",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    ]
    progress = Progress(what, environment, time.monotonic())
    sizes = json.loads(SIZES.read_text()) if SIZES.exists() else {}
    print(progress.about(arguments, sizes), flush=True)
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(quiet_s):
            print(progress.now(time.monotonic()), flush=True)

    with subprocess.Popen(
        [*pip, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as running:
        teller = threading.Thread(target=tell, name="progress")
        teller.start()
        try:
            assert running.stdout is not None
            for line in running.stdout:
                progress.take(line.rstrip("\n"))
        finally:
            ended.set()
            teller.join()
    if running.returncode:
        print(*progress.said, sep="\n", file=sys.stderr)
        print(f"setup: {what}: pip ended with {running.returncode}", file=sys.stderr)
        return running.returncode
    print(progress.end(time.monotonic()), flush=True)
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
