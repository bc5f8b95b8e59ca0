/* y = x @ weight.T + bias. Knows pointers and strides; the product that it is given knows how to sum. */

#include "gemm/rows.h"

#include <omp.h>

#define CHUNKS_PER_THREAD 8 /* a thread that falls behind leaves its chunks to the others */
#define SMALL_WORK (96 << 10) /* products below which waking the other threads costs more than they do */

/* x [num_rows, num_inputs] with rows x_stride apart and y with rows num_outputs apart, both and bias of x_kind; weight
   [num_outputs, num_inputs] with rows w_stride apart, of x_kind or of codes with `scales`, for which rows are rounded to
   whole numbers up to `limit` unless that is 0; or in panels, which num_outputs fills. `products` are of that kind. `packed` has room for rows
   packed_stride apart: rows_at_once for every thread or, if that is 0, num_rows for all of them; it is NULL where x needs
   no packing: float32, and in whole blocks or for panels. */
EXPORT void gemm(const void *x, int64_t x_stride, const void *w, int64_t w_stride, const float *scales,
                 const void *bias, void *y, int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int64_t x_kind,
                 int64_t w_kind, int64_t limit, int64_t is_packed, product *products, float *packed, int64_t packed_stride,
                 int64_t rows_at_once, int64_t num_threads) {
  const weight matrix = {w, w_stride, num_inputs, (int)w_kind, scales, limit, (int)is_packed, products};
  const int kind = (int)x_kind;
  const int64_t size = size_of(kind);
  if (num_rows * num_outputs * num_inputs < SMALL_WORK) num_threads = 1;
  if (rows_at_once) {
    const int64_t num_blocks = ceil_div(num_rows, rows_at_once);
#pragma omp parallel num_threads(num_threads)
    {
      float *own = packed + omp_get_thread_num() * rows_at_once * packed_stride;
#pragma omp for schedule(dynamic)
      for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t first = block * rows_at_once, rows = min_i(rows_at_once, num_rows - first);
        const target out = {(char *)y + first * num_outputs * size, num_outputs, kind, bias};
        for (int64_t row = 0; row < rows; row++)
          pack(own + row * packed_stride, (const char *)x + (first + row) * x_stride * size, kind, matrix);
        multiply(own, packed_stride, rows, matrix, 0, num_outputs, out);
      }
    }
    return;
  }
  const target out = {y, num_outputs, kind, bias};
  const float *rows = packed ? packed : (const float *)x;
  const int64_t stride = packed ? packed_stride : x_stride;
  for (int64_t row = 0; packed && row < num_rows; row++)
    pack(packed + row * packed_stride, (const char *)x + row * x_stride * size, kind, matrix);
  const int64_t unit = is_packed ? OUTPUTS_AT_ONCE : 2 * OUTPUTS;
  const int64_t step =
      num_threads == 1 ? num_outputs : round_up(ceil_div(num_outputs, num_threads * CHUNKS_PER_THREAD), unit);
  const int64_t num_chunks = ceil_div(num_outputs, step);
  int64_t taken[num_threads];
  deal(taken, num_chunks, num_threads);
#pragma omp parallel num_threads(num_threads)
  {
    int64_t of = omp_get_thread_num();
    for (int64_t c; (c = next_chunk(taken, num_chunks, num_threads, &of)) < num_chunks;)
      multiply(rows, stride, num_rows, matrix, c * step, min_i((c + 1) * step, num_outputs), out);
  }
}
