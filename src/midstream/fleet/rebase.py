"""Which content the whole files of an incremental snapshot have: what the replicas that serve it say.

Always holds: the content is that of every replica that answered. A replica whose rebuilt files are others, whoever is right,
prevents the rebase: no digest of damaged files becomes the meaning of a snapshot. Files that most replicas do not have are
used no more, so that the next try, or that of the next snapshot, has others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from midstream.core.transfer import Digest, Digested, Distrust
from midstream.core.types import Content
from midstream.fleet.push_orders import Orders, ask, read_answer
from midstream.ledger import TransferMember, Unkept
from midstream.snapshots.content import difference
from midstream.snapshots.messages import shown

logger = logging.getLogger(__name__)

#: A replica has so long to digest its whole files, and to bring them into the bucket.
KEEP_S = 1800.0
#: And to forget those that are not trusted.
DISTRUST_S = 30.0


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
            await _distrust(orders, rebase, contents)
            return (
                rebase,
                f"{first} and {name} have different whole files of {shown(rebase.identity)}: {differs}",
            )
    return replace(rebase, content=content), ""


async def _distrust(orders: Orders, rebase: Unkept, contents: Mapping[str, Content]) -> None:
    """Replicas whose files are not those of more than half of all are to use them no more. Who does not hear of it is asked at
    the next try."""
    [(most, count)] = Counter(contents.values()).most_common(1)
    odd = [name for name, content in contents.items() if content != most or 2 * count <= len(contents)]

    def order(member: TransferMember) -> Distrust:
        return Distrust(group=rebase.group, boot="", within_s=DISTRUST_S, chain=rebase.chain)

    members = [TransferMember(name, "", 0) for name in odd]
    await ask(orders, members, order, len(members))
    logger.warning("the whole files of %s are used no more on %s", shown(rebase.identity), ", ".join(odd))
