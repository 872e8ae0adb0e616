"""The pictures of docs/concepts.md: they can be read by everybody, and say what the code does."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import chromium, needs_chromium

from midstream.api.status import SHOWN_STAGE
from midstream.core.types import ResetPromptCache, Stage
from midstream.replica.namespaces import Namespaces

ROOT = Path(__file__).parents[2]
CONCEPTS = (ROOT / "docs" / "concepts.md").read_text()
PICTURES = sorted((ROOT / "docs" / "images").glob("concept-*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
# CSS pixels: a picture on a phone's page of 390, and the least height of its letters' em.
PHONE, EM_MIN = 358, 10
# Contrasts that WCAG 2 asks for, of text and of shapes.
OF_TEXT, OF_SHAPES = 4.5, 3.0


def texts(within: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in within.iter(f"{SVG}text")]


def picture(name: str) -> ElementTree.Element:
    return ElementTree.parse(ROOT / "docs" / "images" / f"concept-{name}.svg").getroot()


def group(root: ElementTree.Element, name: str) -> ElementTree.Element:
    (found,) = [part for part in root.iter(f"{SVG}g") if part.get("class") == name]
    return found


def test_each_picture_is_shown_once_with_words_that_stand_for_it() -> None:
    shown = re.findall(r"!\[([^\]]{40,})\]\(images/(concept-[a-z]+\.svg)\)", CONCEPTS)
    assert sorted(name for _, name in shown) == [path.name for path in PICTURES]
    assert len(PICTURES) == len(re.findall("^## ", CONCEPTS, re.MULTILINE)) == 5


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_a_title_and_a_description_and_loads_nothing(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    named = {root.find(f"{SVG}{tag}").get("id"): tag for tag in ("title", "desc")}  # type: ignore[union-attr]
    assert root.get("role") == "img"
    assert [named[part] for part in root.get("aria-labelledby", "").split()] == ["title", "desc"]
    assert len(root.findtext(f"{SVG}desc", "")) > 100
    markup = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"https?:|href|@import|@font-face|<image|<script|url\((?!#)", markup) == []


def palettes() -> list[dict[str, str]]:
    """Light and dark. All pictures have one style."""
    (style,) = {ElementTree.parse(path).getroot().findtext(f"{SVG}style", "") for path in PICTURES}
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    plain = dict(re.findall(r"--(\w+): (#\w+)", light))
    return [plain, {**plain, **dict(re.findall(r"--(\w+): (#\w+)", dark))}]


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_colours_stand_out_in_light_and_dark() -> None:
    light, dark = palettes()
    assert light["page"] != dark["page"]
    for palette in (light, dark):
        for ground in (palette["page"], palette["panel"]):
            weak = [name for name in ("text", "soft") if contrast(palette[name], ground) < OF_TEXT]
            weak += [
                name
                for name in ("line", "one", "two", "three")
                if contrast(palette[name], ground) < OF_SHAPES
            ]
            assert weak == []


def test_the_stages_of_a_swap_are_those_of_a_full_snapshot_in_their_order() -> None:
    # A commit is a moment, and a line in the picture. Only a delta is rebuilt.
    moment = (Stage.COMMITTING, Stage.REBUILDING)
    stages = [shown for stage, shown in SHOWN_STAGE.items() if stage not in moment]
    assert texts(group(picture("swap"), "stages")) == [*stages, "done"]


@pytest.mark.parametrize("policy", ["all", "new_session", "none"])
def test_the_table_of_cache_policies_is_what_the_replica_does(policy: ResetPromptCache) -> None:
    namespaces = Namespaces()
    before = namespaces.admit(("", "known"))
    namespaces.commit(policy)
    askers = {"known": ("", "known"), "new": ("", "never seen"), "none": None}
    does = {
        who: ["reuses" if namespaces.admit(session) == before else "anew"] for who, session in askers.items()
    }
    cells = [cell for cell in group(picture("kv"), "reuse") if cell.get("data-policy") == policy]
    assert {cell.get("data-who"): texts(cell) for cell in cells} == does


# Boxes of texts, of rectangles and of the whole, as CSS pixels, and each text's em.
_BOXES = """() => {
  const box = (part) => { const {left, top, right, bottom} = part.getBoundingClientRect(); return [left, top, right, bottom]; };
  const scale = document.documentElement.getScreenCTM().a;
  return {
    whole: box(document.querySelector("rect.page")),
    rects: [...document.querySelectorAll("rect:not(.page)")].map(box),
    texts: [...document.querySelectorAll("text")].map((text) => ({
      text: text.textContent, box: box(text), em: parseFloat(getComputedStyle(text).fontSize) * scale })),
  };
}"""


def inside(box: list[float], outer: list[float]) -> bool:
    return outer[0] <= box[0] and box[2] <= outer[2] and outer[1] <= box[1] and box[3] <= outer[3]


def frame_of(box: list[float], boxes: dict[str, Any]) -> list[float]:
    """The smallest rectangle that has the middle of a text in it."""
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    around: list[list[float]] = [boxes["whole"]]
    around += [rect for rect in boxes["rects"] if inside([x, y, x, y], rect)]
    return min(around, key=lambda rect: (rect[2] - rect[0]) * (rect[3] - rect[1]))


@needs_chromium
def test_no_text_is_cut_covers_another_or_is_too_small_on_a_phone() -> None:
    with chromium() as browser:
        for path in PICTURES:
            page = browser.new_page(viewport={"width": PHONE, "height": 700})
            page.goto(path.as_uri())
            page.evaluate(f"document.documentElement.setAttribute('width', {PHONE})")
            boxes = page.evaluate(_BOXES)
            placed = boxes["texts"]
            assert len(placed) > 10
            assert [text["text"] for text in placed if text["em"] < EM_MIN] == [], path.name
            spilt = [text["text"] for text in placed if not inside(text["box"], frame_of(text["box"], boxes))]
            assert spilt == [], path.name
            covering = [
                (one["text"], other["text"])
                for one, other in combinations(placed, 2)
                if one["box"][0] < other["box"][2] and other["box"][0] < one["box"][2]
                # The boxes of letters are higher than what is seen of them.
                if min(one["box"][3], other["box"][3]) - max(one["box"][1], other["box"][1]) > one["em"] / 3
            ]
            assert covering == [], path.name
            page.close()
