"""Every low-rank-adapter backend against the reference, at ragged batches, odd ranks, strides and company."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hybridserve.kernels.lora import BACKENDS, Native, Reference, TorchNative, torch_native
from hybridserve.kernels.lora.interface import LoraBatch, LoraPair, LoraTable
from hybridserve.kernels.moe.interface import ExpertGroups
from hybridserve.kernels.registry import Capabilities
from hybridserve.lora.batch import make_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.kernels.lora.interface import LoraBackend

RANKS = {1: 4, 2: 1, 3: 17, 4: 8, 5: 3, 6: 64}
"""Slot -> rank. Slot 7 is always empty."""

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [3, 3, 1, 0, 2, 7, 1, 3, 0, 2, 4, 5, 6, 6]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> LoraBackend:
    if reason := request.param.why_not(Capabilities("cpu", "float32")):
        pytest.skip(f"{request.param.name}: {reason}")
    return request.param()


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch_of(slots: Sequence[int]) -> LoraBatch:
    """One row a slot."""
    batch = make_batch(np.array(slots, dtype=np.int64), torch.from_numpy)
    assert batch is not None
    return batch


def make_pair(
    seed: int,
    rank: int,
    inputs: int,
    outputs: int,
    *,
    start: int = 0,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    gain: bool = False,
) -> LoraPair:
    return LoraPair(
        A=(random(seed, rank, inputs) / inputs**0.5).to(dtype),
        B=(random(seed + 1, rank, outputs) / rank**0.5).to(dtype),
        scale=0.3 + seed % 7 / 7,
        start=start,
        bias=random(seed + 2, outputs) if bias else None,
        gain=0.5 * random(seed + 3, outputs) if gain else None,
    )


def make_table(inputs: int, sizes: Sequence[int], dtype: torch.dtype, **options: bool) -> LoraTable:
    """Slot n adapts those parts of the output (of `sizes`) whose bit is set in n; slot 7 none."""
    table = LoraTable(num_slots=7)
    for slot, rank in RANKS.items():
        pairs, start = [], 0
        for part, size in enumerate(sizes):
            if len(sizes) == 1 or slot >> part & 1:
                pairs.append(
                    make_pair(100 * slot + part, rank, inputs, size, start=start, dtype=dtype, **options)
                )
            start += size
        table.put(slot, tuple(pairs))
    return table


def check(
    backend: LoraBackend,
    table: LoraTable,
    slots: Sequence[int],
    x: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The backend's result, compared with the reference's; rows without an adapter keep their bits."""
    batch = batch_of(slots)
    want, got = y.clone(), y.clone()
    Reference().add(want, x, table, batch, bias)
    backend.add(got, x, table, batch, bias)
    tolerance = 1e-5 if y.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    none = batch.row_slots == 0
    assert torch.equal(got[none], y[none])
    return got


def test_reference_is_the_formula() -> None:
    """scale * B (A x) + bias + gain * (y - base bias), written out for one row."""
    pair = make_pair(3, 5, 11, 7, start=2, bias=True, gain=True)
    table = LoraTable(1)
    table.put(1, (pair,))
    x, y, base_bias = random(1, 1, 11), random(2, 1, 10), random(3, 10)
    want = y[0].double().clone()
    delta = pair.scale * ((pair.A.double() @ x[0].double()) @ pair.B.double())
    want[2:9] += delta + pair.bias.double() + pair.gain.double() * (y[0, 2:9] - base_bias[2:9]).double()
    Reference().add(y, x, table, batch_of([1]), base_bias)
    torch.testing.assert_close(y[0].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(40,), (24, 9, 33), (1,), (130,)])
@pytest.mark.parametrize("inputs", [16, 33, 1, 70])
def test_l007_ragged_batches_of_odd_ranks(
    backend: LoraBackend, inputs: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    table = make_table(inputs, sizes, dtype)
    x, y = random(0, len(ROWS), inputs).to(dtype), random(1, len(ROWS), sum(sizes)).to(dtype)
    got = check(backend, table, ROWS, x, y)
    assert (got.float() - y.float()).abs().max() > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gain_and_bias(backend: LoraBackend, dtype: torch.dtype, with_bias: bool) -> None:
    """DoRA multiplies what the base weight made, not the base model's bias."""
    table = make_table(20, (12, 31), dtype, bias=True, gain=True)
    table.put(
        2, (make_pair(1, 3, 20, 12, dtype=dtype, gain=True), make_pair(2, 2, 20, 9, start=12, dtype=dtype))
    )
    x, y = random(0, len(ROWS), 20).to(dtype), random(1, len(ROWS), 43).to(dtype)
    check(backend, table, ROWS, x, y, random(4, 43).to(dtype) if with_bias else None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_results_of_a_half_precision_model(backend: LoraBackend, dtype: torch.dtype) -> None:
    """Experts keep sums, and activations, in float32."""
    table = make_table(33, (21, 8), torch.bfloat16)
    x, y = random(0, len(ROWS), 33).to(dtype), random(1, len(ROWS), 29)
    want, got = y.clone(), y.clone()
    Reference().add(want, x, table, batch_of(ROWS))
    backend.add(got, x, table, batch_of(ROWS))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(backend: LoraBackend, dtype: torch.dtype) -> None:
    """dt is a part of a wider tensor; y may be, too. What lies beside them is not touched."""
    table = make_table(20, (24, 9), dtype)
    wide_x = torch.full((len(ROWS), 50), torch.nan).to(dtype)
    wide_x[:, 7:27] = random(0, len(ROWS), 20).to(dtype)
    wide_y = torch.full((len(ROWS), 64), torch.nan).to(dtype)
    wide_y[:, 3:36] = random(1, len(ROWS), 33).to(dtype)
    x, y = wide_x[:, 7:27], wide_y[:, 3:36]
    want = y.clone()
    Reference().add(want, x.contiguous(), table, batch_of(ROWS))
    backend.add(y, x, table, batch_of(ROWS))
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(y, want, rtol=tolerance, atol=tolerance)
    assert wide_y[:, :3].isnan().all()
    assert wide_y[:, 36:].isnan().all()


def test_transposed_operands(backend: LoraBackend) -> None:
    table = make_table(20, (33,), torch.float32)
    x, y = random(0, 20, len(ROWS)).t(), random(1, 33, len(ROWS)).t()
    check(backend, table, ROWS, x, y.contiguous())
    want = y.contiguous()
    backend.add(want, x, table, batch_of(ROWS))
    backend.add(y, x, table, batch_of(ROWS))
    torch.testing.assert_close(y, want)


def test_empty_tables_and_slots_leave_everything_alone(backend: LoraBackend) -> None:
    y = random(1, 4, 9)
    before = y.clone()
    x = torch.full((4, 5), torch.nan)
    backend.add(y, x, LoraTable(7), batch_of([1, 2, 0, 3]))
    backend.add_embedding(y, torch.zeros(4, dtype=torch.int64), LoraTable(7), batch_of([1, 2, 0, 3]))
    table = LoraTable(7)
    table.put(5, (make_pair(1, 2, 5, 9),))
    backend.add(y, x, table, batch_of([1, 7, 0, 3]))
    assert torch.equal(y, before)


def test_a_module_without_outputs_here(backend: LoraBackend) -> None:
    """A rank may hold none of a vocabulary's rows."""
    table = LoraTable(1)
    table.put(1, (LoraPair(random(1, 3, 5), torch.empty(3, 0), 1.0),))
    y = random(2, 2, 4)
    before = y.clone()
    backend.add(y, random(3, 2, 5), table, batch_of([1, 1]))
    assert torch.equal(y, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 17, 50, 100])
def test_many_rows_of_one_adapter(backend: LoraBackend, num_rows: int, dtype: torch.dtype) -> None:
    """Prefill: rows that stand together, and some that do not."""
    table = make_table(40, (30, 11), dtype)
    for slots in ([1] * num_rows, [1, 0, 3] * num_rows):
        x, y = random(0, len(slots), 40).to(dtype), random(1, len(slots), 41).to(dtype)
        check(backend, table, slots, x, y)


def test_l009_order_of_ids_against_starts(backend: LoraBackend) -> None:
    """Slots filled in another order than they appear in."""
    table = LoraTable(3)
    for slot in (2, 1, 3):
        table.put(slot, (make_pair(slot, 2 * slot, 12, 10),))
    slots = [1, 2, 3, 2, 3, 2, 3, 3]
    x, y = random(0, 8, 12), random(1, 8, 10)
    got = check(backend, table, slots, x, y)
    for row, slot in enumerate(slots):
        (pair,) = table.pairs(slot)
        want = y[row] + pair.scale * ((pair.A @ x[row]) @ pair.B)
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_l004_a_slot_forgets_what_was_in_it(backend: LoraBackend, dtype: torch.dtype) -> None:
    """The same table, its slots filled and emptied: always what a fresh table would say."""
    table = LoraTable(2)
    slots = [1, 2, 0, 1]
    batch = batch_of(slots)
    x, y = random(0, 4, 16).to(dtype), random(1, 4, 12).to(dtype)
    high, low = make_pair(1, 8, 16, 12, dtype=dtype), make_pair(2, 2, 16, 5, start=3, dtype=dtype)
    for content in ({1: high}, {1: low}, {1: high, 2: low}, {1: low, 2: high}, {2: high}, {1: high}):
        fresh = LoraTable(2)
        for slot in (1, 2):
            table.clear(slot)
            if slot in content:
                table.put(slot, (content[slot],))
                fresh.put(slot, (content[slot],))
        got, want = y.clone(), y.clone()
        backend.add(got, x, table, batch)
        Reference().add(want, x, fresh, batch)
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_a_table_says_what_it_holds_and_what_changed() -> None:
    table = LoraTable(3, num_groups=2)
    batches = {slot: batch_of([slot]) for slot in (1, 2, 3)}

    def concerned() -> list[int]:
        return [slot for slot, batch in batches.items() if table.concerns(batch)]

    assert concerned() == []
    pair = make_pair(1, 2, 4, 4)
    table.put(2, (pair,), 1)
    table.put(3, (pair,), 0)
    table.put(3, (pair,), 1)
    assert concerned() == [2, 3]
    assert table.concerns(batch_of([1, 0, 3]))
    versions = list(table.slot_versions)
    table.clear(3)
    assert [table.pairs(3, group) for group in (0, 1)] == [(), ()]
    assert [slot for slot in range(4) if table.slot_versions[slot] != versions[slot]] == [3]
    assert concerned() == [2]
    table.put(2, (), 1)
    assert concerned() == []
    for slot, group in ((0, 0), (4, 0), (1, 2)):
        with pytest.raises(IndexError, match=f"slot {slot} of 3"):
            table.put(slot, (pair,), group)
    with pytest.raises(IndexError, match="slot 0 of 3"):
        table.clear(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_beyond_a_pair_is_not_read_for_its_worth(backend: LoraBackend, dtype: torch.dtype) -> None:
    """Pairs of one adapter lie end to end in one buffer, and what lies behind may be another's, or poison."""
    for rank, inputs, outputs in ((3, 5, 7), (1, 1, 1), (5, 33, 6), (17, 9, 4)):
        flat = torch.full((2 * rank * (inputs + outputs) + 64,), torch.nan).to(dtype)
        A = flat[: rank * inputs].view(rank, inputs)
        B = flat[rank * inputs + 8 :][: outputs * rank].view(rank, outputs)
        A.copy_(random(1, rank, inputs))
        B.copy_(random(2, rank, outputs))
        table = LoraTable(1)
        table.put(1, (LoraPair(A, B, 0.5),))
        x, y = random(3, 3, inputs).to(dtype), random(4, 3, outputs).to(dtype)
        assert check(backend, table, [1, 0, 1], x, y).isfinite().all()


def test_a_nan_row_spoils_no_other(backend: LoraBackend) -> None:
    table = make_table(20, (33,), torch.float32)
    x, y = random(0, len(ROWS), 20), random(1, len(ROWS), 33)
    batch = batch_of(ROWS)
    want = y.clone()
    backend.add(want, x, table, batch)
    x[5] = torch.nan
    backend.add(y, x, table, batch)
    others = [row for row in range(len(ROWS)) if row != 5]
    torch.testing.assert_close(y[others], want[others])


def test_scale_meets_the_accumulator_in_float32(backend: LoraBackend) -> None:
    """A scale that bfloat16 can't hold: multiplied into B it would be rounded."""
    scale = 1 + 2**-9 + 2**-12
    table = LoraTable(1)
    A, B = torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    table.put(1, (LoraPair(A, B, scale),))
    y = torch.zeros(2, 1)
    backend.add(y, torch.ones(2, 1, dtype=torch.bfloat16), table, batch_of([1, 1]))
    assert y.tolist() == [[scale], [scale]]


def test_rank_activations_are_not_rounded(backend: LoraBackend) -> None:
    """The sum 256 + 1 is 256 in bfloat16; here 1 must come out of their difference."""
    table = LoraTable(1)
    A = torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.bfloat16)
    table.put(1, (LoraPair(A, torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16), 1.0),))
    y = torch.zeros(1, 1, dtype=torch.bfloat16)
    backend.add(y, torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16), table, batch_of([1]))
    assert y.item() == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(backend: LoraBackend, dtype: torch.dtype) -> None:
    """A token of -1 is another rank's: it adds gain and bias only."""
    vocab, hidden = 13, 20
    table = LoraTable(7)
    for slot, rank in RANKS.items():
        A = random(slot, vocab, rank).to(dtype)
        B = random(slot + 50, rank, hidden).to(dtype)
        gain = random(slot + 70, hidden) if slot % 2 else None
        table.put(slot, (LoraPair(A, B, 0.7, 0, random(slot, hidden) if slot == 3 else None, gain),))
    ids = torch.tensor([12, -1, 0, 5, 3, 3, 12, 1, -1, 2, 7, -1, 0, 4])
    y = random(1, len(ROWS), hidden).to(dtype)
    batch = batch_of(ROWS)
    want, got = y.clone(), y.clone()
    Reference().add_embedding(want, ids, table, batch)
    backend.add_embedding(got, ids, table, batch)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, want, rtol=tolerance, atol=10 * tolerance)
    row, slot = 0, ROWS[0]
    (pair,) = table.pairs(slot)
    plain = y[row].float() * (1 + pair.gain) + 0.7 * (pair.A[12].float() @ pair.B.float()) + pair.bias
    torch.testing.assert_close(want[row].float(), plain, rtol=0.02, atol=0.1)


def test_embedding_of_a_rank_without_rows(backend: LoraBackend) -> None:
    table = LoraTable(1)
    table.put(1, (LoraPair(torch.empty(0, 3), random(1, 3, 6), 1.0, gain=torch.ones(6)),))
    y = torch.zeros(2, 6)
    backend.add_embedding(y, torch.tensor([-1, -1]), table, batch_of([1, 0]))
    assert torch.equal(y, torch.zeros(2, 6))


NUM_EXPERTS = 4


def expert_table(inputs: int, outputs: int, dtype: torch.dtype) -> LoraTable:
    """Slot n adapts all experts but expert n % 4; slot 2 in two parts."""
    table = LoraTable(7, NUM_EXPERTS)
    for slot, rank in RANKS.items():
        for expert in range(NUM_EXPERTS):
            if expert == slot % NUM_EXPERTS:
                continue
            half = outputs // 2
            seed = 10 * slot + expert
            if slot == 2:
                pairs = (
                    make_pair(seed, rank, inputs, half, dtype=dtype),
                    make_pair(seed + 5, rank, inputs, outputs - half, start=half, dtype=dtype),
                )
            else:
                pairs = (make_pair(seed, rank, inputs, outputs, dtype=dtype),)
            table.put(slot, pairs, expert)
    return table


def groups_of(num_tokens: int, top_k: int = 2) -> ExpertGroups:
    """Random routing that leaves the last expert out."""
    ids = torch.stack(
        [torch.randperm(3, generator=torch.Generator().manual_seed(t))[:top_k] for t in range(num_tokens)]
    )
    order = ids.flatten().argsort(stable=True)
    return ExpertGroups(order // top_k, ids.flatten()[order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_token", [True, False])
def test_experts(backend: LoraBackend, by_token: bool, dtype: torch.dtype) -> None:
    table = expert_table(20, 27, dtype)
    batch = batch_of(ROWS)
    groups = groups_of(len(ROWS))
    num_pairs = len(groups.tokens)
    x = random(0, len(ROWS) if by_token else num_pairs, 20).to(dtype)
    x_rows = groups.tokens if by_token else None
    y = random(1, num_pairs, 27)
    want, got = y.clone(), y.clone()
    Reference().add_experts(want, x, x_rows, table, batch, groups)
    backend.add_experts(got, x, x_rows, table, batch, groups)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    unchanged = torch.tensor(
        [
            not table.pairs(ROWS[t], e)
            for t, e in zip(groups.tokens.tolist(), groups.experts.tolist(), strict=True)
        ]
    )
    assert torch.equal(got[unchanged], y[unchanged])
    assert (got[~unchanged] != y[~unchanged]).any(1).all()
    # the same batch meets other groups in the next layer
    again = groups_of(len(ROWS))._replace(experts=groups.experts.flip(0).sort().values)
    want, got = y.clone(), y.clone()
    Reference().add_experts(want, x, x_rows, table, batch, again)
    backend.add_experts(got, x, x_rows, table, batch, again)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_experts_of_nothing(backend: LoraBackend) -> None:
    table = expert_table(20, 27, torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    backend.add_experts(
        torch.empty(0, 27), torch.empty(0, 20), None, table, batch_of([1]), ExpertGroups(none, none)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_of_an_expert(backend: LoraBackend, dtype: torch.dtype) -> None:
    slots = [1, 1, 0, 3] * 30
    table, batch, groups = expert_table(24, 30, dtype), batch_of(slots), groups_of(len(slots))
    x, y = random(0, len(slots), 24).to(dtype), random(1, len(groups.tokens), 30)
    want, got = y.clone(), y.clone()
    Reference().add_experts(want, x, groups.tokens, table, batch, groups)
    backend.add_experts(got, x, groups.tokens, table, batch, groups)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_native_gives_the_same_bits_in_any_company(dtype: torch.dtype, num_threads: int) -> None:
    backend = native()
    table = make_table(70, (40, 131), dtype, bias=True, gain=True)
    slots = ROWS * 5
    x, y = random(0, len(slots), 70).to(dtype), random(1, len(slots), 171).to(dtype)
    together = y.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        backend.add(together, x, table, batch_of(slots))
    finally:
        torch.set_num_threads(before)
    for row, slot in enumerate(slots):
        if slot:
            alone = y[row : row + 1].clone()
            backend.add(alone, x[row : row + 1], table, batch_of([slot]))
            assert torch.equal(alone[0], together[row]), f"row {row}, slot {slot}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_experts_give_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    backend = native()
    table = expert_table(70, 45, dtype)
    slots = ROWS * 3
    groups = groups_of(len(slots))
    x, y = random(0, len(slots), 70).to(dtype), random(1, len(groups.tokens), 45).to(dtype)
    together = y.clone()
    backend.add_experts(together, x, groups.tokens, table, batch_of(slots), groups)
    for pair, (token, expert) in enumerate(zip(groups.tokens.tolist(), groups.experts.tolist(), strict=True)):
        if slots[token]:
            alone = y[pair : pair + 1].clone()
            mine = ExpertGroups(torch.zeros(1, dtype=torch.int64), torch.tensor([expert]))
            backend.add_experts(
                alone, x[token : token + 1], mine.tokens, table, batch_of([slots[token]]), mine
            )
            assert torch.equal(alone[0], together[pair])


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_costs_torch_no_more_than_rounding(dtype: torch.dtype) -> None:
    """Its products have other shapes in other company, so the bits may differ; a bound keeps them close."""
    table, slots = make_table(70, (40, 131), dtype), ROWS * 5
    x, y = random(0, len(slots), 70).to(dtype), random(1, len(slots), 171)  # sums are seen in float32
    together = y.clone()
    TorchNative().add(together, x, table, batch_of(slots))
    for row, slot in enumerate(slots):
        alone = y[row : row + 1].clone()
        if slot:
            TorchNative().add(alone, x[row : row + 1], table, batch_of([slot]))
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)


def native() -> Native:
    if (reason := Native.why_not(Capabilities("cpu", "bfloat16"))) is not None:
        pytest.skip(reason)
    return Native()


def test_packs_are_built_once_for_a_set_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision and few rows; again for other adapters or content, not for other rows of the same."""
    built = []
    plain = torch_native._make_pack
    monkeypatch.setattr(torch_native, "_make_pack", lambda *a: built.append(1) or plain(*a))
    table = make_table(20, (12, 31), torch.bfloat16)
    backend = TorchNative()
    for slots in ([1, 2, 3], [3, 2, 1, 1], [0, 1, 3, 2]):
        x, y = random(0, len(slots), 20).bfloat16(), random(1, len(slots), 43).bfloat16()
        check(backend, table, slots, x, y)
    assert len(built) == 1
    table.put(1, table.pairs(3))
    check(backend, table, [1, 2, 3], x[:3], y[:3])
    check(backend, table, [1, 2], x[:2], y[:2])
    assert len(built) == 3
    assert len([name for name in table.derived if name == TorchNative.name]) == 1
