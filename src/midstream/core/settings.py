"""Settings as a TOML file and command-line options give them. No I/O but reading the file.

Always holds: an option on the command line wins over the file, and the file over the default. An error names where the value
came from, the setting, and the value or the nearest setting that there is. It never shows a key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from midstream.core.config import Settings
from midstream.core.errors import ConfigError


def load_settings(file: str | None, overrides: Mapping[str, Any]) -> Settings:
    """Settings from `file` (TOML) with `overrides` on top. Raises ConfigError.

    overrides: values by the setting's name, SECTION.NAME in a section. None means that the option was not given.
    """
    written = {} if file is None else _read(file)
    values = _with_options(written, overrides)
    try:
        return _converted(values)
    except ConfigError as error:
        if file is not None:
            # An error that the file has without the options, too, is the file's.
            try:
                _converted(written)
            except ConfigError as own:
                raise ConfigError(f"--config {file}: {own}") from error
        raise ConfigError(f"configuration: {error}") from error


def _read(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {file}: not valid TOML: {error}") from error


def _with_options(written: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(written)
    for setting, value in overrides.items():
        section, _, name = setting.rpartition(".")
        if value is None:
            continue
        if not section:
            values[name] = value
        # Anything but a table stays, and is refused.
        elif isinstance(before := values.get(section, {}), dict):
            values[section] = {**before, name: value}
    return values


def _converted(values: dict[str, Any]) -> Settings:
    """Raises ConfigError, without where the values came from."""
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), values)) from error


def _explain(error: str, values: dict[str, Any]) -> str:
    """msgspec's message with the setting's name, its value if it broke a bound of ours, and what may have been meant."""
    path = re.search(r" - at `\$\.([^`]+)`$", error)
    steps = re.findall(r"[^.\[\]]+|\.\.\.", path[1]) if path else []
    names = [step for step in steps if step.isidentifier()]
    if unknown := re.match(r"Object contains unknown field `(.*?)`", error):
        return _unknown(unknown[1], names)
    hint = _bounded(Settings, names)
    if hint is None or ", got `" in error:
        return _mistyped(error, path, names)
    value: Any = values
    for at, step in enumerate(steps):
        if step == "...":
            step = steps[at] = next(key for key, entry in value.items() if not _fits(entry, hint))
        value = value[int(step) if isinstance(value, (list, tuple)) else step]
    name = ".".join(step for step in steps if not step.isdigit())
    # A URL may hold a password.
    shown = re.sub(r"//[^/]*@", "//***@", repr(value))
    expected = hint.__metadata__[0].description
    return f"{name} {expected}, got {shown}" if expected.startswith("must") else f"{name} {shown}: {expected}"


def _unknown(name: str, section: list[str]) -> str:
    """Says which settings an unknown name may have meant, each with the section that it lies in."""
    where = ".".join(section)
    message = f"unknown field `{name}` in [{where}]" if where else f"unknown field `{name}`"
    known, own = all_settings(), _fields(Settings, section)
    if where and name in known:
        return f"{message}; {name} is written above the first [section]"
    meant: dict[str, list[str]] = {}
    for setting in known:
        for alias in {setting.rpartition(".")[2], setting.replace(".", "_")}:
            meant.setdefault(alias, []).append(setting)
    # A setting of the section itself is nearer than one elsewhere that has the same name.
    meant |= {one: [".".join([*section, one])] for one in own}
    if near := get_close_matches(name, meant, n=1):
        return f"{message}; did you mean {' or '.join(meant[near[0]])}?"
    return f"{message}; there are {', '.join(own)}" if section else message


def _mistyped(error: str, path: re.Match[str] | None, names: list[str]) -> str:
    if path is None:
        return error
    message = f"{path[1]}: {error[: path.start()]}"
    if "Expected `object`" in error and (inner := _fields(Settings, names)):
        return f"{message}; [{'.'.join(names)}] is a section with {', '.join(inner)}"
    choices = _choices(_hint(Settings, names))
    if not choices:
        return message
    wrong = re.match(r"Invalid enum value '(.*)'", error)
    near = get_close_matches(wrong[1], choices, n=1) if wrong else []
    return f"{message}; expected one of {', '.join(choices)}{f'; did you mean {near[0]}?' if near else ''}"


def _hint(hint: Any, names: list[str]) -> Any:
    """The type of the setting that `names` lead to; None: there is none."""
    if not names:
        return hint
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        fields = get_type_hints(hint, include_extras=True)
        return _hint(fields[names[0]], names[1:]) if names[0] in fields else None
    return next((found for arg in get_args(hint) if (found := _hint(arg, names)) is not None), None)


def _fields(hint: Any, names: list[str]) -> list[str]:
    """The settings in the section, or in the table of a list, that `names` lead to."""
    found = _hint(hint, names)
    if isinstance(found, type) and issubclass(found, msgspec.Struct):
        return list(found.__struct_fields__)
    return next((fields for arg in get_args(found) if (fields := _fields(arg, []))), [])


def choices_of(setting: str) -> list[str]:
    """The values that a setting may have; empty: it is no choice."""
    return _choices(_hint(Settings, setting.split(".")))


def _choices(hint: Any) -> list[str]:
    literals = [one for one in (hint, *get_args(hint)) if get_origin(one) is Literal]
    return [str(choice) for one in literals for choice in get_args(one)]


def all_settings() -> list[str]:
    """The names of all settings: those at the top, then those of sections as SECTION.NAME."""
    top = list(Settings.__struct_fields__)
    return [*top, *(f"{section}.{name}" for section in top for name in _fields(Settings, [section]))]


def _bounded(hint: Any, names: list[str]) -> Any:
    """The annotated type with a bound of ours that `names` lead to, from `hint` on; None: there is none."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        fields = get_type_hints(hint, include_extras=True)
        return _bounded(fields[names[0]], names[1:]) if names and names[0] in fields else None
    if not names and hasattr(hint, "__metadata__"):
        return hint
    return next((found for arg in get_args(hint) if (found := _bounded(arg, names)) is not None), None)


def _fits(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True
