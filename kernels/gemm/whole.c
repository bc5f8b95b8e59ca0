/* Products of rows in whole numbers with weights of int8 codes. */

#include "gemm/products.h"

PRODUCT(multiply_whole, WHOLE)
