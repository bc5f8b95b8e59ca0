"""Offsets that no 32-bit integer holds: what lies beyond 2^31 elements of caches, states, weights and rows is
read and written as what lies before it is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.gpu import cases, weighted_cases
from benchmarks.gpu.cases import BLOCK_SIZE, EPS, LAYERS, Inputs
from benchmarks.gpu.checks import TOLERANCE, assert_same, backend_of
from hybridserve.kernels.gemm.interface import ScaledWeight
from hybridserve.kernels.lora.interface import LoraBatch, LoraPair, LoraTable, Segment
from tests.harness.gpu import DEVICE, DRY, EDGE, SHAPES, free_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.gpu.cases import Case

pytestmark = pytest.mark.gpu

DTYPE = torch.bfloat16

WIDE = 16 if DRY else 8192

FEW = 3
"""Rows or outputs that lie beyond the edge."""

NEEDED_BYTES = 40 * 2**30

HEADS = (4, 8, 2, 16) if DRY else (128, 64, 1, 128)


@pytest.fixture(autouse=True)
def room(gpu: None) -> Iterator[None]:
    if free_bytes() < NEEDED_BYTES:
        pytest.skip(f"{free_bytes() / 2**30:.0f} GiB are free on the device, this needs 40")
    with torch.inference_mode():
        yield


def beyond(elements: int) -> int:
    """The first of units of so many elements each that begins behind the edge."""
    return EDGE // elements + 1


def check(case: Case) -> None:
    assert_same(case, backend_of(case.operator), backend_of(case.operator, "reference"), DTYPE)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    size = expected.double().square().mean().sqrt().item()
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE] * size)


def rows(width: int) -> torch.Tensor:
    """Rows of which `FEW` begin behind the edge, and all but those and as many before hold nothing."""
    x = torch.zeros(beyond(width) + FEW, width, dtype=DTYPE, device=DEVICE)
    x[-2 * FEW :] = Inputs(DTYPE, DEVICE).normal(2 * FEW, width)
    return x


def test_blocks() -> None:
    shape = SHAPES[-1]
    elements = LAYERS * 2 * BLOCK_SIZE * shape.kv_heads * shape.head_dim
    lengths = [(37, 1), (0, 9)]
    check(cases.attention(shape, lengths, DTYPE, DEVICE, name="attention", first_block=beyond(elements)))


def test_slots_of_the_convolution() -> None:
    shape = SHAPES[0]
    first = beyond(LAYERS * shape.channels * (shape.taps - 1))
    check(cases.convolution(shape, [1, 5], DTYPE, DEVICE, name="convolution", first_slot=first))


def test_slots_of_the_scan() -> None:
    shape = SHAPES[0]
    first = beyond(LAYERS * shape.channels * shape.states)
    check(cases.scan(shape, [1, 5], DTYPE, DEVICE, name="scan", first_slot=first))


def test_slots_of_mamba2() -> None:
    num_heads, size, _, states = HEADS
    first = beyond(LAYERS * num_heads * size * states)
    check(cases.ssd(HEADS, [1, 5], DTYPE, DEVICE, name="ssd", shape="bamba-9b", first_slot=first))


@pytest.mark.parametrize("int8_rows", [False, True], ids=["int8", "int8-w8a8"])
def test_outputs_of_a_weight(int8_rows: bool) -> None:
    outputs = beyond(WIDE) + FEW
    codes = torch.zeros(outputs, WIDE, dtype=torch.int8, device=DEVICE)
    inputs = Inputs(DTYPE, DEVICE)
    codes[-2 * FEW :] = inputs.codes(2 * FEW, WIDE)
    weight = ScaledWeight(codes, torch.full((outputs,), 0.01, device=DEVICE), int8_rows)
    x = inputs.normal(2, WIDE)
    actual = backend_of("gemm").linear(x, weight, None)[:, -2 * FEW :]
    last = ScaledWeight(codes[-2 * FEW :], weight.scales[-2 * FEW :], int8_rows)
    assert_near(actual, backend_of("gemm", "reference").linear(x, last, None))


def test_rows_of_a_product() -> None:
    """Of many outputs: it is y that is large."""
    inputs, width = Inputs(DTYPE, DEVICE), 32
    x = inputs.normal(beyond(WIDE) + FEW, width)
    weight = ScaledWeight(inputs.codes(WIDE, width), torch.full((WIDE,), 0.01, device=DEVICE))
    actual = backend_of("gemm").linear(x, weight, None)[-FEW:]
    assert_near(actual, backend_of("gemm", "reference").linear(x[-FEW:], weight, None))


def test_experts() -> None:
    """The last expert's weights lie behind the edge."""
    shape = replace(SHAPES[-1], hidden=WIDE, inner=24 if DRY else 24576, experts=16, top_k=2)
    assert (shape.experts - 1) * 2 * shape.inner * shape.hidden > EDGE
    check(weighted_cases.experts(shape, 8, "int8", DTYPE, DEVICE, name="experts"))


def test_norms() -> None:
    x, weight = rows(WIDE), Inputs(DTYPE, DEVICE).normal(WIDE)
    actual = backend_of("pointwise").rms_norm(x, weight, EPS, (WIDE,))[-FEW:]
    assert_near(actual, backend_of("pointwise", "reference").rms_norm(x[-FEW:], weight, EPS, (WIDE,)))
    last = x[-FEW:].clone()
    actual = backend_of("pointwise").add_rms_norm(x, x.clone(), weight, EPS)[-FEW:]
    assert_near(actual, backend_of("pointwise", "reference").add_rms_norm(last, last.clone(), weight, EPS))
    assert torch.equal(x[-FEW:], last)


def test_activations() -> None:
    x = rows(2 * WIDE)
    actual = backend_of("pointwise").silu_and_mul(x)[-FEW:]
    assert_near(actual, backend_of("pointwise", "reference").silu_and_mul(x[-FEW:]))


def test_distributions() -> None:
    size = 64 if DRY else 65536
    probs = torch.zeros(beyond(size) + FEW, size, device=DEVICE)
    probs[:, 0] = 1
    probs[-FEW:] = Inputs(torch.float32, DEVICE).normal(FEW, size).softmax(-1)
    last, top_k = probs[-FEW:].clone(), torch.full((len(probs),), 5, device=DEVICE)
    backend_of("pointwise").keep_top_k(probs, top_k)
    backend_of("pointwise", "reference").keep_top_k(last, top_k[-FEW:])
    assert torch.equal(probs[-FEW:], last)


def test_rows_with_adapters() -> None:
    """Only the last ones have one."""
    y = rows(WIDE)
    x = rows(WIDE)[:, :16]
    inputs, table, total = Inputs(DTYPE, DEVICE), LoraTable(1), len(y)
    pair = LoraPair(inputs.normal(16, 16), inputs.normal(16, WIDE), 0.5)
    table.put(1, (pair,))
    slots = torch.zeros(total, dtype=torch.int64)
    slots[-FEW:] = 1
    batch = LoraBatch(
        slots.to(DEVICE),
        torch.arange(total - FEW, total, device=DEVICE),
        [Segment(1, 0, FEW)],
        torch.tensor([[1, 0, FEW]], dtype=torch.int32, device=DEVICE),
        slots.numpy(),
    )
    added = pair.scale * (x[-FEW:].float() @ pair.A.float().t()) @ pair.B.float()
    expected = (y[-FEW:].float() + added).to(DTYPE)
    before = y[-2 * FEW : -FEW].clone()
    backend_of("lora").add(y, x, table, batch)
    assert_near(y[-FEW:], expected)
    assert torch.equal(y[-2 * FEW : -FEW], before)
