/* Runs the C kernels of ssm, attention and pointwise over odd sizes, in memory of exactly the size that they ask for,
   and compares with plain loops. Meant to be built with sanitizers. */

#include "attention/native.c"
#include "pointwise/native.c"
#include "ssm/native.c"

#include <math.h>
#include <stdio.h>

static uint64_t seed = 1;

static float random_float(void) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (float)(int32_t)(seed >> 32) / 2147483648.0f;
}

static int64_t random_below(int64_t limit) { return (int64_t)((random_float() + 1) / 2 * (limit - 1) + 0.5f); }

/* Elements of a kind, one element into an allocation that ends with them. */
typedef struct {
  char *base;
  int64_t kind;
} Numbers;

static void set(Numbers x, int64_t i, float value) { narrow_row(element(x.base, x.kind, i), &value, x.kind, 1, 1); }

static double get(Numbers x, int64_t i) {
  float value;
  widen_row(&value, element(x.base, x.kind, i), x.kind, 1, 1);
  return value;
}

static Numbers numbers(int64_t num, int64_t kind) {
  Numbers x = {(char *)malloc((size_t)((num + 1) * size_of(kind))) + size_of(kind), kind};
  for (int64_t i = 0; i < num; i++) set(x, i, random_float());
  return x;
}

static void release(Numbers x) { free(x.base - size_of(x.kind)); }

static void check(const char *what, double actual, double expected, int64_t kind) {
  if (!(fabs(actual - expected) <= (kind == FLOAT32 ? 1e-5 : 2e-2) * (1 + fabs(expected)))) {
    fprintf(stderr, "%s: %g, not %g\n", what, actual, expected);
    exit(1);
  }
}

/* Three sequences: some tokens, one, some, on slots 3, 1, 2; the second has no state. */
static void run_ssm(int64_t kind, int64_t state_kind, int64_t length, int64_t channels, int64_t states,
                    int64_t width, int optional) {
  const int64_t start[] = {0, length, length + 1, 2 * length + 1}, slots[] = {3, 1, 2}, total = start[3];
  const uint8_t has_state[] = {1, 0, 1};
  const int64_t step = channels + 3, past = width - 1, slot_step = channels * (past + states) + 5;
  Numbers x = numbers(total * step - 3, kind), dt = numbers(total * channels, kind), z = numbers(total * step - 3, kind);
  Numbers B = numbers(total * states, kind), C = numbers(total * states, kind);
  Numbers weight = numbers(channels * width, kind), bias = numbers(channels, kind);
  Numbers A = numbers(channels * states, FLOAT32), D = numbers(channels, FLOAT32), dt_bias = numbers(channels, FLOAT32);
  Numbers memory = numbers(4 * slot_step - 5, state_kind), before = numbers(4 * slot_step - 5, state_kind);
  Numbers u = numbers(total * channels, kind), y = numbers(total * channels, kind);
  for (int64_t i = 0; i < 4 * slot_step - 5; i++) set(before, i, (float)get(memory, i));
  for (int64_t i = 0; i < channels * states; i++) set(A, i, -(float)fabs(get(A, i)));
  for (int64_t s = 1; s < 2; s++) /* where there is no state */
    for (int64_t i = 0; i < slot_step - 5; i++) set(memory, s * slot_step + i, NAN);
  const Numbers ssm = {element(memory.base, state_kind, channels * past), state_kind};

  causal_conv1d(start, slots, has_state, 3, channels, kind, x.base, step, weight.base, width,
                optional ? bias.base : NULL, optional, memory.base, state_kind, slot_step, past, 1, u.base, 2);
  selective_scan(start, slots, has_state, 3, channels, states, kind, u.base, channels, dt.base, channels, B.base,
                 states, C.base, states, optional ? z.base : NULL, step, (float *)A.base, (float *)D.base,
                 optional ? (float *)dt_bias.base : NULL, ssm.base, state_kind, slot_step, states, 1, y.base, 2);

  for (int64_t s = 0; s < 3; s++)
    for (int64_t c = 0; c < channels; c++) {
      double h[states];
      for (int64_t n = 0; n < states; n++)
        h[n] = has_state[s] ? get(before, slots[s] * slot_step + channels * past + c * states + n) : 0;
      for (int64_t t = start[s]; t < start[s + 1]; t++) {
        double sum = optional ? get(bias, c) : 0;
        for (int64_t k = 0; k < width; k++) {
          const int64_t from = t - past + k, old = from - start[s] + past;
          const double input = from >= start[s] ? get(x, from * step + c)
                               : has_state[s]   ? get(before, slots[s] * slot_step + c * past + old)
                                                : 0;
          sum += get(weight, c * width + k) * input;
        }
        check("convolution", get(u, t * channels + c), optional ? sum / (1 + exp(-sum)) : sum, kind);
        const double delta = log1p(exp(get(dt, t * channels + c) + (optional ? get(dt_bias, c) : 0)));
        const double input = get(u, t * channels + c);
        double out = get(D, c) * input;
        for (int64_t n = 0; n < states; n++) {
          h[n] = h[n] * exp(delta * get(A, c * states + n)) + delta * get(B, t * states + n) * input;
          out += h[n] * get(C, t * states + n);
        }
        const double gate = optional ? get(z, t * step + c) : 0;
        check("scan", get(y, t * channels + c), optional ? out * gate / (1 + exp(-gate)) : out, kind);
      }
      for (int64_t n = 0; n < states; n++)
        check("state", get(ssm, slots[s] * slot_step + c * states + n), h[n], state_kind);
      for (int64_t k = 0; k < past; k++) {
        const int64_t from = start[s + 1] - past + k, old = from - start[s] + past;
        const double expected = from >= start[s] ? get(x, from * step + c)
                                : has_state[s]   ? get(before, slots[s] * slot_step + c * past + old)
                                                 : 0;
        check("past", get(memory, slots[s] * slot_step + c * past + k), expected, state_kind);
      }
    }
  const Numbers all[] = {x, dt, z, B, C, weight, bias, A, D, dt_bias, memory, before, u, y};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) release(all[i]);
}

/* The same sequences through Mamba-2's scan; without `optional`, steps are limited. */
static void run_ssd(int64_t kind, int64_t state_kind, int64_t length, int64_t heads, int64_t groups, int64_t size,
                    int64_t states, int optional) {
  const int64_t start[] = {0, length, length + 1, 2 * length + 1}, slots[] = {3, 1, 2}, total = start[3];
  const uint8_t has_state[] = {1, 0, 1};
  const int64_t inner = heads * size, step = inner + 3, head_step = size * states, slot_step = heads * head_step + 5;
  const double least = optional ? 0 : 0.4, most = optional ? INFINITY : 0.8;
  Numbers x = numbers(total * step - 3, kind), dt = numbers(total * heads, kind), z = numbers(total * step - 3, kind);
  Numbers B = numbers(total * groups * states, kind), C = numbers(total * groups * states, kind);
  Numbers A = numbers(heads, FLOAT32), D = numbers(heads, FLOAT32), dt_bias = numbers(heads, FLOAT32);
  Numbers memory = numbers(4 * slot_step - 5, state_kind), before = numbers(4 * slot_step - 5, state_kind);
  Numbers y = numbers(total * inner, kind);
  for (int64_t i = 0; i < 4 * slot_step - 5; i++) set(before, i, (float)get(memory, i));
  for (int64_t i = 0; i < heads; i++) set(A, i, -(float)fabs(get(A, i)));
  for (int64_t i = 0; i < slot_step - 5; i++) set(memory, slot_step + i, NAN); /* where there is no state */

  ssd_scan(start, slots, has_state, 3, heads, size, groups, states, kind, x.base, step, dt.base, heads, B.base,
           groups * states, C.base, groups * states, optional ? z.base : NULL, step, (float *)A.base, (float *)D.base,
           optional ? (float *)dt_bias.base : NULL, least, most, memory.base, state_kind, slot_step, head_step, states,
           1, y.base, 2);

  for (int64_t s = 0; s < 3; s++)
    for (int64_t i = 0; i < inner; i++) {
      const int64_t head = i / size, group = head / (heads / groups) * states, row = slots[s] * slot_step + i * states;
      double h[states];
      for (int64_t n = 0; n < states; n++) h[n] = has_state[s] ? get(before, row + n) : 0;
      for (int64_t t = start[s]; t < start[s + 1]; t++) {
        const double raw = log1p(exp(get(dt, t * heads + head) + (optional ? get(dt_bias, head) : 0)));
        const double delta = fmin(most, fmax(least, raw)), input = get(x, t * step + i);
        double out = get(D, head) * input;
        for (int64_t n = 0; n < states; n++) {
          h[n] = h[n] * exp(delta * get(A, head)) + delta * input * get(B, t * groups * states + group + n);
          out += h[n] * get(C, t * groups * states + group + n);
        }
        const double gate = optional ? get(z, t * step + i) : 0;
        check("ssd", get(y, t * inner + i), optional ? out * gate / (1 + exp(-gate)) : out, kind);
      }
      for (int64_t n = 0; n < states; n++) check("ssd state", get(memory, row + n), h[n], state_kind);
    }
  const Numbers all[] = {x, dt, z, B, C, A, D, dt_bias, memory, before, y};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) release(all[i]);
}

/* Two sequences, each with a context, on blocks that lie apart; what nobody owns is NaN. */
static void run_attention(int64_t kind, int64_t cache_kind, int64_t context, int64_t length, int64_t group,
                          int64_t dim, int64_t block_size, int64_t window, double cap) {
  const int64_t heads = 2, width = group * heads + 2 * heads, total = length + 1;
  const int64_t start[] = {0, length, total}, lens[] = {context + length, context / 2 + 1};
  const int64_t columns = ceil_div(lens[0], block_size) + 1, row = heads * dim;
  const int64_t block_step = 2 * block_size * row + 7;
  const int64_t num_blocks = 2 * columns + 1;
  int64_t table[2 * columns], slots[total];
  Numbers packed = numbers(total * width * dim, kind), out = numbers(total * group * heads * dim, kind);
  Numbers cache = numbers(num_blocks * block_step - 7, cache_kind);
  for (int64_t i = 0; i < 2 * columns; i++) table[i] = 1 + i;
  for (int64_t i = 0; i < 2 * columns; i++) {
    const int64_t j = random_below(2 * columns), swapped = table[i];
    table[i] = table[j], table[j] = swapped;
  }
  for (int64_t i = 0; i < num_blocks * block_step - 7; i++) set(cache, i, NAN);
#define SLOT(s, p) (table[(s) * columns + (p) / block_size] * block_size + (p) % block_size)
#define PLACE(s, p, v, h) \
  (SLOT(s, p) / block_size * block_step + (v) * block_size * row + SLOT(s, p) % block_size * row + (h) * dim)
  for (int64_t s = 0; s < 2; s++) {
    const int64_t cached = lens[s] - (start[s + 1] - start[s]);
    for (int64_t p = 0; p < cached; p++)
      for (int64_t v = 0; v < 2; v++)
        for (int64_t i = 0; i < row; i++) set(cache, PLACE(s, p, v, 0) + i, random_float());
    for (int64_t t = start[s]; t < start[s + 1]; t++) slots[t] = SLOT(s, cached + t - start[s]);
  }
  const int64_t parts = part_size(min_i(length, max_i(1, MAX_ROWS / group)) * group, round_up(dim, LANES));
  float *const scratch = malloc((size_t)(5 * parts) * sizeof *scratch); /* one that merges, and four at a time */
  paged_attention(total, 2, heads, group, dim, start, lens, table, columns, slots, kind, packed.base, width * dim, dim,
                  element(packed.base, kind, group * heads * dim), width * dim, dim,
                  element(packed.base, kind, (group + 1) * heads * dim), width * dim, dim, cache.base, cache_kind,
                  block_size, block_step, block_size * row, row, dim, 1, 0.3, cap, window, out.base,
                  scratch, 5 * parts, 3);
  free(scratch);
  for (int64_t s = 0; s < 2; s++)
    for (int64_t t = start[s]; t < start[s + 1]; t++)
      for (int64_t h = 0; h < group * heads; h++) {
        const int64_t position = lens[s] - start[s + 1] + t, first = window ? max_i(0, position - window + 1) : 0;
        double weights[position + 1], sum = 0;
        for (int64_t p = first; p <= position; p++) {
          double score = 0;
          for (int64_t d = 0; d < dim; d++)
            score += get(packed, (t * width + h) * dim + d) * get(cache, PLACE(s, p, 0, h / group) + d);
          sum += weights[p] = exp(cap != 0 ? cap * tanh(0.3 * score / cap) : 0.3 * score);
        }
        for (int64_t d = 0; d < dim; d++) {
          double expected = 0;
          for (int64_t p = first; p <= position; p++)
            expected += weights[p] / sum * get(cache, PLACE(s, p, 1, h / group) + d);
          check("attention", get(out, (t * group * heads + h) * dim + d), expected, kind);
        }
      }
  release(packed), release(out), release(cache);
}

/* Of x and, every other time, of what is added to it. */
static void run_norm(int64_t kind, int64_t weight_kind, int64_t num_rows, int64_t first, int64_t second) {
  const int64_t size = first + second, step = size + 3, sizes[] = {first, second};
  Numbers x = numbers(num_rows * step - 3, kind), weight = numbers(size, weight_kind), y = numbers(num_rows * size, kind);
  Numbers residual = numbers(num_rows * (size + 1) - 1, kind), before = numbers(num_rows * step - 3, kind);
  for (int64_t i = 0; i < num_rows * step - 3; i++) set(before, i, (float)get(x, i));
  const int adds = num_rows % 2;
  rms_norm(x.base, step, kind, adds ? residual.base : NULL, size + 1, weight.base, weight_kind, sizes, 2, num_rows,
           size, 1e-3, y.base, 2);
  for (int64_t r = 0; r < num_rows; r++)
    for (int64_t i = 0; i < size; i++) {
      const int64_t from = i < first ? 0 : first, to = i < first ? first : size;
      double sum = 0;
      const double added = adds ? get(residual, r * (size + 1) + i) : 0;
      check("sum", get(x, r * step + i), get(before, r * step + i) + added, kind);
      for (int64_t j = from; j < to; j++) sum += get(x, r * step + j) * get(x, r * step + j);
      const double expected = get(x, r * step + i) / sqrt(sum / (double)(to - from) + 1e-3) * get(weight, i);
      check("norm", get(y, r * size + i), expected, kind);
    }
  release(x), release(weight), release(y), release(residual), release(before);
}

static void run_silu(int64_t kind, int64_t num_rows, int64_t size) {
  const int64_t step = 2 * size + 1;
  Numbers x = numbers(num_rows * step - 1, kind), y = numbers(num_rows * size, kind);
  silu_and_mul(x.base, step, kind, num_rows, size, y.base, 2);
  for (int64_t r = 0; r < num_rows; r++)
    for (int64_t i = 0; i < size; i++) {
      const double gate = get(x, r * step + i);
      check("SwiGLU", get(y, r * size + i), gate / (1 + exp(-gate)) * get(x, r * step + size + i), kind);
    }
  release(x), release(y);
}

/* Rows of `size` logits in any order, one of them NaN, limits on every other run; what is drawn is in the middle of the
   share of a token. */
static void run_draw(int64_t num_rows, int64_t size, int limited) {
  const int64_t step = size + 2;
  Numbers logits = numbers(num_rows * step - 2, FLOAT32), temperature = numbers(num_rows, FLOAT32);
  Numbers min_p = numbers(num_rows, FLOAT32), top_p = numbers(num_rows, FLOAT32);
  double *uniform = malloc((size_t)num_rows * sizeof *uniform);
  int64_t *const numbers = malloc((size_t)num_rows * 4 * sizeof *numbers), *const rows = numbers;
  int64_t *const top_k = rows + num_rows, *const drawn = top_k + num_rows, *const expected = drawn + num_rows;
  float *const scratch = malloc(2 * (size_t)draw_scratch(size) * sizeof *scratch);
  uint8_t *const finite = malloc((size_t)num_rows);
  for (int64_t i = 0; i < num_rows; i++) {
    rows[i] = num_rows - 1 - i;
    top_k[i] = i % 3 ? size : 0;
    set(temperature, i, 0.5f + (float)fabs(get(temperature, i)));
    set(min_p, i, 0);
    set(top_p, i, i % 2 ? 1 : 0x1.fffffep-1f);
    double weights[size], total = 0, before = 0;
    for (int64_t j = 0; j < size; j++)
      total += weights[j] = exp(get(logits, rows[i] * step + j) / get(temperature, i));
    expected[i] = random_below(size);
    for (int64_t j = 0; j < expected[i]; j++) before += weights[j];
    uniform[i] = (before + weights[expected[i]] / 2) / total;
    if (limited) { /* to the likeliest, in one of three ways */
      if (i % 3 == 0) set(min_p, i, 1);
      if (i % 3 == 1) top_k[i] = 1;
      if (i % 3 == 2) set(top_p, i, 0);
    }
  }
  set(logits, rows[num_rows / 2] * step + size - 1, NAN);
  argmax((float *)logits.base, step, num_rows, size, drawn, finite, 2);
  for (int64_t i = 0; i < num_rows; i++) {
    int64_t most = 0;
    for (int64_t j = 1; j < size; j++)
      if (get(logits, rows[i] * step + j) > get(logits, rows[i] * step + most)) most = j;
    check("finite", finite[rows[i]], i != num_rows / 2, FLOAT32);
    if (i != num_rows / 2) check("argmax", (double)drawn[rows[i]], (double)most, FLOAT32);
    if (limited) expected[i] = most;
  }
  draw((float *)logits.base, step, size, rows, num_rows, (float *)temperature.base, uniform,
       limited ? (float *)min_p.base : NULL, limited ? top_k : NULL, limited ? (float *)top_p.base : NULL, drawn,
       scratch, 2);
  for (int64_t i = 0; i < num_rows; i++)
    check("draw", (double)drawn[i], i == num_rows / 2 ? -1 : (double)expected[i], FLOAT32);
  release(logits), release(temperature), release(min_p), release(top_p);
  free(uniform), free(numbers), free(scratch), free(finite);
}

int main(void) {
  const int64_t kinds[] = {FLOAT32, BFLOAT16, FLOAT16};
  int64_t num = 0;
  for (int k = 0; k < 3; k++) {
    const int64_t lengths[] = {1, 2, 5, 33}, channels[] = {1, 7, 64, 130}, states[] = {1, 5, 8, 16, 19};
    for (int l = 0; l < 4; l++)
      for (int c = 0; c < 4; c++)
        for (int n = 0; n < 5; n++, num++)
          run_ssm(kinds[k], n % 2 ? FLOAT32 : kinds[k], lengths[l], channels[c], states[n], 1 + (l + c + n) % 5, n % 3);
    const int64_t sizes[] = {1, 5, 16, 33};
    for (int l = 0; l < 4; l++)
      for (int s = 0; s < 4; s++)
        for (int n = 0; n < 5; n++, num++)
          run_ssd(kinds[k], n % 2 ? FLOAT32 : kinds[k], lengths[l], 6, 1 + (l + s + n) % 3, sizes[s], states[n], n % 3);
    for (int64_t n = 1; n < 70; n += 4, num++) run_norm(kinds[k], kinds[(k + n) % 3], 1 + n / 2, n, 1 + 3 * n % 41);
    for (int64_t n = 1; n < 70; n += 4, num++) run_silu(kinds[k], 1 + n / 2, n);
    for (int64_t n = 1; n < 900; n += 1 + n / 3, num++) run_draw(1 + n / 9, n, k);
    const int64_t contexts[] = {0, 1, 63, 100}, dims[] = {1, 16, 20, 64}, groups[] = {1, 2, 3, 8};
    for (int c = 0; c < 4; c++)
      for (int d = 0; d < 4; d++)
        for (int l = 0; l < 4; l++, num++)
          run_attention(kinds[k], kinds[(k + c) % 3], contexts[c], lengths[l], groups[(c + d + l) % 4], dims[d],
                        1 + (5 * d + 3 * c) % 17, l % 2 ? 0 : 1 + 20 * c, d % 2 ? 0 : 0.5 + c);
    /* One KV head's keys, shared: the other sequence is half as long. */
    run_attention(kinds[k], kinds[k], 3 * PIECE + 7, 2, 3, 20, 16, 0, 0), num++;
    run_attention(kinds[k], kinds[k], 2 * PIECE, 1, 2, 16, 16, PIECE + 20, 0), num++;
  }
  printf("ok: %d sets of sizes\n", (int)num);
  return 0;
}
