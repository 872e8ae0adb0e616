"""How the documents are written: lines of at most 100 columns, no paragraphs in bullets, links that lead somewhere.

And one meaning for each word.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS_MAX = 100
#: A list of so many items has items of so many words on average, at most.
LONG_LIST, ITEM_WORDS_MAX = 5, 40
PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ["CONTRIBUTING.md", "README.md", *PAGES]
GLOSSARY = "docs/glossary.md"
#: Private words for a supervisor, the desired state, a subscription, a version constraint, a timeout and a resume log.
PRIVATE_WORDS = r"\b(Crew|Roster|Ear|Wish|Told|Teller|crew|roster|ears?|wish|patience|teller)\b(?!\.py)"


@cache
def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def prose(text: str) -> str:
    """The text without code blocks and generated parts."""
    for part in (r"```.*?```", r"<!-- begin: .*?<!-- end: .*?-->"):
        text = re.sub(part, "", text, flags=re.DOTALL)
    return text


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def too_long(text: str) -> list[str]:
    lines = prose(text).splitlines()
    return [
        line
        for line in lines
        if len(line) > COLUMNS_MAX and not line.startswith(("|", "#")) and " " in line.strip("-*> ")
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_prose_is_wrapped(document: str) -> None:
    assert too_long(text_of(document)) == []


def lists_of_paragraphs(text: str) -> list[str]:
    """The first words of each list of several items that have the length of paragraphs."""
    found = []
    for part in re.findall(r"(?:^- .+\n(?:(?:  .*)?\n)*)+", prose(text), re.MULTILINE):
        items = re.split(r"^- ", part, flags=re.MULTILINE)[1:]
        if len(items) >= LONG_LIST and len(part.split()) / len(items) > ITEM_WORDS_MAX:
            found.append(" ".join(part.split()[:8]))
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_list_of_paragraphs_is_prose(document: str) -> None:
    assert lists_of_paragraphs(text_of(document)) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_to_a_file_and_to_a_heading_of_it(document: str) -> None:
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text_of(document))):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            missing.append(target)
    assert missing == []


def terms() -> list[str]:
    return re.findall(r"^- \*\*(.+?)\*\*: ", text_of(GLOSSARY), re.MULTILINE)


def test_the_glossary_is_sorted_and_gives_each_term_one_meaning_of_two_lines_at_most() -> None:
    assert len(terms()) >= 40
    assert terms() == sorted(set(terms()))
    entries = text_of(GLOSSARY).split("\n- **")[1:]
    assert [entry for entry in entries if len(entry.strip().splitlines()) > 2] == []
    assert len(entries) == len(terms())


def test_every_term_of_the_glossary_is_used_elsewhere() -> None:
    pages = [text_of(page) for page in DOCUMENTS if page != GLOSSARY]
    code = [file.read_text() for file in (ROOT / "src").rglob("*.py")]
    # Names in code are taken apart: SignalOrder is a use of "signal order".
    code = [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", file) for file in code]
    used = re.sub(r"[\s_-]+", " ", "\n".join([*pages, *code]).lower())
    assert [term for term in terms() if not re.search(rf"\b{term.lower().replace('-', ' ')}s?\b", used)] == []


def test_documents_that_lead_readers_link_the_glossary() -> None:
    assert "(docs/glossary.md)" in text_of("README.md")
    assert "(glossary.md)" in text_of("docs/architecture.md")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_document_uses_a_private_word_for_what_has_a_name(document: str) -> None:
    assert re.findall(PRIVATE_WORDS, prose(text_of(document))) == []
