/* Products with weights of bfloat16. */

#include "gemm/products.h"

PRODUCT(multiply_bfloat16, BFLOAT16)
