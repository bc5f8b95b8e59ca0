"""Mamba-2's recurrence (arXiv 2405.21060) in Triton, over ragged batches: token by token where a sequence has
few, and as products of matrices (sections 6 and 7) where it has many.

A few tokens are bound by bytes: the state is read and written once. Of many, `ssd_steps` finds how far each
token moves its head's clock, and then chunks are computed at the same time: what each leaves in a state that
began at zero (`ssd_states`), states from chunk to chunk in float32 (`ssd_carry`), and results, which are what
the chunk began with and what its tokens give each other (`ssd_outputs`). The last chunk's state goes to the
slot after everybody has read it (`ssd_states` again). Bound by products, at 2 (chunk N + P N) a channel.

Decays are only ever multiplied, never divided: they are differences of sums of logarithms, which may be large
beside their difference and are therefore kept in float64, as sums only; what is done with a pair of tokens is
done in float32.
"""

import triton
import triton.language as tl

from hybridserve.kernels.ssm.triton_kernels import softplus


@triton.jit
def step_length(dt, dt_bias, least, most):
    """Delta."""
    return tl.minimum(tl.maximum(softplus(dt + dt_bias), least), most)


@triton.jit(do_not_specialize=["least", "most"])
def ssd_update(
    x,  # [T, H, P]
    dt,  # [T, H]
    A,  # [H]
    B,  # [T, G, N]
    C,  # [T, G, N]
    D,  # [H]
    z,  # [T, H, P]
    dt_bias,  # [H]
    state,  # [num_slots, H, P, N]
    y,  # [T, H, P] contiguous
    sequences,  # [n] int32, where some are left out
    query_start,
    state_slots,
    has_state,  # as bytes
    least,  # of delta ...
    most,
    x_stride_token,
    x_stride_head,
    dt_stride,
    B_stride_token,
    B_stride_group,
    C_stride_token,
    C_stride_group,
    z_stride_token,
    z_stride_head,
    state_stride_slot,
    state_stride_head,
    state_stride_channel,
    state_stride_state,
    NUM_HEADS: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_STATES: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    HAS_Z: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program moves some channels of one head of one sequence on, token after token, with h in registers:
    k tokens give the bits that k steps of one give, where the state is float32."""
    sequence = tl.program_id(0).to(tl.int64)
    if IS_PART:
        sequence = tl.load(sequences + sequence).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    start = tl.load(query_start + sequence).to(tl.int64)
    length = (tl.load(query_start + sequence + 1) - start).to(tl.int32)
    channel = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    has_channel = channel < HEAD_DIM
    n = tl.arange(0, BLOCK_N)
    is_state = n < NUM_STATES
    inside = has_channel[:, None] & is_state[None, :] & (length > 0)
    a = tl.load(A + head) * 1.4426950408889634
    d = tl.load(D + head)
    bias = 0.0
    if HAS_DT_BIAS:
        bias = tl.load(dt_bias + head).to(tl.float32)
    slot = state + tl.load(state_slots + sequence).to(tl.int64) * state_stride_slot + head * state_stride_head
    slot = slot + (channel * state_stride_channel)[:, None] + (n * state_stride_state)[None, :]
    knows = tl.load(has_state + sequence) != 0
    h = tl.load(slot, mask=inside & knows, other=0.0).to(tl.float32)
    group = head // HEADS_OF_GROUP
    for i in range(length):
        token = start + i
        delta = step_length(tl.load(dt + token * dt_stride + head).to(tl.float32), bias, least, most)
        place = token * x_stride_token + head * x_stride_head + channel
        value = tl.load(x + place, mask=has_channel, other=0.0).to(tl.float32)
        place = token * B_stride_token + group * B_stride_group + n
        b = tl.load(B + place, mask=is_state, other=0.0).to(tl.float32)
        place = token * C_stride_token + group * C_stride_group + n
        c = tl.load(C + place, mask=is_state, other=0.0).to(tl.float32)
        h = tl.exp2(delta * a) * h + (delta * value)[:, None] * b[None, :]
        out = tl.sum(h * c[None, :], 1) + d * value
        if HAS_Z:
            place = token * z_stride_token + head * z_stride_head + channel
            gate = tl.load(z + place, mask=has_channel, other=0.0).to(tl.float32)
            out = out * gate / (1.0 + tl.exp(-gate))
        place = (token * NUM_HEADS + head) * HEAD_DIM + channel
        tl.store(y + place, out.to(y.dtype.element_ty), mask=has_channel)
    tl.store(slot, h.to(state.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["least", "most", "num_tokens"])
def ssd_steps(
    dt,
    A,
    dt_bias,
    deltas,  # [H, T] float32: gets delta
    clocks,  # [H, T] float64: gets the logarithm, to base 2, of the decay since the chunk began
    chunks,  # [n, 5] int32: sequence, first token, number of tokens, entry before it and after it, or -1
    least,
    most,
    num_tokens,
    num_heads,
    dt_stride,
    HAS_DT_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """First pass: a program has a chunk of some heads."""
    chunk = tl.program_id(0)
    start = tl.load(chunks + 5 * chunk + 1).to(tl.int64)
    length = tl.load(chunks + 5 * chunk + 2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    has_head = head < num_heads
    i = tl.arange(0, CHUNK)
    inside = (i < length)[:, None] & has_head[None, :]
    a = tl.load(A + head, mask=has_head, other=0.0).to(tl.float64) * 1.4426950408889634
    bias = tl.zeros([BLOCK_H], tl.float32)
    if HAS_DT_BIAS:
        bias = tl.load(dt_bias + head, mask=has_head, other=0.0).to(tl.float32)
    place = (start + i)[:, None] * dt_stride + head[None, :]
    value = tl.load(dt + place, mask=inside, other=0.0).to(tl.float32)
    delta = tl.where(inside, step_length(value, bias[None, :], least, most), 0.0)
    clock = tl.cumsum(delta.to(tl.float64) * a[None, :], 0)
    place = head[None, :].to(tl.int64) * num_tokens + (start + i)[:, None]
    tl.store(deltas + place, delta, mask=inside)
    tl.store(clocks + place, clock, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def ssd_states(
    x,
    B,
    deltas,
    clocks,
    state,
    carry,  # [entries, H, P, N] float32: h after a chunk
    chunks,
    state_slots,
    has_state,  # as bytes
    num_tokens,
    x_stride_token,
    x_stride_head,
    B_stride_token,
    B_stride_group,
    state_stride_slot,
    state_stride_head,
    state_stride_channel,
    state_stride_state,
    NUM_HEADS: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_STATES: tl.constexpr,
    IS_LAST: tl.constexpr,
    IS_HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What a chunk leaves of one head: alone, into the entry after it; or, of last chunks, on top of what was
    before it, into the slot."""
    precision: tl.constexpr = "tf32" if IS_HALF else "ieee"
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.load(chunks + 5 * chunk).to(tl.int64)
    start = tl.load(chunks + 5 * chunk + 1).to(tl.int64)
    length = tl.load(chunks + 5 * chunk + 2)
    num_blocks: tl.constexpr = (NUM_STATES + BLOCK_N - 1) // BLOCK_N
    channel = tl.program_id(2) // num_blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.program_id(2) % num_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    has_channel, is_state = channel < HEAD_DIM, n < NUM_STATES
    inside = has_channel[:, None] & is_state[None, :]
    place = (head * HEAD_DIM + channel)[:, None] * NUM_STATES + n[None, :]
    entries = NUM_HEADS * HEAD_DIM * NUM_STATES
    x += head * x_stride_head
    B += head // HEADS_OF_GROUP * B_stride_group
    clocks += head * num_tokens + start
    deltas += head * num_tokens + start
    end = tl.load(clocks + length - 1)
    slot = state + tl.load(state_slots + sequence).to(tl.int64) * state_stride_slot + head * state_stride_head
    slot = slot + (channel * state_stride_channel)[:, None] + (n * state_stride_state)[None, :]

    h = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    if IS_LAST:
        before = tl.load(chunks + 5 * chunk + 3).to(tl.int64)
        knows = (before < 0) & (tl.load(has_state + sequence) != 0)
        h += tl.load(slot, mask=inside & knows, other=0.0).to(tl.float32)
        h += tl.load(carry + before * entries + place, mask=inside & (before >= 0), other=0.0)
        h *= tl.exp2(end.to(tl.float32))
    for first in range(0, length, BLOCK_T):
        i = first + tl.arange(0, BLOCK_T)
        is_token = i < length
        clock = tl.load(clocks + i, mask=is_token, other=0.0)
        kept = tl.exp2(tl.minimum(end - clock, 0.0).to(tl.float32))
        kept *= tl.load(deltas + i, mask=is_token, other=0.0)
        at = (start + i)[None, :] * x_stride_token + channel[:, None]
        value = tl.load(x + at, mask=has_channel[:, None] & is_token[None, :], other=0.0).to(tl.float32)
        at = (start + i)[:, None] * B_stride_token + n[None, :]
        b = tl.load(B + at, mask=is_token[:, None] & is_state[None, :], other=0.0).to(tl.float32)
        h = tl.dot(value, b * kept[:, None], h, input_precision=precision)
    if IS_LAST:
        tl.store(slot, h.to(state.dtype.element_ty), mask=inside)
    else:
        after = tl.load(chunks + 5 * chunk + 4).to(tl.int64)
        tl.store(carry + after * entries + place, h, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def ssd_carry(
    clocks,
    state,
    carry,  # what chunks leave alone, replaced by h after them
    sequences,  # [n, 4] int32: sequence, its first token, its first entry, number of its entries
    state_slots,
    has_state,  # as bytes
    num_tokens,
    state_stride_slot,
    state_stride_head,
    state_stride_channel,
    state_stride_state,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_STATES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """h from chunk to chunk of a sequence, of some channels of a head; all but the last, which the slot
    gets."""
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.load(sequences + 4 * row).to(tl.int64)
    start = tl.load(sequences + 4 * row + 1).to(tl.int64)
    entry = tl.load(sequences + 4 * row + 2).to(tl.int64)
    num_entries = tl.load(sequences + 4 * row + 3)
    channel = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    inside = (channel < HEAD_DIM)[:, None] & (n < NUM_STATES)[None, :]
    place = (head * HEAD_DIM + channel)[:, None] * NUM_STATES + n[None, :]
    slot = state + tl.load(state_slots + sequence).to(tl.int64) * state_stride_slot + head * state_stride_head
    slot = slot + (channel * state_stride_channel)[:, None] + (n * state_stride_state)[None, :]
    knows = tl.load(has_state + sequence) != 0
    h = tl.load(slot, mask=inside & knows, other=0.0).to(tl.float32)
    end = clocks + head * num_tokens + start + CHUNK - 1
    at = carry + entry * NUM_HEADS * HEAD_DIM * NUM_STATES + place
    for _ in range(num_entries):
        alone = tl.load(at, mask=inside, other=0.0)
        h = tl.exp2(tl.load(end).to(tl.float32)) * h + alone
        tl.store(at, h, mask=inside)
        end += CHUNK
        at += NUM_HEADS * HEAD_DIM * NUM_STATES


@triton.jit(do_not_specialize=["num_tokens"])
def ssd_outputs(
    x,
    B,
    C,
    D,
    z,
    deltas,
    clocks,
    state,
    carry,
    y,
    chunks,
    state_slots,
    has_state,  # as bytes
    num_tokens,
    x_stride_token,
    x_stride_head,
    B_stride_token,
    B_stride_group,
    C_stride_token,
    C_stride_group,
    z_stride_token,
    z_stride_head,
    state_stride_slot,
    state_stride_head,
    state_stride_channel,
    state_stride_state,
    NUM_HEADS: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_STATES: tl.constexpr,
    HAS_Z: tl.constexpr,
    IS_HALF: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Results of some tokens of a chunk, of one head: of what was before the chunk, which is the slot's or an
    entry's, and of the chunk's tokens up to each."""
    precision: tl.constexpr = "tf32" if IS_HALF else "ieee"
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    num_parts: tl.constexpr = CHUNK // BLOCK_T
    first_row = tl.program_id(2) % num_parts * BLOCK_T
    length = tl.load(chunks + 5 * chunk + 2)
    if first_row >= length:
        return
    sequence = tl.load(chunks + 5 * chunk).to(tl.int64)
    start = tl.load(chunks + 5 * chunk + 1).to(tl.int64)
    before = tl.load(chunks + 5 * chunk + 3).to(tl.int64)
    knows = (before < 0) & (tl.load(has_state + sequence) != 0)
    channel = tl.program_id(2) // num_parts * BLOCK_P + tl.arange(0, BLOCK_P)
    has_channel = channel < HEAD_DIM
    row = first_row + tl.arange(0, BLOCK_T)
    is_row = row < length
    x += head * x_stride_head
    B += head // HEADS_OF_GROUP * B_stride_group
    C += head // HEADS_OF_GROUP * C_stride_group
    clocks += head * num_tokens + start
    deltas += head * num_tokens + start
    slot = state + tl.load(state_slots + sequence).to(tl.int64) * state_stride_slot + head * state_stride_head
    entry = carry + (before * NUM_HEADS + head) * HEAD_DIM * NUM_STATES
    row_of_C = C + (start + row)[:, None] * C_stride_token

    total = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
    for first in range(0, NUM_STATES, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        is_state = n < NUM_STATES
        c = tl.load(row_of_C + n[None, :], mask=is_row[:, None] & is_state[None, :], other=0.0)
        inside = is_state[:, None] & has_channel[None, :]
        at = (n * state_stride_state)[:, None] + (channel * state_stride_channel)[None, :]
        h = tl.load(slot + at, mask=inside & knows, other=0.0).to(tl.float32)
        at = n[:, None] + channel[None, :] * NUM_STATES
        h += tl.load(entry + at, mask=inside & (before >= 0), other=0.0)
        total = tl.dot(c.to(tl.float32), h, total, input_precision=precision)
    clock = tl.load(clocks + row, mask=is_row, other=0.0)
    high = clock.to(tl.float32)  # and low: together as much of it as two numbers hold
    low = (clock - high.to(tl.float64)).to(tl.float32)
    total *= tl.exp2(high)[:, None]

    for first_column in range(0, first_row + BLOCK_T, BLOCK_T):
        column = first_column + tl.arange(0, BLOCK_T)
        is_column = column < length
        pairs = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
        for first in range(0, NUM_STATES, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            is_state = n < NUM_STATES
            c = tl.load(row_of_C + n[None, :], mask=is_row[:, None] & is_state[None, :], other=0.0)
            at = (start + column)[None, :] * B_stride_token + n[:, None]
            b = tl.load(B + at, mask=is_state[:, None] & is_column[None, :], other=0.0)
            if IS_HALF:
                pairs = tl.dot(c, b, pairs)
            else:
                pairs = tl.dot(c.to(tl.float32), b.to(tl.float32), pairs, input_precision="ieee")
        clock = tl.load(clocks + column, mask=is_column, other=0.0)
        high_there = clock.to(tl.float32)
        low_there = (clock - high_there.to(tl.float64)).to(tl.float32)
        passed = (high[:, None] - high_there[None, :]) + (low[:, None] - low_there[None, :])
        delta = tl.load(deltas + column, mask=is_column, other=0.0)
        pairs *= tl.exp2(tl.minimum(passed, 0.0)) * delta[None, :]
        pairs = tl.where(row[:, None] >= column[None, :], pairs, 0.0)
        at = (start + column)[:, None] * x_stride_token + channel[None, :]
        value = tl.load(x + at, mask=is_column[:, None] & has_channel[None, :], other=0.0).to(tl.float32)
        total = tl.dot(pairs, value, total, input_precision=precision)

    inside = is_row[:, None] & has_channel[None, :]
    at = (start + row)[:, None] * x_stride_token + channel[None, :]
    total += tl.load(D + head) * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_Z:
        at = (start + row)[:, None] * z_stride_token + head * z_stride_head + channel[None, :]
        gate = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        total = total * gate / (1.0 + tl.exp(-gate))
    at = ((start + row)[:, None] * NUM_HEADS + head) * HEAD_DIM + channel[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
