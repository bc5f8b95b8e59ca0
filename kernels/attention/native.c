/* Paged attention of a ragged batch: one call a layer writes its K and V into the cache, then attends over it.

   A task is one KV head and up to MAX_ROWS rows, a row being a query of one of the heads that share the KV head. It
   goes through the sequence's keys in blocks of KEYS that begin at multiples of KEYS, whatever the cache's own blocks,
   with a softmax that is corrected from block to block (arXiv 2205.14135). Keys are turned so that a vector holds
   one element of LANES keys; then a score is a sum over the elements in order, an output one over the keys in order.
   What a row does not see adds exact zeros. Each piece of PIECE keys has a softmax of its own, and the pieces of a row
   are merged in their order, by the logarithms of their sums; so threads can share the pieces of a task where there are
   fewer tasks than threads. A row's result depends neither on the rows beside it (company, chunking, decode or prompt)
   nor on the number of threads.

   Types are those of native_math.h; steps are strides in elements. */

#include "block.h"

#define PIECE 512 /* a multiple of KEYS */
#define MAX_ROWS 96
#define PARALLEL_WORK (1 << 18) /* products; fewer are done before another thread has woken up */

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

/* The rows of a KV head for the queries that a task has. */
typedef struct {
  int64_t sequence, head, first_query, num_queries;
} Rows;

/* What rows have of some keys: out [rows, padded] in units of `total` [rows], the sum of 2^(score - maximum [rows]). */
typedef struct {
  float *out, *maximum, *total;
} Part;

INLINE int64_t part_size(int64_t rows, int64_t padded) { return rows * (padded + 2); }

static Part part_in(float *memory, int64_t rows, int64_t padded) {
  return (Part){memory, memory + rows * padded, memory + rows * padded + rows};
}

/* The position of a task's first query. */
static int64_t position_of(const Attention *a, Rows t) {
  const int64_t length = a->query_start[t.sequence + 1] - a->query_start[t.sequence];
  return a->seq_lens[t.sequence] - length + t.first_query;
}

/* The first key that a task sees. */
static int64_t first_seen(const Attention *a, Rows t) {
  return a->window ? max_i(0, position_of(a, t) - a->window + 1) : 0;
}

static int64_t first_piece(const Attention *a, Rows t) { return first_seen(a, t) / PIECE; }
static int64_t end_of_pieces(const Attention *a, Rows t) {
  return ceil_div(position_of(a, t) + t.num_queries, PIECE);
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

/* Keys piece * PIECE and on of what a task sees. */
static void attend_piece(const Attention *a, Rows t, int64_t piece, Part part) {
  const int64_t dim = a->head_dim, padded = round_up(dim, LANES), rows = t.num_queries * a->group;
  const int64_t start = a->query_start[t.sequence] + t.first_query, position = position_of(a, t);
  const int64_t seen = max_i(first_seen(a, t), piece * PIECE);
  const int64_t end = min_i(position + t.num_queries, (piece + 1) * PIECE);
  float query[rows][padded], keys[dim * KEYS], row[LANES * padded], copies[KEYS * padded];
  int64_t positions[rows];
  Block block = {.keys = keys, .copies = copies};

  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = start + r / a->group, member = t.head * a->group + r % a->group;
    widen_row(query[r], element(a->query, a->type, token * a->query_step + member * a->query_head_step), a->type,
              dim, 1);
    for (int64_t d = 0; d < dim; d++) query[r][d] *= a->scale;
    part.maximum[r] = -__builtin_inff();
    part.total[r] = 0;
  }
  memset(part.out, 0, (size_t)(rows * padded) * sizeof *part.out);
  for (int64_t at = seen / KEYS * KEYS; at < end; at += KEYS) {
    block.first = max_i(0, seen - at);
    block.last = min_i(KEYS, end - at);
    read_block(a, &block, a->block_table + t.sequence * a->table_step, t.head, at, padded, row);
    for (int64_t r = 0; r < rows; r++) positions[r] = position + r / a->group - at;
    for (int64_t r = 0; r < rows; r += ROWS) {
      attends[min_i(ROWS, rows - r) - 1](a, &block, query[r], part.out + r * padded, padded, positions + r,
                                         part.maximum + r, part.total + r);
    }
  }
}

/* Adds to what rows have of earlier pieces what they have of the next one. */
static void merge(Part whole, Part next, int64_t rows, int64_t padded) {
  for (int64_t r = 0; r < rows; r++) {
    float *out = whole.out + r * padded;
    const float *added = next.out + r * padded;
    if (next.total[r] == 0) continue; /* the row sees nothing of it */
    if (whole.total[r] == 0) {
      memcpy(out, added, (size_t)padded * sizeof *out);
      whole.maximum[r] = next.maximum[r], whole.total[r] = next.total[r];
      continue;
    }
    const float most = next.maximum[r] > whole.maximum[r] ? next.maximum[r] : whole.maximum[r];
    const vec kept = exp2_v(splat(whole.maximum[r] - most)), share = exp2_v(splat(next.maximum[r] - most));
    for (int64_t d = 0; d < padded; d += LANES) store(out + d, fma_v(load(added + d), share, load(out + d) * kept));
    whole.total[r] = fma_v(splat(next.total[r]), share, splat(whole.total[r]) * kept)[0];
    whole.maximum[r] = most;
  }
}

static void write_out(const Attention *a, Rows t, Part whole, int64_t padded) {
  const int64_t dim = a->head_dim;
  for (int64_t r = 0; r < t.num_queries * a->group; r++) {
    const int64_t token = a->query_start[t.sequence] + t.first_query + r / a->group;
    const int64_t member = t.head * a->group + r % a->group;
    float *out = whole.out + r * padded;
    for (int64_t d = 0; d < dim; d++) out[d] /= whole.total[r];
    narrow_row(element(a->out, a->type, (token * a->num_kv_heads * a->group + member) * dim), out, a->type, dim, 1);
  }
}

static void attend(const Attention *a, Rows t) {
  const int64_t padded = round_up(a->head_dim, LANES), rows = t.num_queries * a->group;
  float memory[2][part_size(rows, padded)];
  const Part whole = part_in(memory[0], rows, padded), next = part_in(memory[1], rows, padded);
  const int64_t first = first_piece(a, t), end = end_of_pieces(a, t);
  attend_piece(a, t, first, whole);
  for (int64_t piece = first + 1; piece < end; piece++) {
    attend_piece(a, t, piece, next);
    merge(whole, next, rows, padded);
  }
  write_out(a, t, whole, padded);
}

/* All tasks of a call, from the last sequence, which in a prompt has most keys to see, to the first. */
typedef struct {
  const Attention *a;
  const int64_t *first_tile; /* [S + 1], of queries */
  int64_t queries;           /* of a tile */
  int64_t sequence;          /* of the task that was asked for before, or the last */
} AllRows;

static Rows task_at(AllRows *all, int64_t task) {
  const Attention *a = all->a;
  const int64_t tile = task / a->num_kv_heads;
  while (all->first_tile[all->sequence] > tile) all->sequence--;
  const int64_t s = all->sequence, from = (tile - all->first_tile[s]) * all->queries;
  const int64_t length = a->query_start[s + 1] - a->query_start[s];
  return (Rows){s, task % a->num_kv_heads, from, min_i(all->queries, length - from)};
}

/* Threads share the pieces of all tasks, as many at a time as there is room for; inside of a parallel region. */
static void attend_together(const Attention *a, AllRows all, int64_t num_tasks, float *scratch, int64_t num_parts,
                            int64_t size) {
  const int64_t padded = round_up(a->head_dim, LANES);
  int64_t task = num_tasks - 1, piece = first_piece(a, task_at(&all, task));
  while (task >= 0) {
    struct {
      Rows task;
      int64_t piece;
    } turn[num_parts];
    int64_t num = 0;
    /* The same in every thread. scratch[0] is of the task that the turn before has not finished. */
    for (; num < num_parts && task >= 0; num++) {
      const Rows t = task_at(&all, task);
      turn[num].task = t, turn[num].piece = piece++;
      if (piece == end_of_pieces(a, t) && --task >= 0) piece = first_piece(a, task_at(&all, task));
    }
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num; i++) {
      const int64_t rows = turn[i].task.num_queries * a->group;
      attend_piece(a, turn[i].task, turn[i].piece, part_in(scratch + (1 + i) * size, rows, padded));
    }
#pragma omp single
    for (int64_t i = 0; i < num; i++) {
      const Rows t = turn[i].task;
      const int64_t rows = t.num_queries * a->group;
      const Part whole = part_in(scratch, rows, padded), next = part_in(scratch + (1 + i) * size, rows, padded);
      if (turn[i].piece == first_piece(a, t))
        memcpy(whole.out, next.out, (size_t)part_size(rows, padded) * sizeof *whole.out);
      else
        merge(whole, next, rows, padded);
      if (turn[i].piece + 1 == end_of_pieces(a, t)) write_out(a, t, whole, padded);
    }
  }
}

EXPORT void paged_attention(int64_t num_tokens, int64_t num_sequences, int64_t num_kv_heads, int64_t group,
                            int64_t head_dim, const int64_t *query_start, const int64_t *seq_lens,
                            const int64_t *block_table, int64_t table_step, const int64_t *slot_mapping, int64_t type,
                            const void *query, int64_t query_step, int64_t query_head_step, const void *key,
                            int64_t key_step, int64_t key_head_step, const void *value, int64_t value_step,
                            int64_t value_head_step, void *cache, int64_t cache_type, int64_t block_size,
                            int64_t block_step, int64_t value_offset, int64_t token_step, int64_t head_step,
                            int64_t step, double scale, double cap, int64_t window, void *out, float *scratch,
                            int64_t scratch_size, int64_t num_threads) {
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
  int64_t first_tile[num_sequences + 1], work = 0, most_keys = 0, most_queries = 0;
  first_tile[0] = 0;
  for (int64_t s = 0; s < num_sequences; s++) {
    const int64_t length = query_start[s + 1] - query_start[s];
    const int64_t keys = window ? min_i(window, seq_lens[s]) : seq_lens[s];
    first_tile[s + 1] = first_tile[s] + ceil_div(length, queries);
    work += length * keys * group * num_kv_heads * head_dim;
    most_keys = max_i(most_keys, min_i(length, queries) * keys);
    most_queries = max_i(most_queries, min_i(length, queries));
  }
  const int64_t num_tasks = first_tile[num_sequences] * num_kv_heads;
  const int64_t size = part_size(most_queries * group, round_up(head_dim, LANES));
  const int64_t num_parts = min_i(4 * num_threads, scratch_size / max_i(1, size) - 1);
  /* A task that is more than a thread's share would keep the others waiting. */
  const int together = num_parts > 1 && most_keys * group * head_dim > work / num_threads;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && work > PARALLEL_WORK)
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < num_tokens; token++) write_token(&a, token);
    AllRows all = {&a, first_tile, queries, num_sequences - 1};
    if (together)
      attend_together(&a, all, num_tasks, scratch, num_parts, size);
    else {
#pragma omp for schedule(monotonic : dynamic) /* task_at() looks in one direction */
      for (int64_t task = num_tasks - 1; task >= 0; task--) attend(&a, task_at(&all, task));
    }
  }
}
