"""What the queries of deploy/grafana ask for: read with promql-parser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import yaml

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboard.json"
#: Prometheus adds them itself.
OF_THE_SCRAPE = {"job", "instance"}
_VARIABLES = {"$__rate_interval": "5m", "$replica": ".*"}


def dashboard_queries() -> list[tuple[str, str]]:
    """(title of a panel, query), with Grafana's variables filled in."""
    board = json.loads(DASHBOARD.read_text())
    found = [(panel["title"], one["expr"]) for panel in board["panels"] for one in panel.get("targets", ())]
    found += [(one["name"], one["expr"]) for one in board["annotations"]["list"]]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert match
            found.append((variable["name"], f"max by ({match[2]}) ({match[1]})"))
    return [(title, _filled(query)) for title, query in found]


def alerts() -> list[dict[str, Any]]:
    read = yaml.safe_load((DASHBOARD.parent / "alerts.yaml").read_text())
    return [rule for group in read["groups"] for rule in group["rules"]]


def _filled(query: str) -> str:
    for name, value in _VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for inside in ("lhs", "rhs", "expr", "vector_selector", "param"):
        if getattr(node, inside, None) is not None:
            yield from _nodes(getattr(node, inside))
    for argument in getattr(node, "args", None) or ():
        yield from _nodes(argument)


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels that it is selected by). Raises ValueError on what is no PromQL."""
    for node in _nodes(promql_parser.parse(query)):
        if type(node).__name__ == "VectorSelector":
            matchers = getattr(node.matchers, "matchers", node.matchers)
            yield node.name, {matcher.name for matcher in matchers}


def unknown(query: str, shown: Mapping[str, set[str]]) -> list[str]:
    """What the query asks for and nobody shows: metrics, their labels, labels to group by. shown: metric to its labels."""
    found, labels = [], set(OF_THE_SCRAPE)
    for metric, selected in selectors(query):
        if metric not in shown:
            found.append(metric)
            continue
        labels |= shown[metric]
        found += [f"{metric}{{{label}}}" for label in sorted(selected - shown[metric] - OF_THE_SCRAPE)]
    if not found:
        grouped = re.findall(r"\b(?:by|without|on|ignoring) \(([^)]*)\)", query)
        names = {name.strip() for one in grouped for name in one.split(",")}
        found += sorted(names - labels)
    return found
