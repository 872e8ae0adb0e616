"""The real client with routes and masks in files: it negotiates, slices and joins, and our reader gives the arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fireworks_helpers import Endpoint, routes_of
from serving import serve

from midstream.client.shared_references import read_masks, read_routes


@pytest.fixture(scope="module")
def got(
    config: Path, tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> Iterator[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("files")
    store = (directory / "kept").as_uri()
    arguments = ["--model", str(tiny_model()), "--config", str(config), "--no-tinker", "--replicas", "1"]
    with serve(directory / "state", *arguments, "--records", store) as server:
        yield {"store": store, **Endpoint(server).run("files", store=store)}


def inline_routes(sample: dict[str, Any]) -> np.ndarray:
    """In the order that they have in a file, which is no part of a route."""
    return np.sort(routes_of({"routing_matrices": sample["routes"]}), axis=-1)


def test_the_client_agrees_on_files_and_every_position_has_its_inline_route(got: dict[str, Any]) -> None:
    assert got["agreed"] == "parquet_v1"
    first, inline = got["first"], got["inline"]["echo"]
    assert first["full_tokens"] == inline["full_tokens"]
    assert first["logprobs"] == inline["logprobs"]
    found = read_routes(first["routes"])
    assert found.known.all()
    assert len(found.routes) == len(first["full_tokens"]) - 1
    assert np.array_equal(found.routes, inline_routes(inline))
    assert {file["store_id"] for file in first["routes"]["files"]} == {got["store"]}


def test_routes_of_the_completion_and_of_a_shown_suffix_are_its_own(got: dict[str, Any]) -> None:
    whole = inline_routes(got["inline"]["echo"])
    plain = read_routes(got["plain"]["routes"])
    assert np.array_equal(plain.routes, inline_routes(got["inline"]["plain"]))
    shown = read_routes(got["last"]["routes"])
    assert np.array_equal(shown.routes, whole[got["last"]["prompt_len"] - 1 - 7 :])
    assert plain.known.all()
    assert shown.known.all()


def test_a_mask_of_each_sampled_token_has_it(got: dict[str, Any]) -> None:
    for name in ("first", "plain", "last"):
        one = got[name]
        sampled = one["full_tokens"][one["prompt_len"] :]
        masks, known = read_masks(one["masks"])
        assert known.all()
        assert len(known) == len(sampled)
        rows = [masks.row(at).tolist() for at in range(len(sampled))]
        assert all(token in row for token, row in zip(sampled, rows, strict=True))
        assert any(1 < len(row) < 256 for row in rows)


def test_a_second_turn_refers_to_rows_of_the_first_ones_file(got: dict[str, Any]) -> None:
    first, second = got["first"]["routes"], got["second"]["routes"]
    own, earlier = second["files"][-1], second["files"][:-1]
    assert own["row_count"] < second["length"]
    assert first["files"][-1] in earlier
    found, before = read_routes(second), read_routes(first)
    assert found.known.all()
    spans = [span for span in second["spans"] if second["files"][span["file_index"]] != own]
    reused = sum(span["count"] for span in spans)
    assert reused >= len(got["first"]["full_tokens"]) - 32
    assert np.array_equal(found.routes[:reused], before.routes[:reused])
    for one in got["several"]:
        assert read_routes(one["routes"]).known.all()


def test_what_the_client_makes_of_references_is_read_position_by_position(got: dict[str, Any]) -> None:
    first, second = read_routes(got["first"]["routes"]), read_routes(got["second"]["routes"])
    prompt_len, more = got["cut"]
    joined = read_routes(got["joined"])
    assert joined.known.tolist() == [True] * prompt_len + [False] * 3 + [True] * more
    assert np.array_equal(joined.routes[:prompt_len], first.routes[:prompt_len])
    assert np.array_equal(joined.routes[-more:], second.routes[-more:])
    masked = read_routes(got["masked"])
    assert masked.known.tolist() == got["kept"]
    assert np.array_equal(masked.routes[masked.known], first.routes[masked.known])
    given = got["input"]
    assert given["routing_matrix_format"] == "parquet_v1"
    assert np.array_equal(read_routes(given["routing_references"]).routes, first.routes)
    masks, known = read_masks(given["sampling_mask_references"])
    assert known.tolist() == [False] * (prompt_len - 1) + [True] * (len(known) - prompt_len + 1)
    assert all(len(masks.row(at)) == 0 for at in range(prompt_len - 1))
    own, _ = read_masks(got["first"]["masks"])
    assert masks.ids.tolist() == own.ids.tolist()


def test_another_store_gets_routes_inline_and_no_masks(got: dict[str, Any]) -> None:
    other = got["other_store"]
    assert other["agreed"] == "base64_inline"
    assert len(other["routes"]) == len(other["full_tokens"]) - 1
    refused = got["other_masks"]
    assert (refused["status"], refused["param"]) == (400, "x-fireworks-r3-store-id")
    refused = got["too_long"]
    assert (refused["status"], refused["param"]) == (400, "x-fireworks-r3-ttl-seconds")
