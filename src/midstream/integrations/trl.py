"""TRL's GRPOTrainer on a midstream server, which takes the place of TRL's own client of vLLM. For TRL 1.16.

Always holds: the trainer itself decides when weights are published, at the point where it would send them to vLLM, and before
its first rollout. The log-probabilities that it gets are those of what was sampled from, after temperature and filters, so
that its importance ratios are true. Each process of a distributed run samples for its own prompts and waits for no other one
in doing so: tools are called by some processes and not by others. All of them learn what the first one published, or why not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Any

from midstream.client import PublishError, Rollout, RolloutClient, SnapshotPublisher, TrainingRun, staleness

if TYPE_CHECKING:
    from trl import GRPOTrainer

#: Where TRL logs it: the mean over rollouts, infinite with one of a snapshot that the run did not signal.
BEHIND = "midstream/snapshots_behind"
#: Of a request.
CHOICES_MAX = 128
#: As TRL has it.
VESPO_MODES = ("token_truncate", "token_mask")


class GRPOServer:
    """What a GRPOTrainer samples from and publishes to.

        with GRPOServer(url, bucket) as server:
            server.connect(GRPOTrainer(model, ...)).train()

    model, api_key, bucket: as SnapshotPublisher takes them. behind: 1 samples from the snapshot before while the newest is
    loaded; see TrainingRun. policy: for a model that PEFT wraps. Its adapter is published to this policy and sampled
    from it. how: arguments of each publication, such as config_dir or dtype.
    """

    def __init__(
        self,
        server: str,
        bucket: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        behind: int = 0,
        name: str | None = None,
        policy: str | None = None,
        **how: Any,
    ) -> None:
        self.client = RolloutClient(server, model=policy or model, api_key=api_key)
        self.publisher = SnapshotPublisher(server, bucket, model=model, api_key=api_key, policy=policy)
        self.run = TrainingRun(self.publisher, name, behind=behind, **how)
        self._policy = policy
        self._trainer: Any = None
        # What the first process said when it published: what rollouts must be of, and all that was signalled.
        self._at_least = ""
        self._signalled: list[str] = []

    def __enter__(self) -> GRPOServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run.__exit__(kind, error, trace)
        finally:
            self.publisher.close()
            self.client.close()

    def connect(self, trainer: GRPOTrainer) -> GRPOTrainer:
        """The same trainer, which samples here from now on, with TRL's importance ratios (`vllm_importance_sampling_...`).

        Raises ValueError for a trainer that has an engine already, for an adapter without a policy or with sharded weights,
        and for settings that TRL itself would refuse with vLLM, or that do not reach the server.
        """
        connected: Any = trainer
        refuse_what_cannot_work(connected, policy=self._policy)
        connected.use_vllm, connected.vllm_mode = True, "server"
        connected.vllm_generation, connected._last_loaded_step = self, -1
        self._trainer = connected
        return trainer

    def rollout_func(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """A `rollout_func` for GRPOTrainer, to build others on: one rollout of each prompt, text or messages.

        Beside what TRL asks for it returns `snapshots`, of each token, which reward functions are given too.
        """
        of: Any = trainer
        prompt_ids, images, _ = of._tokenize_prompts(prompts)
        self._refuse(images)
        rollouts = self._rollouts(of, prompt_ids)
        return {
            "prompt_ids": [one.prompt_ids for one in rollouts],
            "completion_ids": [one.token_ids for one in rollouts],
            "logprobs": [one.sampling_logprobs for one in rollouts],
            "snapshots": [one.snapshots for one in rollouts],
        }

    # -- what TRL asks of its engine

    def sync_weights(self) -> None:
        """Publish the trainer's weights, of all its processes. In each it raises the errors of SnapshotPublisher.publish."""
        accelerator = self._trainer.accelerator
        weights, failure = self._weights(accelerator), None
        outcome: list[Any] = ["", "", []]
        if accelerator.is_main_process:
            try:
                self.run.publish(**weights)
                outcome = ["", self.run.at_least, self.run.signalled]
            except (PublishError, ValueError, OSError) as error:
                # The others wait for word, and end with it.
                failure, outcome[0] = error, f"{type(error).__name__}: {error}"
        if accelerator.num_processes > 1:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(outcome, from_process=0)
        problem, self._at_least, self._signalled = outcome
        if problem:
            raise failure or PublishError(problem)

    def _weights(self, accelerator: Any) -> dict[str, Any]:
        """Arguments of `publish`."""
        model = accelerator.unwrap_model(self._trainer.model)
        if self._policy:
            return {"adapter": model}
        if accelerator.num_processes == 1:
            return {"model": model}
        # Each process takes part.
        return {"weights": accelerator.get_state_dict(self._trainer.model_wrapped), "model": model}

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """prompts: token ids, one for each rollout. Returns prompt ids, completion ids, and
        log-probabilities in nats, [prompts][tokens][1]. Raises ValueError for images."""
        self._refuse(images)
        with profiler or nullcontext():
            rollouts = self._rollouts(self._trainer, prompts)
        logprobs = [[[logprob] for logprob in one.sampling_logprobs] for one in rollouts]
        return [one.prompt_ids for one in rollouts], [one.token_ids for one in rollouts], logprobs, None

    # -- inside

    @staticmethod
    def _refuse(images: Iterable[Any] | None) -> None:
        if images is not None and any(images):
            raise ValueError("images: the server takes text only")

    def _rollouts(self, trainer: Any, prompts: Sequence[Sequence[int]]) -> list[Rollout]:
        """One for each prompt, in their order."""
        fields = sampling_fields(trainer)
        asked = list(same_in_a_row(prompts))
        rollouts: dict[int, list[Rollout]] = {}
        for count in {count for _, count in asked}:
            places = [place for place, (_, its) in enumerate(asked) if its == count]
            groups = self.client.sample(
                [asked[place][0] for place in places], n=count, at_least=self._at_least, **fields
            )
            rollouts |= zip(places, groups, strict=True)
        every = [one for place in range(len(asked)) for one in rollouts[place]]
        behind = [staleness(one, self._signalled) for one in every]
        mode = "train" if trainer.model.training else "eval"
        trainer._metrics[mode][BEHIND].append(sum(behind) / max(1, len(behind)))
        return every


def same_in_a_row(prompts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], int]]:
    """Each prompt with the number of times that it stands there, at most CHOICES_MAX of them together."""
    for prompt, same in groupby(prompts):
        count = len(list(same))
        for first in range(0, count, CHOICES_MAX):
            yield list(prompt), min(CHOICES_MAX, count - first)


def refuse_what_cannot_work(trainer: Any, policy: str | None) -> None:
    """TRL checks its settings before `use_vllm` is set. Raises ValueError."""
    args, accelerator = trainer.args, trainer.accelerator
    if trainer.use_vllm or trainer.use_transformers_continuous_batching:
        raise ValueError(
            "args: leave use_vllm and use_transformers_continuous_batching false; the server generates"
        )
    if hasattr(accelerator.unwrap_model(trainer.model), "peft_config") != bool(policy):
        raise ValueError("policy: give its name for a model that PEFT wraps, and for no other")
    if policy and str(accelerator.distributed_type).rpartition(".")[2] in ("FSDP", "DEEPSPEED"):
        raise ValueError("policy: an adapter is published where each process has it whole, not sharded")
    correction = trainer.vllm_importance_sampling_correction
    if (
        trainer.loss_type == "vespo"
        and correction
        and trainer.vllm_importance_sampling_mode not in VESPO_MODES
    ):
        raise ValueError(
            f"args.vllm_importance_sampling_mode: the loss vespo takes {' or '.join(VESPO_MODES)}"
        )
    if args.vllm_structured_outputs_regex is not None:
        raise ValueError(
            "args.vllm_structured_outputs_regex: give generation_kwargs={'structured_outputs': {'regex': ...}}"
        )


def sampling_fields(trainer: Any) -> dict[str, Any]:
    """The fields of a request, from a trainer's settings. Those that are off are left out."""
    fields = {
        "max_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k or None,
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
        **(trainer.args.generation_kwargs or {}),
    }
    return {name: value for name, value in fields.items() if value is not None}
