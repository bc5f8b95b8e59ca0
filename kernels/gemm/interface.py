"""What a matrix-multiplication backend is given and must do. Knows tensors; knows no request and no model."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch

from hybridserve.kernels.registry import Backend

INT8_MAX = 127
"""Largest code: -128 is not used, so that codes are symmetric."""


class ScaledWeight(NamedTuple):
    """A weight in one byte an element: codes times scales, a scale an output.

    A product sums codes, and scales the sum: y[t, o] = scales[o] * sum_i codes[o, i] * x[t, i].
    """

    codes: torch.Tensor  # int8 or float8_e4m3fn [out, in]; of experts [E, out, in]
    scales: torch.Tensor  # float32 [out]; of experts [E, out]
    int8_rows: bool = False
    """Whether rows of x are rounded first, as `round_rows` does (W8A8)."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def part(self, first: int, end: int) -> ScaledWeight:
        """Some of several experts."""
        return ScaledWeight(self.codes[first:end], self.scales[first:end], self.int8_rows)

    def expert(self, index: int) -> ScaledWeight:
        """The weight [out, in] of one of several experts."""
        return ScaledWeight(self.codes[index], self.scales[index], self.int8_rows)


Weight = torch.Tensor | ScaledWeight


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, in] of any dtype as whole numbers from -127 to 127 in float32 [T, in], and what a row of them is
    to be multiplied by, float32 [T, 1]: a row's largest magnitude becomes 127."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True).div_(INT8_MAX)
    scales.masked_fill_(scales == 0, 1)
    return (x / scales).round_(), scales


class GemmBackend(Backend):
    """Dense projections."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Lay a loaded weight [out, in] out as `linear` likes it. Called once; the result replaces it.

        A weight that others read too is never packed: `linear` takes both.
        """
        return weight

    def unpack(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] that was packed; may share its memory."""
        return weight

    def pack_scaled(self, weight: ScaledWeight) -> ScaledWeight:
        """The same for one-byte weights; `shape` stays, or `linear` must know better."""
        return weight

    def unpack_scaled(self, weight: ScaledWeight) -> ScaledWeight:
        return weight

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] times a weight, packed or not, plus bias [out]; [T, out] in x's dtype."""
