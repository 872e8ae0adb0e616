"""The source of the packages, parsed once in a process for all tests that read it.

Owns: the list of packages, their modules and syntax trees. A test does not change a tree.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import midstream
import midstream_kernels
import midstream_tinker

PACKAGES = [Path(package.__file__).parent for package in (midstream, midstream_kernels, midstream_tinker)]


@cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(module for package in PACKAGES for module in package.rglob("*.py")))


@cache
def nodes(module: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module's syntax tree."""
    return tuple(ast.walk(ast.parse(module.read_text())))
