"""What a mutation is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`before` becomes `after` in `file`. breaks: the guarantee that no longer holds.

    file: a path below src/midstream, or below src where it names a building beside it.
    tests: what is run to kill it. fast: one of them, and so `make test-fast`, kills it without the tests that it leaves out.
    """

    name: str
    file: str
    before: str
    after: str
    breaks: str
    tests: tuple[str, ...]
    fast: bool = True

    @property
    def path(self) -> str:
        """Below src."""
        return self.file if self.file.startswith("midstream_") else f"midstream/{self.file}"
