/* Products with weights of float32. */

#include "gemm/products.h"

PRODUCT(multiply_float32, FLOAT32)
