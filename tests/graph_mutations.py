"""The faults of the recipes about recorded steps, as monkeypatches. `GRAPH_MUTATIONS` maps a recipe's name to
functions that each inject one; none merely raises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hybridserve.engine import graphs
from hybridserve.engine.graphs import DecodeGraph, DecodeGraphs

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def padding_is_in(name: str, unit: int) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setitem(graphs._NULL, name, unit)

    return mutate


def padding_is_in_live_slots(patch: pytest.MonkeyPatch) -> None:
    """Of this step's first row."""
    plain = DecodeGraph.put

    def put(self: DecodeGraph, step: Any, put_array: Any) -> Any:
        patch.setitem(graphs._NULL, "state_slots", int(step.state_slots[0]))
        return plain(self, step, put_array)

    patch.setattr(DecodeGraph, "put", put)


def stale_rows_stay(patch: pytest.MonkeyPatch) -> None:
    """Rows beyond a step's own are what an earlier step of the same size left there."""
    known: dict[int, Any] = {}
    plain = graphs._host_columns

    def host_columns(size: int) -> Any:
        columns = known.setdefault(size, plain(size))
        return columns

    def put(self: DecodeGraph, step: Any, put_array: Any) -> Any:
        columns = host_columns(self.size)
        for column, name in zip(columns.numbers, graphs.COLUMNS, strict=True):
            column[: len(step.seq_lens)] = getattr(step, name)
        columns.has_state[: len(step.seq_lens)] = step.has_state
        columns.numbers[3][columns.numbers[3] == 0] = 1
        table = np.zeros((self.size, step.block_table.shape[1]), dtype=np.int32)
        table[: len(step.seq_lens)] = step.block_table
        return graphs.Inputs(put_array(columns.whole.copy()), put_array(table))

    patch.setattr(DecodeGraph, "put", put)


def pads_are_skipped(patch: pytest.MonkeyPatch) -> None:
    """Padding rows are taken for ones that have a state, whatever is in the null slot."""
    plain = DecodeGraph.load

    def load(self: DecodeGraph, inputs: Any) -> None:
        plain(self, inputs)
        self.tensors.has_state.fill_(True)

    patch.setattr(DecodeGraph, "load", load)


def recorded_beyond_memory(patch: pytest.MonkeyPatch) -> None:
    from tests.harness import engine

    plain = engine.plan_graphs

    def unclamped(config: Any, layout: Any, *more: Any) -> Any:
        plan = plain(config, layout, *more)
        from dataclasses import replace

        return replace(plan, sizes=graphs_sizes(config.scheduler.max_num_seqs), reason="")

    from hybridserve.engine.graph_plan import graph_sizes as graphs_sizes

    patch.setattr(engine, "plan_graphs", unclamped)


def block_tables_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """What was there when the recording began is read for ever."""
    patch.setattr(
        DecodeGraph, "load", lambda self, inputs: self.columns.copy_(inputs.columns) and None
    )


def results_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """Inputs come after the replay."""
    plain_load, waiting = DecodeGraph.load, []

    def replay(self: DecodeGraph) -> Any:
        self.run()
        for inputs in waiting:
            plain_load(self, inputs)
        waiting.clear()
        return self.logits

    patch.setattr(DecodeGraph, "load", lambda self, inputs: waiting.append(inputs))
    patch.setattr(DecodeGraph, "replay", replay)


def prompts_are_replayed(patch: pytest.MonkeyPatch) -> None:
    """Scoring a prompt is forgotten about."""
    plain = DecodeGraphs.find

    def find(self: DecodeGraphs, step: Any) -> Any:
        scored, step.prompt_logprobs = step.prompt_logprobs, None
        step.prompt_logprobs = None if len(step.input_ids) == len(step.seq_lens) else scored
        return plain(self, step)

    patch.setattr(DecodeGraphs, "find", find)


GRAPH_MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], ...]] = {
    "f026_padding_and_slot_0": (padding_is_in("state_slots", 1), stale_rows_stay),
    "f027_padding_and_the_lowest_slot": (padding_is_in_live_slots, block_tables_are_not_loaded),
    "f028_padding_and_who_waits": (padding_is_in_live_slots, stale_rows_stay),
    "f029_scratch_memory_is_nan": (pads_are_skipped,),
    "f033_more_sequences_allowed_than_slots": (recorded_beyond_memory,),
    "rows_come_and_go": (stale_rows_stay, results_of_the_step_before),
    "eager_and_recorded_are_the_same": (results_of_the_step_before,),
}
