/* Paged attention of a ragged batch: one call a layer writes its K and V into the cache, then attends over it.

   A task is one KV head and up to MAX_ROWS rows, a row being a query of one of the heads that share the KV head. It
   goes through the sequence's keys in blocks of KEYS that begin at multiples of KEYS, whatever the cache's own blocks,
   with a softmax that is corrected from block to block (arXiv 2205.14135). Keys are turned so that a vector holds
   one element of LANES keys; then a score is a sum over the elements in order, an output one over the keys in order.
   What a row does not see adds exact zeros. So its result depends neither on the rows beside it (company, chunking,
   decode or prompt) nor on the number of threads.

   Types are those of native_math.h; steps are strides in elements. */

#include "native_math.h"

#define KEYS 64
#define MAX_ROWS 96
#define ROWS 6 /* in registers at a time */
#define PARALLEL_WORK (1 << 18) /* products; fewer are done before another thread has woken up */

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

static void write_row(const Attention *a, void *to, const void *from) {
  if (a->type == a->cache_type && a->step == 1) {
    memcpy(to, from, (size_t)(a->head_dim * size_of(a->type)));
    return;
  }
  float row[a->head_dim];
  widen_row(row, from, a->type, a->head_dim, 1);
  narrow_row(to, row, a->cache_type, a->head_dim, a->step);
}

static void write_token(const Attention *a, int64_t token) {
  const int64_t block = a->slot_mapping[token] / a->block_size, offset = a->slot_mapping[token] % a->block_size;
  for (int64_t head = 0; head < a->num_kv_heads; head++) {
    char *slot = cached(a, block, offset, head);
    write_row(a, slot, element(a->key, a->type, token * a->key_step + head * a->key_head_step));
    write_row(a, element(slot, a->cache_type, a->value_offset),
              element(a->value, a->type, token * a->value_step + head * a->value_head_step));
  }
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

/* `num` rows against one block. `position` is that of their first query's key, relative to the block. */
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

#define ATTEND(num, vecs)                                                                                             \
  static NOINLINE void attend_##num(const Attention *a, const Block *block, const float *query, float *out,           \
                                    int64_t padded, const int64_t *positions, float *maximum, float *total) {        \
    attend_block(num, vecs, a, block, query, out, padded, positions, maximum, total);                                \
  }
ATTEND(1, 4)
ATTEND(2, 4)
ATTEND(3, 4)
ATTEND(4, 2)
ATTEND(5, 2)
ATTEND(6, 2)
#undef ATTEND

/* attends[n] is for n + 1 rows. */
static void (*const attends[ROWS])(const Attention *, const Block *, const float *, float *, int64_t, const int64_t *,
                                   float *, float *) = {attend_1, attend_2, attend_3, attend_4, attend_5, attend_6};

static void attend(const Attention *a, int64_t sequence, int64_t head, int64_t first_query, int64_t num_queries) {
  const int64_t dim = a->head_dim, padded = round_up(dim, LANES), rows = num_queries * a->group;
  const int64_t start = a->query_start[sequence], length = a->query_start[sequence + 1] - start;
  const int64_t position = a->seq_lens[sequence] - length + first_query, end = position + num_queries;
  const int64_t seen = a->window ? max_i(0, position - a->window + 1) : 0;
  float query[rows][padded], out[rows][padded], maximum[rows], total[rows], keys[dim * KEYS], row[LANES * padded];
  float copies[KEYS * padded];
  int64_t positions[rows];
  Block block = {.keys = keys, .copies = copies};

  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = start + first_query + r / a->group, member = head * a->group + r % a->group;
    widen_row(query[r], element(a->query, a->type, token * a->query_step + member * a->query_head_step), a->type,
              dim, 1);
    for (int64_t d = 0; d < dim; d++) query[r][d] *= a->scale;
    memset(out[r], 0, sizeof out[r]);
    maximum[r] = -__builtin_inff();
    total[r] = 0;
  }
  for (int64_t at = seen / KEYS * KEYS; at < end; at += KEYS) {
    block.first = max_i(0, seen - at);
    block.last = min_i(KEYS, end - at);
    read_block(a, &block, a->block_table + sequence * a->table_step, head, at, padded, row);
    for (int64_t r = 0; r < rows; r++) positions[r] = position + r / a->group - at;
    for (int64_t r = 0; r < rows; r += ROWS) {
      attends[min_i(ROWS, rows - r) - 1](a, &block, query[r], out[r], padded, positions + r, maximum + r, total + r);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = start + first_query + r / a->group, member = head * a->group + r % a->group;
    for (int64_t d = 0; d < dim; d++) out[r][d] /= total[r];
    narrow_row(element(a->out, a->type, (token * a->num_kv_heads * a->group + member) * dim), out[r], a->type, dim, 1);
  }
}

EXPORT void paged_attention(int64_t num_tokens, int64_t num_sequences, int64_t num_kv_heads, int64_t group,
                            int64_t head_dim, const int64_t *query_start, const int64_t *seq_lens,
                            const int64_t *block_table, int64_t table_step, const int64_t *slot_mapping, int64_t type,
                            const void *query, int64_t query_step, int64_t query_head_step, const void *key,
                            int64_t key_step, int64_t key_head_step, const void *value, int64_t value_step,
                            int64_t value_head_step, void *cache, int64_t cache_type, int64_t block_size,
                            int64_t block_step, int64_t value_offset, int64_t token_step, int64_t head_step,
                            int64_t step, double scale, double cap, int64_t window, void *out,
                            int64_t num_threads) {
  const Attention a = {
      .num_tokens = num_tokens, .num_sequences = num_sequences, .num_kv_heads = num_kv_heads, .group = group,
      .head_dim = head_dim, .query_start = query_start, .seq_lens = seq_lens, .block_table = block_table,
      .slot_mapping = slot_mapping, .table_step = table_step, .type = type, .query = query, .key = key,
      .value = value, .query_step = query_step, .query_head_step = query_head_step, .key_step = key_step,
      .key_head_step = key_head_step, .value_step = value_step, .value_head_step = value_head_step,
      .cache = cache, .cache_type = cache_type, .block_size = block_size, .block_step = block_step,
      .value_offset = value_offset, .token_step = token_step, .head_step = head_step, .step = step,
      .scale = cap != 0 ? (float)(scale / cap) : (float)scale * LOG2_E, .cap = (float)cap * LOG2_E, .window = window,
      .out = out,
  };
  const int64_t queries = max_i(1, MAX_ROWS / group); /* of a task */
  int64_t first_tile[num_sequences + 1], work = 0;
  first_tile[0] = 0;
  for (int64_t s = 0; s < num_sequences; s++) {
    const int64_t length = query_start[s + 1] - query_start[s];
    first_tile[s + 1] = first_tile[s] + ceil_div(length, queries);
    work += length * (window ? min_i(window, seq_lens[s]) : seq_lens[s]) * group * num_kv_heads * head_dim;
  }
  const int64_t tasks = first_tile[num_sequences] * num_kv_heads;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && work > PARALLEL_WORK)
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < num_tokens; token++) write_token(&a, token);
    int64_t sequence = num_sequences - 1;
    /* From the last, which has most keys to see, to the first. */
#pragma omp for schedule(dynamic)
    for (int64_t task = tasks - 1; task >= 0; task--) {
      const int64_t tile = task / num_kv_heads;
      while (first_tile[sequence] > tile) sequence--;
      const int64_t from = (tile - first_tile[sequence]) * queries;
      const int64_t length = query_start[sequence + 1] - query_start[sequence];
      attend(&a, sequence, task % num_kv_heads, from, min_i(queries, length - from));
    }
  }
}
