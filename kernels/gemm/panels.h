/* Products of rows of x with a weight whose outputs lie side by side: what is fast, where there are whole panels.

   A panel is PANEL outputs. Input after input it has an element for each of them, so an input of a row of x is multiplied
   by all outputs of a panel at once, and each of these has its own accumulator: inputs are added up one after the other in
   pieces, and pieces one after the other, whatever other rows and outputs are computed. Nothing is summed across lanes.

   `panels.py` lays weights out:
   - float32, and codes that are widened: [input][output];
   - bfloat16: [input][output % LANES][output / LANES], so that pairs come apart as neighbours' vectors;
   - codes that whole numbers are multiplied with: [input / 2][output][input % 2], of an even number of inputs.
   Rows of x are float32, or whole numbers (integers.h). */

#ifndef HYBRIDSERVE_PANELS_H
#define HYBRIDSERVE_PANELS_H

#include "gemm/codes.h"
#include "gemm/integers.h"
#include "gemm/sums.h"

#define PANEL (2 * LANES)
#define PANEL_ROWS 6         /* 6 rows x 2 vectors of outputs leave 4 of 16 registers for what they are made of */
#define MOST_SUMS 12         /* of vectors at once */
#define OUTPUTS_AT_ONCE (4 * PANEL) /* that one row is multiplied with */
#define FLOATS_PIECE 512     /* inputs; it keeps sums of many as accurate as those that begin in several lanes */
#define PANEL_AHEAD 3072     /* bytes; no multiple of the distance of rows, which would be in the same lines of a cache */
#define L2_BYTES (256 << 10) /* of panels that stay in the second cache while rows pass */

/* Instead of a kind: int8 codes and rows in whole numbers. */
#define WHOLE (-1)

EXPORT void panel_outputs(int64_t *num) { *num = PANEL; }

INLINE int64_t panel_bytes(weight w) { return w.num_inputs * PANEL * size_of(w.kind); }

/* Like add_products, but the products of neighbours are always added to one lane. */
INLINE ivec add_pairs(ivec acc, svec a, svec b) {
#if defined(__aarch64__)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
  return acc + (ivec)vpaddq_s32(low, high);
#else
  return add_products(acc, a, b);
#endif
}

/* An input's elements (of whole numbers: a pair's) for half h of a panel. */
INLINE vec read_outputs(const char *p, int h, int kind) {
  if (kind == FLOAT32) return load((const float *)p + h * LANES);
  if (kind == BFLOAT16) {
    uvec pairs;
    memcpy(&pairs, p, sizeof pairs);
    return (vec)(h ? pairs >> 16 << 16 : pairs << 16);
  }
  if (kind == WHOLE) {
    bvec codes;
    memcpy(&codes, p + h * sizeof codes, sizeof codes);
    return (vec)widen_codes(codes);
  }
  return widen_code(p + h * LANES, kind);
}

/* acc + an input of a row times its elements. */
INLINE vec add_input(vec acc, const char *x, vec ws) {
  float one;
  memcpy(&one, x, sizeof one);
  return fma_v(splat(one), ws, acc);
}

/* The same in whole numbers, of a pair of inputs. */
INLINE ivec add_whole_input(ivec acc, const char *x, vec ws) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return add_pairs(acc, (svec)(pair - (ivec){}), (svec)ws);
}

INLINE void put_outputs(vec sums, const target *out, int64_t at, int64_t output) {
  if (out->kind == FLOAT32) {
    if (out->bias) sums += load((const float *)out->bias + output);
    store((float *)out->y + at, sums);
  } else {
    if (out->bias) sums += widen_v((const uint16_t *)out->bias + output);
    narrow_v((uint16_t *)out->y + at, sums);
  }
}

/* The sums of a tile of tile_rows, num_rows of which there are, scaled: once for all tiles, so that they are rounded
   alike and soon compiled. */
static __attribute__((noinline)) void put_tile(const vec *totals, int tile_rows, int num_rows, int num_panels,
                                               const char *x, int64_t x_stride, weight w, int64_t first,
                                               const target *out, int64_t row) {
  for (int n = 0; n < num_panels; n++)
    for (int m = 0; m < num_rows; m++)
      for (int h = 0; h < 2; h++) {
        const int64_t output = first + n * PANEL + h * LANES;
        vec sums = totals[(n * tile_rows + m) * 2 + h];
        if (w.scales) sums *= load(w.scales + output);
        if (w.limit) sums *= splat(row_scale(x + m * x_stride, w.num_inputs));
        IN_REGISTER(sums); /* or compilers fuse the last product and the bias in one case, and not in another */
        put_outputs(sums, out, (row + m) * out->stride + output, output);
      }
}

/* How panels come into the cache before they are read. All rows are multiplied with a group of panels before the next
   one, in one pass or more. In one pass the bytes behind those that are read are fetched or, for several panels side by
   side, the piece that is read next; of several passes, each fetches its share of the group that follows, so that memory
   is read all the time. */
typedef struct {
  int64_t group; /* bytes */
  int64_t num_passes, pass;
} passes;

/* Up to tile_rows rows from `row` on, with num_panels panels from output `first` on; rows that there are not are the last
   one. x_stride is in bytes; `tile_rows`, `num_panels` and `kind` are constants where this is inlined. */
INLINE void panel_tile(int tile_rows, int num_panels, int kind, const char *x, int64_t x_stride, int64_t num_rows,
                       weight w, int64_t first, const target *out, int64_t row, passes all) {
  const int num_sums = 2 * tile_rows * num_panels;
  const int inputs = kind == WHOLE ? 2 : 1; /* at once, and each takes sizeof(float) / inputs bytes of x */
  const int64_t piece = (kind == WHOLE ? PIECE : FLOATS_PIECE) / inputs, size = panel_bytes(w);
  const int64_t step = inputs * PANEL * size_of(kind == WHOLE ? INT8 : kind), num_steps = w.num_inputs / inputs;
  const int64_t ahead_step = ceil_div(step, all.num_passes);
  const char *p = (const char *)w.start + first / PANEL * size;
  int64_t rows[PANEL_ROWS];
  vec totals[MOST_SUMS] = {{0}};
  x += row * x_stride;
  num_rows = min_i(num_rows - row, tile_rows);
#pragma GCC unroll 6
  for (int m = 0; m < tile_rows; m++) rows[m] = min_i(m, num_rows - 1) * x_stride;
  for (int64_t from = 0; from < num_steps; from += piece) {
    const int64_t to = min_i(from + piece, num_steps);
    const char *ahead = p + all.group;
    if (all.num_passes > 1)
      ahead += all.pass * size / all.num_passes + from * ahead_step;
    else if (num_panels == 1)
      ahead = p + from * step + (kind == FLOAT32 ? PANEL_AHEAD / 2 : PANEL_AHEAD);
    else if (to < num_steps)
      ahead = p + to * step;
    vec acc[MOST_SUMS] = {{0}};
    ivec whole[MOST_SUMS] = {{0}}; /* acc for whole numbers: where one type stands for the other, sums are moved about */
#pragma GCC unroll 12
    for (int s = 0; s < num_sums; s++) { /* or a first step, which adds to nothing, is one apart */
      if (kind == WHOLE)
        IN_REGISTER(whole[s]);
      else
        IN_REGISTER(acc[s]);
    }
#pragma GCC unroll 2
    for (int64_t i = from; i < to; i++) {
#pragma GCC unroll 4
      for (int n = 0; n < num_panels; n++) {
        const char *at = p + n * size + i * step;
        const vec low = read_outputs(at, 0, kind), high = read_outputs(at, 1, kind);
        __builtin_prefetch(ahead + n * size);
#pragma GCC unroll 6
        for (int m = 0; m < tile_rows; m++) {
          const char *one = x + rows[m] + i * sizeof(float);
          const int s = (n * tile_rows + m) * 2;
          if (kind == WHOLE) {
            whole[s] = add_whole_input(whole[s], one, low);
            whole[s + 1] = add_whole_input(whole[s + 1], one, high);
            IN_REGISTER(whole[s]);
            IN_REGISTER(whole[s + 1]);
          } else {
            acc[s] = add_input(acc[s], one, low);
            acc[s + 1] = add_input(acc[s + 1], one, high);
            IN_REGISTER(acc[s]);
            IN_REGISTER(acc[s + 1]);
          }
        }
      }
      ahead += ahead_step;
    }
#pragma GCC unroll 12
    for (int s = 0; s < num_sums; s++)
      totals[s] += kind == WHOLE ? __builtin_convertvector(whole[s], vec) : acc[s];
  }
  put_tile(totals, tile_rows, (int)num_rows, num_panels, x, x_stride, w, first, out, row);
}

/* Rows from `row` on, with outputs first to end, in tiles of num_panels panels and then of one. */
INLINE void panel_tiles(int tile_rows, int num_panels, int kind, const char *x, int64_t x_stride, int64_t num_rows,
                        weight w, int64_t first, int64_t end, const target *out, int64_t row, passes all) {
  for (; first + num_panels * PANEL <= end; first += num_panels * PANEL)
    panel_tile(tile_rows, num_panels, kind, x, x_stride, num_rows, w, first, out, row, all);
  for (; num_panels > 1 && first < end; first += PANEL)
    panel_tile(tile_rows, 1, kind, x, x_stride, num_rows, w, first, out, row, all);
}

INLINE void panels_of(int kind, const float *rows, int64_t x_stride, int64_t num_rows, weight w, int64_t first,
                      int64_t end, const target *out) {
  const char *x = (const char *)rows;
  const int64_t size = panel_bytes(w), rest = num_rows % PANEL_ROWS;
  passes all = {0, ceil_div(num_rows, PANEL_ROWS), 0};
  /* One or two rows have sums enough to hide the latency of adding only with several panels. */
  int64_t num_panels = rest == 1 ? 4 : rest == 2 ? 2 : 1;
  if (all.num_passes > 1) num_panels = max_i(min_i(num_panels, L2_BYTES / (size + 1)), 1);
  all.group = num_panels * size;
  x_stride *= sizeof *rows;
  for (int64_t from = first; from < end; from += num_panels * PANEL) {
    const int64_t to = min_i(from + num_panels * PANEL, end);
    int64_t row = 0;
    for (all.pass = 0; num_rows - row > 4; row += PANEL_ROWS, all.pass++)
      panel_tiles(PANEL_ROWS, 1, kind, x, x_stride, num_rows, w, from, to, out, row, all);
    if (num_rows - row > 2)
      panel_tiles(4, 1, kind, x, x_stride, num_rows, w, from, to, out, row, all);
    else if (num_rows - row == 2)
      panel_tiles(2, 2, kind, x, x_stride, num_rows, w, from, to, out, row, all);
    else if (num_rows - row == 1)
      panel_tiles(1, 4, kind, x, x_stride, num_rows, w, from, to, out, row, all);
  }
}

/* Outputs first to end, whole panels of them, of every row of x. A function a kind: small ones are compiled better. */
#define PANELS_OF(name, kind)                                                                                        \
  static __attribute__((noinline)) void name(const float *x, int64_t x_stride, int64_t num_rows, weight w,           \
                                             int64_t first, int64_t end, const target *out) {                        \
    panels_of(kind, x, x_stride, num_rows, w, first, end, out);                                                      \
  }
PANELS_OF(whole_panels, WHOLE)
PANELS_OF(float_panels, FLOAT32)
PANELS_OF(half_panels, BFLOAT16)
PANELS_OF(int8_panels, INT8)
PANELS_OF(float8_panels, FLOAT8)

static __attribute__((unused)) void packed_panel(const float *x, int64_t x_stride, int64_t num_rows, weight w,
                                                 int64_t first, int64_t end, target out) {
  if (w.limit)
    whole_panels(x, x_stride, num_rows, w, first, end, &out);
  else if (w.kind == FLOAT32)
    float_panels(x, x_stride, num_rows, w, first, end, &out);
  else if (w.kind == BFLOAT16)
    half_panels(x, x_stride, num_rows, w, first, end, &out);
  else if (w.kind == INT8)
    int8_panels(x, x_stride, num_rows, w, first, end, &out);
  else
    float8_panels(x, x_stride, num_rows, w, first, end, &out);
}

#endif
