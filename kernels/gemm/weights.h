/* What a product multiplies and where it goes: what callers of products and products themselves know of each other.

   A product is a function of the library that there is for its kind of weight (products.h). Callers are given its address:
   it is compiled once for all of them, and only if something is of that kind. */

#ifndef HYBRIDSERVE_WEIGHTS_H
#define HYBRIDSERVE_WEIGHTS_H

#include "native.h"

#define BLOCK (2 * LANES)           /* inputs that dot.h multiplies at once */
#define OUTPUTS 3                   /* that it multiplies with */
#define PANEL (2 * LANES)           /* outputs that lie side by side, as panels.h has them */
#define OUTPUTS_AT_ONCE (4 * PANEL) /* that one row is multiplied with there */

/* Kinds of element of a weight only, beside native.h's; 2 is native_math.h's. */
enum { INT8 = 3, FLOAT8 = 4 /* e4m3fn */ };

/* Instead of a kind, where a constant chooses the code: int8, with rows in whole numbers. */
#define WHOLE (-1)

/* Where results go: y[row * stride + output], plus bias[output] if there is one. */
typedef struct {
  void *y;
  int64_t stride;
  int kind; /* of y and bias */
  const void *bias;
} target;

typedef struct weight weight;

/* Outputs first to end, of a weight in panels whole panels of them, of every row of x. That is packed for this weight, as
   rows.h does it, with rows x_stride floats apart. */
typedef void product(const float *x, int64_t x_stride, int64_t num_rows, const weight *w, int64_t first, int64_t end,
                     const target *out);

struct weight {
  const void *start;
  int64_t stride, num_inputs;
  int kind;
  const float *scales; /* of outputs, where elements are codes of one byte */
  int64_t limit;       /* of the whole numbers that rows of x are rounded to; 0: they are not */
  int is_packed;       /* in panels (panels.h), and stride means nothing */
  product *multiply;
};

/* Outputs first to end of every row of packed x. */
INLINE void multiply(const float *x, int64_t x_stride, int64_t num_rows, weight w, int64_t first, int64_t end,
                     target out) {
  w.multiply(x, x_stride, num_rows, &w, first, end, &out);
}

INLINE int64_t size_of(int kind) { return kind == FLOAT32 ? 4 : kind >= INT8 ? 1 : 2; }

/* Of a panel of all inputs. */
INLINE int64_t panel_bytes(weight w) { return w.num_inputs * PANEL * size_of(w.kind); }

EXPORT void panel_outputs(int64_t *num) { *num = PANEL; }

#endif
