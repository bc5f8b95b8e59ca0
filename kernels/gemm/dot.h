/* Dot products of rows of x with rows of a weight, for every number of rows: what gemm, moe and lora share.

   A result is the same bits whatever other rows and outputs are computed, and by whatever thread: a block of
   2 * LANES elements is added to one accumulator of LANES lanes, block after block along the inputs, and the lanes are
   summed in one order. Tiles of rows and outputs only choose which accumulators are in registers together. The weight is
   read as it is stored; one that is laid out in panels goes to panels.h.

   x is packed (`pack`): float32, padded with zeros to whole blocks and, where the weight is half-precision, in the order
   in which its pairs come apart; or whole numbers, where the weight wants them (integers.h; codes.h for
   one-byte weights that don't). */

#ifndef HYBRIDSERVE_DOT_H
#define HYBRIDSERVE_DOT_H

#include "gemm/codes.h"
#include "gemm/integers.h"
#include "gemm/panels.h"
#include "gemm/sums.h"

#define BLOCK (2 * LANES)
#define UNUSED __attribute__((unused))
#define L1_BYTES (20 << 10) /* of weights that stay in the first cache while rows pass */

/* Half h (0 or 1) of a block: LANES elements. Pairs of half-precision numbers come apart as lower and upper halves. */
INLINE vec half_block(const char *block, int h, int kind) {
  if (kind == FLOAT32) return load((const float *)block + h * LANES);
  uvec pair;
  memcpy(&pair, block, sizeof pair);
  return (vec)(h ? pair >> 16 << 16 : pair << 16);
}

/* A row of x, of the weight's kind. */
INLINE void pack_row(float *packed, const void *x, int kind, int64_t num_inputs) {
  const int64_t whole = num_inputs / BLOCK * BLOCK, size = size_of(kind);
  for (int64_t i = 0; i < whole; i += BLOCK)
    for (int h = 0; h < 2; h++) store(packed + i + h * LANES, half_block((const char *)x + i * size, h, kind));
  if (whole == num_inputs) return;
  char rest[BLOCK * sizeof(float)] = {0};
  memcpy(rest, (const char *)x + whole * size, (num_inputs - whole) * size);
  for (int h = 0; h < 2; h++) store(packed + whole + h * LANES, half_block(rest, h, kind));
}

/* The same for a float32 row that a weight of another kind will be multiplied with. */
INLINE void pack_floats(float *packed, const float *x, int kind, int64_t num_inputs) {
  if (kind != BFLOAT16) {
    pack_row(packed, x, FLOAT32, num_inputs);
    return;
  }
  for (int64_t i = 0; i < num_inputs; i += BLOCK) {
    float block[BLOCK] = {0};
    memcpy(block, x + i, min_i(BLOCK, num_inputs - i) * sizeof(float));
    for (int lane = 0; lane < LANES; lane++) {
      packed[i + lane] = block[2 * lane];
      packed[i + LANES + lane] = block[2 * lane + 1];
    }
  }
}

/* The kind of weight whose order of inputs a packed row has. */
INLINE int order_of(weight w) { return w.is_packed ? FLOAT32 : w.kind; }

/* A row of any kind for a weight of any. */
UNUSED static void pack(float *packed, const void *x, int kind, weight w) {
  if (w.limit) {
    round_row(packed, x, kind, w.num_inputs, w.limit);
  } else if (kind == FLOAT32) {
    pack_floats(packed, (const float *)x, order_of(w), w.num_inputs);
  } else if (w.kind == kind && !w.is_packed) {
    pack_row(packed, x, kind, w.num_inputs);
  } else {
    for (int64_t i = 0; i < round_up(w.num_inputs, BLOCK); i += LANES)
      store(packed + i, elements(x, kind, i, max_i(min_i(LANES, w.num_inputs - i), 0)));
  }
}

/* One block more of each accumulator; `num_rows` and `kind` are constants where this is inlined. */
INLINE void add_block(vec acc[ROWS * ROW_OF_SUMS], int num_rows, const float *x, int64_t x_stride,
                      const char *const w[OUTPUTS], int64_t offset, int kind) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    vec xs[ROWS];
    if (kind == BFLOAT16) __asm__ volatile("" ::: "memory");
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; m++) {
      xs[m] = load(x + m * x_stride + h * LANES);
      IN_REGISTER(xs[m]);
    }
#pragma GCC unroll 8
    for (int n = 0; n < OUTPUTS; n++) {
      vec ws = half_block(w[n] + offset, h, kind);
      if (num_rows > 1) IN_REGISTER(ws);
#pragma GCC unroll 8
      for (int m = 0; m < num_rows; m++) {
        acc[m * ROW_OF_SUMS + n] = fma_v(xs[m], ws, acc[m * ROW_OF_SUMS + n]);
        IN_REGISTER(acc[m * ROW_OF_SUMS + n]);
      }
    }
  }
}

/* num_rows rows from `row` on, with outputs first to first + OUTPUTS, of which those from `end` on are not written. */
INLINE void tile(int num_rows, int kind, const float *x, int64_t x_stride, weight w, int64_t first, int64_t end,
                 const target *out, int64_t row) {
  const int64_t size = size_of(kind), num_whole = w.num_inputs / BLOCK, rest = w.num_inputs % BLOCK;
  const char *rows[OUTPUTS];
  for (int n = 0; n < OUTPUTS; n++)
    rows[n] = (const char *)w.start + min_i(first + n, end - 1) * w.stride * size;
  vec acc[ROWS * ROW_OF_SUMS] = {{0}};
  x += row * x_stride;
  /* The next outputs' weights are on their way while these are multiplied, however long that takes. */
  const int64_t ahead = row == 0 ? OUTPUTS * w.stride * size : 0;
  for (int64_t block = 0; block < num_whole; block++) {
    for (int n = 0; n < OUTPUTS; n++) __builtin_prefetch(rows[n] + block * BLOCK * size + ahead);
    add_block(acc, num_rows, x + block * BLOCK, x_stride, rows, block * BLOCK * size, kind);
  }
  if (rest) {
    char padded[OUTPUTS][BLOCK * sizeof(float)] = {{0}};
    const char *ends[OUTPUTS];
    for (int n = 0; n < OUTPUTS; n++)
      ends[n] = memcpy(padded[n], rows[n] + num_whole * BLOCK * size, rest * size);
    add_block(acc, num_rows, x + num_whole * BLOCK, x_stride, ends, 0, kind);
  }
  const int64_t num = min_i(OUTPUTS, end - first);
#pragma GCC unroll 8
  for (int m = 0; m < num_rows; m++) put_sums(sum_four(acc + m * ROW_OF_SUMS), out, row + m, first, num);
}

INLINE void any_tile(int num_rows, int kind, const float *x, int64_t x_stride, weight w, int64_t first, int64_t end,
                     const target *out, int64_t row) {
  if (kind == WHOLE)
    whole_tile(num_rows, (const char *)x, x_stride * sizeof(float), w, first, end, out, row);
  else if (kind >= INT8)
    widened_tile(num_rows, kind, x, x_stride, w, first, end, out, row);
  else
    tile(num_rows, kind, x, x_stride, w, first, end, out, row);
}

INLINE void panel_of(int kind, const float *x, int64_t x_stride, int64_t num_rows, weight w, int64_t first,
                     int64_t end, const target *out) {
  const int64_t fit = L1_BYTES / (w.num_inputs * size_of(w.kind) + 1) / OUTPUTS * OUTPUTS;
  const int64_t step = max_i(OUTPUTS, fit);
  for (int64_t from = first; from < end; from += step) {
    const int64_t to = min_i(from + step, end);
    int64_t row = 0;
    for (; row + ROWS <= num_rows; row += ROWS)
      for (int64_t n = from; n < to; n += OUTPUTS) any_tile(ROWS, kind, x, x_stride, w, n, to, out, row);
    for (int64_t n = from; n < to; n += OUTPUTS)
      switch (num_rows - row) {
        case 1: any_tile(1, kind, x, x_stride, w, n, to, out, row); break;
        case 2: any_tile(2, kind, x, x_stride, w, n, to, out, row); break;
      }
  }
}

/* Outputs first to end of every row of packed x. */
static void panel(const float *x, int64_t x_stride, int64_t num_rows, weight w, int64_t first, int64_t end,
                  target out) {
  if (w.kind == FLOAT32)
    panel_of(FLOAT32, x, x_stride, num_rows, w, first, end, &out);
  else
    panel_of(BFLOAT16, x, x_stride, num_rows, w, first, end, &out);
}

/* The same for weights of all kinds. */
UNUSED static void any_panel(const float *x, int64_t x_stride, int64_t num_rows, weight w, int64_t first, int64_t end,
                             target out) {
  if (w.is_packed)
    packed_panel(x, x_stride, num_rows, w, first, end, out);
  else if (w.kind < INT8)
    panel(x, x_stride, num_rows, w, first, end, out);
  else if (w.limit)
    panel_of(WHOLE, x, x_stride, num_rows, w, first, end, &out);
  else if (w.kind == INT8)
    panel_of(INT8, x, x_stride, num_rows, w, first, end, &out);
  else
    panel_of(FLOAT8, x, x_stride, num_rows, w, first, end, &out);
}

#endif
