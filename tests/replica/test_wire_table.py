"""The tables of wires: gateways, scopes and replicas have the same, and every dialect has a name for everything."""

from typing import get_args

from midstream.core.errors import ERROR_FORMS, ErrorShape
from midstream.core.types import FinishReason
from midstream.core.wires import WIRES
from midstream.replica.response.answer import EndReason
from midstream.replica.wire.dialects import END_NAMES
from midstream.replica.wire.table import GENERATING, TEXT_CALLS


def test_a_replica_answers_every_wire_that_gateways_pass_on() -> None:
    assert {*GENERATING, *TEXT_CALLS} == {wire.name for wire in WIRES.values()}
    assert not {*GENERATING} & {*TEXT_CALLS}


def test_every_end_of_a_choice_has_a_name_in_every_dialect() -> None:
    assert {*END_NAMES} == {*get_args(EndReason)}
    assert all(all(names) for names in END_NAMES.values())
    assert {names.openai for names in END_NAMES.values()} == {*get_args(FinishReason)}


def test_every_shape_of_errors_has_a_form() -> None:
    assert {*ERROR_FORMS} == {*get_args(ErrorShape)} == {wire.errors for wire in WIRES.values()}
