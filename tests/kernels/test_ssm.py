"""Every state-space backend against the reference: ragged batches, initial states, slots, padding, poison."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from hybridserve.kernels.registry import Capabilities
from hybridserve.kernels.ssm import BACKENDS, Native, Reference
from hybridserve.kernels.ssm.interface import SSMBackend, SSMMetadata

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_CHANNELS = 6
NUM_STATES = 4
NUM_SLOTS = 12
OTHERS = [backend for backend in BACKENDS if backend is not Reference]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> SSMBackend:
    return made(request.param)


@pytest.fixture
def native() -> Native:
    return made(Native)


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
class Arena:
    """Slot-major memory of two layers, as the engine has it: the views under test are strided."""

    buffer: torch.Tensor
    conv: torch.Tensor  # [NUM_SLOTS, C, W - 1]
    ssm: torch.Tensor  # [NUM_SLOTS, C, N]

    @classmethod
    def random(cls, seed: int, width: int = 4, dtype: torch.dtype = torch.float32) -> Arena:
        conv_size, ssm_size = NUM_CHANNELS * (width - 1), NUM_CHANNELS * NUM_STATES
        generator = torch.Generator().manual_seed(seed)
        buffer = torch.randn(NUM_SLOTS, 2 * (conv_size + ssm_size) + 5, generator=generator).to(dtype)
        return cls._over(buffer, width)

    @classmethod
    def _over(cls, buffer: torch.Tensor, width: int) -> Arena:
        conv_size, ssm_size = NUM_CHANNELS * (width - 1), NUM_CHANNELS * NUM_STATES
        second = conv_size + ssm_size
        conv = buffer[:, second : second + conv_size].view(NUM_SLOTS, NUM_CHANNELS, width - 1)
        ssm = buffer[:, second + conv_size : second + conv_size + ssm_size].view(
            NUM_SLOTS, NUM_CHANNELS, NUM_STATES
        )
        return cls(buffer, conv, ssm)

    def clone(self) -> Arena:
        return self._over(self.buffer.clone(), self.conv.shape[2] + 1)


@dataclass
class Layer:
    """A layer's weights and its inputs for `total` tokens."""

    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor | None
    x: torch.Tensor
    dt: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    z: torch.Tensor | None

    @classmethod
    def random(
        cls,
        total: int,
        seed: int = 0,
        width: int = 4,
        dtype: torch.dtype = torch.float32,
        optional: bool = True,
    ) -> Layer:
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        xz = rand(total, 2 * NUM_CHANNELS).to(dtype)  # as a merged projection leaves them: strided halves
        bc = rand(total, 2 * NUM_STATES + 3).to(dtype)
        return cls(
            conv_weight=rand(NUM_CHANNELS, width).to(dtype),
            conv_bias=rand(NUM_CHANNELS).to(dtype) if optional else None,
            A=-torch.rand(NUM_CHANNELS, NUM_STATES, generator=generator) - 0.01,
            D=rand(NUM_CHANNELS),
            dt_bias=rand(NUM_CHANNELS) - 1 if optional else None,
            x=xz[:, :NUM_CHANNELS],
            dt=rand(total, NUM_CHANNELS).to(dtype),
            B=bc[:, 3 : 3 + NUM_STATES],
            C=bc[:, 3 + NUM_STATES :],
            z=xz[:, NUM_CHANNELS:] if optional else None,
        )

    def tokens(self, index: torch.Tensor | slice) -> Layer:
        z = None if self.z is None else self.z[index]
        return Layer(
            self.conv_weight, self.conv_bias, self.A, self.D, self.dt_bias,
            self.x[index], self.dt[index], self.B[index], self.C[index], z,
        )  # fmt: skip

    def run(self, backend: SSMBackend, arena: Arena, batch: SSMMetadata) -> torch.Tensor:
        """Convolution, then scan of what it gives; [T, 2 C], both outputs side by side."""
        batch = backend.prepare(batch)
        u = backend.causal_conv1d(self.x, self.conv_weight, self.conv_bias, arena.conv, batch)
        assert u.dtype == self.x.dtype
        assert u.shape == self.x.shape
        y = backend.selective_scan(
            u, self.dt, self.A, self.B, self.C, self.D, self.z, self.dt_bias, arena.ssm, batch
        )
        assert y.dtype == u.dtype
        return torch.cat([u, y], dim=1)


def batch_of(lens: list[int], slots: list[int], has_state: list[bool]) -> SSMMetadata:
    starts = torch.tensor([0, *itertools.accumulate(lens)])
    return SSMMetadata(
        starts, torch.tensor(slots, dtype=torch.int64), torch.tensor(has_state, dtype=torch.bool), lens
    )


def assert_same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def check_against_reference(
    backend: SSMBackend, layer: Layer, arena: Arena, batch: SSMMetadata, tolerance: float = 2e-5
) -> None:
    ours, theirs = arena.clone(), arena.clone()
    actual = layer.run(backend, ours, batch)
    expected = layer.run(Reference(), theirs, batch)
    assert_same(actual, expected, tolerance)
    live = [slot for slot in range(NUM_SLOTS) if slot != 0]
    assert_same(ours.buffer[live], theirs.buffer[live], tolerance)
    untouched = [slot for slot in live if slot not in batch.state_slots.tolist()]
    assert torch.equal(ours.buffer[untouched], arena.buffer[untouched])


def test_reference_agrees_with_an_independent_formula() -> None:
    """The reference itself, against F.conv1d and against scalar arithmetic for one channel and state."""
    total = 9
    layer = Layer.random(total, seed=3)
    arena = Arena.random(4)
    past = arena.conv[5].clone()
    h = float(arena.ssm[5, 2, 1])
    batch = batch_of([total], [5], [True])
    u = Reference().causal_conv1d(layer.x, layer.conv_weight, layer.conv_bias, arena.conv, batch)
    padded = torch.cat([past, layer.x.t()], dim=1).unsqueeze(0)
    expected = F.conv1d(padded, layer.conv_weight.unsqueeze(1), layer.conv_bias, groups=NUM_CHANNELS)
    assert_same(u, F.silu(expected[0].t()))
    assert torch.equal(arena.conv[5], layer.x[-3:].t())
    Reference().selective_scan(
        u, layer.dt, layer.A, layer.B, layer.C, layer.D, layer.z, layer.dt_bias, arena.ssm, batch
    )
    for t in range(total):
        delta = float(torch.log1p(torch.exp(layer.dt[t, 2] + layer.dt_bias[2])))
        h = h * float(torch.exp(delta * layer.A[2, 1])) + delta * float(layer.B[t, 1] * u[t, 2])
    assert float(arena.ssm[5, 2, 1]) == pytest.approx(h, rel=1e-4)


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
@pytest.mark.parametrize(
    "lens",
    [
        [1],
        [2],
        [3],
        [1, 1, 1],
        [5, 7, 9],
        [9, 1, 7, 1, 5],
        [1, 33, 1],
        [3, 3],
        [2, 1, 2],
        [65],
        [17, 64, 31, 1],
    ],
    ids=str,
)
@pytest.mark.parametrize("optional", [True, False], ids=["full", "bare"])
def test_ragged_batches(backend_class: type[SSMBackend], lens: list[int], optional: bool) -> None:
    """F001, F010, F013, F020, F023: the mix of lengths and of rows with and without state never matters."""
    layer = Layer.random(sum(lens), seed=len(lens), optional=optional)
    slots = [7, 3, 11, 1, 9][: len(lens)]
    for has_state in itertools.product([True, False], repeat=min(len(lens), 3)):
        states = (list(has_state) * 2)[: len(lens)]
        check_against_reference(made(backend_class), layer, Arena.random(1), batch_of(lens, slots, states))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_state_width_is_one_less_than_the_kernel(backend: SSMBackend, width: int) -> None:
    """F011, F019: prompts of length 1 .. width + 1 in a batch, then four decodes."""
    lens = list(range(1, width + 2))
    slots = [9, 2, 7, 4, 5][: len(lens)]
    arena = Arena.random(2, width)
    layer = Layer.random(sum(lens), seed=1, width=width)
    for has_state in (True, False):
        check_against_reference(backend, layer, arena, batch_of(lens, slots, [has_state] * len(lens)))
    layer.run(backend, arena, batch_of(lens, slots, [False] * len(lens)))
    for seed in range(4):
        layer = Layer.random(len(lens), seed=seed, width=width)
        batch = batch_of([1] * len(lens), slots, [True] * len(lens))
        check_against_reference(backend, layer, arena, batch)
        layer.run(backend, arena, batch)


def test_every_row_order(backend: SSMBackend) -> None:
    """F021: each sequence's output and state do not depend on where in the batch it stands."""
    lens, slots, states = [1, 6, 1, 3], [4, 8, 2, 6], [True, False, False, True]
    layer = Layer.random(sum(lens))
    starts = [0, *itertools.accumulate(lens)]
    expected_arena = Arena.random(5)
    expected = layer.run(backend, expected_arena, batch_of(lens, slots, states))
    for order in itertools.permutations(range(4)):
        index = torch.tensor([t for i in order for t in range(starts[i], starts[i + 1])])
        arena = Arena.random(5)
        batch = batch_of([lens[i] for i in order], [slots[i] for i in order], [states[i] for i in order])
        actual = layer.tokens(index).run(backend, arena, batch)
        assert_same(actual, expected[index], 1e-6)
        assert_same(arena.buffer, expected_arena.buffer, 1e-6)


def test_splits_at_every_position(backend: SSMBackend) -> None:
    """F014: a prompt of 24 in two chunks, and in 24, equals the prompt at once, in a company that changes."""
    total = 24
    layer = Layer.random(total + 1)
    whole = Arena.random(6)
    expected = layer.tokens(slice(0, total)).run(backend, whole, batch_of([total], [3], [False]))
    company = torch.tensor([total])
    for chunks in [(k, total - k) for k in range(1, total)] + [(1,) * total, (3, 5, 1, 15)]:
        arena = Arena.random(7)
        outputs = []
        start = 0
        for chunk in chunks:
            index = torch.cat([company, torch.arange(start, start + chunk)])
            batch = batch_of([1, chunk], [8, 3], [True, start > 0])
            outputs.append(layer.tokens(index).run(backend, arena, batch)[1:])
            start += chunk
        assert_same(torch.cat(outputs), expected)
        assert_same(arena.conv[3], whole.conv[3])
        assert_same(arena.ssm[3], whole.ssm[3])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e3])
def test_what_is_not_owned_is_not_read(backend: SSMBackend, poison: float) -> None:
    """F001, F003: all slots but those with a state hold poison, also those of fresh sequences."""
    lens, slots, states = [1, 4, 1, 2, 1], [5, 9, 2, 7, 11], [True, False, False, True, True]
    layer = Layer.random(sum(lens))
    clean = Arena.random(8)
    expected = layer.run(backend, clean, batch_of(lens, slots, states))
    arena = Arena.random(8)
    live = torch.tensor([slot for slot, state in zip(slots, states, strict=True) if state])
    keep = torch.zeros(NUM_SLOTS, dtype=torch.bool).index_fill_(0, live, True)
    arena.buffer[~keep] = poison
    before = arena.buffer.clone()
    actual = layer.run(backend, arena, batch_of(lens, slots, states))
    assert torch.equal(actual, expected)
    owned = torch.tensor(slots)
    assert torch.equal(arena.conv[owned], clean.conv[owned])
    assert torch.equal(arena.ssm[owned], clean.ssm[owned])
    foreign = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    torch.testing.assert_close(arena.buffer[foreign], before[foreign], rtol=0, atol=0, equal_nan=True)


def test_padding_rows(backend: SSMBackend) -> None:
    """F026-F029, F031, F032: trailing padding on the null slot changes no live row or slot; all is finite."""
    lens, slots, states = [1, 6, 1], [4, 8, 1], [True, False, True]
    num_tokens, num_pad = sum(lens), 5
    layer = Layer.random(num_tokens + num_pad)
    alone = Arena.random(9)
    alone.buffer[0] = float("nan")
    padded = alone.clone()
    for _ in range(50):
        expected = layer.tokens(slice(0, num_tokens)).run(backend, alone, batch_of(lens, slots, states))
        batch = batch_of(lens + [1] * num_pad, slots + [0] * num_pad, states + [False] * num_pad)
        actual = layer.run(backend, padded, batch)
        assert_same(actual[:num_tokens], expected, 1e-6)
        assert_same(padded.buffer[1:], alone.buffer[1:], 1e-6)
        assert actual.isfinite().all()
        assert padded.conv[0].isfinite().all()
        assert padded.ssm[0].isfinite().all()
        states = [True] * len(lens)


def test_left_padding_and_a_long_dummy(backend: SSMBackend) -> None:
    """F031, F032: a dummy sequence of any length, in front or behind, is only company."""
    lens, slots, states = [3, 1], [4, 8], [True, True]
    layer = Layer.random(3 + 1 + 6)
    alone = Arena.random(10)
    expected = layer.tokens(slice(0, 4)).run(backend, alone, batch_of(lens, slots, states))
    orders = {
        "behind": (torch.arange(10), [3, 1, 6], [4, 8, 0], [True, True, False], slice(0, 4)),
        "in front": (torch.arange(10).roll(6), [6, 3, 1], [0, 4, 8], [False, True, True], slice(6, 10)),
    }  # fmt: skip
    for index, some_lens, some_slots, some_states, live in orders.values():
        arena = Arena.random(10)
        actual = layer.tokens(index).run(backend, arena, batch_of(some_lens, some_slots, some_states))
        assert_same(actual[live], expected, 1e-6)
        assert_same(arena.buffer[1:], alone.buffer[1:], 1e-6)


def test_empty_batch(backend: SSMBackend) -> None:
    arena = Arena.random(11)
    before = arena.buffer.clone()
    assert Layer.random(0).run(backend, arena, batch_of([], [], [])).shape == (0, 2 * NUM_CHANNELS)
    assert torch.equal(arena.buffer, before)


def test_a_sequence_without_tokens_keeps_its_state(backend: SSMBackend) -> None:
    arena = Arena.random(12)
    before = arena.buffer.clone()
    layer = Layer.random(3)
    check_against_reference(backend, layer, arena, batch_of([0, 3], [4, 5], [True, True]))
    layer.run(backend, arena, batch_of([0, 3], [4, 5], [True, True]))
    assert torch.equal(arena.buffer[4], before[4])


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
def test_metadata_that_was_not_prepared(backend_class: type[SSMBackend]) -> None:
    lens, slots, states = [3, 1], [4, 8], [True, True]
    layer, arena, batch = Layer.random(4), Arena.random(13), batch_of(lens, slots, states)
    backend = made(backend_class)
    actual = backend.causal_conv1d(layer.x, layer.conv_weight, None, arena.conv, batch, silu=False)
    expected = Reference().causal_conv1d(
        layer.x, layer.conv_weight, None, Arena.random(13).conv, batch, silu=False
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(backend_class: type[SSMBackend], dtype: torch.dtype) -> None:
    """Inputs and both states in a half dtype, arithmetic in float32: at most one rounding apart.

    The scan reads the convolution's rounded output, so a difference of one unit there may show once more.
    """
    lens, slots, states = [1, 9, 1, 3], [4, 8, 2, 6], [True, True, False, True]
    layer = Layer.random(sum(lens), dtype=dtype)
    arena = Arena.random(14, dtype=dtype)
    check_against_reference(
        made(backend_class), layer, arena, batch_of(lens, slots, states), 4 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
def test_bfloat16_stays_near_float32(backend_class: type[SSMBackend]) -> None:
    """Against the same weights and inputs in float32; only outputs are rounded (8 bits), not states."""
    lens, slots, states = [1, 40, 1], [4, 8, 2], [True, True, False]
    half = Layer.random(sum(lens), dtype=torch.bfloat16)
    full = Layer(**{k: None if v is None else v.float() for k, v in vars(half).items()})
    ours, theirs = Arena.random(15), Arena.random(15)
    batch = batch_of(lens, slots, states)
    backend = made(backend_class)
    u = backend.causal_conv1d(half.x, half.conv_weight, half.conv_bias, ours.conv, batch)
    assert_same(
        u.float(),
        Reference().causal_conv1d(full.x, full.conv_weight, full.conv_bias, theirs.conv, batch),
        2**-8,
    )
    assert_same(ours.conv, theirs.conv, 0)
    y = backend.selective_scan(
        u, half.dt, half.A, half.B, half.C, half.D, half.z, half.dt_bias, ours.ssm, batch
    )
    expected = Reference().selective_scan(
        u.float(), full.dt, full.A, full.B, full.C, full.D, full.z, full.dt_bias, theirs.ssm, batch
    )
    assert_same(y.float(), expected, 2**-8)
    assert_same(ours.ssm, theirs.ssm)


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
def test_extreme_steps(backend_class: type[SSMBackend]) -> None:
    """Decays that underflow and steps beyond softplus's threshold, as saturated models have them."""
    layer = Layer.random(30)
    layer.dt = layer.dt * 40
    layer.A = layer.A * 50
    arena = Arena.random(16)
    check_against_reference(made(backend_class), layer, arena, batch_of([1, 29], [3, 2], [True, True]), 1e-4)


@pytest.mark.parametrize("backend_class", OTHERS, ids=lambda b: b.name)
def test_scan_in_blocks(backend_class: type[SSMBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks may end anywhere, also where sequences end; a block too small for one step holds one."""
    lens, slots = [13, 8, 8, 3, 1], [3, 2, 9, 5, 7]
    layer = Layer.random(sum(lens))
    module = "hybridserve.kernels.ssm.torch_native"
    for tokens, segment in itertools.product((1, 2, 5, 16), (1, 7, 100)):
        monkeypatch.setattr(f"{module}._BLOCK_ELEMENTS", tokens * NUM_CHANNELS * NUM_STATES)
        monkeypatch.setattr(f"{module}._SEGMENT_ELEMENTS", segment * NUM_CHANNELS)
        check_against_reference(
            made(backend_class),
            layer,
            Arena.random(17),
            batch_of(lens, slots, [True, False, True, True, False]),
        )


@pytest.mark.parametrize(("channels", "states"), [(6, 4), (24, 16), (150, 16), (16, 8), (33, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("threads")
def test_bits_of_native_depend_on_nothing_but_the_sequence(
    native: Native, channels: int, states: int, dtype: torch.dtype
) -> None:
    """In chunks of any size, among others, in any order and on any number of threads: the same bits."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    total = 90
    weight, bias, dt_bias = rand(channels, 4).to(dtype), rand(channels).to(dtype), rand(channels) - 1
    A, D = -torch.rand(channels, states, generator=generator), rand(channels)
    x, z = rand(3 * total, 2 * channels).to(dtype).chunk(2, 1)
    dt, (B, C) = rand(3 * total, channels).to(dtype), rand(3 * total, 2 * states).to(dtype).chunk(2, 1)

    def run(conv: torch.Tensor, ssm: torch.Tensor, tokens: torch.Tensor, batch: SSMMetadata) -> torch.Tensor:
        u = native.causal_conv1d(x[tokens], weight, bias, conv, batch)
        y = native.selective_scan(u, dt[tokens], A, B[tokens], C[tokens], D, z[tokens], dt_bias, ssm, batch)
        return torch.cat([u, y], 1)

    def memory() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((5, channels, 3), 7.0).to(dtype), torch.full((5, channels, states), 7.0)

    torch.set_num_threads(1)
    whole = memory()
    expected = run(*whole, torch.arange(total), batch_of([total], [2], [False]))
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for chunks in ([1] * total, [16, 16, 1, 57], [3, 80, 7], [total]):
            ours, outputs, start = memory(), [], 0
            for chunk in chunks:
                company = torch.arange(total, 2 * total - start)
                tokens = torch.cat([company, torch.arange(start, start + chunk), torch.tensor([2 * total])])
                lens = [len(company), chunk, 1]
                result = run(*ours, tokens, batch_of(lens, [1, 2, 3], [start > 9, start > 0, True]))
                outputs.append(result[len(company) : -1])
                start += chunk
            assert torch.equal(torch.cat(outputs), expected)
            assert torch.equal(ours[0][2], whole[0][2])
            assert torch.equal(ours[1][2], whole[1][2])


def test_softplus_and_silu_at_extremes(native: Native) -> None:
    """A step from zero with u = B = C = 1 is (softplus(dt) + D) silu(z): neither overflows."""
    dt = torch.tensor([-1e4, -104, -90, -87, -30, -5, -1e-6, 0, 1e-6, 3, 20, 30, 88, 89, 1e4])
    z = torch.cat([torch.linspace(-120, 120, 97), torch.tensor([-1e30, -1e-30, 0, 1e-30, 1e30, torch.inf])])
    ones, batch = torch.ones(1, 1), batch_of([1], [1], [False])

    def step(dt: torch.Tensor, z: torch.Tensor, skip: float) -> torch.Tensor:
        n = len(dt)
        state, A, D = torch.zeros(2, n, 1), -torch.ones(n, 1), torch.full((n,), skip)
        return native.selective_scan(
            torch.ones(1, n), dt[None], A, ones, ones, D, z[None], None, state, batch
        )[0]

    large = torch.full_like(dt, 100.0)  # silu(100) = 100
    expected = torch.where(dt > 30, dt.double(), torch.log1p(torch.exp(dt.double().clamp(max=30))))
    torch.testing.assert_close(step(dt, large, 0.0).double() / 100, expected, rtol=1e-6, atol=1e-37)
    nothing = torch.full_like(z, -1e4)  # softplus(-10000) = 0
    expected = z.double() / (1 + torch.exp(-z.double()))
    torch.testing.assert_close(step(nothing, z, 1.0).double(), expected, rtol=1e-6, atol=1e-36)
    assert step(torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, torch.nan]), 1.0).isnan().all()


def test_decays_are_exact(native: Native) -> None:
    """exp(delta A) of a state of one, from no decay at all to nothing left, against double precision."""
    delta = torch.tensor([0.0, 1e-7, 1e-3, 0.3, 1.0, 7.7, 40.0, 86.0, 200.0, 1e4])
    dt = torch.where(delta > 20, delta, torch.log(torch.expm1(delta)))
    delta = torch.where(dt > 20, dt.double(), torch.log1p(torch.exp(dt.double())))
    n = len(delta)
    state, zeros = torch.ones(2, n, 1), torch.zeros(1, 1)
    y = native.selective_scan(
        torch.ones(1, n), dt[None], -torch.ones(n, 1), zeros, zeros + 1, torch.zeros(n), None, None, state,
        batch_of([1], [1], [True]),
    )  # fmt: skip
    torch.testing.assert_close(y[0].double(), torch.exp(-delta), rtol=3e-7 * 90, atol=1e-37)
    torch.testing.assert_close(y[0, :6].double(), torch.exp(-delta[:6]), rtol=1e-6, atol=0)
    assert float(y[0, 0]) == 1.0
    assert torch.equal(state[1, :, 0], y[0])


def test_mixed_dtypes(backend: SSMBackend) -> None:
    """Arguments in float32 beside inputs in a half dtype: no part is rounded to the lesser one."""
    lens, slots, states = [5, 1], [3, 2], [False, True]
    layer = Layer.random(6)
    layer.x, layer.z = layer.x.bfloat16(), layer.z.bfloat16()
    check_against_reference(backend, layer, Arena.random(20), batch_of(lens, slots, states), 2**-8)


def test_inside_and_outside_of_inference_mode(backend: SSMBackend) -> None:
    """What a backend keeps from a call under inference mode serves one without it, and the reverse."""
    layer, batch = Layer.random(4), batch_of([3, 1], [4, 8], [True, True])
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            layer.run(backend, Arena.random(19), batch)


def test_highest_slot_of_a_huge_arena(backend: SSMBackend, tmp_path: Path) -> None:
    """F073: slot x stride just past 2^32 elements, in a sparse file; the lowest slots stay as they are."""
    num_slots = 70
    top = num_slots - 1
    slot_stride = (1 << 32) // top + 1
    flat = torch.from_file(str(tmp_path / "arena"), shared=True, size=num_slots * slot_stride).view(
        num_slots, -1
    )
    conv_size, ssm_size = NUM_CHANNELS * 3, NUM_CHANNELS * NUM_STATES
    conv = flat[:, :conv_size].unflatten(1, (NUM_CHANNELS, 3))
    ssm = flat[:, conv_size : conv_size + ssm_size].unflatten(1, (NUM_CHANNELS, NUM_STATES))
    arena, small = Arena(flat, conv, ssm), Arena.random(18)
    for slot in (0, 1, top):
        arena.conv[slot], arena.ssm[slot] = small.conv[3], small.ssm[3]
    low = flat[:2, :64].clone()
    layer = Layer.random(5)
    for lens, tokens in (([4], slice(0, 4)), ([1], slice(4, 5))):
        expected = layer.tokens(tokens).run(backend, small, batch_of(lens, [3], [True]))
        actual = layer.tokens(tokens).run(backend, arena, batch_of(lens, [top], [True]))
        assert_same(actual, expected)
    assert_same(arena.ssm[top], small.ssm[3])
    assert_same(arena.conv[top], small.conv[3])
    assert torch.equal(flat[:2, :64], low)
