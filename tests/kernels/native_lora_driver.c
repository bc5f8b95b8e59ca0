/* Runs the C kernels of adapters over odd sizes, in memory of exactly the size that they ask for, and compares with plain
   loops. Meant to be built with sanitizers. */

#include "gemm/bfloat16.c"
#include "gemm/float32.c"
#include "lora/native.c"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t state = 1;

static float random_float(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (float)(int32_t)(state >> 32) / 2147483648.0f;
}

static char *numbers(int64_t num, int kind) {
  char *memory = malloc(num * size_of(kind) + (num == 0));
  for (int64_t i = 0; i < num; i++) {
    const float value = random_float();
    const uint16_t half = narrow(value);
    if (kind == FLOAT32)
      memcpy(memory + i * 4, &value, 4);
    else
      memcpy(memory + i * 2, &half, 2);
  }
  return memory;
}

static double at(const void *p, int64_t i, int kind) {
  return kind == FLOAT32 ? ((const float *)p)[i] : widen(((const uint16_t *)p)[i]);
}

static void check(const char *what, double actual, double expected, int kind) {
  if (!(fabs(actual - expected) <= (kind == FLOAT32 ? 1e-4 : 2e-2) * (1 + fabs(expected)))) {
    fprintf(stderr, "%s: %g, not %g\n", what, actual, expected);
    exit(1);
  }
}

/* What a pair adds to output n of a row whose inputs (or, without inputs, whose token) are at x. */
static double added(const pair *p, int kind, int64_t num_inputs, const char *x, int x_kind, int64_t token, int64_t n) {
  double sum = 0;
  for (int64_t k = 0; k < p->rank; k++) {
    double u = num_inputs || token < 0 ? 0 : at(p->A, token * p->rank + k, kind);
    for (int64_t i = 0; i < num_inputs; i++) u += at(p->A, k * num_inputs + i, kind) * at(x, i, x_kind);
    sum += u * at(p->B, k * p->num_outputs + n, kind);
  }
  return p->scale * sum;
}

static pair make_pair(int64_t rank, int64_t num_A, int64_t start, int64_t num_outputs, int kind, int whole) {
  return (pair){numbers(rank * num_A, kind), numbers(rank * num_outputs, kind),
                whole ? (const float *)numbers(num_outputs, FLOAT32) : NULL,
                whole ? (const float *)numbers(num_outputs, FLOAT32) : NULL, start, num_outputs, rank, 0.5};
}

static void free_pair(pair p) {
  free((void *)p.A);
  free((void *)p.B);
  free((void *)p.bias);
  free((void *)p.gain);
}

static float *scratch_of(int64_t num_inputs, int64_t rank, int64_t num_threads) {
  const int64_t inputs = round_up(num_inputs, 32), ranks = round_up(rank, 32);
  return malloc(num_threads * (CHUNK_ROWS * (inputs + ranks) + STRIP * ranks) * sizeof(float));
}

static product *product_of(int kind) { return kind == FLOAT32 ? multiply_float32 : multiply_bfloat16; }

/* Rows 0, 2, 4 .. of one adapter with two pairs side by side, the rest untouched; no inputs: of an embedding. */
static void run_add(int kind, int x_kind, int y_kind, int64_t num, int64_t inputs, int64_t outputs, int64_t rank) {
  const int64_t width = outputs + 3, vocabulary = 7, num_rows = 2 * num;
  const pair pairs[2] = {make_pair(rank, inputs ? inputs : vocabulary, 0, outputs, kind, 1),
                         make_pair(rank + 1, inputs ? inputs : vocabulary, outputs, 3, kind, 0)};
  const int64_t starts[2] = {0, 2}, none[2] = {0, 0};
  const slot slots[2] = {{pairs, none}, {pairs, starts}};
  char *y = numbers(num_rows * width, y_kind), *before = malloc(num_rows * width * size_of(y_kind));
  memcpy(before, y, num_rows * width * size_of(y_kind));
  char *x = numbers(num_rows * inputs, x_kind);
  int64_t *tokens = malloc(num_rows * sizeof *tokens), *rows = malloc(num * sizeof *rows);
  float *bias = (float *)numbers(width, FLOAT32);
  for (int64_t m = 0; m < num_rows; m++) tokens[m] = m % (vocabulary + 1) - 1;
  const int64_t num_chunks = ceil_div(num, CHUNK_ROWS);
  chunk *chunks = malloc(num_chunks * sizeof *chunks);
  for (int64_t m = 0; m < num; m++) rows[m] = 2 * m;
  for (int64_t c = 0; c < num_chunks; c++)
    chunks[c] = (chunk){1, (int32_t)(c * CHUNK_ROWS), (int32_t)min_i(CHUNK_ROWS, num - c * CHUNK_ROWS)};
  float *memory = scratch_of(inputs, rank + 1, 2);
  lora_add(slots, inputs, rank + 1, kind, product_of(kind), y, width, y_kind, inputs ? x : (const char *)tokens, inputs ? inputs : 1,
           inputs ? x_kind : 0, bias, rows, chunks, num_chunks, memory, 2);
  for (int64_t m = 0; m < num_rows; m++)
    for (int64_t n = 0; n < width; n++) {
      const double old = at(before, m * width + n, y_kind);
      const pair *p = &pairs[n >= outputs];
      const int64_t own = n - p->start;
      double expected = old;
      if (m % 2 == 0) {
        expected += added(p, kind, inputs, x + m * inputs * size_of(x_kind), x_kind, tokens[m], own);
        if (p->gain) expected += p->gain[own] * (old - bias[n]) + p->bias[own];
      }
      check(inputs ? "lora_add" : "lora_add of an embedding", at(y, m * width + n, y_kind), expected, y_kind);
    }
  free_pair(pairs[0]);
  free_pair(pairs[1]);
  void *all[] = {y, before, x, tokens, rows, bias, chunks, memory};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* Three experts, two adapters of which the second changes the last expert only, and tokens without any. */
static void run_experts(int kind, int y_kind, int64_t tokens_each, int64_t inputs, int64_t outputs, int64_t rank) {
  enum { EXPERTS = 3, SLOTS = 2 };
  pair pairs[EXPERTS];
  for (int e = 0; e < EXPERTS; e++) pairs[e] = make_pair(rank, inputs, 0, outputs, kind, 0);
  const int64_t all_starts[EXPERTS + 1] = {0, 1, 2, 3}, last[EXPERTS + 1] = {0, 0, 0, 1}, none[EXPERTS + 1] = {0};
  const slot slots[SLOTS + 1] = {{pairs, none}, {pairs, all_starts}, {pairs + 2, last}};
  const int64_t num_tokens = tokens_each, num_pairs = EXPERTS * num_tokens;
  char *x = numbers(num_tokens * inputs, kind), *y = numbers(num_pairs * outputs, y_kind);
  char *before = malloc(num_pairs * outputs * size_of(y_kind));
  memcpy(before, y, num_pairs * outputs * size_of(y_kind));
  int64_t *tokens = malloc(num_pairs * sizeof *tokens), *experts = malloc(num_pairs * sizeof *experts);
  int64_t *row_slots = malloc(num_tokens * sizeof *row_slots), *rows = malloc(num_pairs * sizeof *rows);
  int64_t *counts = malloc((SLOTS + 1) * sizeof *counts);
  chunk *chunks = malloc(num_pairs * sizeof *chunks);
  for (int64_t t = 0; t < num_tokens; t++) row_slots[t] = t % (SLOTS + 1);
  for (int64_t p = 0; p < num_pairs; p++) tokens[p] = p % num_tokens, experts[p] = p / num_tokens;
  float *memory = scratch_of(inputs, rank, 2);
  lora_add_experts(slots, inputs, rank, kind, product_of(kind), y, outputs, y_kind, x, inputs, kind, tokens, tokens, experts, row_slots,
                   num_pairs, SLOTS, rows, chunks, counts, memory, 2);
  for (int64_t p = 0; p < num_pairs; p++)
    for (int64_t n = 0; n < outputs; n++) {
      const int64_t used = row_slots[tokens[p]];
      double expected = at(before, p * outputs + n, y_kind);
      if (used == 1 || (used == 2 && experts[p] == 2))
        expected += added(&pairs[experts[p]], kind, inputs, x + tokens[p] * inputs * size_of(kind), kind, 0, n);
      check("lora_add_experts", at(y, p * outputs + n, y_kind), expected, y_kind);
    }
  for (int e = 0; e < EXPERTS; e++) free_pair(pairs[e]);
  void *all[] = {x, y, before, tokens, experts, row_slots, rows, counts, chunks, memory};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

int main(void) {
  static const int64_t nums[] = {1, 2, 33, 70}, inputs[] = {0, 1, 31, 64, 133}, outputs[] = {1, 7, 64, 97},
                       ranks[] = {1, 8, 33};
  int num = 0;
  for (int kind = FLOAT32; kind <= BFLOAT16; kind++)
    for (size_t a = 0; a < 4; a++)
      for (size_t b = 0; b < 5; b++)
        for (size_t c = 0; c < 4; c++, num++) {
          const int64_t rank = ranks[(a + b + c) % 3];
          run_add(kind, kind, kind, nums[a], inputs[b], outputs[c], rank);
          run_add(kind, FLOAT32, FLOAT32, nums[a], inputs[b], outputs[c], rank);
          if (inputs[b]) run_experts(kind, FLOAT32, nums[a], inputs[b], outputs[c], rank);
        }
  printf("ok: %d sets of sizes\n", num);
  return 0;
}
