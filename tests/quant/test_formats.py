"""How numbers become codes, whatever part of them a rank keeps, and what a model makes of them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.distributed.tp import TPGroup
from hybridserve.kernels.gemm.torch_native import TorchNative as TorchGemm
from hybridserve.kernels.moe.reference import Reference as ReferenceMoE
from hybridserve.kernels.moe.torch_native import TorchNative as TorchMoE
from hybridserve.kernels.registry import Capabilities
from hybridserve.layers.linear import ColumnParallelLinear, OutputSlice, RowParallelLinear
from hybridserve.layers.moe import SparseMoE
from hybridserve.models.hub import resolve_model
from hybridserve.quant.int8 import Int8Format
from hybridserve.quant.policy import Quantization
from hybridserve.quant.registry import FORMATS, make_policy
from tests.harness.adapters import backends_named
from tests.harness.models import Backends, random_ids, save_model
from tests.harness.quantized import FORMATS as QUANTIZED
from tests.harness.quantized import SCALED, QuantizedModel, dequantized_copy, edit_tensors, everything

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.kernels.gemm.interface import GemmBackend
    from hybridserve.kernels.moe.interface import MoEBackend
    from hybridserve.quant.format import Weights

IDS = random_ids(0, 24)
BACKENDS = {"reference": 1e-4, "torch_native": 1e-4, "native": 1e-2}
"""And what int8 may be off there: rows are rounded to 15 bits in C; see tests/invariance/test_matrix.py."""


def needs(format_name: str) -> None:
    if format_name.startswith("bnb"):
        pytest.importorskip("bitsandbytes")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(scope="module")
def jamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jamba")
    save_model("jamba", path, 0, num_hidden_layers=4)
    return path


def test_f077_a_row_is_off_by_at_most_its_largest_over_254() -> None:
    checked = 0
    for weight in (random(40, 300), random(64, 64) * torch.logspace(-20, 20, 64)[:, None]):
        codes, scales, _ = Int8Format.quantize_rows(weight)
        assert codes.dtype == torch.int8
        assert codes.abs().amax() == 127
        bound = weight.abs().amax(1, keepdim=True) / 254
        assert ((weight - codes * scales[:, None]).abs() <= bound * (1 + 1e-5)).all()
        checked += weight.numel()
    assert checked


def test_the_demo_models_weights_keep_the_bound() -> None:
    path = resolve_model("demo")
    plain = QuantizedModel(path, Quantization(), dtype=torch.bfloat16)
    quantized = QuantizedModel(path, everything("int8"), dtype=torch.bfloat16)
    worst = 0.0
    for name, format_name in quantized.formats.items():
        before, after = plain.bases[name]().float(), quantized.bases[name]().float()
        if format_name == "none":
            assert torch.equal(before, after)
            continue
        error = (before - after).abs().amax(1) / (before.abs().amax(1) / 254)
        worst = max(worst, float(error.max()))
    assert 0.9 < worst <= 1 + 1e-5


def test_rows_of_zeros_stay_zero() -> None:
    weight = random(4, 8)
    weight[2] = 0
    for name in SCALED:
        codes, scales, _ = FORMATS[name].quantize_rows(weight)  # type: ignore[attr-defined]
        assert (codes[2].float() == 0).all()
        assert (scales > 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("format_name", QUANTIZED)
def test_what_is_no_number_is_refused(format_name: str, value: float, jamba: Path, tmp_path: Path) -> None:
    needs(format_name)
    path = tmp_path / "spoiled"
    save_model("jamba", path, 0, num_hidden_layers=2)
    name = "model.layers.0.mamba.in_proj.weight"
    edit_tensors(path, lambda tensors: tensors[name][3].fill_(value))
    with pytest.raises(ValueError, match=rf"model.safetensors: the tensor '{name}' holds NaN or infinity"):
        QuantizedModel(path, everything(format_name))


class TestCut:
    """Codes are those of the whole tensor, for any number of ranks (the ranks' parts, side by side)."""

    def load(self, format_name: str, tp: TPGroup, tensors: dict[str, torch.Tensor]) -> list[Weights]:
        context = Backends().context(tp=tp, quantization=everything(format_name))
        slices = [OutputSlice("q", 64, 8), OutputSlice("k", 64, 8), OutputSlice("v", 16)]
        merged = ColumnParallelLinear(context, "a", slices, 128)
        row = RowParallelLinear(context, "b", "out", 512, 24)
        experts = SparseMoE(context, "c", 64, 512, num_experts=2, top_k=1, renormalize=False)
        for name, tensor in context.weights.tensors.items():
            if tensor.covers == (name,):
                tensor.load(tensors.setdefault(name, random(*tensor.shape)))
        for finish in context.weights.finishers:
            finish()
        return [merged.weights, row.projection.weights, experts.weights]

    @pytest.mark.parametrize("size", [2, 8])
    @pytest.mark.parametrize("format_name", QUANTIZED)
    def test_codes_do_not_depend_on_it(self, format_name: str, size: int) -> None:
        needs(format_name)
        tensors: dict[str, torch.Tensor] = {}
        merged, row, experts = self.load(format_name, TPGroup.single(), tensors)
        ranks = [self.load(format_name, TPGroup(rank, size), tensors) for rank in range(size)]
        for key in ("codes", "scales"):
            parts = [rank[0][key] for rank in ranks]
            starts = [0, 64 // size, 128 // size, 144 // size]
            for index, start in enumerate([0, 64, 128]):
                stop = [64, 128, 144][index]
                local = [part[starts[index] : starts[index + 1]] for part in parts]
                assert torch.equal(torch.cat(local), merged[key][start:stop])
            per_row = row[key].dim() == 1
            parts = [rank[1][key] for rank in ranks]
            assert (
                all(torch.equal(p, row[key]) for p in parts)
                if per_row
                else torch.equal(torch.cat(parts, 1), row[key])
            )
            gates = [rank[2][f"gate_up.{key}"].chunk(2, 1) for rank in ranks]
            whole = experts[f"gate_up.{key}"].chunk(2, 1)
            for half in (0, 1):
                assert torch.equal(torch.cat([gate[half] for gate in gates], 1), whole[half])
            downs, down = [rank[2][f"down.{key}"] for rank in ranks], experts[f"down.{key}"]
            if down.dim() == 2:
                assert all(torch.equal(part, down) for part in downs)
            else:
                assert torch.equal(torch.cat(downs, 2), down)

    def test_nf4_refuses_a_cut_inside_a_block(self) -> None:
        needs("bnb-nf4")
        context = Backends().context(tp=TPGroup(0, 2), quantization=everything("bnb-nf4"))
        with pytest.raises(ValueError, match=r"tensor: 2 doesn't divide 1 blocks of 64 inputs \(bnb-nf4\)"):
            RowParallelLinear(context, "b", "out", 64, 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format_name", [name for name in QUANTIZED if name != "int8-w8a8"])
def test_a_quantized_model_is_the_model_of_its_dequantized_weights(
    format_name: str, backend: str, jamba: Path, tmp_path: Path
) -> None:
    """Logits at every position, whole and in chunks of one."""
    needs(format_name)
    quantized = QuantizedModel(jamba, everything(format_name), backends_named(backend)[0])
    plain = QuantizedModel(dequantized_copy(quantized, jamba, tmp_path / "plain"), Quantization())
    want = plain.runner.run(IDS)
    within = BACKENDS[backend] if format_name == "int8" else 1e-4
    assert (quantized.runner.run(IDS) - want).abs().max() <= within
    assert (quantized.runner.run(IDS, 1, sequence=1) - want).abs().max() <= within
    original = QuantizedModel(jamba, Quantization())
    assert (original.runner.run(IDS) - want).abs().mean() > 1e-3, "quantizing would not be seen"


def test_w8a8_rounds_activations(jamba: Path) -> None:
    """And gives what int8 gives, but for that."""
    logits = {
        name: QuantizedModel(jamba, everything(name), backends_named("torch_native")[0]).runner.run(IDS)
        for name in ("int8", "int8-w8a8")
    }
    plain = QuantizedModel(jamba, Quantization()).runner.run(IDS)
    off = {name: (logits[name] - plain).abs().mean() for name in logits}
    assert off["int8"] < off["int8-w8a8"] < 10 * off["int8"]


def test_each_row_of_w8a8_is_rounded_by_itself(jamba: Path) -> None:
    model = QuantizedModel(jamba, everything("int8-w8a8"))
    together = model.runner.step([(0, IDS), (1, IDS[:7])])
    alone = QuantizedModel(jamba, everything("int8-w8a8")).runner.step([(1, IDS[:7])])
    torch.testing.assert_close(together[1], alone[0], rtol=1e-4, atol=1e-4)


def test_bitsandbytes_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = r"bnb-nf4 can't be used here: bitsandbytes .*: pip install 'hybridserve\[quant\]'"
    with pytest.raises(ValueError, match=message):
        make_policy(everything("bnb-nf4"), TorchGemm(), TorchMoE(), Capabilities("cpu", "float32"))


def note(format_name: str, gemm: GemmBackend, moe: MoEBackend, **parts: bool) -> str:
    policy = make_policy(everything(format_name), gemm, moe, Capabilities("cpu", "float32"))
    return policy.linear(["a.in_proj"], "mixer").note(**{"projections": True, "experts": True, **parts})


def test_every_format_says_how_it_computes() -> None:
    for name in QUANTIZED:
        needs(name)
        said = note(name, TorchGemm(), TorchMoE())
        assert ("rounded to int8" in said) == (name == "int8-w8a8")
        assert ("dequantizes its whole weight" in said) == name.startswith("bnb")
        assert ("no FP8 instructions" in said) == (name == "fp8")
        assert ("plain copies of slices" in said) == (name in SCALED)


class Rounds(TorchGemm):
    name = "rounds"
    rounding = "to 9 bits a row"
    copies_codes = ""


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"projections": True, "experts": False}, "activations rounded to 9 bits a row"),
        (
            {"projections": False, "experts": True},
            "activations as they are; a product of experts (reference) makes a plain copy of an expert's "
            "whole weight for each token",
        ),
        (
            {"projections": True, "experts": True},
            "activations of projections rounded to 9 bits a row, of experts as they are; a product of "
            "experts (reference) makes a plain copy of an expert's whole weight for each token",
        ),
    ],
    ids=["projections", "experts", "both"],
)
def test_notes_are_of_the_backends_that_compute(parts: dict[str, bool], says: str) -> None:
    assert note("int8", Rounds(), ReferenceMoE(), **parts) == says
