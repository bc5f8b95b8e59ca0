/* What the C kernels share: vectors as wide as the machine's, half-precision numbers, the exponential.

   Knows no kernel. Vectors are GNU C's (GCC and Clang), so the same source is the AVX2, AVX-512 and Arm code.
   A kernel is called with plain pointers, sizes and strides in elements, all int64_t, and a number of threads;
   it keeps no state. */

#ifndef HYBRIDSERVE_NATIVE_H
#define HYBRIDSERVE_NATIVE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef float quad __attribute__((vector_size(16)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline)) /* compilers need longer for one large function than for its parts */
#define UNUSED __attribute__((unused))
#define EXPORT __attribute__((visibility("default")))

/* Numbers of the kinds of element, as `native.py` of a kernel passes them. */
enum { FLOAT32 = 0, BFLOAT16 = 1 };

/* Keeps a vector in a register, where the compiler would rather read it from memory again for every use. */
#if defined(IN_REGISTER)
#elif defined(__x86_64__) || defined(__i386__)
#define IN_REGISTER(v) __asm__ volatile("" : "+x"(v))
#elif defined(__aarch64__)
#define IN_REGISTER(v) __asm__ volatile("" : "+w"(v))
#else
#define IN_REGISTER(v) (void)(v)
#endif

INLINE int64_t min_i(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_i(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t round_up(int64_t a, int64_t unit) { return ceil_div(a, unit) * unit; }

/* Work in num_chunks chunks: every thread has a run of them, so that it reads memory front to back, and who has done its
   own takes what others have not begun. `taken` has room for num_threads. */
INLINE int64_t first_chunk(int64_t thread, int64_t num_chunks, int64_t num_threads) {
  return thread * num_chunks / num_threads;
}
INLINE void deal(int64_t *taken, int64_t num_chunks, int64_t num_threads) {
  for (int64_t t = 0; t < num_threads; t++) taken[t] = first_chunk(t, num_chunks, num_threads);
}
/* A chunk that nobody else does, or num_chunks if there is none. `of` is whose chunks are taken: at first one's own. */
INLINE int64_t next_chunk(int64_t *taken, int64_t num_chunks, int64_t num_threads, int64_t *of) {
  for (int64_t tried = 0; tried < num_threads; tried++) {
    const int64_t chunk = __atomic_fetch_add(taken + *of, 1, __ATOMIC_RELAXED);
    if (chunk < first_chunk(*of + 1, num_chunks, num_threads)) return chunk;
    *of = *of + 1 < num_threads ? *of + 1 : 0;
  }
  return num_chunks;
}

INLINE vec splat(float a) { return a - (vec){}; }

/* Unaligned. */
INLINE vec load(const float *p) {
  vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }

/* The first n < LANES elements; the others are zero and not touched in memory. */
INLINE vec load_part(const float *p, int64_t n) {
  float part[LANES] = {0};
  for (int64_t i = 0; i < n; i++) part[i] = p[i];
  return load(part);
}
INLINE void store_part(float *p, vec v, int64_t n) {
  float part[LANES];
  store(part, v);
  for (int64_t i = 0; i < n; i++) p[i] = part[i];
}

/* a * b + c with one rounding wherever the machine can: written out, because compilers fuse in one loop and not in
   another, and results must not depend on the loop. (Builtins, because reading immintrin.h takes half a second.) */
#if defined(__has_builtin)
#if __has_builtin(__builtin_elementwise_fma)
#define ELEMENTWISE_FMA
#endif
#endif
INLINE vec fma_v(vec a, vec b, vec c) {
#if defined(__aarch64__)
  return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(ELEMENTWISE_FMA) && defined(__FMA__)
  return __builtin_elementwise_fma(a, b, c);
#elif LANES == 16
  return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
#elif LANES == 8 && defined(__FMA__)
  return __builtin_ia32_vfmaddps256(a, b, c);
#else
  return a * b + c;
#endif
}

INLINE vec select_v(ivec condition, vec yes, vec no) {
  return (vec)((condition & (ivec)yes) | (~condition & (ivec)no));
}

/* Lanes added up to the last four: lane i + lane i + LANES/2, and so on. */
INLINE quad fold(vec v) {
#if LANES == 4
  return v;
#else
  quad q[LANES / 4];
  memcpy(q, &v, sizeof v);
#if LANES == 8
  return q[0] + q[1];
#else
  return (q[0] + q[2]) + (q[1] + q[3]);
#endif
#endif
}

/* The sum of all lanes, always in this order. */
INLINE float sum_v(vec v) {
  const quad q = fold(v);
  return (q[0] + q[2]) + (q[1] + q[3]);
}

/* e to the x, within 2 units in the last place; NaN, infinities, overflow as expf, underflow to zero below -87.3.
   2^n * 2^f by a polynomial in the rest of x / ln 2, the coefficients of a Taylor series (|rest| <= ln 2 / 2). */
INLINE vec exp_v(vec x) {
  const vec high = splat(88.72284f), low = splat(-87.33655f), magic = splat(12582912.0f); /* 1.5 * 2^23 */
  vec bounded = select_v(x > high, high, select_v(x < low, low, x)); /* NaN stays */
  vec n = fma_v(bounded, splat(1.44269504f), magic);
  ivec shift = (ivec)n;
  n -= magic;
  vec r = fma_v(n, splat(-0.693359375f), bounded);
  r = fma_v(n, splat(2.12194440e-4f), r);
  vec p = splat(1.0f / 5040);
  p = fma_v(p, r, splat(1.0f / 720));
  p = fma_v(p, r, splat(1.0f / 120));
  p = fma_v(p, r, splat(1.0f / 24));
  p = fma_v(p, r, splat(1.0f / 6));
  p = fma_v(p, r, splat(0.5f));
  p = fma_v(p, r, splat(1.0f));
  p = fma_v(p, r, splat(1.0f));
  /* 2^n in two factors, because n may be 128. */
  ivec exponent = shift - (ivec)magic, half = exponent >> 1;
  vec scale = (vec)((half + 127) << 23), rest = (vec)((exponent - half + 127) << 23);
  vec y = p * scale * rest;
  y = select_v(x > high, splat(__builtin_inff()), y);
  return select_v(x < low, splat(0.0f), y);
}

INLINE vec silu_v(vec x) { return x / (splat(1.0f) + exp_v(-x)); }

/* bfloat16: the upper half of a float32. */
INLINE float widen(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
INLINE vec widen_v(const uint16_t *p) {
  hvec h;
  memcpy(&h, p, sizeof h);
  return (vec)(__builtin_convertvector(h, uvec) << 16);
}
/* To the nearest, ties to even; NaN stays NaN. */
INLINE uint16_t narrow(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  if (f != f) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
INLINE void narrow_v(uint16_t *p, vec v) {
  uvec bits = (uvec)v;
  uvec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  ivec is_nan = v != v;
  rounded = (uvec)((is_nan & (ivec)(bits >> 16 | 0x40)) | (~is_nan & (ivec)rounded));
  hvec h = __builtin_convertvector(rounded, hvec);
  memcpy(p, &h, sizeof h);
}

#endif
