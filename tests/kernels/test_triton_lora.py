"""Low-rank adapters in Triton's interpreter: tests of all backends again, and what only these kernels
have."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hybridserve.kernels.lora import Triton, triton_backend
from hybridserve.kernels.lora.interface import LoraPair, LoraTable, Room
from hybridserve.kernels.registry import Capabilities
from hybridserve.lora.batch import RecordedBatch
from tests.harness.triton_interpreter import poisoned, require_triton  # noqa: F401
from tests.kernels import test_lora as shared
from tests.kernels.test_lora import (  # noqa: F401 - collected again, with this module's fixtures
    DTYPES,
    ROWS,
    batch_of,
    check,
    expert_table,
    groups_of,
    make_pair,
    make_table,
    random,
    test_a_module_without_outputs_here,
    test_embedding,
    test_embedding_of_a_rank_without_rows,
    test_empty_tables_and_slots_leave_everything_alone,
    test_experts_of_nothing,
    test_float32_results_of_a_half_precision_model,
    test_gain_and_bias,
    test_l004_a_slot_forgets_what_was_in_it,
    test_memory_beyond_a_pair_is_not_read_for_its_worth,
    test_rank_activations_are_not_rounded,
    test_scale_meets_the_accumulator_in_float32,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

require_triton()

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def backend() -> Triton:
    return Triton()


@pytest.mark.slow
class TestWhatAllBackendsDo:
    """The long ones of the tests that are collected again."""

    test_a_nan_row_spoils_no_other = staticmethod(shared.test_a_nan_row_spoils_no_other)
    test_experts = staticmethod(shared.test_experts)
    test_strides = staticmethod(shared.test_strides)
    test_transposed_operands = staticmethod(shared.test_transposed_operands)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [1, 70])
def test_l007_ragged_batches_of_odd_ranks(
    backend: Triton, inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of 1 to 64, slices that some adapters leave alone, one split of the inputs and several."""
    monkeypatch.setattr(triton_backend, "SPLIT", 64)
    table = make_table(inputs, (24, 9, 133), dtype)
    x, y = random(0, len(ROWS), inputs).to(dtype), random(1, len(ROWS), 166).to(dtype)
    got = check(backend, table, ROWS, x, y)
    assert (got.float() - y.float()).abs().max() > 0.1


@pytest.mark.parametrize("num_rows", [16, 17, 50])
def test_many_rows_of_one_adapter(backend: Triton, num_rows: int) -> None:
    table = make_table(40, (50,), torch.float32)
    check(backend, table, [3] * num_rows, random(0, num_rows, 40), random(1, num_rows, 50))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(backend: Triton, dtype: torch.dtype) -> None:
    table = make_table(70, (40, 131), dtype, bias=True, gain=True)
    x, y = random(0, len(ROWS), 70).to(dtype), random(1, len(ROWS), 171).to(dtype)
    together = y.clone()
    backend.add(together, x, table, batch_of(ROWS))
    for row in (0, 5, 9, 13):
        alone = y[row : row + 1].clone()
        backend.add(alone, x[row : row + 1], table, batch_of([ROWS[row]]))
        assert torch.equal(alone[0], together[row])


def test_experts_have_the_same_bits_in_any_company(backend: Triton) -> None:
    table = expert_table(70, 45, torch.float32)
    groups = groups_of(len(ROWS))
    x, y = random(0, len(ROWS), 70), random(1, len(groups.tokens), 45)
    together = y.clone()
    backend.add_experts(together, x, groups.tokens, table, batch_of(ROWS), groups)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    shuffled = y[order].clone()
    backend.add_experts(
        shuffled, x, groups.tokens[order], table, batch_of(ROWS),
        type(groups)(groups.tokens[order], groups.experts[order]),
    )  # fmt: skip
    assert torch.equal(shuffled, together[order])


def test_l014_a_table_stays_where_it_is(backend: Triton) -> None:
    """What a captured graph reads: adapters come and go, the memory of the table does not."""
    table = make_table(20, (12,), torch.float32)
    x, y = random(0, 2, 20), random(1, 2, 12)
    check(backend, table, [1, 2], x, y)
    before = table.derived["triton"].sizes.entries.data_ptr()
    table.clear(1)
    table.put(2, (make_pair(5, 9, 20, 12),))
    check(backend, table, [1, 2], x, y)
    assert table.derived["triton"].sizes.entries.data_ptr() == before


def recorded_batch(size: int, num_slots: int) -> RecordedBatch:
    return RecordedBatch(
        torch.zeros(RecordedBatch.num_words(size, num_slots), dtype=torch.int64), size, num_slots
    )


def load(recorded: RecordedBatch, slots: Sequence[int]) -> None:
    recorded.load(torch.from_numpy(recorded.describe(np.array(slots, dtype=np.int64))))


def test_l014_a_recorded_step_adds_what_any_step_adds(backend: Triton) -> None:
    """To the bit, for all the room that there is: adapters that come later, of other ranks and slices; fewer
    rows and more. Nothing of the table is looked at when it is run, and its memory stays where it is."""
    table = LoraTable(4)
    table.room = Room(3, 40, 64, torch.float32)
    recorded = recorded_batch(8, 4)
    backend.write(table, torch.device("cpu"))
    entries = table.derived["triton"].recorded.entries
    place = entries.data_ptr()
    first = make_pair(1, 8, 20, 12)
    contents = [
        {1: (first,)},
        {1: (first,), 3: (make_pair(2, 64, 20, 9, bias=True), make_pair(3, 5, 20, 7, start=9))},
        {
            2: tuple(make_pair(5 + i, 3, 20, 4, start=4 * i) for i in range(3)),
            3: (make_pair(4, 16, 20, 16, gain=True),),
        },
    ]
    for content in contents:
        for slot in range(1, 5):
            table.clear(slot)
        for slot, pairs in content.items():
            table.put(slot, pairs)
        backend.write(table, torch.device("cpu"))
        version, table.version = table.version, -5  # nobody may want to know
        for slots in ([1, 3, 0, 2, 3, 3, 1, 0], [3], [0, 2, 0, 1], [4, 4]):
            load(recorded, slots)
            x, y = random(0, 8, 20), random(1, 8, 40)
            got = y.clone()
            backend.add(got, x, table, recorded.batch)
            table.version = version
            expected = y.clone()
            backend.add(expected, x, table, batch_of([*slots, *[0] * (8 - len(slots))]))
            table.version = -5
            assert torch.equal(got, expected)
        table.version = version
    assert table.derived["triton"].recorded.entries is entries
    assert entries.data_ptr() == place


def test_l014_recorded_experts_and_embeddings(backend: Triton) -> None:
    plain, table = expert_table(24, 15, torch.float32), expert_table(24, 15, torch.float32)
    table.room, table.derived = Room(2, 30, 64, torch.float32), {}
    words, of_words = LoraTable(7), LoraTable(7)
    of_words.room = Room(1, 12, 64, torch.float32)
    for slot, rank in ((1, 64), (2, 3)):
        for each in (words, of_words):
            each.put(slot, (LoraPair(random(slot, 30, rank), random(9, rank, 12), 0.7, gain=random(8, 12)),))
    for each in (table, of_words):
        backend.write(each, torch.device("cpu"))
    recorded = recorded_batch(6, 7)
    for slots in ([1, 2, 0, 3, 1, 4], [2, 2, 2], [0, 0, 0, 6]):
        load(recorded, slots)
        groups = groups_of(6)
        padded = batch_of([*slots, *[0] * (6 - len(slots))])
        x, y = random(0, 6, 24), random(1, len(groups.tokens), 15)
        got, expected = y.clone(), y.clone()
        backend.add_experts(got, x, groups.tokens, table, recorded.batch, groups)
        backend.add_experts(expected, x, groups.tokens, plain, padded, groups)
        assert torch.equal(got, expected)
        ids, y = torch.tensor([3, 29, -1, 0, 7, 7]), random(2, 6, 12)
        got, expected = y.clone(), y.clone()
        backend.add_embedding(got, ids, of_words, recorded.batch)
        backend.add_embedding(expected, ids, words, padded)
        assert torch.equal(got, expected)


def test_what_there_is_no_room_for_is_refused() -> None:
    table = LoraTable(1)
    table.room = Room(1, 12, 8, torch.float32)
    table.put(1, (make_pair(1, 8, 20, 12),))
    for pairs in (
        (make_pair(1, 9, 20, 12),),
        (make_pair(1, 8, 20, 13),),
        (make_pair(1, 8, 20, 4), make_pair(2, 8, 20, 4, start=4)),
        (replace(make_pair(1, 8, 20, 12), A=random(0, 161)[1:].view(8, 20)),),
    ):
        with pytest.raises(ValueError, match=r"room|multiples"):
            table.put(1, pairs)


def test_chunks_without_rows_are_padding(backend: Triton) -> None:
    table = make_table(20, (12,), torch.float32)
    x, y = random(0, 3, 20), random(1, 3, 12)
    expected = y.clone()
    backend.add(expected, x, table, batch_of([1, 0, 3]))
    batch = batch_of([1, 0, 3])
    batch.chunks = torch.cat([batch.chunks, torch.zeros(4, 3, dtype=torch.int32)])
    backend.add(y, x, table, batch)
    assert torch.equal(y, expected)


def test_needs_a_gpu() -> None:
    assert Triton.why_not(Capabilities("cpu", "float32")) == "no CUDA device"
    assert Triton.why_not(Capabilities("cuda", "float16")) is None
