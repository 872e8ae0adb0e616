"""Names of saved weights: nothing that a client calls them may leave its place or take another's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.snapshots.identity import check_identity
from midstream_tinker import weights
from midstream_tinker.refusals import TinkerRefusal

MODEL = "session_00ab:train:0"
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._=+~-]{0,127}", fullmatch=True)
MODELS = st.builds("session_{:x}:train:{}".format, st.integers(0, 2**96), st.integers(0, 2**63 - 1))


def test_a_uri_is_read_as_it_is_written() -> None:
    uri = weights.parse_uri(f"tinker://{MODEL}/sampler_weights/000020")
    assert (uri.model_id, uri.kind, uri.name) == (MODEL, "sampler_weights", "000020")
    assert str(uri) == f"tinker://{MODEL}/sampler_weights/000020"
    assert uri.checkpoint_id == "sampler_weights/000020"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "final",
        f"{MODEL}/weights/final",
        f"http://{MODEL}/weights/final",
        f"tinker://{MODEL}/weights",
        f"tinker://{MODEL}/weights/a/b",
        f"tinker://{MODEL}/weights/..",
        f"tinker://{MODEL}/weights/.",
        f"tinker://{MODEL}/weights/",
        f"tinker://{MODEL}/weights/.hidden",
        f"tinker://{MODEL}/weights/a\nb",
        f"tinker://{MODEL}/weights/a\\b",
        f"tinker://{MODEL}/weights/a@b",
        f"tinker://{MODEL}/weights/{'n' * 129}",
        f"tinker://{MODEL}/external_weights/final",
        f"tinker://{MODEL}/../final",
        "tinker://../weights/final",
        "tinker://session_00ab:train:x/weights/final",
        "tinker://session_00AB:train:0/weights/final",
        f"tinker://{MODEL}\n/weights/final",
    ],
)
def test_what_is_no_uri_is_refused_with_the_field_named(uri: str) -> None:
    with pytest.raises(TinkerRefusal) as refused:
        weights.parse_uri(uri, "model_path")
    assert (refused.value.status, refused.value.param) == (400, "model_path")
    assert len(refused.value.detail) < 1000


@given(st.text(max_size=200))
def test_a_checkpoint_lies_below_its_own_kind_of_its_own_model_or_is_refused(name: str) -> None:
    root = Path("/state/tinker")
    try:
        uri = weights.parse_uri(f"tinker://{MODEL}/weights/{name}")
    except TinkerRefusal:
        return
    place = weights.CheckpointPlaces(root).checkpoint(uri)
    assert place.parent == root / "checkpoints" / "00ab-0" / "weights"
    assert place.resolve() == place
    assert place.name == name


@given(MODELS, NAMES, MODELS, NAMES)
def test_two_checkpoints_never_share_a_directory(model: str, name: str, other: str, other_name: str) -> None:
    places = weights.CheckpointPlaces(Path("/state"))
    uris = {
        weights.checkpoint_uri(at, kind, called)
        for at, called in ((model, name), (other, other_name))
        for kind in weights.KINDS
    }
    assert len({places.checkpoint(uri) for uri in uris}) == len(uris)


@given(MODELS, st.integers(1, 2**63 - 1), st.none() | NAMES)
def test_a_snapshot_can_be_published_and_says_whose_it_is(model: str, seq_id: int, name: str | None) -> None:
    identity = weights.snapshot_identity(model, seq_id, name)
    check_identity(identity)
    assert "/" not in identity
    assert weights.run_of(identity) == weights.run_name(model)
    assert identity.startswith(weights.run_name(model) + "-")


@given(st.lists(st.tuples(MODELS, st.integers(1, 50), st.none() | NAMES), min_size=2, max_size=6))
def test_saves_of_one_seq_id_and_of_another_never_share_an_identity(
    saves: list[tuple[str, int, str | None]],
) -> None:
    # A turn saves once.
    by_turn = {(model, seq_id): name for model, seq_id, name in saves}
    identities = [weights.snapshot_identity(model, seq_id, name) for (model, seq_id), name in by_turn.items()]
    assert len(set(identities)) == len(identities)


@pytest.mark.parametrize(
    "identity", ["base", "step-4", "tinker-", "tinker-xyz-0-1", "tinker-ab-0", "tinker-ab--1"]
)
def test_other_snapshots_are_of_no_run(identity: str) -> None:
    assert weights.run_of(identity) is None
