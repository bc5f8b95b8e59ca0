"""deploy/: manifests that Kubernetes takes, and that agree with each other and with the configuration in
them.

Nothing here is built or started: that needs a container runtime, systemd or a cluster. What they say of HTTP
is done to a real server in tests/server/test_deployment.py.
"""

from __future__ import annotations

import re
import tomllib
from configparser import ConfigParser, SectionProxy
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from hybridserve.config.loader import load_config
from hybridserve.config.schema import EngineConfig
from hybridserve.frontend.client import CLOSE_SECONDS
from hybridserve.server.serve import FAREWELL_SECONDS
from hybridserve.server.tracing import FLUSH_SECONDS

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
GUIDE = (ROOT / "docs" / "deploy-jamba-large.md").read_text()
VERSIONS = ("1.30", "1.34")
ENDING_SECONDS = CLOSE_SECONDS + FAREWELL_SECONDS + FLUSH_SECONDS
"""After the drain: the engine closes, the last responses are written, the last spans are sent."""


def documents() -> dict[tuple[str, str], Any]:
    """(kind, name) -> manifest."""
    found = {}
    for file in sorted(KUBERNETES.glob("*.yaml")):
        for document in YAML(typ="safe").load_all(file):
            found[document["kind"], document["metadata"]["name"]] = document
    return found


DOCUMENTS = documents()
POD = DOCUMENTS["Deployment", "hybridserve"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """What the pod runs with."""
    monkeypatch.setenv("HYBRIDSERVE_API_KEY", "a-key")
    monkeypatch.setenv("HYBRIDSERVE_ADMIN_KEY", "another-key")
    file = tmp_path / "deployment.yaml"
    file.write_text(DOCUMENTS["ConfigMap", "hybridserve"]["data"]["deployment.yaml"])
    return load_config(file=file)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("key", DOCUMENTS, ids=lambda key: f"{key[0]}-{key[1]}")
def test_manifests_are_valid(key: tuple[str, str], version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    validate(DOCUMENTS[key], version, strict=True)


def test_a_manifest_with_a_wrong_key_is_refused() -> None:
    package = pytest.importorskip("kubernetes_validate")
    wrong = {**DOCUMENTS["Service", "hybridserve"], "specs": {}}
    with pytest.raises(package.ValidationError):
        package.validate(wrong, VERSIONS[0], strict=True)


def test_probes_and_drain(config: EngineConfig) -> None:
    paths = {
        name: CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")
    }
    assert paths == {"startup": "/health/ready", "readiness": "/health/ready", "liveness": "/health/live"}
    before = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert (
        POD["spec"]["terminationGracePeriodSeconds"] > before + config.server.drain_seconds + ENDING_SECONDS
    )
    assert DOCUMENTS["Deployment", "hybridserve"]["spec"]["strategy"] == {"type": "Recreate"}


def test_the_pod_agrees_with_its_configuration(config: EngineConfig) -> None:
    assert int(CONTAINER["resources"]["limits"]["nvidia.com/gpu"]) == config.parallel.num_ranks
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {"http": config.server.port}
    assert config.server.host == "0.0.0.0"
    assert config.server.api_keys, "a pod listens beyond its machine"
    mounts = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    for path in (config.model, *config.lora.roots):
        assert any(Path(path).is_relative_to(mount) for mount in mounts)
    assert Path(CONTAINER["args"][1]).parent == Path("/etc/hybridserve")
    expanded = {variable["name"] for variable in CONTAINER["env"]}
    text = DOCUMENTS["ConfigMap", "hybridserve"]["data"]["deployment.yaml"]
    assert set(re.findall(r"\$\{(\w+)\}", text)) == expanded


def test_manifests_name_each_other() -> None:
    labels = POD["metadata"]["labels"]
    for kind, name in DOCUMENTS:
        selector = DOCUMENTS[kind, name].get("spec", {}).get("selector", {})
        assert selector.get("matchLabels", selector).items() <= labels.items()
    volumes = {volume["name"] for volume in POD["spec"]["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes
    (maps,) = [volume["configMap"]["name"] for volume in POD["spec"]["volumes"] if "configMap" in volume]
    assert ("ConfigMap", maps) in DOCUMENTS
    secrets = {variable["valueFrom"]["secretKeyRef"]["name"] for variable in CONTAINER["env"]}
    assert all(
        f"create secret generic {name} " in (KUBERNETES / "deployment.yaml").read_text() for name in secrets
    )


@pytest.fixture
def service() -> SectionProxy:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "deploy" / "systemd" / "hybridserve.service")
    return unit["Service"]


def test_the_unit_leaves_time_to_drain(service: SectionProxy) -> None:
    command = service["ExecStart"].split()
    assert command[0].endswith("/bin/hybridserve")
    assert command[1:] == ["serve", "/etc/hybridserve/deployment.yaml"]
    assert service["KillSignal"] == "SIGTERM"
    drain_seconds = EngineConfig(model="demo").server.drain_seconds
    assert float(service["TimeoutStopSec"]) > drain_seconds + ENDING_SECONDS
    assert service["Restart"] == "on-failure"


def test_the_unit_starts_without_directories_that_may_be_missing(service: SectionProxy) -> None:
    assert all(path.startswith("-/") for path in service["ReadOnlyPaths"].split())


def test_the_guide_prepares_what_the_unit_needs(service: SectionProxy) -> None:
    assert f"useradd --system --create-home --home-dir /var/lib/hybridserve {service['User']}\n" in GUIDE
    environment = service["EnvironmentFile"].removeprefix("-")
    assert f"install -m 600 /dev/null {environment}\n" in GUIDE
    assert "systemctl daemon-reload && systemctl enable --now hybridserve" in GUIDE
    text = (ROOT / "configs" / "jamba-large-8xh100-int8.yaml").read_text()
    assert f"configs/jamba-large-8xh100-int8.yaml {service['ExecStart'].split()[-1]}\n" in GUIDE
    variables = set(re.findall(r"\$\{(\w+)\}", text))
    assert variables == set(re.findall(rf'echo "(\w+)=.*>> {environment}', GUIDE))
    assert variables == set(re.findall(r"Bearer \$(\w+)", GUIDE))
    (served,) = re.findall(r"^served_name: ([\w-]+)", text, re.MULTILINE)
    models = re.findall(r'"model": "([\w-]+)"', GUIDE)
    adapters = re.findall(r'"lora_name": "([\w-]+)"', GUIDE)
    assert set(models) == {served, *adapters}


def test_the_guide_names_metrics_and_extras_that_exist() -> None:
    section = GUIDE.partition("## 7.")[2].partition("## 8.")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    names = {name for row in rows[1:] for name in re.findall(r"`([a-z]+_\w+)", row)}
    documented = set(re.findall(r"`([a-z]\w+)[`{]", (ROOT / "docs" / "server.md").read_text()))
    assert len(names) > 8
    assert names <= documented  # which test_dashboard.py holds equal to those that there are
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"pip install '\.\[([\w,]+)\]'", GUIDE)
    assert {"server", "plot"} <= set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_the_image_names_what_exists() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    (extras,) = re.findall(r"pip install --no-cache-dir '\.\[([\w,]+)\]'", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    (base,) = re.findall(r"FROM python:(\d\.\d+)-slim", text)
    assert f"Programming Language :: Python :: {base}" in project["classifiers"]
    assert f"EXPOSE {EngineConfig(model='demo').server.port}" in text
    assert "do not build it" in text
