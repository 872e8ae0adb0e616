"""The files of examples/ray are read by those they are for: settings by midstream, cluster file by Ray, manifests as YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from midstream.core.config import Settings
from midstream.core.settings import load_settings

RAY = Path(__file__).parents[2] / "examples" / "ray"


def placed(settings: Settings) -> tuple[str, float, tuple[str, ...]]:
    return settings.launcher, settings.ray.gpus, settings.vllm.args


def test_the_settings_place_replicas_with_ray() -> None:
    assert placed(load_settings(str(RAY / "serve.toml"), {})) == ("ray", 2, ("--tensor-parallel-size", "2"))


def test_the_cluster_file_is_one_for_ray_up() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((RAY / "cluster.yaml").read_text())
    validate_config(prepare_config(config))
    assert config["provider"]["type"] == "local"
    assert len(config["provider"]["worker_ips"]) == config["max_workers"]


def test_the_manifests_fit_each_other(tmp_path: Path) -> None:
    settings, cluster, service = yaml.safe_load_all((RAY / "kuberay.yaml").read_text())
    file = tmp_path / "serve.toml"
    file.write_text(settings["data"]["serve.toml"])
    assert placed(load_settings(str(file), {})) == ("ray", 2, ("--tensor-parallel-size", "2"))
    assert cluster["kind"] == "RayCluster"
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    [worker] = [group["template"]["spec"] for group in cluster["spec"]["workerGroupSpecs"]]
    for pod in (head, worker):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    server = container_named(head, "midstream")
    assert service["spec"]["ports"][0]["targetPort"] == server["ports"][0]["name"]
    assert (
        service["spec"]["ports"][0]["port"] == server["ports"][0]["containerPort"] == Settings().gateway.port
    )


def container_named(pod: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [container for container in pod["containers"] if container["name"] == name]
    return dict(found)
