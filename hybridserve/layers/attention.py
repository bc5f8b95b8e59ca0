"""Multi-head attention over the paged cache: projections and what it remembers; the arithmetic is a
backend's.

Knows heads, windows, soft-caps and rotary embeddings; an attention without `rotary` has no positional
encoding at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hybridserve.core.cache_spec import PagedKVSpec
from hybridserve.layers.linear import ColumnParallelLinear, OutputSlice, RowParallelLinear

if TYPE_CHECKING:
    from hybridserve.layers.context import BuildContext, ForwardContext
    from hybridserve.layers.rotary import Rotation


class Attention:
    """[T, hidden] -> [T, hidden]. Query heads are divided among the ranks, KV heads too or, where there are
    fewer KV heads than ranks, shared by neighbours."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None = None,
        softcap: float | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
    ) -> None:
        if num_heads % num_kv_heads:
            raise ValueError(f"{name}: {num_heads} heads can't share {num_kv_heads} KV heads evenly")
        backend = context.attention
        if backend.head_dims is not None and head_dim not in backend.head_dims:
            able = ", ".join(map(str, backend.head_dims))
            raise ValueError(f"kernels.attention: {backend.name} takes heads of {able}, not {head_dim}")
        context = context.within("attention")
        context.divide(num_heads, "attention heads")
        context.divide(num_kv_heads, "KV heads", shared=True)
        slices = [
            OutputSlice("q_proj", num_heads * head_dim, head_dim),
            OutputSlice("k_proj", num_kv_heads * head_dim, head_dim, replicated=True),
            OutputSlice("v_proj", num_kv_heads * head_dim, head_dim, replicated=True),
        ]
        self.qkv_proj = ColumnParallelLinear(context, name, slices, hidden_size, bias=qkv_bias)
        self.o_proj = RowParallelLinear(
            context, name, "o_proj", num_heads * head_dim, hidden_size, unit=head_dim, bias=out_bias
        )
        sizes = self.qkv_proj.outputs.sizes
        self.backend = backend
        self.pointwise = context.pointwise
        self.head_dim = head_dim
        self.num_heads = sizes[0] // head_dim
        self.num_kv_heads = sizes[1] // head_dim
        self.scale = head_dim**-0.5
        self.window = window
        self.softcap = softcap
        context.footprint.widen(context.part, self.qkv_proj.outputs.num_rows + sizes[0])
        self.cache = context.register_cache(
            PagedKVSpec(self.num_kv_heads, head_dim, context.cache_dtype, window)
        )

    def __call__(
        self, x: torch.Tensor, context: ForwardContext, rotation: Rotation | None = None
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        heads = self.qkv_proj(x, context.lora).view(len(x), -1, self.head_dim)
        if rotation is None:
            query, key, value = torch.split_with_sizes(heads, (num_heads, num_kv_heads, num_kv_heads), 1)
        else:
            query_key, value = torch.split_with_sizes(heads, (num_heads + num_kv_heads, num_kv_heads), 1)
            turned = self.pointwise.rotate(query_key, *rotation)
            query, key = torch.split_with_sizes(turned, (num_heads, num_kv_heads), 1)
        cache = cast("torch.Tensor", context.caches[self.cache])
        out = self.backend.forward(
            query,
            key,
            value,
            cache,
            context.attention,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )
        return self.o_proj(out.reshape(len(x), -1), context.lora)
