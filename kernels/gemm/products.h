/* The product of one kind of weight: PRODUCT(name, kind) is the function that the library of this kind has.

   Every number of rows has tiles; those of a weight as it is are functions of their own. */

#ifndef HYBRIDSERVE_PRODUCTS_H
#define HYBRIDSERVE_PRODUCTS_H

#include "gemm/dot.h"
#include "gemm/panels.h"

#define L1_BYTES (20 << 10) /* of weights that stay in the first cache while rows pass */

typedef void tile_function(const float *x, int64_t x_stride, const weight *w, int64_t first, int64_t end,
                           const target *out, int64_t row);

/* tiles[n] is that of n + 1 rows. */
INLINE void rows_of_tiles(tile_function *const tiles[ROWS], const float *x, int64_t x_stride, int64_t num_rows,
                          const weight *w, int64_t first, int64_t end, const target *out) {
  const int64_t fit = L1_BYTES / (w->num_inputs * size_of(w->kind) + 1) / OUTPUTS * OUTPUTS;
  const int64_t step = max_i(OUTPUTS, fit);
  for (int64_t from = first; from < end; from += step) {
    const int64_t to = min_i(from + step, end);
    for (int64_t row = 0; row < num_rows; row += ROWS) {
      tile_function *const tile = tiles[min_i(ROWS, num_rows - row) - 1];
      for (int64_t n = from; n < to; n += OUTPUTS) tile(x, x_stride, w, n, to, out, row);
    }
  }
}

#define TILE(name, num_rows, kind)                                                                                    \
  static NOINLINE void name##_##num_rows(const float *x, int64_t x_stride, const weight *w, int64_t first,           \
                                         int64_t end, const target *out, int64_t row) {                             \
    any_tile(num_rows, kind, x, x_stride, *w, first, end, out, row);                                                 \
  }

#define PRODUCT(name, kind)                                                                                           \
  TILE(name, 1, kind)                                                                                                \
  TILE(name, 2, kind)                                                                                                \
  TILE(name, 3, kind)                                                                                                \
  EXPORT void name(const float *x, int64_t x_stride, int64_t num_rows, const weight *w, int64_t first, int64_t end,  \
                   const target *out) {                                                                              \
    static tile_function *const tiles[ROWS] = {name##_1, name##_2, name##_3};                                        \
    if (w->is_packed)                                                                                                \
      panels_of(kind, x, x_stride, num_rows, *w, first, end, out);                                                   \
    else                                                                                                             \
      rows_of_tiles(tiles, x, x_stride, num_rows, w, first, end, out);                                               \
  }

#endif
