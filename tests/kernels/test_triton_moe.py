"""A mixture of experts in Triton's interpreter: tests of all backends again, and what only these kernels
have."""

from __future__ import annotations

import itertools

import pytest
import torch

from hybridserve.kernels.gemm import tiles
from hybridserve.kernels.moe import Reference, Triton
from hybridserve.kernels.moe.triton_backend import group_pairs, num_tiles
from hybridserve.kernels.registry import Capabilities
from tests.harness.triton_interpreter import poisoned, require_triton  # noqa: F401
from tests.kernels.test_moe import (  # noqa: F401 - collected again, with this module's fixtures
    HIDDEN,
    NUM_EXPERTS,
    Delta,
    expert_weights,
    run,
    test_a_nan_token_spoils_no_other,
    test_delta_in_bfloat16,
    test_experts_that_nobody_chose_are_not_touched,
    test_half_precision,
    test_routing_of_nan_names_experts,
    tokens,
)
from tests.kernels.test_scaled import KINDS, random, scaled
from tests.kernels.test_scaled import Recorded as Recording

require_triton()

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def backend() -> Triton:
    return Triton()


@pytest.mark.parametrize("num", [0, 5])
@pytest.mark.parametrize("top_k", [1, 2, NUM_EXPERTS])
@pytest.mark.parametrize("renormalize", [False, True])
def test_routing(backend: Triton, num: int, top_k: int, renormalize: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _, logits = tokens(num, dtype)
        weights, ids = backend.route(logits, top_k, renormalize=renormalize)
        assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
        expected_weights, expected_ids = Reference().route(logits, top_k, renormalize=renormalize)
        torch.testing.assert_close(weights, expected_weights)
        assert torch.equal(ids, expected_ids)


@pytest.mark.parametrize("num_keys", [1, 5, 70])
@pytest.mark.parametrize("num_pairs", [1, 31, 300])
def test_pairs_are_grouped_in_order(backend: Triton, num_pairs: int, num_keys: int) -> None:
    keys = torch.randint(num_keys, (num_pairs,), generator=torch.Generator().manual_seed(num_pairs))
    grouped = group_pairs(backend._kernels, keys, num_keys)
    order = keys.argsort(stable=True)
    assert torch.equal(grouped.order, order)
    assert torch.equal(grouped.keys, keys[order])
    assert torch.equal(grouped.places[order], torch.arange(num_pairs))
    assert torch.equal(grouped.starts.long(), torch.searchsorted(keys[order], torch.arange(num_keys + 1)))


def test_there_are_as_many_tiles_as_there_could_be() -> None:
    for rows, counts in itertools.product((1, 4), itertools.product(range(6), repeat=3)):
        assert sum(-(-count // rows) for count in counts) <= num_tiles(sum(counts), 3, rows)


@pytest.mark.parametrize(
    ("num", "few_rows"), [(0, 64), (2, 64), (9, 4), pytest.param(33, 64, marks=pytest.mark.slow)]
)
def test_experts(backend: Triton, num: int, few_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles for few rows, and in those for many."""
    monkeypatch.setattr(tiles, "FEW_ROWS", few_rows)
    x, logits = tokens(num)
    weights, ids = backend.route(logits, 2, renormalize=False)
    wide = torch.full((num, HIDDEN + 9), float("nan"))
    wide[:, 5:-4] = x
    actual = run(backend, wide[:, 5:-4], weights, ids)
    torch.testing.assert_close(actual, run(Reference(), x, weights, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_one_byte_weights(backend: Triton, kind: str, dtype: torch.dtype) -> None:
    gate_up, down = scaled(5, 2 * 12, 20, kind=kind), scaled(5, 20, 12, kind=kind)
    packed = backend.pack_scaled(gate_up, down)
    within = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    within = max(within, 1e-2 if kind == "int8-w8a8" else 0)  # a row on an edge
    for num in (1, 5):
        x = random(num, 20).to(dtype)
        weights, ids = Reference().route(random(num, 5, seed=3), 2, renormalize=False)
        for deltas in ((None, None), (Recording(2), Recording(2))):
            actual = backend.experts(x, weights, ids, *packed, deltas[0])
            expected = Reference().experts(x, weights, ids, gate_up, down, deltas[1])
            torch.testing.assert_close(actual, expected, rtol=within, atol=4 * within)
            if deltas[0] is not None:
                assert torch.equal(deltas[0].seen[0], x), "a delta reads what was not rounded"


@pytest.mark.parametrize(
    ("num", "top_k"), [(0, 2), (5, 1), pytest.param(9, NUM_EXPERTS, marks=pytest.mark.slow)]
)
def test_delta(backend: Triton, num: int, top_k: int) -> None:
    """A token that it leaves alone has the bits of a call without it."""
    x, logits = tokens(num)
    weights, ids = backend.route(logits, top_k, renormalize=False)
    packed = backend.pack(*expert_weights())
    delta = Delta([0, 2, 3])
    actual = backend.experts(x, weights, ids, *packed, delta)
    expected = Reference().experts(x, weights, ids, *expert_weights(), Delta([0, 2, 3]))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    without = backend.experts(x, weights, ids, *packed)
    alone = torch.tensor([token not in delta.tokens for token in range(num)], dtype=torch.bool)
    assert torch.equal(actual[alone], without[alone])
    order = ids.flatten().argsort(stable=True)
    for groups in delta.groups:
        assert torch.equal(groups.tokens, order // top_k)
        assert torch.equal(groups.experts, ids.flatten()[order])


def test_a_token_has_the_same_bits_beside_any_others(backend: Triton) -> None:
    x, logits = tokens(7)
    weights, ids = backend.route(logits, 2, renormalize=False)
    expected = run(backend, x, weights, ids)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(backend, x[order], weights[order], ids[order]), expected[order])
    for row in (0, 6):
        one = slice(row, row + 1)
        assert torch.equal(run(backend, x[one], weights[one], ids[one]), expected[one])


def test_needs_a_gpu() -> None:
    assert Triton.why_not(Capabilities("cpu", "float32")) == "no CUDA device"
    assert Triton.why_not(Capabilities("cuda", "bfloat16", "int8")) is None
