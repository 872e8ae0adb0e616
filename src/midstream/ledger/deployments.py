"""The ledger's deployments: made, changed, reset, removed. Each function is part of its caller's transaction.

Always holds: a deployment that is removed or reset leaves no snapshot behind. A reset deployment continues to count
generations, so that no replica takes an older message for a newer one. Of a deployment's policies, one that is made later has
a later time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from midstream.core.errors import ConfigError, Conflict, NotFound
from midstream.core.served_names import POLICY_INFIX
from midstream.core.types import BASE_SNAPSHOT, Pause, PauseMode, PolicyFate, TransitionType
from midstream.ledger.changes import mark
from midstream.ledger.records import DeploymentChange, DeploymentRow, NewDeployment, from_row
from midstream.ledger.schema import (
    contents,
    deaths,
    deployments,
    disagreements,
    insert_new,
    policy_counts,
    rebases,
    snapshots,
    transfer_updates,
    transfers,
    transitions,
    weights,
)

#: Fields of a deployment's row: its Pause; of a policy's, whether it takes no signal.
_PAUSE = "_pause"
FROZEN = "frozen"
#: The tenant that made a policy. None: there is a single tenant.
TENANT = "_tenant"
#: Of a deployment: when its newest policy was made.
_POLICY_MADE = "_policy_made"
#: Of a policy: the deployment's generation at its last signal. Of a deployment: that of its last signal that ended policies.
STANDS_ON, ENDS_BEFORE = "_stands_on", "_ends_before"
#: The scope of a count of all policies.
_ALL = ""
_OF_A_DEPLOYMENT = (transitions, deaths, disagreements, contents, weights, rebases, snapshots)


class NameTaken(Conflict):
    """There is a deployment of this name already."""


@dataclass(frozen=True)
class PolicyLimits:
    """Bounds on the policies of one deployment. tenant: the bound on those that one tenant made. 0: no bound."""

    all: int = 0
    tenant: int = 0

    def check(self, db: sa.Connection, host: str, tenant: str | None) -> None:
        """Raises Conflict where one more would be too many."""
        if self.all and (found := _counted(db, host, _ALL)) >= self.all:
            raise Conflict(
                f"policy: {host} has {found} policies, and gateway.max_policies allows {self.all}; end one first",
                param="policy",
            )
        if self.tenant and (found := _counted(db, host, _scope(tenant))) >= self.tenant:
            raise Conflict(
                f"policy: this tenant has {found} policies on {host}, and gateway.max_policies_per_tenant allows"
                f" {self.tenant}; end one first",
                param="policy",
            )


NO_LIMITS = PolicyLimits()


# Statements that are run often are made once: to make one takes longer than to run it.
_FIND = sa.select(deployments).where(deployments.c.name == sa.bindparam("key"))
#: What the names of policies have, and those of deployments have not.
_OF_POLICIES = f"%{POLICY_INFIX}%"
_EVERY = sa.select(deployments).where(deployments.c.name.not_like(_OF_POLICIES)).order_by(deployments.c.name)
_POLICIES = sa.select(deployments).where(deployments.c.name.like(_OF_POLICIES)).order_by(deployments.c.name)
_COUNTED = sa.select(policy_counts.c.count).where(
    policy_counts.c.deployment == sa.bindparam("host"), policy_counts.c.scope == sa.bindparam("of")
)
_TOUCH = deployments.update().where(deployments.c.name == sa.bindparam("key"))
_TOUCH = _TOUCH.values(generation=deployments.c.generation).returning(*deployments.c)


def find(db: sa.Connection, name: str) -> Any:
    """The row of the deployment. Raises NotFound."""
    return _there(db.execute(_FIND, {"key": name}).one_or_none(), name)


def _there(row: Any, name: str) -> Any:
    if row is None:
        raise NotFound(f"there is no deployment {name}")
    return row


def lock(db: sa.Connection, name: str) -> Any:
    """The row of the deployment, locked for a change: waits for all other writers of it. Raises NotFound."""
    row = hold(db, name)
    mark(db, name)
    return row


def hold(db: sa.Connection, name: str) -> Any:
    """Like lock, for a change that readers do not see, or that the caller marks."""
    return _there(db.execute(_TOUCH, {"key": name}).one_or_none(), name)


def check_takes(row: Any) -> None:
    """Raises Conflict where a signal may not change what a deployment, or a policy, serves."""
    policy = row.name.rpartition(POLICY_INFIX)[2]
    if row.deleting:
        raise Conflict(f"{policy!r} is being ended; make it again once it is gone", param="policy")
    if row.fields.get(FROZEN):
        raise Conflict(f"policy {policy!r} is frozen: it takes no snapshot", param="policy")


def decide_policies(db: sa.Connection, row: Any, fate: PolicyFate, generation: int) -> dict[str, Any]:
    """What becomes of the policies of a deployment that gets full weights, and on what the snapshot of a policy stands.

    row: of the signalled one. Returns fields for it. Raises Conflict."""
    host, policy, _ = row.name.partition(POLICY_INFIX)
    if policy:
        return {STANDS_ON: find(db, host).generation}
    if fate != "end":
        _check_policies(db, row, fate)
        return {}
    own = _policies_of(row)
    named = sa.select(deployments.c.name).where(own).order_by(deployments.c.name)
    for name in db.execute(named).scalars().all():
        mark(db, name)
    db.execute(deployments.update().where(own).values(deleting=True))
    return {ENDS_BEFORE: generation}


def check_policies(db: sa.Connection, name: str, fate: PolicyFate) -> None:
    """Raise the Conflict of decide_policies."""
    if fate != "end":
        _check_policies(db, find(db, name), fate)


def _check_policies(db: sa.Connection, row: Any, fate: PolicyFate) -> None:
    if fate == "keep" or (fate == "rebase" and row.transition == "ASYNC"):
        return
    prefix, named = f"{row.name}{POLICY_INFIX}", sa.select(deployments.c.name).where(_policies_of(row))
    if names := db.execute(named.order_by(deployments.c.name)).scalars().all():
        first = names[0].removeprefix(prefix)
        why = (
            "a SYNC deployment cannot rebase them"
            if fate == "rebase"
            else "signal rebase, so that they go on with the new ones, or end"
        )
        raise Conflict(
            f"policies: {len(names)} stand on the weights that serve, {first} among them: {why}",
            param="policies",
        )


def _policies_of(row: Any) -> Any:
    """Those of a deployment that are not being ended."""
    prefix = f"{row.name}{POLICY_INFIX}"
    return deployments.c.name.startswith(prefix, autoescape=True) & ~deployments.c.deleting


def stands_on(row: Any) -> int:
    """Of a policy's target. row: the policy's."""
    return int(row.fields.get(STANDS_ON, 0))


def ends_before(row: Any) -> int:
    """Of a target of full weights. row: its deployment's."""
    return int(row.fields.get(ENDS_BEFORE, 0))


def one(db: sa.Connection, name: str) -> DeploymentRow:
    return from_row(find(db, name), DeploymentRow)


def every(db: sa.Connection) -> list[DeploymentRow]:
    return [from_row(row, DeploymentRow) for row in db.execute(_EVERY)]


def policies(db: sa.Connection) -> list[DeploymentRow]:
    return [from_row(row, DeploymentRow) for row in db.execute(_POLICIES)]


def ensure(
    db: sa.Connection,
    name: str,
    model: str,
    bucket_url: str,
    transition: TransitionType | None,
    replicas: int,
    now: float,
) -> DeploymentRow:
    new = NewDeployment(name, model, bucket_url, transition or "ASYNC", replicas, replicas)
    insert_new(db, deployments, _columns(new, now))
    row = lock(db, name)
    if row.generation > 0 and row.model != model:
        raise ConfigError(
            f"the ledger's deployment {name} serves {row.model}, not {model}; use another --state-dir"
        )
    values: dict[str, Any] = {"model": model, "bucket_url": bucket_url, "deleting": False}
    if transition is not None:
        values["transition"] = transition
    if any(getattr(row, column) != value for column, value in values.items()):
        values["updated_at"] = now
    db.execute(deployments.update().where(deployments.c.id == row.id).values(values))
    return one(db, name)


def create(db: sa.Connection, new: NewDeployment, now: float, limits: PolicyLimits) -> DeploymentRow:
    """A policy is made later than all of its deployment before it, whatever the clock says. Raises NameTaken, Conflict."""
    host, of_policy, _ = new.name.partition(POLICY_INFIX)
    if of_policy:
        row = hold(db, host)
        if db.execute(_FIND, {"key": new.name}).first() is None:
            limits.check(db, host, new.fields.get(TENANT))
        now = max(now, math.nextafter(row.fields.get(_POLICY_MADE, 0.0), math.inf))
        fields = {**row.fields, _POLICY_MADE: now}
        db.execute(deployments.update().where(deployments.c.id == row.id).values(fields=fields))
    if not insert_new(db, deployments, _columns(new, now)):
        raise NameTaken(f"there is a deployment {new.name} already")
    if of_policy:
        _count(db, host, new.fields.get(TENANT), 1)
    mark(db, new.name)
    return one(db, new.name)


def _columns(new: NewDeployment, now: float) -> dict[str, Any]:
    counters = ("last", "reset_ledger", "reset_all", "reset_new_session")
    return {
        **vars(DeploymentRow(**vars(new), created_at=now, updated_at=now)),
        "fields": {key: value for key, value in new.fields.items() if value is not None},
        **{f"{counter}_generation": 0 for counter in counters},
    }


def update(db: sa.Connection, name: str, change: DeploymentChange, now: float) -> DeploymentRow:
    row = lock(db, name)
    values: dict[str, Any] = {**change, "updated_at": now}
    if "fields" in change:
        merged = {**row.fields, **change["fields"]}
        values["fields"] = {key: value for key, value in merged.items() if value is not None}
    db.execute(deployments.update().where(deployments.c.id == row.id).values(values))
    return one(db, name)


def revise(
    db: sa.Connection, name: str, change: Callable[[DeploymentRow], DeploymentChange], now: float
) -> DeploymentRow:
    return update(db, name, change(from_row(lock(db, name), DeploymentRow)), now)


def revise_beside(
    db: sa.Connection,
    name: str,
    change: Callable[[DeploymentRow, list[DeploymentRow]], DeploymentChange],
    now: float,
) -> DeploymentRow:
    for row in every(db):
        # In the order of names. No other transaction holds two deployments, so none waits for one that waits for it.
        db.execute(_TOUCH, {"key": row.name}).one_or_none()
    return update(db, name, change(one(db, name), [row for row in every(db) if row.name != name]), now)


def delete(db: sa.Connection, name: str) -> None:
    gone = [lock(db, name)]
    host, of_policy, _ = name.partition(POLICY_INFIX)
    if of_policy:
        _count(db, host, gone[0].fields.get(TENANT), -1)
    else:
        own = [
            policy.name for policy in db.execute(_POLICIES) if policy.name.startswith(f"{name}{POLICY_INFIX}")
        ]
        gone += [lock(db, policy) for policy in own]
        db.execute(policy_counts.delete().where(policy_counts.c.deployment == name))
    for row in gone:
        _forget(db, row.id)
        _forget_transfers(db, row.id)
        db.execute(deployments.delete().where(deployments.c.id == row.id))


def count_policies(db: sa.Connection) -> None:
    """Count those that there are, in a ledger that had no counts."""
    for row in db.execute(_POLICIES).all():
        _count(db, row.name.partition(POLICY_INFIX)[0], row.fields.get(TENANT), 1)


def _count(db: sa.Connection, host: str, tenant: str | None, step: int) -> None:
    """After the policy's own row was locked or made: two writers take the locks in one order."""
    for scope in (_ALL, _scope(tenant)):
        insert_new(db, policy_counts, {"deployment": host, "scope": scope, "count": 0})
        this = (policy_counts.c.deployment == host) & (policy_counts.c.scope == scope)
        db.execute(policy_counts.update().where(this).values(count=policy_counts.c.count + step))
        if step < 0:
            db.execute(policy_counts.delete().where(this & (policy_counts.c.count <= 0)))


def _counted(db: sa.Connection, host: str, scope: str) -> int:
    return int(db.execute(_COUNTED, {"host": host, "of": scope}).scalar() or 0)


def _scope(tenant: str | None) -> str:
    return f"={tenant or ''}"


def reset(db: sa.Connection, name: str, floor: int) -> int:
    """The generation under which replicas go back to the base weights; 0 when no snapshot was ever signalled."""
    row = lock(db, name)
    if row.generation == 0 or row.reset_ledger_generation == row.generation:
        return int(row.generation)
    generation = next_generation(db, row, floor)
    _forget(db, row.id)
    values: dict[str, Any] = {
        "desired_snapshot": BASE_SNAPSHOT,
        "first_signalled_at": None,
        "first_ready_at": None,
    }
    counters = ("generation", "last_generation", "reset_ledger_generation", "reset_all_generation")
    values |= dict.fromkeys(counters, generation)
    db.execute(deployments.update().where(deployments.c.id == row.id).values(values))
    return generation


def pause_of(row: Any) -> Pause:
    return Pause(*row.fields.get(_PAUSE, ()))


def pause(db: sa.Connection, name: str, mode: PauseMode | None, only: int | None, floor: int = 0) -> Pause:
    row = lock(db, name)
    before = pause_of(row)
    if only not in (None, before.serial) or (mode is before.mode is None and before.serial >= floor):
        return before
    after = Pause(max(before.serial, floor) + 1, mode)
    fields = {**row.fields, _PAUSE: [after.serial, after.mode]}
    db.execute(deployments.update().where(deployments.c.id == row.id).values(fields=fields))
    return after


def new_generation(db: sa.Connection, name: str, floor: int) -> int:
    return next_generation(db, hold(db, name), floor)


def next_generation(db: sa.Connection, row: Any, floor: int) -> int:
    """A generation above `floor` and above all that were given before; noted as given. row: of the deployment, locked."""
    generation = max(int(row.last_generation), floor) + 1
    db.execute(deployments.update().where(deployments.c.id == row.id).values(last_generation=generation))
    return generation


def _forget(db: sa.Connection, key: int) -> None:
    for table in _OF_A_DEPLOYMENT:
        db.execute(table.delete().where(table.c.deployment_id == key))


def _forget_transfers(db: sa.Connection, key: int) -> None:
    mine = sa.select(transfers.c.id).where(transfers.c.deployment_id == key)
    db.execute(transfer_updates.delete().where(transfer_updates.c.transfer_id.in_(mine)))
    db.execute(transfers.delete().where(transfers.c.deployment_id == key))
