/* Dot products in float32 of rows of x with codes of one byte, int8 or float8: exact about x, not fast.

   Knows how a code becomes a float32. Each product of a row and an output has one accumulator, as in dot.h. */

#ifndef HYBRIDSERVE_CODES_H
#define HYBRIDSERVE_CODES_H

#include "gemm/sums.h"

typedef int8_t cvec __attribute__((vector_size(LANES)));

/* Compilers take codes apart one by one where there is an instruction for all. */
INLINE ivec spread(cvec codes) {
#if defined(__AVX512F__) && !defined(__clang__)
  typedef char chars __attribute__((vector_size(16)));
  return (ivec)__builtin_ia32_pmovsxbd512_mask((chars)codes, (ivec){0}, -1);
#elif defined(__AVX2__) && !defined(__clang__)
  typedef char chars __attribute__((vector_size(16)));
  typedef int64_t two __attribute__((vector_size(16)));
  int64_t bits;
  memcpy(&bits, &codes, sizeof bits);
  return (ivec)__builtin_ia32_pmovsxbd256((chars)(two){bits, 0});
#else
  return __builtin_convertvector(codes, ivec);
#endif
}

/* e4m3fn: a sign, 4 bits of exponent, 3 of mantissa; numbers below 2^-6 are multiples of 2^-9; 0x7f is NaN. */
INLINE vec widen_float8(ivec bits) {
  const ivec magnitude = bits & 0x7f, normal = (magnitude << 20) + (120 << 23);
  const ivec small = (ivec)(__builtin_convertvector(magnitude, vec) * splat(0x1p-9f));
  const ivec is_small = magnitude < 8, is_nan = magnitude == 0x7f;
  const ivec value = (is_small & small) | (~is_small & normal) | (is_nan & 0x7fc00000);
  return (vec)(value | (bits & INT32_MIN));
}

INLINE vec widen_code(const char *p, int kind) {
  cvec codes;
  memcpy(&codes, p, sizeof codes);
  return kind == INT8 ? __builtin_convertvector(spread(codes), vec) : widen_float8(spread(codes));
}

/* Like dot.h's `tile`. */
INLINE void widened_tile(int num_rows, int kind, const float *x, int64_t x_stride, weight w, int64_t first, int64_t end,
                         const target *out, int64_t row) {
  const int64_t whole = w.num_inputs / LANES * LANES;
  char padded[OUTPUTS][LANES] = {{0}};
  const char *rows[OUTPUTS];
  for (int n = 0; n < OUTPUTS; n++) {
    rows[n] = (const char *)w.start + min_i(first + n, end - 1) * w.stride;
    memcpy(padded[n], rows[n] + whole, w.num_inputs - whole);
  }
  vec acc[ROWS * ROW_OF_SUMS] = {{0}};
  x += row * x_stride;
  for (int64_t i = 0; i < w.num_inputs; i += LANES) {
#pragma GCC unroll 8
    for (int n = 0; n < OUTPUTS; n++) {
      const char *codes = i < whole ? rows[n] + i : padded[n];
      __asm__("" : "+r"(codes)); /* one loop, not one for either */
      vec ws = widen_code(codes, kind);
      if (num_rows > 1) IN_REGISTER(ws);
#pragma GCC unroll 8
      for (int m = 0; m < num_rows; m++)
        acc[m * ROW_OF_SUMS + n] = fma_v(load(x + m * x_stride + i), ws, acc[m * ROW_OF_SUMS + n]);
    }
  }
  const int64_t num = min_i(OUTPUTS, end - first);
  const quad scales = load_scales(w.scales + first, num);
#pragma GCC unroll 8
  for (int m = 0; m < num_rows; m++)
    put_sums(sum_four(acc + m * ROW_OF_SUMS) * scales, out, row + m, first, num);
}

#endif
