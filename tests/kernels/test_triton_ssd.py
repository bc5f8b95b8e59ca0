"""Mamba-2's scan in Triton's interpreter: tests of all backends again, and what only these kernels have."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hybridserve.kernels.ssm import Reference, Triton, triton_ssd
from hybridserve.kernels.ssm.interface import ssd_scratch_bytes
from tests.harness.triton_interpreter import poisoned, require_triton  # noqa: F401
from tests.kernels import test_ssd as shared
from tests.kernels.test_ssd import (  # noqa: F401 - collected again, with this module's fixtures
    NUM_SLOTS,
    Layer,
    arena,
    assert_same,
    batch_of,
    check_against_reference,
    copy_of,
    test_empty_batch_and_sequences_without_tokens,
    test_highest_slot_of_a_huge_arena,
)

require_triton()

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def backend() -> Triton:
    return Triton()


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of many chunks, and chunks of two tiles, at lengths that a test can afford."""
    monkeypatch.setattr(triton_ssd, "FEW", 2)
    monkeypatch.setattr(triton_ssd, "CHUNK", 32)
    monkeypatch.setattr(triton_ssd, "TILE", 32)


@pytest.fixture
def small_tiles(short_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of inputs in a half dtype, too."""
    monkeypatch.setattr(triton_ssd, "TILE", 16)


@pytest.mark.slow
class TestWhatAllBackendsDo:
    """The long ones of the tests that are collected again."""

    test_every_row_order = staticmethod(shared.test_every_row_order)
    test_mixed_dtypes = staticmethod(shared.test_mixed_dtypes)
    test_padding_rows = staticmethod(shared.test_padding_rows)
    test_what_is_not_owned_is_not_read = staticmethod(shared.test_what_is_not_owned_is_not_read)


@pytest.mark.parametrize(
    ("groups", "dtype", "optional"),
    [(1, torch.float32, True), (2, torch.bfloat16, True), (4, torch.float32, False)],
    ids=str,
)
def test_equals_the_reference(backend: Triton, groups: int, dtype: torch.dtype, optional: bool) -> None:
    """A decode, a start and a chunk that goes on; heads of more channels than a program takes; limits."""
    within = 2e-5 if dtype == torch.float32 else 2e-2
    layer = Layer.random(5, heads=4, size=18, groups=groups, dtype=dtype, optional=optional)
    lens, slots, states = [1, 2, 2], [7, 3, 11], [True, False, True]
    ours, theirs = arena(1, heads=4, size=18), arena(1, heads=4, size=18)
    for limits in ((0.0, float("inf")), (0.1, 0.4)):
        actual = layer.run(backend, ours, batch_of(lens, slots, states), limits)
        expected = layer.run(Reference(), theirs, batch_of(lens, slots, states), limits)
        torch.testing.assert_close(actual, expected, rtol=within, atol=within)
        torch.testing.assert_close(ours, theirs, rtol=within, atol=within)


LENGTHS = [
    *([3], [33], [1, 70, 0, 2, 31]),
    *(pytest.param(lens, marks=pytest.mark.slow) for lens in ([16], [17, 32], [64, 97], [1, 65, 3], [96])),
]
"""Within a tile, over the end of a chunk, and beside sequences of few tokens; lengths that fill all."""


@pytest.mark.parametrize("lens", LENGTHS, ids=str)
@pytest.mark.parametrize("optional", [True, False], ids=["full", "bare"])
@pytest.mark.usefixtures("short_chunks")
def test_prompts_are_scanned_in_chunks(backend: Triton, lens: list[int], optional: bool) -> None:
    layer = Layer.random(sum(lens), heads=2, states=20, optional=optional)
    batch = batch_of(
        lens, [7, 3, 11, 1, 9][: len(lens)], [optional, True, True, False, not optional][: len(lens)]
    )
    check_against_reference(backend, layer, arena(1, heads=2, states=20), batch)


@pytest.mark.parametrize(
    ("groups", "states", "dtype"),
    [
        (1, 16, torch.bfloat16),
        (2, 40, torch.float16),
        *(
            pytest.param(groups, states, dtype, marks=pytest.mark.slow)
            for groups, states, dtype in [
                (8, 16, torch.float32),
                (1, 128, torch.bfloat16),
                (2, 64, torch.float16),
                (1, 256, torch.float32),
            ]
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("short_chunks")
def test_sizes_of_models(backend: Triton, groups: int, states: int, dtype: torch.dtype) -> None:
    """Heads of 64 channels, as all have; at most a rounding apart in a half dtype, and states no further."""
    layer = Layer.random(36, heads=groups, groups=groups, size=64, states=states, dtype=dtype)
    memory, batch = arena(2, heads=groups, size=64, states=states), batch_of([35, 1], [7, 3], [True, False])
    ours, theirs = copy_of(memory), copy_of(memory)
    actual = layer.run(backend, ours, batch)
    expected = layer.run(Reference(), theirs, batch)
    assert_same(actual, expected, 1e-4 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)
    assert_same(ours, theirs, 1e-4)


@pytest.mark.usefixtures("small_tiles")
def test_a_state_in_a_half_dtype(backend: Triton) -> None:
    layer = Layer.random(40, heads=2, dtype=torch.bfloat16)
    batch = batch_of([1, 39], [4, 8], [True, True])
    check_against_reference(backend, layer, arena(14, heads=2, dtype=torch.bfloat16), batch, 2**-6)


@pytest.mark.usefixtures("short_chunks")
def test_limits_of_a_prompts_steps(backend: Triton) -> None:
    """For each token, and not for the places that pad a chunk."""
    layer, batch = Layer.random(35, heads=2), batch_of([33, 2], [2, 4], [True, False])
    check_against_reference(backend, layer, arena(4, heads=2), batch, dt_limits=(0.2, 0.6))


def test_extreme_steps_of_a_prompt(backend: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decays that underflow, and beside them decays of nearly one: differences of large sums."""
    monkeypatch.setattr(triton_ssd, "CHUNK", 64)
    layer = Layer.random(59, heads=2)
    layer.dt, layer.A = layer.dt * 40, layer.A * 50
    check_against_reference(backend, layer, arena(16, heads=2), batch_of([59], [2], [True]), 1e-4)


def test_a_sequence_has_the_same_bits_in_any_company(backend: Triton) -> None:
    layer, state = Layer.random(4, heads=2), arena(5, heads=2)
    expected = layer.run(backend, state, batch_of([1, 3], [4, 8], [True, False]))
    for index, lens, slots, states in (
        ([1, 2, 3], [3], [8], [False]),
        ([0, 0], [1, 1], [4, 0], [True, False]),
    ):
        other = arena(5, heads=2)
        actual = layer.tokens(torch.tensor(index)).run(backend, other, batch_of(lens, slots, states))
        rows = len(index) - slots.count(0)
        assert torch.equal(actual[:rows], expected[index[:rows]])
        assert torch.equal(other[slots[0]], state[slots[0]])


@pytest.mark.usefixtures("short_chunks")
def test_f010_a_prompt_has_the_same_bits_in_any_company(backend: Triton) -> None:
    """Sequences that begin inside of what would be a chunk of the batch: alone, last, beside padding."""
    lens, slots, states = [5, 40, 1], [4, 8, 6], [True, True, False]
    layer, starts = Layer.random(sum(lens), heads=2), [0, *itertools.accumulate(lens)]
    memory = arena(5, heads=2)
    expected = layer.run(backend, memory, batch_of(lens, slots, states))
    for order in ([1], [2, 1, 0]):
        index = torch.tensor([t for i in order for t in range(starts[i], starts[i + 1])])
        some = [[column[i] for i in order] for column in (lens, slots, states)]
        other = arena(5, heads=2)
        batch = batch_of([*some[0], 1], [*some[1], 0], [*some[2], False])
        actual = layer.tokens(torch.cat([index, index[:1]])).run(backend, other, batch)
        assert torch.equal(actual[:-1], expected[index])
        assert torch.equal(other[some[1]], memory[some[1]])


@pytest.mark.usefixtures("short_chunks")
def test_f014_a_prompt_cut_anywhere_is_the_same_prompt(backend: Triton) -> None:
    layer, whole = Layer.random(70, heads=2), arena(6, heads=2)
    expected = layer.run(backend, whole, batch_of([70], [3], [False]))
    for chunks in ([33, 37], [1, 3, 66]):
        state, outputs, start = arena(7, heads=2), [], 0
        for chunk in chunks:
            part = layer.tokens(slice(start, start + chunk))
            outputs.append(part.run(backend, state, batch_of([chunk], [3], [start > 0])))
            start += chunk
        assert_same(torch.cat(outputs), expected)
        assert_same(state[3], whole[3])


@pytest.mark.usefixtures("short_chunks")
def test_f026_a_long_dummy_on_the_null_slot(backend: Triton) -> None:
    """Poison in slots without a state reaches nothing, and no slot but those of the batch is written."""
    layer, state = Layer.random(76, heads=2), arena(8, heads=2)
    clean = arena(8, heads=2)
    expected = layer.tokens(slice(0, 40)).run(backend, clean, batch_of([5, 35], [4, 8], [True, False]))
    live = [4]
    state[[slot for slot in range(NUM_SLOTS) if slot not in live]] = math.nan
    actual = layer.run(backend, state, batch_of([5, 35, 36], [4, 8, 0], [True, False, False]))
    assert torch.equal(actual[:40], expected)
    assert torch.equal(state[[4, 8]], clean[[4, 8]])
    assert actual.isfinite().all()
    assert state[0].isfinite().all()
    assert state[[slot for slot in range(NUM_SLOTS) if slot not in (0, 4, 8)]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_tokens_are_that_many_steps(backend: Triton, dtype: torch.dtype) -> None:
    """What verifies drafts: up to eight tokens of a sequence, bit by bit as one at a time."""
    lens, slots = [8, 1, 3], [4, 8, 6]
    layer, starts = Layer.random(sum(lens), heads=2, dtype=dtype), [0, *itertools.accumulate(lens)]
    state, single = arena(5, heads=2), arena(5, heads=2)
    actual = layer.run(backend, state, batch_of(lens, slots, [True, True, False]))
    for step in range(max(lens)):
        going = [i for i, length in enumerate(lens) if step < length]
        index = torch.tensor([starts[i] + step for i in going])
        batch = batch_of([1] * len(going), [slots[i] for i in going], [i < 2 or step > 0 for i in going])
        assert torch.equal(layer.tokens(index).run(backend, single, batch), actual[index])
    assert torch.equal(state, single)


def test_several_tokens_beside_a_prompt(backend: Triton) -> None:
    layer, alone, beside = Layer.random(13, heads=2), arena(5, heads=2), arena(5, heads=2)
    actual = layer.run(backend, beside, batch_of([3, 9, 1], [4, 8, 6], [True, True, False]))
    expected = layer.tokens(slice(0, 3)).run(backend, alone, batch_of([3], [4], [True]))
    assert torch.equal(actual[:3], expected)
    assert torch.equal(beside[4], alone[4])
    check_against_reference(backend, layer, arena(5, heads=2), batch_of([3, 9, 1], [4, 8, 6], [True] * 3))


@pytest.mark.parametrize(
    "lens", [[1] * 40, [9] * 40, [256] * 3, [257] * 3, [8000, 1, 5], [0, 600, 256]], ids=str
)
def test_states_between_chunks_are_bounded(lens: list[int]) -> None:
    """What a plan sets aside: a state for 256 tokens, however they are divided."""
    cut = triton_ssd.cut(lens, torch.device("cpu"))
    assert cut.num_inner <= sum(lens) // triton_ssd.CHUNK
    assert cut.num_few + len(cut.prompts) == len(lens)
    assert sum(chunk[2] for chunk in cut.chunks.tolist()) == sum(prompt.length for prompt in cut.prompts)
    assert cut.num_inner * 4 * 64 * 128 <= sum(lens) * ssd_scratch_bytes(1, 64, 128)
