"""Memory of weights: whose it is, where it begins, when it goes."""

from __future__ import annotations

import ctypes
import itertools
import weakref

import pytest
import torch

from hybridserve.kernels import huge_pages
from hybridserve.kernels.huge_pages import PAGE, WeightMemory, advise

SIZES = [(1,), (3, 5), (0,), (7, 1000), (1000, 1000), (64,), (16 * PAGE - 1,), (4, 5, 6), (17 * PAGE,)]


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_weights_are_apart_and_aligned(dtype: torch.dtype) -> None:
    memory = WeightMemory()
    weights = [memory.empty(shape, dtype) for shape in SIZES]
    for weight, shape in zip(weights, SIZES, strict=True):
        assert (weight.shape, weight.dtype) == (shape, dtype)
        assert weight.is_contiguous()
        assert weight.data_ptr() % 64 == 0
    for one, other in itertools.pairwise(sorted(span(weight) for weight in weights if weight.numel())):
        assert one[1] <= other[0]


def test_small_weights_share_pages() -> None:
    memory = WeightMemory()
    one, other = memory.empty((100,), torch.int8), memory.empty((100,), torch.int8)
    assert one.data_ptr() % PAGE == 0
    assert other.data_ptr() == one.data_ptr() + 128


def test_a_block_goes_with_its_last_tensor() -> None:
    """Also while the memory that handed it out goes on."""
    memory = WeightMemory()
    first, last = memory.empty((4 * PAGE,), torch.int8), memory.empty((5,), torch.float32)
    block = weakref.ref(memory._block)
    memory.empty((13 * PAGE,), torch.int8)
    assert memory._block is not block()
    del first
    assert block() is not None
    del last
    assert block() is None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What the system is asked for: where, how many bytes, what."""
    asked: list[tuple[int, int, int]] = []

    class System:
        def madvise(self, begin: ctypes.c_void_p, size: ctypes.c_size_t, advice: ctypes.c_int) -> int:
            asked.append((begin.value or 0, size.value, advice.value))
            return -1  # refused

    monkeypatch.setattr(ctypes, "CDLL", lambda name: System())
    monkeypatch.setattr(huge_pages, "_ADVICE", 14)
    return asked


def test_only_whole_pages_of_a_tensor_are_advised(calls: list[tuple[int, int, int]]) -> None:
    tensor = torch.empty(3 * PAGE, dtype=torch.int8)
    first = -tensor.data_ptr() % PAGE
    assert advise(tensor) is tensor
    ((begin, size, advice),) = calls
    assert (begin, advice) == (tensor.data_ptr() + first, 14)
    assert begin % PAGE == size % PAGE == 0
    assert 2 * PAGE <= size <= tensor.numel() - first
    calls.clear()
    advise(tensor[first + 1 :][: PAGE - 1])
    advise(tensor[: 2 * PAGE].view(2, PAGE).t())
    advise(torch.empty(PAGE * 4, device="meta"))
    advise(torch.empty(0))
    assert calls == []


def test_blocks_are_advised_before_they_are_handed_out(calls: list[tuple[int, int, int]]) -> None:
    memory = WeightMemory()
    one = memory.empty((PAGE,), torch.int8)
    assert calls == [(one.data_ptr(), 16 * PAGE, 14)]
    memory.empty((PAGE,), torch.int8)
    assert len(calls) == 1
    large = memory.empty((20 * PAGE,), torch.int8)
    begin, size, _ = calls[1]
    assert large.data_ptr() <= begin < begin + size <= large.data_ptr() + large.numel()


def test_a_system_without_advice_is_not_asked(
    calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_ADVICE", None)
    weight = WeightMemory().empty((PAGE, 2), torch.float32)
    weight.fill_(1)
    assert (weight == 1).all()
    assert calls == []
