"""Which part of midstream may import which.

A part is a package or a top-level module of `midstream`. The CPU kernels, the Tinker building and the conformance
distribution are three more. `midstream` itself has the version, which every part may import, and imports nothing. Every import
statement counts, wherever it stands: at the top, in a function, under TYPE_CHECKING. Who reads a module has to know the other
one in each case. Imports by name at run time do not count: cli.py loads a subcommand so, commands/conformance.py the
conformance rows, and launch/reference.py the endpoints of the Tinker building.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from pathlib import Path

import pytest
import source
from source import nodes

ROOT = Path(__file__).parents[1]
PACKAGES = (*source.PACKAGES, ROOT / "conformance" / "src" / "midstream_conformance")
KERNELS = "midstream_kernels"
TINKER = "midstream_tinker"
CONFORMANCE = "midstream_conformance"

#: part: what it imports. A part imports only from parts above it, so there is no circle.
#: Remove an entry that is not needed any more. An entry more needs a reason in its commit.
ALLOWED: dict[str, str] = {
    # Vocabulary and pure functions that every process uses; no torch.
    "core": "",
    # Connections: a port's own, those to others, those to a child process.
    "http": "core",
    # Buildings of their own: the CPU kernels know nothing of midstream.
    KERNELS: "",
    # Snapshots and what is durable.
    "snapshots": "core midstream_kernels",
    "ledger": "core snapshots",
    # What a trainer imports.
    "client": "core snapshots",
    # Adapters between trainers and a server.
    "integrations": "client",
    # The dashboard's files.
    "dashboard": "",
    # Those of the page that shows the HTTP API.
    "apidocs": "",
    # Models and engines.
    "models": "",
    "engine": "core http snapshots midstream_kernels",
    # What records say, computed again: it reads them as a trainer does, and computes as an engine does.
    "verify": "client core engine snapshots",
    # One engine's replica.
    "replica": "core engine http snapshots",
    # The process that receives weights for one replica, behind the replica's port.
    "transfer": "core engine http replica snapshots",
    # All replicas of all deployments, and what is wanted of them.
    "fleet": "core http ledger snapshots",
    # The public port, and the control endpoints behind it.
    "proxy": "core fleet http",
    "api": "core fleet http ledger proxy snapshots",
    # Processes, the command line.
    "launch": "api core engine fleet http ledger models proxy replica snapshots transfer verify",
    "commands": "client core launch models snapshots verify",
    "cli": "core",
    # A building of its own, which nothing in midstream imports: the Tinker API and its trainer.
    TINKER: "client core http snapshots",
    # A distribution of its own, which nothing in midstream imports.
    CONFORMANCE: "client core snapshots",
}

#: Edges between the parts of midstream itself, at most. Lower it when there are fewer.
EDGES_MAX = 57

Graph = Mapping[str, set[str]]


def test_no_part_imports_what_the_table_does_not_allow() -> None:
    unknown = parts_of(graph()).keys() - ALLOWED.keys()
    assert unknown == set(), "a new part: give it its place in the table"
    wrong = [
        f"{module} imports {target}"
        for module, targets in sorted(graph().items())
        for target in sorted(targets)
        if part(target) not in ("", part(module), *ALLOWED.get(part(module), "").split())
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_allows_nothing_that_is_not_used() -> None:
    parts = parts_of(graph())
    assert [name for name in ALLOWED if name not in parts] == []
    unused = [
        f"{name} -> {to}" for name, tos in ALLOWED.items() for to in tos.split() if to not in parts[name]
    ]
    assert not unused, "\n".join(unused)


def test_a_part_stands_below_all_that_it_imports() -> None:
    order = list(ALLOWED)
    assert [
        f"{name} stands above {to}"
        for name, tos in ALLOWED.items()
        for to in tos.split()
        if order.index(to) >= order.index(name)
    ] == []


def test_there_is_no_circle_between_parts() -> None:
    assert circles(parts_of(graph())) == []


def test_there_is_no_circle_between_modules() -> None:
    assert circles(graph()) == []


def test_the_cpu_kernels_are_fenced() -> None:
    """The embedded engine and the snapshots use what midstream_kernels exports, and the kernels import nothing of midstream."""
    kernels = {name for name in graph() if f"{name}.".startswith("midstream_kernels.")}
    users = {name: targets & kernels for name, targets in graph().items() if name not in kernels}
    assert {name: targets for name, targets in users.items() if targets} == {
        f"midstream.{name}": {"midstream_kernels"}
        for name in (
            "engine.embedded.loading",
            "engine.embedded.sampler",
            "engine.embedded.weights",
            "snapshots.content",
        )
    }
    assert set().union(*(graph()[name] for name in kernels)) - kernels == set()


def test_the_folders_of_a_replica_stand_in_order() -> None:
    """What a request asks and what it gets are built on text, and swaps know of none of them."""
    order = ["text", "request", "response"]
    place = {name: name.split(".")[2] for name in graph() if name.startswith("midstream.replica.")}
    for name, folder in place.items():
        allowed = {*order[: order.index(folder) + 1]} if folder in order else {*order, "swap"}
        if folder == "swap":
            allowed = {"swap"}
        used = {place[target] for target in graph()[name] if target in place}
        assert used & {*order, "swap"} <= allowed, name


def test_there_are_at_most_so_many_edges() -> None:
    edges = sum(
        len(targets) for name, targets in parts_of(graph()).items() if name not in (TINKER, CONFORMANCE)
    )
    assert edges <= EDGES_MAX


SOURCES = {
    "midstream": "",
    "midstream.a": "",
    "midstream.a.one": "",
    "midstream.a.two": "",
    "midstream.b": "",
}


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("import midstream.b", {"midstream.b"}),
        ("import midstream.a.one as one", {"midstream.a.one"}),
        ("from midstream import b", {"midstream.b"}),
        ("from midstream.a import two, anything", {"midstream.a", "midstream.a.two"}),
        ("from midstream.a.two import anything", {"midstream.a.two"}),
        ("from . import two", {"midstream.a.two"}),
        ("from .two import anything", {"midstream.a.two"}),
        ("from .. import b", {"midstream.b"}),
        ("def later():\n    from midstream.b import anything", {"midstream.b"}),
        ("if TYPE_CHECKING:\n    from midstream.b import anything", {"midstream.b"}),
        ("try:\n    import midstream.b\nexcept ImportError:\n    pass", {"midstream.b"}),
        ("import json, numpy.linalg", set()),
        ("from midstream import __version__", {"midstream"}),
    ],
)
def test_every_form_of_import_is_seen(statement: str, found: set[str]) -> None:
    assert imported(ast.walk(ast.parse(statement)), "midstream.a.one", False, SOURCES.keys()) == found


def test_a_circle_is_found_however_long_it_is_and_what_only_leads_to_it_is_not_in_it() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a", "f"}, "f": {"g"}, "g": {"f"}}
    assert circles(graph) == [["a", "b", "c"], ["f", "g"]]
    assert circles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []


def part(module: str) -> str:
    """The part that a module belongs to; empty for `midstream` itself."""
    first, _, rest = module.partition(".")
    return first if first != "midstream" else rest.partition(".")[0]


def parts_of(graph: Graph) -> dict[str, set[str]]:
    """Of a graph of modules, the graph of their parts."""
    parts: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        if part(module):
            parts[part(module)] |= {part(target) for target in targets} - {part(module), ""}
    return parts


@cache
def graph() -> Graph:
    """Of all packages. Each worker of the tests imports this file, and one of them needs the graph."""
    return module_graph(PACKAGES)


def module_graph(packages: Iterable[Path]) -> dict[str, set[str]]:
    files = {name_of(file, package): file for package in packages for file in package.rglob("*.py")}
    return {
        name: imported(nodes(file), name, file.name == "__init__.py", files.keys()) - {name}
        for name, file in files.items()
    }


def name_of(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: Iterable[ast.AST], module: str, is_package: bool, known: Set[str]) -> set[str]:
    """Which of the `known` modules the module imports. tree: all nodes of its syntax tree."""
    found = set[str]()
    for node in tree:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                here = here[: len(here) - node.level + is_package]
                base = ".".join([*here, base] if base else here)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in known else base)
    return found & known


def circles(graph: Graph) -> list[list[str]]:
    """The sets of nodes that can all reach each other, each with more than one node."""
    reached = {node: set(reachable(graph, node)) for node in graph}
    found = {
        frozenset(other for other in reached[node] if node in reached.get(other, ())) | {node}
        for node in graph
    }
    return sorted(sorted(group) for group in found if len(group) > 1)


def reachable(graph: Graph, start: str) -> Iterator[str]:
    seen: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
            yield node
