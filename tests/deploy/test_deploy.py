"""deploy/: what it starts exists in the command line, what its files name exists, and the formats' own tools accept them.

The tools are used where they are: kubectl, promtool, systemd-analyze, and those of `make setup-package` (hadolint,
kubernetes-validate). `make test-package` demands the latter.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import alerts

from midstream import __version__
from midstream.cli import build_parser
from midstream.commands.common import settings_of
from midstream.core.settings import load_settings
from midstream.http.channel import STOP_GRACE_S
from midstream.launch.process import KILL_AFTER_S
from midstream.launch.supervisor import FRONT_STOP_S, REPLICA_STOP_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = DEPLOY / "docker" / "Containerfile"
INSTALL = ROOT / "docs" / "install.md"
UNIT = DEPLOY / "systemd" / "midstream.service"
KUSTOMIZATIONS = sorted(path.parent for path in DEPLOY.glob("kubernetes/*/kustomization.yaml"))
SETTINGS = sorted(DEPLOY.rglob("midstream.toml"))
#: How long a server takes at most to end after SIGTERM.
STOP_S = FRONT_STOP_S + STOP_GRACE_S + KILL_AFTER_S + REPLICA_STOP_S
#: Secrets that a user makes, as docs/install.md says.
USERS_SECRETS = {"midstream-bucket", "midstream-database", "midstream-metrics"}


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{ROOT / '.venv-package' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        ours = name in ("hadolint", "kubernetes-validate")
        if ours and os.environ.get("MIDSTREAM_TEST_PACKAGE"):
            pytest.fail(f"no {name}: make setup-package")
        pytest.skip(f"no {name}")
    return found


def documents(file: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def workloads(folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("*.yaml")):
        yield from (one for one in documents(file) if "template" in one.get("spec", {}))


def instruction(name: str) -> list[str]:
    """The last one of the Containerfile, in exec form."""
    (*_, found) = re.findall(
        rf"^(?:HEALTHCHECK.*\\\n\s*)?{name} (\[.*\])$", CONTAINERFILE.read_text(), re.MULTILINE
    )
    value: list[str] = json.loads(found)
    return value


def commands() -> Iterator[tuple[str, list[str], Path | None]]:
    """Whose it is, the arguments of `midstream`, and the settings that --config names."""
    yield "Containerfile", instruction("CMD"), None
    (service,) = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"].values()
    yield "compose", service["command"], DEPLOY / "docker" / "midstream.toml"
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    yield "unit", shlex.split(line)[1:], DEPLOY / "systemd" / "midstream.toml"
    for folder in KUSTOMIZATIONS:
        for workload in workloads(folder):
            for container in workload["spec"]["template"]["spec"]["containers"]:
                name = f"{folder.name}/{workload['metadata']['name']}/{container['name']}"
                yield name, container["args"], folder / "midstream.toml"


COMMANDS = {name: (arguments, settings) for name, arguments, settings in commands()}


def test_everything_that_starts_a_server_was_found() -> None:
    assert list(COMMANDS) == [
        "Containerfile",
        "compose",
        "unit",
        "fleet/midstream-gateways/gateway",
        "fleet/midstream-replicas/replica",
        "server/midstream/midstream",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_options_of_the_command_line_and_settings_that_hold(name: str) -> None:
    arguments, file = COMMANDS[name]
    options = build_parser(arguments).parse_args(arguments)
    assert (options.config is None) == (file is None)
    options.config = str(file) if file else None
    settings = settings_of(options)
    listening = settings.replica if options.command == "replica" else settings.gateway
    expected = "$(POD_IP)" if "replica" in name.rpartition("/")[2] else "0.0.0.0"
    assert listening.host == ("127.0.0.1" if name == "unit" else expected)
    assert listening.port == 8080
    assert Path(settings.state_dir).is_absolute() or name == "unit"


@pytest.mark.parametrize("file", SETTINGS, ids=lambda file: file.parent.name)
def test_settings_hold_with_the_lines_that_are_commented_out(file: Path, tmp_path: Path) -> None:
    whole = tmp_path / "midstream.toml"
    whole.write_text(re.sub(r"^# (?=\[\w+\]$|\w+ = )", "", file.read_text(), flags=re.MULTILINE))
    settings = load_settings(str(whole), {})
    assert settings.gateway.api_keys == ("a long random text",)
    assert settings.deployment.bucket == "s3://my-bucket/rollouts"


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_a_kustomization_names_files_that_exist_and_the_image_of_this_version(folder: Path) -> None:
    (kustomization,) = documents(folder / "kustomization.yaml")
    for generator in kustomization["secretGenerator"]:
        assert all((folder / name).is_file() for name in generator["files"])
    others = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == others
    assert [(image["name"], image["newTag"]) for image in kustomization["images"]] == [
        ("midstream", __version__)
    ]


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_pods_have_probes_limits_and_time_to_end(folder: Path) -> None:
    for workload in workloads(folder):
        pod = workload["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "midstream"
        assert {"requests", "limits"} <= container["resources"].keys()
        ready = container["readinessProbe"]
        assert "/health" in str(ready)
        asleep = float(
            container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", 0])[1]
        )
        needed = STOP_S if container["args"][0] == "serve" else STOP_GRACE_S + KILL_AFTER_S
        assert pod["terminationGracePeriodSeconds"] > needed + asleep
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert written == {"/state", "/tmp"}


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[dict[str, Any]]]:
    kubectl, found = tool("kubectl"), {}
    for folder in KUSTOMIZATIONS:
        done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=True)
        found[folder.name] = list(yaml.safe_load_all(done.stdout))
    return found


def test_manifests_fit_each_other(rendered: dict[str, list[dict[str, Any]]]) -> None:
    for documents in rendered.values():
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for document in documents:
            by_kind.setdefault(document["kind"], []).append(document)
        pods = [one["spec"]["template"] for one in (*by_kind.get("Deployment", ()), *by_kind["StatefulSet"])]
        secrets = {secret["metadata"]["name"] for secret in by_kind["Secret"]} | USERS_SECRETS
        services = {service["metadata"]["name"] for service in by_kind["Service"]}
        for service in by_kind["Service"]:
            (pod,) = selected(pods, service["spec"]["selector"])
            ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
            assert [(port["targetPort"], port["port"]) for port in service["spec"]["ports"]] == list(
                ports.items()
            )
        for budget in by_kind.get("PodDisruptionBudget", ()):
            assert len(selected(pods, budget["spec"]["selector"]["matchLabels"])) == 1
        for owner in by_kind["StatefulSet"]:
            assert owner["spec"]["serviceName"] in services
            assert selected(pods, owner["spec"]["selector"]["matchLabels"]) == [owner["spec"]["template"]]
        for pod in pods:
            spec = pod["spec"]
            named = {volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
            named |= {source["secretRef"]["name"] for source in spec["containers"][0]["envFrom"]}
            assert len(named) > 1
            assert named <= secrets, named - secrets


def selected(pods: list[dict[str, Any]], labels: dict[str, str]) -> list[dict[str, Any]]:
    assert labels
    return [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]


def test_the_gateways_find_replicas_by_a_headless_service(rendered: dict[str, list[dict[str, Any]]]) -> None:
    settings = load_settings(str(DEPLOY / "kubernetes" / "fleet" / "midstream.toml"), {})
    name, _, port = str(settings.gateway.replicas_dns).rpartition(":")
    (service,) = [
        one for one in rendered["fleet"] if one["metadata"]["name"] == name and one["kind"] == "Service"
    ]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert int(port) == settings.replica.port == service["spec"]["ports"][0]["port"]


def test_manifests_hold_against_the_schemas_of_kubernetes(
    rendered: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    validate = tool("kubernetes-validate")
    for name, documents in rendered.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump_all(documents))
        done = subprocess.run([validate, "--strict", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (done.stdout + done.stderr).count(" passed ") == len(documents)


def test_the_users_own_kustomization_of_the_documents_names_image_settings_and_namespace(
    tmp_path: Path,
) -> None:
    kubectl, own = tool("kubectl"), tmp_path / "own"
    (shown,) = re.findall(r"```yaml\n(# kustomization.yaml\n.*?)```", INSTALL.read_text(), re.DOTALL)
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "midstream" / "deploy" / "kubernetes")
    own.mkdir()
    (own / "kustomization.yaml").write_text(shown)
    (own / "midstream.toml").write_text("# the user's own\n")
    done = subprocess.run([kubectl, "kustomize", own], capture_output=True, text=True, check=True)
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert {one["metadata"]["namespace"] for one in found} == {"rollouts"}
    pods = [one["spec"]["template"]["spec"] for one in found if "template" in one.get("spec", {})]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert images == {f"registry.example.com/midstream:{__version__}"}
    (settings,) = [one for one in found if one["metadata"]["name"].startswith("midstream-settings")]
    assert base64.b64decode(settings["data"]["midstream.toml"]) == b"# the user's own\n"


def test_the_component_for_prometheus_joins_either(tmp_path: Path) -> None:
    kubectl, copy = tool("kubectl"), tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", copy)
    for folder in KUSTOMIZATIONS:
        own = copy / f"own-{folder.name}"
        own.mkdir()
        lines = [
            "namespace: rollouts",
            f"resources: [../{folder.name}]",
            "components: [../components/servicemonitor]",
        ]
        (own / "kustomization.yaml").write_text("\n".join(lines))
        done = subprocess.run([kubectl, "kustomize", own], capture_output=True, text=True, check=True)
        found = list(yaml.safe_load_all(done.stdout))
        assert {one["metadata"]["namespace"] for one in found} == {"rollouts"}
        (monitor,) = [one for one in found if one["kind"] == "ServiceMonitor"]
        (endpoint,) = monitor["spec"]["endpoints"]
        ports = [port["name"] for one in found if one["kind"] == "Service" for port in one["spec"]["ports"]]
        assert endpoint["port"] in ports


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    cases = yaml.safe_load((Path(__file__).parent / "alerts_test.yaml").read_text())["tests"]
    rows = [row for case in cases for row in case["alert_rule_test"]]
    names = {row["alertname"] for row in rows if row.get("exp_alerts")}
    assert names == {row["alertname"] for row in rows if not row.get("exp_alerts")}
    assert names == {rule["alert"] for rule in alerts()}
    promtool = tool("promtool")
    for file in (DEPLOY / "grafana" / "alerts.yaml", Path(__file__).parent / "alerts_test.yaml"):
        shutil.copy(file, tmp_path)
    command = [promtool, "test", "rules", tmp_path / "alerts_test.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_containerfile_passes_its_linter() -> None:
    done = subprocess.run([tool("hadolint"), CONTAINERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_build_context_has_what_the_wheel_is_made_of() -> None:
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for name in allowed)
    text = CONTAINERFILE.read_text()
    needed = {"src", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"}
    assert needed | set(re.findall(r"requirements/\S+\.txt", text)) == set(allowed)


def test_the_image_runs_as_an_ordinary_user_and_tells_whether_it_is_ready() -> None:
    text = CONTAINERFILE.read_text()
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["10001:10001"]
    assert instruction("ENTRYPOINT") == ["tini", "--", "midstream"]
    check = re.search(r"HEALTHCHECK .*\\\n\s+CMD (\[.*\])", text)
    assert check
    compile(json.loads(check[1])[2], "HEALTHCHECK", "exec")
    assert "/health" in check[1]


def test_the_unit_holds(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    # What it starts need not be installed here.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/midstream/bin/midstream", sys.executable))
    done = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_gives_time_to_end_and_replaces_gateways_on_reload() -> None:
    options = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    assert float(options["TimeoutStopSec"]) > STOP_S
    assert options["KillMode"] == "mixed"
    assert "-HUP $MAINPID" in options["ExecReload"]
    assert (options["NoNewPrivileges"], options["ProtectSystem"], options["DynamicUser"]) == (
        "yes",
        "strict",
        "yes",
    )
    grace = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]["midstream"][
        "stop_grace_period"
    ]
    assert float(grace.removesuffix("s")) > STOP_S
