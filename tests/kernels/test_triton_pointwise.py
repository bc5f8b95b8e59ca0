"""Operators on rows in Triton, in its interpreter or on a GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from hybridserve.kernels.pointwise import Reference, Triton
from hybridserve.kernels.registry import Capabilities
from tests.harness.triton_interpreter import DEVICE, assert_near, poisoned, require_triton  # noqa: F401
from tests.kernels.test_pointwise import (  # noqa: F401 - collected again, with this module's fixtures
    distributions,
    test_add_rms_norm,
    test_add_rms_norm_of_columns_that_lie_apart,
    test_argmax,
    test_draw,
    test_draws_at_either_end_are_of_what_may_be_drawn,
    test_keep_top_k,
    test_keep_top_p,
    test_nothing_to_draw,
    test_rotate,
    test_silu_and_mul,
)

require_triton()

EPS = 1e-3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def backend() -> Triton:
    return Triton()


def rows(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_rows, size], as a view of a wider tensor of NaN, and a weight."""
    generator = torch.Generator().manual_seed(size)
    wide = torch.full((num_rows, size + 5), float("nan"), dtype=dtype)
    wide[:, 2:-3] = 5 * torch.randn(num_rows, size, generator=generator)
    return wide.to(DEVICE)[:, 2:-3], torch.rand(size, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("sizes", [(1,), (7,), (513,), (32, 16, 16), (1, 40, 3)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 5])
def test_rms_norm(num_rows: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = rows(num_rows, sum(sizes), dtype)
    expected = Reference().rms_norm(x.cpu().float(), weight.cpu().float(), EPS, sizes).to(dtype)
    actual = Triton().rms_norm(x, weight, EPS, sizes)
    assert actual.dtype == dtype
    assert_near(actual, expected, TOLERANCE[dtype])


def test_any_strides_and_dtype_of_the_weight() -> None:
    x, weight = rows(6, 33)
    weight = torch.stack([weight, torch.full_like(weight, torch.nan)], 1)[:, 0].bfloat16()
    expected = Reference().rms_norm(x.cpu(), weight.cpu(), EPS, (30, 3))
    assert_near(Triton().rms_norm(x.t().contiguous().t(), weight, EPS, (30, 3)), expected, 2e-6)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, weight = rows(9, 70)
    alone = torch.cat([Triton().rms_norm(x[i : i + 1], weight, EPS, (70,)) for i in range(9)])
    x[4] = float("nan")
    together = Triton().rms_norm(x, weight, EPS, (70,))
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(together[others], alone[others])
    assert together[4].isnan().all()


def test_what_is_kept_of_a_row_depends_on_it_alone(backend: Triton) -> None:
    probs, top_k = distributions(5, 90), torch.tensor([3, 0, 20, 1, 9])
    top_p = torch.tensor([0.7, 0.9, 1.0, 0.2, 0.95])
    together = probs.clone()
    together[3] = float("nan")
    backend.keep_top_k(together, top_k)
    backend.keep_top_p(together, top_p)
    for row in (0, 1, 2, 4):
        alone = probs[row : row + 1].clone()
        backend.keep_top_k(alone, top_k[row : row + 1])
        backend.keep_top_p(alone, top_p[row : row + 1])
        assert torch.equal(together[row], alone[0])


def test_probabilities_of_a_row_lie_side_by_side(backend: Triton) -> None:
    with pytest.raises(ValueError, match="side by side"):
        backend.keep_top_k(distributions(3, 4).t(), torch.ones(4, dtype=torch.int64))


def test_inside_and_outside_of_inference_mode() -> None:
    x, weight = rows(3, 8)
    backend = Triton()
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            backend.rms_norm(x, weight, EPS, (5, 3))


def test_needs_a_gpu_and_a_dtype_it_knows() -> None:
    assert Triton.why_not(Capabilities("cpu", "float32")) == "no CUDA device"
    assert Triton.why_not(Capabilities("cuda", "bfloat16")) is None
    assert "float64" in str(Triton.why_not(Capabilities("cuda", "float64")))
