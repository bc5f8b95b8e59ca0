"""Low-rank adapters in Triton (arXiv 2310.18547, 2311.03285): shrink x to rank activations, expand them into
y.

A tile has rows of one adapter only. Decoding is bound by the bytes of A and B of the adapters in the batch.
The inputs are summed in splits of a fixed length, side by side, and the splits in order: how a row is summed
depends on no other row. Ranks are the true ones: what is padded is a tile in registers.
"""

import triton
import triton.language as tl

from hybridserve.kernels.moe.triton_kernels import find_tile

# The columns of a table's entries, int64: addresses of A, B, bias and gain (0: none), where the pair's
# outputs start and how many they are, its rank (0: there is no pair), the bits of its scale in float32.
A, B, BIAS, GAIN, START, NUM_OUTPUTS, RANK, SCALE = (tl.constexpr(i) for i in range(8))
ENTRY = tl.constexpr(8)


@triton.jit
def make_tiles(
    starts,  # [num_keys + 1] int32: where the pairs of each virtual adapter start
    tiles,  # [n, 3] int32
    num_keys,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Describes tile after tile as a batch's chunks are: adapter, where its rows start, how many there
    are."""
    tile = tl.program_id(0)
    key, start, stop = find_tile(tile, starts, num_keys, BLOCK_M, BLOCK_KEYS)
    tl.store(tiles + 3 * tile, tl.where(key < num_keys, key, 0))
    tl.store(tiles + 3 * tile + 1, start)
    tl.store(tiles + 3 * tile + 2, tl.minimum(stop - start, BLOCK_M))


@triton.jit
def address(table_entry, column: tl.constexpr, like, ALIGNED: tl.constexpr):
    """A pointer from a table, to elements as `like` points to."""
    pointer = tl.load(table_entry + column).to(like.dtype)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["num_rows"])
def shrink(
    x,  # [N, in]
    x_rows,  # [P] rows of x, where HAS_X_ROWS
    rows,  # rows of y, in the order of the tiles
    tiles,  # [n, 3] int32: adapter, where its rows start in `rows`, how many there are
    table,  # [adapters, pairs, ENTRY] int64
    like,  # any A
    u,  # [splits, R, pairs * max_rank] float32
    num_rows,  # R
    num_inputs,
    x_stride,
    num_pairs,
    max_rank,
    HAS_X_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,  # inputs
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program computes some ranks of one pair for one tile, over one split of the inputs."""
    tile = tl.program_id(0)
    ranks_at_once = max_rank // BLOCK_R
    pair = tl.program_id(1) // ranks_at_once
    rank_start = tl.program_id(1) % ranks_at_once * BLOCK_R
    split = tl.program_id(2)
    adapter = tl.load(tiles + 3 * tile).to(tl.int64)
    entry = table + (adapter * num_pairs + pair) * ENTRY
    rank = tl.load(entry + RANK)
    if rank_start < rank:
        place = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_M)
        has_row = tl.arange(0, BLOCK_M) < tl.load(tiles + 3 * tile + 2)
        row = tl.load(rows + place, mask=has_row, other=0).to(tl.int64)
        if HAS_X_ROWS:
            row = tl.load(x_rows + row, mask=has_row, other=0).to(tl.int64)
        r = rank_start + tl.arange(0, BLOCK_R)
        has_rank = r < rank
        a = address(entry, A, like, ALIGNED)
        total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        first = split * SPLIT
        last = tl.minimum(first + SPLIT, num_inputs)
        for start in range(first, last, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = k < last
            left = x + row[:, None] * x_stride + k[None, :]
            left = tl.load(left, mask=has_row[:, None] & inside[None, :], other=0.0)
            right = a + r[:, None] * num_inputs + k[None, :]
            right = tl.load(right, mask=has_rank[:, None] & inside[None, :], other=0.0).to(left.dtype)
            total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
        cell = (split.to(tl.int64) * num_rows + place) * num_pairs * max_rank + pair * max_rank
        tl.store(u + cell[:, None] + r[None, :], total, mask=has_row[:, None] & has_rank[None, :])


@triton.jit
def embed(
    token_ids,  # [T]
    rows,
    tiles,
    table,
    like,
    u,  # [1, R, pairs * max_rank]
    num_pairs,
    max_rank,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Rows of A [vocab, rank] in place of products with it; zeros for a token of -1."""
    tile = tl.program_id(0)
    ranks_at_once = max_rank // BLOCK_R
    pair = tl.program_id(1) // ranks_at_once
    r = tl.program_id(1) % ranks_at_once * BLOCK_R + tl.arange(0, BLOCK_R)
    adapter = tl.load(tiles + 3 * tile).to(tl.int64)
    entry = table + (adapter * num_pairs + pair) * ENTRY
    rank = tl.load(entry + RANK)
    place = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_M)
    has_row = tl.arange(0, BLOCK_M) < tl.load(tiles + 3 * tile + 2)
    row = tl.load(rows + place, mask=has_row, other=0)
    token = tl.load(token_ids + row, mask=has_row, other=-1).to(tl.int64)
    inside = has_row[:, None] & (r < rank)[None, :]
    source = address(entry, A, like, False) + token[:, None] * rank + r[None, :]
    value = tl.load(source, mask=inside & (token >= 0)[:, None], other=0.0).to(tl.float32)
    cell = place.to(tl.int64) * num_pairs * max_rank + pair * max_rank
    tl.store(u + cell[:, None] + r[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def expand(
    u,
    rows,
    tiles,
    table,
    like,
    base_bias,  # [out], where HAS_BASE_BIAS
    y,  # [T, out], added to
    num_rows,  # R
    y_stride,
    num_pairs,
    max_rank,
    HAS_BASE_BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program adds some outputs of one pair to the rows of one tile."""
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    adapter = tl.load(tiles + 3 * tile).to(tl.int64)
    entry = table + (adapter * num_pairs + pair) * ENTRY
    rank = tl.load(entry + RANK)
    num_outputs = tl.load(entry + NUM_OUTPUTS)
    output = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    if (rank > 0) & (tl.program_id(2) * BLOCK_N < num_outputs):
        place = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_M)
        has_row = tl.arange(0, BLOCK_M) < tl.load(tiles + 3 * tile + 2)
        has_output = output < num_outputs
        b = address(entry, B, like, ALIGNED)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, rank.to(tl.int32), BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            has_rank = r < rank
            inside = has_row[:, None] & has_rank[None, :]
            left = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for split in tl.static_range(SPLITS):
                cell = (place + split * num_rows.to(tl.int64)) * num_pairs * max_rank + pair * max_rank
                left += tl.load(u + cell[:, None] + r[None, :], mask=inside, other=0.0)
            right = b + r.to(tl.int64)[:, None] * num_outputs + output[None, :]
            right = tl.load(right, mask=has_rank[:, None] & has_output[None, :], other=0.0)
            total = tl.dot(left, right.to(tl.float32), total, input_precision=PRECISION)
        total *= tl.load(entry + SCALE).to(tl.int32).to(tl.float32, bitcast=True)

        column = tl.load(entry + START) + output
        row = tl.load(rows + place, mask=has_row, other=0).to(tl.int64)
        inside = has_row[:, None] & has_output[None, :]
        target = y + row[:, None] * y_stride + column[None, :]
        base = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(entry + GAIN)
        if gain != 0:
            plain = base
            if HAS_BASE_BIAS:
                plain -= tl.load(base_bias + column, mask=has_output, other=0.0).to(tl.float32)[None, :]
            factor = gain.to(tl.pointer_type(tl.float32)) + output
            total += tl.load(factor, mask=has_output, other=0.0)[None, :] * plain
        bias = tl.load(entry + BIAS)
        if bias != 0:
            summand = bias.to(tl.pointer_type(tl.float32)) + output
            total += tl.load(summand, mask=has_output, other=0.0)[None, :]
        tl.store(target, (base + total).to(y.dtype.element_ty), mask=inside)
