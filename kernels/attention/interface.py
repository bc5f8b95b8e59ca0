"""What an attention backend is given and must do. Knows tensors; knows no request and no model."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hybridserve.kernels.registry import Backend

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class AttentionMetadata:
    """One step's tokens, `T` in all, of `S` sequences laid end to end. Built once a step, for all layers.

    All tensors are int64 on the device. A backend's `prepare` may return a subclass with derived tensors.
    """

    query_start: torch.Tensor  # [S + 1] first token of each sequence in the flat batch
    seq_lens: torch.Tensor  # [S] tokens in the cache after this step, query included
    block_table: torch.Tensor  # [S, B] block ids; entries past a sequence's length are 0, the null block
    slot_mapping: (
        torch.Tensor
    )  # [T] block id * block_size + offset of each token's K and V; in block 0 for padding
    query_lens: list[int]  # [S] the same facts on the host, so that no kernel has to wait for the device
    context_lens: list[
        int
    ]  # [S] tokens in the cache before this step; while one is recorded, the most that there may be


class AttentionBackend(Backend):
    """Writes the step's K and V into the paged cache, then attends over the cache through the block table."""

    head_dims: ClassVar[tuple[int, ...] | None] = None
    """Sizes of heads that it has arithmetic for; None: all."""

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Derive, once a step, whatever `forward` needs in every layer."""
        return metadata

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,  # [T, num_heads, head_dim]
        key: torch.Tensor,  # [T, num_kv_heads, head_dim]
        value: torch.Tensor,  # [T, num_kv_heads, head_dim]
        cache: torch.Tensor,  # [num_blocks, 2, block_size, num_kv_heads, head_dim], any strides; K is index 0
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of each token over its sequence so far, itself included; [T, num_heads, head_dim].

        Query head h reads KV head h // (num_heads // num_kv_heads). With a window w, token at position p
        sees positions p - w + 1 .. p. With a soft-cap c > 0, a score s (the product times `scale`) counts as
        c tanh(s / c): Gemma 2's, arXiv 2408.00118 section 2. Sequences of length 0 do not exist; padding rows
        are sequences of one token that point at block 0: their output is finite and nobody reads it.
        """
