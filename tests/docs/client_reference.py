"""The reference in docs/client.md: each public name of midstream.client, with its signature and its docstring."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

COLUMNS = 100
#: Heading: its names, in the order of the page; those that are not at the top of the client with their module.
GROUPS = {
    "Publishing": "SnapshotPublisher publication.Publication publication.Published",
    "Runs": "TrainingRun",
    "A server": "ServerClient snapshot_calls.SnapshotCalls session_calls.SessionCalls deployment_calls.DeploymentCalls "
    "status.Status status.ReplicaStatus",
    "Errors": "PublishError errors.SignalRefused errors.Unanswered errors.PushFailed SnapshotFailed errors.ReplicasSilent "
    "NotReadyInTime errors.RecordFileError errors.RecordFileGone",
    "Rollouts": "RolloutClient Rollout staleness fresh importance_ratios",
    "Decoding": "snapshot_of decode.routes_of decode.decode_routing_matrix decode.token_snapshots "
    "decode.SamplingMasks decode.sampling_masks_of decode.decode_sampling_masks decode.masks_of_bytes "
    "decode.router_weights_of decode.near_ties_of",
    "Records": "journal.read_records journal.traces_of journal.gaps_in records.sequences_of records.TrainingSequence "
    "records.TurnSpan references.read_reference references.ChoiceColumns "
    "shared_references.read_routes shared_references.ReferencedRoutes shared_references.read_masks "
    "shared_references.ReferencedMasks",
    "Formats of trainers": "export.jsonl_records export.tinker_data export.tinker_datum export.verl_rows export.verl_batch "
    "export.nemo_gym_records export.verifiers_rollouts export.expert_rows",
}
#: Modules of the client whose every class and function stands in the page.
WHOLE = ("decode", "errors", "export", "journal", "records", "references", "shared_references")
#: A server has one of each; nobody else makes them.
PARTS = ("SnapshotCalls", "SessionCalls", "DeploymentCalls")
TYPES = "Types of arguments and results"
#: By what such a class has.
_MAKERS = {"_fields": "(NamedTuple)", "__total__": "(TypedDict, total=False)", "_is_protocol": "(Protocol)"}


def client() -> str:
    parts = []
    for heading, group in GROUPS.items():
        parts.append(f"## {heading}\n")
        parts += [entry(*found(path)) for path in group.split()]
    parts.append(f"## {TYPES}\n")
    parts.append("The signatures above name them.\n")
    types = mentioned(public())
    aliases = [
        assigned(module)[name] for name, module in types if not isinstance(getattr(module, name), type)
    ]
    parts.append(code("\n".join(aliases).replace("'", '"')))
    parts += [
        entry(getattr(module, name)) for name, module in types if isinstance(getattr(module, name), type)
    ]
    return "\n".join(parts)


def found(path: str) -> tuple[Any, str]:
    """The class or function of a path in GROUPS, and the module to import it from."""
    module, _, name = path.rpartition(".")
    home = importlib.import_module(f"midstream.client.{module}" if module else "midstream.client")
    return getattr(home, name), home.__name__


def public() -> dict[str, Any]:
    """Name: the class or function."""
    values = [found(path)[0] for group in GROUPS.values() for path in group.split()]
    return {value.__name__: value for value in values}


def entry(value: Any, module: str = "midstream.client") -> str:
    """A class with its methods, or a function. module: to import it from."""
    name = value.__name__
    place = "" if module == "midstream.client" else f"In `{module}`.\n\n"
    told = f"### {name}\n\n{place}{code(shape_of(value))}\n{words_of(value)}"
    for method, function in methods_of(value):
        told += f"\n#### {name}.{method}\n\n{code(signature(method, function))}\n{words_of(function)}"
    return told


def code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def methods_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that the class has itself, in their order."""
    if isinstance(value, type):
        for name, one in vars(value).items():
            if not name.startswith("_") and isinstance(one, FunctionType | property):
                yield name, one


def shape_of(value: Any) -> str:
    if not isinstance(value, type):
        return signature(value.__name__, value)
    if value.__name__ in PARTS:
        return f"class {value.__name__}"
    made = [_MAKERS[one] for one in ("_fields", "__total__", "_is_protocol") if one in vars(value)]
    if issubclass(value, Exception):
        own = vars(value).get("__init__")
        told = f"class {value.__name__}({', '.join(one.__name__ for one in value.__bases__)})"
        return told if own is None else f"{told}\n{signature(value.__name__, own)}"
    if not made and "__init__" in vars(value) and not dataclasses.is_dataclass(value):
        return f"class {signature(value.__name__, value.__init__)}".removesuffix(" -> None")
    fields = [
        f"    {name}: {getattr(hint, '__forward_arg__', hint)}{default_of(value, name)}"
        for name, hint in inspect.get_annotations(value).items()
        if not name.startswith("_")
    ]
    return "\n".join([f"class {value.__name__}{made[0] if made else ''}:", *fields])


def default_of(value: type, name: str) -> str:
    found = [
        one
        for one in (dataclasses.fields(value) if dataclasses.is_dataclass(value) else ())
        if one.name == name
    ]
    if found and found[0].default is not dataclasses.MISSING:
        return f" = {shown(found[0].default)}"
    if found and found[0].default_factory is not dataclasses.MISSING:
        return f" = {shown(found[0].default_factory())}"
    return ""


def signature(name: str, value: Any) -> str:
    """With annotations as the source has them, in one line or in one of each argument."""
    if isinstance(value, property):
        assert value.fget is not None
        return f"{name}: {inspect.signature(value.fget).return_annotation}"
    shape = inspect.signature(value)
    arguments, marked = [], False
    for one in shape.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not marked:
            arguments.append("*")
            marked = True
        stars = {one.VAR_KEYWORD: "**", one.VAR_POSITIONAL: "*"}.get(one.kind, "")
        default = "" if one.default is one.empty else f" = {shown(one.default)}"
        arguments.append(f"{stars}{one.name}: {one.annotation}{default}")
    line = f"{name}({', '.join(arguments)}) -> {shape.return_annotation}"
    if len(line) <= COLUMNS:
        return line
    inner = "".join(f"    {argument},\n" for argument in arguments)
    return f"{name}(\n{inner}) -> {shape.return_annotation}"


def shown(default: Any) -> str:
    return (
        f"{default.__module__}.{default.__name__}" if callable(default) else repr(default).replace("'", '"')
    )


def words_of(value: Any) -> str:
    """The docstring in Markdown. What stands behind the name of an argument or field is an item of a list."""
    names = "|".join(map(re.escape, argument_names(value))) or "(?!)"
    item = rf"(?:{names})(?:, (?:{names}))*: "
    blocks: list[str] = []
    for paragraph in re.split(r"\n\s*\n", docstring(value)):
        prose: list[str] = []
        # Both an item and "Raises" begin a sentence.
        for piece in re.split(
            rf"(?:^|(?<=[.;:)]) )(?={item}|Raises )", re.sub(r"\s+", " ", paragraph.strip())
        ):
            if re.match(item, piece):
                head, _, told = piece.partition(": ")
                blocks += [filled(" ".join(prose), "")] if prose else []
                prose = []
                heads = ", ".join(f"`{name}`" for name in head.split(", "))
                blocks.append(filled(f"{heads}: {told.rstrip(';')}", "- "))
            elif piece:
                prose.append(piece)
        blocks += [filled(" ".join(prose), "")] if prose else []
    text = ""
    for before, block in zip(["", *blocks], blocks, strict=False):
        text += (
            ("\n" if before and not (before.startswith("- ") and block.startswith("- ")) else "")
            + block
            + "\n"
        )
    return text


def filled(text: str, first: str) -> str:
    text = re.sub(r"\bdocs/([a-z-]+\.md)", r"[\1](\1)", text)
    rest = " " * len(first)
    return textwrap.fill(
        text,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def docstring(value: Any) -> str:
    """Its own, "" without one. A dataclass without words has a made one, which does not count."""
    own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    if not own or (isinstance(value, type) and own.startswith(f"{value.__name__}(")):
        return ""
    return inspect.cleandoc(own)


def argument_names(value: Any) -> list[str]:
    if isinstance(value, property):
        return []
    if not isinstance(value, type):
        return list(inspect.signature(value).parameters)
    own = [value.__init__] if isinstance(vars(value).get("__init__"), FunctionType) else []
    return [
        *inspect.get_annotations(value),
        *(name for one in own for name in inspect.signature(one).parameters),
    ]


# -- types that signatures name


def mentioned(names: Mapping[str, Any]) -> list[tuple[str, ModuleType]]:
    """Each name of this package in a signature, and in those of what it names in turn, with its module."""
    homes: dict[str, ModuleType] = {}
    todo: list[Any] = [*names.values()]
    while todo:
        value = todo.pop()
        module = sys.modules[value.__module__]
        told = [shape_of(value), *(signature(name, one) for name, one in methods_of(value))]
        for name in re.findall(r"\b[A-Z]\w+", "\n".join(told)):
            if name in names or name in homes or not hasattr(module, name):
                continue
            home = home_of(name, module)
            if home is not None:
                homes[name] = home
                if isinstance(getattr(home, name), type):
                    todo.append(getattr(home, name))
    return sorted(homes.items())


def home_of(name: str, module: ModuleType) -> ModuleType | None:
    """The module of this package that defines it."""
    if name in assigned(module) or getattr(getattr(module, name), "__module__", "") == module.__name__:
        return module
    for node in ast.parse(inspect.getsource(module)).body:
        source = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if source.startswith("midstream.") and name in [one.name for one in node.names]:
            return home_of(name, sys.modules[source])
    return None


@cache
def assigned(module: ModuleType) -> dict[str, str]:
    """Name: the source of what it is."""
    body = ast.parse(inspect.getsource(module)).body
    return {
        node.targets[0].id: ast.unparse(node)
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
