"""The resources that a child demands of a Ray cluster, and the message that there is no room for it. Pure; does not import
ray."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from midstream.core.config import RaySettings

NODES_SHOWN = 8


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """A placement group. bundle: the resources of each of its bundles, by name. The child is in the first one."""

    bundle: dict[str, float]
    count: int = 1
    strategy: str = "STRICT_PACK"

    def bundles(self) -> list[dict[str, float]]:
        return [dict(self.bundle) for _ in range(self.count)]


def replica_demand(settings: RaySettings) -> Demand:
    wanted = {"CPU": settings.cpus, "GPU": settings.gpus, **settings.resources}
    bundle = {name: amount for name, amount in wanted.items() if amount > 0}
    return Demand(bundle=bundle, count=settings.bundles, strategy=settings.strategy)


def gateway_demand(settings: RaySettings) -> Demand:
    """One core, unless the settings have another number for CPU."""
    wanted = {"CPU": 1.0, **settings.gateway_resources}
    return Demand(bundle={name: amount for name, amount in wanted.items() if amount > 0})


def waiting_for(
    name: str, demand: Demand, nodes: Mapping[str, Mapping[str, float]], free: Mapping[str, float]
) -> str:
    """One line. nodes: all resources of each node, by its address. free: the unused resources of the whole cluster."""
    what = shown(demand.bundle)
    if demand.count > 1:
        what = f"{demand.count} x {what} ({demand.strategy})"
    has = [f"{address} {shown(_of(demand, node))}" for address, node in sorted(nodes.items())]
    if len(has) > NODES_SHOWN:
        has[NODES_SHOWN:] = [f"{len(has) - NODES_SHOWN} more"]
    return f"{name}: waits for {what}: the cluster has {', '.join(has)}; free is {shown(_of(demand, free))}"


def _of(demand: Demand, resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in demand.bundle}


def shown(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in resources.items()) + "}"
