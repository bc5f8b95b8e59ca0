/* Operators on rows: one call, whatever the number of rows. A row's result depends on itself alone.

   Types are those of native_math.h; steps are strides in elements. */

#include "draw.h"

#define TASK_ROWS 16
#define PARALLEL_ELEMENTS (1 << 16) /* fewer are done before another thread has woken up */
#define SUMS 4                      /* at a time, or each addition would wait for the one before */

static float sum_of_squares(const float *x, int64_t n) {
  vec sums[SUMS] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + SUMS * LANES <= n; i += SUMS * LANES)
#pragma GCC unroll 4
    for (int s = 0; s < SUMS; s++) {
      const vec v = load(x + i + s * LANES);
      sums[s] = fma_v(v, v, sums[s]);
    }
  for (; i < n; i += LANES) {
    const vec v = i + LANES <= n ? load(x + i) : load_part(x + i, n - i);
    sums[0] = fma_v(v, v, sums[0]);
  }
  return sum_v((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static void norm_segment(float *y, const float *x, const float *weight, int64_t n, float eps) {
  const float scale = 1 / __builtin_sqrtf(sum_of_squares(x, n) / (float)n + eps);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
  for (; i < n; i++) y[i] = x[i] * scale * weight[i];
}

/* The norm of x, or of x + residual, which x becomes. */
EXPORT void rms_norm(void *x, int64_t x_step, int64_t type, const void *residual, int64_t residual_step,
                     const void *weight, int64_t weight_type, const int64_t *sizes, int64_t num_sizes,
                     int64_t num_rows, int64_t row_size, double eps, void *y, int64_t num_threads) {
  const int64_t tasks = ceil_div(num_rows, TASK_ROWS);
#pragma omp parallel for schedule(static) num_threads(num_threads) \
    if (num_threads > 1 && num_rows * row_size > PARALLEL_ELEMENTS)
  for (int64_t task = 0; task < tasks; task++) {
    float wide_weight[row_size], wide_x[row_size], wide_y[row_size];
    widen_row(wide_weight, weight, weight_type, row_size, 1);
    for (int64_t r = task * TASK_ROWS; r < min_i(num_rows, (task + 1) * TASK_ROWS); r++) {
      void *const row = element(x, type, r * x_step);
      widen_row(wide_x, row, type, row_size, 1);
      if (residual != NULL) {
        widen_row(wide_y, element(residual, type, r * residual_step), type, row_size, 1);
        for (int64_t i = 0; i < row_size; i++) wide_y[i] += wide_x[i];
        narrow_row(row, wide_y, type, row_size, 1);
        widen_row(wide_x, row, type, row_size, 1); /* as it was rounded */
      }
      int64_t at = 0;
      for (int64_t s = 0; s < num_sizes; at += sizes[s++])
        norm_segment(wide_y + at, wide_x + at, wide_weight + at, sizes[s], (float)eps);
      narrow_row(element(y, type, r * row_size), wide_y, type, row_size, 1);
    }
  }
}

/* y [num_rows, size] = silu(gate) * up, which lie side by side in a row of x */
EXPORT void silu_and_mul(const void *x, int64_t x_step, int64_t type, int64_t num_rows, int64_t size, void *y,
                         int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) \
    if (num_threads > 1 && num_rows * size > PARALLEL_ELEMENTS)
  for (int64_t r = 0; r < num_rows; r++) {
    float gate[size + LANES], up[size + LANES]; /* the last vector has what nobody reads */
    widen_row(gate, element(x, type, r * x_step), type, size, 1);
    widen_row(up, element(x, type, r * x_step + size), type, size, 1);
    for (int64_t i = 0; i < size; i += LANES) store(gate + i, quick_silu_v(load(gate + i)) * load(up + i));
    narrow_row(element(y, type, r * size), gate, type, size, 1);
  }
}

EXPORT void argmax(const float *logits, int64_t step, int64_t num_rows, int64_t size, int64_t *places, uint8_t *finite,
                   int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) \
    if (num_threads > 1 && num_rows * size > PARALLEL_ELEMENTS)
  for (int64_t r = 0; r < num_rows; r++) places[r] = largest(logits + r * step, size, finite + r);
}

/* drawn[i] from row rows[i]; limits may be NULL. `scratch` is draw_scratch for each thread. */
EXPORT void draw(const float *logits, int64_t step, int64_t size, const int64_t *rows, int64_t num_rows,
                 const float *temperature, const double *uniform, const float *min_p, const int64_t *top_k,
                 const float *top_p, int64_t *drawn, float *scratch, int64_t num_threads) {
  const int64_t tasks = min_i(num_threads, num_rows);
#pragma omp parallel for schedule(static) num_threads(tasks) if (tasks > 1)
  for (int64_t task = 0; task < tasks; task++)
    for (int64_t i = task; i < num_rows; i += tasks)
      drawn[i] = draw_row(logits + rows[i] * step, size, temperature[i], uniform[i], min_p ? min_p[i] : 0,
                          top_k ? top_k[i] : 0, top_p ? top_p[i] : 1, scratch + task * draw_scratch(size));
}
