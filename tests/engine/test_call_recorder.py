"""What a CallRecorder notes, repeated over other content, is what would have been computed; and what can't be
repeated is refused."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.engine import call_recorder
from hybridserve.engine.call_recorder import CallRecorder
from hybridserve.kernels import native
from hybridserve.kernels.pointwise.native import SOURCE, Native
from tests.harness.required import need

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, SIZE = 4, 16


@pytest.fixture(scope="module")
def norm() -> Callable[[torch.Tensor], torch.Tensor]:
    """A C kernel, which is given addresses."""
    reason = native.obstacle(SOURCE)
    need(reason is None, str(reason))
    backend = Native()
    weight = torch.linspace(0.5, 2, SIZE)
    return lambda x: backend.rms_norm(x, weight, 1e-6, (SIZE,))


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, SIZE)), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def check_repeats(compute: Callable[[torch.Tensor], Any], x: torch.Tensor | None = None) -> CallRecorder:
    """What `compute` makes of x is recorded, and repeated from nothing for others, in any order."""
    x = values(0) if x is None else x
    given, left = x.clone(), [each.clone() for each in leaves(compute(x.clone()))]

    def call() -> None:
        for place, each in zip(left, leaves(compute(given)), strict=True):
            place.copy_(each)

    recorder = CallRecorder()
    replay = recorder.record(call)
    for factor in (1, 2, -3, 1):
        new = (x * factor).to(x.dtype)
        expected = leaves(compute(new.clone()))
        given.copy_(new)
        recorder.clear()
        for each in left:
            each.zero_()
        replay()
        for mine, theirs in zip(left, expected, strict=True):
            assert torch.equal(mine, theirs)
    return recorder


def leaves(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


WEIGHT = values(1, SIZE, SIZE)
TABLE = values(2, 8, SIZE)
PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "linear": lambda x: torch.nn.functional.linear(x, WEIGHT),
    "linear_bias": lambda x: torch.nn.functional.linear(x, WEIGHT, WEIGHT[0]),
    "half": lambda x: torch.nn.functional.linear(x.bfloat16(), WEIGHT.bfloat16()),
    "batched": lambda x: torch.matmul(x.view(2, 2, SIZE), WEIGHT.expand(2, SIZE, SIZE)),
    "in_place": lambda x: (x + 1).mul_(x).add_(2, alpha=3).clamp_(min=0),
    "in_place_of_a_view": lambda x: (y := x * 2, y[1:3].add_(5), y[:, ::2].mul_(x[:, ::2]))[0],
    "copies": lambda x: (y := torch.empty_like(x), y[0].copy_(x[1]), y[1:].copy_(x[:3]))[0],
    "contiguous": lambda x: x.t().contiguous().reshape(-1) * 2,
    "reshape": lambda x: x.t().reshape(ROWS, SIZE) + x.reshape(-1).view(ROWS, SIZE),
    "to_dtype": lambda x: (x.to(torch.bfloat16), x.half().float(), x.to(torch.int64), x.to(torch.float32)),
    "softmax": lambda x: x.softmax(-1),
    "topk": lambda x: x.topk(3),
    "sort": lambda x: x.sort(stable=True, descending=True),
    "embedding": lambda x: torch.nn.functional.embedding((x[:, 0].abs() * 2).long() % 8, TABLE),
    "index": lambda x: TABLE[(x[:, 0].abs() * 2).long() % 8],
    "index_put": lambda x: TABLE.clone().index_put_(((x[:, 0].abs() * 2).long() % 8,), x[0]),
    "mask": lambda x: x.masked_fill(x < 0, 7.0),
    "put_by_mask": lambda x: (y := x * 1, y.__setitem__(x < 0, 3.0))[0],
    "where": lambda x: torch.where(x > 0, x, -x),
    "split": lambda x: [each * 2 for each in x.split([3, 5, 8], dim=1)],
    "cat": lambda x: torch.cat([x, x[:1] * 2], dim=0),
    "out": lambda x: (y := torch.empty(ROWS, SIZE), torch.mul(x, 3, out=y))[0],
    "cumsum": lambda x: x.cumsum(1),
    "made": lambda x: (
        x + torch.arange(SIZE) * torch.full((SIZE,), 0.5) + torch.zeros(SIZE) + x.new_ones(SIZE)
    ),
    "numbers": lambda x: x * torch.tensor([2.0] * SIZE) + torch.from_numpy(np.arange(SIZE, dtype=np.float32)),
    "changed_numbers": lambda x: torch.tensor([1.0] * SIZE).add_(x[0]),
    "no_elements": lambda x: torch.cat([x[:0] * 2, x]),
    "broadcast": lambda x: x[:, :1].expand(ROWS, SIZE) + x.mean(1, keepdim=True),
    "transposed_result": lambda x: (x.t() * 2) @ x,
    "silu": lambda x: torch.nn.functional.silu(x, inplace=False) * x.sigmoid(),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, ROWS, SIZE)] * 3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operations_are_repeated(name: str) -> None:
    check_repeats(PROGRAMS[name])


def test_numbers_of_the_host_are_kept_for_kernels(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A C kernel has nothing but the address of a tensor that nobody keeps."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = norm(torch.from_numpy(np.arange(ROWS * SIZE, dtype=np.float32).reshape(ROWS, SIZE)))
        gc.collect()
        return y * x

    recorder = CallRecorder()
    x, left = values(0), torch.zeros(ROWS, SIZE)
    with torch.inference_mode():
        expected = compute(x)
        replay = recorder.record(lambda: left.copy_(compute(x)))
        held = [np.full((ROWS, SIZE), seed, dtype=np.float32) for seed in range(50)]  # where it was
        recorder.clear()
        replay()
        assert torch.equal(left, expected)
        del held


def test_kernels_are_repeated(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    check_repeats(norm)
    check_repeats(lambda x: norm(norm(x.t().contiguous().t()) + x) * norm(x))


def test_packed_weights(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    need(torch.ops.mkldnn._is_mkldnn_bf16_supported(), "this CPU has no bfloat16 instructions")
    packed = torch.ops.mkldnn._reorder_linear_weight(WEIGHT.bfloat16(), 16)
    linear = torch.ops.mkldnn._linear_pointwise
    check_repeats(lambda x: linear(x.bfloat16(), packed, None, "none", [], ""))


def test_packed_weights_in_float32(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    packed = torch.ops.mkldnn._reorder_linear_weight(WEIGHT, 16)
    assert packed.is_mkldnn
    check_repeats(lambda x: torch.ops.mkldnn._linear_pointwise(norm(x), packed, None, "none", [], ""))


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x[0, 0]),
    "bool": lambda x: bool((x > 0).any()),
    "int": lambda x: int(x[0, 0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "dlpack": lambda x: np.from_dlpack(x),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "nonzero": lambda x: x.nonzero(),
    "by_mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave((x[:, 0] > 0).long(), dim=0),
}


@pytest.mark.parametrize("name", READS)
def test_what_is_read_back_is_refused(name: str) -> None:
    recorder, x = CallRecorder(), values(0)
    with pytest.raises(RuntimeError, match=r"the host reads|the shape of a result"), torch.inference_mode():
        recorder.record(lambda: READS[name](x * 2))
    assert not recorder.num_bytes


def test_other_memory_is_refused() -> None:
    x = values(0)

    def grow() -> None:
        y = torch.empty(2)
        torch.mul(x.flatten(), 2, out=y.resize_(ROWS * SIZE))

    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="other memory"):
            CallRecorder().record(grow)
        with pytest.raises(RuntimeError, match="laid out"):
            CallRecorder().record(lambda: torch.ops.mkldnn._reorder_linear_weight(x * 2, 16))


# what programs consist of: an operation, which of the living values it takes, and how many of them are let go
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["norm", "add", "view", "in_place", "linear", "half", "pair", "drop", "number"]),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    min_size=1,
    max_size=25,
)


def run_program(
    steps: list[tuple[str, int, int]], x: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Values come and go as the program says: what is left is added up, each with a weight of its own."""
    living = [x * 1]
    for kind, first, second in steps:
        one, other = living[first % len(living)], living[second % len(living)]
        match kind:
            case "norm":
                living.append(norm(one))
            case "add":
                living.append(one - other * 0.5)
            case "view":
                living.append(
                    one[:, 8:].repeat(1, 2) if second % 2 else one.view(SIZE, ROWS).view(ROWS, SIZE)
                )
            case "in_place":
                one[second % ROWS].mul_(0.75)
            case "linear":
                living.append(torch.nn.functional.linear(one, WEIGHT).div_(4))
            case "half":
                living.append(one.bfloat16()[:, : SIZE // 2].repeat(1, 2).float())
            case "pair":
                living += [each.contiguous() for each in one.sort(dim=1)][:1]
            case "number":
                living.append(norm(torch.tensor([[float(second + i) for i in range(SIZE)]] * ROWS)))
            case "drop" if len(living) > 1:
                del living[first % len(living)]
    total = torch.zeros(ROWS, SIZE)
    for index, each in enumerate(living):
        total.add_(each, alpha=1 + index)
    return total


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def check_programs(
    programs: list[list[tuple[str, int, int]]], norm: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Several recordings share memory, and are replayed in any order."""
    recorder, x = CallRecorder(), values(0)
    lefts = [torch.zeros(ROWS, SIZE) for _ in programs]

    def made(steps: list[tuple[str, int, int]], left: torch.Tensor) -> Callable[[], None]:
        return lambda: left.copy_(run_program(steps, x, norm))

    replays = [recorder.record(made(*each)) for each in zip(programs, lefts, strict=True)]
    for seed in (5, 6):
        x.copy_(values(seed))
        for steps, left, replay in reversed(list(zip(programs, lefts, replays, strict=True))):
            for block in recorder._pool.blocks:
                block.memory.fill_(0xFF)
            replay()
            assert same_bits(left, run_program(steps, x, norm))


@given(programs=st.lists(STEPS, min_size=1, max_size=3))
def test_memory_is_not_given_again_too_early(
    programs: list[list[tuple[str, int, int]]], norm: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with torch.inference_mode():
        check_programs(programs, norm)


LIVES_LONG = [
    ("norm", 0, 0),
    ("view", 1, 0),
    ("drop", 1, 0),
    ("add", 0, 0),
    ("norm", 2, 0),
    ("linear", 0, 0),
]
"""A value of which only a view is left, and others that come after it."""


def test_memory_that_is_given_too_early_is_seen(
    norm: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_recorder._Block, "is_free", True)
    with torch.inference_mode(), pytest.raises(AssertionError):
        check_programs([LIVES_LONG], norm)


@torch.inference_mode()
def test_memory_is_shared(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Within a recording, and by several: a chain of 20 kernels needs the memory of two results."""
    recorder, x, left = CallRecorder(), values(0), torch.empty(ROWS, SIZE)

    def chain() -> None:
        y = x
        for _ in range(20):
            y = norm(y)
        left.copy_(y)

    replays = [recorder.record(chain)]
    assert recorder.num_bytes == 2 * x.nbytes
    replays += [recorder.record(chain) for _ in range(3)]
    assert recorder.num_bytes == 2 * x.nbytes
    wide = values(0, 3 * ROWS, SIZE)
    sizes = [recorder.record(lambda rows=rows: norm(norm(wide[:rows]))) for rows in range(1, 3 * ROWS + 1)]
    assert recorder.num_bytes <= 2 * 2 * 2 * wide.nbytes  # powers of two, each size of them once
    del replays[1:], sizes
    assert recorder.num_bytes == 2 * x.nbytes
    replays[0]()
    assert torch.equal(left, recorded_chain(x, norm))
    del replays
    assert not recorder.num_bytes


def recorded_chain(x: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    for _ in range(20):
        x = norm(x)
    return x


@torch.inference_mode()
def test_what_is_forgotten_leaves_what_others_use(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A C kernel's arguments don't keep memory: the recording does."""
    recorder, x, left = CallRecorder(), values(0), torch.empty(ROWS, SIZE)
    first = recorder.record(lambda: left.copy_(norm(norm(x))))
    second = recorder.record(lambda: left.copy_(norm(norm(norm(x)))))
    memory = [weakref.ref(block) for block in recorder._pool.blocks]
    del first
    assert all(each() is not None for each in memory)
    held = [torch.full((ROWS, SIZE), 9.0) for _ in range(50)]
    second()
    assert torch.equal(left, norm(norm(norm(x))))
    assert all(bool((each == 9).all()) for each in held)


def noted_functions() -> list[Any]:
    libraries = [each for each in native._known().values() if not isinstance(each, str)]
    members = [each for library in libraries for each in vars(library).values()]
    return [each for each in members if isinstance(each, ctypes._CFuncPtr)]  # type: ignore[attr-defined]


@torch.inference_mode()
def test_an_error_leaves_nothing_behind(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    recorder, x = CallRecorder(), values(0)

    def fail() -> None:
        norm(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        recorder.record(fail)
    assert noted_functions()
    assert not [each for each in noted_functions() if each.errcheck is not None]
    assert not native._noters()
    assert not native._noting_lock().locked()
    assert not recorder.num_bytes
    assert norm(x).tolist()  # and may be read


@torch.inference_mode()
def test_another_threads_calls_are_not_noted(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    recorder, x, left, other = CallRecorder(), values(0), torch.empty(ROWS, SIZE), values(1)
    seen = []

    def elsewhere() -> None:
        with torch.inference_mode():
            seen.append(norm(other * 2).tolist())

    def call() -> None:
        y = norm(x)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        left.copy_(y)

    replay = recorder.record(call)
    assert len(seen) == 1
    assert seen[0] == norm(other * 2).tolist()
    assert len(replay.__self__.calls) == 2  # type: ignore[attr-defined]
    other.fill_(torch.nan)
    replay()
    assert torch.equal(left, norm(x))


def test_two_threads_record(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """And a third computes meanwhile, and none sees another's."""
    errors: list[BaseException] = []
    start = threading.Barrier(3)

    def record(seed: int) -> None:
        try:
            start.wait()
            with torch.inference_mode():
                recorder, x, left = CallRecorder(), values(seed), torch.empty(ROWS, SIZE)
                for turn in range(30):
                    replay = recorder.record(lambda: left.copy_(norm(norm(x) + x) * 2))
                    x.copy_(values(100 * seed + turn))
                    replay()
                    assert torch.equal(left, norm(norm(x) + x) * 2)
                    assert len(replay.__self__.calls) == 5
        except BaseException as error:
            errors.append(error)

    def compute() -> None:
        start.wait()
        with torch.inference_mode():
            x, expected = values(7), norm(values(7))
            for _ in range(600):
                if not torch.equal(norm(x), expected):
                    errors.append(AssertionError("other bits while others record"))

    threads = [threading.Thread(target=record, args=(seed,)) for seed in (1, 2)]
    threads.append(threading.Thread(target=compute))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
