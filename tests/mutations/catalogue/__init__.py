"""Small faults, each of which breaks one guarantee, and the tests that notice it.

Always holds: the text of a mutation stands in its file exactly once, and the file with the other text still compiles
(test_mutations.py checks both). A change that moves the text moves the mutation with it; a guarantee that goes takes its
mutation along.
"""

from catalogue.engine import ENGINE
from catalogue.fleet import FLEET
from catalogue.gateway import GATEWAY
from catalogue.mutation import Mutation
from catalogue.replica import REPLICA
from catalogue.sglang import SGLANG
from catalogue.snapshots import SNAPSHOTS
from catalogue.tinker import TINKER
from catalogue.transfer import TRANSFER

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS: tuple[Mutation, ...] = (
    *ENGINE,
    *SGLANG,
    *REPLICA,
    *GATEWAY,
    *SNAPSHOTS,
    *FLEET,
    *TINKER,
    *TRANSFER,
)
