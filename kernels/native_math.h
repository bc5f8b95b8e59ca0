/* What recurrences and attention need beyond native.h: base-2 exponential, softplus, sums of many vectors at once,
   and rows of float32, bfloat16 or float16 elements from and to float32. Knows no kernel. */

#ifndef HYBRIDSERVE_NATIVE_MATH_H
#define HYBRIDSERVE_NATIVE_MATH_H

#include "native.h"

#define FLOAT16 2 /* beside native.h's kinds of element */

#define LOG2_E 0x1.715476p+0f

/* a < b ? a : b in each lane: b where either is NaN. One instruction, where a select is three. */
INLINE vec least_v(vec a, vec b) {
#if LANES == 16 && !defined(__clang__)
  return __builtin_ia32_minps512_mask(a, b, a, -1, 4);
#elif LANES == 8
  return __builtin_ia32_minps256(a, b);
#else
  return select_v(a < b, a, b);
#endif
}

/* a > b ? a : b in each lane: b where either is NaN. */
INLINE vec most_v(vec a, vec b) {
#if LANES == 16 && !defined(__clang__)
  return __builtin_ia32_maxps512_mask(a, b, a, -1, 4);
#elif LANES == 8
  return __builtin_ia32_maxps256(a, b);
#else
  return select_v(a > b, a, b);
#endif
}

/* Adding this rounds to an integer n and leaves n + 127, the exponent of 2^n as a float has it, in the lowest bits. */
#define EXPONENT_SHIFT (0x1.8p23f + 127)

/* 2^f 2^n for |f| <= 1/2, `shifted` = n + EXPONENT_SHIFT: 0 for n = -127, infinity for n = 128. The polynomial is
   minimax with 2^0 = 1 exactly. */
INLINE vec scaled_exp2_v(vec f, vec shifted) {
  vec p = splat(0x1.5bba56p-10f);
  p = fma_v(p, f, splat(0x1.3cea84p-7f));
  p = fma_v(p, f, splat(0x1.c6b752p-5f));
  p = fma_v(p, f, splat(0x1.ebf9bcp-3f));
  p = fma_v(p, f, splat(0x1.62e42ap-1f));
  p = fma_v(p, f, splat(1));
  return p * (vec)((ivec)shifted << 23);
}

/* 2 to the x, within 2 units in the last place; 0 below -127, infinity above 127.5, NaN for NaN. */
INLINE vec exp2_v(vec x) {
  x = least_v(splat(128), most_v(splat(-127), x));
  const vec shifted = x + EXPONENT_SHIFT;
  return scaled_exp2_v(x - (shifted - EXPONENT_SHIFT), shifted);
}

/* e to the x, as exp2_v; ln 2 in two parts, for x log2(e) rounded would be wrong by x / 2 units. */
INLINE vec quick_exp_v(vec x) {
  x = least_v(splat(88.8f), most_v(splat(-88.1f), x));
  const vec shifted = fma_v(x, splat(LOG2_E), splat(EXPONENT_SHIFT)), n = shifted - EXPONENT_SHIFT;
  const vec r = fma_v(n, splat(-0x1.7f7d1cp-20f), fma_v(n, splat(-0x1.62e4p-1f), x));
  return scaled_exp2_v(r * LOG2_E, shifted);
}

INLINE vec quick_silu_v(vec x) { return x / (quick_exp_v(-x) + 1); }

/* log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), the latter as 2 artanh(e / (2 + e)), minimax where e <= 1. */
INLINE vec softplus_v(vec x) {
  const vec e = quick_exp_v(least_v(x, -x)), s = e / (e + 2), s2 = s * s;
  vec p = splat(0x1.1ef87p-3f);
  p = fma_v(p, s2, splat(0x1.1eb612p-3f));
  p = fma_v(p, s2, splat(0x1.99d27cp-3f));
  p = fma_v(p, s2, splat(0x1.5555p-2f));
  return fma_v(splat(2), fma_v(s * s2, p, s), most_v(splat(0), x));
}

/* Odd, minimax where |x| < 5/8, and there within a unit in the last place: a small x must not lose digits to a one. */
INLINE vec tanh_v(vec x) {
  const vec x2 = x * x;
  vec p = splat(-0x1.75e1ccp-8f);
  p = fma_v(p, x2, splat(0x1.52269ap-6f));
  p = fma_v(p, x2, splat(-0x1.b83c5ap-5f));
  p = fma_v(p, x2, splat(0x1.110726p-3f));
  p = fma_v(p, x2, splat(-0x1.555532p-2f));
  return select_v(x2 < 0.390625f, fma_v(x * x2, p, x), 1 - 2 / (quick_exp_v(x + x) + 1));
}

/* In lane l the sum of two lanes `half` apart, of b where l has that bit and of a elsewhere. */
INLINE vec sums_of_halves(vec a, vec b, int half) {
#ifdef __clang__
  vec sum;
  for (int l = 0; l < LANES; l++) sum[l] = l & half ? b[l] + b[l ^ half] : a[l] + a[l ^ half];
  return sum;
#else
  ivec lane;
  for (int l = 0; l < LANES; l++) lane[l] = l;
  const ivec from_b = ((lane & half) != 0) & LANES;
  return __builtin_shuffle(a, b, lane | from_b) + __builtin_shuffle(a, b, (lane ^ half) | from_b);
#endif
}

/* In lane i the sum of the lanes of v[i], always in the same order. Destroys v. */
INLINE vec sums_of_lanes(vec v[LANES]) {
#pragma GCC unroll 8
  for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) v[i] = sums_of_halves(v[i], v[i + half], half);
  return v[0];
}

INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

/* float16 has 5 bits of exponent and 10 of mantissa. Exact, also where it is subnormal. */
INLINE float widen_half(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
  const uint32_t finite = bits_of(float_of(rest) * 0x1p112f);
  return float_of(sign | (rest >= 0x0f800000 ? rest | 0x7f800000 : finite));
}

/* To the nearest, ties to even; beyond 65504 infinity; NaN stays NaN. */
INLINE uint16_t narrow_half(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000, rest = bits_of(x) & 0x7fffffff;
  const uint32_t normal = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  const uint32_t subnormal = bits_of(float_of(rest) + 0.5f) - 0x3f000000; /* the adder rounds */
  const uint32_t special = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
  return (uint16_t)(sign | (rest >= 0x477ff000 ? special : rest < 0x38800000 ? subnormal : normal));
}

INLINE int64_t size_of(int64_t type) { return type == FLOAT32 ? 4 : 2; }

/* The address of element `index` of a tensor of this type. */
INLINE void *element(const void *base, int64_t type, int64_t index) {
  return (char *)base + index * size_of(type);
}

INLINE void widen_side_by_side(float *restrict to, const uint16_t *restrict from, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, widen_v(from + i));
  for (; i < n; i++) to[i] = widen(from[i]);
}

INLINE void narrow_side_by_side(uint16_t *restrict to, const float *restrict from, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) narrow_v(to + i, load(from + i));
  for (; i < n; i++) to[i] = narrow(from[i]);
}

/* to[i] = from[i * stride] for i < n */
static NOINLINE UNUSED void widen_row(float *restrict to, const void *restrict from, int64_t type, int64_t n, int64_t stride) {
  const float *const full = from;
  const uint16_t *const half = from;
  if (type == FLOAT32 && stride == 1)
    memcpy(to, from, (size_t)n * 4);
  else if (type == FLOAT32)
    for (int64_t i = 0; i < n; i++) to[i] = full[i * stride];
  else if (type == BFLOAT16 && stride == 1)
    widen_side_by_side(to, half, n);
  else if (type == BFLOAT16)
    for (int64_t i = 0; i < n; i++) to[i] = widen(half[i * stride]);
  else
    for (int64_t i = 0; i < n; i++) to[i] = widen_half(half[i * stride]);
}

/* to[i * stride] = from[i] for i < n, rounded to the type */
static NOINLINE UNUSED void narrow_row(void *restrict to, const float *restrict from, int64_t type, int64_t n, int64_t stride) {
  float *const full = to;
  uint16_t *const half = to;
  if (type == FLOAT32 && stride == 1)
    memcpy(to, from, (size_t)n * 4);
  else if (type == FLOAT32)
    for (int64_t i = 0; i < n; i++) full[i * stride] = from[i];
  else if (type == BFLOAT16 && stride == 1)
    narrow_side_by_side(half, from, n);
  else if (type == BFLOAT16)
    for (int64_t i = 0; i < n; i++) half[i * stride] = narrow(from[i]);
  else
    for (int64_t i = 0; i < n; i++) half[i * stride] = narrow_half(from[i]);
}

#endif
