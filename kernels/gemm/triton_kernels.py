"""Products with one-byte weights in Triton: codes become numbers in registers, scales meet the sum.

With few rows a product is bound by the bytes of its codes, one an input and output; with many by its flops,
two a row, input and output.
"""

import triton
import triton.language as tl


@triton.jit
def widen(codes, dtype: tl.constexpr, FP8: tl.constexpr):
    """Codes as numbers of `dtype`. The bits of e4m3 are those of a float16 that is 256 times too small."""
    if FP8:
        bits = codes.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        codes = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return codes.to(dtype)


@triton.jit
def multiply(
    total,  # [M, N], added to
    x,  # [M] first element of each row
    weight,  # [N] first element of each output
    has_row,
    has_output,
    first,
    last,
    INT8_ROWS: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """total + x @ weight.T over inputs first .. last, in ascending order."""
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < last
        a = tl.load(x[:, None] + k[None, :], mask=has_row[:, None] & inside[None, :], other=0)
        b = tl.load(weight[:, None] + k[None, :], mask=has_output[:, None] & inside[None, :], other=0)
        if INT8_ROWS:
            total = tl.dot(a, tl.trans(b), total, out_dtype=tl.int32)
        else:
            total = tl.dot(a, tl.trans(widen(b, a.dtype, FP8)), total, input_precision="ieee")
    return total


@triton.jit
def finish(total, row_scales, scales, bias, row, output, has_row, has_output, INT8_ROWS: tl.constexpr,
           HAS_BIAS: tl.constexpr):  # fmt: skip
    """Sums of products as results in float32."""
    result = total.to(tl.float32) * tl.load(scales + output, mask=has_output, other=0.0)[None, :]
    if INT8_ROWS:
        result *= tl.load(row_scales + row, mask=has_row, other=0.0)[:, None]
    if HAS_BIAS:
        result += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[None, :]
    return result


@triton.jit(do_not_specialize=["num_rows"])
def linear(
    x,  # [T, in]
    row_scales,  # [T] float32 where x is int8
    codes,  # [out, in]
    scales,  # [out]
    bias,  # [out]
    y,  # [T, out] contiguous
    partial,  # [splits, T, out]: sums as they are, where there are several splits
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    weight_stride,
    SPLITS: tl.constexpr,
    INT8_ROWS: tl.constexpr,
    FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # tiles of rows that take turns at the same outputs, whose codes stay in cache
):
    program = tl.program_id(0)
    num_tiles_m = tl.cdiv(num_rows, BLOCK_M)
    num_tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    group = program // (GROUP * num_tiles_n)
    in_group = program % (GROUP * num_tiles_n)
    group_size = tl.minimum(num_tiles_m - group * GROUP, GROUP)
    row = (group * GROUP + in_group % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = in_group // group_size * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row = row < num_rows
    has_output = output < num_outputs
    split = tl.program_id(1)
    per_split = tl.cdiv(tl.cdiv(num_inputs, BLOCK_K), SPLITS) * BLOCK_K
    first = split * per_split
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INT8_ROWS else tl.float32)
    total = multiply(
        total,
        x + row.to(tl.int64) * x_stride,
        codes + output.to(tl.int64) * weight_stride,
        has_row,
        has_output,
        first,
        tl.minimum(first + per_split, num_inputs),
        INT8_ROWS,
        FP8,
        BLOCK_K,
    )
    place = row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    inside = has_row[:, None] & has_output[None, :]
    if SPLITS == 1:
        result = finish(
            total, row_scales, scales, bias, row, output, has_row, has_output, INT8_ROWS, HAS_BIAS
        )
        tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)
    else:
        tl.store(partial + split.to(tl.int64) * num_rows * num_outputs + place, total, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_splits(
    partial,
    row_scales,
    scales,
    bias,
    y,
    num_rows,
    num_outputs,
    SPLITS: tl.constexpr,
    INT8_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program adds up the splits of some outputs of one row, in order."""
    row = tl.program_id(0) + tl.arange(0, 1)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row = row < num_rows
    has_output = output < num_outputs
    place = row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    inside = has_row[:, None] & has_output[None, :]
    total = tl.zeros([1, BLOCK_N], tl.int32 if INT8_ROWS else tl.float32)
    for _ in tl.static_range(SPLITS):
        total += tl.load(partial + place, mask=inside, other=0)
        partial += num_rows.to(tl.int64) * num_outputs
    result = finish(total, row_scales, scales, bias, row, output, has_row, has_output, INT8_ROWS, HAS_BIAS)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def round_rows(x, codes, scales, row_size, x_stride, BLOCK: tl.constexpr):
    """A program rounds one row of x to whole numbers from -127 to 127, to the even one of two as near."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, row_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + column, mask=column < row_size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.where(value == value, tl.abs(value), float("inf")))
    scale = tl.div_rn(tl.max(largest, 0), 127.0)  # of a row with NaN: infinite, and its products NaN
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scales + row, scale)
    for start in range(0, row_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + column, mask=column < row_size, other=0.0).to(tl.float32)
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        rounded = tl.div_rn(value, scale) + 12582912.0 - 12582912.0  # 1.5 * 2^23: where units are whole
        tl.store(codes + row * row_size + column, rounded.to(tl.int8), mask=column < row_size)
