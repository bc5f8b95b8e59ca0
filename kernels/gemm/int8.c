/* Products with weights of int8 codes, widened to float32: exact about rows. */

#include "gemm/products.h"

PRODUCT(multiply_int8, INT8)
