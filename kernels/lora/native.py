"""What adapters add, in C, for CPUs: one call a projection, for all adapters of a step.

Knows how to hand tensors over; the arithmetic is in `native.c`. A row's result is the same bits in any
company and with any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hybridserve.kernels import native
from hybridserve.kernels.gemm.products import Products
from hybridserve.kernels.gemm.products import sources as product_sources
from hybridserve.kernels.lora.interface import CHUNK_ROWS, LoraBackend
from hybridserve.kernels.native import INT, POINTER

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hybridserve.kernels.lora.interface import LoraBatch, LoraPair, LoraTable
    from hybridserve.kernels.moe.interface import ExpertGroups
    from hybridserve.kernels.registry import Capabilities

_SOURCE = Path(__file__).resolve().with_name("native.c")

_NAME = "native"

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""The numbers that native.h gives to kinds of element."""

_TABLE = (POINTER, INT, INT, INT, POINTER)
_OPERANDS = (POINTER, INT, INT) * 2
_FUNCTIONS = {
    "lora_add": (*_TABLE, *_OPERANDS, POINTER, POINTER, POINTER, INT, POINTER, INT),
    "lora_add_experts": (
        *(*_TABLE, *_OPERANDS, POINTER, POINTER, POINTER, POINTER, INT),
        *(INT, POINTER, POINTER, POINTER, POINTER, INT),
    ),
}

_STRIP = 64
"""Outputs that native.c computes at once, at most."""

_PAIR = np.dtype(
    [(name, np.int64) for name in ("A", "B", "bias", "gain", "start", "num_outputs", "rank")]
    + [("scale", np.float64)]
)
_SLOT = np.dtype([("pairs", np.int64), ("starts", np.int64)])


class Native(LoraBackend):
    """RuntimeError where there is no library: ask `why_not` first."""

    name = _NAME
    can_be_recorded = True

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        if capabilities.device != "cpu":
            return "runs on CPUs only"
        if capabilities.dtype not in ("float32", "bfloat16"):
            return f"has no arithmetic for {capabilities.dtype}"
        return native.obstacle(*cls.sources(capabilities))

    @classmethod
    def sources(cls, capabilities: Capabilities) -> tuple[Path, ...]:
        return _SOURCE, *product_sources(replace(capabilities, weights="none"), rounds=False)

    def __init__(self) -> None:
        library = native.load(_SOURCE, _FUNCTIONS)
        self._products = Products()
        self._add = library.lora_add
        self._add_experts = library.lora_add_experts

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        table: LoraTable,
        batch: LoraBatch,
        bias: torch.Tensor | None = None,
    ) -> None:
        if not table.concerns(batch):
            return
        known = _known(table)
        x = known.as_input(x)
        bias = bias.float() if bias is not None and known.has_gain else None
        self._run(known, known.num_inputs, y, _matrix(x), bias, batch)

    def add_embedding(
        self, y: torch.Tensor, token_ids: torch.Tensor, table: LoraTable, batch: LoraBatch
    ) -> None:
        if not table.concerns(batch):
            return
        ids = (token_ids.data_ptr(), token_ids.stride(0), 0)
        self._run(_known(table), 0, y, ids, None, batch)

    def add_experts(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        x_rows: torch.Tensor | None,
        table: LoraTable,
        batch: LoraBatch,
        groups: ExpertGroups,
    ) -> None:
        if not table.concerns(batch):
            return
        known = _known(table)
        out, x = _as_output(y), known.as_input(x)
        num_pairs = len(y)
        work = torch.empty(3 * num_pairs + table.num_slots + 1, dtype=torch.int64)
        rows, chunks, counts = torch.split_with_sizes(work, (num_pairs, 2 * num_pairs, table.num_slots + 1))
        scratch, num_threads = self._scratch(known, known.num_inputs)
        self._add_experts(
            *known.arguments(known.num_inputs),
            self._products.of(known.dtype, limited=False),
            *_matrix(out),
            *_matrix(x),
            None if x_rows is None else x_rows.data_ptr(),
            groups.tokens.data_ptr(),
            groups.experts.data_ptr(),
            batch.row_slots.data_ptr(),
            num_pairs,
            table.num_slots,
            rows.data_ptr(),
            chunks.data_ptr(),
            counts.data_ptr(),
            scratch.data_ptr(),
            num_threads,
        )
        if out is not y:
            y.copy_(out)

    def _scratch(self, known: _Known, num_inputs: int) -> tuple[torch.Tensor, int]:
        """What threads keep for themselves, and how many there may be."""
        num_threads = torch.get_num_threads()
        inputs, rank = _padded(num_inputs), _padded(known.max_rank)
        return torch.empty(num_threads * (CHUNK_ROWS * (inputs + rank) + _STRIP * rank)), num_threads

    def _run(
        self,
        known: _Known,
        num_inputs: int,
        y: torch.Tensor,
        x: tuple[int, int, int],
        bias: torch.Tensor | None,
        batch: LoraBatch,
    ) -> None:
        out = _as_output(y)
        scratch, num_threads = self._scratch(known, num_inputs)
        self._add(
            *known.arguments(num_inputs),
            self._products.of(known.dtype, limited=False),
            *_matrix(out),
            *x,
            None if bias is None else bias.data_ptr(),
            *_rows(batch),
            scratch.data_ptr(),
            num_threads,
        )
        if out is not y:
            y.copy_(out)


def _known(table: LoraTable) -> _Known:
    """Called in every projection of every step; most often nothing has changed."""
    known: _Known | None = table.derived.get(_NAME)
    if known is None:
        known = table.derived[_NAME] = _Known(table)
    if known.version != table.version:
        known.refresh(table)
    return known


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """The pairs of one slot as native.c reads them: of group g those from `starts[g]` to `starts[g + 1]`."""

    pairs: npt.NDArray[np.void]
    starts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, groups: Sequence[tuple[LoraPair, ...]]) -> _Slot:
        fields = [_fields(pair) for pairs in groups for pair in pairs]
        starts = np.cumsum([0, *(len(pairs) for pairs in groups)], dtype=np.int64)
        return cls(np.array(fields, dtype=_PAIR), starts)


def _fields(pair: LoraPair) -> tuple[int | float, ...]:
    rank, num_outputs = pair.B.shape
    bias, gain = (0 if tensor is None else tensor.data_ptr() for tensor in (pair.bias, pair.gain))
    return pair.A.data_ptr(), pair.B.data_ptr(), bias, gain, pair.start, num_outputs, rank, pair.scale


class _Known:
    """A table as native.c reads it. Where an adapter came or went, its slot is written anew."""

    def __init__(self, table: LoraTable) -> None:
        self.version = 0
        self.dtype = torch.float32
        self.num_inputs = 0
        self.max_rank = 0
        self.has_gain = False
        nothing = _Slot.of([()] * table.num_groups)
        self._slots = [nothing] * (table.num_slots + 1)
        self._versions = [0] * (table.num_slots + 1)
        self.pointers = np.zeros(table.num_slots + 1, dtype=_SLOT)
        self.pointers["starts"] = nothing.starts.ctypes.data
        self._address = self.pointers.ctypes.data

    def refresh(self, table: LoraTable) -> None:
        for slot, version in enumerate(table.slot_versions):
            if version == self._versions[slot]:
                continue
            groups = [table.pairs(slot, group) for group in range(table.num_groups)]
            self._slots[slot] = written = _Slot.of(groups)
            self.pointers[slot] = written.pairs.ctypes.data, written.starts.ctypes.data
            self._versions[slot] = version
            for pair in (pair for pairs in groups for pair in pairs):
                self.dtype, self.num_inputs = pair.A.dtype, pair.A.shape[1]
        self.max_rank = max(int(slot.pairs["rank"].max(initial=0)) for slot in self._slots)
        self.has_gain = any(slot.pairs["gain"].any() for slot in self._slots)
        self.version = table.version

    def arguments(self, num_inputs: int) -> tuple[int, int, int, int]:
        """What native.c calls a table; an embedding has no inputs."""
        return self._address, num_inputs, self.max_rank, _KINDS[self.dtype]

    def as_input(self, x: torch.Tensor) -> torch.Tensor:
        """x in a dtype and with strides that native.c can read."""
        if x.dtype not in (self.dtype, torch.float32):
            x = x.to(self.dtype)
        return x if x.stride(1) == 1 else x.contiguous()


def _as_output(y: torch.Tensor) -> torch.Tensor:
    """y, or a copy whose rows native.c can write."""
    return y if y.stride(1) == 1 else y.contiguous()


def _padded(size: int) -> int:
    """Whole vectors of any machine."""
    return size + 31 & -32


def _rows(batch: LoraBatch) -> tuple[int, int, int]:
    """Addresses of rows and chunks, number of chunks; asked for once a step."""
    known: tuple[int, int, int] | None = batch.derived.get(_NAME)
    if known is None:
        known = batch.rows.data_ptr(), batch.chunks.data_ptr(), len(batch.chunks)
        batch.derived[_NAME] = known
    return known


def _matrix(x: torch.Tensor) -> tuple[int, int, int]:
    """Address, distance of rows, kind of element."""
    return x.data_ptr(), x.stride(0), _KINDS[x.dtype]
