"""What the documents claim about the code, checked against the code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from diagrams import mermaid

from midstream.core.table import Table
from midstream.engine.vllm import in_place
from midstream.ledger import transfers
from midstream.proxy import request_state
from midstream.replica import transfer
from midstream.replica.swap import attempts, table

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize(
    "machine",
    [
        table.MOVES,
        attempts.ATTEMPTS,
        transfer.PARTS,
        in_place.HOLDS,
        transfers.MOVES,
        request_state.MOVES,
    ],
)
def test_the_diagrams_are_the_ones_drawn_from_the_tables(machine: Table[Any, Any, Any]) -> None:
    assert mermaid(machine) in (ROOT / "docs" / "state-machines.md").read_text()


def test_the_changelog_has_the_version_that_comes() -> None:
    """A merge may empty a file that no other test reads."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert text.startswith("# Changelog\n")
    assert "\n## 0.2.0" in text
    assert 40 < len(text.partition("\n## 0.2.0")[2].splitlines()) <= 60


def test_every_package_has_a_row_in_the_architecture() -> None:
    package = ROOT / "src" / "midstream"
    packages = [*package.iterdir(), *package.parent.iterdir()]
    parts = [f"`{p.name}/`" for p in packages if (p / "__init__.py").exists() and p != package]
    parts += [f"`{p.name}`" for p in package.glob("*.py") if p.name != "__init__.py"]
    rows = [line.split("|")[1] for line in ARCHITECTURE.splitlines() if line.startswith("| `")]
    assert [part for part in parts if not any(part in row for row in rows)] == []


def test_every_path_that_the_architecture_names_is_there() -> None:
    """A path is written from midstream on or with the building's name, or after one of the same directory."""
    source = ROOT / "src"
    named = set(re.findall(r"`([a-z_0-9/]+\.py)`", ARCHITECTURE))
    modules = [str(p.relative_to(source)) for p in source.rglob("*.py")]
    known = {module.removeprefix("midstream/") for module in modules} | {Path(one).name for one in modules}
    known |= {p.name for p in (ROOT / "tests").rglob("*.py")}
    tests = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("*.py")}
    assert sorted(named - known - tests) == []


def test_no_two_decisions_have_one_number() -> None:
    numbers = Counter(file.name.partition("-")[0] for file in (ROOT / "docs" / "decisions").iterdir())
    assert [number for number, count in numbers.items() if count > 1] == []


def test_every_module_says_what_it_is() -> None:
    source = ROOT / "src"
    silent = [
        str(file.relative_to(source))
        for file in sorted(source.rglob("*.py"))
        if file.read_text().strip() and not file.read_text().lstrip().startswith('"""')
    ]
    assert silent == []


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/publishing.md"]
)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    targets = [t for t in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if not t.startswith("http")]
    missing = [t for t in targets if not ((ROOT / document).parent / t).exists()]
    assert missing == []


def test_light_modules_import_without_torch() -> None:
    modules = [
        "midstream.core.types",
        "midstream.core.errors",
        "midstream.core.config",
        "midstream.client",
        "midstream.proxy.server",
        "midstream.api.app",
        "midstream.fleet.loop",
        "midstream.cli",
        "midstream.launch.gateway",
        "midstream_tinker.front",
    ]
    code = (
        "import sys\n"
        + "\n".join(f"import {m}" for m in modules)
        + "\nprint('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
