"""The generated parts of docs/client.md, configuration.md, errors.md, http.md and modules.md. As a script it writes them."""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import client_reference
import msgspec
from msgspec import NODEFAULT, Meta

from midstream.api import openapi
from midstream.api.endpoints import groups as endpoint_groups
from midstream.api.endpoints import operations
from midstream.core import config, errors
from midstream.launch.reference import behind

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = Path(__file__).parents[2] / "src"
BEGIN, END = "<!-- begin: {} -->\n", "<!-- end: {} -->\n"
_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "none"}


def comments_of(struct: type) -> dict[str, str]:
    """What stands above each field in the source, of its base, too."""
    base = struct.__base__
    found = {} if base in (None, msgspec.Struct) else comments_of(base)
    source = inspect.getsource(struct)
    lines, [tree] = source.splitlines(), ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        at, words = node.lineno - 2, []
        while lines[at].strip().startswith("#"):
            words.insert(0, lines[at].strip().removeprefix("#").strip())
            at -= 1
        assert isinstance(node.target, ast.Name)
        found[node.target.id] = " ".join(words)
    return found


def kind_of(hint: Any) -> str:
    """A type in words, with its bounds."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [meta.description for meta in inner[1:] if isinstance(meta, Meta) and meta.description]
        return ", ".join(
            [
                kind_of(inner[0]),
                *(bound.removeprefix("must be ").removeprefix("expected ") for bound in bounds),
            ]
        )
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind_of(one) for one in inner))
    if origin is tuple:
        return f"list of {kind_of(inner[0])}"
    if origin is dict:
        return f"table of {kind_of(inner[1])}"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return "table"
    return _NAMES[hint]


def default_of(field: Any) -> str:
    if field.default is NODEFAULT:
        return "required" if field.default_factory is NODEFAULT else f"`{field.default_factory()!r}`"
    if field.default is None:
        return "none"
    if isinstance(field.default, bool):
        return "`true`" if field.default else "`false`"
    return f"`{field.default!r}`".replace("'", '"')


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def settings(struct: type) -> str:
    hints, comments = get_type_hints(struct, include_extras=True), comments_of(struct)
    rows = ["| setting | type | default | what it is |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(struct):
        if not is_section(field.type):
            kind = kind_of(hints[field.name]).replace("|", "\\|")
            rows.append(f"| `{field.name}` | {kind} | {default_of(field)} | {comments[field.name]} |")
    return "\n".join(rows) + "\n"


def configuration() -> str:
    parts = [f"## At the top\n\n{settings(config.Settings)}"]
    fields = {field.name: field.type for field in msgspec.structs.fields(config.Settings)}
    for name, section in fields.items():
        if not is_section(section):
            continue
        parts.append(f"## `[{name}]`\n\n{section.__doc__.strip()}\n\n{settings(section)}")
        if name == "gateway":
            doc = (config.KeySettings.__doc__ or "").strip()
            parts.append(f"## `[[gateway.api_keys]]`\n\n{doc}\n\n{settings(config.KeySettings)}")
    return "\n".join(parts)


def _all(error: type[errors.MidstreamError]) -> Iterator[type[errors.MidstreamError]]:
    yield error
    for inner in error.__subclasses__():
        yield from _all(inner)


def error_table() -> str:
    """Of each status and code once, the first that has it, in the order of statuses."""
    own = [one for one in _all(errors.MidstreamError) if one.__module__ == errors.__name__]
    found: dict[tuple[int, str], type[errors.MidstreamError]] = {}
    for one in sorted(own, key=lambda one: (one.status, one.code)):
        found.setdefault((one.status, one.code), one)
    rows = ["| status | `code` | Retry-After |", "|---|---|---|"]
    for (status, code), one in found.items():
        again = "none" if one.retry_after_s is None else f"{one.retry_after_s} s"
        rows.append(f"| {status} | `{code}` | {again} |")
    return "\n".join(rows) + "\n"


def http() -> str:
    """Each group's operations. The prefixed ones are told of by the page."""
    groups: dict[str, list[str]] = {}
    _, _, front = behind()
    for one in operations(front):
        shown = re.sub(r":path}", "}", one.path)
        need, summary = openapi.need_in_words(one.endpoint), one.endpoint.summary
        groups.setdefault(one.group, []).append(f"| `{one.method}` | `{shown}` | {need} | {summary} |")
    head = "| method | path | scope | what it does |\n|---|---|---|---|\n"
    parts = [
        f"## {one.name}\n\n{one.words} More in [{one.page}.md]({one.page}.md).\n\n{head}"
        + "\n".join(groups[one.name])
        for one in endpoint_groups(front)
    ]
    return "\n\n".join(parts) + "\n"


def opening(module: Path) -> str:
    """The first paragraph of its docstring."""
    words = ast.get_docstring(ast.parse(module.read_text())) or ""
    return " ".join(words.partition("\n\n")[0].split()).replace("|", "\\|")


def modules() -> str:
    """Of each package, and of each building beside midstream, the modules that open with what they are."""
    packages: dict[str, list[str]] = {}
    for module in sorted(SOURCE.rglob("*.py")):
        if words := opening(module):
            package, *inside = module.relative_to(SOURCE).parts
            if package == "midstream" and len(inside) > 1:
                package, *inside = inside
            packages.setdefault(package, []).append(f"| `{'/'.join(inside)}` | {words} |")
    head = "| module | what it is |\n|---|---|\n"
    parts = [f"## {package}\n\n{head}" + "\n".join(rows) for package, rows in sorted(packages.items())]
    return "\n\n".join(parts) + "\n"


TABLES = {
    "client": client_reference.client,
    "configuration": configuration,
    "errors": error_table,
    "http": http,
    "modules": modules,
}


def written(name: str, text: str) -> str:
    """The document with the tables in their place."""
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = text.partition(begin)
    return before + begin + TABLES[name]() + end + rest.partition(end)[2]


if __name__ == "__main__":
    for page in TABLES:
        document = DOCS / f"{page}.md"
        document.write_text(written(page, document.read_text()))
