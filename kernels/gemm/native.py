"""Projections in C, for CPUs. Knows tensors and how rows are divided among threads; knows no model.

A result depends on its own row and weight alone: the same bits with any other rows and any number of threads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridserve.kernels import native
from hybridserve.kernels.gemm.interface import INT8_MAX, GemmBackend, ScaledWeight, Weight
from hybridserve.kernels.gemm.panels import DTYPES, Panels
from hybridserve.kernels.gemm.products import Products
from hybridserve.kernels.gemm.products import sources as product_sources

if TYPE_CHECKING:
    from hybridserve.kernels.registry import Capabilities

SOURCE = Path(__file__).resolve().with_name("native.c")

FUNCTIONS = {
    "gemm": (
        *(native.POINTER, native.INT, native.POINTER, native.INT),  # x, weight and the strides of their rows
        *(native.POINTER, native.POINTER, native.POINTER),  # scales, bias, y
        *(native.INT, native.INT, native.INT),  # rows, outputs, inputs
        *(native.INT, native.INT),  # kinds of x and weight
        *(native.INT, native.INT),  # limit of rounded rows, whether the weight is in panels
        native.POINTER,  # the product with such weights
        *(native.POINTER, native.INT, native.INT, native.INT),  # packed, its stride, rows at once, threads
    ),
    "panel_outputs": (native.POINTER,),
}
"""What native.c has, by the types of arguments."""

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 3, torch.float8_e4m3fn: 4}
"""The numbers that weights.h gives to kinds of element."""

LARGEST = (1 << 14) - 1
"""The whole number that a row's largest magnitude becomes for a product with int8 codes; see integers.h."""

CODES = (torch.int8, torch.float8_e4m3fn)
"""Elements of a ScaledWeight."""

_PACKED_BYTES = 1 << 18
"""Of rows that a thread works on at once: half a second-level cache."""

_TILE_ROWS = 6
"""Rows that are multiplied together, or a multiple of it."""

_ROWS_A_THREAD = 48
"""With fewer rows than this a thread, threads divide the outputs; with more, the rows."""


class Native(GemmBackend):
    """Weights whose outputs fill panels (panels.h) are laid out in them; others are multiplied as they are.

    Int8 codes are multiplied with whole numbers, for any number of rows: each row of x is rounded to 15
    bits, and sums of up to 1,024 products are exact. Other codes are widened to float32 as they are read."""

    name = "native"
    depends_on_threads = False
    can_be_recorded = True
    rounding = "to 15 bits a row"

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        if capabilities.device != "cpu":
            return "runs on CPUs only"
        if capabilities.dtype not in ("float32", "bfloat16"):
            return f"has no arithmetic for {capabilities.dtype}"
        return native.obstacle(*cls.sources(capabilities))

    @classmethod
    def sources(cls, capabilities: Capabilities) -> tuple[Path, ...]:
        return SOURCE, *product_sources(capabilities, rounds=bool(cls.rounding))

    def __init__(self) -> None:
        library = native.load(SOURCE, FUNCTIONS)
        self._gemm = library.gemm
        self._products = Products()
        self._panels = Panels.of(library)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype not in DTYPES or not self._panels.fit(*weight.shape, in_pairs=False):
            return weight.contiguous()
        return self._panels.lay_out(weight, in_pairs=False)

    def unpack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if weight.dim() == 2 else self._panels.restore(weight, in_pairs=False)

    def pack_scaled(self, weight: ScaledWeight) -> ScaledWeight:
        weight = contiguous(weight)
        in_pairs = self._in_pairs(weight)
        if weight.codes.dtype not in CODES or not self._panels.fit(*weight.shape, in_pairs=in_pairs):
            return weight
        return weight._replace(codes=self._panels.lay_out(weight.codes, in_pairs=in_pairs))

    def unpack_scaled(self, weight: ScaledWeight) -> ScaledWeight:
        if weight.codes.dim() == 2:
            return weight
        return weight._replace(codes=self._panels.restore(weight.codes, in_pairs=self._in_pairs(weight)))

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        scales = None
        dtype = x.dtype
        limit = 0
        if isinstance(weight, ScaledWeight):
            limit = largest(weight, rounds=bool(self.rounding))
            codes, scales, _ = weight
            fits = codes.dtype in CODES and scales.dtype == torch.float32 and scales.is_contiguous()
        else:
            codes = weight
            fits = codes.dtype == dtype
        num_rows, num_inputs = x.shape
        row_stride, stride = x.stride()
        is_packed = codes.dim() == 3
        if is_packed:
            num_outputs, inputs = self._panels.shape_of(codes, in_pairs=limit > 0)
            weight_stride = 0
            fits = fits and inputs == num_inputs and codes.is_contiguous()
        else:
            num_outputs = codes.shape[0]
            weight_stride, inner_stride = codes.stride()
            fits = fits and codes.shape[1] == num_inputs and inner_stride == 1
        if not fits:
            raise ValueError(f"{dtype} x {tuple(x.shape)} and {codes.dtype} weight {tuple(codes.shape)}")
        if bias is not None and not (bias.dtype == dtype and bias.is_contiguous()):
            bias = bias.to(dtype).contiguous()
        if stride != 1:
            x = x.contiguous()
            row_stride = num_inputs
        y = torch.empty(num_rows, num_outputs, dtype=dtype)
        if y.numel() == 0:
            return y
        num_threads = torch.get_num_threads()
        packed_stride = packed_row(num_inputs, limit)
        rows_at_once = 0
        packed = None
        if num_rows >= num_threads * _ROWS_A_THREAD:
            rows_at_once = min(rows_that_fit(packed_stride), -(-num_rows // num_threads))
            packed = torch.empty(rows_at_once * num_threads, packed_stride)
        elif dtype != torch.float32 or limit or not (is_packed or packed_stride == num_inputs):
            packed = torch.empty(num_rows, packed_stride)  # else rows are read as they are
        self._gemm(
            *(x.data_ptr(), row_stride, codes.data_ptr(), weight_stride),
            *(None if scales is None else scales.data_ptr(), None if bias is None else bias.data_ptr()),
            *(y.data_ptr(), num_rows, num_outputs, num_inputs, KINDS[dtype], KINDS[codes.dtype]),
            *(limit, is_packed, self._products.of(codes.dtype, limited=limit > 0)),
            *(None if packed is None else packed.data_ptr(), packed_stride, rows_at_once, num_threads),
        )
        return y

    def _in_pairs(self, weight: ScaledWeight) -> bool:
        """Whether codes are multiplied with whole numbers."""
        return largest(weight, rounds=bool(self.rounding)) > 0


class NativeExact(Native):
    """The same without rounding: int8 codes too are widened to float32, unless their format rounds rows."""

    name = "native_exact"
    rounding = ""


def contiguous(weight: ScaledWeight) -> ScaledWeight:
    return weight._replace(codes=weight.codes.contiguous(), scales=weight.scales.contiguous())


def largest(weight: Weight, *, rounds: bool) -> int:
    """The whole number that a row's largest magnitude becomes in products with this weight; 0: none."""
    if not isinstance(weight, ScaledWeight) or weight.codes.dtype != torch.int8:
        return 0
    return INT8_MAX if weight.int8_rows else LARGEST * rounds


def packed_row(num_inputs: int, limit: int) -> int:
    """float32 elements that a packed row takes: whole blocks, of which the widest vectors make 32; or whole
    numbers of 16 bits in blocks of 64 and their scale, in whole cache lines."""
    return (num_inputs + 63) // 64 * 32 + 16 if limit else (num_inputs + 31) // 32 * 32


def rows_that_fit(packed_stride: int) -> int:
    """Rows that a thread multiplies at once: packed, they stay in its second cache; whole tiles of them."""
    return max(_PACKED_BYTES // (4 * packed_stride), _ROWS_A_THREAD // 2) // _TILE_ROWS * _TILE_ROWS
