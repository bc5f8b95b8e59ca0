"""Attention over a paged cache in Triton (arXiv 2205.14135, 2311.01282).

Softmax is computed online, in float32 and base 2. All query heads that share a KV head are rows of one tile,
so K and V are read once a group. Positions that a row must not see are never loaded: what lies there may be
NaN.

Decoding is bound by the bytes of the cache that are read: 2 * length * head_dim elements a KV head. Prefill
is bound by its products, 4 * head_dim flops a (row, position).
"""

import triton
import triton.language as tl


@triton.jit
def write_kv(
    key,  # [T, K, D]
    value,  # [T, K, D]
    cache,  # [num_blocks, 2, block_size, K, D], any strides
    slot_mapping,  # [T]
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    cache_stride_block,
    cache_stride_kind,
    cache_stride_position,
    cache_stride_head,
    cache_stride_dim,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # num_kv_heads * head_dim, or more
):
    """A program copies K and V of one token to its place."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    element = tl.arange(0, BLOCK)
    inside = element < NUM_KV_HEADS * HEAD_DIM
    head = element // HEAD_DIM
    dim = element % HEAD_DIM
    place = cache + slot // BLOCK_SIZE * cache_stride_block + slot % BLOCK_SIZE * cache_stride_position
    place += head * cache_stride_head + dim * cache_stride_dim
    k = tl.load(key + token * key_stride_token + head * key_stride_head + dim, mask=inside)
    v = tl.load(value + token * value_stride_token + head * value_stride_head + dim, mask=inside)
    tl.store(place, k.to(cache.dtype.element_ty), mask=inside)
    tl.store(place + cache_stride_kind, v.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def tanh(x):
    """Within 1e-7: the cap times that is what a score is off by."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)  # 2 log2(e)


@triton.jit
def attend(
    q,  # [M, D] of the rows
    positions,  # [M] of the rows in their sequence; -1 sees nothing
    cache,  # at the first element of the KV head
    blocks,  # the sequence's row of the block table
    first,  # position from which keys are read ...
    last,  # ... and one past the last: nothing else is loaded
    window,
    scale,  # of products: to base-2 logarithms or, with a cap, to parts of it
    cap,  # of base-2 logarithms
    cache_stride_block,
    cache_stride_kind,
    cache_stride_position,
    cache_stride_dim,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The sum [M, D] of exp2(score - highest) * value, the sum [M] of exp2(score - highest), and highest
    [M]."""
    dims = tl.arange(0, BLOCK_D)
    has_dim = dims < HEAD_DIM
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in range(first, last, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        is_cached = columns < last
        block = tl.load(blocks + columns // BLOCK_SIZE, mask=is_cached, other=0).to(tl.int64)
        place = block * cache_stride_block + columns % BLOCK_SIZE * cache_stride_position
        place = cache + place[:, None] + (dims * cache_stride_dim)[None, :]
        wanted = is_cached[:, None] & has_dim[None, :]
        k = tl.load(place, mask=wanted, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:
            scores = cap * tanh(scores)
        visible = is_cached[None, :] & (columns[None, :] <= positions[:, None])
        if HAS_WINDOW:
            visible = visible & (columns[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        before = highest
        highest = tl.maximum(before, tl.max(scores, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # of a row that has seen nothing yet
        shrink = tl.exp2(before - shift)
        p = tl.exp2(scores - shift[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        v = tl.load(place + cache_stride_kind, mask=wanted, other=0.0).to(q.dtype)
        total = total * shrink[:, None] + tl.dot(p.to(q.dtype), v, input_precision="ieee")
    return total, weight, highest


@triton.jit(do_not_specialize=["num_splits", "table_stride"])
def decode(
    query,  # [T, H, D]
    cache,
    out,  # [T, H, D] contiguous
    partial,  # [n, splits, H, D] float32 and ...
    partial_lse,  # [n, splits, H] float32: log2 of the sum of exp2, where ONE_SPLIT is false
    sequences,  # [n] numbers of the sequences that have one token in this step
    query_start,
    seq_lens,
    block_table,
    num_splits,
    table_stride,
    window,
    scale,
    cap,
    query_stride_token,
    query_stride_head,
    cache_stride_block,
    cache_stride_kind,
    cache_stride_position,
    cache_stride_head,
    cache_stride_dim,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    SPLIT: tl.constexpr,  # positions
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program attends from one token, with the heads of one KV head, to one split of what it sees."""
    index = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(sequences + index).to(tl.int64)
    length = tl.load(seq_lens + sequence).to(tl.int32)
    first = split * SPLIT
    if HAS_WINDOW:
        first += tl.maximum(length - window, 0)
    if (first < length) | (split == 0):
        row = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        head = kv_head * GROUP + row
        wanted = (row < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        token = tl.load(query_start + sequence).to(tl.int64)
        place = query + token * query_stride_token + (head * query_stride_head)[:, None] + dims[None, :]
        q = tl.load(place, mask=wanted, other=0.0)
        total, weight, highest = attend(
            q,
            tl.zeros([BLOCK_M], tl.int32) + (length - 1),
            cache + kv_head.to(tl.int64) * cache_stride_head,
            block_table + sequence * table_stride,
            first,
            tl.minimum(first + SPLIT, length),
            window,
            scale,
            cap,
            cache_stride_block,
            cache_stride_kind,
            cache_stride_position,
            cache_stride_dim,
            BLOCK_SIZE,
            HEAD_DIM,
            HAS_WINDOW,
            HAS_CAP,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
        )
        weight = tl.where(weight == 0.0, 1.0, weight)  # a padding row of length 0: its output is 0
        result = total / weight[:, None]
        if ONE_SPLIT:
            place = (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out + place, result.to(out.dtype.element_ty), mask=wanted)
        else:
            cell = (index * num_splits + split) * NUM_HEADS + head
            tl.store(partial + cell[:, None] * HEAD_DIM + dims[None, :], result, mask=wanted)
            tl.store(partial_lse + cell, highest + tl.log2(weight), mask=row < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def merge(
    partial,
    partial_lse,
    out,
    sequences,
    query_start,
    seq_lens,
    num_splits,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program merges the splits of one head of one token, in order. Those past its length were not
    written."""
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    sequence = tl.load(sequences + index).to(tl.int64)
    seen = tl.load(seq_lens + sequence).to(tl.int32)
    if HAS_WINDOW:
        seen = tl.minimum(seen, window)
    dims = tl.arange(0, BLOCK_D)
    has_dim = dims < HEAD_DIM
    cell = index * num_splits * NUM_HEADS + head
    highest = tl.load(partial_lse + cell)
    total = tl.load(partial + cell * HEAD_DIM + dims, mask=has_dim, other=0.0)
    weight = 1.0
    for _ in range(1, tl.cdiv(seen, SPLIT)):
        cell += NUM_HEADS
        lse = tl.load(partial_lse + cell)
        part = tl.load(partial + cell * HEAD_DIM + dims, mask=has_dim, other=0.0)
        before = highest
        highest = tl.maximum(before, lse)
        shrink = tl.exp2(before - highest)
        grow = tl.exp2(lse - highest)
        total = total * shrink + part * grow
        weight = weight * shrink + grow
    token = tl.load(query_start + sequence).to(tl.int64)
    place = out + (token * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(place, (total / weight).to(out.dtype.element_ty), mask=has_dim)


@triton.jit(do_not_specialize=["table_stride"])
def prefill(
    query,
    cache,
    out,
    tiles,  # [n, 2] int32: sequence, first of its tokens in this step
    query_start,
    seq_lens,
    block_table,
    table_stride,
    window,
    scale,
    cap,
    query_stride_token,
    query_stride_head,
    cache_stride_block,
    cache_stride_kind,
    cache_stride_position,
    cache_stride_head,
    cache_stride_dim,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    TOKENS: tl.constexpr,  # of a tile: BLOCK_M // GROUP
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program attends from a tile of one sequence's tokens, with the heads of one KV head, to all they see:
    what was cached in earlier steps and, written just before, in this one."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile).to(tl.int64)
    first_token = tl.load(tiles + 2 * tile + 1)
    start = tl.load(query_start + sequence).to(tl.int64)
    num_tokens = (tl.load(query_start + sequence + 1) - start).to(tl.int32)
    context = tl.load(seq_lens + sequence).to(tl.int32) - num_tokens

    row = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < TOKENS * GROUP) & (token < num_tokens)
    wanted = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    place = (start + token) * query_stride_token + head * query_stride_head
    q = tl.load(query + place[:, None] + dims[None, :], mask=wanted, other=0.0)

    first = 0
    if HAS_WINDOW:
        first = tl.maximum(context + first_token - window + 1, 0)
    total, weight, _ = attend(
        q,
        tl.where(is_row, context + token, -1),
        cache + kv_head.to(tl.int64) * cache_stride_head,
        block_table + sequence * table_stride,
        first,
        context + tl.minimum(first_token + TOKENS, num_tokens),
        window,
        scale,
        cap,
        cache_stride_block,
        cache_stride_kind,
        cache_stride_position,
        cache_stride_dim,
        BLOCK_SIZE,
        HEAD_DIM,
        HAS_WINDOW,
        HAS_CAP,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
    )
    result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    place = ((start + token) * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=wanted)
