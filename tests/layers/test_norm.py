"""RMSNorm against its definition, and against transformers' order of rounding."""

from __future__ import annotations

import pytest
import torch

from hybridserve.layers.norm import GroupedRMSNorm, RMSNorm
from tests.harness.models import Backends
from tests.harness.tp import run_ranks


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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_over_ranks(groups: int, size: int, dtype: torch.dtype, tolerance: float) -> None:
    """Whole groups on a rank, or a group on several; rows of very different sizes, and none at all."""
    generator = torch.Generator().manual_seed(groups)
    x = (10 * torch.randn(5, 24, generator=generator) * torch.tensor([1e-3, 1, 30, 1, 0])[:, None]).to(dtype)
    weight = torch.rand(24, generator=generator).to(dtype)
    wide = x.double().view(5, groups, -1)
    exact = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).view(5, -1) * weight.double()

    def rank(tp):
        context = Backends().context(dtype, tp)
        norm = GroupedRMSNorm(context, "norm", 24, groups, 1e-5)
        context.weights.tensors["norm.weight"].load(weight)
        assert norm(x[:0, norm.channels]).shape == (0, 24 // size)
        assert bool(context.footprint.reductions) == (groups < size)
        return norm(x[:, norm.channels])

    out = torch.cat(run_ranks(size, rank), 1)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= tolerance * exact.abs().max().item()
