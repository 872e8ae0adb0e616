"""A real server for the whole folder: two replicas of the tiny MoE, with API keys."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from midstream_conformance import session

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from serving import Server, serve

API_KEY = "conformance-key"


@pytest.fixture(autouse=True)
def fixed_questions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test asks the same in every run. A model that was never trained ends one answer in twenty before it has all of its
    tokens, and in that one a fault of a token too many is not seen."""
    seeds = itertools.count(zlib.crc32(request.node.name.encode()))
    monkeypatch.setattr(session, "secrets", SimpleNamespace(randbits=lambda bits: next(seeds)))


@pytest.fixture(scope="session")
def checkpoint(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(dtype="bfloat16")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("served")
    config = place / "midstream.toml"
    # Rows need both replicas; one that is not scheduled for a while must not be lost. Their prompts come to about 65,000
    # tokens, and no row may depend on what a full cache evicts.
    config.write_text(
        f'[gateway]\napi_keys = ["{API_KEY}"]\nreplica_silence_s = 60\n[embedded]\nkv_cache_tokens = 262144\n'
    )
    options = ("--model", str(checkpoint), "--config", str(config), "--no-tinker")
    with serve(place / "state", *options) as running:
        yield running


@pytest.fixture
def options(server: Server, checkpoint: Path) -> list[str]:
    """Of the command, but for the address."""
    return ["--api-key", API_KEY, "--bucket", server.bucket.as_uri(), "--checkpoint", str(checkpoint)]
