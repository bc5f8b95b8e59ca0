/* What becomes of accumulators, whether they hold floats or whole numbers: sums of lanes, scaled, with a bias, written.

   A tile is num_rows rows of x times OUTPUTS outputs, all accumulators of which are in registers. */

#ifndef HYBRIDSERVE_SUMS_H
#define HYBRIDSERVE_SUMS_H

#include "gemm/weights.h"

/* Of a tile with OUTPUTS, at most. Measured on AVX2: 3 x 4 needs all 16 registers and compilers spill one, which costs 20 %; with
   3 x 3, nine sums hide the latency of adding. */
#define ROWS 3
#define ROW_OF_SUMS 4 /* OUTPUTS and one that is not used, because lanes of four are summed at once */

typedef uint32_t uquad __attribute__((vector_size(16)));
typedef uint16_t hquad __attribute__((vector_size(8)));

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (int32_t __attribute__((vector_size(16)))){__VA_ARGS__})
#endif

/* The sums of four accumulators, each in the order of sum_v. */
INLINE quad sum_four(const vec *acc) {
  const quad a = fold(acc[0]), b = fold(acc[1]), c = fold(acc[2]), d = fold(acc[3]);
  const quad ab = PICK(a, b, 0, 4, 1, 5) + PICK(a, b, 2, 6, 3, 7);
  const quad cd = PICK(c, d, 0, 4, 1, 5) + PICK(c, d, 2, 6, 3, 7);
  return PICK(ab, cd, 0, 1, 4, 5) + PICK(ab, cd, 2, 3, 6, 7);
}

/* narrow() of each. */
INLINE hquad narrow_quad(quad sums) {
  const uquad bits = (uquad)sums, is_nan = (uquad)(sums != sums);
  const uquad rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return __builtin_convertvector((is_nan & (bits >> 16 | 0x40)) | (~is_nan & rounded), hquad);
}

/* num sums of a row, in all ways but the two most frequent. */
static __attribute__((noinline)) void write_sums(quad sums, const target *out, int64_t row, int64_t first, int64_t num) {
  const int64_t at = row * out->stride + first;
  if (out->kind == FLOAT32) {
    const float *bias = (const float *)out->bias;
    for (int64_t n = 0; n < num; n++) ((float *)out->y)[at + n] = bias ? sums[n] + bias[first + n] : sums[n];
    return;
  }
  if (out->bias)
    for (int64_t n = 0; n < num; n++) sums[n] += widen(((const uint16_t *)out->bias)[first + n]);
  const hquad halves = narrow_quad(sums);
  for (int64_t n = 0; n < num; n++) ((uint16_t *)out->y)[at + n] = halves[n];
}

/* num sums of a row, num <= OUTPUTS. */
INLINE void put_sums(quad sums, const target *out, int64_t row, int64_t first, int64_t num) {
  const int64_t at = row * out->stride + first;
  if (num < OUTPUTS || out->bias) {
    write_sums(sums, out, row, first, num);
  } else if (out->kind == FLOAT32) {
    memcpy((float *)out->y + at, &sums, OUTPUTS * sizeof(float));
  } else {
    const hquad halves = narrow_quad(sums);
    memcpy((uint16_t *)out->y + at, &halves, OUTPUTS * sizeof(uint16_t));
  }
}

INLINE quad load_scales(const float *scales, int64_t num) {
  quad some = {0};
  if (num == OUTPUTS)
    memcpy(&some, scales, OUTPUTS * sizeof(float));
  else
    for (int64_t n = 0; n < num; n++) some[n] = scales[n];
  return some;
}

#endif
