"""Flags in a user's arguments for a server that midstream starts. Pure.

Always holds: a flag that midstream looks for is found, or its name is refused where it is not written out. No value is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from midstream.core.errors import ConfigError


def check_names(
    server: str, args: Sequence[str], refused: Mapping[str, str], sought: Iterable[str] = ()
) -> None:
    """server: its name. refused: flags that a user may not give, and why. sought: others that midstream looks for.

    Raises ConfigError. argparse takes the beginning of a flag for the flag, unless that is a flag itself. A flag that begins
    one of these is itself one of them, in all versions that are known.
    """
    known = {*refused, *sought}
    for arg in args:
        name = arg.partition("=")[0].removeprefix("--").replace("_", "-") if arg.startswith("--") else ""
        # Of --flag.key value.
        name = name.partition(".")[0]
        setting = f"{server.lower()}.args: --{name}"
        if name in refused:
            raise ConfigError(f"{setting} cannot be given: {refused[name]}")
        begun = sorted(flag for flag in known if name and flag.startswith(name))
        if begun and name not in known:
            raise ConfigError(f"{setting}: {server} would read it as --{begun[0]}: write the flag out")
