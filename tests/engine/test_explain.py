"""`midstream explain` against a trainer in plain transformers with one fault of each kind: every cause is named right."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from explained import World, masks_of_turn, routes_of_turn
from families import write_model
from recompute import OWN_ROUTE
from tiers import slow

from midstream.cli import main
from midstream.core.config import EngineSettings
from midstream.verify.claims import Claim
from midstream.verify.explain import Explainer, GapReport
from midstream.verify.gaps import GapCause, Split, k1, shares, whole
from midstream.verify.paged import PagedComputer
from midstream.verify.plain import PlainComputer
from midstream.verify.trainer import TrainerTurn, read_trainer

TOKENS = 12
FILTERED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "tokens": TOKENS}
LABEL, OLD, NEXT = "step-1", "step-0", "step-2"


@dataclass
class Planted:
    """numbers: the trainer's. causes: all that must be named, and the part that each must have, where it is known."""

    numbers: np.ndarray | TrainerTurn
    causes: dict[GapCause, np.ndarray | None]


@dataclass
class Stand:
    world: World
    planted: list[Planted] = field(default_factory=list)

    def plant(self, numbers: np.ndarray | TrainerTurn, **causes: np.ndarray | None) -> None:
        self.planted.append(Planted(numbers, {GapCause[name]: part for name, part in causes.items()}))

    def right(self, turn: dict[str, Any], snapshot: str = LABEL, **other: Any) -> np.ndarray:
        """What a trainer computes that does all as the server did."""
        routes = routes_of_turn(turn) if turn["routing_matrix"] else None
        given: dict[str, Any] = {"temperature": 0.8, "masks": masks_of_turn(turn), "routes": routes, **other}
        return self.world.train(turn, snapshot, **given)

    def trainer(self, claim: Claim) -> TrainerTurn | list[float] | None:
        numbers = self.planted[int(claim.place.session.removeprefix("s-")) - 1].numbers
        return numbers if isinstance(numbers, TrainerTurn) else numbers.tolist()


def play(stand: Stand) -> None:
    """A turn with each fault, and some with two."""
    world, right = stand.world, stand.right
    moe = bool(world.shape[0])
    turn = world.turn(LABEL, **FILTERED)
    stand.plant(right(turn))

    turn = world.turn(LABEL, **FILTERED)
    raw = right(turn, temperature=1.0)
    stand.plant(raw, TEMPERATURE=raw - right(turn))

    turn = world.turn(LABEL, **FILTERED)
    every = right(turn, masks=None)
    stand.plant(every, MASK=every - right(turn))

    turn = world.turn(LABEL, **FILTERED)
    cold, bare = right(turn, temperature=1.0), right(turn, temperature=1.0, masks=None)
    stand.plant(bare, TEMPERATURE=cold - right(turn), MASK=bare - cold)

    # What a text is tokenized as again: another token, and all behind it stand on that.
    turn = world.turn(LABEL, temperature=0.8, tokens=TOKENS)
    ids = [*turn["token_ids"][:5], (turn["token_ids"][5] + 7) % world.vocab, *turn["token_ids"][6:]]
    other = right(turn, ids=ids, masks=None)
    stand.plant(TrainerTurn(other.tolist(), ids), TOKENS=other - right(turn, masks=None))

    # A template that begins with one token more.
    turn = world.turn(LABEL, **FILTERED)
    longer = right({**turn, "added": [3, *turn["added"]]})
    ids = turn["token_ids"]
    stand.plant(TrainerTurn(longer.tolist(), ids, [3, *turn["added"]]), TOKENS=longer - right(turn))

    turn = world.turn(LABEL, **FILTERED)
    stand.plant(np.append(right(turn)[1:], -0.5), TOKENS=None)

    # A swap came while it was sampled, and the trainer computes all of it by the new weights.
    turn = world.turn([LABEL] * 6 + [NEXT] * 6, **FILTERED)
    by_labels = np.append(right(turn)[:6], right(turn, NEXT)[6:])
    stand.plant(
        right(turn, NEXT),
        STALE_KV=by_labels - np.array(turn["sampling_logprobs"]),
        SNAPSHOT=right(turn, NEXT) - by_labels,
    )

    turn = world.turn(LABEL, kv=[OLD] * 16 + [LABEL] * 4, **FILTERED)
    stand.plant(right(turn), STALE_KV=right(turn) - np.array(turn["sampling_logprobs"]))

    turn = world.turn(LABEL, **FILTERED)
    stand.plant(right(turn, NEXT), SNAPSHOT=right(turn, NEXT) - right(turn))

    turn = world.turn(LABEL, kv=[OLD] * 16 + [LABEL] * 4, **FILTERED)
    bare = right(turn, NEXT, masks=None)
    stand.plant(bare, STALE_KV=None, SNAPSHOT=None, MASK=None)

    turn = world.turn(LABEL, penalty=2.0, **FILTERED)
    raw = right(turn, temperature=1.0)
    stand.plant(raw, TEMPERATURE=raw - np.array(turn["sampling_logprobs"]))

    turn = world.turn(LABEL, **FILTERED)
    stand.plant(right(turn) + world.random.normal(0, 3e-3, TOKENS))

    if moe:
        turn = world.turn(LABEL, routes=world.other_routes(TOKENS), **FILTERED)
        own = right(turn, routes=None)
        stand.plant(own, ROUTE=own - right(turn))
    # A snapshot that the trainer computed by is one that some record names.
    turn = world.turn(NEXT, **FILTERED)
    stand.plant(right(turn, NEXT))


def check(split: Split, planted: Planted) -> None:
    assert {*split.details} == {*planted.causes}, (split.details, planted.causes)
    assert np.allclose(sum(split.parts.values()), split.gap, rtol=0, atol=1e-12)
    for cause, part in planted.causes.items():
        if part is not None:
            assert np.abs(split.parts[cause] - part).max() < 2e-4, (cause, split.parts[cause] - part)
    for cause in {*GapCause} - {*planted.causes, GapCause.PRECISION}:
        assert not split.parts[cause].any(), (cause, split.parts[cause])
    assert split.cause in (planted.causes or {GapCause.PRECISION}), split.cause
    assert split.off < 1e-4


@pytest.fixture(scope="module")
def moe(tiny_model: Callable[..., Path]) -> Stand:
    stand = Stand(World({f"step-{seed}": tiny_model(seed=seed) for seed in range(3)}))
    play(stand)
    return stand


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Stand:
    place = tmp_path_factory.mktemp("dense")
    stand = Stand(World({f"step-{seed}": write_model("llama", place / f"{seed}", seed) for seed in range(3)}))
    play(stand)
    return stand


def explained(stand: Stand, *, paged: bool) -> GapReport:
    files = stand.world.checkpoints.__getitem__
    if paged:
        paging = PagedComputer(files, OLD, EngineSettings(kv_cache_tokens=4096, threads=1))
        return Explainer(paging, lambda _: None, stand.trainer).explain(stand.world.trees())
    plain = PlainComputer(files, OLD)
    made = Explainer(plain, lambda _: None, stand.trainer, other_ties=plain.other_ties)
    return made.explain(stand.world.trees())


@pytest.mark.parametrize("kind", [slow("moe"), "dense"])
def test_every_planted_fault_is_named_and_has_the_part_that_it_made(
    kind: str, request: pytest.FixtureRequest
) -> None:
    stand: Stand = request.getfixturevalue(kind)
    report = explained(stand, paged=kind == "dense")
    assert report.not_split == {}
    assert len(report.splits) == len(stand.planted)
    for split in report.splits:
        check(split, stand.planted[int(split.claim.place.session.removeprefix("s-")) - 1])
    by_cause, every = shares(report.splits), whole(report.splits)
    assert sum(one.k1 for one in by_cause.values()) == pytest.approx(every.k1, abs=1e-12)
    assert sum(one.tokens for one in by_cause.values()) == every.tokens == TOKENS * len(stand.planted)
    gaps = np.concatenate([split.gap for split in report.splits])
    assert every.k1 == pytest.approx(k1(gaps))
    assert every.k3 == pytest.approx(float((np.exp(gaps) - 1 - gaps).mean()))


def test_a_near_tie_that_the_trainer_broke_otherwise_is_no_mismatch(tmp_path: Path) -> None:
    directory = write_model("qwen3-moe", tmp_path / "model")
    position, layer = 6, 1
    prompt = World({LABEL: directory}).prompt()
    other = tie_at(directory, prompt, position, layer)
    stand = Stand(World({LABEL: directory}))
    turn = stand.world.turn(LABEL, tokens=TOKENS, prompt=prompt)
    forced = stand.world.forced(len(prompt) + TOKENS - 1, len(prompt), routes_of_turn(turn))
    assert forced is not None
    forced[position, layer] = torch.tensor(other)
    numbers = stand.right(turn, temperature=1.0, masks=None, forced=forced, routes=None)
    stand.plant(numbers)
    plain = PlainComputer(stand.world.checkpoints.__getitem__, LABEL)
    explainer = Explainer(plain, lambda _: None, stand.trainer, other_ties=plain.other_ties)
    [split] = explainer.explain(stand.world.trees()).splits
    assert np.abs(split.gap).max() > 1e-3
    assert split.cause is GapCause.TIES
    assert split.details == {}
    assert np.abs(split.parts[GapCause.TIES] - split.gap).max() < 1e-4
    # Without a second look the rest is what it is: unexplained.
    [split] = Explainer(plain, lambda _: None, stand.trainer).explain(stand.world.trees()).splits
    assert split.cause is GapCause.PRECISION


def tie_at(directory: Path, ids: list[int], position: int, layer: int) -> list[int]:
    """Make the router of a layer tie at a position, but for 1e-6. Returns the route that is as good."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    router = model.model.layers[layer].mlp.gate
    seen: list[torch.Tensor] = []
    router.register_forward_hook(
        lambda _module, inputs, _out: seen.append(inputs[0].reshape(-1, inputs[0].shape[-1]))
    )
    with torch.no_grad():
        model(torch.tensor([ids]))
    hidden = seen[0][position].double()
    name = f"model.layers.{layer}.mlp.gate.weight"
    [file] = directory.glob("*.safetensors")
    tensors = load_file(file)
    weight = tensors[name].double()
    scores, order = (weight @ hidden).sort(descending=True)
    top = router.top_k
    last, first_out = order[top - 1], order[top]
    weight[first_out] += (scores[top - 1] - scores[top] - 1e-6) * hidden / (hidden @ hidden)
    tensors[name] = weight.float()
    save_file(tensors, file, {"format": "pt"})
    kept = [*order[: top - 1].tolist(), int(first_out)]
    assert int(last) not in kept
    assert OWN_ROUTE not in kept
    return kept


def test_the_temperature_of_the_record_is_blamed_and_one_that_is_not_that_of_the_draw_is_said(
    dense: Stand,
) -> None:
    stand = Stand(World(dense.world.checkpoints, seed=2))
    drawn = {"temperature": 0.8, "top_p": 0.9}
    for recorded in (drawn, {**drawn, "temperature": 0.5}):
        turn = stand.world.turn(LABEL, **FILTERED)
        turn["sampling"] = recorded
        raw = stand.right(turn, temperature=1.0)
        stand.plant(raw, TEMPERATURE=raw - stand.right(turn))
    report = explained(stand, paged=True)
    told = [split.details[GapCause.TEMPERATURE] for split in report.splits]
    assert told[0] == "the turn was drawn at temperature 0.8; the trainer's numbers are not of that"
    assert told[1] == (
        "the turn was drawn at temperature 0.8, and not at 0.5 as its record says; the trainer's numbers are not of that"
    )
    for split, planted in zip(report.splits, stand.planted, strict=True):
        check(split, planted)


# -- the command, and the files that it reads


def command(stand: Stand, place: Path, *arguments: str) -> int:
    where = place / "records" / "records" / "d"
    where.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({k: v for k, v in one.items() if k not in ("segment", "line")})
        for one in stand.world.records
    ]
    (where / "1.jsonl").write_text("\n".join(lines) + "\n")
    bucket = place / "bucket"
    bucket.mkdir(exist_ok=True)
    for name, directory in stand.world.checkpoints.items():
        if not (bucket / name).exists():
            shutil.copytree(directory, bucket / name)
    return main(["explain", str(place / "records"), *arguments, "--bucket", bucket.as_uri()])


def rows_of(stand: Stand) -> list[dict[str, Any]]:
    rows = []
    for record, planted in zip(stand.world.records, stand.planted, strict=True):
        given = planted.numbers
        row = {"session": record["session"], "turn": 1}
        if isinstance(given, TrainerTurn):
            rows.append({**row, **msgspec.to_builtins(given)})
        else:
            rows.append({**row, "logprobs": given.tolist()})
    return rows


@pytest.mark.slow
def test_the_command_names_every_cause_of_lines_and_arrays_alike(
    moe: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(moe)
    lines, arrays = tmp_path / "trainer.jsonl", tmp_path / "trainer.npz"
    lines.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "session": "other"}]))
    flat = [row for row in rows if not row.get("prompt_ids")]
    sampled = {record["session"]: record["turn"]["token_ids"] for record in moe.world.records}
    np.savez(
        arrays,
        session=np.array([row["session"] for row in flat]),
        turn=np.array([row["turn"] for row in flat]),
        lengths=np.array([len(row["logprobs"]) for row in flat]),
        logprobs=np.concatenate([row["logprobs"] for row in flat]),
        token_ids=np.concatenate([row.get("token_ids") or sampled[row["session"]] for row in flat]),
    )
    out, report = tmp_path / "out.json", tmp_path / "report.html"
    given = ("--out", str(out), "--report", str(report))
    found = []
    for path in (lines, arrays):
        assert command(moe, tmp_path, str(path), *given) == 1
        found.append(json.loads(out.read_text()))
    of_lines, of_arrays = ({turn["session"]: turn["details"] for turn in one["turns"]} for one in found)
    assert len(of_arrays) == len(flat) < len(of_lines)
    assert of_arrays == {session: of_lines[session] for session in of_arrays}
    for turn, planted in zip(found[0]["turns"], moe.planted, strict=True):
        assert {*turn["details"]} == {*planted.causes}
        gap = np.array(turn["trainer"]) - turn["rollout"]
        assert np.allclose(sum(map(np.array, turn["parts"].values())), gap, rtol=0, atol=1e-12)
    shown = capsys.readouterr().out
    assert "1 rows of the trainer are of no turn in the records, such as" in shown
    for cause in GapCause:
        assert f"\n{cause.value:26}" in shown
    page = report.read_text()
    assert page.count("<circle") == TOKENS * len(flat)
    assert "<script" not in page
    assert "the trainer computed by step-2, the labels are step-1" in page


@pytest.mark.slow
def test_a_trainer_without_a_fault_has_exit_code_0_and_names_of_others_are_no_markup(
    moe: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand = Stand(World(moe.world.checkpoints, seed=1))
    turn = stand.world.turn(LABEL, **FILTERED)
    stand.world.records[0]["session"] = "<b>&"
    lines, report = tmp_path / "trainer.jsonl", tmp_path / "report.html"
    lines.write_text(json.dumps({"session": "<b>&", "turn": 1, "logprobs": stand.right(turn).tolist()}))
    assert command(stand, tmp_path, str(lines), "--report", str(report)) == 0
    assert "1 turns, 12 tokens, against sampling_logprob" in capsys.readouterr().out
    assert "<b>" not in report.read_text()
    # Against raw numbers, what was applied is the trainer's.
    assert command(stand, tmp_path, str(lines), "--against", "logprob") == 1
    told = capsys.readouterr().out
    assert (
        "temperature or penalties: the turn was drawn at temperature 0.8; the trainer's numbers are of that"
        in told
    )
    assert "mask: the trainer masks where the server's raw numbers do not" in told


@pytest.mark.slow
def test_a_snapshot_that_no_record_names_is_found_where_it_is_named(
    moe: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand = Stand(World(moe.world.checkpoints, seed=2))
    turn = stand.world.turn(LABEL, **FILTERED)
    lines = tmp_path / "trainer.jsonl"
    lines.write_text(json.dumps({"session": "s-1", "turn": 1, "logprobs": stand.right(turn, NEXT).tolist()}))
    assert command(stand, tmp_path, str(lines)) == 0
    assert "wrong snapshot:" not in capsys.readouterr().out
    assert command(stand, tmp_path, str(lines), "--also", NEXT) == 1
    assert "wrong snapshot: the trainer computed by step-2" in capsys.readouterr().out
    assert command(stand, tmp_path, str(lines), "--also", "step-9") == 2
    assert "step-9" in capsys.readouterr().err
    # What is damaged in the record itself is said first.
    stand.world.records[0]["turn"]["logprobs"][3] -= 0.5
    assert command(stand, tmp_path, str(lines), "--also", NEXT) == 1
    assert (
        "1 records are further than 0.0001 nats from what was computed, the worst by 0.5"
        in capsys.readouterr().out
    )


SEQUENCE = {
    "session": "s-1",
    "replica": "r",
    "turns": [{"turn": 1, "start": 3, "end": 5, "finish_reason": "length"}],
    "token_ids": [5, 6, 7, 8, 9],
    "loss_mask": [0, 0, 0, 1, 1],
    "trainer_logprobs": [None, None, None, -1.0, -2.0],
}


def test_a_line_of_an_export_gives_the_numbers_of_its_own_turns(tmp_path: Path) -> None:
    lines = tmp_path / "t.jsonl"
    again = {**SEQUENCE, "loss_mask": [0] * 5}
    lines.write_text(f"{json.dumps(SEQUENCE)}\n\n{json.dumps(again)}\n")
    table = read_trainer(lines)
    assert len(table) == 1
    [tree] = World.trees_of([bare_record()])
    table.match(tree.claims.values())
    assert table(tree.claims[1]) == TrainerTurn([-1.0, -2.0], [8, 9], [5, 6, 7])
    assert table.unmatched == []


def bare_record() -> dict[str, Any]:
    turn = {
        "turn": 1,
        "parent": 0,
        "model": "m",
        "added": [5, 6, 7],
        "token_ids": [8, 9],
        "loss_mask": [],
        "finish_reason": "length",
        "created": 1.0,
        "logprobs": [-1.0, -2.0],
        "sampling_logprobs": [-1.0, -2.0],
        "routing_matrix": None,
        "routing_matrix_dtype": None,
        "routing_matrix_shape": None,
        "snapshots": [{"snapshot": "a", "start": 0, "end": 2}],
        "kv_snapshots": [{"snapshot": "a", "start": 0, "end": 4}],
    }
    head = {"n": 1, "replica": "r", "boot": "b", "kind": "turn", "segment": "s", "line": 1}
    return {**head, "deployment": "d", "tenant": "", "session": "s-1", "tree": 1, "turn": turn}


ROW = {"session": "s", "turn": 1, "logprobs": [-1.0]}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (
            [{**ROW, "logprobs": [-1.0, 0.5]}],
            "line 1: logprobs: token 1 must have a number of at most 0, got 0.5",
        ),
        (
            [{**ROW, "logprobs": [None, -1.0]}],
            "line 1: logprobs: token 0 must have a number of at most 0, got None",
        ),
        ([ROW, ROW], "line 2: turn 1 of session 's' comes twice, first "),
        ([{**ROW, "logprobs": "x"}], "line 1: Expected `array`, got `str` - at `$.logprobs`"),
        ([{**ROW, "logprob": [-1.0]}], "line 1: Object contains unknown field `logprob`"),
        ([{**ROW, "token_ids": [1, 2]}], "line 1: 2 token_ids and 1 logprobs"),
        ([{**ROW, "token_ids": [-1]}], "line 1: token_ids: -1 is no token id"),
        ([{**ROW, "prompt_ids": []}], "line 1: prompt_ids: lacks a token before the first log-probability"),
        (
            [{**SEQUENCE, "turns": [{"turn": 1, "start": 0, "end": 5}], "trainer_logprobs": [-1.0] * 5}],
            "line 1: prompt_ids: lacks a token before the first log-probability",
        ),
        ([{**SEQUENCE, "loss_mask": []}], "line 1: 5 token_ids, 0 loss_mask, 5 trainer_logprobs"),
        (
            [{**SEQUENCE, "turns": [{"turn": 1, "start": 3, "end": 9}]}],
            "line 1: turn 1 has tokens 3 to 9 of 5",
        ),
        ([{**ROW, "logprobs": [None]}], "has no log-probabilities of any turn"),
        (["no record"], "line 1: Expected `object`, got `str`"),
    ],
)
def test_rows_that_cannot_be_used_are_named(rows: list[Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=re.escape(told)) as raised:
        read_trainer(path)
    assert str(raised.value).startswith(str(path))


def test_files_that_are_torn_or_hostile_are_refused_and_nothing_is_unpickled(tmp_path: Path) -> None:
    torn, pickled, short = (tmp_path / f"{name}.npz" for name in ("torn", "pickled", "short"))
    torn.write_bytes(b"PK\3\4 no archive")
    about = {"turn": np.array([1]), "lengths": np.array([2]), "logprobs": np.array([-1.0])}
    np.savez(pickled, session=np.array([{"a": 1}], dtype=object), **about)
    np.savez(short, session=np.array(["s"]), **about)
    line = tmp_path / "t.jsonl"
    line.write_bytes(b'{"session": "\xff"}\n')
    for path, told in (
        (torn, "is no .npz file of numbers and text"),
        (pickled, "is no .npz file of numbers and text: Object arrays cannot be loaded"),
        (short, "logprobs: has 1 entries, lengths say 2"),
        (line, "line 1: is no JSON"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            read_trainer(path)


def test_a_row_that_may_be_of_several_turns_is_refused_unless_its_ids_say_which(tmp_path: Path) -> None:
    one, other = bare_record(), {**bare_record(), "replica": "r2", "line": 2}
    # The same replica, started again.
    again = {**bare_record(), "boot": "b2", "line": 3}
    again["turn"]["token_ids"] = [8, 10]
    row = {"session": "s-1", "turn": 1, "logprobs": [-1.0, -2.0]}
    path = tmp_path / "t.jsonl"

    def matched(row: dict[str, Any], records: list[dict[str, Any]]) -> list[bool]:
        path.write_text(json.dumps(row))
        table = read_trainer(path)
        claims = [tree.claims[1] for tree in World.trees_of(records)]
        table.match(claims)
        return [table(claim) is not None for claim in claims]

    told = r"line 1: may be of s, line 1: session 's-1', r, turn 1 and of s, line 2: .*; `replica` or `token_ids`"
    with pytest.raises(ValueError, match=told):
        matched(row, [one, other])
    assert matched({**row, "replica": "r2"}, [one, other]) == [False, True]
    assert matched({**row, "token_ids": [8, 10]}, [one, again]) == [False, True]
    with pytest.raises(ValueError, match="may be of"):
        matched({**row, "token_ids": [1, 2]}, [one, again])
