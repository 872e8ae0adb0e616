"""The Tinker front: the SDK's API on a private Unix socket, which the gateway passes `/api/v1/` to.

Owns: wiring concrete classes. Run as `python -m midstream_tinker.front` by the supervisor. Imports no torch: the trainer is a
process of its own, started when a client trains.
Always holds: when it ends, polls are answered before their connections close, and no trainer is left.
"""

from __future__ import annotations

import gc
from pathlib import Path

import msgspec

from midstream.core.errors import ConfigError
from midstream.core.supervision import Listening, Stalled, TinkerSpec
from midstream.http.appserver import AppServer
from midstream.http.auth import Authenticator
from midstream.http.channel import StdioChannel, run_child
from midstream.http.tls import unverified_tls
from midstream_tinker.adapters import SamplerAdapters
from midstream_tinker.app import tinker_app
from midstream_tinker.futures import Futures
from midstream_tinker.policies import DeploymentPolicies
from midstream_tinker.publishing import DeploymentPublisher
from midstream_tinker.samplers import Samplers
from midstream_tinker.sampling import Sampling
from midstream_tinker.store import Store
from midstream_tinker.trainer.process import Trainer
from midstream_tinker.trainer.protocol import StartTrainer
from midstream_tinker.training import Training
from midstream_tinker.types import Served
from midstream_tinker.weights import CheckpointPlaces


class _Config(msgspec.Struct):
    """A checkpoint's config.json. text_config: in that of a model that has more than text."""

    max_position_embeddings: int | None = None
    text_config: _Config | None = None


async def serve(spec: TinkerSpec, channel: StdioChannel) -> None:
    tls = unverified_tls() if spec.gateway_url.startswith("https:") else None
    served = served_model(spec)
    places = CheckpointPlaces(Path(spec.state_dir) / "tinker")
    store = Store(Path(spec.state_dir) / "tinker.db")
    futures = Futures()
    policies = DeploymentPolicies(
        gateway_url=spec.gateway_url, deployment=spec.deployment, key=spec.key, tls=tls
    )
    adapters = SamplerAdapters(policies, spec.settings.adapters_max)
    sampling = Sampling(
        gateway_url=spec.gateway_url,
        deployment=spec.deployment,
        served=served,
        futures=futures,
        store=store,
        adapters=adapters,
        tls=tls,
    )
    publish = DeploymentPublisher(
        gateway_url=spec.gateway_url,
        deployment=spec.deployment,
        bucket=spec.bucket,
        work_dir=places.publishing,
        full_every=spec.settings.full_every,
        tls=tls,
    )
    training = Training(
        trainer=Trainer(trainer_start(spec)),
        store=store,
        futures=futures,
        places=places,
        samplers=Samplers(store, publish, adapters),
        served=served,
    )
    app = tinker_app(
        store=store,
        futures=futures,
        sampling=sampling,
        training=training,
        authenticator=Authenticator(spec.api_keys),
        served=served,
    )
    server = AppServer(app, spec.path)
    try:
        await server.start()
        gc.collect()
        gc.freeze()
        channel.send(Listening())
        channel.pulse.on_stall = lambda seconds: channel.send(Stalled(stalled_s=seconds))
        channel.pulse.start()
        await channel.stop_requested()
    finally:
        futures.close()
        await server.stop()
        await sampling.close()
        await training.close()
        store.close()


def served_model(spec: TinkerSpec) -> Served:
    return Served(
        names=spec.names,
        directory=spec.model_dir,
        deployment=spec.deployment,
        max_context=max_context(Path(spec.model_dir)),
        base_policy=spec.settings.base_model_clients,
    )


def max_context(model_dir: Path) -> int | None:
    """In tokens; None when the checkpoint does not say. Raises ConfigError."""
    path = model_dir / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    text = config.text_config or config
    return config.max_position_embeddings or text.max_position_embeddings


def trainer_start(spec: TinkerSpec) -> StartTrainer:
    return StartTrainer(
        spec.model_dir,
        dtype=spec.settings.trainer_dtype,
        device=spec.settings.trainer_device,
        threads=spec.threads,
    )


def main() -> int:
    return run_child("tinker", TinkerSpec, serve)
