"""`midstream verify` on records of a real server: clean ones are clean, and every planted fault is found, with its cause."""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import json
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import command
from tiers import of_tier, variant
from verified_records import Kept, make_records

from midstream.cli import main
from midstream.client.journal import read_records
from midstream.core.config import EngineSettings
from midstream.core.masks import EVERY, kept_ids
from midstream.core.types import BASE_SNAPSHOT
from midstream.verify.claims import gather
from midstream.verify.findings import Cause, Finding
from midstream.verify.paged import PagedComputer
from midstream.verify.snapshots import BucketSnapshots
from midstream.verify.statement import check_statement
from midstream.verify.verifier import Verifier, used

Record = dict[str, Any]
KEY = b"a key of the trainers"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Kept:
    return make_records(tmp_path_factory.mktemp("verified"), tiny_model)


@pytest.fixture(scope="module")
def records(kept: Kept) -> list[Record]:
    return list(read_records(kept.records))


class Bench:
    """Verifies changed records by one computer."""

    def __init__(self, kept: Kept, records: list[Record], scratch: Path) -> None:
        names = used(gather(records, []).trees)
        self.snapshots = BucketSnapshots(kept.bucket.as_uri(), scratch, base=kept.base, known=names)
        self.computer = self._computer({})

    def findings(self, records: list[Record], replaced: Mapping[str, Path] | None = None) -> list[Finding]:
        """replaced: snapshots whose files in the bucket are others."""
        found = gather(records, [])
        computer = self.computer if not replaced else self._computer(replaced)
        verifier = Verifier(computer, self.snapshots.refused, self.snapshots.is_adapter)
        return [*found.findings, *verifier.verify(found.trees).findings]

    def _computer(self, replaced: Mapping[str, Path]) -> PagedComputer:
        settings = EngineSettings(kv_cache_tokens=16384, threads=1)

        def files(name: str) -> Path:
            return replaced.get(name) or self.snapshots.whole(name)

        return PagedComputer(files, BASE_SNAPSHOT, settings)


@pytest.fixture(scope="module")
def bench(kept: Kept, records: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(kept, records, tmp_path_factory.mktemp("snapshots"))


def run(*arguments: str, process: bool = False) -> subprocess.CompletedProcess[str]:
    """process: of its own, which imports torch again."""
    if process:
        return subprocess.run(command("verify", *arguments), capture_output=True, text=True, timeout=170)
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(["verify", *arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


@pytest.mark.parametrize("how", [(), ("--reference",)], ids=["engine", "reference"])
def test_clean_records_are_clean_and_the_signed_statement_says_what_was_verified(
    kept: Kept, records: list[Record], tmp_path: Path, how: tuple[str, ...]
) -> None:
    out, key = tmp_path / "verified.json", tmp_path / "key"
    key.write_bytes(KEY + b"\n")
    given = (kept.records, "--bucket", kept.bucket.as_uri(), "--base", str(kept.base))
    done = run(*given, "--out", str(out), "--key-file", str(key), *how, process=not how)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    statement = check_statement(out.read_bytes(), KEY)
    turns = [record["turn"] for record in records if record["kind"] == "turn"]
    assert statement["result"] == "clean"
    assert statement["findings"] == []
    assert statement["not_verified"] == {}
    told = statement["verified"]
    assert (told["turns"], told["tokens"]) == (len(turns), sum(len(turn["token_ids"]) for turn in turns))
    assert told["routes"] == told["tokens"]
    assert told["router_weights"] == {"computed": sum(len(turn["router_weights"] or ()) for turn in turns)}
    assert told["router_weights"] == {"computed": 24}
    assert told["sampling_masks"] == sum(len(turn["sampling_masks"] or ()) for turn in turns) == 12
    assert told["largest_difference"] < 1e-4
    assert told["positions_computed"] < sum(kv["end"] for turn in turns for kv in turn["kv_snapshots"])
    assert statement["snapshots"]["step-3"]["stands_on"] == "step-2"
    assert {"v1", "v2", "step-2", "step-3"} <= set(statement["snapshots"])
    mixed = [turn for turn in turns if len(turn["kv_snapshots"]) > 1]
    crossed = [turn for turn in turns if len(turn["snapshots"]) > 1]
    assert len(mixed) > len(crossed) > 0
    with pytest.raises(ValueError, match="signature: is not of this key"):
        check_statement(out.read_bytes(), b"another key of 16 bytes")
    forged = json.dumps({**statement, "result": "differences"}).encode()
    with pytest.raises(ValueError, match="sha256: is not that of this statement"):
        check_statement(forged)


# -- planted faults: each changes records, and says where and as what it must be found


Planted = list[tuple[Record, Cause]]


def turns_of(records: list[Record], least: int = 6) -> list[Record]:
    turns = [record for record in records if record["kind"] == "turn"]
    return [record for record in turns if least <= len(record["turn"]["token_ids"]) < 100]


def label_off_by_one(records: list[Record], rng: random.Random) -> Planted:
    """At the border of two labels, or at the end of a turn of one."""
    record = rng.choice(turns_of(records) + [one for one in records if len(one["turn"]["snapshots"]) > 1] * 9)
    spans = record["turn"]["snapshots"]
    if len(spans) > 1:
        by = rng.choice((-1, 1))
        spans[0]["end"] += by
        spans[1]["start"] += by
        if rng.random() < 0.5:
            for span in record["turn"]["kv_snapshots"]:
                if span["snapshot"] == spans[0]["snapshot"]:
                    span["end"] += by
                if span["snapshot"] == spans[1]["snapshot"]:
                    span["start"] += by
    else:
        end = spans[0]["end"]
        other = "step-2" if spans[0]["snapshot"] != "step-2" else "step-3"
        spans[0]["end"] = end - 1
        spans.append({"snapshot": other, "start": end - 1, "end": end})
    return [(record, Cause.LABEL)]


def route_rows_exchanged(records: list[Record], rng: random.Random) -> Planted:
    record = rng.choice(turns_of(records))
    rows = record["turn"]["routing_matrix"]
    one, other = rng.sample(range(len(rows)), 2)
    while sets(rows[one]) == sets(rows[other]):
        one, other = rng.sample(range(len(rows)), 2)
    rows[one], rows[other] = rows[other], rows[one]
    return [(record, Cause.ROUTE)]


def sets(row: str) -> list[tuple[str, ...]]:
    """The experts of each layer; there are two of them."""
    raw = base64.b64decode(row)
    return [tuple(sorted(map(str, raw[at : at + 2]))) for at in range(0, len(raw), 2)]


def logprob_moved(records: list[Record], rng: random.Random) -> Planted:
    record = rng.choice(turns_of(records))
    values = record["turn"]["logprobs"]
    at = rng.randrange(len(values) - 1)
    values[at] += rng.choice((-1e-3, 1e-3))
    return [(record, Cause.LOGPROB)]


def stale_kv(records: list[Record], rng: random.Random) -> Planted:
    """KV of an older snapshot is said to be fresh, or fresh KV to be another snapshot's."""
    record = rng.choice(
        [one for one in turns_of(records) if "v" not in one["turn"]["snapshots"][0]["snapshot"]]
    )
    turn = record["turn"]
    own, kv = turn["snapshots"][0]["snapshot"], turn["kv_snapshots"]
    if len(kv) > 1:
        turn["kv_snapshots"] = [{"snapshot": own, "start": 0, "end": kv[-1]["end"]}]
    else:
        cut = 16
        other = "step-2" if own != "step-2" else "base"
        turn["kv_snapshots"] = [
            {"snapshot": other, "start": 0, "end": cut},
            {"snapshot": own, "start": cut, "end": kv[-1]["end"]},
        ]
    return [(record, Cause.STALE_KV)]


def token_dropped(records: list[Record], rng: random.Random) -> Planted:
    record = rng.choice(turns_of(records))
    resize(record["turn"], rng.randrange(len(record["turn"]["token_ids"]) - 5), -1, whole=rng.random() < 0.5)
    return [(record, Cause.TOKENS)]


def token_repeated(records: list[Record], rng: random.Random) -> Planted:
    record = rng.choice(turns_of(records))
    resize(record["turn"], rng.randrange(len(record["turn"]["token_ids"]) - 5), 1, whole=rng.random() < 0.5)
    return [(record, Cause.TOKENS)]


def resize(turn: dict[str, Any], at: int, by: int, *, whole: bool) -> None:
    """Drop or repeat a token. whole: spans know of it, too."""
    for name in ("token_ids", "logprobs", "sampling_logprobs", "routing_matrix", "router_weights"):
        values = turn[name]
        if values is None:
            continue
        if by < 0:
            del values[at]
        else:
            values.insert(at, values[at])
    if whole:
        turn["snapshots"][-1]["end"] += by
        turn["kv_snapshots"][-1]["end"] += by


def ids_of_another_choice(records: list[Record], rng: random.Random) -> Planted:
    pairs = [
        (one, other)
        for one in turns_of(records)
        for other in turns_of(records)
        if one is not other
        and one["session"] == other["session"]
        and one["turn"]["parent"] == other["turn"]["parent"]
        and one["turn"]["added"] == other["turn"]["added"]
        and len(one["turn"]["token_ids"]) == len(other["turn"]["token_ids"])
    ]
    one, other = rng.choice(pairs)
    one["turn"]["token_ids"], other["turn"]["token_ids"] = (
        other["turn"]["token_ids"],
        one["turn"]["token_ids"],
    )
    return [(one, Cause.OTHER_CHOICE), (other, Cause.OTHER_CHOICE)]


def adapter_of_another_version(records: list[Record], rng: random.Random) -> Planted:
    record = rng.choice(
        [one for one in turns_of(records) if one["turn"]["snapshots"][0]["snapshot"] in ("v1", "v2")]
    )
    for spans in (record["turn"]["snapshots"], record["turn"]["kv_snapshots"]):
        for span in spans:
            span["snapshot"] = {"v1": "v2", "v2": "v1"}[span["snapshot"]]
    return [(record, Cause.ADAPTER)]


def turn_of_another_session(records: list[Record], rng: random.Random) -> Planted:
    later = [one for one in turns_of(records) if one["turn"]["parent"]]
    one = rng.choice(later)
    others = [
        other
        for other in later
        if other["session"] != one["session"]
        and (other["turn"]["turn"], other["turn"]["parent"]) == (one["turn"]["turn"], one["turn"]["parent"])
    ]
    if not others or rng.random() < 0.3:
        one["session"] = rng.choice(
            [other["session"] for other in later if other["session"] != one["session"]]
        )
        return [(one, Cause.OTHER_SESSION)]
    other = rng.choice(others)
    one["turn"], other["turn"] = other["turn"], one["turn"]
    return [(one, Cause.OTHER_SESSION), (other, Cause.OTHER_SESSION)]


def turn_twice(records: list[Record], rng: random.Random) -> Planted:
    record = rng.choice(turns_of(records))
    again = copy.deepcopy(record)
    records.append({**again, "n": records[-1]["n"] + 1, "line": records[-1]["line"] + 1})
    return [(records[-1], Cause.REPEATED_TURN)]


def wrong_mask_id(records: list[Record], rng: random.Random) -> Planted:
    """The sampled id is another one in its mask, the mask is that of another token, or says that nothing was left out."""
    record = rng.choice([one for one in turns_of(records) if one["turn"]["sampling_masks"]])
    masks, ids = record["turn"]["sampling_masks"], record["turn"]["token_ids"]
    kept = [kept_ids(base64.b64decode(mask), token) for mask, token in zip(masks, ids, strict=True)]
    at = rng.choice([at for at, one in enumerate(kept) if one is not None and len(one) > 1])
    strangers = [other for other, one in enumerate(kept) if one is not None and ids[at] not in one]
    drawn = rng.random()
    if strangers and drawn < 0.4:
        masks[at] = masks[rng.choice(strangers)]
    elif drawn < 0.6:
        masks[at] = base64.b64encode(EVERY).decode()
    else:
        left = {*(kept[at] or ())} - {ids[at]}
        other = rng.choice([one for one in range(256) if one not in left and one != ids[at]])
        data = np.array(sorted({*left, other}), dtype="<u2").tobytes()
        masks[at] = base64.b64encode(b"\2" + data).decode()
    return [(record, Cause.MASK)]


def router_weights_changed(records: list[Record], rng: random.Random) -> Planted:
    """Two weights of a layer are exchanged, one is moved, or a row is that of another token."""
    record = rng.choice([one for one in turns_of(records) if one["turn"]["router_weights"]])
    turn = record["turn"]
    shape = (len(turn["router_weights"]), *turn["routing_matrix_shape"])
    rows = np.frombuffer(b"".join(map(base64.b64decode, turn["router_weights"])), "<f4").reshape(shape).copy()
    at, kind = rng.randrange(len(rows)), rng.randrange(3)
    if kind == 0:
        layer = int(np.ptp(rows[at], axis=-1).argmax())
        rows[at, layer] = rows[at, layer, ::-1].copy()
    elif kind == 1:
        rows[at, rng.randrange(shape[1]), rng.randrange(shape[2])] += rng.choice((-1e-3, 1e-3))
    else:
        rows[at] = rows[rng.choice([other for other in range(len(rows)) if other != at])]
    turn["router_weights"] = [base64.b64encode(row.tobytes()).decode() for row in rows]
    return [(record, Cause.WEIGHTS)]


FAULTS = (
    label_off_by_one,
    route_rows_exchanged,
    logprob_moved,
    stale_kv,
    token_dropped,
    token_repeated,
    ids_of_another_choice,
    adapter_of_another_version,
    turn_of_another_session,
    turn_twice,
    wrong_mask_id,
    router_weights_changed,
)


def planted(
    records: list[Record], kind: Callable[[list[Record], random.Random], Planted], number: int
) -> tuple[list[Record], Planted]:
    changed = numbered(records)
    return changed, kind(changed, random.Random(number))


def numbered(records: list[Record]) -> list[Record]:
    """Copies of the turns, without a hole in their numbers."""
    turns = [record for record in records if record["kind"] == "turn"]
    return [{**copy.deepcopy(record), "n": n} for n, record in enumerate(turns, start=1)]


def place_of(record: Record) -> tuple[int, str]:
    return record["line"], record["segment"]


def judged(findings: list[Finding], expected: Planted) -> Iterator[str]:
    """What is not found, or not with its cause, or found beside it."""
    causes = {(finding.place.line, finding.place.segment): finding.cause for finding in findings}
    places = {place_of(record): cause for record, cause in expected}
    for place, cause in places.items():
        if causes.get(place) != cause:
            yield f"{place} must be {cause!r}, found {causes.get(place)!r}"
    for finding in findings:
        place = (finding.place.line, finding.place.segment)
        if place not in places and finding.cause != Cause.FOLLOWS:
            yield f"beside it: {finding.lines()}"


def replaced_snapshots(
    bench: Bench, records: list[Record], number: int, make: Callable[..., Path]
) -> Iterator[str]:
    """What is wrong with what is found where a snapshot's files are others."""
    rng = random.Random(number)
    labels = Counter(span["snapshot"] for one in turns_of(records) for span in one["turn"]["snapshots"])
    full = [name for name, count in sorted(labels.items()) if count > 1 and name.startswith("step")]
    victim = rng.choice(full)
    found = bench.findings(numbered(records), {victim: make(seed=10 + number % 5)})
    told = [(one.cause, one.detail.partition(":")[0]) for one in found]
    if told != [(Cause.SNAPSHOT, victim)]:
        yield f"{victim} was replaced, found {told}"


#: Faults in one test. All together are a thousand.
FAULTS_MAX = 100


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", [0, *map(variant, range(FAULTS_MAX, 1000, FAULTS_MAX))])
def test_every_planted_fault_is_found_with_its_cause(
    bench: Bench, records: list[Record], tiny_model: Callable[..., Path], first: int
) -> None:
    assert bench.findings(records) == []
    wrong = []
    # The long turn costs as much as all others together.
    short = [one for one in records if one["kind"] != "turn" or len(one["turn"]["token_ids"]) < 100]
    kinds = len(FAULTS) + 1
    for number in range(first, first + of_tier(fast=kinds, test=20, all=FAULTS_MAX)):
        if number % kinds == len(FAULTS):
            wrong += replaced_snapshots(bench, short, number, tiny_model)
            continue
        kind = FAULTS[number % kinds]
        # At the border of two labels it is that of a stream.
        changed, expected = planted(records if kind is label_off_by_one else short, kind, number)
        wrong += [f"{kind.__name__} {number}: {one}" for one in judged(bench.findings(changed), expected)]
    assert wrong == []


# -- faults of the bucket, and files that cannot be read


@pytest.fixture
def copied(kept: Kept, tmp_path: Path) -> Kept:
    """A copy of records and bucket that a test may spoil."""
    shutil.copytree(kept.bucket, tmp_path / "bucket")
    records = Path(kept.records.removeprefix("file://"))
    shutil.copytree(records, tmp_path / "records")
    return Kept((tmp_path / "records").as_uri(), tmp_path / "bucket", kept.base)


def verify(kept: Kept, *more: str) -> subprocess.CompletedProcess[str]:
    return run(kept.records, "--bucket", kept.bucket.as_uri(), "--base", str(kept.base), *more)


def test_a_snapshot_that_was_replaced_in_the_bucket_is_named_and_no_turn_is_blamed(
    copied: Kept, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.rmtree(copied.bucket / "step-3")
    shutil.copytree(tiny_model(seed=9), copied.bucket / "step-3")
    done = verify(copied, "--out", str(tmp_path / "out.json"))
    assert done.returncode == 1
    [finding] = check_statement((tmp_path / "out.json").read_bytes())["findings"]
    assert finding["cause"] == "other snapshot in the bucket"
    assert finding["detail"].startswith("step-3: none of the 10 turns that name it")
    assert "step-3: none of the 10 turns" in done.stdout


def test_a_snapshot_that_is_gone_and_one_that_is_damaged_are_findings(copied: Kept) -> None:
    shutil.rmtree(copied.bucket / "v1")
    weights = copied.bucket / "step-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    done = verify(copied)
    assert done.returncode == 1
    assert "snapshot not in the bucket: v1, of this and " in done.stdout
    # The delta stands on it, too.
    assert "step-2" in done.stdout
    assert "turns could not be verified: a snapshot that it names cannot be used" in done.stdout


def test_what_cannot_be_read_is_named_with_file_and_line(copied: Kept) -> None:
    [first, *_] = sorted(Path(copied.records.removeprefix("file://")).rglob("*.jsonl"))
    whole = first.read_bytes()
    first.write_bytes(whole[: whole.rfind(b"{", 0, len(whole) - 200)])
    done = verify(copied)
    lines = first.read_bytes().count(b"\n") + 1
    assert done.returncode == 2
    assert f"{first.name}: line {lines} is no record" in done.stderr
    records = [json.loads(line) for line in whole.splitlines()]
    records[1]["turn"]["logprobs"] = "none"
    first.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records))
    done = verify(copied)
    assert (done.returncode, "line 2: " in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_no_link_out_of_records_or_bucket_is_followed_and_no_identity_leads_out(
    copied: Kept, tmp_path: Path
) -> None:
    [first, *_] = sorted(Path(copied.records.removeprefix("file://")).rglob("*.jsonl"))
    moved = tmp_path / "elsewhere.jsonl"
    shutil.move(first, moved)
    first.symlink_to(moved)
    done = verify(copied)
    assert (done.returncode, "leads out of the bucket" in done.stderr) == (2, True), done.stderr
    first.unlink()
    records = [json.loads(line) for line in moved.read_text().splitlines()]
    spans = records[0]["turn"]
    spans["snapshots"][0]["snapshot"] = "../state/secret"
    first.write_text("".join(json.dumps(record) + "\n" for record in records))
    (copied.bucket / "step-2" / "model.safetensors").unlink()
    (copied.bucket / "step-2" / "model.safetensors").symlink_to(tmp_path / "elsewhere.jsonl")
    done = verify(copied)
    assert done.returncode == 1
    assert "must be made of names separated by single slashes" in done.stdout
    assert "leads out of the bucket" in done.stdout


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--sample", "0"), "--sample must be at least 1"),
        (("--tolerance", "nan"), "--tolerance must be a number above 0"),
        (("--parent", "step-3"), "--parent step-3: expected DELTA=IDENTITY"),
        (("--key-file", "nothing"), "--key-file signs the statement: name it with --out"),
        (("--deployment", "other"), "holds no turns"),
    ],
)
def test_wrong_options_are_named(kept: Kept, options: tuple[str, ...], told: str) -> None:
    done = verify(kept, *options)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
