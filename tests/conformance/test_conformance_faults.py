"""Every row can fail: an endpoint that breaks one promise fails the rows about it, and the command exits with 1."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import faults as broken
import httpx
import ids_faults
import messages_faults
import pytest
import responses_faults
import session_faults
import switch_faults as switched
from serving import Server
from tampering import Fault, Json, tampering
from tiers import variant

from midstream import cli
from midstream_conformance import target
from midstream_conformance.runner import all_rows


def run(url: str, options: list[str], rows: list[str], out: Path) -> tuple[int, dict[str, Json]]:
    """The exit code, and the results by id."""
    code = cli.main(["conformance", url, *options, "--json", str(out), "--only", *rows])
    results = {row["id"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(results) == set(rows)
    return code, results


FAULTS: list[tuple[Fault, list[str]]] = [
    *messages_faults.FAULTS,
    *responses_faults.FAULTS,
    (broken.NoDone(), ["openai.done"]),
    (broken.OtherName(), ["openai.models"]),
    (broken.OnePrefix(), ["openai.prefixes", "status.names"]),
    (broken.OneName(), ["openai.deployment", "openai.model_header"]),
    (broken.BareStreams(), ["openai.stream_metrics", "openai.token_ids"]),
    (
        broken.Nothing(),
        [
            "openai.raw_output",
            "logprobs.stream",
            "logprobs.raw",
            "logprobs.sampling",
            "logprobs.top",
            "echo.stream",
            "echo.warm",
            "echo.cached",
        ],
    ),
    (broken.OneLayer(), ["routes.completions", "routes.echo"]),
    (broken.OtherChat(), ["openai.chat_stream"]),
    (broken.Backwards(), ["openai.prompts"]),
    (broken.NoIds(), ["openai.token_ids", "openai.raw_output"]),
    (broken.OwnRequestId(), ["openai.request_id", "openai.metrics"]),
    (broken.NoSeed(), ["openai.seed"]),
    (broken.BareEntries(), ["logprobs.content"]),
    (broken.OffLogprobs(), ["logprobs.stream", "logprobs.top", "logprobs.legacy", "echo.stream"]),
    (broken.NoEchoText(), ["echo.text"]),
    (broken.OffWhenWarm(), ["echo.warm", "routes.warm"]),
    (broken.LateStreamRoutes(), ["routes.stream"]),
    (broken.NeverCached(), ["cache.reuse", "affinity.turns"]),
    (broken.SaysCached(), ["cache.session_is_no_hit"]),
    (broken.Restless(), ["affinity.retry"]),
    (broken.AnyModel(), ["status.model", "status.deployment"]),
    (broken.NullState(), ["hotload.status"]),
    (switched.NoFailures(), ["hotload.ledger"]),
    (switched.AllFull(), ["hotload.ledger"]),
    (broken.Quiet(), ["hotload.corrupt", "hotload.config"]),
    (
        broken.Careless(),
        ["hotload.missing", "hotload.extra_fields_ignore", "hotload.source_url", "status.json"],
    ),
    (broken.FullOnly(), ["incremental.parent", "incremental.checksum"]),
    (broken.NewLoad(), ["hotload.idempotent"]),
    (switched.LateLoad(), ["hotload.idempotent"]),
    (switched.Vague(), ["hotload.corrupt", "hotload.config", "incremental.checksum"]),
    (broken.NoHeaders(), ["transitions.drain_header"]),
    (broken.OneChoice(), ["openai.n", "affinity.choices"]),
    (broken.NoStop(), ["openai.stop"]),
    (broken.WrongCount(), ["openai.usage"]),
    (broken.OtherStream(), ["openai.stream"]),
    (broken.NoLabel(), ["labels.stream", "labels.plain", "labels.served", "hotload.ready"]),
    (broken.SameLogprobs(), ["logprobs.sampling"]),
    (broken.TemperedLogprobs(), ["logprobs.raw"]),
    (broken.NullFirst(), ["echo.prompt", "echo.score"]),
    (broken.WholeEcho(), ["echo.last", "routes.echo_last"]),
    (broken.ColdEcho(), ["echo.cached"]),
    (broken.LateRoutes(), ["routes.alignment"]),
    (broken.OneRoute(), ["routes.completions", "routes.chat", "routes.echo"]),
    (broken.NoSessions(), ["affinity.trajectory", "affinity.fallback", "affinity.skyrl", "affinity.body"]),
    (
        broken.OneSession(),
        [
            "affinity.spread",
            "affinity.no_key",
            "affinity.trajectory",
            "affinity.fallback",
            "affinity.skyrl",
            "affinity.body",
        ],
    ),
    (broken.ForgetsAnswers(), ["affinity.turns", "affinity.choices"]),
    (broken.AffinityWins(), ["affinity.order"]),
    (broken.NoIsolation(), ["cache.isolation", "policies.isolation"]),
    (broken.AlwaysCached(), ["cache.off"]),
    (
        broken.Lenient(),
        ["status.unknown_field", "status.param", "status.context", "status.stream", "status.version"],
    ),
    (broken.AnyKey(), ["status.key"]),
    (broken.Policy("none"), ["policies.default", "policies.all", "policies.new_session"]),
    (switched.AffinityIsOld(), ["policies.affinity_only"]),
    (switched.RecomputedKv(), ["policies.active_stream"]),
    (broken.Policy("all"), ["policies.none", "policies.bool", "policies.max_age"]),
    (broken.Trusting(), ["hotload.identity", "hotload.unknown_field"]),
    (broken.StuckWeights(), ["hotload.weights", "incremental.delta"]),
    (broken.OldLabel(), ["transitions.async_crosses", "labels.tokens"]),
    (broken.LateLabel(), ["labels.tokens"]),
    (broken.BackAndForth(), ["labels.once", "transitions.sync_one_policy"]),
    (broken.Unavailable(), ["transitions.async_errors"]),
    (broken.NoRetryAfter(), ["transitions.sync_425"]),
    (switched.OldLater(), ["labels.once", "transitions.sync_425"]),
    (switched.Grudge(), ["transitions.sync_retry"]),
    *ids_faults.FAULTS,
    *session_faults.FAULTS,
]


@pytest.fixture
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "STREAM_S", 0.4)


@pytest.fixture(autouse=True)
def no_sessions(server: Server, options: list[str]) -> None:
    """Closes the sessions of earlier tests: a replica that has fewer of them would get every new one."""
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {options[1]}"}) as client:
        while known := client.get("/v1/sessions").raise_for_status().json()["data"]:
            for session in known:
                client.delete(f"/v1/sessions/{quote(session['id'], safe='')}").raise_for_status()


#: A few of the faults; the tier `all` has them all.
SOME = 16


@pytest.mark.parametrize(
    ("fault", "rows"),
    [pair if number % SOME == 0 else variant(*pair) for number, pair in enumerate(FAULTS)],
    ids=lambda value: type(value).__name__ if isinstance(value, Fault) else "",
)
def test_a_broken_promise_fails_its_rows(
    server: Server, options: list[str], fault: Fault, rows: list[str], tmp_path: Path, short_streams: None
) -> None:
    with tampering(server.url, fault) as url:
        code, results = run(url, options, rows, tmp_path / "results.json")
    assert {name: row["verdict"] for name, row in results.items()} == dict.fromkeys(rows, "fail")
    assert all(row["why"] for row in results.values())
    assert code == 1


def test_a_path_that_others_do_not_have_skips_its_rows(
    server: Server, options: list[str], tmp_path: Path
) -> None:
    rows = [row.id for row in all_rows() if row.group in ("ids", "sessions", "trainer")]
    with tampering(server.url, ids_faults.NotThere()) as url:
        code, results = run(url, options, rows, tmp_path / "results.json")
    assert {row["verdict"] for row in results.values()} == {"skip"}
    assert all("404 " in results[name]["why"] for name in ("ids.vllm", "ids.tokenize", "ids.render"))
    assert code == 0


def test_every_row_was_made_to_fail() -> None:
    covered = {row for _, listed in FAULTS for row in listed}
    assert {row.id for row in all_rows()} == covered


@pytest.mark.variant
def test_the_proxy_itself_breaks_nothing(
    server: Server, options: list[str], tmp_path: Path, short_streams: None
) -> None:
    rows = sorted({row for _, listed in FAULTS for row in listed})
    with tampering(server.url, Fault()) as url:
        code, results = run(url, options, rows, tmp_path / "results.json")
    assert [(name, row["why"]) for name, row in results.items() if row["verdict"] != "pass"] == []
    assert code == 0
