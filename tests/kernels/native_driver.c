/* Runs the C kernels of gemm and moe over odd sizes, in memory of exactly the size that they ask for, and compares with
   plain loops; with weights as they are and in panels. Meant to be built with sanitizers. */

#include "gemm/bfloat16.c"
#include "gemm/float32.c"
#include "gemm/float8.c"
#include "gemm/int8.c"
#include "gemm/native.c"
#include "gemm/whole.c"
#include "moe/native.c"

#include <math.h>
#include <stdio.h>

static uint64_t state = 1;

static float random_float(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (float)(int32_t)(state >> 32) / 2147483648.0f;
}

/* `num` random elements that begin `offset` bytes after an allocation, which ends with them. */
static void *numbers(int64_t num, int kind, int64_t offset) {
  char *memory = malloc(offset + num * size_of(kind) + (num == 0));
  for (int64_t i = 0; i < num; i++) {
    const float value = random_float();
    if (kind == FLOAT32)
      memcpy(memory + offset + i * 4, &value, 4);
    else if (kind == INT8)
      memory[offset + i] = (char)(value * 128);
    else if (kind == FLOAT8)
      memory[offset + i] = (char)(value * 64); /* magnitudes up to 3.75 */
    else {
      const uint16_t half = narrow(value);
      memcpy(memory + offset + i * 2, &half, 2);
    }
  }
  return memory + offset;
}

static float at(const void *p, int64_t i, int kind) {
  if (kind == INT8) return ((const int8_t *)p)[i];
  if (kind == FLOAT8) {
    const int code = ((const uint8_t *)p)[i], exponent = code >> 3 & 15, mantissa = code & 7;
    const float value = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return code & 0x80 ? -value : value;
  }
  return kind == FLOAT32 ? ((const float *)p)[i] : widen(((const uint16_t *)p)[i]);
}

static void check(const char *what, double actual, double expected, int kind, double rounding) {
  if (fabs(actual - expected) > ((kind == FLOAT32 ? 1e-4 : 2e-2) + rounding) * (1 + fabs(expected))) {
    fprintf(stderr, "%s: %g, not %g\n", what, actual, expected);
    exit(1);
  }
}

static void *exact(size_t num, size_t size) {
  void *memory;
  if (posix_memalign(&memory, 64, num * size + (num == 0))) exit(2);
  return memory;
}

/* A row of x as a product takes it: rounded to whole numbers times a scale, if there is a limit to those. */
static void taken(double *row, int64_t num, int64_t limit) {
  float most = 0;
  for (int64_t i = 0; i < num; i++) most = fabs(row[i]) > most ? (float)fabs(row[i]) : most;
  const float scale = most / (float)limit;
  for (int64_t i = 0; limit && i < num; i++) row[i] = (double)rintf((float)row[i] / scale) * scale;
}

/* A packed row in float32 elements, as native.py says. */
static int64_t packed_row(int64_t inputs, int64_t limit) {
  return limit ? round_up(inputs, 64) / 2 + 16 : round_up(inputs, 32);
}

/* A weight of outputs that fill panels, laid out as panels.h says; its rows are `stride` apart. */
static char *in_panels(const char *w, int64_t stride, int64_t outputs, int64_t inputs, int kind, int64_t limit) {
  const int64_t size = size_of(kind);
  char *panels = exact(outputs * inputs, size);
  for (int64_t n = 0; n < outputs; n++)
    for (int64_t k = 0; k < inputs; k++) {
      const int64_t lane = n % PANEL;
      int64_t place = n / PANEL * PANEL * inputs;
      if (limit)
        place += (k / 2 * PANEL + lane) * 2 + k % 2;
      else if (kind == BFLOAT16)
        place += k * PANEL + lane % LANES * 2 + lane / LANES;
      else
        place += k * PANEL + lane;
      memcpy(panels + place * size, w + (n * stride + k) * size, size);
    }
  return panels;
}

/* What a call multiplies: elements of x, of the weight, and the largest of the whole numbers that rows become. */
typedef struct {
  int kind, w_kind;
  int64_t limit;
  int is_packed;
} layout;

static product *product_of(layout l) {
  if (l.limit) return multiply_whole;
  if (l.w_kind == INT8) return multiply_int8;
  if (l.w_kind == FLOAT8) return multiply_float8;
  return l.w_kind == FLOAT32 ? multiply_float32 : multiply_bfloat16;
}

static void run_gemm(layout l, int64_t rows, int64_t outputs, int64_t inputs, int64_t gap, int64_t at_once, int64_t threads) {
  const int kind = l.kind, w_kind = l.w_kind;
  const int64_t limit = l.limit;
  const int64_t offset = size_of(kind), stride = packed_row(inputs, limit);
  const int64_t x_size = (rows - 1) * (inputs + gap) + inputs, w_size = (outputs - 1) * (inputs + gap) + inputs;
  char *x = numbers(x_size, kind, offset), *w = numbers(w_size, w_kind, offset), *bias = numbers(outputs, kind, offset);
  float *scales = w_kind == kind ? NULL : (float *)numbers(outputs, FLOAT32, 0);
  for (int64_t n = 0; scales && n < outputs; n++) scales[n] /= 128; /* or sums of codes are large, and so are errors */
  double *row = exact(inputs, sizeof *row);
  char *panels = l.is_packed ? in_panels(w, inputs + gap, outputs, inputs, w_kind, limit) : NULL;
  const int as_it_is = !limit && !at_once && kind == FLOAT32 && (panels || stride == inputs);
  float *packed = as_it_is ? NULL : exact((at_once ? at_once * threads : rows) * stride, sizeof(float));
  void *y = exact(rows * outputs, size_of(kind));
  gemm(x, inputs + gap, panels ? panels : w, panels ? 0 : inputs + gap, scales, bias, y, rows, outputs, inputs, kind,
       w_kind, limit, l.is_packed, product_of(l), packed, stride, at_once, threads);
  for (int64_t m = 0; m < rows; m++) {
    for (int64_t k = 0; k < inputs; k++) row[k] = at(x, m * (inputs + gap) + k, kind);
    taken(row, inputs, limit);
    for (int64_t n = 0; n < outputs; n++) {
      double sum = 0;
      for (int64_t k = 0; k < inputs; k++) sum += row[k] * at(w, n * (inputs + gap) + k, w_kind);
      check("gemm", at(y, m * outputs + n, kind), sum * (scales ? scales[n] : 1) + at(bias, n, kind), kind, 0);
    }
  }
  free(scales), free(row), free(x - offset), free(w - offset), free(bias - offset), free(packed), free(y), free(panels);
}

static void run_moe(layout l, int64_t tokens, int64_t num_experts, int64_t k, int64_t hidden, int64_t intermediate) {
  const int kind = l.kind, w_kind = l.w_kind;
  const int64_t limit = l.limit, pairs = tokens * k, offset = size_of(kind);
  char *x = numbers(tokens * hidden, kind, offset);
  char *up = numbers(num_experts * 2 * intermediate * hidden, w_kind, offset);
  char *down_w = numbers(num_experts * hidden * intermediate, w_kind, offset);
  char *up_given = up, *down_given = down_w;
  if (l.is_packed) {
    up_given = in_panels(up, hidden, num_experts * 2 * intermediate, hidden, w_kind, limit);
    down_given = in_panels(down_w, intermediate, num_experts * hidden, intermediate, w_kind, limit);
  }
  float *weights = exact(pairs, sizeof(float));
  int64_t *ids = exact(pairs, sizeof(int64_t)), *scratch = exact(4 * pairs + num_experts + 2, sizeof(int64_t));
  const int64_t stride = packed_row(max_i(hidden, intermediate), limit);
  const int coded = w_kind != kind;
  float *up_scales = coded ? exact(num_experts * 2 * intermediate, 4) : NULL;
  float *down_scales = coded ? exact(num_experts * hidden, 4) : NULL;
  for (int64_t i = 0; coded && i < num_experts * 2 * intermediate; i++) up_scales[i] = (1 + i % 3) / 256.0f;
  for (int64_t i = 0; coded && i < num_experts * hidden; i++) down_scales[i] = (1 + i % 2) / 256.0f;
  float *inner = exact(pairs * 2 * intermediate, 4), *outputs = exact(pairs * hidden, 4);
  float *packed = exact(2 * pairs * stride, 4);
  void *y = exact(tokens * hidden, size_of(kind)), *staged = exact(tokens * hidden, size_of(kind));
  for (int64_t p = 0; p < pairs; p++) {
    weights[p] = random_float();
    ids[p] = p % k ? (ids[p - 1] + 1) % num_experts : (int64_t)(state >> 40) % num_experts;
  }
#define EXPERTS(y, stages)                                                                                        \
  experts(x, hidden, weights, ids, up_given, up_scales, down_given, down_scales, y, tokens, k, num_experts, hidden,  \
          intermediate, kind, w_kind, limit, l.is_packed, product_of(l), scratch, inner, outputs, packed, stride, 6,    \
          stages, 2)
  EXPERTS(y, GATE_UP | DOWN | COMBINE);
  EXPERTS(staged, GATE_UP);
  EXPERTS(staged, DOWN);
  EXPERTS(staged, COMBINE);
  if (memcmp(y, staged, tokens * hidden * size_of(kind))) {
    fprintf(stderr, "moe: stages differ\n");
    exit(1);
  }
  double *act = exact(intermediate, sizeof *act), *row = exact(hidden, sizeof *row);
  double *sum = exact(hidden, sizeof *sum), *size = exact(hidden, sizeof *size); /* and of magnitudes */
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t h = 0; h < hidden; h++) sum[h] = size[h] = 0, row[h] = at(x, t * hidden + h, kind);
    taken(row, hidden, limit);
    for (int64_t j = 0; j < k; j++) {
      const int64_t e = ids[t * k + j];
      for (int64_t i = 0; i < intermediate; i++) {
        double gate = 0, upper = 0;
        for (int64_t h = 0; h < hidden; h++) {
          gate += at(up, (e * 2 * intermediate + i) * hidden + h, w_kind) * row[h];
          upper += at(up, ((e * 2 + 1) * intermediate + i) * hidden + h, w_kind) * row[h];
        }
        gate *= coded ? up_scales[e * 2 * intermediate + i] : 1;
        upper *= coded ? up_scales[(e * 2 + 1) * intermediate + i] : 1;
        act[i] = gate / (1 + exp(-gate)) * upper;
      }
      taken(act, intermediate, limit);
      for (int64_t h = 0; h < hidden; h++)
        for (int64_t i = 0; i < intermediate; i++) {
          const double term = weights[t * k + j] * act[i] * at(down_w, (e * hidden + h) * intermediate + i, w_kind) *
                              (coded ? down_scales[e * hidden + h] : 1);
          sum[h] += term, size[h] += fabs(term);
        }
    }
    for (int64_t h = 0; h < hidden; h++) {
      /* An activation on an edge is rounded one way here, the other way there. */
      /* Sums of the sizes that 16 lanes ask for are large enough for rounding to grow with what is added up. */
      const double added = LANES == 16 ? size[h] : 0;
      check("moe", at(y, t * hidden + h, kind), sum[h], kind, 1e-6 * added + (limit ? (50 + added) / limit : 0));
    }
  }
  if (l.is_packed) free(up_given), free(down_given);
  free(x - offset), free(up - offset), free(down_w - offset);
  free(weights), free(ids), free(scratch), free(inner), free(outputs), free(packed), free(y), free(staged);
  free(act), free(sum), free(size), free(row), free(up_scales), free(down_scales);
}

static int run_all(int kind, int w_kind, int64_t limit) {
  const layout l = {kind, w_kind, limit, 0};
  const int64_t sizes[] = {1, 3, 7, 32, 65};
  int num = 0;
  for (int rows = 0; rows < 5; rows++)
    for (int outputs = 0; outputs < 5; outputs++)
      for (int inputs = 0; inputs < 5; inputs++, num++) {
        run_gemm(l, sizes[rows], sizes[outputs], sizes[inputs], 0, 0, 2);
        run_gemm(l, sizes[rows], sizes[outputs], sizes[inputs], 3, 5, 2);
      }
  run_gemm(l, 20, 66, 192, 1, 0, 2); /* enough work for two threads */
  run_gemm(l, 20, 66, 200, 1, 9, 2);
  run_gemm(l, 4, 5, 2100, 1, 0, 2); /* three pieces */
  for (int64_t tokens = 0; tokens < 12; tokens += 1 + tokens / 2)
    for (int64_t k = 1; k <= 3; k++, num++) {
      run_moe(l, tokens, 5, k, 17, 35);
      run_moe(l, tokens, 3, k, 64, 130);
      run_moe(l, tokens, 9, k, 1, 1);
      run_moe(l, tokens * 4, 2, k % 2 + 1, 300, 40);
    }
  return num;
}

/* The same for weights in panels: every number of rows that has tiles of its own, beside whole tiles, and of panels. */
static int run_panels(int kind, int w_kind, int64_t limit) {
  const layout l = {kind, w_kind, limit, 1};
  const int64_t few[] = {1, 3, 37}, many[] = {FLOATS_PIECE, FLOATS_PIECE + 1, PIECE + 2, 2 * PIECE + 51};
  const int64_t some_rows[] = {1, 2, 3, 5, 13}, some_panels[] = {1, 4, 5, 9};
  const int64_t odd = limit ? 1 : 0; /* inputs of whole numbers go in pairs */
  int num = 0;
  for (int64_t rows = 1; rows <= 14; rows++)
    for (int64_t panels = 1; panels <= 9; panels++)
      for (int i = 0; i < 3; i++, num++) run_gemm(l, rows, panels * PANEL, few[i] + odd, num % 4, num % 3 * 4, 1 + num % 3);
  for (int rows = 0; rows < 5; rows++)
    for (int panels = 0; panels < 4; panels++)
      for (int i = 0; i < 4; i++, num++)
        run_gemm(l, some_rows[rows], some_panels[panels] * PANEL, many[i] + (odd & many[i]), 1, num % 2 * 6, 1 + num % 3);
  run_gemm(l, 96, 3 * PANEL, 70, 0, 0, 2);
  run_gemm(l, 101, 5 * PANEL, 70, 1, 24, 3);
  for (int64_t tokens = 0; tokens < 12; tokens += 1 + tokens / 2)
    for (int64_t k = 1; k <= 3; k++, num++) {
      run_moe(l, tokens, 5, k, PANEL, PANEL);
      run_moe(l, tokens, 3, k, 3 * PANEL, 5 * PANEL);
      run_moe(l, tokens * 4, 2, k % 2 + 1, 9 * PANEL, 2 * PANEL);
    }
  run_moe(l, 3, 2, 1, PANEL, round_up(PIECE + PANEL, PANEL)); /* several pieces of activations, and of x */
  run_moe(l, 3, 2, 1, round_up(PIECE + PANEL, PANEL), PANEL);
  return num;
}

int main(void) {
  int num = 0;
  for (int kind = FLOAT32; kind <= BFLOAT16; kind++) {
    const int w_kinds[] = {kind, INT8, INT8, INT8, FLOAT8};
    const int64_t limits[] = {0, LARGEST, 127, 0, 0};
    for (int i = 0; i < 5; i++) {
      if (limits[i] != 127 || kind == FLOAT32) num += run_all(kind, w_kinds[i], limits[i]); /* see run_moe: edges */
      num += run_panels(kind, w_kinds[i], limits[i]);
    }
  }
  printf("ok: %d sets of sizes\n", num);
  return 0;
}
