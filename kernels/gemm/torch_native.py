"""Projections by torch's matrix multiplication, for any device. Knows tensors; knows no model.

Two things need care on a CPU, both measured on two cores with AVX2:

- With few rows, torch reads a float32 weight at a third of the memory's speed if it multiplies x by the
  weight's transpose, and at nearly all of it if it multiplies the weight by x's transpose.
- Without half-precision instructions a half-precision weight is multiplied element by element. That is right
  for a row or three (the weight is read once, as it is) and up to 10 times slower than float32 for more.
  Those are multiplied in float32, a slice of the weight at a time: products of two half-precision numbers are
  exact in float32, and the weight is never held twice. So are weights of one byte, for any number of rows:
  torch's own products of them are slower without special instructions, and oneDNN's sums overflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from hybridserve.kernels.gemm.interface import GemmBackend, ScaledWeight, Weight, round_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

_FEW_ROWS_HALF = 3
"""Up to here reading a half-precision weight as it is beats widening it."""

_FEW_ROWS_FLOAT = 96
"""Up to here the weight goes first in a float32 product."""

_SMALL_WEIGHT = 1 << 17
"""A weight with fewer elements stays in cache: which operand goes first does not matter, a copy does."""

_SLICE_ELEMENTS = 1 << 18
"""Of a weight, widened at once: 1 MiB, which stays in cache between widening and multiplying."""


class TorchNative(GemmBackend):
    name = "torch_native"
    copies_codes = "plain copies of slices of its weight"

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        y = matmul(x, weight)
        if bias is not None:
            y.add_(bias)
        return y if y.dtype == x.dtype else y.to(x.dtype)


def matmul(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [M, in] times weight [out, in]: [M, out], in x's dtype or, not yet rounded to it, in float32."""
    if isinstance(weight, ScaledWeight):
        return _scaled(x, weight)
    if _weight_goes_first(x.shape[0], weight):
        return _weight_first(x.float(), weight)
    if x.shape[0] > _FEW_ROWS_HALF and _lacks_instructions(weight):
        return _widened(x, weight)
    return F.linear(x, weight)


def _scaled(x: torch.Tensor, weight: ScaledWeight) -> torch.Tensor:
    """x [M, in] of any dtype times a one-byte weight [out, in]: [M, out] in float32.

    Sums of products of whole numbers are exact in float32 up to 2^24, the worst case of 1,000 inputs.
    """
    codes, scales, int8_rows = weight
    row_scales = None
    if int8_rows:
        x, row_scales = round_rows(x)
    few = 0 < len(x) <= _FEW_ROWS_FLOAT
    y = (_weight_first(x.float(), codes) if few else _widened(x, codes)).mul_(scales)
    return y if row_scales is None else y.mul_(row_scales)


def _weight_goes_first(num_rows: int, weight: torch.Tensor) -> bool:
    if not 0 < num_rows <= _FEW_ROWS_FLOAT:
        return False
    if weight.dtype == torch.float32:
        return weight.device.type == "cpu" and weight.numel() >= _SMALL_WEIGHT
    return num_rows > _FEW_ROWS_HALF and _lacks_instructions(weight)


def _weight_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, in] in float32 times weight [out, in] of any dtype: [M, out] in float32.

    x stays where it is and is read as its transpose: a real transpose would be slower again.
    """
    if weight.dtype == torch.float32:
        if len(x) == 1:  # a product with one column takes another, slower path
            return torch.mm(weight, torch.cat([x, x]).t())[:, :1].t().contiguous()
        return torch.mm(weight, x.t()).t().contiguous()
    if len(x) == 1:
        y = x.new_empty(weight.shape[0])
        for part, wide in _widened_slices(weight):
            torch.mv(wide, x[0], out=y[part])
        return y.unsqueeze(0)
    y = x.new_empty(weight.shape[0], len(x))
    for part, wide in _widened_slices(weight):
        torch.mm(wide, x.t(), out=y[part])
    return y.t().contiguous()


def _lacks_instructions(weight: torch.Tensor) -> bool:
    """Whether torch would multiply this half-precision weight element by element."""
    if weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, in] of any dtype times a weight [out, in] that is no float32; [M, out] float32, not rounded."""
    x = x.float()
    y = x.new_empty(x.shape[0], weight.shape[0])
    for part, wide in _widened_slices(weight):
        torch.mm(x, wide.t(), out=y[:, part])
    return y


def _widened_slices(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows of a smaller weight in float32, slice after slice; each is valid until the next."""
    num_outputs, num_inputs = weight.shape
    step = max(1, _SLICE_ELEMENTS // num_inputs)
    buffer = torch.empty(min(step, num_outputs), num_inputs, device=weight.device)
    for start in range(0, num_outputs, step):
        rows = weight[start : start + step]
        yield slice(start, start + len(rows)), buffer[: len(rows)].copy_(rows)
