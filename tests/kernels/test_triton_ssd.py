"""Mamba-2's scan in Triton's interpreter: tests of all backends again, and small cases of them."""

from __future__ import annotations

import pytest
import torch

from hybridserve.kernels.ssm import Reference, Triton
from tests.harness.triton_interpreter import poisoned, require_triton  # noqa: F401
from tests.kernels import test_ssd as shared
from tests.kernels.test_ssd import (  # noqa: F401 - collected again, with this module's fixtures
    Layer,
    arena,
    batch_of,
    test_empty_batch_and_sequences_without_tokens,
    test_highest_slot_of_a_huge_arena,
)

require_triton()

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def backend() -> Triton:
    return Triton()


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
