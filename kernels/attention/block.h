/* A few queries against a block of keys, wherever these lie: read, scored, softened and mixed. Knows what a call is given;
   does not know how it is divided. */

#ifndef HYBRIDSERVE_ATTENTION_BLOCK_H
#define HYBRIDSERVE_ATTENTION_BLOCK_H

#include "native_math.h"

#define KEYS 64
#define ROWS 6 /* in registers at a time */

typedef struct {
  int64_t num_tokens, num_sequences, num_kv_heads, group, head_dim;
  const int64_t *query_start, *seq_lens; /* [S + 1], [S] */
  const int64_t *block_table;            /* [S, B] */
  const int64_t *slot_mapping;           /* [T] */
  int64_t table_step;
  int64_t type; /* of query, key, value and out */
  const void *query, *key, *value;
  int64_t query_step, query_head_step, key_step, key_head_step, value_step, value_head_step;
  void *cache;
  int64_t cache_type, block_size;
  int64_t block_step, value_offset, token_step, head_step, step;
  float scale;    /* of products, to base-2 logarithms, or to parts of `cap` */
  float cap;      /* of base-2 logarithms; 0: none */
  int64_t window; /* 0: none */
  void *out;      /* [T, num_heads, head_dim] */
} Attention;

/* Element 0 of K (or, `value_offset` further, of V) of a slot and head. */
static void *cached(const Attention *a, int64_t block, int64_t offset, int64_t head) {
  return element(a->cache, a->cache_type, block * a->block_step + offset * a->token_step + head * a->head_step);
}

/* Lane l of v[i] becomes lane i of v[l]. */
INLINE void transpose(vec v[LANES]) {
#pragma GCC unroll 4
  for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (i & half) continue;
      const vec a = v[i], b = v[i + half];
#ifdef __clang__
      for (int l = 0; l < LANES; l++) {
        v[i][l] = l & half ? b[l ^ half] : a[l];
        v[i + half][l] = l & half ? b[l] : a[l ^ half];
      }
#else
      ivec lane;
      for (int l = 0; l < LANES; l++) lane[l] = l;
      const ivec from_b = ((lane & half) != 0) & LANES;
      v[i] = __builtin_shuffle(a, b, (lane ^ (lane & half)) | from_b);
      v[i + half] = __builtin_shuffle(a, b, (lane | half) | from_b);
#endif
    }
}

/* What a task has of KEYS keys: those from `first` to `last`; the others are zero in `keys`. */
typedef struct {
  float *keys;        /* [head_dim, KEYS] */
  float *copies;      /* [KEYS, padded] values that can't be used where they are */
  const float *values[KEYS]; /* [padded] each */
  int64_t first, last;
} Block;

/* Reads keys start + first .. start + last of a sequence and KV head. `row` [LANES, padded] is scratch. */
static void read_block(const Attention *a, Block *block, const int64_t *table, int64_t head, int64_t start,
                       int64_t padded, float *row) {
  const int64_t dim = a->head_dim, bytes = a->step == 1 ? dim * size_of(a->cache_type) : 0;
  const int direct = a->cache_type == FLOAT32 && a->step == 1 && padded == dim;
  const char *slots[KEYS];
  /* A row is too short for the machine to see it coming, and the next one is elsewhere. */
  for (int64_t j = block->first; j < block->last; j++) {
    const int64_t position = start + j;
    slots[j] = cached(a, table[position / a->block_size], position % a->block_size, head);
    const char *value = element(slots[j], a->cache_type, a->value_offset);
    for (int64_t byte = 0; byte < bytes; byte += 64) {
      __builtin_prefetch(slots[j] + byte);
      __builtin_prefetch(value + byte);
    }
  }
  for (int64_t j = 0; j < KEYS; j += LANES) {
    const float *rows[LANES];
    for (int64_t i = 0; i < LANES; i++) {
      float *copy = row + i * padded;
      rows[i] = copy;
      if (j + i < block->first || j + i >= block->last) {
        memset(copy, 0, (size_t)padded * sizeof *copy);
        continue;
      }
      const char *slot = slots[j + i], *value = element(slot, a->cache_type, a->value_offset);
      if (direct) {
        rows[i] = (const float *)slot;
        block->values[j + i] = (const float *)value;
        continue;
      }
      widen_row(copy, slot, a->cache_type, dim, a->step);
      float *wide = block->copies + (j + i) * padded;
      widen_row(wide, value, a->cache_type, dim, a->step);
      for (int64_t d = dim; d < padded; d++) copy[d] = wide[d] = 0;
      block->values[j + i] = wide;
    }
    for (int64_t d = 0; d < dim; d += LANES) {
      vec tile[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) tile[i] = load(rows[i] + d);
      transpose(tile);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        if (padded == dim || d + i < dim) store(block->keys + (d + i) * KEYS + j, tile[i]);
    }
  }
}

/* scores [num, KEYS] = query [num, padded] times keys [dim, KEYS] */
INLINE void score(int num, int vecs, const float *query, int64_t padded, const float *keys, int64_t dim,
                  float scores[][KEYS]) {
  for (int64_t j = 0; j < KEYS; j += vecs * LANES) {
    vec sum[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < num; r++)
#pragma GCC unroll 4
      for (int v = 0; v < vecs; v++) sum[r][v] = splat(0);
    for (int64_t d = 0; d < dim; d++) {
      vec key[4];
#pragma GCC unroll 4
      for (int v = 0; v < vecs; v++) key[v] = load(keys + d * KEYS + j + v * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < num; r++) {
        const vec q = splat(query[r * padded + d]);
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) sum[r][v] = fma_v(q, key[v], sum[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num; r++)
#pragma GCC unroll 4
      for (int v = 0; v < vecs; v++) store(scores[r] + j + v * LANES, sum[r][v]);
  }
}

/* out [num, padded] = out * decay [num] + weights [num, KEYS] times values, of one strip of vecs * LANES elements. */
INLINE void mix_strip(int num, int vecs, float *out, int64_t padded, const float *decay, float weights[][KEYS],
                      const Block *block, int64_t first, int64_t last, int64_t d) {
  vec sum[ROWS][4];
#pragma GCC unroll 8
  for (int r = 0; r < num; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vecs; v++) sum[r][v] = load(out + r * padded + d + v * LANES) * decay[r];
  for (int64_t j = first; j < last; j++) {
    const float *value = block->values[j] + d;
    vec part[4];
#pragma GCC unroll 4
    for (int v = 0; v < vecs; v++) part[v] = load(value + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < num; r++) {
      const vec weight = splat(weights[r][j]);
#pragma GCC unroll 4
      for (int v = 0; v < vecs; v++) sum[r][v] = fma_v(weight, part[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < num; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vecs; v++) store(out + r * padded + d + v * LANES, sum[r][v]);
}

INLINE void mix(int num, int vecs, float *out, int64_t padded, const float *decay, float weights[][KEYS],
                const Block *block, int64_t first, int64_t last) {
  int64_t d = 0;
  for (; d + vecs * LANES <= padded; d += vecs * LANES)
    mix_strip(num, vecs, out, padded, decay, weights, block, first, last, d);
  for (; d < padded; d += LANES) mix_strip(num, 1, out, padded, decay, weights, block, first, last, d);
}

/* Scores in parts of the cap become base-2 logarithms that approach it. */
static void cap_scores(float scores[KEYS], float cap) {
  for (int64_t j = 0; j < KEYS; j += LANES) store(scores + j, tanh_v(load(scores + j)) * cap);
}

/* Scores of base-2 logarithms become weights, where a row sees keys from..to; returns by what its output so far must be
   multiplied, and updates its maximum and its sum of weights. */
static float soften(float scores[KEYS], int64_t from, int64_t to, float *maximum, float *total) {
  for (int64_t j = 0; j < from; j++) scores[j] = -__builtin_inff();
  for (int64_t j = to; j < KEYS; j++) scores[j] = -__builtin_inff();
  vec most = splat(*maximum), sum = splat(0);
  for (int64_t j = 0; j < KEYS; j += LANES) most = most_v(most, load(scores + j));
  float top = most[0];
  for (int l = 1; l < LANES; l++) top = most[l] > top ? most[l] : top;
  for (int64_t j = 0; j < KEYS; j += LANES) {
    const vec weight = exp2_v(load(scores + j) - top);
    store(scores + j, weight);
    sum += weight;
  }
  const float decay = exp2_v(splat(*maximum - top))[0];
  *maximum = top;
  *total = *total * decay + sum_v(sum);
  return decay;
}

/* `num` rows against one block. `positions` [num] are those of their own keys, relative to the block. */
INLINE void attend_block(int num, int vecs, const Attention *a, const Block *block, const float *query, float *out,
                         int64_t padded, const int64_t *positions, float *maximum, float *total) {
  float scores[ROWS][KEYS], decay[ROWS];
  int64_t first = KEYS, last = 0;
  score(num, vecs, query, padded, block->keys, a->head_dim, scores);
  if (a->cap != 0)
    for (int r = 0; r < num; r++) cap_scores(scores[r], a->cap);
  for (int r = 0; r < num; r++) {
    const int64_t from = max_i(block->first, a->window ? positions[r] - a->window + 1 : 0);
    const int64_t to = min_i(block->last, positions[r] + 1);
    decay[r] = 1;
    if (from >= to) {
      memset(scores[r], 0, sizeof scores[r]);
      continue;
    }
    decay[r] = soften(scores[r], from, to, &maximum[r], &total[r]);
    first = min_i(first, from);
    last = max_i(last, to);
  }
  if (first < last) mix(num, vecs, out, padded, decay, scores, block, first, last);
}

#endif
