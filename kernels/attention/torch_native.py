"""Paged attention in plain torch: a few batched calls a step, whatever the number of sequences.

Knows how to attend over one rectangle of rows; `plan` decides which rectangles. Runs on any device: on a CPU
through torch's flash kernel, elsewhere through matrix products with a bounded score matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from hybridserve.kernels.attention.interface import AttentionBackend, AttentionMetadata
from hybridserve.kernels.attention.plan import Plan, make_plan

if TYPE_CHECKING:
    from hybridserve.kernels.attention.plan import Rows, Tile

CPU_TILE_BYTES = 8 << 20  # of gathered K and V: what is written should still be in the cache when it is read
TILE_BYTES = 256 << 20
SCORE_ELEMENTS = 1 << 23


@dataclass(slots=True)
class PreparedMetadata(AttentionMetadata):
    """One plan for each kind of attention layer, made when the first layer of the kind asks for it."""

    plans: dict[tuple[int, int | None, int], Plan] = field(default_factory=dict)

    def plan(self, block_size: int, window: int | None, tile_tokens: int) -> Plan:
        kind = (block_size, window, tile_tokens)
        plan = self.plans.get(kind)
        if plan is None:
            plan = self.plans[kind] = make_plan(self, *kind)
        return plan


class TorchNative(AttentionBackend):
    name = "torch_native"

    def __init__(self) -> None:
        self._flash_on_cpu = _flash_is_right()

    def prepare(self, metadata: AttentionMetadata) -> PreparedMetadata:
        return PreparedMetadata(
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_table,
            metadata.slot_mapping,
            metadata.query_lens,
            metadata.context_lens,
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if not isinstance(metadata, PreparedMetadata):
            raise TypeError("metadata must come from this backend's prepare()")
        if not len(query):
            return torch.empty_like(query)
        # torch's flash kernel takes the elements of a head to lie side by side, and does not look.
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        on_cpu = query.device.type == "cpu"
        is_flash = on_cpu and self._flash_on_cpu and softcap is None  # the kernel caps no scores
        attend = _attend_flash if is_flash else partial(_attend_plain, softcap=softcap)
        block_size = cache.shape[2]
        token_bytes = 2 * cache.shape[3] * cache.shape[4] * cache.element_size()
        plan = metadata.plan(block_size, window, (CPU_TILE_BYTES if on_cpu else TILE_BYTES) // token_bytes)

        keys, values = cache.unbind(1)
        if key.dtype != cache.dtype:
            key, value = key.to(cache.dtype), value.to(cache.dtype)
        keys.index_put_((plan.blocks, plan.offsets), key)
        values.index_put_((plan.blocks, plan.offsets), value)

        heads = (cache.shape[3], query.shape[1] // cache.shape[3])
        parts = _Parts(query, heads, merges=plan.merges)
        for rows in plan.causal:
            q, k, v = (rows.take(x).to(query.dtype).transpose(1, 2) for x in (query, key, value))
            parts.add(rows, *attend(q, k, v, scale, causal=True))
        for group in plan.paged:
            q = group.rows.take(query)
            # With one row a head, the heads that share a KV head become the rows of one head: K and V are
            # read once, not once a query head.
            fold = group.rows.width == 1
            q = q.reshape(len(q), *heads, -1) if fold else q.transpose(1, 2)
            for i, tile in enumerate(group.tiles):
                k, v = (_gather(x, tile, len(q), query.dtype) for x in (keys, values))
                out, lse = attend(q, k, v, scale, mask=tile.mask)
                if tile.blind is not None:
                    lse = lse.masked_fill(tile.blind, -torch.inf)
                parts.add(group.rows, out, lse, folded=fold, merge=group.continues or i > 0)
        return parts.out.view(query.shape).to(query.dtype)


class _Parts:
    """Output [T, K, G, D] of a step (K KV heads, G query heads each), put together from rectangles of rows.

    Rows that attend to their keys in parts are merged by the log-sum-exp of their scores, in float32.
    """

    def __init__(self, query: torch.Tensor, heads: tuple[int, int], *, merges: bool) -> None:
        self.heads = heads
        dtype = torch.promote_types(query.dtype, torch.float32) if merges else query.dtype
        self.out = query.new_empty((len(query), *heads, query.shape[-1]), dtype=dtype)
        self.lse = query.new_empty((len(query), *heads, 1), dtype=dtype) if merges else None

    def add(
        self, rows: Rows, out: torch.Tensor, lse: torch.Tensor, *, folded: bool = False, merge: bool = False
    ) -> None:
        """out [count, H, width, D], lse [count, H, width]; folded, [count, K, G, D], [count, K, G]."""
        if not folded:
            out = self._grouped(rows, out)
        targets = rows.targets
        if self.lse is not None:
            if not folded:
                lse = self._grouped(rows, lse)
            lse = lse[..., None]
            if merge:
                before = self.lse[targets]
                lse, new = torch.logaddexp(before, lse), lse
                out = self.out[targets] * (before - lse).exp_() + out * (new - lse).exp_()
            self.lse[targets] = lse.to(self.lse.dtype)
        if isinstance(targets, slice):
            self.out[targets] = out
        else:
            self.out.index_copy_(0, targets, out.to(self.out.dtype))

    def _grouped(self, rows: Rows, x: torch.Tensor) -> torch.Tensor:
        """x [count, H, width, ...] -> [rows that are real, K, G, ...]"""
        x = rows.drop_padding(x.transpose(1, 2))
        return x.view(len(x), *self.heads, *x.shape[2:])


def _gather(cache: torch.Tensor, tile: Tile, count: int, dtype: torch.dtype) -> torch.Tensor:
    """One tile of K or V [num_blocks, block_size, K, D] as [count, K, positions, D]."""
    gathered = cache.index_select(0, tile.blocks)
    if tile.unowned is not None:
        # A mask is not enough: these may be NaN, and so would be their product with a weight of zero.
        gathered.view(-1, cache.shape[2] * cache.shape[3]).index_fill_(0, tile.unowned, 0)
    gathered = gathered.view(count, -1, *cache.shape[2:])[:, tile.start : tile.stop].transpose(1, 2)
    return gathered if gathered.dtype == dtype else gathered.to(dtype)


def _attend_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_attend_plain`; softmax in float32, scores never in memory. A row that sees nothing gets zeros."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def _attend_plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [N, H, Q, D] over k and v [N, K, L, D], and the log-sum-exp [N, H, Q] of its scores.

    Query head h reads KV head h // (H // K). `mask` [N, 1, Q or 1, L] is added to the scores; `causal` hides
    the keys after the row's own index (Q = L). Computed in float32, a few rows at a time.
    """
    count, num_heads, width, _ = q.shape
    num_kv_heads, length = k.shape[1:3]
    scaled = q.float().mul(scale).view(count, num_kv_heads, -1, width, q.shape[3])
    keys, values = k.float()[:, :, None].transpose(-1, -2), v.float()[:, :, None]
    step = max(1, SCORE_ELEMENTS // max(1, count * num_heads * length))
    outs, lses = [], []
    for start in range(0, width, step):
        part = slice(start, min(width, start + step))
        scores = scaled[..., part, :] @ keys
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if causal:
            key_index = torch.arange(length, device=q.device)
            scores = scores.masked_fill(key_index > key_index[part, None], -torch.inf)
        if mask is not None:
            scores = scores + (mask if mask.shape[2] == 1 else mask[:, :, part])[:, :, None]
        lse = scores.logsumexp(-1)
        # A row that sees nothing has a log-sum-exp of -inf: subtracting it would make NaN.
        outs.append((scores - lse.nan_to_num(neginf=0.0)[..., None]).exp() @ values)
        lses.append(lse)
    out = torch.cat(outs, 3).flatten(1, 2).to(q.dtype)
    return out, torch.cat(lses, 3).flatten(1, 2)


def _flash_is_right() -> bool:
    """Whether this build's CPU flash kernel takes grouped heads and broadcast masks: it is not documented."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2, 2))
    mask = torch.zeros(2, 1, 1, 3)
    mask[0, ..., 2:] = -torch.inf
    try:
        return all(
            torch.allclose(result, expected, atol=1e-5)
            for causal, added in ((True, None), (False, mask))
            for result, expected in zip(
                _attend_flash(q, k, v, 0.3, causal=causal, mask=added),
                _attend_plain(q, k, v, 0.3, causal=causal, mask=added),
                strict=True,
            )
        )
    except (AttributeError, RuntimeError, TypeError):
        return False
