"""How long a file and a function, and how wide a constructor may be. Ruff limits the cyclomatic complexity (C901)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from source import PACKAGES, modules, nodes

FILE_LINES_MAX = 500
LINES_BELOW = 60
ARGUMENTS_MAX = 8
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    for path in modules():
        name = path.relative_to(PACKAGES[0].parent)
        for node in nodes(path):
            if isinstance(node, Function):
                yield f"{name}:{node.name}:{node.lineno}", node


def test_no_file_has_more_than_five_hundred_lines() -> None:
    """A file that grows has a second owner in it."""
    long = {
        str(path.relative_to(PACKAGES[0].parent)): len(path.read_text().splitlines()) for path in modules()
    }
    assert {name: lines for name, lines in long.items() if lines > FILE_LINES_MAX} == {}


def test_no_function_has_sixty_lines() -> None:
    found = list(functions())
    assert len(found) > 1000
    assert [name for name, node in found if (node.end_lineno or 0) - node.lineno + 1 >= LINES_BELOW] == []


def test_no_constructor_takes_more_than_eight_arguments() -> None:
    """More than that come in groups, each a class with a name. The publisher's are the public interface of a client."""
    wide = {
        name.partition(":")[0]: count
        for name, node in functions()
        if node.name == "__init__"
        and (count := len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1)
        > ARGUMENTS_MAX
    }
    assert wide == {"midstream/client/publish.py": 18}
