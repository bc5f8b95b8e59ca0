/* A token of a row of logits: the likeliest, or one that is drawn by the inverse of the cumulative distribution.

   A row is drawn from by weights, e^((x - max) / temperature) in float32, whose largest is 1. What is kept of them is said
   by the smallest weight that is, found by the digits of its bits, so ties stay together; they are added up in float64. */

#ifndef HYBRIDSERVE_DRAW_H
#define HYBRIDSERVE_DRAW_H

#include "native_math.h"

#define BLOCK 256 /* weights that are added up before one of them is looked for */
#define DIGIT_BITS 10
#define DIGITS (1 << DIGIT_BITS)

typedef double dquad __attribute__((vector_size(32)));

/* Where the largest of n > 0 elements is, the first of those that are equal; whether all are finite. */
static int64_t largest(const float *x, int64_t n, uint8_t *finite) {
  vec top = splat(-__builtin_inff()), special = splat(0);
  ivec lane, place;
  for (int l = 0; l < LANES; l++) lane[l] = l;
  place = lane;
  for (int64_t i = 0; i + LANES <= n; i += LANES) {
    const vec v = load(x + i);
    const ivec is_more = v > top;
    top = select_v(is_more, v, top);
    place = (is_more & (lane + (int32_t)i)) | (~is_more & place);
    special += v - v; /* NaN for NaN and infinities */
  }
  float most = n < LANES ? x[0] : top[0];
  int64_t at = n < LANES ? 0 : place[0];
  for (int l = 1; l < LANES && n >= LANES; l++)
    if (top[l] > most || (top[l] == most && place[l] < at)) most = top[l], at = place[l];
  float rest = sum_v(special);
  for (int64_t i = n / LANES * LANES; i < n; i++) {
    if (x[i] > most) most = x[i], at = i;
    rest += x[i] - x[i];
  }
  *finite = rest == 0;
  return at;
}

/* Weights of n logits, up to a multiple of LANES, zero beyond. Returns whether there is anything to draw: a logit that
   is greater than -infinity, and none that is NaN or infinity. */
static int weigh(const float *x, int64_t n, float temperature, float *weights) {
  vec top = splat(-__builtin_inff());
  ivec is_nan = {};
  for (int64_t i = 0; i < n / LANES * LANES; i += LANES) store(weights + i, load(x + i) / temperature);
  for (int64_t i = n / LANES * LANES; i < round_up(n, LANES); i++)
    weights[i] = i < n ? x[i] / temperature : -__builtin_inff();
  for (int64_t i = 0; i < n; i += LANES) {
    const vec v = load(weights + i);
    is_nan |= v != v;
    top = most_v(v, top);
  }
  float most = top[0];
  int32_t any_nan = is_nan[0];
  for (int l = 1; l < LANES; l++) most = top[l] > most ? top[l] : most, any_nan |= is_nan[l];
  if (any_nan || most - most != 0) return 0;
  for (int64_t i = 0; i < n; i += LANES) store(weights + i, quick_exp_v(load(weights + i) - most));
  return 1;
}

/* Weights less than `least` become 0. Returns the sum of the others; sums[b] is that of block b. */
static double keep_from(float least, float *weights, int64_t n, double *sums) {
  double total = 0;
  for (int64_t from = 0; from < n; from += BLOCK) {
    dquad sum = {};
    for (int64_t i = from; i < min_i(n, from + BLOCK); i += LANES) {
      const vec weight = load(weights + i), kept = select_v(weight < least, splat(0), weight);
      store(weights + i, kept);
      quad parts[LANES / 4];
      memcpy(parts, &kept, sizeof kept);
#pragma GCC unroll 4
      for (int q = 0; q < LANES / 4; q++) sum += __builtin_convertvector(parts[q], dquad);
    }
    total += *sums++ = (sum[0] + sum[2]) + (sum[1] + sum[3]);
  }
  return total;
}

/* Copies weights of at least `least`, in their order; returns how many. */
static int64_t gather(const float *weights, int64_t n, float least, float *to) {
  int64_t num = 0;
  for (int64_t i = 0; i < n; i++) {
    to[num] = weights[i];
    num += weights[i] >= least;
  }
  return num;
}

/* The largest weight with which all that are not less come to `wanted`, by their sum or by their number; 0 where
   none does. `some` are the weights that it may be, none greater than 1; destroys them. */
static float smallest_kept(float *some, int64_t n, double wanted, int by_number) {
  uint32_t found = 0;
  double above = 0;
  for (int shift = 2 * DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
    double sums[DIGITS] = {0};
    for (int64_t i = 0; i < n; i++) sums[bits_of(some[i]) >> shift & (DIGITS - 1)] += by_number ? 1 : some[i];
    uint32_t digit = DIGITS - 1;
    for (; digit > 0 && !(sums[digit] > 0 && above + sums[digit] >= wanted); digit--) above += sums[digit];
    found |= digit << shift;
    int64_t num = 0;
    for (int64_t i = 0; i < n; i++) {
      const uint32_t bits = bits_of(some[i]);
      some[num] = some[i];
      num += (bits >> shift & (DIGITS - 1)) == digit;
    }
    n = num;
  }
  return float_of(found);
}

/* Where the sum of the weights up to and with an element exceeds `target`. Added up one by one they may stay below what
   blocks add up to: then the last of the block that is not zero, or of all. */
static int64_t find(const float *weights, int64_t n, const double *sums, double target) {
  double before = 0;
  int64_t from = 0, last = -1;
  for (; from + BLOCK < n && before + sums[from / BLOCK] <= target; from += BLOCK) before += sums[from / BLOCK];
  for (int64_t i = from; i < min_i(n, from + BLOCK); i++) {
    before += weights[i];
    if (before > target) return i;
    last = weights[i] > 0 ? i : last;
  }
  for (int64_t i = 0; last < from && i < from; i++) last = weights[i] > 0 ? i : last;
  return last;
}

/* Scratch of a row, in floats: weights, copies of some, and sums of blocks. */
static int64_t draw_scratch(int64_t n) { return 2 * round_up(n, BLOCK) + 2 * ceil_div(n, BLOCK); }

/* -1 where there is nothing to draw. */
static int64_t draw_row(const float *x, int64_t n, float temperature, double uniform, float min_p, int64_t top_k,
                        float top_p, float *scratch) {
  float *const weights = scratch, *const some = weights + round_up(n, BLOCK);
  double *const sums = (double *)(some + round_up(n, BLOCK));
  if (!weigh(x, n, temperature > 1e-5f ? temperature : 1e-5f, weights)) return -1;
  double total = keep_from(min_p, weights, n, sums);
  if (top_k > 0 && top_k < n) {
    const int64_t num = gather(weights, n, 0x1p-126f, some);
    total = keep_from(smallest_kept(some, num, (double)top_k, 1), weights, n, sums);
  }
  if (top_p < 1) {
    /* All that are less than this come to less than the tail, so the nucleus is among the others. */
    const double tail = (1 - (double)top_p) * total;
    const int64_t num = gather(weights, n, (float)(tail / 2 / (double)n), some);
    total = keep_from(smallest_kept(some, num, (double)top_p * total, 0), weights, n, sums);
  }
  return find(weights, n, sums, uniform * total);
}

#endif
