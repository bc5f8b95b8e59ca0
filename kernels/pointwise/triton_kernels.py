"""Operators on rows in Triton. Bound by bytes: each element is read once and written once; only the search
for what may be drawn reads its row again, ten times, from a cache that holds it.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["eps"])
def rms_norm(
    x,  # [T, n]; with HAS_RESIDUAL it gets the sum
    residual,  # [T, n]
    weight,  # [n]
    y,  # [T, n] contiguous
    starts,  # [segments + 1] int32; not read where there is one segment
    row_size,
    x_stride,
    residual_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
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
    if HAS_RESIDUAL:
        added = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        total = (values + added).to(x.dtype.element_ty)
        tl.store(x + row * x_stride + columns, total, mask=inside)
        values = total.to(tl.float32)
    mean = tl.sum(values * values, 0) / (stop - start)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = values * (1.0 / tl.sqrt(mean + eps)) * factors
    tl.store(y + row * row_size + columns, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def silu_and_mul(
    gate_up,  # [T, 2 n]
    y,  # [T, n] contiguous
    size,  # n
    x_stride,
    BLOCK: tl.constexpr,
):
    """A program computes some columns of one row, in float32."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    place = gate_up + row * x_stride + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + size, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * size + column, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def rotate(
    x,  # [T, H, D]
    cos,  # [T, half] contiguous
    sin,
    y,  # [T, H, D] contiguous
    x_stride_token,
    x_stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,  # head_dim, or more
):
    """A program turns some heads of one token: each element reads its own and its partner's."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    inside = (head < NUM_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    turned = dim < 2 * HALF
    angle = token * HALF + dim % HALF
    c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    s = tl.where(dim < HALF, -s, s)
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    place = x + token * x_stride_token + (head * x_stride_head)[:, None]
    own = tl.load(place + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(place + partner[None, :], mask=inside & turned[None, :], other=0.0).to(tl.float32)
    result = own * c[None, :] + other * s[None, :]
    place = y + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["row_size"])
def keep_largest(
    probs,  # [D, V] float32 from 0 to 1, any stride of rows
    limits,  # [D]: int64 numbers of elements or, with MASS, float32 shares of the row's sum
    row_size,
    probs_stride,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program zeroes what lies below the largest floor that enough of its row reaches: `limit` elements, or
    elements with that share of the sum.

    Numbers from 0 to 1 are ordered as their bits are, of which the upper two are never set: the floor is
    found three bits at a time, by comparing the row with seven candidates. All sums have one order, so that a
    sum of more is never less.
    """
    row = tl.program_id(0).to(tl.int64)
    probs += row * probs_stride
    limit = tl.load(limits + row)
    wanted = limit < 1.0 if MASS else (limit > 0) & (limit < row_size)
    if wanted:
        column = tl.arange(0, BLOCK)
        digit = tl.arange(0, 8)
        needed = limit.to(tl.float32)
        if MASS:
            sums = tl.zeros([BLOCK], tl.float32)
            largest = tl.zeros([BLOCK], tl.float32)
            for start in range(0, row_size, BLOCK):
                p = tl.load(probs + start + column, mask=start + column < row_size, other=0.0)
                sums += p
                largest = tl.maximum(largest, p)
            needed *= tl.sum(sums, 0)
        floor = 0
        for step in tl.static_range(10):
            candidates = floor | (digit << (27 - 3 * step))
            reached = tl.zeros([BLOCK, 8], tl.float32)
            for start in range(0, row_size, BLOCK):
                p = tl.load(probs + start + column, mask=start + column < row_size, other=-1.0)
                above = p.to(tl.int32, bitcast=True)[:, None] >= candidates[None, :]
                reached += tl.where(above, p[:, None] if MASS else 1.0, 0.0)
            enough = (tl.sum(reached, 0) >= needed) & (digit > 0)
            floor |= tl.sum(enough.to(tl.int32), 0) << (27 - 3 * step)
        if MASS:  # however small the share is, the largest stays
            floor = tl.minimum(floor, tl.max(largest, 0).to(tl.int32, bitcast=True))
        for start in range(0, row_size, BLOCK):
            inside = start + column < row_size
            p = tl.load(probs + start + column, mask=inside, other=0.0)
            tl.store(probs + start + column, 0.0, mask=inside & (p.to(tl.int32, bitcast=True) < floor))
