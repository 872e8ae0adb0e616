"""How a process of midstream begins: `python -m midstream.core.child MODULE [ARGUMENT ...]` calls the module's `main()`.

Always holds: the garbage collector rests while modules are imported. An import makes many objects and hardly any garbage.
To look for it takes a fifth of the time that an engine's 2,700 modules need. The collector is on again in `main`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without a search for garbage. What is there at the end is passed over by every later one."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
    gc.freeze()


def main() -> int:
    module = sys.argv.pop(1)
    with importing():
        found = importlib.import_module(module)
    code: int = found.main()
    return code


if __name__ == "__main__":
    sys.exit(main())
