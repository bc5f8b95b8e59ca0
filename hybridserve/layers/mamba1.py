"""Mamba-1's mixer (arXiv 2312.00752): projections, norms and what it remembers; the recurrences are a
backend's."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hybridserve.core.cache_spec import StateSpec, StateTensor
from hybridserve.layers.linear import ColumnParallelLinear, OutputSlice, RowParallelLinear, cut
from hybridserve.layers.norm import SegmentedRMSNorm

if TYPE_CHECKING:
    from hybridserve.layers.context import BuildContext, ForwardContext


class MambaMixer:
    """[T, hidden] -> [T, hidden]. The inner channels are divided among the ranks.

    `norm_eps` given: dt, B and C are RMS-normed, as Jamba does. x_proj contracts the divided channels, so its
    output is reduced before anything that isn't linear looks at it.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        inner_size: int,
        state_size: int,
        conv_width: int,
        dt_rank: int,
        conv_bias: bool,
        proj_bias: bool,
        norm_eps: float | None = None,
    ) -> None:
        context = context.within("mamba")
        context.divide(inner_size, "inner channels of a Mamba layer")
        slices = [OutputSlice("in_proj", inner_size), OutputSlice("in_proj", inner_size)]
        self.in_proj = ColumnParallelLinear(context, name, slices, hidden_size, bias=proj_bias)
        self.x_proj = RowParallelLinear(
            context, name, "x_proj", inner_size, dt_rank + 2 * state_size, role="delicate"
        )
        self.dt_proj = ColumnParallelLinear(
            context, name, [OutputSlice("dt_proj", inner_size)], dt_rank, role="delicate"
        )
        self.out_proj = RowParallelLinear(context, name, "out_proj", inner_size, hidden_size, bias=proj_bias)
        self.sizes = (dt_rank, state_size, state_size)
        self.norm: SegmentedRMSNorm | None = None
        if norm_eps is not None:
            names = [f"{name}.{part}_layernorm" for part in ("dt", "b", "c")]
            self.norm = SegmentedRMSNorm(context, names, self.sizes, norm_eps)
        self.backend = context.ssm
        self.channels = cut(name, inner_size, context.tp)
        local = self.channels.stop - self.channels.start
        self._create_parameters(context, name, inner_size, local, state_size, conv_width, conv_bias)
        context.footprint.widen(context.part, 5 * local + sum(self.sizes))
        dtype = str(context.dtype).removeprefix("torch.")
        conv = StateTensor("conv", (local, conv_width - 1), dtype)
        self.cache = context.register_cache(
            StateSpec((conv, StateTensor("ssm", (local, state_size), context.state_dtype)))
        )

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        conv_state, ssm_state = cast("tuple[torch.Tensor, torch.Tensor]", context.caches[self.cache])
        backend, metadata, lora = self.backend, context.ssm, context.lora
        u, z = self.in_proj(x, lora).chunk(2, -1)
        u = backend.causal_conv1d(u, self.conv_weight, self.conv_bias, conv_state, metadata)
        selection = self.x_proj(u, lora)
        if self.norm is not None:
            selection = self.norm(selection)
        dt, B, C = torch.split_with_sizes(selection, self.sizes, -1)
        y = backend.selective_scan(
            u, self.dt_proj(dt, lora), self.A, B, C, self.D, z, self.dt_bias, ssm_state, metadata
        )
        return self.out_proj(y, lora)

    def _create_parameters(
        self,
        context: BuildContext,
        name: str,
        inner: int,
        local: int,
        state_size: int,
        width: int,
        conv_bias: bool,
    ) -> None:
        """What the recurrences need, in the dtype that they need: the scan's own in float32."""
        self.conv_weight = context.allocate(local, width)
        self.conv_bias = context.allocate(local) if conv_bias else None
        self.A = context.allocate(local, state_size, dtype=torch.float32)
        self.D = context.allocate(local, dtype=torch.float32)
        self.dt_bias = context.allocate(local, dtype=torch.float32)
        expect = context.weights.expect
        expect(f"{name}.conv1d.weight", (inner, 1, width), self._load_conv_weight)
        if self.conv_bias is not None:
            bias = self.conv_bias
            expect(f"{name}.conv1d.bias", (inner,), lambda tensor: self._load_channels(bias, tensor))
        expect(f"{name}.A_log", (inner, state_size), self._load_A)
        expect(f"{name}.D", (inner,), lambda tensor: self._load_channels(self.D, tensor))
        expect(f"{name}.dt_proj.bias", (inner,), lambda tensor: self._load_channels(self.dt_bias, tensor))

    def _load_channels(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        parameter.copy_(tensor[self.channels])

    def _load_conv_weight(self, tensor: torch.Tensor) -> None:
        self.conv_weight.copy_(tensor[self.channels, 0])

    def _load_A(self, tensor: torch.Tensor) -> None:
        self.A.copy_(tensor[self.channels])
        if not self.A.is_meta:  # where numbers are
            self.A.exp_().neg_()
