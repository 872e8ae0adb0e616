"""How long a function may be. Ruff limits the cyclomatic complexity (C901)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import midstream

SOURCE = Path(midstream.__file__).parent
LINES_BELOW = 60
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function):
                yield f"{path.relative_to(SOURCE)}:{node.name}:{node.lineno}", node


def test_no_function_has_sixty_lines() -> None:
    found = list(functions())
    assert len(found) > 1000
    assert [name for name, node in found if (node.end_lineno or 0) - node.lineno + 1 >= LINES_BELOW] == []
