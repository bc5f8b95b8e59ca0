/* Dot products in whole numbers: rows of x, rounded, with rows of int8 codes.

   A row of x is whole numbers of at most 16 bits and a scale (rows.h's `round_row`). Products of the two are added up in
   32 bits, which hold the sum of PIECE of them whatever they are, so a sum is exact and depends on no order; sums of
   pieces, if there are several, are added up as floats, one after the other. */

#ifndef HYBRIDSERVE_INTEGERS_H
#define HYBRIDSERVE_INTEGERS_H

#include "gemm/rows.h"
#include "gemm/sums.h"

#define PIECE 1024
#define LARGEST ((1 << 14) - 1) /* of a row: 1024 * 128 * LARGEST < 2^31; -128 is a code that other quantizers use */
#define STEP (2 * LANES) /* inputs that are multiplied by one instruction */

typedef int16_t svec __attribute__((vector_size(2 * STEP)));
typedef int8_t bvec __attribute__((vector_size(STEP)));
typedef int32_t iquad __attribute__((vector_size(16)));

/* acc + a * b, the products of neighbours added to one lane or, on Arm, to lanes as they come. */
INLINE ivec add_products(ivec acc, svec a, svec b) {
#if defined(__AVX512VNNI__) && LANES == 16
  return (ivec)__builtin_ia32_vpdpwssd_v16si((ivec)acc, (ivec)a, (ivec)b);
#elif defined(__AVXVNNI__) && LANES == 8
  return (ivec)__builtin_ia32_vpdpwssd_v8si((ivec)acc, (ivec)a, (ivec)b);
#elif defined(__AVX512BW__) && LANES == 16 && !defined(__clang__)
  typedef short words __attribute__((vector_size(64)));
  return acc + (ivec)__builtin_ia32_pmaddwd512_mask((words)a, (words)b, (ivec){0}, -1);
#elif defined(__AVX512BW__) && LANES == 16
  return acc + (ivec)__builtin_ia32_pmaddwd512(a, b);
#elif defined(__AVX2__) && LANES == 8
  return acc + (ivec)__builtin_ia32_pmaddwd256(a, b);
#elif defined(__aarch64__)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return (ivec)vmlal_high_s16(vmlal_s16((int32x4_t)acc, vget_low_s16(x), vget_low_s16(y)), x, y);
#else
  const ivec x = (ivec)a, y = (ivec)b;
  return acc + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

/* Compilers need three instructions where there is one. */
INLINE svec widen_codes(bvec codes) {
#if defined(__AVX512BW__) && LANES == 16 && !defined(__clang__)
  typedef char chars __attribute__((vector_size(32)));
  return (svec)__builtin_ia32_pmovsxbw512_mask((chars)codes, (svec){0}, -1);
#elif defined(__AVX2__) && LANES == 8 && !defined(__clang__)
  typedef char chars __attribute__((vector_size(16)));
  return (svec)__builtin_ia32_pmovsxbw256((chars)codes);
#else
  return __builtin_convertvector(codes, svec);
#endif
}

INLINE float row_scale(const void *rounded, int64_t num_inputs) {
  float scale;
  memcpy(&scale, (const int16_t *)rounded + round_up(num_inputs, WHOLE_BLOCK), sizeof scale);
  return scale;
}

/* Like fold() and sum_four(); the result is floats. */
INLINE iquad fold_whole(ivec v) {
#if LANES == 4
  return v;
#else
  iquad q[LANES / 4];
  memcpy(q, &v, sizeof v);
#if LANES == 8
  return q[0] + q[1];
#else
  return (q[0] + q[2]) + (q[1] + q[3]);
#endif
#endif
}
INLINE quad sum_four_whole(const ivec *acc) {
  const iquad a = fold_whole(acc[0]), b = fold_whole(acc[1]), c = fold_whole(acc[2]), d = fold_whole(acc[3]);
  const iquad ab = PICK(a, b, 0, 4, 1, 5) + PICK(a, b, 2, 6, 3, 7);
  const iquad cd = PICK(c, d, 0, 4, 1, 5) + PICK(c, d, 2, 6, 3, 7);
  return __builtin_convertvector(PICK(ab, cd, 0, 1, 4, 5) + PICK(ab, cd, 2, 3, 6, 7), quad);
}

/* A block more of the accumulators of outputs first_n to end_n; these and `num_rows` are constants where this is inlined.
   x_stride is in bytes. */
INLINE void add_whole_block(ivec acc[ROWS * ROW_OF_SUMS], int num_rows, int first_n, int end_n, const char *x,
                            int64_t x_stride, const char *const w[OUTPUTS]) {
#pragma GCC unroll 8
  for (int k = 0; k < WHOLE_BLOCK; k += STEP) {
    svec xs[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; m++) {
      memcpy(xs + m, x + m * x_stride + k * sizeof(int16_t), sizeof *xs);
      IN_REGISTER(xs[m]);
    }
#pragma GCC unroll 8
    for (int n = first_n; n < end_n; n++) {
      bvec codes;
      memcpy(&codes, w[n] + k, sizeof codes);
      svec ws = widen_codes(codes);
      if (num_rows > 1) IN_REGISTER(ws);
#pragma GCC unroll 8
      for (int m = 0; m < num_rows; m++) {
        acc[m * ROW_OF_SUMS + n] = add_products(acc[m * ROW_OF_SUMS + n], xs[m], ws);
        IN_REGISTER(acc[m * ROW_OF_SUMS + n]);
      }
    }
  }
}

/* Like dot.h's `tile`; x_stride is in bytes. */
INLINE void whole_tile(int num_rows, const char *x, int64_t x_stride, weight w, int64_t first, int64_t end,
                       const target *out, int64_t row) {
  const int64_t whole = w.num_inputs / WHOLE_BLOCK * WHOLE_BLOCK;
  char padded[OUTPUTS][WHOLE_BLOCK] = {{0}};
  const char *rows[OUTPUTS];
  for (int n = 0; n < OUTPUTS; n++) {
    rows[n] = (const char *)w.start + min_i(first + n, end - 1) * w.stride;
    if (whole < w.num_inputs) memcpy(padded[n], rows[n] + whole, w.num_inputs - whole);
  }
  x += row * x_stride;
  const int64_t ahead = row == 0 ? 2 * OUTPUTS * w.stride : 0;
  quad totals[ROWS] = {{0}};
  const int side_by_side = num_rows > 1 ? OUTPUTS : 1; /* memory is read faster in one stream than in three */
#pragma GCC unroll 8
  for (int n = 0; n < OUTPUTS; n += side_by_side)
    for (int64_t from = 0; from < w.num_inputs; from += PIECE) {
      ivec acc[ROWS * ROW_OF_SUMS] = {{0}};
      const int64_t to = min_i(from + PIECE, w.num_inputs);
      for (int64_t k = from; k < to; k += WHOLE_BLOCK) {
        const char *blocks[OUTPUTS];
#pragma GCC unroll 8
        for (int i = n; i < n + side_by_side; i++) {
          blocks[i] = k < whole ? rows[i] + k : padded[i];
          __asm__("" : "+r"(blocks[i])); /* one loop, not one for either */
          __builtin_prefetch(rows[i] + k + ahead);
        }
        add_whole_block(acc, num_rows, n, n + side_by_side, x + k * sizeof(int16_t), x_stride, blocks);
      }
#pragma GCC unroll 8
      for (int m = 0; m < num_rows; m++) totals[m] += sum_four_whole(acc + m * ROW_OF_SUMS);
    }
  const int64_t num = min_i(OUTPUTS, end - first);
  const quad scales = load_scales(w.scales + first, num);
#pragma GCC unroll 8
  for (int m = 0; m < num_rows; m++)
    put_sums(totals[m] * scales * row_scale(x + m * x_stride, w.num_inputs), out, row + m, first, num);
}

#endif
