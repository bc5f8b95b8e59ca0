"""Recurrences of Mamba (arXiv 2312.00752) in Triton: causal convolution and scan over ragged batches.

A step of decoding is bound by bytes: the state is read and written once, 8 bytes a channel and state in
float32. A scan of many tokens is bound by its exponentials, one a (token, channel, state), and by the length
of its chain. Long sequences are therefore scanned in chunks, all at the same time: h after a chunk is exp(A *
sum of delta) * (h before it) + (h of the chunk alone), and decays are only ever multiplied.

What is fused into one rounding is written down (`tl.fma`): loops of one token and of several are compiled
apart, and several tokens are to get the bits of as many steps of one.
"""

import triton
import triton.language as tl


@triton.jit
def causal_conv1d(
    x,  # [T, C]
    weight,  # [C, W]
    bias,  # [C]
    state,  # [num_slots, C, W - 1]
    y,  # [T, C] contiguous
    chunks,  # [n, 2] int32: sequence, first of its tokens in this step
    query_start,
    state_slots,
    has_state,  # as bytes
    num_channels,
    x_stride,
    state_stride_slot,
    state_stride_channel,
    state_stride_tap,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A program convolves some tokens of a sequence. The one with the first token, which alone reads the
    slot, also writes it: no program waits for another."""
    chunk = tl.program_id(0)
    sequence = tl.load(chunks + 2 * chunk).to(tl.int64)
    first = tl.load(chunks + 2 * chunk + 1)
    start = tl.load(query_start + sequence).to(tl.int64)
    length = (tl.load(query_start + sequence + 1) - start).to(tl.int32)
    knows = tl.load(has_state + sequence) != 0
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_channel = channel < num_channels
    history = state + tl.load(state_slots + sequence).to(tl.int64) * state_stride_slot
    history += channel * state_stride_channel

    token = first + tl.arange(0, BLOCK_T)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=has_channel, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        at = token + (tap - (WIDTH - 1))
        is_new = (at >= 0) & (at < length)
        place = x + (start + at)[:, None] * x_stride + channel[None, :]
        value = tl.load(place, mask=is_new[:, None] & has_channel[None, :], other=0.0).to(tl.float32)
        if tap < WIDTH - 1:
            is_old = (at < 0) & knows
            place = history[None, :] + ((at + (WIDTH - 1)) * state_stride_tap)[:, None]
            value += tl.load(place, mask=is_old[:, None] & has_channel[None, :], other=0.0).to(tl.float32)
        factor = tl.load(weight + channel * WIDTH + tap, mask=has_channel, other=0.0).to(tl.float32)
        total = tl.fma(tl.broadcast_to(factor[None, :], value.shape), value, total)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    place = y + (start + token)[:, None] * num_channels + channel[None, :]
    written = (token < length)[:, None] & has_channel[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=written)

    if first == 0:
        tl.debug_barrier()  # every thread has read the slot
        for kept in tl.static_range(WIDTH - 1):  # what is read lies after what has been written
            nth = length - (WIDTH - 1) + kept
            source = x + (start + nth) * x_stride + channel
            new = tl.load(source, mask=has_channel & (nth >= 0), other=0.0).to(tl.float32)
            before = history + (nth + (WIDTH - 1)) * state_stride_tap
            old = tl.load(before, mask=has_channel & (nth < 0) & knows, other=0.0).to(tl.float32)
            target = history + kept * state_stride_tap
            tl.store(target, (new + old).to(state.dtype.element_ty), mask=has_channel)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), accurate where it is small: there a logarithm of a sum would have lost the summand."""
    e = tl.exp(tl.minimum(x, 20.0))
    series = e * (1.0 - e * (0.5 - e * (0.33333334 - e * 0.25)))
    return tl.where(x > 20.0, x, tl.where(e < 0.015625, series, tl.log(1.0 + e)))


@triton.jit
def time_step(dt, dt_bias, channel, wanted, HAS_DT_BIAS: tl.constexpr):
    """delta [BLOCK_C] of a token; 0, which changes no state, where it is not wanted."""
    delta = tl.load(dt + channel, mask=wanted, other=0.0).to(tl.float32)
    if HAS_DT_BIAS:
        delta += dt_bias
    return tl.where(wanted, softplus(delta), 0.0)


@triton.jit
def scan_alone(
    u,  # [T, C]
    dt,  # [T, C]
    A,  # [C, N]
    B,  # [T, N]
    dt_bias,  # [C]
    chunks,  # [n, 3] int32: first token in the flat batch, number of tokens, entry
    carry,  # [entries, C, N] float32: gets h after the chunk, where it was 0 before it
    sums,  # [entries, C] float32: gets the sum of delta
    num_channels,
    u_stride,
    dt_stride,
    B_stride,
    NUM_STATES: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """First of three passes over long sequences: every chunk but the last, as if it were a sequence."""
    chunk = tl.program_id(0)
    start = tl.load(chunks + 3 * chunk).to(tl.int64)
    length = tl.load(chunks + 3 * chunk + 1)
    entry = tl.load(chunks + 3 * chunk + 2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_channel = channel < num_channels
    n = tl.arange(0, BLOCK_N)
    inside = has_channel[:, None] & (n < NUM_STATES)[None, :]
    place = channel[:, None] * NUM_STATES + n[None, :]
    a = tl.load(A + place, mask=inside, other=0.0) * 1.4426950408889634
    bias = 0.0
    if HAS_DT_BIAS:
        bias = tl.load(dt_bias + channel, mask=has_channel, other=0.0)
    h = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, length, UNROLL):
        for i in tl.static_range(UNROLL):
            token = start + first + i
            wanted = has_channel & (first + i < length)
            delta = time_step(dt + token * dt_stride, bias, channel, wanted, HAS_DT_BIAS)
            x = tl.load(u + token * u_stride + channel, mask=wanted, other=0.0).to(tl.float32)
            is_state = (n < NUM_STATES) & (first + i < length)
            b = tl.load(B + token * B_stride + n, mask=is_state, other=0.0).to(tl.float32)
            h = tl.fma(tl.exp2(delta[:, None] * a), h, (delta * x)[:, None] * b[None, :])
            total += delta
    tl.store(carry + entry * num_channels * NUM_STATES + place, h, mask=inside)
    tl.store(sums + entry * num_channels + channel, total, mask=has_channel)


@triton.jit
def scan_carry(
    A,
    state,
    sequences,  # [n, 3] int32: sequence, its first entry, number of its chunks
    carry,  # of each chunk: read as `scan_alone` left it, then replaced by h before the chunk
    sums,
    state_slots,
    has_state,  # as bytes
    num_channels,
    state_stride_slot,
    state_stride_channel,
    state_stride_state,
    NUM_STATES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Second pass: h from chunk to chunk of a sequence. What it makes of the last chunk is not used."""
    row = tl.program_id(0)
    sequence = tl.load(sequences + 3 * row).to(tl.int64)
    entry = tl.load(sequences + 3 * row + 1).to(tl.int64)
    num_chunks = tl.load(sequences + 3 * row + 2)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_channel = channel < num_channels
    n = tl.arange(0, BLOCK_N)
    inside = has_channel[:, None] & (n < NUM_STATES)[None, :]
    place = channel[:, None] * NUM_STATES + n[None, :]
    a = tl.load(A + place, mask=inside, other=0.0) * 1.4426950408889634
    slot = state + tl.load(state_slots + sequence).to(tl.int64) * state_stride_slot
    slot = slot + (channel * state_stride_channel)[:, None] + (n * state_stride_state)[None, :]
    knows = tl.load(has_state + sequence) != 0
    h = tl.load(slot, mask=inside & knows, other=0.0).to(tl.float32)
    for _ in range(num_chunks):
        at = carry + entry * num_channels * NUM_STATES + place
        alone = tl.load(at, mask=inside, other=0.0)
        tl.store(at, h, mask=inside)
        total = tl.load(sums + entry * num_channels + channel, mask=has_channel, other=0.0)
        h = tl.exp2(total[:, None] * a) * h + alone
        entry += 1


@triton.jit
def scan(
    u,
    dt,
    A,
    B,
    C,  # [T, N]
    D,  # [C]
    z,  # [T, C]
    dt_bias,
    state,  # [num_slots, C, N]
    y,  # [T, C] contiguous
    chunks,  # [n, 5] int32: sequence, first token in the flat batch, number of tokens, entry or -1, is last
    carry,
    state_slots,
    has_state,  # as bytes
    num_channels,
    u_stride,
    dt_stride,
    B_stride,
    C_stride,
    z_stride,
    state_stride_slot,
    state_stride_channel,
    state_stride_state,
    NUM_STATES: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    HAS_Z: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Third pass, and the only one of short sequences: outputs. h starts from the entry of the chunk or,
    where there is none, from the slot; a sequence's last chunk writes the slot, which then no other chunk
    reads."""
    chunk = tl.program_id(0)
    sequence = tl.load(chunks + 5 * chunk).to(tl.int64)
    start = tl.load(chunks + 5 * chunk + 1).to(tl.int64)
    length = tl.load(chunks + 5 * chunk + 2)
    entry = tl.load(chunks + 5 * chunk + 3).to(tl.int64)
    is_last = tl.load(chunks + 5 * chunk + 4) != 0
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_channel = channel < num_channels
    n = tl.arange(0, BLOCK_N)
    inside = has_channel[:, None] & (n < NUM_STATES)[None, :]
    place = channel[:, None] * NUM_STATES + n[None, :]
    a = tl.load(A + place, mask=inside, other=0.0) * 1.4426950408889634
    d = tl.load(D + channel, mask=has_channel, other=0.0)
    bias = 0.0
    if HAS_DT_BIAS:
        bias = tl.load(dt_bias + channel, mask=has_channel, other=0.0)
    slot = state + tl.load(state_slots + sequence).to(tl.int64) * state_stride_slot
    slot = slot + (channel * state_stride_channel)[:, None] + (n * state_stride_state)[None, :]
    if entry < 0:
        knows = tl.load(has_state + sequence) != 0
        h = tl.load(slot, mask=inside & knows, other=0.0).to(tl.float32)
    else:
        h = tl.load(carry + entry * num_channels * NUM_STATES + place, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, length, UNROLL):
        for i in tl.static_range(UNROLL):
            token = start + first + i
            wanted = has_channel & (first + i < length)
            is_state = (n < NUM_STATES) & (first + i < length)
            delta = time_step(dt + token * dt_stride, bias, channel, wanted, HAS_DT_BIAS)
            x = tl.load(u + token * u_stride + channel, mask=wanted, other=0.0).to(tl.float32)
            b = tl.load(B + token * B_stride + n, mask=is_state, other=0.0).to(tl.float32)
            c = tl.load(C + token * C_stride + n, mask=is_state, other=0.0).to(tl.float32)
            h = tl.fma(tl.exp2(delta[:, None] * a), h, (delta * x)[:, None] * b[None, :])
            out = tl.sum(h * c[None, :], 1) + d * x
            if HAS_Z:
                gate = tl.load(z + token * z_stride + channel, mask=wanted, other=0.0).to(tl.float32)
                out = out * gate / (1.0 + tl.exp(-gate))
            tl.store(y + token * num_channels + channel, out.to(y.dtype.element_ty), mask=wanted)
    tl.store(slot, h.to(state.dtype.element_ty), mask=inside & is_last)
