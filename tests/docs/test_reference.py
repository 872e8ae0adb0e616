"""The references are those of the code, and say something of every setting."""

from __future__ import annotations

import pytest
from reference_tables import DOCS, TABLES, comments_of, written

from midstream.core import config


@pytest.mark.parametrize("page", TABLES)
def test_the_tables_are_those_of_the_code(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    assert written(page, text) == text, "python tests/docs/reference_tables.py writes them"


def test_every_setting_is_in_the_page_with_words() -> None:
    text = (DOCS / "configuration.md").read_text()
    structs = [
        one for one in vars(config).values() if isinstance(one, type) and one.__module__ == config.__name__
    ]
    fields = [(one, name, words) for one in structs for name, words in comments_of(one).items()]
    told = [(one.__name__, name) for one, name, words in fields if f"| `{name}` |" not in text or not words]
    # They are sections of their own.
    assert {name for _, name in told} == {"embedded", "gateway", "tinker", "vllm", "ray", "tracing"}
    assert len(fields) > 80
