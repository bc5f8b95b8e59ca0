"""One-byte weights: every backend against the reference, and the reference against integers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.kernels import gemm, moe
from hybridserve.kernels.gemm.interface import GemmBackend, ScaledWeight, round_rows
from hybridserve.kernels.gemm.onednn import OneDNN
from hybridserve.kernels.registry import Backend, Capabilities, select
from tests.harness.models import Backends, random_ids, save_model
from tests.harness.quantized import QuantizedModel, everything

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.kernels.moe.interface import ExpertGroups, MoEBackend

KINDS = {"int8": (torch.int8, False), "int8-w8a8": (torch.int8, True), "fp8": (torch.float8_e4m3fn, False)}
DTYPES = [torch.float32, torch.bfloat16]


def made(backend: type[Backend], kind: str, dtype: torch.dtype) -> Backend:
    capabilities = Capabilities("cpu", str(dtype).removeprefix("torch."), kind)
    if reason := backend.why_not(capabilities):
        pytest.skip(f"{backend.name} {reason}")
    return backend()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def scaled(*shape: int, kind: str = "int8", largest: int = 127) -> ScaledWeight:
    dtype, int8_rows = KINDS[kind]
    codes = (random(*shape) * largest / 3).clamp(-largest, largest).round()
    scales = 0.5 + torch.rand(shape[:-1], generator=torch.Generator().manual_seed(1))
    return ScaledWeight(codes.to(dtype), scales / (shape[-1] ** 0.5 * largest), int8_rows)


def tolerance(backend: Backend, kind: str, dtype: torch.dtype) -> float:
    of_result = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    return max(of_result, 5e-4 if backend.rounding and kind == "int8" else 0)


@pytest.mark.parametrize("candidate", gemm.BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (300, 1100)], ids=str)
def test_projections_equal_the_reference(
    candidate: type[GemmBackend], kind: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    backend = made(candidate, kind, dtype)
    weight, bias = scaled(*shape, kind=kind), random(shape[0]).to(dtype)
    packed = backend.pack_scaled(weight)
    within = tolerance(backend, kind, dtype)
    for rows in (0, 1, 2, 3, 5, 33, 200):
        x = random(rows, 2 * shape[1]).to(dtype)[:, shape[1] :]  # part of a merged projection
        for some_bias in (None, bias):
            actual = backend.linear(x, packed, some_bias)
            assert actual.dtype == dtype
            expected = gemm.Reference().linear(x, weight, some_bias)
            torch.testing.assert_close(actual, expected, rtol=within, atol=4 * within)
    for one, other in zip(backend.unpack_scaled(packed), weight, strict=True):
        assert torch.equal(one.float(), other.float()) if isinstance(other, torch.Tensor) else one == other


class Recorded:
    """A delta that adds nothing to most rows, and shows what it was given."""

    def __init__(self, expert: int) -> None:
        self.expert = expert
        self.seen: list[torch.Tensor] = []

    def add_gate_up(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self.seen.append(x.clone())
        y[groups.experts == self.expert] += 1

    def add_down(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        y[groups.experts == self.expert] -= 1


@pytest.mark.parametrize("candidate", moe.BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_equal_the_reference(candidate: type[MoEBackend], kind: str, dtype: torch.dtype) -> None:
    backend = made(candidate, kind, dtype)
    gate_up, down = scaled(5, 2 * 12, 20, kind=kind), scaled(5, 20, 12, kind=kind)
    packed = backend.pack_scaled(gate_up, down)
    for tokens in (0, 1, 2, 9, 40):
        x = random(tokens, 20).to(dtype)
        weights, ids = moe.Reference().route(random(tokens, 5, seed=3), 2, renormalize=False)
        deltas = (Recorded(2), Recorded(2))
        expected = moe.Reference().experts(x, weights, ids, gate_up, down, deltas[0])
        actual = backend.experts(x, weights, ids, *packed, deltas[1])
        within = max(tolerance(backend, kind, dtype), 1e-2 if kind == "int8-w8a8" else 0)  # a row on an edge
        torch.testing.assert_close(actual, expected, rtol=within, atol=4 * within)
        if tokens:
            assert torch.equal(deltas[1].seen[0], x), "a delta reads what was not rounded"


def test_w8a8_is_integer_arithmetic() -> None:
    x, weight = random(6, 40), scaled(8, 40, kind="int8-w8a8")
    rounded, row_scales = round_rows(x)
    assert torch.equal(rounded, rounded.round())
    assert torch.equal(rounded.abs().amax(1), torch.full((6,), 127.0))
    sums = rounded.to(torch.int32) @ weight.codes.to(torch.int32).t()
    expected = (sums.double() * weight.scales.double() * row_scales.double()).float()
    torch.testing.assert_close(gemm.Reference().linear(x, weight, None), expected, rtol=1e-6, atol=0)
    assert not torch.allclose(expected, x @ (weight.codes * weight.scales[:, None]).t(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_apply_to_sums_in_float32(kind: str) -> None:
    """Codes of 1 and a scale that bfloat16 does not have: rounding it first would show."""
    codes = torch.ones(4, 64).to(KINDS[kind][0])
    weight = ScaledWeight(codes, torch.full((4,), 1 + 2**-10), KINDS[kind][1])
    x = torch.ones(5, 64)
    for candidate in gemm.BACKENDS:
        if candidate.why_not(Capabilities("cpu", "float32", kind)) is None:
            y = candidate().linear(x, weight, None)
            torch.testing.assert_close(y, torch.full((5, 4), 64 * (1 + 2**-10)), rtol=1e-6, atol=0)


def test_rows_of_zeros_and_what_is_no_number() -> None:
    rounded, scales = round_rows(torch.tensor([[0.0, 0.0], [float("nan"), 1.0]]))
    assert torch.equal(rounded[0], torch.zeros(2))
    assert scales[0] == 1
    assert rounded[1].isnan().any(), "a fault must not be rounded away"


class TestOneDNN:
    """Its arithmetic, also where `why_not` declines: float32 needs no special instructions, and codes so
    small that sums of two products fit in 16 bits need none either."""

    def test_plain(self) -> None:
        backend, weight, bias = OneDNN(), random(70, 33), random(70)
        packed = backend.pack(weight.clone())
        assert packed.is_mkldnn
        assert torch.equal(backend.unpack(packed), weight)
        with torch.inference_mode():
            for rows in (0, 1, 5, 40):
                x = random(rows, 66)[:, 33:]
                for some_weight in (packed, weight):  # one that somebody else reads is not packed
                    actual = backend.linear(x, some_weight, bias)
                    torch.testing.assert_close(actual, gemm.Reference().linear(x, weight, bias))

    def test_int8(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
        backend, weight, bias = OneDNN(), scaled(70, 33, kind="int8-w8a8", largest=60), random(70)
        packed = backend.pack_scaled(weight)
        assert packed.codes.is_mkldnn
        assert torch.equal(backend.unpack_scaled(packed).codes, weight.codes)
        for rows in (0, 1, 5, 40):
            x = random(rows, 33)
            actual = backend.linear(x, packed, bias)
            torch.testing.assert_close(actual, gemm.Reference().linear(x, weight, bias))

    @pytest.mark.parametrize("kind", KINDS)
    def test_others_are_natives(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Large codes, too: without instructions for them, oneDNN's sums would overflow."""
        made(gemm.Native, kind, torch.float32)
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: kind != "int8-w8a8")
        backend, weight, bias = OneDNN(), scaled(70, 33, kind=kind), random(70)
        packed = backend.pack_scaled(weight)
        assert not packed.codes.is_mkldnn
        assert torch.equal(backend.unpack_scaled(packed).codes.float(), weight.codes.float())
        for rows in (0, 1, 40):
            x = random(rows, 33)
            assert torch.equal(backend.linear(x, packed, bias), gemm.Native().linear(x, weight, bias))

    def test_a_quantized_model_keeps_its_plain_weights_packed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made(gemm.Native, "int8", torch.bfloat16)
        save_model("jamba", tmp_path, 0, num_hidden_layers=3, dtype=torch.bfloat16)
        models = {}
        for backend in (OneDNN(), gemm.NativeExact()):
            backends = Backends(gemm=backend)
            model = QuantizedModel(tmp_path, everything("int8"), backends, torch.float32)
            models[backend.name] = model
        mixer = models["onednn"].model.layers[0].mixer  # type: ignore[attr-defined]
        assert mixer.x_proj.projection.weights["weight"].is_mkldnn
        assert mixer.in_proj.weights["codes"].dtype == torch.int8
        ids = random_ids(0, 9)
        one, other = (model.runner.run(ids) for model in models.values())
        assert 0 < (one - other).abs().max() <= 1e-2, "rows that int8 codes meet are rounded"

    def test_says_why_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert OneDNN.why_not(Capabilities("cuda", "bfloat16")) == "runs on CPUs only"
        assert "float32" in str(OneDNN.why_not(Capabilities("cpu", "float32")))
        here = Capabilities("cpu", "bfloat16")
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
        assert OneDNN.why_not(here) == "this CPU has no bfloat16 instructions"
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
        for weights in ("none", "bnb-int8"):
            assert OneDNN.why_not(replace(here, weights=weights)) is None
        assert OneDNN.rounding == gemm.Native.rounding
        assert select("gemm", "exact", here).name == "onednn", "there is nothing to round"
        if gemm.Native.why_not(here) is None:
            assert OneDNN.why_not(replace(here, weights="int8")) is None
            assert select("gemm", "exact", replace(here, weights="int8")).name == "native_exact"
        monkeypatch.setattr(gemm.Native, "why_not", classmethod(lambda cls, capabilities: "is broken"))
        for vnni in (False, True):
            monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda vnni=vnni: vnni)
            found = {kind: OneDNN.why_not(replace(here, weights=kind)) for kind in KINDS}
            assert found["int8"] == "leaves int8 weights to native, and that is broken"
            assert found["fp8"] == "leaves fp8 weights to native, and that is broken"
            assert (found["int8-w8a8"] is None) == vnni


class Rounding(Backend):
    name = "rounding"
    rounding = "to 13 bits a row"


class Full(Backend):
    name = "full"


def test_exact_takes_no_backend_that_rounds() -> None:
    here = Capabilities("cpu", "float32", "int8")
    assert select("gemm", "auto", here, [Rounding, Full]).name == "rounding"
    exact = select("gemm", "exact", here, [Rounding, Full])
    assert (exact.name, exact.rejected) == (
        "full",
        (("rounding", "rounds activations to 13 bits a row"),),
    )
    with pytest.raises(ValueError, match=r"no gemm backend can run .*rounds activations to 13 bits a row"):
        select("gemm", "exact", here, [Rounding])
    assert select("gemm", "rounding", here, [Rounding, Full]).name == "rounding"
