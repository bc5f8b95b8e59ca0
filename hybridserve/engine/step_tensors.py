"""A step's tokens on the device, as kernels are told of them.

Knows tensors; does not know how they came there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridserve.kernels.attention.interface import AttentionMetadata
from hybridserve.kernels.ssm.interface import SSMMetadata

if TYPE_CHECKING:
    import torch

    from hybridserve.engine.input_builder import StepInput
    from hybridserve.engine.staging import Put


@dataclass(slots=True)
class StepTensors:
    """`T` tokens of `S` sequences laid end to end; the names are those of `StepInput`."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64
    query_start: torch.Tensor  # [S + 1] int64
    seq_lens: torch.Tensor  # [S] int64
    block_table: torch.Tensor  # [S, B] int64
    state_slots: torch.Tensor  # [S] int64
    has_state: torch.Tensor  # [S] bool
    query_lens: list[int]  # [S] on the host
    context_lens: list[int]  # [S] on the host

    @classmethod
    def of(cls, step: StepInput, put: Put) -> StepTensors:
        query_lens = np.diff(step.query_start)
        return cls(
            input_ids=put(step.input_ids),
            positions=put(step.positions),
            slot_mapping=put(step.slot_mapping),
            query_start=put(step.query_start),
            seq_lens=put(step.seq_lens),
            block_table=put(step.block_table.astype(np.int64)),
            state_slots=put(step.state_slots),
            has_state=put(step.has_state),
            query_lens=query_lens.tolist(),
            context_lens=(step.seq_lens - query_lens).tolist(),
        )

    def attention(self) -> AttentionMetadata:
        return AttentionMetadata(
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
        )

    def ssm(self) -> SSMMetadata:
        return SSMMetadata(
            query_start=self.query_start,
            state_slots=self.state_slots,
            has_state=self.has_state,
            query_lens=self.query_lens,
        )
