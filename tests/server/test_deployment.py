"""deploy/ and docs/deploy-jamba-large.md over HTTP: what they say of probes, keys, draining, metrics and
adapters, done to a real server that runs from the manifests' own configuration, with the demo in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML

from tests.harness.processes import is_running, wait_until
from tests.harness.required import need
from tests.harness.serve_process import Server, server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "deploy-jamba-large.md").read_text()
DEMO = ROOT / "hybridserve" / "models" / "demo"
KEYS = {"HYBRIDSERVE_API_KEY": "sk-of-a-user", "HYBRIDSERVE_ADMIN_KEY": "sk-of-an-admin"}
USER = {"authorization": f"Bearer {KEYS['HYBRIDSERVE_API_KEY']}"}
POD_ADDRESS = {"host": "10.244.1.7:8000"}
"""Of a probe: kubelet and Prometheus name a pod by its address."""
SERVICE = {"host": "hybridserve.default.svc.cluster.local"}


def manifest(kind: str, file: str) -> Any:
    documents = YAML(typ="safe").load_all(ROOT / "deploy" / "kubernetes" / file)
    return next(document for document in documents if document["kind"] == kind)


POD = manifest("Deployment", "deployment.yaml")["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
HERE = {"model": "demo", "device": "cpu", "hardware": "auto", "max_model_len": 2048, "quantization": {}}
"""What is changed, since there are no GPUs; all of `server` stays as it is but for the port."""


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ConfigMap's file; the keys are in the environment, as the Secret puts them there."""
    tree = YAML(typ="safe").load(manifest("ConfigMap", "configmap.yaml")["data"]["deployment.yaml"])
    adapters = tmp_path / "adapters"
    shutil.copytree(DEMO / "adapters" / "shakespeare", adapters / "legal")
    tree |= HERE
    tree["parallel"], tree["cache"] = {"tensor": 1}, {"memory_bytes": "64MiB"}
    tree["lora"] |= {"roots": [str(adapters)], "device_bytes": None, "host_bytes": "256MiB", "adapters": {}}
    file = tmp_path / "deployment.yaml"
    YAML().dump(tree, file)
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    return file


@pytest.fixture
def running(deployment: Path) -> Iterator[Server]:
    with server(file=deployment) as one:
        yield one


def probe(one: Server, name: str) -> int:
    """The status that kubelet gets; 0 where nobody answers."""
    asked = CONTAINER[f"{name}Probe"]["httpGet"]
    status, _ = one.get(asked["path"], **POD_ADDRESS)
    return status


def test_probes_while_it_loads_serves_and_drains(deployment):
    with server("--max_model_len", "4096", file=deployment, ready=False) as one:
        one.wait_listening()
        seen = set()

        def is_ready() -> bool:
            seen.add((probe(one, "liveness"), status := probe(one, "startup")))
            return status == 200

        assert wait_until(is_ready, 90), one.log
        assert seen <= {(200, 503), (200, 200)}, "it was alive all the while"
        assert (200, 503) in seen, "it listened before it was ready"
        assert probe(one, "readiness") == 200
        body = {"prompt": "for the", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        streams = [one.request("POST", "/v1/completions", body, **USER, **SERVICE) for _ in range(3)]
        for stream in streams:
            assert stream.status == 200
            stream.read(20)
        begin = time.monotonic()
        one.signal(signal.SIGTERM)  # after preStop
        assert wait_until(lambda: probe(one, "readiness") == 503, 30)
        assert probe(one, "liveness") == 200, "kubelet must not kill what drains"
        assert one.post("/v1/completions", {"prompt": "a"}, **USER)[0] == 503
        for stream in streams:
            assert stream.read().endswith(b"data: [DONE]\n\n")
        grace = POD["terminationGracePeriodSeconds"] - CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert one.wait_exit(grace) == 0
        assert time.monotonic() - begin < grace


def test_what_runs_for_too_long_is_told_within_the_grace_period(deployment):
    with server("--server.drain_seconds", "0.5", "--max_model_len", "4096", file=deployment) as one:
        body = {"prompt": "for the", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        stream = one.request("POST", "/v1/completions", body, **USER)
        stream.read(20)
        children = [child.pid for child in psutil.Process(one.process.pid).children(recursive=True)]
        one.signal(signal.SIGTERM)
        rest = stream.read()
        assert b"the server is being stopped" in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert one.wait_exit(30) == 0
        assert wait_until(lambda: not any(map(is_running, children)), 10)


def test_without_the_secret_it_does_not_start(deployment, monkeypatch):
    """Section 8 of the guide has the line."""
    monkeypatch.delenv("HYBRIDSERVE_API_KEY")
    done = subprocess.run(
        [sys.executable, "-m", "hybridserve", "serve", str(deployment)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert "the environment variable HYBRIDSERVE_API_KEY is not set" in done.stderr
    assert "the environment variable HYBRIDSERVE_API_KEY is not set" in GUIDE


def test_keys_metrics_and_hosts(running):
    assert running.get("/v1/models", **SERVICE)[0] == 401
    assert running.get("/metrics", **POD_ADDRESS)[0] == 401, "Prometheus needs a key, as the guide says"
    status, page = running.get("/metrics", **USER, **POD_ADDRESS)
    assert status == 200
    families = {family.name for family in text_string_to_metric_families(page.decode())}
    section = GUIDE.partition("## 7.")[2].partition("## 8.")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")][1:]
    named = {name.removesuffix("_total") for row in rows for name in re.findall(r"`([a-z]+_\w+|slabs)", row)}
    assert len(named) > 8
    assert {f"hybridserve_{name}" for name in named} <= families
    assert running.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}, **USER)[0] == 403
    log = "\n".join(running.log)
    assert not any(key in log for key in KEYS.values())


def test_the_guide_s_requests_as_they_stand(running, tmp_path):
    """Section 6, line by line, but for the address and for where the adapter is."""
    section = GUIDE.partition("## 6.")[2].partition("## 7.")[0]
    blocks = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    commands = [block for block in blocks if "curl" in block]
    assert len(commands) == 2
    environment = tmp_path / "environment"
    environment.write_text("".join(f"{name}={key}\n" for name, key in KEYS.items()))
    outputs = []
    for text in commands:
        script = "set -e\nset -a; . /etc/hybridserve/environment; set +a\n" + text
        script = script.replace("/etc/hybridserve/environment", str(environment))
        script = script.replace("localhost:8000", f"localhost:{running.port}")
        script = script.replace("/srv/adapters", str(tmp_path / "adapters"))
        script = script.replace("curl ", "curl --silent --show-error --fail-with-body --write-out '\\n' ")
        clean = {name: value for name, value in os.environ.items() if name not in KEYS}
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, env=clean)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    asked, loaded, adapted = outputs
    assert asked["model"] == "jamba-large"
    assert asked["choices"][0]["message"]["content"]
    assert loaded["lora_name"] == "legal"
    assert adapted["model"] == "legal"
    assert adapted["choices"][0]["message"]["content"]


def test_a_pod_that_is_full_says_so(deployment):
    """What the guide's table has of 429."""
    with server("--server.max_queue", "0", "--max_num_seqs", "1", file=deployment) as one:
        body = {"prompt": "for the", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        for _ in range(5):  # on a busy machine the stream may be over before the other one is asked for
            stream = one.request("POST", "/v1/completions", body, **USER)
            stream.read(10)
            response = one.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, **USER)
            stream.close()
            if response.status != 200:
                break
        assert (response.status, response.headers["retry-after"]) == (429, "1")


def test_the_image_s_health_check(deployment):
    """The Dockerfile's command, but for the port."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    command = json.loads(re.search(r"HEALTHCHECK .*?CMD (\[.*?\])\n", text, re.DOTALL)[1])
    with server(file=deployment, ready=False) as one:
        one.wait_listening()
        code = command[2].replace(":8000/", f":{one.port}/").replace("timeout=2", "timeout=30")
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0, "it loads, and that is no fault"
        one.wait_ready()
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode != 0


def test_the_unit_s_command_drains_as_systemd_stops_it(deployment):
    """KillMode=mixed: SIGTERM goes to the main process alone, and its children are left to it."""
    unit = (ROOT / "deploy" / "systemd" / "hybridserve.service").read_text()
    assert "KillMode=mixed" in unit
    seconds = float(re.search(r"^TimeoutStopSec=(\d+)", unit, re.MULTILINE)[1])
    with server(file=deployment) as one:
        body = {"prompt": "for the", "max_tokens": 1500, "ignore_eos": True}
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(one.post("/v1/completions", body, **USER)[0]))
        asking.start()
        assert wait_until(lambda: one.series(**USER)["hybridserve_num_requests_running"] == 1, 30)
        children = [child.pid for child in psutil.Process(one.process.pid).children(recursive=True)]
        one.signal(signal.SIGTERM)
        assert one.wait_exit(seconds) == 0
        asking.join()
        assert answers == [200]
        assert not any(map(is_running, children))


def test_the_unit_is_one_that_systemd_takes(tmp_path):
    need(shutil.which("systemd-analyze") is not None, "there is no systemd here")
    text = (ROOT / "deploy" / "systemd" / "hybridserve.service").read_text()
    unit = tmp_path / "hybridserve.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "hybridserve.service" in line]
    assert not [line for line in said if "Unknown" in line or "Failed to parse" in line], said
