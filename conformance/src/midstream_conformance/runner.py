"""Runs rows, one after the other: they change what all of them share.

Always holds: every row gives one result, whatever an endpoint answers. A row whose needs are not there is skipped, and the
result names the need. An unexpected answer, a broken connection and a row that takes too long are failures of that row alone.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from time import monotonic

import httpx

from midstream.client import PublishError
from midstream.core.errors import ConfigError, SnapshotError
from midstream_conformance.outcome import Failed, Skipped
from midstream_conformance.rows import Evidence, Result, Row, Verdict, registered
from midstream_conformance.session import Session

# Module of checks/ to the subject of its rows.
GROUPS: dict[str, str] = {
    "openai": "OpenAI compatibility",
    "logprobs": "log-probabilities",
    "echo": "prompts echoed and scored",
    "routes": "MoE router replay",
    "labels": "policy versions in responses",
    "affinity": "session affinity",
    "cache": "prompt caching",
    "messages": "Anthropic's Messages API",
    "responses": "OpenAI's Responses API",
    "status": "status codes",
    "ids": "token ids in, token ids out",
    "sessions": "sessions, traces and rewards",
    "trainer": "trainers' control calls",
    "hotload": "hot load: signals, status, ledger",
    "incremental": "incremental snapshots",
    "contract": "external rollout services",
    "transitions": "rollouts while a snapshot is switched",
    "policies": "reset_prompt_cache",
}


def all_rows() -> tuple[Row, ...]:
    """In the order in which they run, whoever imported what first: what changes the deployment comes last."""
    modules = [importlib.import_module(f"midstream_conformance.checks.{name}").__name__ for name in GROUPS]
    return tuple(sorted(registered(), key=lambda row: modules.index(row.check.__module__)))


def chosen(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """Those of the groups and ids in `only`; all when there are none. Raises ConfigError on an unknown name."""
    for name in only:
        if not any(name in (row.id, row.group) for row in rows):
            groups = ", ".join(dict.fromkeys(row.group for row in rows))
            raise ConfigError(f"--only {name}: no such row or group; groups are {groups}")
    return [row for row in rows if not only or {row.id, row.group} & set(only)]


async def run_rows(
    rows: Sequence[Row],
    session: Session,
    on_begin: Callable[[Row], None],
    on_result: Callable[[Result], None],
) -> None:
    for row in rows:
        on_begin(row)
        on_result(await run_row(row, session))


async def run_row(row: Row, session: Session) -> Result:
    started = monotonic()

    def result(verdict: Verdict, why: str, evidence: Evidence) -> Result:
        return Result(row, verdict, why, dict(evidence), monotonic() - started)

    for need in row.needs:
        if why := session.target.missing(need):
            return result("skip", why, {})
    try:
        async with asyncio.timeout(session.limit_s):
            return result("pass", "", await row.check(session))
    except Skipped as skipped:
        return result("skip", str(skipped), {})
    except Failed as failed:
        return result("fail", str(failed), failed.evidence)
    except TimeoutError:
        return result("fail", f"not done after {session.limit_s:g} s", {})
    except httpx.TransportError as error:
        return result("fail", f"the connection broke: {type(error).__name__} {error}", {})
    except (PublishError, SnapshotError, ConfigError, OSError) as error:
        return result("fail", f"the snapshot could not be published: {error}", {})
    except Exception as error:  # noqa: BLE001 - what an endpoint may answer has no end, and other rows are to run
        return result("fail", f"an answer is not of the API's form: {type(error).__name__}: {error}", {})
