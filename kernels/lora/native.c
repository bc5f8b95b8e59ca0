/* What adapters add to some rows: y += scale * B (A x) + bias + gain * (y - base bias), one call a projection.

   Knows pointers and strides; the product that it is given knows how A x is summed. An item is rows of one adapter,
   at most CHUNK_ROWS of them; items are divided among threads. A result is the same bits whatever other rows there are and whoever computes it: the
   products of an output are added up one after the other, in the order of ranks. */

#include "gemm/rows.h"

#include <omp.h>

#define CHUNK_ROWS 32 /* as in interface.py */
#define VECTORS 4     /* of sums of a row that are in registers together */
#define STRIP (VECTORS * LANES)
#define L1_BYTES (20 << 10) /* of A, that the first cache can take at once */
#define AHEAD 2       /* strips of B that are on their way from memory */
#define SMALL_WORK (96 << 10) /* products below which waking the other threads costs more than they do */

/* As native.py lays it out. A [rank, num_inputs], or [vocabulary, rank] of an embedding; B [rank, num_outputs]. */
typedef struct {
  const void *A, *B;
  const float *bias, *gain; /* [num_outputs] or NULL */
  int64_t start, num_outputs, rank;
  double scale;
} pair;

/* The pairs of group g: pairs[starts[g]] to pairs[starts[g + 1] - 1]. */
typedef struct {
  const pair *pairs;
  const int64_t *starts;
} slot;

typedef struct {
  const slot *slots;
  int64_t num_inputs, max_rank; /* num_inputs 0: of an embedding, x are token ids */
  int kind;                     /* of A and B */
  product *products;            /* with weights of this kind */
} table;

typedef struct {
  char *y;
  const char *x;
  int64_t y_stride, x_stride;
  int y_kind, x_kind;
  const float *base_bias;  /* or NULL */
  const int64_t *x_rows;   /* the row of x of a row of y; NULL: the same */
  const int64_t *groups;   /* of a row of y; NULL: all 0 */
} operands;

/* (slot, start in rows, number of rows) */
typedef struct {
  int32_t slot, start, num_rows;
} chunk;

/* --- A x --- */

static weight a_of(const table *t, const pair *p) {
  return (weight){p->A, t->num_inputs, t->num_inputs, t->kind, .multiply = t->products};
}

static void embed(float *u, const void *A, int kind, int64_t token, int64_t rank) {
  for (int64_t k = 0; k < rank; k++)
    u[k] = token < 0 ? 0 : kind == FLOAT32 ? ((const float *)A)[token * rank + k] : widen(((const uint16_t *)A)[token * rank + k]);
}

/* --- y --- */

INLINE vec load_kind(const void *p, int64_t index, int kind, int64_t num) {
  if (num >= LANES)
    return kind == FLOAT32 ? load((const float *)p + index) : widen_v((const uint16_t *)p + index);
  float part[LANES] = {0};
  for (int64_t i = 0; i < num; i++)
    part[i] = kind == FLOAT32 ? ((const float *)p)[index + i] : widen(((const uint16_t *)p)[index + i]);
  return load(part);
}
INLINE void store_kind(void *p, int64_t index, int kind, int64_t num, vec v) {
  if (num >= LANES && kind == FLOAT32) {
    store((float *)p + index, v);
  } else if (num >= LANES) {
    narrow_v((uint16_t *)p + index, v);
  } else if (kind == FLOAT32) {
    store_part((float *)p + index, v, num);
  } else {
    float part[LANES];
    store(part, v);
    for (int64_t i = 0; i < num; i++) ((uint16_t *)p)[index + i] = narrow(part[i]);
  }
}

/* Outputs first to first + num, at most LANES, of one row of a pair; sums are B u. */
INLINE void finish(int kind, char *row, const pair *p, int64_t first, int64_t num, vec sums, const float *base_bias) {
  const vec base = load_kind(row, p->start + first, kind, num);
  vec y = fma_v(sums, splat((float)p->scale), base);
  if (p->gain) {
    const vec plain = base_bias ? base - load_kind(base_bias, p->start + first, FLOAT32, num) : base;
    y = fma_v(load_kind(p->gain, first, FLOAT32, num), plain, y);
  }
  if (p->bias) y += load_kind(p->bias, first, FLOAT32, num);
  store_kind(row, p->start + first, kind, num, y);
}

/* --- B u --- */

/* Adapters are read once a step and are small: what reads ahead by itself has hardly begun when one ends. */
INLINE void fetch(const void *p, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch((const char *)p + i);
}
INLINE void fetch_strip(int kind, const pair *p, int64_t first) {
  if (first >= p->num_outputs) return;
  for (int64_t k = 0; k < p->rank; k++)
    fetch((const char *)p->B + (k * p->num_outputs + first) * size_of(kind), STRIP * size_of(kind));
}

/* Outputs first to first + num, at most STRIP, of 1 or 2 rows: what becomes of their sums. */
INLINE void finish_tile(int num_rows, int y_kind, const pair *p, int64_t first, int64_t num,
                        const vec sums[2][VECTORS], char *const rows[2], const float *base_bias) {
  for (int v = 0; v * LANES < num; v++)
    for (int m = 0; m < num_rows; m++)
      finish(y_kind, rows[m], p, first + v * LANES, num - v * LANES, sums[m][v], base_bias);
}

/* strip is the part of B for these outputs, rows w_stride apart. */
INLINE void sum_tile(int num_rows, const pair *p, const float *strip, int64_t w_stride, const float *u,
                     vec out[2][VECTORS]) {
  vec sums[2][VECTORS] = {{{0}}};
  for (int64_t k = 0; k < p->rank; k++) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const vec w = load(strip + k * w_stride + v * LANES);
#pragma GCC unroll 2
      for (int m = 0; m < num_rows; m++) sums[m][v] = fma_v(splat(u[m * p->rank + k]), w, sums[m][v]);
    }
  }
  memcpy(out, sums, num_rows * sizeof *sums);
}

/* The same of all rows of an item. `wide` has room for a strip of B in float32; kinds are constants where it is inlined. */
INLINE void expand_strip(int kind, int y_kind, const pair *p, int64_t first, int64_t num, const operands *o,
                         const int64_t *rows, int64_t num_rows, const float *u, float *wide) {
  fetch_strip(kind, p, first + AHEAD * STRIP);
  const float *strip = (const float *)p->B + first;
  int64_t w_stride = p->num_outputs;
  if (kind != FLOAT32 || num < STRIP) {
    for (int64_t k = 0; k < p->rank; k++)
      for (int64_t n = 0; n < STRIP; n += LANES)
        store(wide + k * STRIP + n,
              n < num ? load_kind(p->B, k * p->num_outputs + first + n, kind, num - n) : splat(0));
    strip = wide;
    w_stride = STRIP;
  }
  for (int64_t m = 0; m < num_rows; m += 2) {
    const int both = m + 1 < num_rows;
    char *some[2];
    vec sums[2][VECTORS];
    for (int i = 0; i < 2; i++)
      some[i] = o->y + rows[min_i(m + i, num_rows - 1)] * o->y_stride * size_of(y_kind);
    if (both)
      sum_tile(2, p, strip, w_stride, u + m * p->rank, sums);
    else
      sum_tile(1, p, strip, w_stride, u + m * p->rank, sums);
    finish_tile(1 + both, y_kind, p, first, num, sums, some, o->base_bias);
  }
}

#define EXPAND(name, kind, y_kind)                                                                                   \
  static NOINLINE void name(const pair *p, const operands *o, const int64_t *rows, int64_t num_rows, const float *u,  \
                            float *wide) {                                                                            \
    for (int64_t first = 0; first < p->num_outputs; first += STRIP)                                                   \
      expand_strip(kind, y_kind, p, first, min_i(STRIP, p->num_outputs - first), o, rows, num_rows, u, wide);         \
  }
EXPAND(expand_floats, FLOAT32, FLOAT32)
EXPAND(expand_halves_into_floats, BFLOAT16, FLOAT32)
EXPAND(expand_halves, BFLOAT16, BFLOAT16)
EXPAND(expand_floats_into_halves, FLOAT32, BFLOAT16)
#undef EXPAND

static void expand(int kind, int y_kind, const pair *p, const operands *o, const int64_t *rows, int64_t num_rows,
                   const float *u, float *wide) {
  if (kind == FLOAT32)
    (y_kind == FLOAT32 ? expand_floats : expand_floats_into_halves)(p, o, rows, num_rows, u, wide);
  else
    (y_kind == FLOAT32 ? expand_halves_into_floats : expand_halves)(p, o, rows, num_rows, u, wide);
}

/* --- rows of one adapter --- */

typedef struct {
  float *packed, *u; /* of CHUNK_ROWS rows */
  float *wide;
} scratch;

/* The part of the memory that native.py allocates which is this thread's. */
static scratch own_scratch(const table *t, float *memory) {
  const int64_t inputs = round_up(t->num_inputs, 32), rank = round_up(t->max_rank, 32);
  float *own = memory + omp_get_thread_num() * (CHUNK_ROWS * (inputs + rank) + STRIP * rank);
  return (scratch){own, own + CHUNK_ROWS * inputs, own + CHUNK_ROWS * (inputs + rank)};
}

static void add_pair(const table *t, const operands *o, const pair *p, const int64_t *rows, int64_t num_rows,
                     scratch s) {
  fetch(p->A, min_i(p->rank * t->num_inputs * size_of(t->kind), L1_BYTES));
  for (int64_t strip = 0; strip < AHEAD; strip++) fetch_strip(t->kind, p, strip * STRIP);
  if (t->num_inputs)
    multiply(s.packed, round_up(t->num_inputs, BLOCK), num_rows, a_of(t, p), 0, p->rank,
             (target){s.u, p->rank, FLOAT32, NULL});
  else
    for (int64_t m = 0; m < num_rows; m++)
      embed(s.u + m * p->rank, p->A, t->kind, ((const int64_t *)o->x)[rows[m] * o->x_stride], p->rank);
  expand(t->kind, o->y_kind, p, o, rows, num_rows, s.u, s.wide);
}

static void add_rows(const table *t, const operands *o, const pair *first, const pair *end, const int64_t *rows,
                     int64_t num_rows, scratch s) {
  if (first == end) return;
  for (int64_t m = 0; m < num_rows && t->num_inputs; m++) {
    float *packed = s.packed + m * round_up(t->num_inputs, BLOCK);
    const char *x = o->x + (o->x_rows ? o->x_rows[rows[m]] : rows[m]) * o->x_stride * size_of(o->x_kind);
    pack(packed, x, o->x_kind, a_of(t, first));
  }
  for (const pair *p = first; p < end; p++)
    add_pair(t, o, p, rows, num_rows, s);
}

static void run(const table *t, const operands *o, const int64_t *rows, const chunk *chunks, int64_t num_chunks,
                float *memory, int64_t num_threads) {
  int64_t work = 0;
  for (int64_t c = 0; c < num_chunks; c++) {
    const slot *s = &t->slots[chunks[c].slot];
    const int64_t group = o->groups ? o->groups[rows[chunks[c].start]] : 0;
    for (const pair *p = s->pairs + s->starts[group]; p < s->pairs + s->starts[group + 1]; p++)
      work += chunks[c].num_rows * p->rank * (t->num_inputs + p->num_outputs);
  }
  if (work < SMALL_WORK) num_threads = 1;
  const int64_t parts = num_chunks < num_threads ? min_i(CHUNK_ROWS, ceil_div(num_threads, max_i(num_chunks, 1))) : 1;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
  for (int64_t item = 0; item < num_chunks * parts; item++) {
    const chunk c = chunks[item / parts];
    const int64_t part = item % parts;
    const int64_t first = c.num_rows * part / parts, end = c.num_rows * (part + 1) / parts;
    const slot *s = &t->slots[c.slot];
    const int64_t group = o->groups ? o->groups[rows[c.start]] : 0;
    if (first < end)
      add_rows(t, o, s->pairs + s->starts[group], s->pairs + s->starts[group + 1], rows + c.start + first, end - first,
               own_scratch(t, memory));
  }
}

/* --- what native.py calls --- */

/* `memory`: for each thread CHUNK_ROWS * (num_inputs + max_rank) + STRIP * max_rank floats, with both sizes rounded up to
   multiples of 32. */
EXPORT void lora_add(const slot *slots, int64_t num_inputs, int64_t max_rank, int64_t kind, product *products, char *y,
                     int64_t y_stride, int64_t y_kind, const char *x, int64_t x_stride, int64_t x_kind,
                     const float *base_bias, const int64_t *rows, const chunk *chunks, int64_t num_chunks,
                     float *memory, int64_t num_threads) {
  const table t = {slots, num_inputs, max_rank, (int)kind, products};
  const operands o = {y, x, y_stride, x_stride, (int)y_kind, (int)x_kind, base_bias, NULL, NULL};
  run(&t, &o, rows, chunks, num_chunks, memory, num_threads);
}

/* `experts` ascends. `rows` and `chunks` have room for all num_pairs, `counts` for all slots and slot 0. */
EXPORT void lora_add_experts(const slot *slots, int64_t num_inputs, int64_t max_rank, int64_t kind,
                             product *products, char *y, int64_t y_stride, int64_t y_kind, const char *x, int64_t x_stride, int64_t x_kind,
                             const int64_t *x_rows, const int64_t *tokens, const int64_t *experts,
                             const int64_t *row_slots, int64_t num_pairs, int64_t num_slots, int64_t *rows,
                             chunk *chunks, int64_t *counts, float *memory, int64_t num_threads) {
  const table t = {slots, num_inputs, max_rank, (int)kind, products};
  const operands o = {y, x, y_stride, x_stride, (int)y_kind, (int)x_kind, NULL, x_rows, experts};
  int64_t num_chunks = 0, num_rows = 0;
  for (int64_t first = 0, end; first < num_pairs; first = end) {
    const int64_t expert = experts[first];
    for (int64_t s = 1; s <= num_slots; s++) counts[s] = 0;
    for (end = first; end < num_pairs && experts[end] == expert; end++) counts[row_slots[tokens[end]]]++;
    for (int64_t s = 1; s <= num_slots; s++) {
      if (!counts[s] || slots[s].starts[expert] == slots[s].starts[expert + 1]) continue;
      int64_t start = num_rows;
      for (int64_t p = first; p < end; p++)
        if (row_slots[tokens[p]] == s) rows[num_rows++] = p;
      for (; start < num_rows; start += CHUNK_ROWS)
        chunks[num_chunks++] = (chunk){(int32_t)s, (int32_t)start, (int32_t)min_i(CHUNK_ROWS, num_rows - start)};
    }
  }
  run(&t, &o, rows, chunks, num_chunks, memory, num_threads);
}
