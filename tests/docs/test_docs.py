"""What the documents claim about the code, checked against the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.replica.swap import mermaid

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_swap_diagram_is_the_one_drawn_from_the_table() -> None:
    (drawn,) = re.findall(r"```mermaid\n(.*?)```", ARCHITECTURE, flags=re.DOTALL)
    assert drawn.strip() == mermaid().strip()


def test_every_module_is_named_in_the_architecture() -> None:
    package = ROOT / "src" / "midstream"
    missing = []
    for file in sorted(package.rglob("*.py")):
        relative = file.relative_to(package)
        names = {f"`{relative}`", relative.name} | {f"`{p}/`" for p in relative.parents if str(p) != "."}
        if file.name != "__init__.py" and not any(name in ARCHITECTURE for name in names):
            missing.append(str(relative))
    assert missing == []


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/publishing.md"]
)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    targets = [t for t in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if not t.startswith("http")]
    missing = [t for t in targets if not ((ROOT / document).parent / t).exists()]
    assert missing == []


def test_light_modules_import_without_torch() -> None:
    modules = ["types", "errors", "config", "sessionkey", "client", "gateway.server", "launch.gateway", "cli"]
    modules += ["tinker.app", "tinker.sampling", "tinker.training"]
    code = (
        "import sys\n"
        + "\n".join(f"import midstream.{m}" for m in modules)
        + "\nprint('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
