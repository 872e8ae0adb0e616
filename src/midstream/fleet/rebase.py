"""Which content the whole files of an incremental snapshot have: what the replicas that serve it say.

Always holds: the content is that of every replica that answered. A replica whose rebuilt files are others, whoever is right,
prevents the rebase: no digest of damaged files becomes the meaning of a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from midstream.core.transfer import Digest, Digested
from midstream.fleet.push_orders import Orders, ask, read_answer
from midstream.ledger import TransferMember, Unkept
from midstream.snapshots.content import difference
from midstream.snapshots.messages import shown

#: A replica has so long to digest its whole files, and to bring them into the bucket.
KEEP_S = 1800.0


async def rebased(orders: Orders, rebase: Unkept, replicas: Sequence[str]) -> tuple[Unkept, str]:
    """The rebase with its content, and why it has none; empty when it has."""

    def order(member: TransferMember) -> Digest:
        return Digest(group=rebase.group, boot="", within_s=KEEP_S, chain=rebase.chain)

    members = [TransferMember(name, "", 0) for name in replicas]
    found = await ask(orders, members, order, len(members))
    answers = {name: read_answer(answer, Digested) for name, answer in sorted(found.answers.items())}
    contents = {name: answer.content for name, answer in answers.items() if answer is not None}
    if found.refused is not None or not contents:
        why = found.refused.message if found.refused is not None else next(iter(found.failed.values()), "")
        return rebase, why or "no replica is there"
    first, content = next(iter(contents.items()))
    for name, other in contents.items():
        if (differs := difference(content, other)) is not None:
            return (
                rebase,
                f"{first} and {name} have different whole files of {shown(rebase.identity)}: {differs}",
            )
    return replace(rebase, content=content), ""
