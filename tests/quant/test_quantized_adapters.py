"""Adapters on quantized models: base weights as they are after rounding, and the adapter's own in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridserve.kernels.attention.torch_native import TorchNative as TorchAttention
from hybridserve.kernels.gemm.torch_native import TorchNative as TorchGemm
from hybridserve.kernels.lora.torch_native import TorchNative as TorchLora
from hybridserve.kernels.moe.torch_native import TorchNative as TorchMoE
from hybridserve.kernels.ssm.torch_native import TorchNative as TorchSSM
from hybridserve.quant.policy import Quantization
from tests.harness.adapters import (
    ADAPTERS,
    ATTENTION,
    DENSE,
    EXPERTS,
    MAMBA,
    AdaptedRunner,
    AdapterSpec,
    Kit,
    backends_named,
    merged,
)
from tests.harness.models import Backends, random_ids
from tests.harness.quantized import QuantizedModel, dequantized_copy, everything

IDS = random_ids(0, 24, 128)
TORCH = Backends(TorchAttention(), TorchSSM(), TorchGemm(), TorchMoE())
TOLERANCES = {"reference": 2e-4, "torch_native": 2e-4, "native": 1e-2}
"""In C, the rows that meet int8 codes are rounded to 15 bits; see tests/invariance/test_matrix.py."""
HIGH_RANK = AdapterSpec(51, 32, (*ATTENTION, *MAMBA, *DENSE), EXPERTS)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """Wide enough for blocks of 64."""
    return Kit(tmp_path_factory.mktemp("kit"), hidden_size=64, intermediate_size=64)


@pytest.fixture(scope="module")
def rounded(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Format -> the base as a plain checkpoint of the numbers that it is rounded to."""
    root = tmp_path_factory.mktemp("rounded")

    class Made(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = dequantized_copy(QuantizedModel(kit.base, everything(name)), kit.base, root / name)
            return self[name]

    return Made()


def adapted(kit: Kit, format_name: str, backend: str = "torch_native") -> AdaptedRunner:
    backends, lora = (TORCH, TorchLora()) if backend == "torch_native" else backends_named(backend)
    return AdaptedRunner(kit.base, backends, lora=lora, quantization=everything(format_name))


@torch.no_grad()
def oracle(base: Path, adapter: Path) -> torch.Tensor:
    return merged(base, adapter)(torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.mark.parametrize("format_name", ["int8", "fp8", "bnb-int8", "bnb-nf4"])
@pytest.mark.parametrize("name", ["A", "dora"])
@pytest.mark.parametrize("backend", TOLERANCES)
def test_equals_the_rounded_base_with_the_adapter_merged(
    kit: Kit, rounded: dict[str, Path], format_name: str, name: str, backend: str
) -> None:
    """A changes every kind of module, DoRA reads the base's norms; whole, and in chunks of five and one."""
    if format_name.startswith("bnb"):
        pytest.importorskip("bitsandbytes")
    path = kit.adapter(name)
    want = oracle(rounded[format_name], path)
    runner = adapted(kit, format_name, backend)
    runner.install(1, path)
    within = TOLERANCES[backend] if format_name == "int8" else 2e-4
    for chunk in (None,) if backend == "reference" else (None, 5, 1):
        assert (runner.logits(IDS, 1, chunk=chunk) - want).abs().max() <= within
    assert (runner.logits(IDS, 0) - want).abs().mean() > 0.05, "the adapter is ignored"


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name not in ("A", "dora", "alora")])
def test_the_other_adapters(kit: Kit, rounded: dict[str, Path], name: str) -> None:
    path = kit.adapter(name)
    runner = adapted(kit, "int8")
    runner.install(2, path)
    assert (runner.logits(IDS, 2) - oracle(rounded["int8"], path)).abs().max() <= 2e-4


@pytest.mark.parametrize("format_name", ["int8", "int8-w8a8"])
@pytest.mark.parametrize("module", ["in_proj", "q_proj", "down_proj"])
def test_l045_the_delta_reads_what_was_not_rounded(kit: Kit, format_name: str, module: str) -> None:
    """(on) - (off) of one projection is s B A x, x in float32, not the codes times a scale."""
    path = kit.adapter(f"only-{module}", AdapterSpec(61, 4, (module,), alpha=16))
    runner = adapted(kit, format_name)
    runner.install(1, path)
    adapter = runner.read(path)
    layers = runner.runner.model.layers  # type: ignore[attr-defined]
    layer = layers[2 if module == "q_proj" else 0]
    projection = {
        "in_proj": lambda: layer.mixer.in_proj,
        "q_proj": lambda: layer.mixer.qkv_proj,
        "down_proj": lambda: layer.feed_forward.down_proj.projection,
    }[module]()
    name, delta = next(
        (n, d) for n, d in adapter.deltas.items() if n.startswith(f"model.layers.{layers.index(layer)}.")
    )
    x = torch.randn(9, delta.A.shape[1], generator=torch.Generator().manual_seed(0))
    y = projection.format.apply_linear(x, projection.weights, None)
    batch = one_adapter(len(x))
    change = projection(x, batch) - y
    expected = delta.scale * (x @ delta.A.float().t()) @ delta.B.float().t()
    assert name.endswith(module)
    rows = projection.outputs.placements[0].destination
    torch.testing.assert_close(change[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-4)
    assert rows.start == 0
    assert expected.abs().mean() > 0.1


def one_adapter(num_rows: int) -> Any:
    import numpy as np

    from hybridserve.lora.batch import make_batch

    return make_batch(np.ones(num_rows, dtype=np.int64), torch.from_numpy)


@pytest.mark.parametrize("format_name", ["int8", "int8-w8a8", "bnb-nf4"])
def test_l046_high_ranks_on_all_layers_stay_sane(kit: Kit, format_name: str) -> None:
    """Two runs are the same, and with the adapter the error is about that of the base alone."""
    if format_name.startswith("bnb"):
        pytest.importorskip("bitsandbytes")
    path = kit.adapter("high", HIGH_RANK)
    runs = []
    for _ in range(2):
        runner = adapted(kit, format_name)
        runner.install(1, path)
        runs.append((runner.logits(IDS, 0), runner.logits(IDS, 1)))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    base_error = (runs[0][0] - kit.logits(None, IDS)).abs().mean()
    error = (runs[0][1] - kit.logits("high", IDS)).abs().mean()
    assert base_error > 0
    assert error <= 3 * base_error


def test_ranks_and_quantized_bases(kit: Kit) -> None:
    """DoRA's norms are of rounded rows, whose squares the ranks add up."""
    from tests.harness.tp import run_ranks

    path = kit.adapter("dora")
    single = adapted(kit, "int8", "reference")
    single.install(1, path)
    want = single.logits(IDS, 1)

    def rank(tp: Any) -> torch.Tensor:
        runner = AdaptedRunner(kit.base, tp=tp, quantization=Quantization("int8", ("all",)))
        runner.install(1, path)
        return runner.logits(IDS, 1)

    assert (run_ranks(2, rank)[0] - want).abs().max() <= 1e-4
