"""Low-rank adapters in Triton's interpreter: tests of all backends again, and what only these kernels
have."""

from __future__ import annotations

import pytest
import torch

from hybridserve.kernels.lora import Triton, triton_backend
from hybridserve.kernels.registry import Capabilities
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
    before = table.derived["triton"].entries.data_ptr()
    table.clear(1)
    table.put(2, (make_pair(5, 9, 20, 12),))
    check(backend, table, [1, 2], x, y)
    assert table.derived["triton"].entries.data_ptr() == before


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
