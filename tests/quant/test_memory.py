"""F078: memory while loading and while converting peaks at what is left in the end, and one tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridserve.engine.convert import quantize_checkpoint
from hybridserve.kernels.gemm.native import Native
from hybridserve.kernels.registry import Capabilities
from hybridserve.models.config import load_hf_config
from hybridserve.models.registry import build_model
from tests.harness.models import Backends, save_model

SCRIPT = """
import sys
from pathlib import Path
import torch
from hybridserve.distributed.tp import TPGroup
from hybridserve.engine.convert import quantize_checkpoint
from hybridserve.models.weights import load_model
from tests.harness.adapters import backends_named
from tests.harness.models import Backends
from tests.harness.quantized import QuantizedModel, everything

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])

def work(path, name):
    if sys.argv[1] == "convert":
        quantize_checkpoint(path, path.with_name(path.name + "-out"), name, None)
        return 0
    if sys.argv[1] == "rank":
        context = Backends().context(torch.bfloat16, TPGroup(1, 4), quantization=everything(name))
        return load_model(path, context).weights.num_bytes
    quantization = None if sys.argv[1] == "stored" else everything(name)
    backends = backends_named(sys.argv[5], "bfloat16")[0]
    return QuantizedModel(path, quantization, backends, torch.bfloat16).model.weights.num_bytes

small, large = (Path(name) for name in sys.argv[2:4])
work(small, sys.argv[4])
before = kilobytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
size = work(large, sys.argv[4])
print((kilobytes("VmHWM") - before) * 1024, size)
"""
LARGEST = 4096 * 1024 * 2
"""Bytes of the largest tensor, in bfloat16."""


WIDE = {
    "llama": {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256},
    "jamba": {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4},
}
"""Sizes with which the largest tensors are of 8 MiB: 17 in the Llama, 3 in the Jamba, whose experts are of
tensors of 4 MiB."""


@pytest.fixture(scope="module", params=["llama", "jamba"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One to warm up, and a large one."""
    root = tmp_path_factory.mktemp("models")
    small, large = root / "small", root / "large"
    save_model(request.param, small, 0, dtype=torch.bfloat16)
    config = load_hf_config(small) | WIDE[request.param]
    large.mkdir()
    (large / "config.json").write_text(json.dumps(config))
    expected = build_model(config, Backends().context(torch.bfloat16, device="meta")).weights
    names = {name: t.shape for name, t in expected.tensors.items() if t.covers == (name,)}
    generator = torch.Generator().manual_seed(0)
    save_file(
        {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in names.items()},
        large / "model.safetensors",
    )
    return small, large


def peak(
    way: str, models: tuple[Path, Path], format_name: str, backend: str = "reference"
) -> tuple[int, int]:
    command = [sys.executable, "-c", SCRIPT, way, *map(str, models), format_name, backend]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    bytes_peak, size = map(int, result.stdout.split())
    return bytes_peak, size


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("format_name", ["int8", "fp8"])
def test_quantizing_while_loading(models: tuple[Path, Path], format_name: str, backend: str) -> None:
    if Native.why_not(Capabilities("cpu", "bfloat16", format_name)) is not None and backend == "native":
        pytest.skip("no C compiler")
    bytes_peak, size = peak("online", models, format_name, backend)
    assert size > 6 * LARGEST, "too small a model to tell"
    assert bytes_peak <= size + LARGEST + (6 << 20)


@pytest.mark.parametrize("format_name", ["int8", "fp8"])
def test_quantizing_one_ranks_share(models: tuple[Path, Path], format_name: str) -> None:
    """Loading needs no other rank, so this is the second of four."""
    bytes_peak, size = peak("rank", models, format_name)
    assert 6 * LARGEST / 4 < size < 11 * LARGEST / 4, "a quarter of the model"
    assert bytes_peak <= size + LARGEST + (6 << 20)


def test_loading_what_is_quantized(models: tuple[Path, Path], tmp_path: Path) -> None:
    paths = tmp_path / "small", tmp_path / "large"
    for model, path in zip(models, paths, strict=True):
        quantize_checkpoint(model, path, "int8", None)
    bytes_peak, size = peak("stored", paths, "int8")
    assert size > 6 * LARGEST
    assert bytes_peak <= size + LARGEST // 2 + (6 << 20)


def test_converting(models: tuple[Path, Path]) -> None:
    """The tensor that is read, and the codes that become of it."""
    bytes_peak, _ = peak("convert", models, "int8")
    assert bytes_peak <= LARGEST + LARGEST // 2 + (12 << 20), "of 136 MiB"
