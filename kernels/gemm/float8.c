/* Products with weights of float8 (e4m3fn), widened to float32. */

#include "gemm/products.h"

PRODUCT(multiply_float8, FLOAT8)
