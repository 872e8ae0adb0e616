"""TRL's GRPOTrainer on a midstream server, which takes the place of TRL's own client of vLLM. For TRL 1.16.

Always holds: the trainer itself decides when weights are published, at the point where it would send them to vLLM, and before
its first rollout. The log-probabilities that it gets are those of what was sampled from, after temperature and filters, so
that its importance ratios are true. Every process of a distributed run gets the rollouts of its own prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list, gather_object

from midstream.client import Rollout, RolloutClient, SnapshotPublisher, TrainingRun, staleness

if TYPE_CHECKING:
    from trl import GRPOTrainer

#: Where TRL logs it.
BEHIND = "midstream/snapshots_behind"


class GRPOServer:
    """What a GRPOTrainer samples from and publishes to.

        with GRPOServer(url, bucket) as server:
            server.connect(GRPOTrainer(model, ...)).train()

    model, api_key, bucket: as SnapshotPublisher takes them. behind: 1 samples from the snapshot before while the newest is
    loaded; see TrainingRun. policy: of a model that PEFT wraps, whose adapter is then published to this policy and sampled
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

        Raises ValueError for a trainer that has an engine already, and for an adapter without a policy.
        """
        connected: Any = trainer
        if hasattr(connected.accelerator.unwrap_model(connected.model), "peft_config") != bool(self._policy):
            raise ValueError("policy: give its name for a model that PEFT wraps, and for no other")
        if connected.use_vllm or connected.use_transformers_continuous_batching:
            raise ValueError(
                "args: leave use_vllm and use_transformers_continuous_batching false; the server generates"
            )
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
        count = of.num_generations if of.model.training else of.num_generations_eval
        rollouts = self._rollouts(of, prompt_ids, count)
        return {
            "prompt_ids": [one.prompt_ids for one in rollouts],
            "completion_ids": [one.token_ids for one in rollouts],
            "logprobs": [one.sampling_logprobs for one in rollouts],
            "snapshots": [one.snapshots for one in rollouts],
        }

    # -- what TRL asks of its engine

    def sync_weights(self) -> None:
        """Publish the trainer's weights, of all its processes. Raises the errors of SnapshotPublisher.publish."""
        accelerator, model = self._trainer.accelerator, self._trainer.model
        if self._policy:
            # Adapters are whole in every process, but for sharded ones, which PEFT's own saving does not gather.
            if accelerator.is_main_process:
                self.run.publish(adapter=accelerator.unwrap_model(model))
        elif accelerator.num_processes == 1:
            self.run.publish(model=accelerator.unwrap_model(model))
        else:
            state = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                self.run.publish(state, model=accelerator.unwrap_model(model))
        accelerator.wait_for_everyone()

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """prompts: token ids, each prompt `num_generations` times in a row. Returns prompt ids, completion ids, and
        log-probabilities in nats, [prompts][tokens][1]. Raises ValueError for images."""
        self._refuse(images)
        with profiler or nullcontext():
            rollouts = self._rollouts(self._trainer, prompts, num_generations)
        logprobs = [[[logprob] for logprob in one.sampling_logprobs] for one in rollouts]
        return [one.prompt_ids for one in rollouts], [one.token_ids for one in rollouts], logprobs, None

    # -- inside

    @staticmethod
    def _refuse(images: Iterable[Any] | None) -> None:
        if images is not None and any(images):
            raise ValueError("images: the server takes text only")

    def _rollouts(self, trainer: Any, prompts: Sequence[Sequence[int]], count: int) -> list[Rollout]:
        """Of this process's prompts; the main process asks for all."""
        accelerator = trainer.accelerator
        every = gather_object(list(prompts))
        held: list[Any] = [None, 0.0]
        if accelerator.is_main_process:
            held = self._sampled(every[::count], count, sampling_fields(trainer))
        broadcast_object_list(held, from_process=0)
        trainer._metrics["train" if trainer.model.training else "eval"][BEHIND].append(held[1])
        first = accelerator.process_index * len(prompts)
        mine: list[Rollout] = held[0][first : first + len(prompts)]
        return mine

    def _sampled(self, prompts: list[list[int]], count: int, fields: dict[str, Any]) -> list[Any]:
        """The rollouts, and how many snapshots they are behind, on average."""
        groups = self.client.sample(prompts, n=count, at_least=self.run.at_least, **fields)
        rollouts = [one for group in groups for one in group]
        behind = [staleness(one, self.run.signalled) for one in rollouts]
        return [rollouts, sum(behind) / max(1, len(behind))]


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
