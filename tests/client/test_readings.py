"""What the client reads of an answer is what the server's own type of that answer has.

The client reads less than an answer holds, because servers of other versions answer less, too. So its types are its own, and
this table holds each of them against the server's.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from midstream.api import answers, resource, resource_answers
from midstream.client import deployment_calls, journal, session_calls, status
from midstream.core import traces

#: (what the client reads, what the server answers or writes)
READ: list[tuple[Any, Any]] = [
    (status._Rows, answers.HotLoadStatus),
    (deployment_calls._Accounts, resource_answers.Accounts),
    (deployment_calls._Deployments, resource.DeploymentsShown),
    (deployment_calls._Policies, resource_answers.Policies),
    (deployment_calls._Ledger, answers.DeploymentLedger),
    (session_calls._Sessions, answers.SessionList),
    (session_calls._Traced, answers.SessionTrace),
    (traces._TraceRead, answers.SessionTrace),
    (journal._Turn, traces.TracedTurn),
    (journal._Reward, traces.Reward),
]
#: Places where the server's type is wider than what it answers.
WIDER = {traces._TraceRead: ["$.traces[].turns[].routing_matrix_dtype"]}


@pytest.mark.parametrize(("read", "answered"), READ, ids=lambda kind: kind.__qualname__)
def test_the_client_reads_fields_that_the_server_answers(read: Any, answered: Any) -> None:
    assert misfits(inspect.type_info(read), inspect.type_info(answered), "$") == WIDER.get(read, [])


class _Given(msgspec.Struct):
    name: str
    count: int | None
    rows: list[dict[str, int]]
    late: str | msgspec.UnsetType = msgspec.UNSET


class _Renamed(msgspec.Struct):
    title: str


class _Narrower(msgspec.Struct):
    count: int


class _Needed(msgspec.Struct):
    late: str


class _OfAnotherKind(msgspec.Struct):
    rows: list[str]


@pytest.mark.parametrize(
    ("read", "wrong"),
    [(_Renamed, "$.title"), (_Narrower, "$.count"), (_Needed, "$.late"), (_OfAnotherKind, "$.rows[]")],
)
def test_a_field_that_does_not_fit_is_named(read: Any, wrong: str) -> None:
    assert misfits(inspect.type_info(read), inspect.type_info(_Given), "$") == [wrong]


def misfits(read: inspect.Type, given: inspect.Type, at: str) -> list[str]:
    """The places below `at` where a value of the type `given` may be none of the type `read`."""
    if isinstance(read, inspect.AnyType):
        return []
    if isinstance(given, inspect.UnionType):
        return [place for one in given.types for place in misfits(read, one, at)]
    if isinstance(read, inspect.UnionType):
        found = [misfits(one, given, at) for one in read.types]
        return [] if [] in found else max(found, key=lambda places: len(places[0]))
    if isinstance(read, inspect.StructType) and isinstance(given, inspect.StructType):
        return _misfits_of_fields(read, given, at)
    if isinstance(read, inspect.TupleType) and isinstance(given, inspect.ListType | inspect.VarTupleType):
        return [place for one in read.item_types for place in misfits(one, given.item_type, f"{at}[]")]
    if isinstance(read, inspect.ListType) and isinstance(given, inspect.ListType | inspect.VarTupleType):
        return misfits(read.item_type, given.item_type, f"{at}[]")
    return [] if isinstance(given, _KINDS.get(type(read), type(read))) else [at]


def _misfits_of_fields(read: inspect.StructType, given: inspect.StructType, at: str) -> list[str]:
    """A field with UNSET as its default may be absent: msgspec shows none. Others are written whatever they hold."""
    answered = {field.encode_name: field for field in given.fields}
    found: list[str] = []
    for field in read.fields:
        place, one = f"{at}.{field.encode_name}", answered.get(field.encode_name)
        if one is None or (field.required and _may_be_absent(one)):
            found.append(place)
        else:
            found += misfits(field.type, one.type, place)
    return found


def _may_be_absent(field: inspect.Field) -> bool:
    return not field.required and field.default is field.default_factory is msgspec.NODEFAULT


_KINDS: dict[type[inspect.Type], Any] = {
    inspect.StrType: inspect.StrType | inspect.LiteralType | inspect.EnumType,
    inspect.FloatType: inspect.FloatType | inspect.IntType,
    inspect.DictType: inspect.DictType | inspect.StructType,
}
