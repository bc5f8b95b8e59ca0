/* Rows of x as a product takes them (`pack`): float32, padded with zeros to whole blocks and, where the weight is
   half-precision, in the order in which its pairs come apart; or whole numbers, where the weight wants them. */

#ifndef HYBRIDSERVE_ROWS_H
#define HYBRIDSERVE_ROWS_H

#include "gemm/weights.h"

#define WHOLE_BLOCK 64 /* inputs; whole numbers are padded with anything to whole blocks */

typedef int16_t half_svec __attribute__((vector_size(2 * LANES)));

/* Half h (0 or 1) of a block: LANES elements. Pairs of half-precision numbers come apart as lower and upper halves. */
INLINE vec half_block(const char *block, int h, int kind) {
  if (kind == FLOAT32) return load((const float *)block + h * LANES);
  uvec pair;
  memcpy(&pair, block, sizeof pair);
  return (vec)(h ? pair >> 16 << 16 : pair << 16);
}

/* n <= LANES elements of a row, zeros behind them. */
INLINE vec elements(const void *x, int kind, int64_t i, int64_t n) {
  if (kind == FLOAT32) return n == LANES ? load((const float *)x + i) : load_part((const float *)x + i, n);
  uint16_t part[LANES] = {0};
  if (n == LANES) return widen_v((const uint16_t *)x + i);
  memcpy(part, (const uint16_t *)x + i, n * sizeof *part);
  return widen_v(part);
}

/* The larger, lane by lane. */
INLINE ivec max_v(ivec a, ivec b) {
  const ivec more = a > b;
  return (more & a) | (~more & b);
}

INLINE half_svec round_v(vec v, vec scale) {
  const vec magic = splat(12582912.0f); /* 1.5 * 2^23: what is added to it is rounded, and in the lowest bits */
  return __builtin_convertvector((ivec)(v / scale + magic), half_svec);
}

/* A row of x in whole numbers up to `limit`, and behind its last block what they are to be multiplied with, a float: the
   largest magnitude / limit, at least the smallest normal number (or a whole number could be larger than `limit`). It is
   NaN or infinite where an element is, and so is every product of the row. */
static void round_row(void *rounded, const void *x, int kind, int64_t num_inputs, int64_t limit) {
  const int64_t whole = num_inputs / LANES * LANES, rest = num_inputs - whole;
  ivec most = {0}; /* the bits of magnitudes are ordered as they are, NaN last */
  for (int64_t i = 0; i < whole; i += LANES) most = max_v((ivec)elements(x, kind, i, LANES) & 0x7fffffff, most);
  if (rest) most = max_v((ivec)elements(x, kind, whole, rest) & 0x7fffffff, most);
  int32_t top = 0;
  for (int lane = 0; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
  float scale;
  memcpy(&scale, &top, sizeof scale);
  scale /= (float)limit;
  if (scale < __FLT_MIN__) scale = __FLT_MIN__;
  int16_t *out = (int16_t *)rounded;
  memcpy(out + round_up(num_inputs, WHOLE_BLOCK), &scale, sizeof scale);
  for (int64_t i = 0; i < whole; i += LANES) {
    const half_svec numbers = round_v(elements(x, kind, i, LANES), splat(scale));
    memcpy(out + i, &numbers, sizeof numbers);
  }
  if (rest) {
    const half_svec numbers = round_v(elements(x, kind, whole, rest), splat(scale));
    memcpy(out + whole, &numbers, rest * sizeof *out);
  }
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

#endif
