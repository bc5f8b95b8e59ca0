"""Decode steps that are recorded once and replayed: what a recording reads, and which step may use which.

A GPU runs a small step faster than the host can tell it what to do, kernel by kernel. A step of one token a
sequence is the same list of kernels every time, so it is recorded for a few numbers of sequences, over
buffers that never move. What differs between two steps stands in these buffers; rows that a step doesn't fill
point at the null block and the null slot, and have no adapter. How far sequences reach decides what attention
launches, so there are recordings for a few lengths, too; and those with adapters are others than those
without, which read nothing of adapters.

Knows arrays and buffers; how something is recorded is a `Recorder`'s to know, what, its caller's.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hybridserve.engine.step_tensors import StepTensors
from hybridserve.lora.batch import RecordedBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hybridserve.engine.graph_plan import GraphPlan
    from hybridserve.engine.input_builder import StepInput
    from hybridserve.engine.staging import Put
    from hybridserve.kernels.lora.interface import LoraBatch

    Recordable = Callable[[StepTensors, LoraBatch | None], Callable[[], torch.Tensor | None]]
    """Makes, of a step's tensors and adapters, what is to be recorded."""

_cuda: Any = torch.cuda
"""Much of it has no types."""

logger = logging.getLogger("hybridserve")

SEEN_BEFORE = 4
"""Steps that run call by call before one like them is recorded on demand: to record and to check it takes as
long as a few."""

SMALL_SIZE = 32
"""Of more sequences, one is recorded when as many steps have run as it has sequences."""

MOST_ON_DEMAND = 64
"""Recordings that are kept, the last used: each takes 20 KB a layer for its calls and what they are given."""

COLUMNS = ("input_ids", "positions", "slot_mapping", "seq_lens", "state_slots")
"""Of a step, a number a row; `has_state` follows them."""


class Recorder(ABC):
    """Records what is called, with the addresses that it reads and writes."""

    @abstractmethod
    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """What runs it again, for as long as the caller keeps it. What it allocates lies in memory that all
        recordings of a recorder share."""


class OnDemandRecorder(Recorder):
    """One for which not all that may be replayed is recorded before the first step, but what steps turn out
    to need; and it is seen to that a replay computes the same."""

    @abstractmethod
    def clear(self) -> None:
        """Leave nothing in the shared memory of what was computed."""


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
    adapters: torch.Tensor | None  # None: the recording has none


@dataclass(slots=True)
class DecodeGraph:
    """One recording: for up to `size` sequences that have up to `length` tokens."""

    size: int
    length: int
    tensors: StepTensors
    """What it reads."""
    columns: torch.Tensor
    """The same memory, but for the block table and what never changes."""
    adapters: RecordedBatch | None
    """None: recorded without."""
    recorded: Callable[[], None]
    """What was called then: it keeps tensors that were made for it and are read whenever `run` is called."""
    run: Callable[[], None]
    logits: torch.Tensor | None
    """[size, V]; None: another rank has them."""

    def put(self, step: StepInput, row_slots: np.ndarray | None, put: Put) -> Inputs:
        """Rows beyond the step's own are of one token in the null block and the null slot, without state and
        adapter. `row_slots`: see `lora.batch`."""
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
        adapters = None
        if self.adapters is not None:
            assert row_slots is not None
            adapters = put(self.adapters.describe(row_slots))
        return Inputs(put(columns.whole), table, adapters)

    def load(self, inputs: Inputs) -> None:
        """Blocks past those of this step stay what they were: nobody reads past a sequence's length."""
        self.columns.copy_(inputs.columns)
        if inputs.block_table is not None:
            self.tensors.block_table[:, : inputs.block_table.shape[1]].copy_(inputs.block_table)
        if self.adapters is not None and inputs.adapters is not None:
            self.adapters.load(inputs.adapters)

    def replay(self) -> torch.Tensor | None:
        self.run()
        return self.logits

    def check(self, clear: Callable[[], None], null_slab: torch.Tensor) -> None:
        """RuntimeError where a replay, from nothing, does not compute what the step does call by call, whose
        padding rows write their keys, values and states to the null slab."""
        assert self.logits is not None
        self._run_from_nothing(self.recorded, clear, null_slab)
        expected = self.logits.clone(), null_slab.clone()
        self._run_from_nothing(self.run, clear, null_slab)
        for what, theirs, mine in zip(
            ("logits", "keys, values or states"), expected, (self.logits, null_slab), strict=True
        ):
            if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
                raise RuntimeError(f"a step of {self.size} sequences, replayed, had other {what}")

    def _run_from_nothing(
        self, run: Callable[[], None], clear: Callable[[], None], null_slab: torch.Tensor
    ) -> None:
        assert self.logits is not None
        clear()
        self.logits.zero_()
        null_slab.zero_()
        run()


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


def _num_seen_before(size: int) -> int:
    """A recording saves the same few milliseconds whatever its size, and takes as long as a few of its steps;
    so the larger it is, the more of them have to be expected before it pays."""
    return SEEN_BEFORE if size <= SMALL_SIZE else size


class _Key(NamedTuple):
    has_adapters: bool
    size: int
    length: int


@dataclass(slots=True)
class _OnDemand:
    recorder: OnDemandRecorder
    recordable: Recordable
    num_threads: int = field(default_factory=torch.get_num_threads)
    """For which kernels were told to divide their work."""
    num_seen: Counter[_Key] = field(default_factory=Counter)
    has_failed: bool = False
    """What was recorded before stays, and nothing is added."""


class DecodeGraphs:
    """All recordings of a rank, over the same buffers: only one of them runs at a time."""

    def __init__(self, plan: GraphPlan, block_size: int | None, null_slab: torch.Tensor) -> None:
        """`block_size`: None where no layer has blocks. `null_slab` [bytes] uint8 has the null block and the
        null slot: padding rows leave there what nobody reads."""
        self.plan = plan
        self._null_slab = null_slab
        self._device = device = null_slab.device
        self._graphs: dict[_Key, DecodeGraph] = {}
        self._on_demand: _OnDemand | None = None
        self._columns = torch.zeros(_num_words(plan.sizes[-1]), dtype=torch.int64, device=device)
        width = 0 if block_size is None else -(-plan.lengths[-1] // block_size)
        self._block_table = torch.zeros(plan.sizes[-1], width, dtype=torch.int64, device=device)
        num_words = 0
        if plan.adapter_sizes:
            num_words = RecordedBatch.num_words(plan.adapter_sizes[-1], plan.num_adapter_slots)
        self._adapters = torch.zeros(num_words, dtype=torch.int64, device=device)
        self.logits: torch.Tensor | None = None
        """[largest size, V] float32, into which all of them write; None: another rank has them."""

    def record(self, recorder: Recorder, recordable: Recordable) -> None:
        """The largest come first, and those with adapters before those without: the others find room in their
        memory. An `OnDemandRecorder` is asked by `find`, where a step is about to run."""
        if isinstance(recorder, OnDemandRecorder):
            self._on_demand = _OnDemand(recorder, recordable)
            return
        largest = recordable(self._tensors(self.plan.sizes[-1], self.plan.lengths[0]), None)()
        self.logits = None if largest is None else torch.empty_like(largest)
        for has_adapters, sizes in ((True, self.plan.adapter_sizes), (False, self.plan.sizes)):
            for size in reversed(sizes):
                for length in reversed(self.plan.lengths_of(size)):
                    key = _Key(has_adapters, size, length)
                    self._graphs[key] = self._record(key, recorder, recordable)

    def find(self, step: StepInput, row_slots: np.ndarray | None) -> DecodeGraph | None:
        """The smallest recording that the step fits into, of those with adapters where a row has one
        (`row_slots`: see `lora.batch`); None where it has or scores a prompt, draws anything but a token for
        each of its first rows, or is too large."""
        num_rows = len(step.seq_lens)
        if len(step.input_ids) != num_rows or step.prompt_logprobs is not None:
            return None
        if step.sampling is None or not np.array_equal(
            step.sampling.rows, np.arange(len(step.sampling.rows))
        ):
            return None
        has_adapters = row_slots is not None
        sizes = self.plan.adapter_sizes if has_adapters else self.plan.sizes
        size = next((size for size in sizes if size >= num_rows), None)
        if size is None:
            return None
        longest = int(step.seq_lens.max())
        length = next((each for each in self.plan.lengths_of(size) if each >= longest), None)
        if length is None:
            return None
        key = _Key(has_adapters, size, length)
        if self._on_demand is None:
            return self._graphs.get(key)
        return self._once_it_pays(key, row_slots, self._on_demand)

    def forget_adapters(self) -> None:
        """One has come or gone. What was recorded ahead has room for it; the rest holds addresses."""
        if self._on_demand is not None:
            self._forget([key for key in self._on_demand.num_seen if key.has_adapters], self._on_demand)

    def _forget(self, keys: Iterable[_Key], demand: _OnDemand) -> None:
        for key in list(keys):
            self._graphs.pop(key, None)
            del demand.num_seen[key]

    def _once_it_pays(self, key: _Key, row_slots: np.ndarray | None, demand: _OnDemand) -> DecodeGraph | None:
        """Records what was wanted often enough, if it is then the same."""
        if demand.num_threads != torch.get_num_threads():
            self._forget(demand.num_seen, demand)
            demand.num_threads = torch.get_num_threads()
        if (graph := self._graphs.pop(key, None)) is not None:
            self._graphs[key] = graph  # the last used is the last
        if graph is not None or demand.has_failed:
            return graph
        demand.num_seen[key] += 1
        if demand.num_seen[key] <= _num_seen_before(key.size):
            return None
        if self.logits is None:
            one = demand.recordable(self._tensors(1, key.length), None)()
            assert one is not None, "steps of several ranks are recorded ahead"
            self.logits = one.new_empty(self.plan.sizes[-1], one.shape[1])
        try:
            graph = self._record(key, demand.recorder, demand.recordable)
            if graph.adapters is not None and row_slots is not None:
                graph.adapters.load(torch.from_numpy(graph.adapters.describe(row_slots)))
            graph.check(demand.recorder.clear, self._null_slab)
        except RuntimeError as error:
            logger.warning("decode steps are not recorded any more, but run call by call: %s", error)
            demand.has_failed = True
            return None
        if len(self._graphs) >= MOST_ON_DEMAND:
            self._forget([next(iter(self._graphs))], demand)
        self._graphs[key] = graph
        return graph

    def _record(self, key: _Key, recorder: Recorder, recordable: Recordable) -> DecodeGraph:
        has_adapters, size, length = key
        tensors = self._tensors(size, length)
        adapters = RecordedBatch(self._adapters, size, self.plan.num_adapter_slots) if has_adapters else None
        forward = recordable(tensors, None if adapters is None else adapters.batch)
        target = None if self.logits is None else self.logits[:size]

        def call() -> None:
            logits = forward()
            if target is not None and logits is not None:
                target.copy_(logits)

        columns = self._columns[: _num_words(size)]
        return DecodeGraph(size, length, tensors, columns, adapters, call, recorder.record(call), target)

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
