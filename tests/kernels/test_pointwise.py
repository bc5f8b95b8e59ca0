"""Every backend of operators on rows against the reference: odd sizes, segments, views, poison, threads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.kernels.pointwise import BACKENDS, Native, Reference
from hybridserve.kernels.pointwise import native as native_module
from hybridserve.kernels.registry import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.kernels.pointwise.interface import PointwiseBackend

EPS = 1e-3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def made(backend: type[PointwiseBackend]) -> PointwiseBackend:
    if reason := backend.why_not(Capabilities("cpu", "float32")):
        pytest.skip(f"{backend.name} {reason}")
    return backend()


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> PointwiseBackend:
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


def rows(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_rows, size], as a view of a wider tensor of NaN, and a weight."""
    generator = torch.Generator().manual_seed(size)
    wide = torch.full((num_rows, size + 5), float("nan"), dtype=dtype)
    wide[:, 2:-3] = 5 * torch.randn(num_rows, size, generator=generator)
    return wide[:, 2:-3], torch.rand(size, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(1,), (7,), (64,), (513,), (32, 16, 16), (1, 40, 3)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 200])
def test_rms_norm(
    backend: PointwiseBackend, num_rows: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight = rows(num_rows, sum(sizes), dtype)
    expected = Reference().rms_norm(x.float(), weight.float(), EPS, sizes).to(dtype)
    actual = backend.rms_norm(x, weight, EPS, sizes)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_reference_is_the_definition() -> None:
    x, weight = rows(4, 9)
    first, second = x[:, :4].double(), x[:, 4:].double()
    parts = [v / (v.pow(2).sum(1, keepdim=True) / v.shape[1] + EPS).sqrt() for v in (first, second)]
    expected = (torch.cat(parts, 1) * weight).float()
    torch.testing.assert_close(Reference().rms_norm(x, weight, EPS, (4, 5)), expected)


def test_the_weight_may_have_another_dtype(backend: PointwiseBackend) -> None:
    x, weight = rows(3, 40)
    for sizes in ((40,), (30, 10)):
        expected = Reference().rms_norm(x, weight.bfloat16().float(), EPS, sizes)
        actual = backend.rms_norm(x, weight.bfloat16(), EPS, sizes)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_any_strides(backend: PointwiseBackend) -> None:
    x, weight = rows(6, 33)
    expected = backend.rms_norm(x, weight, EPS, (33,))
    strided = torch.stack([weight, torch.full_like(weight, torch.nan)], 1)[:, 0]
    torch.testing.assert_close(backend.rms_norm(x.t().contiguous().t(), strided, EPS, (33,)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(77,), (512,), (32, 16, 16)], ids=str)
@pytest.mark.usefixtures("threads")
def test_bits_of_a_native_row_depend_on_itself(
    native: Native, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Alone and among enough others for several threads; a row of NaN is alone too."""
    x, weight = rows(1500, sum(sizes), dtype)
    torch.set_num_threads(1)
    expected = torch.cat([native.rms_norm(x[i : i + 1], weight, EPS, sizes) for i in range(len(x))])
    x[7] = float("nan")
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        actual = native.rms_norm(x, weight, EPS, sizes)
        assert actual[7].isnan().all()
        assert torch.equal(actual[:7], expected[:7])
        assert torch.equal(actual[8:], expected[8:])


def test_inside_and_outside_of_inference_mode(backend: PointwiseBackend) -> None:
    x, weight = rows(3, 8)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            backend.rms_norm(x, weight, EPS, (5, 3))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_add_rms_norm(backend: PointwiseBackend, num_rows: int, dtype: torch.dtype) -> None:
    """The sum has the bits of torch's, and the norm is that of the rounded sum."""
    (x, weight), (residual, _) = rows(num_rows, 70, dtype), rows(num_rows, 70, dtype)
    total = x + residual * 0.37
    expected = Reference().rms_norm(total, weight, EPS, (70,))
    actual = backend.add_rms_norm(x, residual * 0.37, weight, EPS)
    assert torch.equal(x, total)
    assert torch.equal(actual, backend.rms_norm(total, weight, EPS, (70,)))
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_add_rms_norm_of_columns_that_lie_apart(backend: PointwiseBackend) -> None:
    (x, weight), (residual, _) = rows(4, 9), rows(4, 9)
    total = x + residual
    expected = Reference().rms_norm(total, weight, EPS, (9,))
    apart = x.t().contiguous().t()
    actual = backend.add_rms_norm(apart, residual.t().contiguous().t(), weight, EPS)
    assert torch.equal(apart, total)
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("size", [1, 33])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_silu_and_mul(backend: PointwiseBackend, num_rows: int, size: int, dtype: torch.dtype) -> None:
    x, _ = rows(num_rows, 2 * size, dtype)
    expected = Reference().silu_and_mul(x)
    torch.testing.assert_close(
        backend.silu_and_mul(x), expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("heads", "head_dim", "half"), [(1, 2, 1), (5, 24, 12), (3, 20, 5)])
def test_rotate(backend: PointwiseBackend, heads: int, head_dim: int, half: int, dtype: torch.dtype) -> None:
    """Whole heads and a part of them, of a view of what a projection gives."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, heads + 2, head_dim, generator=generator).to(dtype)[:, :heads]
    angles = 9 * torch.randn(4, 1, half, generator=generator)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    within = 4 * TOLERANCE[dtype]
    for num in (4, 0):
        expected = Reference().rotate(x[:num], cos[:num], sin[:num])
        torch.testing.assert_close(
            backend.rotate(x[:num], cos[:num], sin[:num]), expected, rtol=within, atol=within
        )


def distributions(num_rows: int, size: int) -> torch.Tensor:
    """Sharp and flat ones, some with ties and zeros."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(num_rows, size, generator=generator) * torch.linspace(0.01, 9, num_rows)[:, None]
    logits[1::2] = logits[1::2].round()
    logits[2::3, ::4] = -torch.inf
    logits[2::3, 0] = 0
    return torch.softmax(logits, -1)


@pytest.mark.parametrize("size", [1, 7, 700])
def test_keep_top_k(backend: PointwiseBackend, size: int) -> None:
    probs = distributions(9, size)
    for top_k in ([0] * 9, [0, 1, 2, 3, 5, 6, 7, 300, 10_000], [4] * 9):
        actual, expected = probs.clone(), probs.clone()
        backend.keep_top_k(actual, torch.tensor(top_k))
        Reference().keep_top_k(expected, torch.tensor(top_k))
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("size", [1, 7, 700])
def test_keep_top_p(backend: PointwiseBackend, size: int) -> None:
    """Among rows that keep all, and of what another filter left."""
    probs = distributions(9, size)
    for top_p in ([1.0] * 9, [1.0, 0.9, 0.31, 0.999, 0.0, 0.5, 1e-30, 1.0, 0.9999], [0.41] * 9):
        for start in (probs, torch.where(probs < 0.01, 0.0, probs)):
            actual, expected = start.clone(), start.clone()
            backend.keep_top_p(actual, torch.tensor(top_p))
            Reference().keep_top_p(expected, torch.tensor(top_p))
            assert torch.equal(actual, expected)
    backend.keep_top_p(probs[:0], torch.zeros(0))


def logits_of(num_rows: int, size: int) -> torch.Tensor:
    """Sharp and flat ones, some with ties, one with much that is banned, between columns of NaN."""
    generator = torch.Generator().manual_seed(size)
    wide = torch.full((num_rows, size + 5), torch.nan)
    logits = wide[:, 2:-3]
    logits.copy_(torch.randn(num_rows, size, generator=generator))
    logits.mul_(torch.linspace(0.01, 9, num_rows)[:, None])
    logits[1::3] = logits[1::3].round()
    logits[2::3, 1::2] = -torch.inf
    return logits


@pytest.mark.parametrize("size", [1, 7, 8, 65, 700, 1025])
def test_argmax(backend: PointwiseBackend, size: int) -> None:
    """The first of several, and of nothing but -infinity; -infinity is not finite."""
    logits = logits_of(9, size)
    logits[3, -1] = torch.nan
    logits[4, size // 2] = torch.inf
    logits[5] = -torch.inf
    logits[6] = 3.0
    places, finite = backend.argmax(logits)
    expected = logits.max(1, keepdim=True).values
    for row in (0, 1, 2, 5, 6, 7, 8):
        assert places[row] == (logits[row] == expected[row]).nonzero()[0, 0]
    assert places.dtype == torch.int64
    assert finite.tolist() == logits.isfinite().all(1).tolist()
    assert [len(each) for each in backend.argmax(logits[:0])] == [0, 0]


LIMITS: tuple[dict[str, list[float]], ...] = (
    {},
    {"min_p": [0.1, 0.0, 0.5, 1.0, 1e-3]},
    {"top_k": [3, 0, 1, 10_000, 40]},
    {"top_p": [0.9, 1.0, 0.0, 0.5, 0.999]},
    {"top_k": [50, 2, 0, 7, 500], "top_p": [0.3, 0.95, 0.8, 1.0, 1e-9], "min_p": [0.0, 0.05, 0.0, 0.3, 0.02]},
)


@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: "+".join(limits) or "plain")
@pytest.mark.parametrize("size", [1, 7, 256, 257, 1030])
def test_draw(backend: PointwiseBackend, size: int, limits: dict[str, list[float]]) -> None:
    """Where float64 draws, in the middle of what belongs to a token: many tokens of rows in any order."""
    logits = logits_of(7, size)
    rows = torch.tensor([6, 2, 2, 0, 5, 1])[torch.arange(30) % 6]
    temperature = torch.tensor([0.7, 1.0, 2.5, 0.01])[torch.arange(30) % 4]
    columns = {
        name: torch.tensor(values, dtype=torch.int64 if name == "top_k" else torch.float32)[
            torch.arange(30) % 5
        ]
        for name, values in limits.items()
    }
    generator = torch.Generator().manual_seed(size)
    uniform, expected = torch.empty(30, dtype=torch.float64), torch.empty(30, dtype=torch.int64)
    for i in range(30):
        probs = torch.softmax(logits[rows[i : i + 1]].double() / temperature[i].item(), 1)
        if "min_p" in limits:
            probs[probs < columns["min_p"][i] * probs.max()] = 0
        if "top_k" in limits:
            Reference().keep_top_k(probs, columns["top_k"][i : i + 1])
        if "top_p" in limits:
            Reference().keep_top_p(probs, columns["top_p"][i : i + 1])
        share = probs[0] / probs.sum()
        likely = (share > 1e-4).nonzero()[:, 0]
        expected[i] = likely[torch.randint(len(likely), (1,), generator=generator)]
        uniform[i] = share[: expected[i]].sum() + share[expected[i]] / 2
    drawn = backend.draw(logits, rows, temperature, uniform, **columns)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == expected.tolist()


def test_draws_at_either_end_are_of_what_may_be_drawn(backend: PointwiseBackend) -> None:
    logits = torch.zeros(1, 600)
    logits[0, :300] = logits[0, 500:] = -torch.inf
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    drawn = backend.draw(logits, torch.zeros(2, dtype=torch.int64), torch.ones(2), ends)
    assert drawn.tolist() == [300, 499]


def test_nothing_to_draw(backend: PointwiseBackend) -> None:
    """Nor does a row disturb the others: a temperature may make a logit infinite."""
    logits = logits_of(5, 300)
    logits[0, 7], logits[1, 299], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 4] = 3e38
    rows, uniform = torch.arange(5), torch.full((5,), 0.3, dtype=torch.float64)
    limits = {"top_k": torch.full((5,), 9), "top_p": torch.full((5,), 0.9)}
    for columns in ({}, limits):
        drawn = backend.draw(logits, rows, torch.full((5,), 0.5), uniform, **columns)
        assert drawn[:4].tolist() == [-1] * 4
        alone = {name: column[4:] for name, column in columns.items()}
        assert drawn[4:] == backend.draw(logits, rows[4:], torch.full((1,), 0.5), uniform[4:], **alone)
    assert len(backend.draw(logits, rows[:0], torch.ones(0), uniform[:0])) == 0


@pytest.mark.usefixtures("threads")
def test_native_draws_read_columns_of_any_layout(native: Native) -> None:
    logits, rows = torch.randn(4, 1000), torch.arange(4)
    uniform = torch.tensor([0.1, 0.3, 0.5, 0.9], dtype=torch.float64)
    expected = native.draw(logits, rows, torch.full((4,), 0.5), uniform)
    for temperature in (torch.full((4,), 0.5, dtype=torch.float64), torch.tensor([0.5]).expand(4)):
        assert torch.equal(native.draw(logits, rows, temperature, uniform), expected)
    apart = torch.stack([uniform, torch.zeros_like(uniform)], dim=1)[:, 0]
    assert torch.equal(native.draw(logits, rows.int(), torch.full((4,), 0.5), apart), expected)


def test_native_draws_stay_in_the_block_that_reaches_the_target(native: Native) -> None:
    """Whose weights, added up one by one, are lost beside the first: not the last of the vocabulary."""
    logits = torch.full((1, 700), -torch.inf)
    logits[0, 0], logits[0, 1:256], logits[0, 256] = 0.0, -37.0, 0.0
    logits[0, 257:512], logits[0, 699] = -38.5, -60.0
    half = torch.tensor([0.5], dtype=torch.float64)
    drawn = native.draw(logits, torch.zeros(1, dtype=torch.int64), torch.ones(1), half)
    assert drawn.item() < 257


def test_native_draws_depend_on_their_row_alone(native: Native) -> None:
    """Uniform numbers as they come, and those on the edges: with any number of threads, and after larger
    vocabularies, which leave scratch of another size."""
    logits = logits_of(40, 3000)
    rows, temperature = torch.arange(40), torch.linspace(0.2, 2, 40)
    uniform = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    uniform[::5] = (uniform[::5] * 8).floor() / 8
    limits = {"top_k": torch.arange(40) * 7, "top_p": torch.linspace(0.1, 1, 40)}
    torch.set_num_threads(1)
    expected = torch.cat(
        [
            native.draw(
                logits,
                rows[i : i + 1],
                temperature[i : i + 1],
                uniform[i : i + 1],
                **{name: column[i : i + 1] for name, column in limits.items()},
            )
            for i in range(40)
        ]
    )
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        native.draw(logits_of(3, 9000), rows[:3], temperature[:3], uniform[:3])
        assert torch.equal(native.draw(logits, rows, temperature, uniform, **limits), expected)
        places, finite = native.argmax(logits.repeat(30, 1))
        assert torch.equal(places, native.argmax(logits)[0].repeat(30))
        assert torch.equal(finite, logits.isfinite().all(1).repeat(30))


def test_logits_are_float32(native: Native) -> None:
    with pytest.raises(TypeError, match=r"float32, not torch\.bfloat16"):
        native.argmax(torch.zeros(1, 4, dtype=torch.bfloat16))


def test_a_block_of_draws_is_the_source_s() -> None:
    source = Path(native_module.__file__).with_name("draw.h").read_text()
    assert f"#define BLOCK {native_module.DRAW_BLOCK} " in source
