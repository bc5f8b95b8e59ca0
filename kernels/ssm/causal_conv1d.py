"""Causal convolution by the package causal-conv1d, where it is installed; all else by Triton.

Knows the package's interface. Asked for by name only. Taken for steps of one token a sequence, all at once,
and for sequences of more tokens than are verified, one a call, since it takes initial states for rows of a
batch but not for a ragged one. Short sequences beside those are left to this project's kernels.

The package multiplies slots by strides in 32 bits. Where slots span more, as those of an arena of some
gigabytes do, their contents are copied out, updated and copied back.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING

from hybridserve.kernels.ssm.triton_backend import (
    Triton,
    TritonMetadata,
    has_one_token_each,
    prepared_by_triton,
    put_state,
    start_from_zero,
    take_state,
)
from hybridserve.kernels.triton_support import import_obstacle, obstacle, rows_of

if TYPE_CHECKING:
    import torch

    from hybridserve.kernels.registry import Capabilities
    from hybridserve.kernels.ssm.interface import SSMMetadata

MAX_SPAN = 2**31
"""Elements from the first of the lowest slot to the last of the highest that the package can address."""

TAPS = range(2, 5)

ALIGNMENT = 8
"""Channels of a row come in multiples of so many, and so do distances between rows."""


class CausalConv1d(Triton):
    """ValueError at the first call if a layer's taps or channels are not what the package takes."""

    name = "causal_conv1d"

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        if reason := obstacle(capabilities) or import_obstacle("causal_conv1d", "causal-conv1d"):
            return reason
        from causal_conv1d import causal_conv1d_update

        if "conv_state_indices" not in inspect.signature(causal_conv1d_update).parameters:
            return "causal-conv1d is older than 1.5 and knows no slots"
        return None

    def __init__(self) -> None:
        super().__init__()
        from causal_conv1d import causal_conv1d_fn, causal_conv1d_update

        self._convolve, self._update = causal_conv1d_fn, causal_conv1d_update

    def prepare(self, metadata: SSMMetadata) -> TritonMetadata:
        """Of several tokens, Triton's share are the sequences that aren't prompts."""
        prepared = super().prepare(metadata)
        if not prepared.ssd.prompts:
            return prepared
        prompts = {prompt.sequence for prompt in prepared.ssd.prompts}
        return replace(prepared, conv_chunks=self._cut_conv(metadata, without=prompts))

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: SSMMetadata,
        *,
        silu: bool = True,
    ) -> torch.Tensor:
        num_channels, width = weight.shape
        if width not in TAPS or num_channels % ALIGNMENT:
            raise ValueError(
                f"causal-conv1d takes 2 to 4 taps, not {width}, and multiples of {ALIGNMENT} channels, "
                f"not {num_channels}: choose another backend for kernels.ssm"
            )
        bias = None if bias is None else bias.to(weight.dtype)
        activation = "silu" if silu else None
        if has_one_token_each(metadata):
            return self._step(x, weight, bias, activation, state, metadata)
        y = super().causal_conv1d(x, weight, bias, state, metadata, silu=silu)
        x = _aligned(x)
        for sequence, start, length in prepared_by_triton(metadata).ssd.prompts:
            mine, rows = slice(sequence, sequence + 1), slice(start, start + length)
            past = take_state(state, metadata, mine).to(x.dtype)
            out, past = self._convolve(
                x[rows].t().unsqueeze(0),  # [1, C, length], channels innermost
                weight,
                bias,
                initial_states=past.transpose(1, 2).contiguous().transpose(1, 2),
                return_final_states=True,
                activation=activation,
            )
            put_state(state, metadata, mine, past)
            y[rows] = out[0].t()
        return y

    def _step(
        self,
        x: torch.Tensor,  # [S, C]
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        state: torch.Tensor,
        metadata: SSMMetadata,
    ) -> torch.Tensor:
        everyone = slice(None)
        if state.dtype is x.dtype and _span(state) <= MAX_SPAN:
            start_from_zero(state, metadata)
            slots = metadata.state_slots.int()
            y: torch.Tensor = self._update(x, state, weight, bias, activation, conv_state_indices=slots)
            return y
        past = take_state(state, metadata, everyone).to(x.dtype)
        y = self._update(x, past, weight, bias, activation)
        put_state(state, metadata, everyone, past)
        return y


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x [T, C], or a copy of it, whose rows can be loaded 8 elements at a time."""
    x = rows_of(x)
    is_aligned = x.stride(0) % ALIGNMENT == 0 and x.storage_offset() % ALIGNMENT == 0
    return x if is_aligned else x.contiguous()


def _span(state: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(state.shape, state.stride(), strict=True))
