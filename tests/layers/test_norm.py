"""RMSNorm against its definition, and against transformers' order of rounding."""

from __future__ import annotations

import pytest
import torch

from hybridserve.layers.norm import RMSNorm
from tests.harness.models import Backends


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("size", [1, 16, 33])
def test_equals_its_definition(size: int, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(size)
    x = (10 * torch.randn(5, size, generator=generator)).to(dtype)
    weight = torch.rand(size, generator=generator).to(dtype)
    context = Backends().context(dtype)
    norm = RMSNorm(context, "norm", size, 1e-3)
    context.weights.tensors["norm.weight"].load(weight)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    out = norm(x)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= tolerance * max(1, exact.abs().max().item())
