"""Mamba-1's recurrences in Triton's interpreter: tests of all backends again, and what only these kernels
have."""

from __future__ import annotations

import itertools

import pytest
import torch

from hybridserve.kernels.registry import Capabilities
from hybridserve.kernels.ssm import Triton, triton_backend
from tests.harness.triton_interpreter import poisoned, require_triton  # noqa: F401
from tests.kernels import test_ssm as shared
from tests.kernels.test_ssm import (  # noqa: F401 - collected again, with this module's fixtures
    Arena,
    Layer,
    assert_same,
    batch_of,
    check_against_reference,
    test_a_sequence_without_tokens_keeps_its_state,
    test_empty_batch,
    test_highest_slot_of_a_huge_arena,
)

require_triton()

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def backend() -> Triton:
    return Triton()


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of many chunks, at lengths that a test can afford."""
    monkeypatch.setattr(triton_backend, "SCAN_TOKENS", 5)
    monkeypatch.setattr(triton_backend, "CONV_TOKENS", 4)


@pytest.mark.slow
class TestWhatAllBackendsDo:
    """The long ones of the tests that are collected again."""

    test_left_padding_and_a_long_dummy = staticmethod(shared.test_left_padding_and_a_long_dummy)
    test_mixed_dtypes = staticmethod(shared.test_mixed_dtypes)
    test_state_width_is_one_less_than_the_kernel = staticmethod(
        shared.test_state_width_is_one_less_than_the_kernel
    )
    test_what_is_not_owned_is_not_read = staticmethod(shared.test_what_is_not_owned_is_not_read)


@pytest.mark.parametrize(
    "lens",
    [[1], [3, 1, 2], *(pytest.param(lens, marks=pytest.mark.slow) for lens in ([9, 1, 7, 1, 5], [1, 33, 1]))],
    ids=str,
)
@pytest.mark.parametrize("optional", [True, False], ids=["full", "bare"])
def test_ragged_batches(backend: Triton, lens: list[int], optional: bool) -> None:
    layer = Layer.random(sum(lens), seed=len(lens), optional=optional)
    slots = [7, 3, 11, 1, 9][: len(lens)]
    for states in itertools.islice(itertools.product([True, False], repeat=len(lens)), 0, None, 5):
        check_against_reference(backend, layer, Arena.random(1), batch_of(lens, slots, list(states)))


@pytest.mark.parametrize(
    "lens", [[5], [6], [1, 11], pytest.param([1, 23, 10], marks=pytest.mark.slow)], ids=str
)
@pytest.mark.usefixtures("short_chunks")
def test_long_sequences_are_scanned_in_chunks(backend: Triton, lens: list[int]) -> None:
    layer = Layer.random(sum(lens))
    for has_state in (True, False):
        batch = batch_of(lens, [7, 3, 11][: len(lens)], [has_state] * len(lens))
        check_against_reference(backend, layer, Arena.random(1), batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("short_chunks")
def test_half_precision(backend: Triton, dtype: torch.dtype) -> None:
    lens = [1, 7, 2]
    layer, arena = Layer.random(10, dtype=dtype), Arena.random(1, dtype=dtype)
    check_against_reference(backend, layer, arena, batch_of(lens, [7, 3, 11], [True] * 3), 2e-2)


@pytest.mark.usefixtures("short_chunks")
def test_a_sequence_has_the_same_bits_in_any_company(backend: Triton) -> None:
    """F021, F031: output and state, alone, in any order and beside padding."""
    lens, slots, states = [1, 7, 1, 3], [4, 8, 2, 6], [True, False, False, True]
    layer, starts = Layer.random(sum(lens)), [0, *itertools.accumulate(lens)]
    arena = Arena.random(5)
    expected = layer.run(backend, arena, batch_of(lens, slots, states))
    for order in ([3, 2, 1, 0], [1], [0, 2]):
        index = torch.tensor([t for i in order for t in range(starts[i], starts[i + 1])])
        other = Arena.random(5)
        facts = ([column[i] for i in order] for column in (lens, slots, states))
        some_lens, some_slots, some_states = facts
        batch = batch_of([*some_lens, 1], [*some_slots, 0], [*some_states, False])
        actual = layer.tokens(torch.cat([index, index[:1]])).run(backend, other, batch)
        assert torch.equal(actual[:-1], expected[index])
        assert torch.equal(other.buffer[some_slots], arena.buffer[some_slots])


@pytest.mark.usefixtures("short_chunks")
def test_f014_a_prompt_cut_anywhere_is_the_same_prompt(backend: Triton) -> None:
    layer, whole = Layer.random(12), Arena.random(6)
    expected = layer.run(backend, whole, batch_of([12], [3], [False]))
    for chunks in ([1, 11], [6, 1, 5]):
        arena, outputs, start = Arena.random(7), [], 0
        for chunk in chunks:
            part = layer.tokens(slice(start, start + chunk))
            outputs.append(part.run(backend, arena, batch_of([chunk], [3], [start > 0])))
            start += chunk
        assert_same(torch.cat(outputs), expected)
        assert_same(arena.conv[3], whole.conv[3])
        assert_same(arena.ssm[3], whole.ssm[3])


def test_padding_rows(backend: Triton) -> None:
    """F026, F029: many steps with padding on a poisoned null slot: all stays finite, live slots are
    live's."""
    lens, slots, states = [1, 2, 1], [4, 8, 1], [True, False, True]
    layer, alone = Layer.random(6), Arena.random(9)
    alone.buffer[0] = float("nan")
    padded = alone.clone()
    for _ in range(2):
        expected = layer.tokens(slice(0, 4)).run(backend, alone, batch_of(lens, slots, states))
        batch = batch_of([*lens, 1, 1], [*slots, 0, 0], [*states, False, False])
        actual = layer.run(backend, padded, batch)
        assert torch.equal(actual[:4], expected)
        assert torch.equal(padded.buffer[1:], alone.buffer[1:])
        assert actual.isfinite().all()
        assert padded.conv[0].isfinite().all()
        assert padded.ssm[0].isfinite().all()
        states = [True] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_tokens_are_that_many_steps(backend: Triton, dtype: torch.dtype) -> None:
    """What verifies drafts: up to eight tokens of a sequence, bit by bit as one at a time; convolution and
    scan."""
    lens, slots = [8, 1, 3], [4, 8, 6]
    layer, starts = Layer.random(sum(lens), dtype=dtype), [0, *itertools.accumulate(lens)]
    arena, single = Arena.random(5), Arena.random(5)
    actual = layer.run(backend, arena, batch_of(lens, slots, [True, True, False]))
    for step in range(max(lens)):
        going = [i for i, length in enumerate(lens) if step < length]
        index = torch.tensor([starts[i] + step for i in going])
        batch = batch_of([1] * len(going), [slots[i] for i in going], [i < 2 or step > 0 for i in going])
        assert torch.equal(layer.tokens(index).run(backend, single, batch), actual[index])
    assert torch.equal(arena.buffer, single.buffer)


def test_extreme_steps(backend: Triton) -> None:
    """Steps so small that their sum with 1 is 1, and so large that a state is forgotten."""
    layer = Layer.random(7)
    layer.dt = torch.linspace(-30, 60, 7)[:, None].expand(-1, 6).contiguous()
    check_against_reference(backend, layer, Arena.random(1), batch_of([7], [3], [True]))


def test_metadata_must_be_prepared(backend: Triton) -> None:
    layer, arena = Layer.random(1), Arena.random(0)
    with pytest.raises(TypeError, match="prepare"):
        backend.causal_conv1d(layer.x, layer.conv_weight, None, arena.conv, batch_of([1], [1], [True]))


def test_needs_a_gpu() -> None:
    assert Triton.why_not(Capabilities("cpu", "float32")) == "no CUDA device"
    assert Triton.why_not(Capabilities("cuda", "float16")) is None
