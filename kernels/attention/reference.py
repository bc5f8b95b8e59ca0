"""The plainest definition of paged attention: one token and one head at a time, in float32.

Knows nothing of speed; every other backend is tested against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybridserve.kernels.attention.interface import AttentionBackend

if TYPE_CHECKING:
    from hybridserve.kernels.attention.interface import AttentionMetadata


class Reference(AttentionBackend):
    name = "reference"

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
        block_size = cache.shape[2]
        for token, slot in enumerate(metadata.slot_mapping.tolist()):
            block, offset = divmod(slot, block_size)
            cache[block, 0, offset] = key[token]
            cache[block, 1, offset] = value[token]

        group = query.shape[1] // key.shape[1]
        out = torch.empty_like(query)
        token = 0
        for sequence, (length, end) in enumerate(
            zip(metadata.query_start.diff().tolist(), metadata.seq_lens.tolist(), strict=True)
        ):
            blocks = metadata.block_table[sequence].tolist()
            for position in range(end - length, end):
                first = 0 if window is None else max(0, position - window + 1)
                seen = [divmod(p, block_size) for p in range(first, position + 1)]
                keys = torch.stack([cache[blocks[b], 0, offset] for b, offset in seen]).float()
                values = torch.stack([cache[blocks[b], 1, offset] for b, offset in seen]).float()
                for head in range(query.shape[1]):
                    scores = keys[:, head // group] @ query[token, head].float() * scale
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    out[token, head] = torch.softmax(scores, dim=0) @ values[:, head // group]
                token += 1
        return out
