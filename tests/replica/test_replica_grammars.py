"""Schemas that are recursive, huge or slow: a 400 in one line, compiled in a process that may be stopped, others unharmed."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from replica_fakes import MODEL, FakeEngine, Running, running

from midstream.replica.text import grammarcheck
from midstream.replica.text.grammarcheck import (
    TOO_LONG,
    TOO_LONG_TOGETHER,
    GrammarChecks,
    GrammarVerdict,
    reason,
)
from midstream.replica.text.schema_bounds import problem_of_size
from midstream.replica.text.text_jobs import Leave, Left

NOTHING = "no answer can match it: it asks for itself before it asks for anything"
TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["value", "children"],
}
LINKED = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"],
        }
    },
}
AB = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
}
#: Each within the bounds; what they mean together is not.
SLOW = {"type": "integer", "allOf": [{"multipleOf": step} for step in (9973, 9967)]}
LONG_PATTERN = {"type": "string", "pattern": "(a|b)*c{1,100}" * 300}


def with_properties(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)} | more}


def nested(depth: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (with_properties(480), None),
        (with_properties(3000, r=LONG_PATTERN), "an object of 3001 properties, at most 480"),
        (LONG_PATTERN, "a regular expression of 4200 characters, at most 4096"),
        (
            {"anyOf": [{"pattern": "a" * 4000}] * 5},
            "regular expressions of more than 16384 characters in all",
        ),
        ({"patternProperties": {"a" * 4097: True}}, "a regular expression of 4097 characters, at most 4096"),
        (nested(64), None),
        (nested(65), "deeper than 64 objects and arrays inside one another"),
        ({"enum": list(range(20_000))}, "more than 20000 objects, arrays and values"),
        ({"enum": [f"value {i}" for i in range(10_000)]}, None),
        ({"const": "x" * 300_000}, "longer than 262144 characters"),
        ({"x" * 300_000: True}, "longer than 262144 characters"),
        ({"multipleOf": 10_000}, None),
        ({"multipleOf": 0.01}, None),
        ({"multipleOf": 10_001}, "multipleOf 10001: at most 10000, not counting places after the point"),
        (
            {"multipleOf": 0.123456},
            "multipleOf 0.123456: at most 10000, not counting places after the point",
        ),
        ({"anyOf": [{"multipleOf": 9999}] * 6}, "multipleOf: more than 50000 in all"),
        (TREE, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_has_bounds(schema: Any, problem: str | None) -> None:
    assert problem_of_size(schema) == problem


def test_reasons_are_one_line_without_the_librarys_state() -> None:
    assert reason("NoExtensionBias\n<state>\nTokens: x\n</state>") == NOTHING
    assert reason("LexerTooComplex\n<state>") == "it is too complex"
    place = "\n   1 | start: %json {}\n              ^\n"
    assert (
        reason("at 1(8): failed to compile JSON schema: Invalid type: colour" + place)
        == "Invalid type: colour"
    )


def test_alternatives_that_are_too_many_for_the_parser_together_are_refused(checks: GrammarChecks) -> None:
    assert checks.problem(json_grammar(with_properties(480)), begun=True) is None
    several = {"anyOf": [with_properties(300), with_properties(299)]}
    assert checks.problem(json_grammar(several), begun=True) == "it is too complex"


# The process


@pytest.fixture
def checks() -> Iterator[GrammarChecks]:
    made = GrammarChecks()
    yield made
    made.close()


def json_grammar(schema: Any) -> str:
    return "start: %json " + msgspec.json.encode(schema).decode()


def pid(checks: GrammarChecks) -> int:
    assert checks._child is not None
    return checks._child.pid


def test_recursive_schemas_that_an_answer_can_match_compile(checks: GrammarChecks) -> None:
    for schema in (TREE, LINKED, {"anyOf": [{"$ref": "#"}, {"type": "null"}]}):
        assert checks.problem(json_grammar(schema), begun=True) is None
    for schema in ({"$ref": "#"}, AB):
        assert checks.problem(json_grammar(schema), begun=True) == NOTHING


def test_what_takes_too_long_is_stopped_and_remembered_and_the_next_one_compiles() -> None:
    checks = GrammarChecks(cpu_s_max=0.3)
    try:
        assert checks.problem(json_grammar({"type": "null"}), begun=True) is None
        first = pid(checks)
        assert checks.problem(json_grammar(SLOW), begun=True) == TOO_LONG
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert checks.problem(json_grammar(SLOW), begun=True) == TOO_LONG
        # It was not asked again.
        assert checks._child is None
        assert checks.problem(json_grammar(TREE), begun=True) is None
    finally:
        checks.close()


def test_the_grammars_of_one_request_have_a_bound_together_and_stop_when_its_client_left(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 128 tools may take nearly as long as is allowed."""
    asked: list[str] = []

    def slow(grammar: str, begun: bool) -> GrammarVerdict:
        asked.append(grammar)
        return GrammarVerdict(None, 1.5)

    monkeypatch.setattr(checks, "_ask", slow)
    # What is remembered counts, too, so that the answer does not depend on when one asks.
    for _ in range(2):
        leave = Leave()
        problem = checks.of_request(leave.check)
        said = [problem(f"tool {i}", begun=True) for i in range(5)]
        assert said == [None, None, None, TOO_LONG_TOGETHER, TOO_LONG_TOGETHER]
        assert asked == ["tool 0", "tool 1", "tool 2"]
    leave.set()
    with pytest.raises(Left):
        checks.of_request(leave.check)("another", begun=True)
    assert len(asked) == 3


def test_a_grammar_that_a_busy_machine_did_not_get_to_is_not_held_to_be_bad(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammarcheck, "WALL_S_MAX", 0)
    assert checks.problem(json_grammar(TREE), begun=True) == TOO_LONG
    monkeypatch.undo()
    assert checks.problem(json_grammar(TREE), begun=True) is None


def test_a_process_that_was_killed_is_replaced_and_asked_again(checks: GrammarChecks) -> None:
    assert checks.problem(json_grammar(TREE), begun=True) is None
    first = pid(checks)
    os.kill(first, signal.SIGKILL)
    assert checks.problem(json_grammar(LINKED), begun=True) is None
    assert pid(checks) != first


def test_the_process_ends_when_nobody_can_ask_it_any_more(checks: GrammarChecks) -> None:
    assert checks.problem(json_grammar(TREE), begun=True) is None
    child = checks._child
    assert child is not None
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(30) == 0


# Through a replica


@asynccontextmanager
async def play(
    directory: Path,
) -> AsyncIterator[Running]:
    engine = FakeEngine()
    engine.info = msgspec.structs.replace(engine.info, grammars=True)
    async with running(directory, engine) as here:
        yield here


async def ask(here: Running, schema: Any = None) -> httpx.Response:
    body: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return await here.http.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#"}, NOTHING),
        (AB, NOTHING),
        (with_properties(3000, r=LONG_PATTERN), "an object of 3001 properties, at most 480"),
        (SLOW, TOO_LONG),
    ],
    ids=["itself", "a-b-a", "properties", "slow"],
)
async def test_a_schema_that_cannot_be_served_is_refused_in_the_apis_shape(
    tmp_path: Path, schema: Any, why: str
) -> None:
    async with play(tmp_path) as here:
        answer = await ask(here, schema)
        assert (answer.status_code, answer.json()) == (
            400,
            {
                "error": {
                    "message": f"response_format: the schema: {why}",
                    "type": "invalid_request_error",
                    "code": "invalid_request_error",
                    "param": "response_format",
                }
            },
        )
        assert here.engine.requests == []


async def test_recursive_schemas_reach_the_engine(tmp_path: Path) -> None:
    async with play(tmp_path) as here:
        for schema in (TREE, LINKED):
            assert (await ask(here, schema)).status_code == 200
        assert ["$ref" in str(request.grammar) for request in here.engine.requests] == [True, True]


async def test_others_are_answered_while_a_grammar_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with play(tmp_path) as here:
        begun, may_go_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

        def slow(grammar: str, *, begun: bool, told: asyncio.Event = begun) -> GrammarVerdict:
            loop.call_soon_threadsafe(told.set)
            may_go_on.wait()
            return GrammarVerdict("refused at last", 0.0)

        monkeypatch.setattr(here.replica._kept.grammars, "verdict", slow)
        constrained = asyncio.create_task(ask(here, TREE))
        await begun.wait()
        assert (await ask(here)).status_code == 200
        assert not constrained.done()
        may_go_on.set()
        assert (await constrained).status_code == 400


async def test_the_process_ends_with_its_replica(tmp_path: Path) -> None:
    children: list[int] = []

    async with play(tmp_path) as here:
        assert (await ask(here, TREE)).status_code == 200
        children.append(pid(here.replica._kept.grammars))
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)
