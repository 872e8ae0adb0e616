"""Policies in a ledger, taken up at once where no replica runs: for control apps within one process."""

from __future__ import annotations

from midstream.core.served_names import names_of, split_name
from midstream.fleet.loop import Reconciler
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.ledger import Ledger


async def take_up_policies(ledger: Ledger, deployments: Deployments) -> None:
    """As launch/gateway.py takes up the ledger. What is being ended is gone at once."""
    rows = {row.name: row for row in await ledger.policies()}
    for policy in deployments.policies():
        row = rows.pop(policy.name, None)
        if row is None or row.deleting:
            deployments.remove(policy)
            if row is not None:
                await ledger.delete_deployment(row.name)
    host = deployments.default
    for name, row in rows.items():
        policy_name = split_name(name)[1]
        replicas = ReplicaSet(host.replicas.facts, policy_name, row.created_at)
        names, reconciler = names_of(host.names, policy_name), Reconciler(ledger, replicas, name)
        deployments.add(Deployment(names, replicas, reconciler, policy=policy_name, of=host))
