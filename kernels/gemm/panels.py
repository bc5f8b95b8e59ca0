"""Weights laid out in panels, as panels.h reads them: outputs side by side. Knows tensors.

A weight [.., out, in] becomes [.., out / P, in, P] or, for products of whole numbers,
[.., out / P, in / 2, 2 P].
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16)
"""Of weights that are no codes."""


@dataclass(frozen=True, slots=True)
class Panels:
    """How a library lays weights out."""

    size: int
    """Outputs in a panel."""

    @classmethod
    def of(cls, library: ctypes.CDLL) -> Panels:
        size = ctypes.c_int64()
        library.panel_outputs(ctypes.addressof(size))
        return cls(size.value)

    def fit(self, num_outputs: int, num_inputs: int, *, in_pairs: bool) -> bool:
        """Whether there are whole panels. `in_pairs`: for products of whole numbers."""
        return num_outputs > 0 and num_outputs % self.size == 0 and not (in_pairs and num_inputs % 2)

    def lay_out(self, weight: torch.Tensor, *, in_pairs: bool) -> torch.Tensor:
        """A projection is copied; experts, all of which may be large, are laid out in place, one by one."""
        if weight.dim() == 2:
            return self._spread(weight, in_pairs).contiguous()
        weight = weight.contiguous()
        for expert in weight:
            expert.view(-1).copy_(self._spread(expert, in_pairs).reshape(-1))
        return weight.view(*self._shape(weight.shape, in_pairs))

    def restore(self, laid_out: torch.Tensor, *, in_pairs: bool) -> torch.Tensor:
        """A copy of what was laid out, as it was."""
        *experts, num_panels, steps, _ = laid_out.shape
        if in_pairs:
            outputs = laid_out.view(*experts, num_panels, steps, self.size, 2).transpose(-3, -2)
        elif laid_out.dtype == torch.bfloat16:
            outputs = laid_out.view(*experts, num_panels, steps, self.size // 2, 2).transpose(-3, -1)
        else:
            outputs = laid_out.transpose(-2, -1)
        return outputs.reshape(*experts, num_panels * self.size, -1).contiguous()

    def shape_of(self, laid_out: torch.Tensor, *, in_pairs: bool) -> tuple[int, ...]:
        """[.., out, in] of what was laid out; ValueError if that was for other products."""
        *experts, num_panels, steps, width = laid_out.shape
        if width != self.size * (1 + in_pairs):
            raise ValueError(f"panels of {width} elements an input or pair, not {self.size * (1 + in_pairs)}")
        return (*experts, num_panels * self.size, steps * (1 + in_pairs))

    def _shape(self, shape: torch.Size, in_pairs: bool) -> tuple[int, ...]:
        *experts, num_outputs, num_inputs = shape
        return (*experts, num_outputs // self.size, num_inputs // (1 + in_pairs), self.size * (1 + in_pairs))

    def _spread(self, weight: torch.Tensor, in_pairs: bool) -> torch.Tensor:
        num_panels, steps, width = self._shape(weight.shape, in_pairs)
        if in_pairs:
            inputs = weight.reshape(num_panels, self.size, steps, 2).transpose(1, 2)
        elif weight.dtype == torch.bfloat16:
            inputs = weight.reshape(num_panels, 2, self.size // 2, steps).transpose(1, 3)
        else:
            inputs = weight.reshape(num_panels, self.size, steps).transpose(1, 2)
        return inputs.reshape(num_panels, steps, width)
