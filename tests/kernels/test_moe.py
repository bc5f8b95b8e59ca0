"""Every mixture-of-experts backend against the reference: routing, grouping, company."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from hybridserve.kernels.moe import BACKENDS, Reference

if TYPE_CHECKING:
    from hybridserve.kernels.moe.interface import MoEBackend

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 8, 24, 20


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> MoEBackend:
    return request.param()


def tokens(num: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [num, HIDDEN] and router logits [num, NUM_EXPERTS]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, HIDDEN, generator=generator).to(dtype)
    return x, torch.randn(num, NUM_EXPERTS, generator=generator).to(dtype)


def expert_weights(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
    return gate_up.to(dtype), down.to(dtype)


def run(
    backend: MoEBackend,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    return backend.experts(x, weights, ids, *backend.pack(*expert_weights(dtype)))


@pytest.mark.parametrize("num", [0, 1, 2, 5, 33])
@pytest.mark.parametrize("top_k", [1, 2, 3, NUM_EXPERTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [False, True])
def test_routing(backend: MoEBackend, num: int, top_k: int, dtype: torch.dtype, renormalize: bool) -> None:
    _, logits = tokens(num, dtype)
    weights, ids = backend.route(logits, top_k, renormalize=renormalize)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert weights.shape == ids.shape == (num, top_k)
    expected_weights, expected_ids = Reference().route(logits, top_k, renormalize=renormalize)
    torch.testing.assert_close(weights, expected_weights)
    assert torch.equal(ids, expected_ids)


def test_weights_are_shares_of_all_experts(backend: MoEBackend) -> None:
    """J2: Jamba keeps the softmax over all experts as it is; the kept weights sum to less than one."""
    _, logits = tokens(16)
    weights, ids = backend.route(logits, 2, renormalize=False)
    torch.testing.assert_close(weights, F.softmax(logits, dim=-1).gather(1, ids))
    assert (weights.sum(dim=1) < 0.99).all()
    renormalized, _ = backend.route(logits, 2, renormalize=True)
    torch.testing.assert_close(renormalized.sum(dim=1), torch.ones(16))


def test_reference_agrees_with_an_independent_formula() -> None:
    """Every expert computed for every token, weighted by a dense matrix of routing weights."""
    x, logits = tokens(9)
    weights, ids = Reference().route(logits, 3, renormalize=False)
    gate_up, down = expert_weights()
    dense = torch.zeros(9, NUM_EXPERTS).scatter(1, ids, weights)
    gate, up = torch.einsum("th,eih->tei", x, gate_up).chunk(2, dim=-1)
    expected = torch.einsum("tei,ehi,te->th", F.silu(gate) * up, down, dense)
    torch.testing.assert_close(run(Reference(), x, weights, ids), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num", [0, 1, 2, 3, 5, 33, 100])
@pytest.mark.parametrize("top_k", [1, 2, 3, NUM_EXPERTS])
def test_experts(backend: MoEBackend, num: int, top_k: int) -> None:
    x, logits = tokens(num)
    weights, ids = backend.route(logits, top_k, renormalize=False)
    actual = run(backend, x, weights, ids)
    assert actual.shape == x.shape
    torch.testing.assert_close(actual, run(Reference(), x, weights, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num", [1, 2, 7, 40])
def test_half_precision(backend: MoEBackend, dtype: torch.dtype, num: int) -> None:
    """Against float32 arithmetic on the same weights. A backend may round the result, each projection and the
    activation to the half dtype: four roundings of numbers around one."""
    x, logits = tokens(num, dtype)
    weights, ids = backend.route(logits, 2, renormalize=False)
    actual = run(backend, x, weights, ids, dtype)
    assert actual.dtype == dtype
    gate_up, down = expert_weights(dtype)
    expected = Reference().experts(x.float(), weights, ids, gate_up, down)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


def test_experts_that_nobody_chose_are_not_touched(backend: MoEBackend) -> None:
    x, _ = tokens(6)
    ids = torch.tensor([[2, 5]] * 6)
    weights = torch.full((6, 2), 0.25)
    gate_up, down = expert_weights()
    expected = backend.experts(x, weights, ids, gate_up, down)
    idle = torch.tensor([0, 1, 3, 4, 6, 7])
    gate_up[idle], down[idle] = float("nan"), float("nan")
    for num in (1, 6):
        actual = backend.experts(x[:num], weights[:num], ids[:num], gate_up, down)
        torch.testing.assert_close(actual, expected[:num])


def test_company_and_order_do_not_matter(backend: MoEBackend) -> None:
    x, logits = tokens(17)
    weights, ids = backend.route(logits, 2, renormalize=False)
    expected = run(backend, x, weights, ids)
    for row in range(17):
        one = slice(row, row + 1)
        torch.testing.assert_close(run(backend, x[one], weights[one], ids[one]), expected[one])
    order = torch.randperm(17, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(run(backend, x[order], weights[order], ids[order]), expected[order])


def test_the_same_batch_gives_the_same_bits(backend: MoEBackend) -> None:
    x, logits = tokens(40)
    weights, ids = backend.route(logits, 2, renormalize=False)
    first = run(backend, x, weights, ids)
    assert all(torch.equal(run(backend, x, weights, ids), first) for _ in range(5))


def test_a_nan_token_spoils_no_other(backend: MoEBackend) -> None:
    x, logits = tokens(8)
    weights, ids = backend.route(logits, 2, renormalize=False)
    expected = run(backend, x, weights, ids)
    x[3] = float("nan")
    actual = run(backend, x, weights, ids)
    others = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    torch.testing.assert_close(actual[others], expected[others])
