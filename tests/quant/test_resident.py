"""Weights are in memory once: neither a packed copy nor the file stays beside what products read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridserve.models.config import load_hf_config
from hybridserve.models.registry import build_model
from tests.harness.models import Backends, save_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from resident import resident_weights
print(json.dumps(resident_weights(Path(sys.argv[2]), json.loads(sys.argv[3]))))
"""

WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 4096}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Jamba of some 400 MB in bfloat16."""
    path = tmp_path_factory.mktemp("model")
    save_model("jamba", path, 0, dtype=torch.bfloat16)
    config = load_hf_config(path) | WIDE
    (path / "config.json").write_text(json.dumps(config))
    expected = build_model(config, Backends().context(torch.bfloat16, device="meta")).weights
    names = {name: t.shape for name, t in expected.tensors.items() if t.covers == (name,)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
    weights = {name: tensor.mul_(0.02).bfloat16() for name, tensor in tensors.items()}
    save_file(weights, path / "model.safetensors")
    return path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no /proc/self/smaps_rollup")
@pytest.mark.parametrize("format_name", ["none", "int8"])
@pytest.mark.parametrize("backend", ["auto", "torch_native"])
def test_weights_are_resident_once(model: Path, format_name: str, backend: str) -> None:
    options = {"kernels.gemm": backend, "kernels.moe": backend}
    if format_name != "none":
        options["quantization.format"] = format_name
    command = [sys.executable, "-c", SCRIPT, str(BENCHMARKS), str(model), json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ideal_bytes"] > 150 << 20, "too small a model to tell"
    assert 0.95 < found["resident_bytes"] / found["ideal_bytes"] < 1.15
    assert found["after_a_request"] / found["ideal_bytes"] < 1.15
