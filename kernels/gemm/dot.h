/* Dot products of rows of x with rows of a weight, which is read as it is stored.

   A result is the same bits whatever other rows and outputs are computed, and by whatever thread: a block of
   2 * LANES elements is added to one accumulator of LANES lanes, block after block along the inputs, and the lanes are
   summed in one order. Tiles of rows and outputs only choose which accumulators are in registers together. One-byte
   codes are multiplied by codes.h, or by integers.h where rows are whole numbers. */

#ifndef HYBRIDSERVE_DOT_H
#define HYBRIDSERVE_DOT_H

#include "gemm/codes.h"
#include "gemm/integers.h"
#include "gemm/rows.h"
#include "gemm/sums.h"

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

#endif
