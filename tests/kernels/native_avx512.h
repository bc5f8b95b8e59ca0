/* Runs the C kernels' AVX-512 code on a CPU that has AVX2 only, for tests: included before a source, by `-include`.

   The source sees AVX-512 (F, BW and, unless WITHOUT_VNNI is defined, VNNI): it has vectors of 16 lanes, which the
   compiler takes apart, and calls builtins, each of which is here its 256-bit sister on both halves. Of masks and
   roundings it knows only those that the kernels use: all lanes, to the nearest. What it can't tell is whether the
   compiler's code for AVX-512 is right. */

#ifndef HYBRIDSERVE_NATIVE_AVX512_H
#define HYBRIDSERVE_NATIVE_AVX512_H

#if defined(__AVX512F__) || !defined(__AVX2__) || !defined(__FMA__) || defined(__clang__)
#error "for GCC, and for a machine that has AVX2 and FMA, and not AVX-512"
#endif
#pragma GCC diagnostic ignored "-Wpsabi" /* all of it is inlined */

#define __AVX512F__ 1
#define __AVX512BW__ 1
#ifndef WITHOUT_VNNI
#define __AVX512VNNI__ 1
#endif

/* No register holds such a vector. */
#define IN_REGISTER(v) __asm__ volatile("" : "+m"(v))

typedef float floats_256 __attribute__((vector_size(32)));
typedef int ints_256 __attribute__((vector_size(32)));
typedef short shorts_256 __attribute__((vector_size(32)));
typedef char chars_128 __attribute__((vector_size(16)));
typedef long long longs_128 __attribute__((vector_size(16)));
typedef float floats_512 __attribute__((vector_size(64)));
typedef int ints_512 __attribute__((vector_size(64)));
typedef short shorts_512 __attribute__((vector_size(64)));
typedef char chars_256 __attribute__((vector_size(32)));

typedef union {
  floats_512 floats;
  ints_512 ints;
  shorts_512 shorts;
  floats_256 half_floats[2];
  ints_256 half_ints[2];
  shorts_256 half_shorts[2];
} vector_512;

typedef union {
  chars_256 all;
  chars_128 half[2];
} vector_256;

#define EMULATION static inline __attribute__((always_inline))

#define OF_HALVES(name, builtin)                                                         \
  EMULATION floats_512 name(floats_512 a, floats_512 b) {                                \
    vector_512 x = {.floats = a}, y = {.floats = b};                                     \
    for (int h = 0; h < 2; h++) x.half_floats[h] = builtin(x.half_floats[h], y.half_floats[h]); \
    return x.floats;                                                                     \
  }
OF_HALVES(min_512, __builtin_ia32_minps256)
OF_HALVES(max_512, __builtin_ia32_maxps256)

EMULATION floats_512 fma_512(floats_512 a, floats_512 b, floats_512 c) {
  vector_512 x = {.floats = a}, y = {.floats = b}, z = {.floats = c};
  for (int h = 0; h < 2; h++)
    z.half_floats[h] = __builtin_ia32_vfmaddps256(x.half_floats[h], y.half_floats[h], z.half_floats[h]);
  return z.floats;
}

EMULATION ints_512 multiply_pairs_512(shorts_512 a, shorts_512 b) {
  vector_512 x = {.shorts = a}, y = {.shorts = b};
  for (int h = 0; h < 2; h++) x.half_ints[h] = __builtin_ia32_pmaddwd256(x.half_shorts[h], y.half_shorts[h]);
  return x.ints;
}

EMULATION shorts_512 widen_to_shorts_512(chars_256 codes) {
  vector_256 from = {.all = codes};
  vector_512 to;
  for (int h = 0; h < 2; h++) to.half_shorts[h] = __builtin_ia32_pmovsxbw256(from.half[h]);
  return to.shorts;
}

EMULATION ints_512 widen_to_ints_512(chars_128 codes) {
  const longs_128 low = (longs_128)codes, high = {low[1], 0};
  vector_512 to;
  to.half_ints[0] = __builtin_ia32_pmovsxbd256(codes);
  to.half_ints[1] = __builtin_ia32_pmovsxbd256((chars_128)high);
  return to.ints;
}

#define __builtin_ia32_vfmaddps512_mask(a, b, c, mask, rounding) fma_512(a, b, c)
#define __builtin_ia32_minps512_mask(a, b, without, mask, rounding) min_512(a, b)
#define __builtin_ia32_maxps512_mask(a, b, without, mask, rounding) max_512(a, b)
#define __builtin_ia32_vpdpwssd_v16si(sums, a, b) \
  ((ints_512)(sums) + multiply_pairs_512((shorts_512)(a), (shorts_512)(b)))
#define __builtin_ia32_pmaddwd512_mask(a, b, without, mask) multiply_pairs_512(a, b)
#define __builtin_ia32_pmovsxbw512_mask(codes, without, mask) widen_to_shorts_512((chars_256)(codes))
#define __builtin_ia32_pmovsxbd512_mask(codes, without, mask) widen_to_ints_512((chars_128)(codes))

#endif
