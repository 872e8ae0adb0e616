"""docs/engines.md says what engines declare and what the code refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from midstream.api import capabilities as signals
from midstream.core.config import EngineSettings
from midstream.core.types import ENGINE_FEATURES, EngineCard
from midstream.engine.embedded.protocol import embedded_card
from midstream.engine.sglang.arguments import LACKS as SGLANG_LACKS
from midstream.engine.sglang.arguments import sglang_card
from midstream.engine.vllm.arguments import LACKS, vllm_card
from midstream.replica.request.needs import REQUEST_NEEDS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()

#: Of each engine, cards that between them have and lack each feature that depends on anything.
ENGINES: dict[str, tuple[EngineCard, EngineCard]] = {
    "embedded": (
        embedded_card(EngineSettings(), grammars=False, reproducible=False),
        embedded_card(EngineSettings(router_weights=True), grammars=True, reproducible=True),
    ),
    "vllm": (
        vllm_card("0.32.0", by_priority=False, no_full_snapshots="not proved"),
        vllm_card(
            "0.32.0",
            no_routes={},
            no_policies="",
            no_crossing="",
            no_numbers={},
            no_digest="",
            no_frozen_check="",
            no_short_swap="",
            no_provenance="",
            no_session_kv="",
        ),
    ),
    "sglang": (sglang_card("0.5.23", by_priority=False), sglang_card("0.5.23", no_digest="", unproved={})),
}
WHY_NOT = {"vllm": LACKS, "sglang": SGLANG_LACKS}


def table(heading: str, first: str) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the tables below `heading` whose first column is called `first`."""
    section = DOCUMENT.split(f"## {heading}\n")[1].split("\n## ")[0]
    head: list[str] = []
    rows: list[list[str]] = []
    for found in re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE):
        top, _, *lines = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()
        ]
        if top[0] == first:
            head = top
            rows += lines
    assert rows, f"no table of {first} under {heading!r}"
    return head, rows


def test_the_table_of_features_is_that_of_the_code() -> None:
    head, rows = table("Features", "feature")
    assert [(row[0], row[1]) for row in rows] == [
        (f"`{name}`", what) for name, what in ENGINE_FEATURES.items()
    ]
    assert head[2:] == list(ENGINES)


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engines_column_is_what_it_declares(kind: str) -> None:
    cards = ENGINES[kind]
    assert {card.kind for card in cards} == {kind}
    head, rows = table("Features", "feature")
    for row in rows:
        name, cell = row[0].strip("`"), row[head.index(kind)]
        has = [card.has(name) for card in cards]
        expected = "yes" if all(has) else "if" if any(has) else "no"
        assert re.split("[ :]", cell)[0] == expected, f"{kind}, {name}: {cell!r}"
        assert expected == "yes" or len(cell) > 10, "which condition, or why not?"
        if expected == "no":
            assert cell == f"no: {WHY_NOT[kind][name]}"


@pytest.mark.parametrize("kind", ENGINES)
def test_a_card_names_features_in_their_order_and_none_without_what_it_stands_on(kind: str) -> None:
    for card in ENGINES[kind]:
        assert list(card.features) == [name for name in ENGINE_FEATURES if card.has(name)]
        if card.has("resume"):
            assert card.has("max_cache_age")


def test_what_is_refused_is_what_the_tables_say() -> None:
    _, rows = table("What is refused without a feature", "field")
    told = {
        (feature.strip("`"), field.strip("`")) for fields, feature, _ in rows for field in fields.split(", ")
    }
    of_requests = {(need.feature, need.param) for need in REQUEST_NEEDS}
    of_signals = {(need.feature, "reset_prompt_cache") for need in signals.SIGNAL_NEEDS}
    of_signals |= {(signals.FULL.feature, "identity"), (signals.BASE.feature, "policies")}
    assert told == of_requests | of_signals


def test_what_is_not_refused_is_said_to_be_less_exact() -> None:
    _, rows = table("What is only less exact without a feature", "feature")
    # A pause needs `freeze` (tests/hotload/test_trainer_calls_api.py), and a signal's policy `policies`.
    needs = (*REQUEST_NEEDS, *signals.SIGNAL_NEEDS, signals.FULL, signals.BASE)
    refused = {need.feature for need in needs} | {"freeze", "policies"}
    assert {row[0].strip("`") for row in rows} == ENGINE_FEATURES.keys() - refused
