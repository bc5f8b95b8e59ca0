"""A mixture of experts in Triton: routing, grouping of (token, expert) pairs, and grouped products.

The products are bound by the bytes of the experts that were hit while an expert has few pairs, by flops, two
a pair, input and output, when it has many. Pairs are grouped by counting, without atomics: their order, and
with it every sum, is that of the tokens.
"""

import triton
import triton.language as tl

from hybridserve.kernels.gemm.triton_kernels import multiply


@triton.jit
def route(
    logits,  # [T, E]
    weights,  # [T, k] float32
    ids,  # [T, k] int64
    num_experts,
    logits_stride,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program routes one token: softmax over all experts, then the largest, one after another."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    exists = expert < num_experts
    logit = tl.load(logits + token * logits_stride + expert, mask=exists, other=float("-inf")).to(tl.float32)
    p = tl.exp(logit - tl.max(logit, 0))
    p = p / tl.sum(p, 0)
    rest = tl.where(exists, tl.where(p == p, p, -1.0), -2.0)  # of a row of NaN: valid experts all the same
    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int64)
    share = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(rest, 0)
        chosen = tl.where(place == k, best.to(tl.int64), chosen)
        share = tl.where(place == k, tl.sum(tl.where(expert == best, p, 0.0), 0), share)
        rest = tl.where(expert == best, -3.0, rest)
    if RENORMALIZE:
        share = share / tl.sum(share, 0)
    tl.store(weights + token * TOP_K + place, share, mask=place < TOP_K)
    tl.store(ids + token * TOP_K + place, chosen, mask=place < TOP_K)


@triton.jit(do_not_specialize=["num_pairs"])
def group_pairs(
    keys,  # [P] int64: what pairs are grouped by, 0 <= key < num_keys
    order,  # [P] int64: gets the pairs, sorted by key, those of one key in their order
    sorted_keys,  # [P] int64
    places,  # [P] int64: where in `order` each pair is
    starts,  # [num_keys + 1] int32: where in `order` each key's pairs start
    num_pairs,
    num_keys,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """A program counts what comes before each of some items. Items are the pairs and, after them, the keys:
    a key stands before all pairs that have it."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = item < num_pairs
    key = tl.load(keys + item, mask=is_pair, other=0).to(tl.int32)
    key = tl.where(is_pair, key, item - num_pairs)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK_P):
        pair = first + tl.arange(0, BLOCK_P)
        exists = pair < num_pairs
        other = tl.load(keys + pair, mask=exists, other=2147483647).to(tl.int32)
        is_before = other[None, :] < key[:, None]
        is_before = is_before | (
            (other[None, :] == key[:, None]) & (pair[None, :] < item[:, None]) & is_pair[:, None]
        )
        before += tl.sum(is_before.to(tl.int32), 1)
    tl.store(order + before, item.to(tl.int64), mask=is_pair)
    tl.store(sorted_keys + before, key.to(tl.int64), mask=is_pair)
    tl.store(places + item, before.to(tl.int64), mask=is_pair)
    tl.store(starts + (item - num_pairs), before, mask=(item >= num_pairs) & (item <= num_pairs + num_keys))


@triton.jit
def find_tile(tile, starts, num_keys, BLOCK_M: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Which key's pairs tile number `tile` of BLOCK_M rows has, where in the order they start, and where that
    key's end. A number past the last tile gets `num_keys` and no rows."""
    key = tl.arange(0, BLOCK_KEYS)
    first = tl.load(starts + key, mask=key < num_keys, other=0)
    last = tl.load(starts + key + 1, mask=key < num_keys, other=0)
    num_tiles = (last - first + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(num_tiles, 0)
    found = tl.sum(((ends <= tile) & (key < num_keys)).to(tl.int32), 0)
    is_found = key == found
    start = tl.sum(tl.where(is_found, first + (tile - ends + num_tiles) * BLOCK_M, 0), 0)
    stop = tl.sum(tl.where(is_found, last, 0), 0)
    return found, start, stop


@triton.jit
def multiply_plain(total, x, weight, has_row, has_output, num_inputs, BLOCK_K: tl.constexpr):
    """total [M, N] + x @ weight.T, both as they are."""
    for start in range(0, num_inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < num_inputs
        a = tl.load(x[:, None] + k[None, :], mask=has_row[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight[:, None] + k[None, :], mask=has_output[:, None] & inside[None, :], other=0.0)
        total = tl.dot(a, tl.trans(b.to(a.dtype)), total, input_precision="ieee")
    return total


@triton.jit
def scaled_sum(
    x, row_scales, weight, scales, row, output, has_row, has_output, num_inputs,
    SCALED: tl.constexpr, INT8_ROWS: tl.constexpr, FP8: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products [M, N] of rows of x with outputs of one expert, in float32."""
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INT8_ROWS else tl.float32)
    if SCALED:
        total = multiply(total, x, weight, has_row, has_output, 0, num_inputs, INT8_ROWS, FP8, BLOCK_K)
        total = total.to(tl.float32) * tl.load(scales + output, mask=has_output, other=0.0)[None, :]
        if INT8_ROWS:
            total *= tl.load(row_scales + row, mask=has_row, other=0.0)[:, None]
    else:
        total = multiply_plain(total, x, weight, has_row, has_output, num_inputs, BLOCK_K)
    return total


@triton.jit
def gate_up(
    x,  # [T, H]
    row_scales,  # [T] where x is int8
    weight,  # [E, 2 I, H]
    scales,  # [E, 2 I]
    inner,  # FUSED: [P, I] activations; else [P, 2 I] both halves
    order,
    starts,
    num_experts,
    size,  # I
    num_inputs,
    x_stride,
    weight_stride_expert,
    weight_stride_output,
    TOP_K: tl.constexpr,
    FUSED: tl.constexpr,
    SCALED: tl.constexpr,
    INT8_ROWS: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A program computes some columns of both halves for one tile of an expert's pairs, and joins them."""
    expert, start, stop = find_tile(tl.program_id(1), starts, num_experts, BLOCK_M, BLOCK_E)
    if expert < num_experts:
        place = start + tl.arange(0, BLOCK_M)
        has_row = place < stop
        token = tl.load(order + place, mask=has_row, other=0) // TOP_K
        output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        has_output = output < size
        rows = x + token * x_stride
        own = weight + expert.to(tl.int64) * weight_stride_expert
        own_scales = scales + expert.to(tl.int64) * 2 * size
        gate = scaled_sum(
            rows, row_scales, own + output.to(tl.int64) * weight_stride_output, own_scales,
            token, output, has_row, has_output, num_inputs,
            SCALED, INT8_ROWS, FP8, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        up = scaled_sum(
            rows, row_scales, own + (output + size).to(tl.int64) * weight_stride_output, own_scales + size,
            token, output, has_row, has_output, num_inputs,
            SCALED, INT8_ROWS, FP8, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        inside = has_row[:, None] & has_output[None, :]
        row = place.to(tl.int64)[:, None]
        if FUSED:
            result = gate / (1.0 + tl.exp(-gate)) * up
            tl.store(inner + row * size + output[None, :], result.to(inner.dtype.element_ty), mask=inside)
        else:
            row = row * 2 * size + output[None, :]
            tl.store(inner + row, gate.to(inner.dtype.element_ty), mask=inside)
            tl.store(inner + row + size, up.to(inner.dtype.element_ty), mask=inside)


@triton.jit
def down(
    activations,  # [P, I] contiguous, in the order of the groups
    row_scales,  # [P] where they are int8
    weight,  # [E, H, I]
    scales,  # [E, H]
    outputs,  # [P, H], in the order of the groups
    starts,
    num_experts,
    size,  # H
    num_inputs,
    weight_stride_expert,
    weight_stride_output,
    SCALED: tl.constexpr,
    INT8_ROWS: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    expert, start, stop = find_tile(tl.program_id(1), starts, num_experts, BLOCK_M, BLOCK_E)
    if expert < num_experts:
        row = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        has_row = row < stop
        output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        has_output = output < size
        own = weight + expert.to(tl.int64) * weight_stride_expert
        result = scaled_sum(
            activations + row * num_inputs, row_scales, own + output.to(tl.int64) * weight_stride_output,
            scales + expert.to(tl.int64) * size,
            row, output, has_row, has_output, num_inputs,
            SCALED, INT8_ROWS, FP8, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        place = row[:, None] * size + output[None, :]
        inside = has_row[:, None] & has_output[None, :]
        tl.store(outputs + place, result.to(outputs.dtype.element_ty), mask=inside)


@triton.jit
def combine(outputs, weights, places, y, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """y[t] = sum of weights[t, k] * outputs of the pair (t, k), in the router's order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + k)
        weight = tl.load(weights + token * TOP_K + k)
        total += weight * tl.load(outputs + place * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * size + column, total.to(y.dtype.element_ty), mask=inside)
