"""Decode steps that are recorded once and replayed: what a recording reads, and which step may use which.

A GPU runs a small step faster than the host can tell it what to do, kernel by kernel. A step of one token a
sequence, without adapters, is the same list of kernels every time, so it is recorded for a few numbers of
sequences, over buffers that never move. What differs between two steps stands in these buffers; rows that a
step doesn't fill point at the null block and the null slot. How far sequences reach decides what attention
launches, so there are recordings for a few lengths, too.

Knows arrays and buffers; how something is recorded is a `Recorder`'s to know, what, its caller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hybridserve.engine.step_tensors import StepTensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridserve.engine.graph_plan import GraphPlan
    from hybridserve.engine.input_builder import StepInput
    from hybridserve.engine.staging import Put

_cuda: Any = torch.cuda
"""Much of it has no types."""

COLUMNS = ("input_ids", "positions", "slot_mapping", "seq_lens", "state_slots")
"""Of a step, a number a row; `has_state` follows them."""


class Recorder(ABC):
    """Records what is called, with the addresses that it reads and writes."""

    @abstractmethod
    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """What runs it again, for as long as the caller keeps it. What it allocates lies in memory that all
        recordings of a recorder share."""


class CUDARecorder(Recorder):
    """By CUDA graphs, which share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = _cuda.Stream(device)
        self._pool: Any = None

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            call()  # compiles kernels, and makes what is made once
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device meanwhile: NCCL's look after what it runs
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            call()
        self._pool = graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay


class Inputs(NamedTuple):
    """A step, padded to the rows of a recording, on its way to the buffers that it reads."""

    columns: torch.Tensor
    block_table: torch.Tensor | None  # [rows, B]; None: no layer has blocks


@dataclass(slots=True)
class DecodeGraph:
    """One recording: for up to `size` sequences that have up to `length` tokens."""

    size: int
    length: int
    tensors: StepTensors
    """What it reads."""
    columns: torch.Tensor
    """The same memory, but for the block table and what never changes."""
    recorded: Callable[[], None]
    """Never called again, but it keeps tensors that were made for it and are read whenever it is run."""
    run: Callable[[], None]
    logits: torch.Tensor | None
    """[size, V]; None: another rank has them."""

    def put(self, step: StepInput, put: Put) -> Inputs:
        """Rows beyond the step's own are of one token in the null block and the null slot, without state."""
        num_rows = len(step.seq_lens)
        columns = _padding_rows(self.size)
        for name, column in columns.numbers.items():
            column[:num_rows] = getattr(step, name)
        columns.has_state[:num_rows] = step.has_state
        table = None
        if width := min(step.block_table.shape[1], self.tensors.block_table.shape[1]):
            padded = np.zeros((self.size, width), dtype=np.int32)
            padded[:num_rows] = step.block_table[:, :width]
            table = put(padded)
        return Inputs(put(columns.whole), table)

    def load(self, inputs: Inputs) -> None:
        """Blocks past those of this step stay what they were: nobody reads past a sequence's length."""
        self.columns.copy_(inputs.columns)
        if inputs.block_table is not None:
            self.tensors.block_table[:, : inputs.block_table.shape[1]].copy_(inputs.block_table)

    def replay(self) -> torch.Tensor | None:
        self.run()
        return self.logits


class _HostColumns(NamedTuple):
    whole: np.ndarray  # [n] int64
    numbers: dict[str, np.ndarray]  # [size] each
    has_state: np.ndarray  # [size] bool


def _stride(size: int) -> int:
    """Numbers from one column to the next: each begins at a multiple of 16 bytes."""
    return size + size % 2


def _num_words(size: int) -> int:
    return len(COLUMNS) * _stride(size) + -(-size // 8)


def _padding_rows(size: int) -> _HostColumns:
    """Nothing but: token 0 at position 0 of the null block and the null slot, and no state."""
    whole = np.zeros(_num_words(size), dtype=np.int64)
    stride = _stride(size)
    numbers = {name: whole[i * stride : i * stride + size] for i, name in enumerate(COLUMNS)}
    numbers["seq_lens"][:] = 1
    return _HostColumns(whole, numbers, whole[len(COLUMNS) * stride :].view(np.bool_)[:size])


class DecodeGraphs:
    """All recordings of a rank, over the same buffers: only one of them runs at a time."""

    def __init__(self, plan: GraphPlan, block_size: int | None, device: torch.device) -> None:
        """`block_size`: None where no layer has blocks."""
        self.plan = plan
        self._device = device
        self._graphs: dict[tuple[int, int], DecodeGraph] = {}
        self._columns = torch.zeros(_num_words(plan.sizes[-1]), dtype=torch.int64, device=device)
        width = 0 if block_size is None else -(-plan.lengths[-1] // block_size)
        self._block_table = torch.zeros(plan.sizes[-1], width, dtype=torch.int64, device=device)
        self.logits: torch.Tensor | None = None
        """[largest size, V] float32, into which all of them write; None: another rank has them."""

    def record(
        self, recorder: Recorder, recordable: Callable[[StepTensors], Callable[[], torch.Tensor | None]]
    ) -> None:
        """`recordable` makes, of the tensors of a step, what is to be recorded. The largest come first: the
        others find room in their memory."""
        largest = recordable(self._tensors(self.plan.sizes[-1], self.plan.lengths[0]))()
        self.logits = None if largest is None else torch.empty_like(largest)
        for size in reversed(self.plan.sizes):
            for length in reversed(self.plan.lengths_of(size)):
                self._graphs[size, length] = self._record(size, length, recorder, recordable)

    def find(self, step: StepInput) -> DecodeGraph | None:
        """The smallest recording that the step fits into; None where it has a prompt or an adapter, scores a
        prompt, draws anything but a token for each of its first rows, or is too large."""
        num_rows = len(step.seq_lens)
        if len(step.input_ids) != num_rows or step.prompt_logprobs is not None or step.adapter_slots.any():
            return None
        if step.sampling is None or not np.array_equal(
            step.sampling.rows, np.arange(len(step.sampling.rows))
        ):
            return None
        size = next((size for size in self.plan.sizes if size >= num_rows), None)
        if size is None:
            return None
        longest = int(step.seq_lens.max())
        length = next((each for each in self.plan.lengths_of(size) if each >= longest), None)
        return None if length is None else self._graphs[size, length]

    def _record(
        self,
        size: int,
        length: int,
        recorder: Recorder,
        recordable: Callable[[StepTensors], Callable[[], torch.Tensor | None]],
    ) -> DecodeGraph:
        tensors = self._tensors(size, length)
        forward = recordable(tensors)
        target = None if self.logits is None else self.logits[:size]

        def call() -> None:
            logits = forward()
            if target is not None and logits is not None:
                target.copy_(logits)

        columns = self._columns[: _num_words(size)]
        return DecodeGraph(size, length, tensors, columns, call, recorder.record(call), target)

    def _tensors(self, size: int, length: int) -> StepTensors:
        """Views of the buffers, which hold padding rows now."""
        columns = self._columns[: _num_words(size)]
        columns.copy_(torch.from_numpy(_padding_rows(size).whole))
        stride = _stride(size)
        numbers = {name: columns[i * stride : i * stride + size] for i, name in enumerate(COLUMNS)}
        return StepTensors(
            **numbers,
            query_start=torch.arange(size + 1, device=self._device),
            block_table=self._block_table[:size],
            has_state=columns[len(COLUMNS) * stride :].view(torch.bool)[:size],
            query_lens=[1] * size,
            context_lens=[length - 1] * size,
        )
