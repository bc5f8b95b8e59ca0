"""Mamba-2's mixer (arXiv 2405.21060): projections, the gated norm and what it remembers; the recurrences are
a backend's."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hybridserve.core.cache_spec import StateSpec, StateTensor
from hybridserve.kernels.ssm.interface import ssd_scratch_bytes
from hybridserve.layers.linear import ColumnParallelLinear, OutputSlice, OutputSlices, RowParallelLinear, cut
from hybridserve.layers.norm import GroupedRMSNorm

if TYPE_CHECKING:
    from hybridserve.layers.context import BuildContext, ForwardContext


class Mamba2Mixer:
    """[T, hidden] -> [T, hidden]. Heads are divided among the ranks, groups of B and C too or, where there
    are fewer groups than ranks, shared by neighbours.

    The gate is applied before the norm, by the scan; the norm is over the heads of a group, which may be
    divided. The convolution's channels on a rank are its x, its B and its C, in this order.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        num_groups: int,
        state_size: int,
        conv_width: int,
        conv_bias: bool,
        proj_bias: bool,
        norm_eps: float,
        dt_limits: tuple[float, float],
    ) -> None:
        if num_heads % num_groups:
            raise ValueError(f"{name}: {num_heads} heads can't share {num_groups} groups of B and C evenly")
        context = context.within("mamba")
        context.divide(num_heads, "heads of a Mamba-2 layer")
        context.divide(num_groups, "groups of B and C of a Mamba-2 layer", shared=True)
        inner_size, group_size = num_heads * head_dim, num_groups * state_size

        def x_B_C(module: str) -> list[OutputSlice]:
            shared = OutputSlice(module, group_size, state_size, replicated=True)
            return [OutputSlice(module, inner_size, head_dim), shared, shared]

        z, dt = OutputSlice("in_proj", inner_size, head_dim), OutputSlice("in_proj", num_heads)
        slices = [z, *x_B_C("in_proj"), dt]
        self.in_proj = ColumnParallelLinear(context, name, slices, hidden_size, bias=proj_bias)
        self.norm = GroupedRMSNorm(context, f"{name}.norm", inner_size, num_groups, norm_eps)
        self.out_proj = RowParallelLinear(
            context, name, "out_proj", inner_size, hidden_size, unit=head_dim, bias=proj_bias
        )
        self.backend = context.ssm
        self.head_dim, self.state_size = head_dim, state_size
        self.dt_limits = dt_limits
        self.heads = cut(name, num_heads, context.tp)
        self.convolved = OutputSlices(name, x_B_C("conv1d"), context.tp)
        local, num_convolved = self.heads.stop - self.heads.start, self.convolved.num_rows
        self.sizes = (local * head_dim, num_convolved, local)  # z, x B C, dt
        self._create_parameters(context, name, conv_width, conv_bias)
        num_projected = self.in_proj.outputs.num_rows
        scratch = ssd_scratch_bytes(local, head_dim, state_size) // context.dtype.itemsize
        context.footprint.widen(context.part, num_projected + num_convolved + 2 * local * head_dim + scratch)
        dtype = str(context.dtype).removeprefix("torch.")
        conv = StateTensor("conv", (num_convolved, conv_width - 1), dtype)
        ssm = StateTensor("ssm", (local, head_dim, state_size), context.state_dtype)
        self.cache = context.register_cache(StateSpec((conv, ssm)))

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        conv_state, ssm_state = cast("tuple[torch.Tensor, torch.Tensor]", context.caches[self.cache])
        backend, metadata, lora = self.backend, context.ssm, context.lora
        z, xBC, dt = torch.split_with_sizes(self.in_proj(x, lora), self.sizes, -1)
        xBC = backend.causal_conv1d(xBC, self.conv_weight, self.conv_bias, conv_state, metadata)
        u, B, C = torch.split_with_sizes(xBC, self.convolved.sizes, -1)
        heads, groups = (len(x), len(self.A), self.head_dim), (len(x), -1, self.state_size)
        y = backend.ssd_scan(
            u.view(heads),
            dt,
            self.A,
            B.view(groups),
            C.view(groups),
            self.D,
            z.view(heads),
            self.dt_bias,
            ssm_state,
            metadata,
            dt_limits=self.dt_limits,
        )
        return self.out_proj(self.norm(y.flatten(1)), lora)

    def _create_parameters(self, context: BuildContext, name: str, width: int, conv_bias: bool) -> None:
        """What the recurrences need, in the dtype that they need: the scan's own in float32."""
        local = self.heads.stop - self.heads.start
        self.conv_weight = context.allocate(self.convolved.num_rows, width)
        self.conv_bias = context.allocate(self.convolved.num_rows) if conv_bias else None
        self.A = context.allocate(local, dtype=torch.float32)
        self.D = context.allocate(local, dtype=torch.float32)
        self.dt_bias = context.allocate(local, dtype=torch.float32)
        expect = context.weights.expect
        num_channels, num_heads = self.convolved.module_rows["conv1d"], local * context.tp.size
        expect(
            f"{name}.conv1d.weight",
            (num_channels, 1, width),
            lambda tensor: self._load_channels(self.conv_weight, tensor[:, 0]),
        )
        if self.conv_bias is not None:
            bias = self.conv_bias
            expect(f"{name}.conv1d.bias", (num_channels,), lambda tensor: self._load_channels(bias, tensor))
        expect(f"{name}.A_log", (num_heads,), self._load_A)
        expect(f"{name}.D", (num_heads,), lambda tensor: self._load_heads(self.D, tensor))
        expect(f"{name}.dt_bias", (num_heads,), lambda tensor: self._load_heads(self.dt_bias, tensor))

    def _load_channels(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        for _, source, destination in self.convolved.placements:
            parameter[destination].copy_(tensor[source])

    def _load_heads(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        parameter.copy_(tensor[self.heads])

    def _load_A(self, tensor: torch.Tensor) -> None:
        self._load_heads(self.A, tensor)
        if not self.A.is_meta:  # where numbers are
            self.A.exp_().neg_()
