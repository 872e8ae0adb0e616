"""The table of wires: gateways, scopes and replicas have the same."""

from midstream.core.wires import WIRES
from midstream.replica.wire.table import GENERATING, TEXT_CALLS


def test_a_replica_answers_every_wire_that_gateways_pass_on() -> None:
    assert {*GENERATING, *TEXT_CALLS} == {wire.name for wire in WIRES.values()}
    assert not {*GENERATING} & {*TEXT_CALLS}
