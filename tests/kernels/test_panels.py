"""Weights in panels, and products with them: against the same weights as they are, to the bit against the
arithmetic that integers.h describes, and in any company."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.kernels import gemm, moe
from hybridserve.kernels.gemm import native as gemm_native
from hybridserve.kernels.gemm.interface import ScaledWeight, Weight
from hybridserve.kernels.gemm.onednn import OneDNN
from hybridserve.kernels.gemm.panels import Panels
from hybridserve.kernels.gemm.products import Products
from hybridserve.kernels.moe import native as moe_native
from hybridserve.kernels.registry import Capabilities
from hybridserve.quant.format import Shard
from hybridserve.quant.registry import FORMATS
from hybridserve.quant.unquantized import UnquantizedFormat
from tests.harness.models import Backends, load_runner, random_ids, save_model
from tests.harness.native_libraries import load_anew
from tests.kernels.test_native_codes import KINDS as CODES
from tests.kernels.test_native_codes import Nothing, rows, scaled, whole_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    gemm.Native.why_not(Capabilities("cpu", "float32")) is not None, reason="no C compiler"
)

DTYPES = [torch.float32, torch.bfloat16]
KINDS = ["plain", *CODES]
WHOLE = ["int8", "int8-w8a8"]
BUILDS = [
    "native",
    pytest.param(
        "portable", marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is x86's")
    ),
]
CPU = torch.device("cpu")
SHARD = Shard((slice(None), slice(None)), (slice(None), slice(None)))


@dataclass
class Operators:
    """Backends whose kernels are of one build."""

    gemms: tuple[gemm.Native, ...]
    moes: tuple[moe.Native, ...]

    @property
    def panel(self) -> int:
        return self.gemms[0]._panels.size


@pytest.fixture(params=BUILDS)
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Operators:
    """For this CPU, and for one without AVX, whose panels are of another size."""
    made = Operators((gemm.Native(), gemm.NativeExact()), (moe.Native(), moe.NativeExact()))
    if request.param == "portable":
        monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} -mno-avx")
        library = load_anew(gemm_native.SOURCE, gemm_native.FUNCTIONS)
        products = Products(load_anew)
        for backend in made.gemms:
            backend._gemm, backend._panels, backend._products = library.gemm, Panels.of(library), products
        library = load_anew(moe_native.SOURCE, moe_native.FUNCTIONS)
        for many in made.moes:
            many._experts, many._panels, many._products = library.experts, Panels.of(library), products
        assert made.panel == 8
    return made


@pytest.fixture
def native() -> gemm.Native:
    return gemm.Native()


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weight_of(kind: str, *shape: int, dtype: torch.dtype = torch.float32) -> Weight:
    """Of elements that differ, and outputs of about one."""
    if kind != "plain":
        return scaled(*shape, kind=kind)
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)


def elements(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def codes_of(weight: Weight) -> torch.Tensor:
    return weight.codes if isinstance(weight, ScaledWeight) else weight


def packed_by(backend: gemm.Native, weight: Weight) -> Weight:
    """In panels."""
    packed = backend.pack_scaled(weight) if isinstance(weight, ScaledWeight) else backend.pack(weight)
    assert codes_of(packed).dim() == 3
    return packed


def experts_by(backend: moe.Native, *weights: Weight) -> list[Weight]:
    """Copies in panels: experts are laid out in place."""
    if isinstance(weights[0], ScaledWeight):
        packed = backend.pack_scaled(*(weight._replace(codes=weight.codes.clone()) for weight in weights))
    else:
        packed = backend.pack(*(weight.clone() for weight in weights))
    assert all(codes_of(weight).dim() == 4 for weight in packed)
    return list(packed)


def within(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps


class TestLayout:
    """No kernel is needed for it."""

    @pytest.mark.parametrize("size", [8, 16, 32])
    @pytest.mark.parametrize("num_inputs", [1, 2, 7, 64])
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.float8_e4m3fn], ids=str)
    def test_elements_are_where_panels_h_says(self, size: int, num_inputs: int, dtype: torch.dtype) -> None:
        panels, num_outputs = Panels(size), 3 * size
        weight = elements(dtype, num_outputs, num_inputs)
        for in_pairs in (False, True) if dtype == torch.int8 else (False,):
            fits = not (in_pairs and num_inputs % 2)
            assert panels.fit(num_outputs, num_inputs, in_pairs=in_pairs) == fits
            if not fits:
                continue
            before = weight.clone()
            laid_out = panels.lay_out(weight, in_pairs=in_pairs)
            assert torch.equal(weight.float(), before.float()), "a projection is copied"
            assert laid_out.is_contiguous()
            assert panels.shape_of(laid_out, in_pairs=in_pairs) == weight.shape
            flat, expected = laid_out.float().view(3, -1).tolist(), weight.float().tolist()
            for output in range(num_outputs):
                number, lane = divmod(output, size)
                for i in range(num_inputs):
                    place = i * size + lane
                    if in_pairs:
                        place = (i // 2 * size + lane) * 2 + i % 2
                    elif dtype == torch.bfloat16:
                        place = i * size + lane % (size // 2) * 2 + lane // (size // 2)
                    assert flat[number][place] == expected[output][i]
            restored = panels.restore(laid_out, in_pairs=in_pairs)
            assert restored.dtype == dtype
            assert torch.equal(restored.float(), weight.float())

    @pytest.mark.parametrize("num_inputs", [1, 2, 6])
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.float8_e4m3fn], ids=str)
    def test_experts_stay_where_they_are(self, num_inputs: int, dtype: torch.dtype) -> None:
        panels = Panels(8)
        experts = elements(dtype, 5, 24, num_inputs)
        for in_pairs in (False, True) if dtype == torch.int8 and num_inputs % 2 == 0 else (False,):
            expected = [panels.lay_out(expert, in_pairs=in_pairs) for expert in experts]
            copied = experts.clone()
            laid_out = panels.lay_out(copied, in_pairs=in_pairs)
            assert laid_out.data_ptr() == copied.data_ptr()
            assert panels.shape_of(laid_out, in_pairs=in_pairs) == experts.shape
            for one, other in zip(laid_out, expected, strict=True):
                assert torch.equal(one.float(), other.float())
            assert torch.equal(panels.restore(laid_out, in_pairs=in_pairs).float(), experts.float())
            one_only = panels.restore(laid_out[3:4], in_pairs=in_pairs)
            assert torch.equal(one_only.float(), experts[3:4].float())

    def test_what_is_laid_out_for_other_products_has_no_shape(self) -> None:
        panels = Panels(8)
        pairs = panels.lay_out(torch.zeros(8, 4, dtype=torch.int8), in_pairs=True)
        with pytest.raises(ValueError, match="panels"):
            panels.shape_of(pairs, in_pairs=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 66), (9, 2), (6, 1058)], ids=str)
def test_products_are_those_of_the_weight_as_it_is(
    operators: Operators, kind: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    num_panels, num_inputs = shape
    weight = weight_of(kind, num_panels * operators.panel, num_inputs, dtype=dtype)
    bias = rows(1, weight.shape[0], dtype)[0]
    for backend in operators.gemms:
        packed = packed_by(backend, weight)
        for num in (0, 1, 2, 3, 4, 5, 13):
            x = rows(num, num_inputs, dtype)
            for some_bias in (None, bias):
                actual = backend.linear(x, packed, some_bias)
                assert actual.dtype == dtype
                expected = backend.linear(x, weight, some_bias)
                torch.testing.assert_close(actual, expected, rtol=within(dtype), atol=4 * within(dtype))
                if backend.name == "native_exact":
                    expected = gemm.Reference().linear(x, weight, some_bias)
                    torch.testing.assert_close(actual, expected, rtol=within(dtype), atol=1e-3)


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_inputs", [2, 1024, 2054])
def test_bits_are_those_of_whole_numbers(
    operators: Operators, kind: str, dtype: torch.dtype, num_inputs: int
) -> None:
    weight = scaled(5 * operators.panel, num_inputs, kind=kind)
    bias, backend = rows(1, 5 * operators.panel, dtype)[0], operators.gemms[0]
    packed = packed_by(backend, weight)
    for num in (1, 2, 3, 4, 5, 7, 100):
        x = rows(num, num_inputs, dtype)
        expected = whole_numbers(x, weight)
        assert torch.equal(backend.linear(x, packed, None), expected.to(dtype))
        assert torch.equal(backend.linear(x, packed, bias), (expected + bias.float()).to(dtype))


@pytest.mark.parametrize("code", [127, -128])
def test_no_sum_overflows(operators: Operators, code: int) -> None:
    for num_inputs in (1024, 2048, 9998):
        codes = torch.full((operators.panel, num_inputs), code, dtype=torch.int8)
        weight = ScaledWeight(codes, torch.ones(operators.panel))
        packed = packed_by(operators.gemms[0], weight)
        for sign in (1.0, -1.0):
            y = operators.gemms[0].linear(torch.full((5, num_inputs), sign), packed, None)
            torch.testing.assert_close(y, torch.full_like(y, sign * code * num_inputs), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (6, 1058)], ids=str)
@pytest.mark.usefixtures("threads")
def test_bits_depend_on_no_company(
    operators: Operators,
    kind: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor on threads, nor on how many rows a thread takes at once, nor on where the weight's outputs end."""
    num_panels, num_inputs = shape
    weight = weight_of(kind, num_panels * operators.panel, num_inputs, dtype=dtype)
    x, bias = rows(20, num_inputs, dtype), rows(1, weight.shape[0], dtype)[0]
    many = x.repeat(5, 1)  # enough rows for threads to divide them, not the outputs
    for backend in operators.gemms:
        packed = packed_by(backend, weight)
        torch.set_num_threads(1)
        expected = torch.cat([backend.linear(row[None], packed, bias) for row in x])
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for num in range(1, 21):
                assert torch.equal(backend.linear(x[20 - num :], packed, bias), expected[20 - num :])
            for rows_at_once in (6, 7, 60):
                monkeypatch.setattr(gemm_native, "rows_that_fit", lambda _, n=rows_at_once: n)
                assert torch.equal(backend.linear(many, packed, bias), expected.repeat(5, 1))
        last = slice(weight.shape[0] - operators.panel, None)
        part = weight[last] if kind == "plain" else ScaledWeight(weight[0][last], weight[1][last], weight[2])
        last_panel = packed_by(backend, part)
        assert torch.equal(backend.linear(x, last_panel, bias[last]), expected[:, last])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num", [1, 3, 100])
def test_reads_and_writes_only_its_own(native: gemm.Native, kind: str, dtype: torch.dtype, num: int) -> None:
    """Rows of x lie apart and begin at any element, with NaN around; so does the bias."""
    num_outputs = 3 * native._panels.size
    weight = weight_of(kind, num_outputs, 46, dtype=dtype)
    packed, x, bias = packed_by(native, weight), rows(num, 46, dtype), rows(1, num_outputs, dtype)[0]
    expected = native.linear(x, packed, bias)
    wide_x = torch.full((num + 2, 46 + 12), float("nan"), dtype=dtype)
    wide_x[1:-1, 7:-5] = x
    wide_bias = torch.full((num_outputs + 4,), float("nan"), dtype=dtype)
    wide_bias[3:-1] = bias
    assert torch.equal(native.linear(wide_x[1:-1, 7:-5], packed, wide_bias[3:-1]), expected)
    columns = x.t().contiguous().t()
    assert torch.equal(native.linear(columns, packed, bias), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_fault_stays_in_its_row_and_is_seen(
    operators: Operators, kind: str, dtype: torch.dtype, fault: float
) -> None:
    weight = weight_of(kind, 2 * operators.panel, 100, dtype=dtype)
    codes = codes_of(weight)
    if kind == "plain":
        codes.abs_().add_(1)
    else:
        codes.view(torch.int8)[:] = codes.view(torch.int8).abs() | 1  # no code is 0
    for backend in operators.gemms:
        packed = packed_by(backend, weight)
        for num in (2, 7):
            x = rows(num, 100, dtype).abs()
            expected = backend.linear(x, packed, None)
            x[num // 2, 3] = fault
            actual = backend.linear(x, packed, None)
            assert not actual[num // 2].isfinite().any()
            others = torch.arange(num) != num // 2
            assert torch.equal(actual[others], expected[others])


def test_every_float8(operators: Operators) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = ScaledWeight(codes[:, None].clone(), torch.ones(256))
    packed = packed_by(operators.gemms[0], weight)
    for num in (1, 3):
        y = operators.gemms[0].linear(torch.ones(num, 1), packed, None)
        assert torch.equal(y.isnan(), codes.float().isnan().expand(num, 256))
        assert torch.equal(y.nan_to_num(), codes.float().nan_to_num().expand(num, 256))


def test_many_inputs_are_as_accurate(native: gemm.Native) -> None:
    """Sums of pieces: one sum of 30,000 would be off by ten times as much."""
    weight = torch.rand(native._panels.size, 30_000, generator=torch.Generator().manual_seed(0))
    x = rows(3, 30_000).abs()
    exact = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(native.linear(x, native.pack(weight), None), exact, rtol=3e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_fill_no_panels_stay_as_they_are(native: gemm.Native, kind: str) -> None:
    size = native._panels.size
    for num_outputs in (1, size - 1, size + 1, 3 * size // 2):
        weight = weight_of(kind, num_outputs, 6)
        packed = native.pack_scaled(weight) if kind != "plain" else native.pack(weight)
        assert torch.equal(codes_of(packed).float(), codes_of(weight).float())
    if kind in WHOLE:  # inputs that are no pairs
        assert native.pack_scaled(scaled(size, 7, kind=kind)).codes.shape == (size, 7)
    half = torch.ones(size, 4, dtype=torch.float16)
    assert native.pack(half).shape == (size, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(native: gemm.Native, kind: str) -> None:
    packed = packed_by(native, weight_of(kind, native._panels.size, 8))
    for wrong in (rows(2, 6), rows(2, 4), rows(2, 16)):
        with pytest.raises(ValueError, match="weight"):
            native.linear(wrong, packed, None)
    if kind == "plain":
        with pytest.raises(ValueError, match="weight"):
            native.linear(rows(2, 8, torch.bfloat16), packed, None)
    if kind == "int8":
        with pytest.raises(ValueError, match="panels"):
            gemm.NativeExact().linear(rows(2, 4), packed, None)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_packed_is_had_back(kind: str) -> None:
    """From each backend that packs as `native` does."""
    backends = [gemm.Native(), gemm.NativeExact()]
    if kind in ("int8", "fp8"):
        backends.append(OneDNN())
    for backend in backends:
        weight = weight_of(kind, 64, 6)
        packed = packed_by(backend, weight)
        unpacked = backend.unpack(packed) if kind == "plain" else backend.unpack_scaled(packed)
        assert torch.equal(codes_of(unpacked).float(), codes_of(weight).float())


HIDDEN, INTERMEDIATE = 96, 64
"""Of 3 and 2 panels or more, whatever vectors there are."""


def expert_weights(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Weight, Weight]:
    return tuple(
        weight_of(kind, *shape, dtype=dtype)
        for shape in ((5, 2 * INTERMEDIATE, HIDDEN), (5, HIDDEN, INTERMEDIATE))
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("threads")
def test_experts(operators: Operators, kind: str, dtype: torch.dtype) -> None:
    """Of weights as they are; to the bit in any company, with any threads and in a delta's stages."""
    weights = expert_weights(kind, dtype)
    x = rows(60, HIDDEN, dtype)
    for backend in operators.moes:
        packed = experts_by(backend, *weights)
        routing, ids = backend.route(rows(60, 5), 2, renormalize=False)
        torch.set_num_threads(1)
        expected = torch.cat(
            [backend.experts(x[t : t + 1], routing[t : t + 1], ids[t : t + 1], *packed) for t in range(60)]
        )
        plain = backend.experts(x, routing, ids, *weights)
        tolerance = max(
            within(dtype), {"int8": 5e-4, "int8-w8a8": 2e-2}.get(kind, 0)
        )  # activations on an edge
        torch.testing.assert_close(expected, plain, rtol=tolerance, atol=tolerance)
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for num in (1, 2, 3, 7, 60):
                some = slice(60 - num, 60)
                for delta in (None, Nothing()):
                    actual = backend.experts(x[some], routing[some], ids[some], *packed, delta)
                    assert torch.equal(actual, expected[some])


@pytest.mark.parametrize("kind", WHOLE)
def test_experts_are_products_of_whole_numbers(operators: Operators, kind: str) -> None:
    """One expert a token and a delta that shows the activations: both products, bit by bit."""
    weights, delta = expert_weights(kind), Nothing()
    x, ids, one = rows(1, HIDDEN), torch.tensor([[3]]), torch.ones(1, 1)
    backend = operators.moes[0]
    y = backend.experts(x, one, ids, *experts_by(backend, *weights), delta)
    gate_up, down = weights
    activations = delta.inputs[1]
    gate, up = whole_numbers(x, gate_up.expert(3)).chunk(2, 1)
    torch.testing.assert_close(activations, torch.nn.functional.silu(gate) * up)
    assert torch.equal(y, whole_numbers(activations, down.expert(3)))


def test_experts_of_two_layouts_are_refused() -> None:
    backend, weights = moe.Native(), expert_weights("plain")
    packed = experts_by(backend, *weights)
    routing = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    for pair in ((packed[0], weights[1]), (weights[0], packed[1]), (packed[1], packed[0])):
        with pytest.raises(ValueError, match="experts"):
            backend.experts(rows(2, HIDDEN), *routing, *pair)
    with pytest.raises(ValueError, match="experts"):
        backend.experts(rows(2, INTERMEDIATE), *routing, *packed)


@pytest.mark.parametrize("name", ["none", "int8", "int8-w8a8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_formats_give_the_weight_back(name: str, dtype: torch.dtype) -> None:
    """What is multiplied, `dequantize_*` returns: before it is packed and afterwards."""
    kind = UnquantizedFormat if name == "none" else FORMATS[name]
    weight_format = kind(gemm.Native(), moe.Native())
    linear = weight_format.create_linear(64, 32, dtype, CPU)
    weight_format.load_linear(linear, rows(64, 32, dtype), SHARD)
    before = weight_format.dequantize_linear(linear).clone()
    weight_format.finish_linear(linear)
    assert any(tensor.dim() == 3 for tensor in linear.values())
    assert torch.equal(weight_format.dequantize_linear(linear), before)

    experts = weight_format.create_experts(3, HIDDEN, INTERMEDIATE, dtype, CPU)
    parts = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    for part, shape in parts.items():
        for expert in range(3):
            weight_format.load_expert(experts, expert, part, rows(*shape, dtype) + expert, SHARD)
    before_each = {
        (part, expert): weight_format.dequantize_expert(experts, expert, part).clone()
        for part in parts
        for expert in range(3)
    }
    weight_format.finish_experts(experts)
    assert any(tensor.dim() == 4 for tensor in experts.values())
    for (part, expert), expected in before_each.items():
        assert torch.equal(weight_format.dequantize_expert(experts, expert, part), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_stays_as_the_embedding_reads_it(tmp_path: Path, tied: bool) -> None:
    """A vocabulary of whole panels: only a head of its own is packed."""
    save_model("jamba", tmp_path, 0, tie_word_embeddings=tied)
    ids = random_ids(0, 9)
    reference = load_runner(tmp_path).run(ids)
    runner = load_runner(tmp_path, Backends(gemm=gemm.Native(), moe=moe.Native()))
    torch.testing.assert_close(runner.run(ids), reference, rtol=1e-4, atol=1e-4)
    head = runner.model.lm_head
    assert (head.weights["weight"].dim() == 2) == tied
