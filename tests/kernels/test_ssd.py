"""Every backend's scan of Mamba-2 against the reference: ragged batches, groups, initial states, poison."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.kernels.registry import Capabilities
from hybridserve.kernels.ssm import BACKENDS, Native, Reference
from hybridserve.kernels.ssm.interface import SSMBackend, SSMMetadata

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADS, SIZE, STATES = 8, 5, 6
NUM_SLOTS = 12
OTHERS = [backend for backend in BACKENDS if backend is not Reference]
CHUNK = "hybridserve.kernels.ssm.torch_native._BLOCK_TOKENS"


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> SSMBackend:
    return made(request.param)


@pytest.fixture
def native() -> Native:
    return made(Native)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences of a few tokens have several, and end inside of one."""
    monkeypatch.setattr(CHUNK, 4)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(backend: type[SSMBackend]) -> SSMBackend:
    if reason := backend.why_not(Capabilities("cpu", "float32")):
        pytest.skip(f"{backend.name} {reason}")
    return backend()


@dataclass
class Layer:
    """A layer's heads and its inputs for `total` tokens, cut out of merged projections as in a model."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None

    @classmethod
    def random(
        cls,
        total: int,
        seed: int = 0,
        *,
        groups: int = 2,
        heads: int = HEADS,
        size: int = SIZE,
        states: int = STATES,
        dtype: torch.dtype = torch.float32,
        optional: bool = True,
    ) -> Layer:
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        inner, shared = heads * size, groups * states
        zxdt = rand(total, 2 * inner + heads + 1).to(dtype)
        z, x, dt, _ = zxdt.split([inner, inner, heads, 1], 1)
        B, C = rand(total, 2 * shared).to(dtype).chunk(2, 1)
        return cls(
            x=x.unflatten(1, (heads, size)),
            dt=dt,
            A=-torch.rand(heads, generator=generator) - 0.01,
            B=B.unflatten(1, (groups, states)),
            C=C.unflatten(1, (groups, states)),
            D=rand(heads),
            z=z.unflatten(1, (heads, size)) if optional else None,
            dt_bias=rand(heads) - 1 if optional else None,
        )

    def tokens(self, index: torch.Tensor | slice) -> Layer:
        z = None if self.z is None else self.z[index]
        return replace(self, x=self.x[index], dt=self.dt[index], B=self.B[index], C=self.C[index], z=z)

    def run(
        self,
        backend: SSMBackend,
        state: torch.Tensor,
        batch: SSMMetadata,
        dt_limits: tuple[float, float] = (0.0, math.inf),
    ) -> torch.Tensor:
        arguments = (self.x, self.dt, self.A, self.B, self.C, self.D, self.z, self.dt_bias)
        y = backend.ssd_scan(*arguments, state, backend.prepare(batch), dt_limits=dt_limits)
        assert (y.dtype, y.shape) == (self.x.dtype, self.x.shape)
        return y


def arena(
    seed: int, heads: int = HEADS, size: int = SIZE, states: int = STATES, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[NUM_SLOTS, H, P, N]: the second of two layers in slot-major memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_SLOTS, 2, heads, size, states, generator=generator).to(dtype)[:, 1]


def copy_of(state: torch.Tensor) -> torch.Tensor:
    """With the same strides."""
    flat = torch.empty(len(state), 2, *state.shape[1:], dtype=state.dtype)
    return flat[:, 1].copy_(state)


def batch_of(lens: list[int], slots: list[int], has_state: list[bool]) -> SSMMetadata:
    starts = torch.tensor([0, *itertools.accumulate(lens)])
    return SSMMetadata(
        starts, torch.tensor(slots, dtype=torch.int64), torch.tensor(has_state, dtype=torch.bool), lens
    )


def assert_same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def check_against_reference(
    backend: SSMBackend,
    layer: Layer,
    state: torch.Tensor,
    batch: SSMMetadata,
    tolerance: float = 2e-5,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> None:
    ours, theirs = copy_of(state), copy_of(state)
    actual = layer.run(backend, ours, batch, dt_limits)
    assert_same(actual, layer.run(Reference(), theirs, batch, dt_limits), tolerance)
    assert_same(ours[1:], theirs[1:], tolerance)
    untouched = [slot for slot in range(1, NUM_SLOTS) if slot not in batch.state_slots.tolist()]
    assert torch.equal(ours[untouched], state[untouched])


def test_reference_agrees_with_a_scalar_formula() -> None:
    """One channel and one state of a head of the second group, in double precision."""
    total = 9
    layer, state = Layer.random(total, seed=3), arena(4)
    head, channel, n, group = 6, 2, 1, 1
    h = state[5, head, channel].double()
    y = layer.run(Reference(), state, batch_of([total], [5], [True]))
    assert layer.z is not None
    assert layer.dt_bias is not None
    for t in range(total):
        delta = math.log1p(math.exp(float(layer.dt[t, head]) + float(layer.dt_bias[head])))
        x, z = float(layer.x[t, head, channel]), float(layer.z[t, head, channel])
        h = math.exp(delta * float(layer.A[head])) * h + delta * x * layer.B[t, group].double()
        out = float(h @ layer.C[t, group].double()) + float(layer.D[head]) * x
        assert float(y[t, head, channel]) == pytest.approx(out * z / (1 + math.exp(-z)), rel=1e-4, abs=1e-5)
    assert float(state[5, head, channel, n]) == pytest.approx(float(h[n]), rel=1e-4)


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
@pytest.mark.parametrize(
    "lens",
    [[1], [2], [3], [1, 1, 1], [9, 1, 7, 1, 5], [1, 33, 1], [4, 4], [2, 1, 2], [65], [17, 64, 31, 1]],
    ids=str,
)
@pytest.mark.parametrize("optional", [True, False], ids=["full", "bare"])
def test_ragged_batches(backend_class: type[SSMBackend], lens: list[int], optional: bool) -> None:
    """F001, F013, F020, F023: the mix of lengths and of rows with and without state never matters."""
    layer = Layer.random(sum(lens), seed=len(lens), optional=optional)
    slots = [7, 3, 11, 1, 9][: len(lens)]
    for has_state in itertools.product([True, False], repeat=min(len(lens), 3)):
        states = (list(has_state) * 2)[: len(lens)]
        check_against_reference(made(backend_class), layer, arena(1), batch_of(lens, slots, states))


@pytest.mark.parametrize("lens", list(itertools.permutations([5, 7, 9])), ids=str)
def test_f010_sequences_that_begin_inside_a_block(backend: SSMBackend, lens: tuple[int, ...]) -> None:
    """Packed, each with a state that isn't zero, in blocks of 4: each as if it were alone, output and
    state."""
    layer, slots, before = Layer.random(sum(lens)), [3, 8, 5], arena(2)
    state = copy_of(before)
    y = layer.run(backend, state, batch_of(list(lens), slots, [True] * 3))
    for start, length, slot in zip([0, *itertools.accumulate(lens)], lens, slots, strict=False):
        alone = copy_of(before)
        mine = layer.tokens(slice(start, start + length))
        expected = mine.run(Reference(), alone, batch_of([length], [slot], [True]))
        assert_same(y[start : start + length], expected)
        assert_same(state[slot], alone[slot])
        fresh = mine.run(Reference(), copy_of(before), batch_of([length], [slot], [False]))
        assert (fresh - expected).abs().max() > 0.1, "the states matter"


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_groups(backend_class: type[SSMBackend], groups: int) -> None:
    layer = Layer.random(12, groups=groups)
    check_against_reference(
        made(backend_class), layer, arena(3), batch_of([1, 10, 1], [2, 4, 6], [True, True, False])
    )


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
@pytest.mark.parametrize(("size", "states"), [(16, 16), (64, 128), (8, 32), (3, 16), (16, 9), (33, 37)])
def test_sizes(backend_class: type[SSMBackend], size: int, states: int) -> None:
    layer = Layer.random(8, heads=4, size=size, states=states)
    memory = arena(3, heads=4, size=size, states=states)
    batch = batch_of([1, 6, 1], [2, 4, 6], [True, False, False])
    check_against_reference(made(backend_class), layer, memory, batch, 5e-5)


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
def test_limits_of_a_step(backend_class: type[SSMBackend]) -> None:
    """For one token as for many, and not for the places that pad a block."""
    layer, batch = Layer.random(16), batch_of([1, 9, 1, 5], [2, 4, 6, 8], [True, False, False, True])
    check_against_reference(made(backend_class), layer, arena(4), batch, dt_limits=(0.2, 0.6))
    free, limited = (
        layer.run(made(backend_class), arena(4), batch, limits) for limits in ((0.0, math.inf), (0.2, 0.6))
    )
    assert ((free - limited).abs().amax((1, 2)) > 1e-3).all()


def test_every_row_order(backend: SSMBackend) -> None:
    """F021: each sequence's output and state do not depend on where in the batch it stands."""
    lens, slots, states = [1, 6, 1, 3], [4, 8, 2, 6], [True, False, False, True]
    layer = Layer.random(sum(lens))
    starts = [0, *itertools.accumulate(lens)]
    memory = arena(5)
    expected = layer.run(backend, memory, batch_of(lens, slots, states))
    for order in itertools.permutations(range(4)):
        index = torch.tensor([t for i in order for t in range(starts[i], starts[i + 1])])
        state = arena(5)
        batch = batch_of([lens[i] for i in order], [slots[i] for i in order], [states[i] for i in order])
        assert_same(layer.tokens(index).run(backend, state, batch), expected[index], 1e-6)
        assert_same(state, memory, 1e-6)


def test_splits_at_every_position(backend: SSMBackend) -> None:
    """F014: a prompt of 24 in two chunks, and in 24, equals the prompt at once, in a company that changes."""
    total = 24
    layer, whole, company = Layer.random(total + 1), arena(6), torch.tensor([total])
    expected = layer.tokens(slice(0, total)).run(backend, whole, batch_of([total], [3], [False]))
    for chunks in [(k, total - k) for k in range(1, total)] + [(1,) * total, (3, 5, 1, 15)]:
        state, outputs, start = arena(7), [], 0
        for chunk in chunks:
            index = torch.cat([company, torch.arange(start, start + chunk)])
            batch = batch_of([1, chunk], [8, 3], [True, start > 0])
            outputs.append(layer.tokens(index).run(backend, state, batch)[1:])
            start += chunk
        assert_same(torch.cat(outputs), expected)
        assert_same(state[3], whole[3])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e3])
def test_what_is_not_owned_is_not_read(backend: SSMBackend, poison: float) -> None:
    """F001, F003: all slots but those with a state hold poison, also those of fresh sequences."""
    lens, slots, states = [1, 4, 1, 2, 1], [5, 9, 2, 7, 11], [True, False, False, True, True]
    layer, clean, state = Layer.random(sum(lens)), arena(8), arena(8)
    expected = layer.run(backend, clean, batch_of(lens, slots, states))
    live = [slot for slot, has in zip(slots, states, strict=True) if has]
    state[[slot for slot in range(NUM_SLOTS) if slot not in live]] = poison
    before = state.clone()
    assert torch.equal(layer.run(backend, state, batch_of(lens, slots, states)), expected)
    assert torch.equal(state[slots], clean[slots])
    foreign = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    torch.testing.assert_close(state[foreign], before[foreign], rtol=0, atol=0, equal_nan=True)


def test_scratch_memory_is_nan(backend: SSMBackend) -> None:
    """F029: nothing of what `torch.empty` returns reaches a result or a state."""
    layer, batch = Layer.random(12), batch_of([1, 7, 4], [3, 2, 0], [True, False, False])
    ours, theirs = arena(9), arena(9)
    expected = layer.run(backend, theirs, batch)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        assert torch.equal(layer.run(backend, ours, batch), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(ours[1:], theirs[1:])


def test_padding_rows(backend: SSMBackend) -> None:
    """F026-F029, F031, F032: trailing padding on the null slot changes no live row or slot; all is finite."""
    lens, slots, states = [1, 6, 1], [4, 8, 1], [True, False, True]
    num_tokens, num_pad = sum(lens), 5
    layer, alone = Layer.random(num_tokens + num_pad), arena(9)
    alone[0] = float("nan")
    padded = copy_of(alone)
    for _ in range(20):
        expected = layer.tokens(slice(0, num_tokens)).run(backend, alone, batch_of(lens, slots, states))
        batch = batch_of(lens + [1] * num_pad, slots + [0] * num_pad, states + [False] * num_pad)
        actual = layer.run(backend, padded, batch)
        assert_same(actual[:num_tokens], expected, 1e-6)
        assert_same(padded[1:], alone[1:], 1e-6)
        assert actual.isfinite().all()
        assert padded[0].isfinite().all()
        states = [True] * len(lens)


def test_empty_batch_and_sequences_without_tokens(backend: SSMBackend) -> None:
    state, before = arena(11), arena(11)
    assert Layer.random(0).run(backend, state, batch_of([], [], [])).shape == (0, HEADS, SIZE)
    assert torch.equal(state, before)
    check_against_reference(backend, Layer.random(3), state, batch_of([0, 3], [4, 5], [True, True]))
    Layer.random(3).run(backend, state, batch_of([0, 3], [4, 5], [True, True]))
    assert torch.equal(state[4], before[4])


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
def test_metadata_that_was_not_prepared(backend_class: type[SSMBackend]) -> None:
    layer, batch = Layer.random(4), batch_of([3, 1], [4, 8], [True, True])
    arguments = (layer.x, layer.dt, layer.A, layer.B, layer.C, layer.D, layer.z, layer.dt_bias)
    y = made(backend_class).ssd_scan(*arguments, arena(13), batch)
    assert_same(y, layer.run(Reference(), arena(13), batch))


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(backend_class: type[SSMBackend], dtype: torch.dtype) -> None:
    """Inputs and states in a half dtype, arithmetic in float32: at most one rounding apart."""
    layer = Layer.random(14, dtype=dtype)
    batch = batch_of([1, 9, 1, 3], [4, 8, 2, 6], [True, True, False, True])
    tolerance = 2 * torch.finfo(dtype).eps
    check_against_reference(made(backend_class), layer, arena(14, dtype=dtype), batch, tolerance)


def test_mixed_dtypes(backend: SSMBackend) -> None:
    """Arguments in float32 beside inputs in a half dtype: no part is rounded to the lesser one."""
    layer, batch = Layer.random(6), batch_of([5, 1], [3, 2], [False, True])
    layer.x = layer.x.bfloat16()
    check_against_reference(backend, layer, arena(20), batch, 2**-8)


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
def test_extreme_steps(backend_class: type[SSMBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decays that underflow and steps beyond softplus's threshold, as saturated models have them; among
    them decays of nearly one, which come out of differences of large sums."""
    monkeypatch.setattr(CHUNK, 64)
    layer = Layer.random(60)
    layer.dt = layer.dt * 40
    layer.A = layer.A * 50
    check_against_reference(
        made(backend_class), layer, arena(16), batch_of([1, 59], [3, 2], [True, True]), 1e-4
    )


def test_company_in_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of any size give the same, to rounding."""
    lens, slots = [13, 8, 8, 3, 1], [3, 2, 9, 5, 7]
    layer = Layer.random(sum(lens))
    for size in (1, 2, 3, 5, 8, 64):
        monkeypatch.setattr(CHUNK, size)
        for backend in OTHERS:
            batch = batch_of(lens, slots, [True, False, True, True, False])
            check_against_reference(made(backend), layer, arena(17), batch)


@pytest.mark.parametrize(("size", "states", "dtype"), [
    (16, 16, torch.float32), (64, 32, torch.bfloat16), (5, 9, torch.float32),
])  # fmt: skip
@pytest.mark.usefixtures("threads")
def test_bits_of_native_depend_on_nothing_but_the_sequence(
    native: Native, size: int, states: int, dtype: torch.dtype
) -> None:
    """In chunks of any size, among others, on any number of threads: the same bits."""
    total, heads = 90, 4
    layer = Layer.random(2 * total + 1, heads=heads, size=size, states=states, dtype=dtype)
    whole = arena(1, heads, size, states)
    torch.set_num_threads(1)
    expected = layer.tokens(slice(0, total)).run(native, whole, batch_of([total], [2], [False]))
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for chunks in ([1] * total, [16, 16, 1, 57], [3, 80, 7], [total]):
            state, outputs, start = arena(2, heads, size, states), [], 0
            for chunk in chunks:
                company = torch.arange(total, 2 * total - start)
                index = torch.cat([company, torch.arange(start, start + chunk), torch.tensor([2 * total])])
                batch = batch_of([len(company), chunk, 1], [1, 2, 3], [start > 9, start > 0, True])
                outputs.append(layer.tokens(index).run(native, state, batch)[len(company) : -1])
                start += chunk
            assert torch.equal(torch.cat(outputs), expected)
            assert torch.equal(state[2], whole[2])


def test_inside_and_outside_of_inference_mode(backend: SSMBackend) -> None:
    layer, batch = Layer.random(4), batch_of([3, 1], [4, 8], [True, True])
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            layer.run(backend, arena(19), batch)


def test_highest_slot_of_a_huge_arena(backend: SSMBackend, tmp_path: Path) -> None:
    """F073: slot x stride just past 2^32 elements, in a sparse file; the lowest slots stay as they are."""
    num_slots = 70
    top, size = num_slots - 1, HEADS * SIZE * STATES
    slot_stride = (1 << 32) // top + 1
    flat = torch.from_file(str(tmp_path / "arena"), shared=True, size=num_slots * slot_stride).view(
        num_slots, -1
    )
    state, small = flat[:, :size].unflatten(1, (HEADS, SIZE, STATES)), arena(18)
    for slot in (0, 1, top):
        state[slot] = small[3]
    low = flat[:2, : size + 64].clone()
    layer = Layer.random(5)
    for lens, tokens in (([4], slice(0, 4)), ([1], slice(4, 5))):
        expected = layer.tokens(tokens).run(backend, small, batch_of(lens, [3], [True]))
        assert_same(layer.tokens(tokens).run(backend, state, batch_of(lens, [top], [True])), expected)
    assert_same(state[top], small[3])
    assert torch.equal(flat[:2, : size + 64], low)
