"""The other routers, installed: Python packages each in a virtual environment of its own, Debian packages by apt-get.

Always holds: what cannot be installed is said and left out, never replaced by another version.

    python -m gateway.peers [ROUTER...]     # install what is missing, of these or of all
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENVS = ROOT / ".venv-routers"
# Smg and sglang-router share a module's name.
PACKAGES = {
    "vllm-router": "0.1.17",
    "smg": "1.13.0",
    "sglang-router": "0.3.2",
}
DEBIAN = ("haproxy", "nginx")


def program(name: str) -> Path | None:
    """Where the router's program is; None when it is not installed, or in another version."""
    if name in PACKAGES:
        folder = VENVS / name
        found = list(folder.glob(f"lib/*/site-packages/{name.replace('-', '_')}-{PACKAGES[name]}.dist-info"))
        return folder / "bin" / name if found else None
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
    where = shutil.which(name, path=path)
    return Path(where) if where else None


def install(name: str) -> None:
    """Raises CalledProcessError or OSError when it cannot be."""
    if name in PACKAGES:
        folder = VENVS / name
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip: list[str | Path] = [
            folder / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, f"{name}=={PACKAGES[name]}"], check=True)
        return
    root: list[str] = [] if os.geteuid() == 0 else ["sudo", "-n"]
    # 1: services are not started.
    quiet = {
        **os.environ,
        "DEBIAN_FRONTEND": "noninteractive",
        "RUNLEVEL": "1",
    }
    for command in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", name]):
        subprocess.run([*root, "apt-get", *command], check=True, env=quiet, stdout=subprocess.DEVNULL)


def main() -> None:
    for name in sys.argv[1:] or (*PACKAGES, *DEBIAN):
        if program(name) is not None:
            continue
        try:
            install(name)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name} cannot be installed and is left out: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
