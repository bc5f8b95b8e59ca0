"""The faults of the recipes about recorded steps, as monkeypatches. `GRAPH_MUTATIONS` maps a recipe's name to
functions that each inject one; none merely raises."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from hybridserve.engine import graphs
from hybridserve.engine.graph_plan import LARGEST_SIZE, graph_sizes
from hybridserve.engine.graphs import DecodeGraph, DecodeGraphs
from hybridserve.engine.worker import Worker
from hybridserve.layers.lora import LoraRegistry
from hybridserve.lora.batch import RecordedBatch
from tests.harness import engine as harness
from tests.mutations import MUTATIONS

if TYPE_CHECKING:
    from collections.abc import Callable


MAX_LOADED = 2
"""Adapters that the recipe about them may have on the device."""


def padding_is_in_slot_1(patch: pytest.MonkeyPatch) -> None:
    plain = graphs._padding_rows

    def padding_rows(size: int) -> Any:
        rows = plain(size)
        rows.numbers["state_slots"][:] = 1
        return rows

    patch.setattr(graphs, "_padding_rows", padding_rows)


def padding_is_in_a_live_slot(patch: pytest.MonkeyPatch) -> None:
    """That of the step's first row."""
    plain = DecodeGraph.load

    def load(self: DecodeGraph, inputs: Any) -> None:
        plain(self, inputs)
        slots = self.tensors.state_slots
        slots[slots == 0] = slots[0]

    patch.setattr(DecodeGraph, "load", load)


def rows_of_an_earlier_step_stay(patch: pytest.MonkeyPatch) -> None:
    """Beyond a step's own, those of the last larger one."""
    patch.setattr(graphs, "_padding_rows", cache(graphs._padding_rows))


def block_tables_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """What was there when the recording was made is read for ever."""

    def load(self: DecodeGraph, inputs: Any) -> None:
        self.columns.copy_(inputs.columns)

    patch.setattr(DecodeGraph, "load", load)


def inputs_come_a_step_late(patch: pytest.MonkeyPatch) -> None:
    """As where a recording reads tensors that a step brings anew, and it still has those of the last one."""
    plain = DecodeGraph.load
    before: dict[int, Any] = {}

    def load(self: DecodeGraph, inputs: Any) -> None:
        mine = type(inputs)(*(None if each is None else each.clone() for each in inputs))
        plain(self, before.get(self.size, inputs))
        before[self.size] = mine

    patch.setattr(DecodeGraph, "load", load)


def more_is_recorded_than_memory_holds(patch: pytest.MonkeyPatch) -> None:
    plain = harness.plan_graphs

    def unclamped(config: Any, *more: Any) -> Any:
        return replace(plain(config, *more), sizes=graph_sizes(config.scheduler.max_num_seqs), reason="")

    patch.setattr(harness, "plan_graphs", unclamped)


def adapters_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """What was recorded without adapters is replayed with some."""
    plain = DecodeGraphs.find

    def find(self: DecodeGraphs, step: Any, row_slots: Any) -> Any:
        return plain(self, step, None)

    patch.setattr(DecodeGraphs, "find", find)


def padding_keeps_its_adapters(patch: pytest.MonkeyPatch) -> None:
    """Rows that a step doesn't fill have the adapters of the last one that did."""
    plain = RecordedBatch.describe
    kept = np.zeros(LARGEST_SIZE, dtype=np.int64)

    def describe(self: RecordedBatch, row_slots: Any) -> Any:
        kept[: len(row_slots)] = row_slots
        packed = plain(self, row_slots)
        packed[: self._size] = kept[: self._size]
        return packed

    patch.setattr(RecordedBatch, "describe", describe)


def adapters_come_a_step_late(patch: pytest.MonkeyPatch) -> None:
    """What was recorded reads the tensors of an earlier step, as where each step brings fresh ones."""
    plain = RecordedBatch.load
    before: dict[int, Any] = {}

    def load(self: RecordedBatch, described: Any) -> None:
        mine = described.clone()
        plain(self, before.get(self._size, described))
        before[self._size] = mine

    patch.setattr(RecordedBatch, "load", load)


def adapters_are_fresh_tensors(patch: pytest.MonkeyPatch) -> None:
    """Each step brings its own, and the stand-in, as a GPU would not, reads them."""
    plain = RecordedBatch.load

    def load(self: RecordedBatch, described: Any) -> None:
        fresh = RecordedBatch(torch.empty_like(described), self._size, MAX_LOADED)
        plain(fresh, described)
        for name in ("row_slots", "rows", "chunks"):
            setattr(self.batch, name, getattr(fresh.batch, name))

    patch.setattr(RecordedBatch, "load", load)


def chunks_of_an_earlier_step_stay(patch: pytest.MonkeyPatch) -> None:
    """Beyond a step's own."""
    plain = RecordedBatch.describe
    before: dict[int, Any] = {}

    def describe(self: RecordedBatch, row_slots: Any) -> Any:
        packed = plain(self, row_slots)
        mine = packed[2 * self._stride :].view(np.int32)[: 3 * self._num_chunks].reshape(-1, 3)
        kept = before.setdefault(self._size, np.zeros_like(mine))
        used = mine[:, 2] > 0
        kept[used] = mine[used]
        mine[:] = kept
        return packed

    patch.setattr(RecordedBatch, "describe", describe)


def tables_are_not_written(patch: pytest.MonkeyPatch) -> None:
    """When an adapter has come or gone: kernel by kernel, each call would look."""
    plain = Worker.place_adapter

    def place(self: Worker, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(LoraRegistry, "write", lambda self, device: None)
            plain(self, *arguments)

    patch.setattr(Worker, "place_adapter", place)


ADAPTER_MUTATIONS = (
    adapters_are_ignored,
    padding_keeps_its_adapters,
    adapters_come_a_step_late,
    adapters_are_fresh_tensors,
    chunks_of_an_earlier_step_stay,
    tables_are_not_written,
)
"""Of the recipe about adapters."""

GRAPH_MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], ...]] = {
    "f026_padding_and_slot_0": (padding_is_in_slot_1,),
    "f027_padding_and_the_lowest_slot": (padding_is_in_a_live_slot, block_tables_are_not_loaded),
    "f028_padding_and_who_waits": (padding_is_in_a_live_slot, inputs_come_a_step_late),
    "f029_scratch_memory_is_nan": (MUTATIONS["f029_scratch_memory_is_nan"],),
    "f033_more_sequences_allowed_than_slots": (more_is_recorded_than_memory_holds,),
    "rows_come_and_go": (rows_of_an_earlier_step_stay, inputs_come_a_step_late),
    "eager_and_recorded_are_the_same": (inputs_come_a_step_late,),
}
