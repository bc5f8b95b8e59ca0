/* Grouped expert projections with SwiGLU. Knows pointers and strides; the product that it is given knows how to sum.

   A pair is a token and one of its experts. Pairs are grouped by expert, so a weight is read once for all its tokens,
   and everything about a pair is computed as if it were alone; a token sums its pairs in the router's order. */

#include "gemm/rows.h"

#include <omp.h>

#define TASKS_PER_THREAD 8        /* a thread that falls behind leaves its tasks to the others */
#define SMALL_WORK (96 << 10)     /* products below which waking the other threads costs more than they do */
#define SMALL_COPY (16 << 10)     /* elements below which waiting for the other threads does */

/* What a call of `experts` computes; without a delta all of it in one. */
enum { GATE_UP = 1, DOWN = 2, COMBINE = 4 };

typedef struct {
  const void *gate_up, *down; /* [num_experts, 2 intermediate, hidden] and [num_experts, hidden, intermediate] */
  const float *gate_up_scales, *down_scales; /* [num_experts, outputs], of codes */
  int64_t hidden, intermediate, top_k;
  int kind, weight_kind; /* of x and y, and of the weights: the same or codes */
  int64_t limit;         /* of the whole numbers that rows are rounded to; 0: they are not */
  int is_packed;         /* the weights, in panels, which hidden and intermediate fill */
  product *products;     /* with weights of their kind */
  const int64_t *tokens, *experts, *places;
  float *inner;       /* [num_pairs, 2 intermediate]: products, then the activations in place of the first half */
  float *outputs;     /* [num_pairs, hidden] */
  float *packed_x;    /* [num_pairs, packed_stride] */
  float *packed_inner;
  int64_t packed_stride;
} layer;

/* Pairs by expert, in the order of tokens within one. Pair j of a token (of all: t * top_k + j) is at places[...];
   counts has room for num_experts + 1. */
static void group(const int64_t *ids, int64_t num_pairs, int64_t top_k, int64_t num_experts, int64_t *counts,
                  int64_t *tokens, int64_t *experts, int64_t *places) {
  memset(counts, 0, (num_experts + 1) * sizeof *counts);
  for (int64_t i = 0; i < num_pairs; i++) counts[ids[i] + 1]++;
  for (int64_t e = 0; e < num_experts; e++) counts[e + 1] += counts[e];
  for (int64_t i = 0; i < num_pairs; i++) {
    const int64_t place = counts[ids[i]]++;
    tokens[place] = i / top_k;
    experts[place] = ids[i];
    places[i] = place;
  }
}

/* Cuts the pairs into blocks of one expert and at most rows_at_once pairs; starts has room for num_pairs + 1. */
static int64_t cut(const int64_t *experts, int64_t num_pairs, int64_t rows_at_once, int64_t *starts) {
  int64_t num_blocks = 0, start = 0;
  for (int64_t p = 0; p < num_pairs; p++)
    if (p == start + rows_at_once || experts[p] != experts[start] || p == 0) starts[num_blocks++] = start = p;
  starts[num_blocks] = num_pairs;
  return num_blocks;
}

INLINE weight of_expert(const layer *a, int64_t expert, const void *start, const float *scales, int64_t num_outputs,
                        int64_t num_inputs) {
  weight w = {start, num_inputs, num_inputs, a->weight_kind, scales ? scales + expert * num_outputs : NULL, a->limit,
              a->is_packed, a->products};
  const int64_t size = a->is_packed ? num_outputs / PANEL * panel_bytes(w)
                                    : num_outputs * num_inputs * size_of(a->weight_kind);
  w.start = (const char *)start + expert * size;
  return w;
}

static weight gate_up_of(const layer *a, int64_t pair) {
  return of_expert(a, a->experts[pair], a->gate_up, a->gate_up_scales, 2 * a->intermediate, a->hidden);
}

static weight down_of(const layer *a, int64_t pair) {
  return of_expert(a, a->experts[pair], a->down, a->down_scales, a->hidden, a->intermediate);
}

static void pack_pair(const layer *a, int64_t pair, const void *x, int64_t x_stride) {
  const char *row = (const char *)x + a->tokens[pair] * x_stride * size_of(a->kind);
  pack(a->packed_x + pair * a->packed_stride, row, a->kind, gate_up_of(a, pair));
}

/* silu(gate) * up, in place of gate and, unless whole rows must be rounded first, packed for the next product. */
static void activate(const layer *a, int64_t pair, int64_t first, int64_t end) {
  float *gate = a->inner + pair * 2 * a->intermediate;
  const float *up = gate + a->intermediate;
  int64_t i = first;
  for (; i + LANES <= end; i += LANES) store(gate + i, silu_v(load(gate + i)) * load(up + i));
  if (i < end) store_part(gate + i, silu_v(load_part(gate + i, end - i)) * load_part(up + i, end - i), end - i);
  if (!a->limit)
    pack_floats(a->packed_inner + pair * a->packed_stride + first, gate + first, order_of(down_of(a, pair)),
                end - first);
}

static void round_inner(const layer *a, int64_t pair) {
  pack(a->packed_inner + pair * a->packed_stride, a->inner + pair * 2 * a->intermediate, FLOAT32, down_of(a, pair));
}

/* Outputs first to end of the gate and of the up projection for a block of pairs. */
static void gate_up(const layer *a, int64_t start, int64_t end_pair, int64_t first, int64_t end) {
  const int64_t I = a->intermediate;
  const weight w = gate_up_of(a, start);
  const target out = {a->inner + start * 2 * I, 2 * I, FLOAT32, NULL};
  const float *x = a->packed_x + start * a->packed_stride;
  multiply(x, a->packed_stride, end_pair - start, w, first, end, out);
  multiply(x, a->packed_stride, end_pair - start, w, I + first, I + end, out);
}

static void down(const layer *a, int64_t start, int64_t end_pair, int64_t first, int64_t end) {
  const target out = {a->outputs + start * a->hidden, a->hidden, FLOAT32, NULL};
  const float *x = a->packed_inner + start * a->packed_stride;
  multiply(x, a->packed_stride, end_pair - start, down_of(a, start), first, end, out);
}

static void combine(const layer *a, int64_t token, const float *weights, char *y) {
  const int64_t *places = a->places + token * a->top_k;
  for (int64_t i = 0; i < a->hidden; i += LANES) {
    const int64_t n = min_i(LANES, a->hidden - i);
    vec sum = {0};
    for (int64_t k = 0; k < a->top_k; k++) {
      const float *output = a->outputs + places[k] * a->hidden + i;
      sum = fma_v(splat(weights[token * a->top_k + k]), n == LANES ? load(output) : load_part(output, n), sum);
    }
    if (a->kind == FLOAT32) {
      store_part((float *)y + token * a->hidden + i, sum, n);
    } else {
      uint16_t narrowed[LANES];
      narrow_v(narrowed, sum);
      memcpy((uint16_t *)y + token * a->hidden + i, narrowed, n * sizeof *narrowed);
    }
  }
}

/* The interface's `experts`. x [num_tokens, hidden] with rows x_stride apart; weights, ids [num_tokens, top_k]; y
   [num_tokens, hidden]; scales, w_kind, limit, is_packed and products as in `layer`. `numbers` has room for 4 * num_pairs +
   num_experts + 2,
   the first 2 * num_pairs are the groups: tokens and experts. Scratch is as in `layer`; it and `numbers` stay as they are
   from one stage to the next. */
EXPORT void experts(const void *x, int64_t x_stride, const float *weights, const int64_t *ids, const void *gate_up_w,
                    const float *gate_up_scales, const void *down_w, const float *down_scales, void *y,
                    int64_t num_tokens, int64_t top_k, int64_t num_experts, int64_t hidden, int64_t intermediate,
                    int64_t kind, int64_t w_kind, int64_t limit, int64_t is_packed, product *products, int64_t *numbers,
                    float *inner, float *outputs, float *packed, int64_t packed_stride, int64_t rows_at_once, int64_t stages,
                    int64_t num_threads) {
  const int64_t num_pairs = num_tokens * top_k;
  int64_t *tokens = numbers, *experts = tokens + num_pairs, *places = experts + num_pairs, *starts = places + num_pairs,
          *counts = starts + num_pairs + 1;
  const layer a = {.gate_up = gate_up_w, .down = down_w, .gate_up_scales = gate_up_scales, .down_scales = down_scales,
                   .hidden = hidden, .intermediate = intermediate, .top_k = top_k,
                   .kind = (int)kind, .weight_kind = (int)w_kind, .limit = limit,
                   .is_packed = (int)is_packed, .products = products,
                   .tokens = tokens, .experts = experts, .places = places, .inner = inner, .outputs = outputs,
                   .packed_x = packed, .packed_inner = packed + num_pairs * packed_stride,
                   .packed_stride = packed_stride};
  if (stages & GATE_UP) group(ids, num_pairs, top_k, num_experts, counts, tokens, experts, places);
  const int64_t num_blocks = cut(experts, num_pairs, rows_at_once, starts);
  const int64_t parts = num_threads == 1 ? 1 : ceil_div(num_threads * TASKS_PER_THREAD, max_i(num_blocks, 1));
  const int64_t inner_step = round_up(ceil_div(intermediate, parts), is_packed ? OUTPUTS_AT_ONCE : OUTPUTS * BLOCK);
  const int64_t outer_step = round_up(ceil_div(hidden, parts), is_packed ? OUTPUTS_AT_ONCE : 2 * OUTPUTS);
  const int64_t inner_parts = ceil_div(intermediate, inner_step), outer_parts = ceil_div(hidden, outer_step);
  const int64_t inner_tasks = num_blocks * inner_parts, outer_tasks = num_blocks * outer_parts;
  const int alone = num_pairs * hidden < SMALL_COPY; /* this thread packs and combines, the others don't wait */
  if (num_pairs * hidden * intermediate < SMALL_WORK) num_threads = 1;
  int64_t inner_taken[num_threads], outer_taken[num_threads];
  deal(inner_taken, inner_tasks, num_threads);
  deal(outer_taken, outer_tasks, num_threads);
  for (int64_t p = 0; stages & GATE_UP && alone && p < num_pairs; p++) pack_pair(&a, p, x, x_stride);
#pragma omp parallel num_threads(num_threads)
  {
    int64_t of = omp_get_thread_num();
    if (stages & GATE_UP) {
      if (!alone) {
#pragma omp for
        for (int64_t p = 0; p < num_pairs; p++) pack_pair(&a, p, x, x_stride);
      }
      for (int64_t t; (t = next_chunk(inner_taken, inner_tasks, num_threads, &of)) < inner_tasks;) {
        const int64_t b = t / inner_parts, first = t % inner_parts * inner_step;
        const int64_t end = min_i(first + inner_step, intermediate);
        gate_up(&a, starts[b], starts[b + 1], first, end);
        for (int64_t p = starts[b]; stages & DOWN && p < starts[b + 1]; p++) activate(&a, p, first, end);
      }
#pragma omp barrier
    } else if (stages & DOWN) {
#pragma omp for
      for (int64_t p = 0; p < num_pairs; p++) activate(&a, p, 0, intermediate);
    }
    if (stages & DOWN && limit) {
#pragma omp for
      for (int64_t p = 0; p < num_pairs; p++) round_inner(&a, p);
    }
    of = omp_get_thread_num();
    for (int64_t t; stages & DOWN && (t = next_chunk(outer_taken, outer_tasks, num_threads, &of)) < outer_tasks;) {
      const int64_t b = t / outer_parts, first = t % outer_parts * outer_step;
      down(&a, starts[b], starts[b + 1], first, min_i(first + outer_step, hidden));
    }
    if (stages & COMBINE && !alone) {
#pragma omp barrier
#pragma omp for
      for (int64_t t = 0; t < num_tokens; t++) combine(&a, t, weights, y);
    }
  }
  for (int64_t t = 0; stages & COMBINE && alone && t < num_tokens; t++) combine(&a, t, weights, y);
}
