/* Causal convolution, and the scans of Mamba and Mamba-2, of a ragged batch: one call a layer, states by slot.

   A task is one sequence and CHANNELS of its channels, or one head of Mamba-2. It walks the sequence in tiles of
   TOKENS, widened to float32, and carries the state from tile to tile. Every token goes through the same instructions whatever its place, its
   company and the number of threads, so no result depends on them, and none on how a prompt is cut into chunks (where
   the state is stored in float32).

   Types are those of native.h; steps are strides in elements; the last dimension of what has one row a token is
   contiguous. */

#include "native_math.h"

#define CHANNELS 128
#define TOKENS 16
#define PARALLEL_OUTPUTS (1 << 13) /* fewer outputs of a convolution, or states, are done before another thread has */
#define PARALLEL_STATES (1 << 16)  /* woken up */

typedef struct {
  const int64_t *query_start; /* [S + 1] */
  const int64_t *slots;       /* [S] */
  const uint8_t *has_state;   /* [S] */
  int64_t num_sequences, num_channels;
  int64_t type;
} Batch;

/* One tensor of states [num_slots, C, size]. */
typedef struct {
  void *base;
  int64_t type, slot_step, channel_step, step;
} States;

/* A task's tokens and channels. */
typedef struct {
  int64_t start, stop, first, channels;
  char *state; /* of its first channel */
  int fresh, null;
} Task;

static Task task_of(const Batch *batch, const States *states, int64_t number) {
  const int64_t blocks = ceil_div(batch->num_channels, CHANNELS), sequence = number / blocks;
  const int64_t first = number % blocks * CHANNELS;
  return (Task){
      .start = batch->query_start[sequence],
      .stop = batch->query_start[sequence + 1],
      .first = first,
      .channels = min_i(CHANNELS, batch->num_channels - first),
      .state = element(states->base, states->type,
                       batch->slots[sequence] * states->slot_step + first * states->channel_step),
      .fresh = !batch->has_state[sequence],
      .null = batch->slots[sequence] == 0,
  };
}

/* The task's channels of n tokens from t on, into rows of CHANNELS; what is past the channels is zero. */
static void take(float tile[][CHANNELS], const void *x, int64_t step, int64_t type, const Task *task, int64_t t,
                 int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    widen_row(tile[i], element(x, type, (t + i) * step + task->first), type, task->channels, 1);
    for (int64_t c = task->channels; c < CHANNELS; c++) tile[i][c] = 0;
  }
}

typedef struct {
  Batch batch;
  States past; /* [num_slots, C, W - 1] */
  const void *x, *weight, *bias;
  int64_t x_step, width, silu;
  void *y; /* [T, C] */
} Convolution;

static void convolve(const Convolution *a, const Task *task) {
  const States *past = &a->past;
  const int64_t type = a->batch.type, channels = task->channels, num_past = a->width - 1;
  float taps[a->width][CHANNELS], rows[num_past + TOKENS][CHANNELS], bias[CHANNELS] = {0}, out[CHANNELS];

  if (channels < CHANNELS) memset(taps, 0, sizeof taps);
  if (task->fresh || channels < CHANNELS) memset(rows, 0, sizeof rows);
  if (a->bias) widen_row(bias, element(a->bias, type, task->first), type, channels, 1);
  for (int64_t k = 0; k < a->width; k++)
    widen_row(taps[k], element(a->weight, type, task->first * a->width + k), type, channels, a->width);
  for (int64_t k = 0; k < num_past && !task->fresh; k++)
    widen_row(rows[k], element(task->state, past->type, k * past->step), past->type, channels,
              past->channel_step);
  for (int64_t t = task->start; t < task->stop; t += TOKENS) {
    const int64_t n = min_i(TOKENS, task->stop - t);
    take(rows + num_past, a->x, a->x_step, type, task, t, n);
    for (int64_t i = 0; i < n; i++) {
      for (int64_t c = 0; c < channels; c += LANES) {
        vec sum = load(bias + c);
        for (int64_t k = 0; k < a->width; k++) sum = fma_v(load(taps[k] + c), load(rows[i + k] + c), sum);
        store(out + c, a->silu ? quick_silu_v(sum) : sum);
      }
      narrow_row(element(a->y, type, (t + i) * a->batch.num_channels + task->first), out, type, channels, 1);
    }
    memmove(rows, rows + n, (size_t)num_past * sizeof rows[0]);
  }
  for (int64_t k = 0; k < num_past; k++)
    narrow_row(element(task->state, past->type, k * past->step), rows[k], past->type, channels,
               past->channel_step);
}

EXPORT void causal_conv1d(const int64_t *query_start, const int64_t *slots, const uint8_t *has_state,
                          int64_t num_sequences, int64_t num_channels, int64_t type, const void *x, int64_t x_step,
                          const void *weight, int64_t width, const void *bias, int64_t silu, void *state,
                          int64_t state_type, int64_t slot_step, int64_t channel_step, int64_t past_step, void *y,
                          int64_t num_threads) {
  const Convolution a = {
      {query_start, slots, has_state, num_sequences, num_channels, type},
      {state, state_type, slot_step, channel_step, past_step},
      x, weight, bias, x_step, width, silu, y,
  };
  const int64_t tasks = num_sequences * ceil_div(num_channels, CHANNELS);
  const int64_t outputs = (query_start[num_sequences] - query_start[0]) * num_channels;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1 && outputs > PARALLEL_OUTPUTS)
  for (int64_t number = 0; number < tasks; number++) {
    const Task task = task_of(&a.batch, &a.past, number);
    if (task.start < task.stop) convolve(&a, &task);
  }
}

typedef struct {
  Batch batch;
  States h; /* [num_slots, C, N] */
  int64_t num_states;
  const void *u, *dt, *B, *C, *z;
  int64_t u_step, dt_step, B_step, C_step, z_step;
  const float *A, *D, *dt_bias;
  void *y; /* [T, C] */
} Scan;

/* Moves h [channels, padded] on by one token; y = C h. `log2_step` is delta log2(e), `input` delta u. */
INLINE void advance(float *h, const float *A, const float *log2_step, const float *input, const float *B,
                    const float *C, float *y, int64_t channels, int64_t padded) {
  for (int64_t c = 0; c < channels; c += LANES) {
    vec sums[LANES];
#pragma GCC unroll 16
    for (int64_t i = 0; i < LANES; i++) {
      const vec step = splat(log2_step[c + i]), in = splat(input[c + i]);
      vec sum = splat(0);
      for (int64_t n = 0; n < padded; n += LANES) {
        const int64_t at = (c + i) * padded + n;
        const vec next = fma_v(exp2_v(step * load(A + at)), load(h + at), in * load(B + n));
        store(h + at, next);
        sum = fma_v(next, load(C + n), sum);
      }
      sums[i] = sum;
    }
    store(y + c, sums_of_lanes(sums));
  }
}

static void scan(const Scan *a, const Task *task) {
  const States *states = &a->h;
  const int64_t type = a->batch.type, channels = task->channels;
  const int64_t num_states = a->num_states, padded = round_up(num_states, LANES);
  /* Whole vectors can stay where they are; but nobody can work in the null slot, which tasks may share. */
  const int whole = padded == num_states && channels % LANES == 0;
  const int in_place = whole && !task->null && states->type == FLOAT32 && states->step == 1 &&
                       states->channel_step == num_states;
  float A_copy[whole ? 1 : CHANNELS * padded], h_copy[in_place ? 1 : CHANNELS * padded];
  const float *A = a->A + task->first * num_states;
  float *h = (float *)task->state;
  float B[TOKENS][padded], C[TOKENS][padded];
  float u[TOKENS][CHANNELS], dt[TOKENS][CHANNELS], z[TOKENS][CHANNELS];
  float D[CHANNELS] = {0}, bias[CHANNELS] = {0}, log2_step[CHANNELS], input[CHANNELS], y[CHANNELS];

  memcpy(D, a->D + task->first, (size_t)channels * sizeof *D);
  if (a->dt_bias) memcpy(bias, a->dt_bias + task->first, (size_t)channels * sizeof *bias);
  if (!whole) {
    memset(B, 0, sizeof B);
    memset(C, 0, sizeof C);
    memset(A_copy, 0, sizeof A_copy);
    for (int64_t c = 0; c < channels; c++)
      memcpy(A_copy + c * padded, A + c * num_states, (size_t)num_states * sizeof *A);
    A = A_copy;
  }
  if (!in_place) {
    h = h_copy;
    memset(h, 0, sizeof h_copy);
    for (int64_t c = 0; c < channels && !task->fresh; c++)
      widen_row(h + c * padded, element(task->state, states->type, c * states->channel_step), states->type,
                num_states, states->step);
  } else if (task->fresh) {
    memset(h, 0, (size_t)(channels * num_states) * sizeof *h);
  }
  for (int64_t t = task->start; t < task->stop; t += TOKENS) {
    const int64_t n = min_i(TOKENS, task->stop - t);
    take(u, a->u, a->u_step, type, task, t, n);
    take(dt, a->dt, a->dt_step, type, task, t, n);
    if (a->z) take(z, a->z, a->z_step, type, task, t, n);
    for (int64_t i = 0; i < n; i++) {
      widen_row(B[i], element(a->B, type, (t + i) * a->B_step), type, num_states, 1);
      widen_row(C[i], element(a->C, type, (t + i) * a->C_step), type, num_states, 1);
    }
    for (int64_t i = 0; i < n; i++) {
      for (int64_t c = 0; c < channels; c += LANES) {
        const vec delta = softplus_v(load(dt[i] + c) + load(bias + c));
        store(log2_step + c, delta * LOG2_E);
        store(input + c, delta * load(u[i] + c));
      }
      /* The usual sizes as constants: their loops unroll. */
      if (padded == LANES)
        advance(h, A, log2_step, input, B[i], C[i], y, channels, LANES);
      else if (padded == 2 * LANES)
        advance(h, A, log2_step, input, B[i], C[i], y, channels, 2 * LANES);
      else
        advance(h, A, log2_step, input, B[i], C[i], y, channels, padded);
      for (int64_t c = 0; c < channels; c += LANES) {
        const vec sum = fma_v(load(D + c), load(u[i] + c), load(y + c));
        store(y + c, a->z ? sum * quick_silu_v(load(z[i] + c)) : sum);
      }
      narrow_row(element(a->y, type, (t + i) * a->batch.num_channels + task->first), y, type, channels, 1);
    }
  }
  for (int64_t c = 0; c < channels && !in_place; c++)
    narrow_row(element(task->state, states->type, c * states->channel_step), h + c * padded, states->type,
               num_states, states->step);
}

EXPORT void selective_scan(const int64_t *query_start, const int64_t *slots, const uint8_t *has_state,
                           int64_t num_sequences, int64_t num_channels, int64_t num_states, int64_t type,
                           const void *u, int64_t u_step, const void *dt, int64_t dt_step, const void *B,
                           int64_t B_step, const void *C, int64_t C_step, const void *z, int64_t z_step,
                           const float *A, const float *D, const float *dt_bias, void *state, int64_t state_type,
                           int64_t slot_step, int64_t channel_step, int64_t state_step, void *y,
                           int64_t num_threads) {
  const Scan a = {
      {query_start, slots, has_state, num_sequences, num_channels, type},
      {state, state_type, slot_step, channel_step, state_step},
      num_states, u, dt, B, C, z, u_step, dt_step, B_step, C_step, z_step, A, D, dt_bias, y,
  };
  const int64_t tasks = num_sequences * ceil_div(num_channels, CHANNELS);
  const int64_t outputs = (query_start[num_sequences] - query_start[0]) * num_channels;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1 && outputs * num_states > PARALLEL_STATES)
  for (int64_t number = 0; number < tasks; number++) {
    const Task task = task_of(&a.batch, &a.h, number);
    if (task.start < task.stop) scan(&a, &task);
  }
}

typedef struct {
  Batch batch; /* its channels are heads */
  int64_t head_size, num_groups, num_states;
  const void *x, *dt, *B, *C, *z;
  int64_t x_step, dt_step, B_step, C_step, z_step;
  const float *A, *D, *dt_bias;
  float least, most; /* of delta */
  void *state;       /* [num_slots, H, P, N] */
  int64_t state_type, slot_step, head_step, row_step, state_step;
  void *y; /* [T, H, P] */
} Ssd;

/* Moves h [rows, padded], whose rows share one decay, on by one token; y = h C. `input` is delta x. */
INLINE void advance_head(float *h, float decay, const float *input, const float *B, const float *C, float *y,
                         int64_t rows, int64_t padded) {
  const vec keep = splat(decay);
  for (int64_t r = 0; r < rows; r += LANES) {
    vec sums[LANES];
    for (int64_t i = 0; i < LANES; i++) sums[i] = splat(0);
    for (int64_t n = 0; n < padded; n += LANES) {
      const vec b = load(B + n), c = load(C + n);
#pragma GCC unroll 16
      for (int64_t i = 0; i < LANES; i++) {
        const int64_t at = (r + i) * padded + n;
        const vec next = fma_v(keep, load(h + at), splat(input[r + i]) * b);
        store(h + at, next);
        sums[i] = fma_v(next, c, sums[i]);
      }
    }
    store(y + r, sums_of_lanes(sums));
  }
}

static void scan_head(const Ssd *a, int64_t sequence, int64_t head) {
  const int64_t start = a->batch.query_start[sequence], stop = a->batch.query_start[sequence + 1];
  const int64_t slot = a->batch.slots[sequence], type = a->batch.type, head_size = a->head_size;
  const int64_t num_states = a->num_states, padded = round_up(num_states, LANES), rows = round_up(head_size, LANES);
  const int64_t first = head * head_size, group = head / (a->batch.num_channels / a->num_groups) * num_states;
  char *const state = element(a->state, a->state_type, slot * a->slot_step + head * a->head_step);
  const int fresh = !a->batch.has_state[sequence], whole = padded == num_states && rows == head_size;
  const int in_place =
      whole && slot != 0 && a->state_type == FLOAT32 && a->state_step == 1 && a->row_step == num_states;
  float h_copy[in_place ? 1 : rows * padded], *h = (float *)state;
  float x[TOKENS][rows], z[TOKENS][rows], B[TOKENS][padded], C[TOKENS][padded];
  float delta[TOKENS] = {0}, decay[TOKENS], input[rows], y[rows];

  if (!whole) {
    memset(x, 0, sizeof x);
    memset(z, 0, sizeof z);
    memset(B, 0, sizeof B);
    memset(C, 0, sizeof C);
  }
  if (!in_place) {
    h = h_copy;
    memset(h, 0, sizeof h_copy);
    for (int64_t r = 0; r < head_size && !fresh; r++)
      widen_row(h + r * padded, element(state, a->state_type, r * a->row_step), a->state_type, num_states,
                a->state_step);
  } else if (fresh) {
    memset(h, 0, (size_t)(rows * padded) * sizeof *h);
  }
  for (int64_t t = start; t < stop; t += TOKENS) {
    const int64_t n = min_i(TOKENS, stop - t);
    widen_row(delta, element(a->dt, type, t * a->dt_step + head), type, n, a->dt_step);
    for (int64_t i = 0; i < n; i++) {
      widen_row(x[i], element(a->x, type, (t + i) * a->x_step + first), type, head_size, 1);
      if (a->z) widen_row(z[i], element(a->z, type, (t + i) * a->z_step + first), type, head_size, 1);
      widen_row(B[i], element(a->B, type, (t + i) * a->B_step + group), type, num_states, 1);
      widen_row(C[i], element(a->C, type, (t + i) * a->C_step + group), type, num_states, 1);
    }
    for (int64_t i = 0; i < TOKENS; i += LANES) {
      const vec step = softplus_v(load(delta + i) + (a->dt_bias ? a->dt_bias[head] : 0));
      const vec limited = least_v(splat(a->most), most_v(splat(a->least), step));
      store(delta + i, limited);
      store(decay + i, exp2_v(limited * LOG2_E * a->A[head]));
    }
    for (int64_t i = 0; i < n; i++) {
      for (int64_t r = 0; r < rows; r += LANES) store(input + r, splat(delta[i]) * load(x[i] + r));
      advance_head(h, decay[i], input, B[i], C[i], y, rows, padded);
      for (int64_t r = 0; r < rows; r += LANES) {
        const vec sum = fma_v(splat(a->D[head]), load(x[i] + r), load(y + r));
        store(y + r, a->z ? sum * quick_silu_v(load(z[i] + r)) : sum);
      }
      narrow_row(element(a->y, type, (t + i) * a->batch.num_channels * head_size + first), y, type, head_size, 1);
    }
  }
  for (int64_t r = 0; r < head_size && !in_place; r++)
    narrow_row(element(state, a->state_type, r * a->row_step), h + r * padded, a->state_type, num_states,
               a->state_step);
}

EXPORT void ssd_scan(const int64_t *query_start, const int64_t *slots, const uint8_t *has_state,
                     int64_t num_sequences, int64_t num_heads, int64_t head_size, int64_t num_groups,
                     int64_t num_states, int64_t type, const void *x, int64_t x_step, const void *dt, int64_t dt_step,
                     const void *B, int64_t B_step, const void *C, int64_t C_step, const void *z, int64_t z_step,
                     const float *A, const float *D, const float *dt_bias, double least, double most, void *state,
                     int64_t state_type, int64_t slot_step, int64_t head_step, int64_t row_step, int64_t state_step,
                     void *y, int64_t num_threads) {
  const Ssd a = {
      {query_start, slots, has_state, num_sequences, num_heads, type},
      head_size, num_groups, num_states, x, dt, B, C, z, x_step, dt_step, B_step, C_step, z_step, A, D, dt_bias,
      (float)least, (float)most, state, state_type, slot_step, head_step, row_step, state_step, y,
  };
  const int64_t tasks = num_sequences * num_heads;
  const int64_t outputs = (query_start[num_sequences] - query_start[0]) * num_heads * head_size;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1 && outputs * num_states > PARALLEL_STATES)
  for (int64_t number = 0; number < tasks; number++) {
    const int64_t sequence = number / num_heads;
    if (query_start[sequence] < query_start[sequence + 1]) scan_head(&a, sequence, number % num_heads);
  }
}
