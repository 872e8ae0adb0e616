"""The unmodified SDK, in three versions, samples from a running server."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from sdk_venvs import ALIAS, API_KEY, NEWEST_AND_OLDEST, SDKS, run_sdk
from serving import Server

# Scripts may take 400.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
PROMPT = list(b"Count to ten: one, two, three,")
SEED, MAX_TOKENS = 11, 48
# Tokens per block of the prompt cache.
BLOCK = 16


@pytest.fixture(scope="module")
def server(sdk_server: Server) -> Server:
    return sdk_server


def complete(server: Server, **body: Any) -> dict[str, Any]:
    """A completion of our own API."""
    response = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": server.model, "logprobs": True, **body},
        headers={"x-api-key": API_KEY},
        timeout=60,
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def entries(answer: dict[str, Any], choice: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer["choices"][choice]["logprobs"]["content"]
    return found


@pytest.mark.parametrize("version", SDKS)
def test_a_key_that_may_only_sample_samples_and_is_refused_a_model_at_once(
    server: Server, version: str
) -> None:
    given = {"url": server.url, "api_key": "tml-rollouts", "base_model": ALIAS, "prompt": PROMPT}
    told = run_sdk(version, HERE / "sdk_scopes.py", given)
    assert len(told["sampled"]["sequences"][0]["tokens"]) > 0
    assert told["refused"]["status"] == 403
    assert (
        "this API key lacks the scope 'publish' on the deployment of the Tinker API"
        in told["refused"]["text"]
    )
    assert told["asked"] == 1, "it is not tried again"


@pytest.fixture(scope="module")
def written(server: Server) -> list[int]:
    """What the model writes to PROMPT with SEED if nothing stops it."""
    answer = complete(server, prompt=PROMPT, seed=SEED, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [entry["token_id"] for entry in entries(answer)]


def readable_pair(tokens: list[int]) -> int:
    """Where two printable ASCII bytes stand side by side for the first time, so that they can be a stop string."""
    text = bytes(token if token < 128 else 0 for token in tokens)
    for at in range(1, len(tokens) - 1):
        pair = text[at : at + 2]
        if pair.isascii() and pair.decode().isprintable() and text.find(pair) == at:
            return at
    raise AssertionError("the seed writes no two printable characters: take another one")


@pytest.mark.parametrize("version", SDKS)
def test_every_way_to_sample(server: Server, written: list[int], version: str) -> None:
    at = readable_pair(written)
    stop_token = next(token for token in written[3:] if token not in written[:3])
    told = run_sdk(
        version,
        HERE / "sdk_sampling.py",
        {
            "url": server.url,
            "api_key": API_KEY,
            "base_model": ALIAS,
            "prompt": PROMPT,
            "seed": SEED,
            "max_tokens": MAX_TOKENS,
            "stop_string": bytes(written[at : at + 2]).decode(),
            "stop_token": stop_token,
        },
    )
    assert ALIAS in told["models"]
    assert told["base_model"] == ALIAS
    check_seeds(server, told)
    check_stops(written, told, at, stop_token)
    check_scores(server, told)
    check_errors(told)


def check_seeds(server: Server, told: dict[str, Any]) -> None:
    """Tokens and log-probabilities are those of our own API under the same seed."""
    assert told["seeded"]["sequences"] == told["seeded_again"]["sequences"]
    options = {"n": 2, "seed": 3, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "max_tokens": 8}
    own = complete(server, prompt=PROMPT, **options)
    for index, sequence in enumerate(told["seeded"]["sequences"]):
        assert sequence["tokens"] == [entry["token_id"] for entry in entries(own, index)]
        expected = [entry["sampling_logprob"] for entry in entries(own, index)]
        assert sequence["logprobs"] == pytest.approx(expected, abs=1e-4)
    first, second = told["greedy"]["sequences"]
    assert first == second
    # Drawn with certainty.
    assert first["logprobs"] == [0.0] * len(first["tokens"])


def check_stops(written: list[int], told: dict[str, Any], at: int, stop_token: int) -> None:
    """What ended a sequence is its end, with a log-probability."""
    cut = written.index(stop_token) + 1
    for name, expected, reason in (
        ("stop_string", written[: at + 2], "stop"),
        ("stop_token", written[:cut], "stop"),
        ("never_stops", written, "length"),
    ):
        (sequence,) = told[name]["sequences"]
        assert sequence["tokens"] == expected, name
        assert len(sequence["logprobs"]) == len(expected), name
        assert sequence["stop_reason"] == reason, name


def check_scores(server: Server, told: dict[str, Any]) -> None:
    own = entries(complete(server, prompt=PROMPT, echo=True, max_tokens=0, top_logprobs=3))
    expected = [None, *(entry["logprob"] for entry in own[1:])]
    for scores in (told["logprobs"], told["scored"]["prompt_logprobs"]):
        assert scores[0] is None
        assert scores[1:] == pytest.approx(expected[1:], abs=1e-4)
    # As long as the context.
    full = told["logprobs_of_full"]
    whole = entries(complete(server, prompt=PROMPT[:1] * len(full), echo=True, max_tokens=0))
    assert full[1:] == pytest.approx([entry["logprob"] for entry in whole[1:]], abs=1e-4)
    rows = told["scored"]["topk_prompt_logprobs"]
    assert rows[0] is None
    for row, entry in zip(rows[1:], own[1:], strict=True):
        assert [token for token, _ in row] == [top["token_id"] for top in entry["top_logprobs"]]
        assert [p for _, p in row] == pytest.approx(
            [top["logprob"] for top in entry["top_logprobs"]], abs=1e-4
        )


def check_errors(told: dict[str, Any]) -> None:
    """A mistake is told once, in words, and the client goes on."""
    assert "max_tokens" in told["too_long"]["text"]
    assert "temperature" in told["too_hot"]["text"]
    assert told["unknown_model"]["status"] in (400, 404)
    assert "no/such-model" in told["unknown_model"]["text"]
    assert told["after_errors"]["sequences"] == told["greedy"]["sequences"][:1]


@pytest.mark.parametrize("version", NEWEST_AND_OLDEST)
@pytest.mark.variant
def test_600_at_once_and_rollouts_that_stay_where_they_are_cached(server: Server, version: str) -> None:
    prompts = [list(f"Prompt number {i} of several".encode()) for i in range(12)]
    trajectories = [list(f"{version}, trajectory {i}: ".encode()) * 2 for i in range(8)]
    told = run_sdk(
        version,
        HERE / "sdk_rollouts.py",
        {
            "url": server.url,
            "api_key": API_KEY,
            "base_model": ALIAS,
            "prompts": prompts,
            "count": 600,
            "trajectories": trajectories,
            "turns": 8,
        },
    )
    expected = [
        [entry["token_id"] for entry in entries(complete(server, prompt=prompt, temperature=0, max_tokens=4))]
        for prompt in prompts
    ]
    assert told["tokens"] == [expected[i % len(prompts)] for i in range(600)]
    moves = [pair for turns in told["rollouts"] for pair in pairwise(turns)]
    stayed = [turn for before, turn in moves if turn["cached"] >= before["prompt"] // BLOCK * BLOCK]
    assert len(moves) == 8 * 7
    # The others made room on a replica with more to do.
    assert len(stayed) >= len(moves) * 3 // 4, told["rollouts"]
