"""midstream as a rollout backend of verl 0.9: `actor_rollout_ref.rollout.name=midstream`.

Importing this module registers it. verl imports it in each of its processes if the environment names it:
`VERL_USE_EXTERNAL_MODULES=midstream.integrations.verl`. It has what verl asks of a backend:

- `MidstreamClient` is what an agent loop generates with. It asks the server itself, without a Ray actor in between.
- `MidstreamAgentLoopManager` gives it to verl's workers (`rollout.agent.agent_loop_manager_class`).
- `MidstreamRollout` publishes weights where trainer and rollout take turns (`trainer_mode=sync`).
- `MidstreamCheckpointEngine` publishes them while rollouts continue (`trainer_mode=separate_async`,
  `checkpoint_engine.backend`).
- `MidstreamReplica` stands for servers that verl does not start.

Always holds: the run's first weights are published, and served by all replicas, before the first rollout, which asks for
them. The same holds if verl continues from a checkpoint, and its first snapshot has another number. Rank 0 publishes; the
others gather.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.workers.rollout import base
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from midstream.client import SnapshotPublisher
from midstream.integrations.verl_wire import Generator, VerlSettings, extra_fields, request_of, serving

NAME = "midstream"
#: Snapshots of this process. verl has a manager of its own for each way to its rollouts, and all of them publish.
_PUBLISHED: set[str] = set()


def settings_of(rollout: Any) -> VerlSettings:
    """The backend's settings in a rollout configuration. Raises ValueError when they are missing."""
    given: Mapping[str, Any] | None = rollout.engine_kwargs.get(NAME)
    if given is None:
        raise ValueError(
            f"actor_rollout_ref.rollout.engine_kwargs.{NAME} must have url, bucket, served and run"
        )
    return VerlSettings(**given)


class MidstreamClient(LLMServerClient):  # type: ignore[misc]
    """In place of verl's own client, which asks Ray actors. config: the whole configuration.

    Made after the run's first weights were published. Raises PublishError before that.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._rollout = config.actor_rollout_ref.rollout
        settings = settings_of(self._rollout)
        self._generator = Generator(settings, serving(settings))

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> TokenOutput:
        """Sampled ids of a prompt. request_id: the trajectory's, in all of its turns.

        Raises ValueError for images, videos and audio, and what `Generator.generate` raises.
        """
        sent = [name for name in ("image_data", "video_data", "audio_data") if others.get(name)]
        if sent:
            raise ValueError(f"midstream takes token ids alone, not {', '.join(sent)}")
        routes = bool(self._rollout.enable_rollout_routing_replay)
        body = request_of(
            prompt_ids,
            sampling_params,
            prompt_length=self._rollout.prompt_length,
            response_length=self._rollout.response_length,
            routes=routes,
            model=self._generator.settings.model,
        )
        one = await self._generator.generate(request_id, body, routes=routes)
        return TokenOutput(
            token_ids=one.token_ids,
            log_probs=one.logprobs if sampling_params.get("logprobs") else None,
            routed_experts=one.experts,
            stop_reason=one.stop_reason,
            extra_fields=extra_fields(one),
        )


class MidstreamAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager with agent loops that generate with a MidstreamClient."""

    def __init__(self, config: Any, llm_client: Any, *others: Any, **named: Any) -> None:
        super().__init__(config, MidstreamClient(config), *others, **named)


class _Elsewhere:
    """A Ray actor in the place of a rollout worker: verl asks each replica's workers to receive weights."""

    def execute_checkpoint_engine(self, method: str) -> dict[str, Any]:
        return {}

    def update_weights(self, global_steps: int | None = None) -> None:
        pass


class MidstreamReplica(RolloutReplica):  # type: ignore[misc]
    """Servers that run already, so there is nothing to launch, to put to sleep, or to abort: streams continue across a swap."""

    async def launch_servers(self) -> None:
        self._server_address = f"{settings_of(self.config).url}#{self.replica_rank}"

    async def init_standalone(self) -> None:
        self.workers = [ray.remote(num_cpus=0)(_Elsewhere).remote()]
        await self.launch_servers()


class WeightPublisher:
    """Publishes what verl hands over tensor by tensor. Of rank 0 alone; others gather with it."""

    def __init__(self, settings: VerlSettings, *, master: bool) -> None:
        self._settings = settings
        self._master = master
        self._publisher: SnapshotPublisher | None = None

    async def publish(self, weights: Any, version: int | None) -> None:
        """Returns when every replica serves them. Raises what SnapshotPublisher.publish raises.

        version: `global_steps`. verl hands over one step's weights again in some modes, or without the step: before a
        validation, for example. They are served already, and are only gathered.
        """
        if version is None and not _PUBLISHED:
            raise ValueError("verl gave no global_steps to name the first snapshot by")
        gathered: dict[str, torch.Tensor] = {}
        async for tensor_name, tensor in _each(weights):
            # Gathering takes all ranks; keeping takes one.
            if self._master:
                gathered[tensor_name] = tensor.detach().to("cpu", copy=True)
        if version is None or (name := self._settings.snapshot(version)) in _PUBLISHED:
            return
        if self._master:
            await asyncio.to_thread(self._send, gathered, name)
        _PUBLISHED.add(name)

    def _send(self, gathered: dict[str, torch.Tensor], name: str) -> None:
        if self._publisher is None:
            self._publisher = SnapshotPublisher(
                self._settings.url,
                self._settings.bucket,
                model=self._settings.model,
                api_key=self._settings.api_key,
                full_every=self._settings.full_every,
                work_dir=self._settings.work_dir,
            )
        how: Any = {"config_dir": self._settings.served, "dtype": self._settings.dtype}
        self._publisher.publish(name, gathered, **how)


async def _each(weights: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterable[Any]:
    if isinstance(weights, AsyncIterable):
        async for one in weights:
            yield one
    else:
        for one in weights:
            yield one


class MidstreamRollout(base.BaseRollout):  # type: ignore[misc]
    """The worker's side where trainer and rollout take turns. There is no memory to release: the servers have their own."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        master = torch.distributed.get_rank() == 0
        self._publisher = WeightPublisher(settings_of(self.config), master=master)

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        **kind: Any,
    ) -> None:
        """Publishes whole weights. Raises ValueError for adapters, which verl sends apart unless it merges them."""
        if kind.get("peft_config") is not None:
            raise ValueError("set actor_rollout_ref.model.lora.merge=True: this backend takes whole weights")
        await self._publisher.publish(weights, global_steps)


class MidstreamCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The trainer's side while rollouts continue: a bucket and a signal instead of a process group.

    Its arguments are the settings again, as `checkpoint_engine.engine_kwargs.midstream`.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        del bucket_size
        self._publisher = WeightPublisher(VerlSettings(**settings), master=is_master)

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self, **nothing: Any) -> None:
        pass

    def finalize(self) -> None:
        pass

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        await self._publisher.publish(weights, global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        raise NotImplementedError("replicas fetch weights from the bucket")


CheckpointEngineRegistry.register(NAME)(MidstreamCheckpointEngine)
RolloutReplicaRegistry.register(NAME, lambda: MidstreamReplica)
# Of these verl 0.9 has a table, and no function to register with.
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.MidstreamRollout"
