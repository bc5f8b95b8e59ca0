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

#define PANEL_ROWS 6         /* 6 rows x 2 vectors of outputs leave 4 of 16 registers for what they are made of */
#define MOST_SUMS 12         /* of vectors at once */
#define FLOATS_PIECE 512     /* inputs; it keeps sums of many as accurate as those that begin in several lanes */
#define L2_BYTES (192 << 10) /* of panels that stay in the second cache while rows pass */
#define PANEL_AHEAD 1024     /* bytes: a panel is read as one stream, and the next one lies behind it */

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

/* acc + an input (or a pair) of a row times its elements. */
INLINE vec add_input(vec acc, const char *x, vec ws, int kind) {
  if (kind == WHOLE) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (vec)add_pairs((ivec)acc, (svec)(pair - (ivec){}), (svec)ws);
  }
  float one;
  memcpy(&one, x, sizeof one);
  return fma_v(splat(one), ws, acc);
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

/* The sums of a tile, scaled: once for all tiles, so that they are rounded alike and soon compiled. */
static __attribute__((noinline)) void put_tile(const vec *totals, int num_rows, int num_panels, const char *x,
                                               int64_t x_stride, weight w, int64_t first, const target *out,
                                               int64_t row) {
  for (int n = 0; n < num_panels; n++)
    for (int m = 0; m < num_rows; m++)
      for (int h = 0; h < 2; h++) {
        const int64_t output = first + n * PANEL + h * LANES;
        vec sums = totals[(n * num_rows + m) * 2 + h];
        if (w.scales) sums *= load(w.scales + output);
        if (w.limit) sums *= splat(row_scale(x + m * x_stride, w.num_inputs));
        IN_REGISTER(sums); /* or compilers fuse the last product and the bias in one case, and not in another */
        put_outputs(sums, out, (row + m) * out->stride + output, output);
      }
}

/* num_rows rows from `row` on, with num_panels panels from output `first` on. x_stride is in bytes; `num_rows`,
   `num_panels` and `kind` are constants where this is inlined. */
INLINE void panel_tile(int num_rows, int num_panels, int kind, const char *x, int64_t x_stride, weight w, int64_t first,
                       const target *out, int64_t row) {
  const int num_sums = 2 * num_rows * num_panels;
  const int inputs = kind == WHOLE ? 2 : 1; /* at once, and each takes sizeof(float) / inputs bytes of x */
  const int64_t piece = kind == WHOLE ? PIECE : FLOATS_PIECE, size = panel_bytes(w);
  const int64_t step = inputs * PANEL * size_of(w.kind), num_steps = w.num_inputs / inputs;
  const char *p = (const char *)w.start + first / PANEL * size;
  vec totals[MOST_SUMS] = {{0}};
  x += row * x_stride;
  for (int64_t from = 0; from < num_steps; from += piece / inputs) {
    const int64_t to = min_i(from + piece / inputs, num_steps);
    vec acc[MOST_SUMS] = {{0}};
#pragma GCC unroll 12
    for (int s = 0; s < num_sums; s++) IN_REGISTER(acc[s]); /* or a first step, which adds to nothing, is one apart */
#pragma GCC unroll 2
    for (int64_t i = from; i < to; i++) {
#pragma GCC unroll 4
      for (int n = 0; n < num_panels; n++) {
        const char *at = p + n * size + i * step;
        const vec low = read_outputs(at, 0, kind), high = read_outputs(at, 1, kind);
        __builtin_prefetch(at + PANEL_AHEAD);
#pragma GCC unroll 6
        for (int m = 0; m < num_rows; m++) {
          vec *sums = acc + (n * num_rows + m) * 2;
          sums[0] = add_input(sums[0], x + m * x_stride + i * sizeof(float), low, kind);
          sums[1] = add_input(sums[1], x + m * x_stride + i * sizeof(float), high, kind);
          IN_REGISTER(sums[0]);
          IN_REGISTER(sums[1]);
        }
      }
    }
#pragma GCC unroll 12
    for (int s = 0; s < num_sums; s++)
      totals[s] += kind == WHOLE ? __builtin_convertvector((ivec)acc[s], vec) : acc[s];
  }
  put_tile(totals, num_rows, num_panels, x, x_stride, w, first, out, row);
}

/* Rows from `row` on, with outputs first to end, in tiles of num_panels panels and then of one. */
INLINE void panel_tiles(int num_rows, int num_panels, int kind, const char *x, int64_t x_stride, weight w,
                        int64_t first, int64_t end, const target *out, int64_t row) {
  for (; first + num_panels * PANEL <= end; first += num_panels * PANEL)
    panel_tile(num_rows, num_panels, kind, x, x_stride, w, first, out, row);
  for (; num_panels > 1 && first < end; first += PANEL) panel_tile(num_rows, 1, kind, x, x_stride, w, first, out, row);
}

INLINE void panels_of(int kind, const float *rows, int64_t x_stride, int64_t num_rows, weight w, int64_t first,
                      int64_t end, const target *out) {
  const char *x = (const char *)rows;
  const int64_t step = max_i(L2_BYTES / (panel_bytes(w) + 1), 1) * PANEL;
  x_stride *= sizeof *rows;
  for (int64_t from = first; from < end; from += step) {
    const int64_t to = min_i(from + step, end);
    int64_t row = 0;
    for (; row + PANEL_ROWS <= num_rows; row += PANEL_ROWS)
      panel_tiles(PANEL_ROWS, 1, kind, x, x_stride, w, from, to, out, row);
    /* Few rows have sums enough to hide the latency of adding only with several panels. */
    for (; num_rows - row >= 4; row += 4) panel_tiles(4, 1, kind, x, x_stride, w, from, to, out, row);
    if (num_rows - row >= 2) {
      panel_tiles(2, 2, kind, x, x_stride, w, from, to, out, row);
      row += 2;
    }
    if (row < num_rows) panel_tiles(1, 4, kind, x, x_stride, w, from, to, out, row);
  }
}

#endif
