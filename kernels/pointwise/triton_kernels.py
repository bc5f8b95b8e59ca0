"""Operators on rows in Triton. Bound by bytes: each element is read once and written once."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["eps"])
def rms_norm(
    x,  # [T, n]
    weight,  # [n]
    y,  # [T, n] contiguous
    starts,  # [segments + 1] int32; not read where there is one segment
    row_size,
    x_stride,
    eps,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of the longest segment, or more
):
    """A program normalises one segment of one row, in registers: no second pass over memory."""
    row = tl.program_id(0).to(tl.int64)
    if NUM_SEGMENTS == 1:  # start and size as the compiler knows them: wide loads
        start = 0
        stop = row_size
    else:
        segment = tl.program_id(1)
        start = tl.load(starts + segment)
        stop = tl.load(starts + segment + 1)
    columns = start + tl.arange(0, BLOCK)
    inside = columns < stop
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values * values, 0) / (stop - start)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = values * (1.0 / tl.sqrt(mean + eps)) * factors
    tl.store(y + row * row_size + columns, result.to(y.dtype.element_ty), mask=inside)
