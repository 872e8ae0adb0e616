"""What TRL is given, without TRL: the order of rollouts, what is asked for, and what cannot work."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.client import PublishError, Rollout
from midstream.integrations.trl import (
    BEHIND,
    CHOICES_MAX,
    GRPOServer,
    refuse_what_cannot_work,
    same_in_a_row,
    sampling_fields,
)


class Sampler:
    """In the place of RolloutClient: each rollout says which prompt it is of, and which one of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], int, str]] = []

    def sample(self, prompts: Any, *, n: int, at_least: str, **fields: Any) -> list[list[Rollout]]:
        self.asked.append((prompts, n, at_least))
        return [
            [
                Rollout(prompt, [prompt[0], k], [0.0] * 2, [-0.5, -k], ["r/0", "r/1"], "stop", "")
                for k in range(n)
            ]
            for prompt in prompts
        ]


class Accelerator(SimpleNamespace):
    def unwrap_model(self, model: Any) -> Any:
        return model


def trainer(**changed: Any) -> Any:
    args = SimpleNamespace(generation_kwargs=None, vllm_structured_outputs_regex=None)
    told: dict[str, Any] = {
        "use_vllm": False,
        "use_transformers_continuous_batching": False,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "loss_type": "dapo",
        "max_completion_length": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "model": SimpleNamespace(training=True),
        "accelerator": Accelerator(
            num_processes=1, is_main_process=True, distributed_type="DistributedType.NO"
        ),
        "args": args,
        "_metrics": defaultdict(lambda: defaultdict(list)),
    }
    return SimpleNamespace(**(told | changed))


@pytest.fixture
def server(tmp_path: Any) -> Any:
    made = GRPOServer("http://127.0.0.1:1", tmp_path.as_uri())
    made.client.close()
    made.client = Sampler()  # type: ignore[assignment]
    return made


def test_each_prompt_gets_its_own_rollouts_in_order_however_often_it_stands_there(server: Any) -> None:
    of = trainer()
    server.connect(of)
    server._at_least, server._signalled = "r/1", ["r/0", "r/1"]
    prompts = [[7], [7], [7], [8], [9], [9], [9], [7]]
    ids, completions, logprobs, _ = server.generate(prompts, None, 3)
    assert ids == prompts
    assert completions == [[7, 0], [7, 1], [7, 2], [8, 0], [9, 0], [9, 1], [9, 2], [7, 0]]
    assert logprobs[1] == [[-0.5], [-1]]
    assert sorted(server.client.asked) == [([[7], [9]], 3, "r/1"), ([[8], [7]], 1, "r/1")]
    # The oldest token of each is one snapshot behind.
    assert of._metrics["train"][BEHIND] == [1.0]
    assert server.generate([], None, 1)[:3] == ([], [], [])


def test_a_request_has_no_more_choices_than_the_server_takes() -> None:
    assert list(same_in_a_row([[1]] * (2 * CHOICES_MAX + 1))) == [
        ([1], CHOICES_MAX),
        ([1], CHOICES_MAX),
        ([1], 1),
    ]


def test_the_fields_of_a_request_are_those_that_are_on() -> None:
    args = SimpleNamespace(generation_kwargs={"min_tokens": 2})
    assert sampling_fields(trainer(args=args)) == {
        "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "min_tokens": 2,
    }  # fmt: skip
    assert sampling_fields(trainer(top_k=5, min_p=0.1))["top_k"] == 5


def test_images_are_refused(server: Any) -> None:
    server.connect(trainer())
    with pytest.raises(ValueError, match="images: the server takes text only"):
        server.generate([[1]], [["picture"]], 1)


ADAPTER = SimpleNamespace(peft_config={}, training=True)
SHARDED = Accelerator(num_processes=2, is_main_process=True, distributed_type="DistributedType.FSDP")


@pytest.mark.parametrize(
    ("changed", "policy", "words"),
    [
        ({"use_vllm": True}, None, "leave use_vllm"),
        ({"model": ADAPTER}, None, "policy: give its name"),
        ({}, "p", "policy: give its name"),
        ({"model": ADAPTER, "accelerator": SHARDED}, "p", "not sharded"),
        ({"loss_type": "vespo"}, None, "the loss vespo takes token_truncate or token_mask"),
        (
            {"args": SimpleNamespace(generation_kwargs=None, vllm_structured_outputs_regex="[0-9]")},
            None,
            "structured_outputs",
        ),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(changed: dict[str, Any], policy: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        refuse_what_cannot_work(trainer(**changed), policy)


def test_a_publication_that_fails_is_the_trainers_error(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**weights: Any) -> None:
        raise PublishError("the bucket is full")

    server.connect(trainer())
    monkeypatch.setattr(server.run, "publish", fail)
    with pytest.raises(PublishError, match="the bucket is full"):
        server.sync_weights()
