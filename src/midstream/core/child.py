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
from types import ModuleType

#: Before the module's name: import it as `imported_beside` does.
BESIDE = "--beside"
#: Of an import that nobody waits for.
NICENESS = 19


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


def imported_beside(module: str) -> ModuleType:
    """Import a module with the lowest priority, so that every other process goes first.

    The caller keeps its own priority. A thread does the import, because only root may raise a priority again.
    """
    with importing():
        # What these two import, the module needs anyway.
        from concurrent.futures import ThreadPoolExecutor

        from midstream.core.beside import lower_priority

        with ThreadPoolExecutor(1, initializer=lower_priority, initargs=(NICENESS,)) as thread:
            return thread.submit(importlib.import_module, module).result()


def main() -> int:
    module = sys.argv.pop(1)
    if module == BESIDE:
        found = imported_beside(sys.argv.pop(1))
    else:
        with importing():
            found = importlib.import_module(module)
    code: int = found.main()
    return code


if __name__ == "__main__":
    sys.exit(main())
